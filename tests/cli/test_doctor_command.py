"""`pagemill doctor`: findings on this machine and in a cluster, with remedies and exit codes."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from pagemill.main import app
from pagemill_crds import VERSION
from pagemill_crds.generate import adapter_definition, custom_resource_definition
from pagemill_operator.backends.local.state_dir import StateDir
from pagemill_protocol import metrics

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
OUR_CRD = f"{CRDS}/llmdeployments.pagemill.dev"
ADAPTER_CRD = f"{CRDS}/loraadapters.pagemill.dev"
POD_MONITORS = f"{CRDS}/podmonitors.monitoring.coreos.com"
DEPLOYMENTS = "/apis/apps/v1/deployments"
MONITORING = "/apis/monitoring.coreos.com/v1"
MY_REVIEW, REVIEW = (f"/apis/authorization.k8s.io/v1/{each}subjectaccessreviews" for each in ("self", ""))

Findings = dict[str, dict[str, str]]


def doctor(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def findings(*arguments: Any) -> tuple[int, Findings]:
    """Return the exit code, and the last finding on each subject."""
    result = doctor(*arguments, "-o", "json")
    found = json.loads(result.stdout)["findings"]
    assert all(each["remedy"] for each in found if each["level"] != "ok")
    return result.exit_code, {each["subject"]: each for each in found}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a machine without programs and processes; return the folder of its PATH and state."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def install(folder: Path, name: str, script: str = "") -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_missing_optional_program_is_a_note_with_its_remedy(machine: Path) -> None:
    result = doctor()
    assert result.exit_code == 0, result.output
    assert f"pagemill {version('pagemill')}" in result.stdout
    assert "-> install it: Debian: `apt-get install prometheus`" in result.stdout
    assert "-> start one with `pagemill up -f FILE`" in result.stdout
    assert result.stdout.splitlines()[-1] == "0 errors"


def test_installed_programs_are_named(machine: Path) -> None:
    install(machine, "prometheus")
    install(machine, "grafana-server")
    _, found = findings()
    assert (found["prometheus"]["level"], found["grafana"]["message"]) == ("ok", str(machine / "grafana-server"))


def test_the_driver_of_each_gpu_is_shown(machine: Path) -> None:
    install(machine, "nvidia-smi", "echo 'NVIDIA H100, 570.86.15'")
    assert findings()[1]["GPUs"]["message"] == "NVIDIA H100 driver 570.86.15"


def test_a_driver_that_does_not_work_is_an_error(machine: Path) -> None:
    install(machine, "nvidia-smi", "echo 'Driver/library version mismatch'; exit 9")
    code, found = findings()
    assert (code, found["GPUs"]["level"]) == (1, "error")
    assert "Driver/library version mismatch" in found["GPUs"]["message"]


def test_devices_without_a_driver_are_an_error(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    code, found = findings()
    assert (code, found["GPUs"]["message"]) == (1, "2 devices, but nvidia-smi is not on the PATH")


def engine_metrics(*, ready: bool = True, of_version: str = version("pagemill-engine")) -> str:
    made = metrics.Metrics(metrics.ENGINE_METRICS, model_name="tiny", engine="0")
    made.gauge(metrics.ENGINE_READY).set(ready)
    labels = dict.fromkeys(("weights_digest", "kv_dtype", "device", "compute", "ranks", "nodes"), "x")
    made.gauge(metrics.ENGINE_INFO, version=of_version, **labels).set(1)
    return made.render().decode()


def gateway_metrics(*, redis: float | None = None, keys: float = 1) -> str:
    made = metrics.Metrics(metrics.GATEWAY_METRICS)
    made.gauge(metrics.GATEWAY_READY).set(1)
    made.gauge(metrics.GATEWAY_KEYS_FILE_VALID).set(keys)
    text = made.render().decode()
    without = "\n".join(line for line in text.splitlines() if not line.startswith("pagemill_gateway_redis_up "))
    return f"{without}\n" if redis is None else text.replace("gateway_redis_up 0.0", f"gateway_redis_up {redis}")


def running(folder: Path, *targets: tuple[str, str]) -> StateDir:
    """Create the state of a `pagemill up` with these processes: address and pod; the gateway has no pod."""
    state = StateDir(folder)
    labels = [{"pod": pod, "variant": "default/sim"} if pod else {"job": "pagemill-gateway"} for _, pod in targets]
    state.write_targets([{"targets": [each[0]], "labels": label} for each, label in zip(targets, labels, strict=True)])
    return state


def test_engines_of_a_running_up_are_checked(machine: Path, answers: Any) -> None:
    answers.by_path["/metrics"] = engine_metrics()
    state = running(machine, (answers.address, "sim-0"), ("127.0.0.1:9", "sim-1"))
    code, found = findings()
    state.remove()
    assert code == 1
    assert found["sim-0"]["message"] == "ready, 0% of the KV cache used"
    assert "serves no metrics" in found["sim-1"]["message"]


def test_the_gateways_of_two_running_ups_are_distinguished(machine: Path, answers: Any) -> None:
    answers.by_path["/metrics"] = gateway_metrics()
    states = [running(machine, (answers.address, "")), running(machine, ("127.0.0.1:9", ""))]
    _, found = findings()
    for state in states:
        state.remove()
    assert found[f"gateway {answers.address}"]["message"] == "ready"
    assert found["gateway 127.0.0.1:9"]["level"] == "error"
    assert "gateway" not in found


@pytest.mark.parametrize("answers_now", [True, False])
def test_the_target_with_objectives_and_limits_is_checked(machine: Path, answers: Any, answers_now: bool) -> None:
    answers.by_path["/metrics"] = "pagemill_deployment_max_replicas 1\n"
    address = answers.address if answers_now else "127.0.0.1:9"
    state = StateDir(machine)
    state.write_targets([{"targets": [address], "labels": {"job": "pagemill-operator"}}])
    _, found = findings()
    state.remove()
    assert found[f"metrics of deployments {address}"]["level"] == ("ok" if answers_now else "error")


def test_an_engine_of_another_version_is_an_error(machine: Path, answers: Any) -> None:
    answers.by_path["/metrics"] = engine_metrics(of_version="0.0.9")
    state = running(machine, (answers.address, "sim-0"))
    code, found = findings()
    state.remove()
    message = f"has version 0.0.9, but this command has {version('pagemill-engine')}"
    assert (code, found["sim-0"]["message"]) == (1, message)


@pytest.mark.parametrize(("redis", "level"), [(None, "ok"), (1.0, "ok"), (0.0, "error")])
def test_the_gateways_redis_is_checked(machine: Path, answers: Any, redis: float | None, level: str) -> None:
    answers.by_path["/metrics"] = gateway_metrics(redis=redis)
    state = running(machine, (answers.address, ""))
    code, found = findings()
    state.remove()
    assert (code, found["Redis"]["level"], found["gateway"]["level"]) == (int(level == "error"), level, "ok")


def test_an_unusable_file_of_keys_is_an_error(machine: Path, answers: Any) -> None:
    answers.by_path["/metrics"] = gateway_metrics(keys=0)
    state = running(machine, (answers.address, ""))
    code, found = findings()
    state.remove()
    assert (code, found["API keys"]["level"]) == (1, "error")


def workload(name: str, ready: int = 2) -> dict[str, Any]:
    labels = {"app.kubernetes.io/version": version("pagemill")}
    spec = {"replicas": 2, "template": {"spec": {"serviceAccountName": "op"}}}
    metadata = {"namespace": "pm", "name": name, "labels": labels}
    return {"metadata": metadata, "spec": spec, "status": {"readyReplicas": ready}}


@pytest.fixture
def cluster(answers: Any) -> Any:
    """Return a cluster that has everything."""
    gpu_labels = {"nvidia.com/cuda.driver-version.full": "570.86.15"}
    sidecar = {"containers": [{"name": "grafana"}, {"name": "grafana-sc-dashboard"}]}
    allowed = {"status": {"allowed": True}}
    answers.by_path |= {
        "/version": {"gitVersion": "v1.33.1"},
        OUR_CRD: custom_resource_definition(),
        ADAPTER_CRD: adapter_definition(),
        MY_REVIEW: allowed,
        REVIEW: allowed,
        "/api/v1/nodes": {
            "items": [{"metadata": {"labels": gpu_labels}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}}]
        },
        DEPLOYMENTS: {"items": [workload("pagemill-operator")]},
        "/apis/apps/v1/statefulsets": {"items": [workload("pagemill-redis")]},
        POD_MONITORS: {},
        f"{MONITORING}/prometheuses": {"items": [{}]},
        f"{MONITORING}/prometheusrules": {"items": [{}]},
        "/api/v1/pods": {"items": [{"spec": sidecar}]},
        "/api/v1/configmaps": {"items": [{"metadata": {"name": "pagemill-dashboard-fleet"}}]},
    }
    return answers


def test_a_complete_cluster_has_no_remedies(cluster: Any, kubeconfig: Path) -> None:
    result = doctor("--kubeconfig", kubeconfig)
    assert result.exit_code == 0, result.output
    assert "->" not in result.stdout, result.stdout
    assert "8 on 1 of 1 nodes, driver 570.86.15" in result.stdout
    assert "v1.33.1, context here" in result.stdout


@pytest.mark.parametrize(
    ("missing", "subject", "level"),
    [
        (OUR_CRD, "CRD", "error"),
        (DEPLOYMENTS, "operator, gateway", "note"),
        (POD_MONITORS, "Prometheus", "note"),
        ("/api/v1/nodes", "GPUs", "note"),
    ],
)
def test_missing_parts_of_a_cluster_are_reported(
    cluster: Any, kubeconfig: Path, missing: str, subject: str, level: str
) -> None:
    del cluster.by_path[missing]
    code, found = findings("--kubeconfig", kubeconfig)
    assert (code, found[subject]["level"]) == (int(level == "error"), level)


@pytest.mark.parametrize(
    ("path", "subject", "level", "words"),
    [
        (DEPLOYMENTS, "gateway", "error", "is not installed"),
        (f"{MONITORING}/prometheusrules", "Prometheus", "note", "rules and alerts are not installed"),
        (f"{MONITORING}/prometheuses", "Prometheus", "note", "no Prometheus object"),
        ("/api/v1/configmaps", "Grafana", "note", "dashboards are not installed"),
        ("/api/v1/pods", "Grafana", "note", "no pods of its chart"),
        ("/api/v1/nodes", "GPUs", "note", "none of 0 nodes offers"),
    ],
)
def test_empty_lists_are_explained(
    cluster: Any, kubeconfig: Path, path: str, subject: str, level: str, words: str
) -> None:
    cluster.by_path[path] = {"items": []}
    code, found = findings("--kubeconfig", kubeconfig)
    assert (code, found[subject]["level"]) == (int(level == "error"), level)
    assert words in found[subject]["message"]


def test_grafana_without_a_sidecar_is_reported(cluster: Any, kubeconfig: Path) -> None:
    cluster.by_path["/api/v1/pods"] = {"items": [{"spec": {"containers": [{"name": "grafana"}]}}]}
    _, found = findings("--kubeconfig", kubeconfig)
    assert "sidecar.dashboards.enabled" in found["Grafana"]["remedy"]


def test_a_crd_of_another_version_is_reported(cluster: Any, kubeconfig: Path) -> None:
    older = custom_resource_definition()
    for each in older["spec"]["versions"]:
        del each["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["cost"]
    cluster.by_path[OUR_CRD] = older
    code, found = findings("--kubeconfig", kubeconfig)
    assert code == 1
    assert "it lacks spec.cost, spec.cost.gpuHour" in found["CRD"]["message"]


def test_a_missing_crd_of_adapters_is_reported(cluster: Any, kubeconfig: Path) -> None:
    del cluster.by_path[ADAPTER_CRD]
    code, found = findings("--kubeconfig", kubeconfig)
    assert (code, found["CRD"]["message"]) == (1, "loraadapters.pagemill.dev is not installed")


def test_a_crd_without_the_version_of_the_manifests_is_reported(cluster: Any, kubeconfig: Path) -> None:
    older = custom_resource_definition()
    older["spec"]["versions"] = [{**each, "name": "v1alpha1"} for each in older["spec"]["versions"]]
    cluster.by_path[OUR_CRD] = older
    code, found = findings("--kubeconfig", kubeconfig)
    assert code == 1
    assert f"it lacks the version {VERSION}" in found["CRD"]["message"]


def test_replicas_that_are_not_ready_are_an_error(cluster: Any, kubeconfig: Path) -> None:
    cluster.by_path[DEPLOYMENTS] = {"items": [workload("pagemill-gateway", ready=1)]}
    code, found = findings("--kubeconfig", kubeconfig)
    assert (code, found["gateway"]["message"]) == (1, "pm/pagemill-gateway has 1 of 2 replicas ready")


def test_missing_rights_are_named(cluster: Any, kubeconfig: Path) -> None:
    cluster.by_path[REVIEW] = {"status": {"allowed": False}}
    _, found = findings("--kubeconfig", kubeconfig)
    assert "system:serviceaccount:pm:op may not watch llmdeployments" in found["RBAC"]["message"]


def test_objects_that_the_user_may_not_read_are_a_note(cluster: Any, kubeconfig: Path) -> None:
    cluster.statuses["/api/v1/nodes"] = 403
    code, found = findings("--kubeconfig", kubeconfig)
    assert (code, found["GPUs"]["level"]) == (0, "note")
    assert "could not be checked: 403" in found["GPUs"]["message"]


def test_an_unreachable_cluster_has_its_own_exit_code(answers: Any, kubeconfig: Path) -> None:
    kubeconfig.write_text(kubeconfig.read_text().replace(answers.address, "127.0.0.1:9"))
    result = doctor("--kubeconfig", kubeconfig)
    assert result.exit_code == 2
    assert "the API server of context here cannot be reached" in result.stderr
