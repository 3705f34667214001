"""Measurements of durations on this machine; each one is printed as a JSON line and stored in the artifacts."""

from __future__ import annotations

import time
from pathlib import Path

import openai
import pytest
from support.clusters import OneNode
from support.deployments import deploy
from support.kubectl import Kubectl
from support.load import Service, running_load
from support.measures import Measures
from support.objects import llmdeployment
from support.phases import of_new_pod
from support.release import Release, Releases
from support.waiting import until

pytestmark = pytest.mark.measure


def test_install(releases: Releases, measures: Measures) -> None:
    """From `helm install` to every pod of the release ready."""
    releases.close()
    started_s = time.monotonic()
    releases.shared()
    measures.record("helm install", ready_s=time.monotonic() - started_s)


def test_apply_to_first_token_cold_and_warm(
    one_node: OneNode, release: Release, space: Kubectl, measures: Measures
) -> None:
    """Cold: the image is on the node but not in memory. Warm: the same deployment is applied again."""
    service = release.service("timed")
    for temperature in ("cold", "warm"):
        if temperature == "cold":
            Path("/proc/sys/vm/drop_caches").write_text("3")
        started_s = time.monotonic()
        chat = deploy(space, llmdeployment("timed"))
        until("the first token has arrived", lambda: _first_token(service), timeout_s=240)
        first_token_s = time.monotonic() - started_s
        chat.wait_ready(1)
        measures.record(
            f"apply to first token, {temperature}", first_token_s=first_token_s, ready_s=time.monotonic() - started_s
        )
        chat.delete()


def test_scale_up_by_phase(one_node: OneNode, release: Release, space: Kubectl, measures: Measures) -> None:
    chat = deploy(space, llmdeployment("timed"))
    chat.wait_ready(1)
    known = {pod["metadata"]["uid"] for pod in chat.pods()}
    started_s = time.monotonic()
    chat.scale(2)
    measures.record("scale-up from 1 to 2, by phase", **of_new_pod(chat, known, started_s))
    chat.wait_ready(2)


def test_rolling_update(release: Release, space: Kubectl, measures: Measures) -> None:
    chat = deploy(space, llmdeployment("timed", replicas=2))
    chat.wait_ready(2)
    old = chat.pods()
    with running_load(release.service("timed"), workers=2) as load:
        started_s = time.monotonic()
        chat.patch(engine={"maxNumSeqs": 6})
        chat.wait_rolled_out(old)
        total_s = time.monotonic() - started_s
    report = load.report()
    report.assert_all_complete(at_least=10)
    measures.record("rolling update of 2 replicas under load", total_s=total_s, requests=report.complete, failed=0)


def _first_token(service: Service) -> bool:
    try:
        return service.ask(max_tokens=1) != ""
    except openai.APIError:
        return False
