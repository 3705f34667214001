"""`helm uninstall` while LLMDeployments exist, also when no operator runs: it ends and reports what remains."""

from __future__ import annotations

import time
from collections.abc import Iterator

import openai
import pytest
from support.deployments import Deployed, deploy, wait_no_children
from support.kubectl import Kubectl
from support.objects import llmdeployment
from support.release import SHARED_NAME, SHARED_NAMESPACE, Release, Releases
from support.waiting import until

LIMIT_S = 60.0
DEFINITION = "crd/llmdeployments.pagemill.dev"


@pytest.fixture
def own(releases: Releases) -> Iterator[Release]:
    """Install a release that the case may remove; the next case gets a new shared release."""
    with releases.absent():
        release = releases.new(SHARED_NAME, SHARED_NAMESPACE)
        release.install()
        yield release
        release.remove()


def _kill_operator(release: Release) -> None:
    """Remove all operator pods permanently."""
    kubectl = release.cluster.kubectl.within(release.namespace)
    kubectl.ok("scale", f"deployment/{release.name}-operator", "--replicas=0")
    for pod in release.pods("operator"):
        kubectl.run("delete", f"pod/{pod['metadata']['name']}", "--force", "--grace-period=0", "--ignore-not-found")
    until("no operator is left", lambda: release.pods("operator") == [], timeout_s=30)


def _seconds(work: str, started: float) -> float:
    seconds = time.monotonic() - started
    print(f"{work}: {seconds:.1f} s")
    return seconds


def test_uninstall_without_an_operator_ends_and_engines_keep_running(own: Release, space: Kubectl) -> None:
    chat = deploy(space, llmdeployment("chat"))
    chat.wait_ready(1)
    before = _uids(chat)
    _kill_operator(own)
    started = time.monotonic()
    own.uninstall()
    assert _seconds("uninstall", started) < LIMIT_S
    assert own.cluster.kubectl.ok("get", DEFINITION, "-o", "name").strip()
    assert _uids(chat) == before, "engines were removed with the release"
    own.install()
    chat.wait_ready(1)
    assert "Paris" in until("the model answers again", lambda: _answer(own), timeout_s=150, interval_s=1)
    assert _uids(chat) == before, "the next release restarted an engine"


def test_deployments_can_be_deleted_when_no_operator_runs(own: Release, space: Kubectl) -> None:
    chat = deploy(space, llmdeployment("chat"))
    chat.wait_ready(1)
    _kill_operator(own)
    own.uninstall()
    started = time.monotonic()
    space.delete("llmd/chat", timeout_s=LIMIT_S)
    wait_no_children(space, timeout_s=LIMIT_S)
    assert _seconds("deletion without an operator", started) < LIMIT_S


def test_deleting_the_definition_deletes_deployments_and_their_children(own: Release, space: Kubectl) -> None:
    """With `crds.keep: false`, the deployments are deleted with the CRD, and their children with them."""
    own.install(values={"crds": {"keep": False}})
    chat = deploy(space, llmdeployment("chat"))
    chat.wait_ready(1)
    _kill_operator(own)
    started = time.monotonic()
    own.uninstall()
    wait_no_children(space, timeout_s=LIMIT_S)
    assert _seconds("uninstall with the definition", started) < LIMIT_S
    assert own.cluster.kubectl.run("get", DEFINITION).returncode != 0
    own.install()


def _uids(deployed: Deployed) -> set[str]:
    return {pod["metadata"]["uid"] for pod in deployed.pods()}


def _answer(release: Release) -> str:
    """Return an answer, or "" if engines do not have the new keys yet."""
    try:
        return release.service("chat").ask("What is the capital of France?")
    except openai.OpenAIError:
        return ""
