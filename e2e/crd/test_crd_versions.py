"""Two versions of one resource on a real API server: both can be read and written, rolled back, and migrated in etcd.

Each test has an API server of its own because it changes the CRD.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.clusters import api_server
from support.kubectl import Kubectl
from support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
RESOURCE = "llmdeployments.pagemill.dev"
STORED, NEWEST = "v1alpha1", "v1beta1"
MIGRATE = "kubectl get llmdeployments.pagemill.dev --all-namespaces --output json | kubectl replace --filename -"
"""The command of docs/how-to/upgrade.md."""
API_RESOURCES = ("api-resources", "--api-group=pagemill.dev")
Definition = dict[str, Any]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Kubectl]:
    with api_server(tmp_path / "api-server") as kubectl:
        define(kubectl, today())
        yield kubectl


def today() -> Definition:
    definition: Definition = yaml.safe_load((ROOT / "crds" / "llmdeployments.yaml").read_text())
    return definition


def define(kubectl: Kubectl, definition: Definition) -> None:
    """Replace the whole definition, as Helm does."""
    kubectl.ok("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=definition)
    names = [each["name"] for each in definition["spec"]["versions"]]
    until("the API server serves these versions", lambda: served(kubectl) == set(names), timeout_s=30)
    # The command refreshes what a plain `kubectl get` does not: the version in which objects are shown by default.
    until("kubectl knows the newest version", lambda: names[0] in kubectl.ok(*API_RESOURCES), timeout_s=30)


def served(kubectl: Kubectl) -> set[str]:
    done = kubectl.run("get", "--raw", "/apis/pagemill.dev")
    return {each["version"] for each in json.loads(done.stdout)["versions"]} if done.returncode == 0 else set()


def only(*names: str, stored: str) -> Definition:
    definition = copy.deepcopy(today())
    versions = [each for each in definition["spec"]["versions"] if each["name"] in names]
    definition["spec"]["versions"] = [{**each, "storage": each["name"] == stored} for each in versions]
    return definition


def document(name: str, version: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": f"pagemill.dev/{version}",
        "kind": "LLMDeployment",
        "metadata": {"name": name},
        "spec": {"model": {"source": "hf://org/name"}, **spec},
    }


def read(kubectl: Kubectl, name: str, version: str) -> dict[str, Any]:
    found: dict[str, Any] = kubectl.json("get", f"llmdeployments.{version}.pagemill.dev", name)
    return found


def stored_versions(kubectl: Kubectl) -> list[str]:
    versions: list[str] = kubectl.json("get", "crd", RESOURCE)["status"]["storedVersions"]
    return versions


def test_an_object_written_in_one_version_can_be_read_in_the_other(own: Kubectl) -> None:
    for written, name in ((STORED, "old"), (NEWEST, "new")):
        own.ok("create", "--validate=strict", "-f", "-", stdin=document(name, written, replicas=2))
        both = [read(own, name, version) for version in (STORED, NEWEST)]
        assert [each["apiVersion"] for each in both] == [f"pagemill.dev/{version}" for version in (STORED, NEWEST)]
        assert both[0]["spec"] == both[1]["spec"]
        assert both[0]["metadata"]["generation"] == both[1]["metadata"]["generation"] == 1
    own.ok("patch", f"llmdeployments.{NEWEST}.pagemill.dev/old", "--type=merge", "-p", '{"spec":{"replicas":3}}')
    assert read(own, "old", STORED)["spec"]["replicas"] == 3
    assert {item["apiVersion"] for item in own.items("llmd")} == {f"pagemill.dev/{NEWEST}"}
    assert stored_versions(own) == [STORED]


def test_an_applied_manifest_keeps_its_owner_when_its_version_changes(own: Kubectl) -> None:
    apply = ("apply", "--server-side", "--field-manager=user", "-f", "-")
    own.ok(*apply, stdin=document("chat", STORED, replicas=2, cost={"gpuHour": 1}))
    own.ok(*apply, stdin=document("chat", NEWEST, replicas=2))
    found = read(own, "chat", NEWEST)
    assert "cost" not in found["spec"], "a field that the manifest no longer has must be removed"
    assert found["metadata"]["generation"] == 2


def test_a_rollback_to_the_definition_of_the_last_release_keeps_all_objects(own: Kubectl) -> None:
    """A rollback restores the old definition; it is refused if an object may be stored in the removed version."""
    own.ok("create", "-f", "-", stdin=document("chat", NEWEST, replicas=2))
    define(own, only(STORED, stored=STORED))
    assert own.json("get", "llmd", "chat")["apiVersion"] == f"pagemill.dev/{STORED}"
    own.ok("patch", "llmd/chat", "--type=merge", "-p", '{"spec":{"replicas":4}}')
    define(own, today())
    assert read(own, "chat", NEWEST)["spec"]["replicas"] == 4


def test_the_documented_command_migrates_objects_to_another_stored_version(own: Kubectl) -> None:
    assert MIGRATE in (ROOT / "docs" / "how-to" / "upgrade.md").read_text()
    own.ok("create", "-f", "-", stdin=document("chat", STORED, replicas=2))
    define(own, only(STORED, NEWEST, stored=NEWEST))
    assert stored_versions(own) == [STORED, NEWEST]
    refused = own.run("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=only(NEWEST, stored=NEWEST))
    assert "status.storedVersions[0]: Invalid value" in refused.stderr, "objects may still be stored in the old version"
    before = read(own, "chat", NEWEST)

    def write_again() -> bool:
        own.ok("replace", "-f", "-", stdin=own.ok("get", RESOURCE, "--all-namespaces", "--output", "json"))
        return bool(read(own, "chat", NEWEST)["metadata"]["resourceVersion"] != before["metadata"]["resourceVersion"])

    # The server takes a moment to use its new definition; until then, a write changes nothing.
    until("the object is stored anew", write_again, timeout_s=30)
    after = read(own, "chat", NEWEST)
    assert (after["metadata"]["generation"], after["spec"]) == (before["metadata"]["generation"], before["spec"])
    patch = '{"status":{"storedVersions":["v1beta1"]}}'
    own.ok("patch", "crd", RESOURCE, "--subresource=status", "--type=merge", "-p", patch)
    define(own, only(NEWEST, stored=NEWEST))
    assert read(own, "chat", NEWEST)["spec"] == before["spec"]
