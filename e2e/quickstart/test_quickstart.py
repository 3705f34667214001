"""The steps of the first page of the documentation on a cluster without Pagemill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.deployments import Deployed, wait_no_children
from support.kubectl import Kubectl
from support.release import KEYS_SECRET, Release, Releases
from support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "llmdeployment.yaml"
PLUGIN_LIMIT_S = 120
LEFT_ON_PURPOSE = {
    "customresourcedefinition.apiextensions.k8s.io/llmdeployments.pagemill.dev",
    "customresourcedefinition.apiextensions.k8s.io/loraadapters.pagemill.dev",
    "secret/pagemill-keys",
    "lease.coordination.k8s.io/pagemill-operator",
}
NOT_OURS = {f"secret/{KEYS_SECRET}", "serviceaccount/default", "configmap/kube-root-ca.crt"}
"""Objects in the release's namespace that Helm does not own: the user's API keys, and what every namespace has."""
NAMESPACED = (
    "all,secrets,configmaps,serviceaccounts,roles,rolebindings,networkpolicies,poddisruptionbudgets,leases,"
    "endpointslices,persistentvolumeclaims"
)
RELEASED = (
    f"{NAMESPACED},clusterroles,clusterrolebindings,customresourcedefinitions,validatingadmissionpolicies,"
    "validatingadmissionpolicybindings"
)


@pytest.mark.smoke
def test_from_helm_install_to_an_answer_and_back_to_nothing(releases: Releases, space: Kubectl, tmp_path: Path) -> None:
    release = releases.fresh()
    release.helm("test", release.name)  # Without a model the gateway answers, and refuses requests without a key.

    space.ok("apply", "-f", str(EXAMPLE))
    smollm2 = Deployed(space, "smollm2")
    smollm2.wait_ready(2)
    asked = release.helm("test", release.name, "--logs")
    assert "ok: smollm2 answered" in asked

    service = release.service("smollm2")
    assert service.models() == ["smollm2"]
    assert "Paris" in service.ask("What is the capital of France?")
    header, row = space.ok("get", "llmd", "smollm2").splitlines()
    assert header.split() == ["NAME", "MODEL", "READY", "DESIRED", "KV%", "QUEUE", "REASON", "AGE"]
    assert row.split()[:4] == ["smollm2", "smollm2", "2", "2"]
    _use_the_plugin(space, release, tmp_path)

    smollm2.delete()
    wait_no_children(space)
    assert service.models() == []
    release.uninstall()
    until("the pods' objects are deleted", lambda: _left(release) <= LEFT_ON_PURPOSE | NOT_OURS, timeout_s=60)
    assert _left(release) - NOT_OURS == LEFT_ON_PURPOSE, (
        "an object remains that docs/how-to/install-with-helm.md does not name"
    )
    releases.close()


def _use_the_plugin(space: Kubectl, release: Release, folder: Path) -> None:
    """Run each command of `kubectl pagemill` as a user with this cluster's kubeconfig does."""
    config = folder / "kubeconfig"
    config.write_text(space.ok("config", "view", "--minify", "--flatten", "--raw"))
    path = [str(ROOT / "cli"), str(Path(sys.executable).parent), str(Path(space.binary).parent), os.environ["PATH"]]
    variables = {"PAGEMILL_API_KEY": release.api_key, "PAGEMILL_NAMESPACE": release.namespace}
    environment = os.environ | {"KUBECONFIG": str(config), "PATH": ":".join(path)} | variables

    def plugin(*arguments: str, returns: int = 0) -> str:
        argv = [space.binary, "pagemill", *arguments]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=PLUGIN_LIMIT_S)
        assert done.returncode == returns, f"{' '.join(argv)}: {done.stderr}{done.stdout[-2000:]}"
        return done.stdout + done.stderr

    assert "Paris" in plugin("chat", "--model", "smollm2", "--temperature", "0", "What is the capital of France?")
    assert plugin("top", "--once").count("smollm2-") >= 2, "top shows each of the two engines"
    assert "has no spec.autoscaling" in plugin("why", "smollm2", "--namespace", space.namespace, returns=2)
    assert "llmdeployments.pagemill.dev" in plugin("doctor")


def _left(release: Release) -> set[str]:
    """Return all objects that still have the release's label, in any namespace, and all objects of its namespace."""
    kubectl = release.cluster.kubectl
    selector = f"app.kubernetes.io/instance={release.name}"
    labelled = kubectl.ok("get", RELEASED, "--all-namespaces", "--selector", selector, "-o", "name")
    beside = kubectl.within(release.namespace).ok("get", NAMESPACED, "-o", "name")
    return {*labelled.split(), *beside.split()}
