"""Time from apply to Ready for a model in a bucket: first with an empty cache on the node, then from that cache."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support import model_servers
from support.deployments import deploy
from support.kubectl import Kubectl
from support.measures import Measures
from support.model_servers import Bucket
from support.release import Release

pytestmark = pytest.mark.measure
ROUNDS = 3
FAR_BYTES_PER_S = 5e6
"""Bytes per second of each of the four connections to a simulated distant store."""


@pytest.mark.parametrize(("store", "bytes_per_s"), [("near", float("inf")), ("far", FAR_BYTES_PER_S)])
def test_apply_to_ready_with_a_cold_and_a_warm_node_cache(
    release: Release,
    privileged: Kubectl,
    bucket: Bucket,
    node_folder: Path,
    measures: Measures,
    store: str,
    bytes_per_s: float,
) -> None:
    bucket.proxy.bytes_per_s = bytes_per_s
    for number in range(ROUNDS):
        cache = {"hostPath": str(model_servers.node_folder(node_folder / str(number)))}
        for temperature in ("cold", "warm"):
            before = bucket.proxy.sent_bytes
            started_s = time.monotonic()
            chat = deploy(privileged, bucket.deployment("timed", cache))
            chat.wait_ready(1)
            measures.record(
                f"apply to Ready, {store} bucket, {temperature} node cache, round {number + 1}",
                ready_s=time.monotonic() - started_s,
                fetched_mib=(bucket.proxy.sent_bytes - before) / 2**20,
            )
            chat.delete()
