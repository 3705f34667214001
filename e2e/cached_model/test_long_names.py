"""The longest names: generated names of Jobs and pods are cut, and faults of their containers are still seen."""

from __future__ import annotations

import pytest
from support import hubs
from support.deployments import deploy
from support.kubectl import Kubectl
from support.objects import secret
from support.release import Release

LONGEST = 48


@pytest.mark.parametrize("length", [44, LONGEST])
def test_a_fault_of_the_loader_of_a_long_name_is_seen_and_mended(release: Release, space: Kubectl, length: int) -> None:
    name = "a-long-name-".ljust(length, "x")
    endpoint = hubs.start(space, release.image_tag)
    space.apply(secret(hubs.CREDENTIALS, token="hf_wrong"))
    chat = deploy(space, hubs.cached(name, endpoint))
    refusal = chat.wait_reason("Ready", "Unauthorized", 120)
    assert "spec.model.credentialsSecretRef" in refusal["message"]
    space.apply(secret(hubs.CREDENTIALS, token=hubs.TOKEN))
    chat.wait_ready(1)
    assert release.service(name).ask()
    assert len(chat.pods()) == 1
    chat.delete()
