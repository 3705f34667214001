"""The source of a model in pods: the loader's arguments, credentials, volumes, and open ports."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import kubernetes_validate
import pytest

from pagemill_crds.models import LLMDeployment
from pagemill_operator.backends.kubernetes.render import render_children
from pagemill_operator.backends.kubernetes.snapshot import Manifest, Owner, RenderContext
from pagemill_operator.plan import make_plan
from pagemill_operator.status.conditions import find_conditions
from pagemill_operator.status.observation import Observation

Make = Callable[..., LLMDeployment]
CONTEXT = RenderContext(namespace="pagemill-system", engine_image="engine:1", image_pull_secrets=("own",))
SECRET = {"model__credentialsSecretRef": {"name": "bucket"}}


def render(deployment: LLMDeployment, *, loader_done: bool = True, **context: Any) -> dict[str, Manifest]:
    plan = make_plan(deployment, "kubernetes")
    assert plan.problems == ()
    given = replace(CONTEXT, loader_done=loader_done, **context)
    children = render_children(plan, Owner(plan.namespace, plan.name, "u"), given)
    return {manifest["kind"]: manifest for manifest in children}


def pod(manifests: dict[str, Manifest], kind: str = "Deployment") -> dict[str, Any]:
    spec: dict[str, Any] = manifests[kind]["spec"]["template"]["spec"]
    return spec


def variables(container: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value") or each["valueFrom"]["secretKeyRef"] for each in container["env"]}


def test_credentials_of_a_bucket_come_from_the_secret_by_their_own_names(deployment: Make) -> None:
    changes = {"model__source": "s3://models/tiny", "model__cache": {"size": "1Gi"}, **SECRET}
    loader = pod(render(deployment(**changes)), "Job")["containers"][0]
    given = variables(loader)
    assert given["AWS_ACCESS_KEY_ID"] == {"name": "bucket", "key": "AWS_ACCESS_KEY_ID"}
    assert given["AWS_SECRET_ACCESS_KEY"] == {"name": "bucket", "key": "AWS_SECRET_ACCESS_KEY"}
    assert given["AWS_SESSION_TOKEN"]["optional"] is True
    assert loader["args"][:2] == ["--source", "s3://models/tiny"]


@pytest.mark.parametrize(
    ("source", "variable", "key"),
    [
        ("gs://models/tiny", "GOOGLE_SERVICE_ACCOUNT_KEY", "token"),
        ("oci://host/team/m:v1", "DOCKER_AUTH_CONFIG", ".dockerconfigjson"),
        ("org/name", "HF_TOKEN", "token"),
    ],
)
def test_each_kind_of_source_declares_the_variables_of_its_credentials(
    deployment: Make, source: str, variable: str, key: str
) -> None:
    manifests = render(deployment(**SECRET, model__source=source, model__cache={"size": "1Gi"}))
    assert variables(pod(manifests, "Job")["containers"][0])[variable] == {"name": "bucket", "key": key}
    assert "bucket" not in str(pod(manifests))


DRAFTS = {"engine__speculative": {"method": "eagle3", "source": "org/head"}}


def settings_of(manifests: dict[str, Manifest]) -> Any:
    return json.loads(manifests["ConfigMap"]["data"]["settings.json"])["engine"]


def test_a_loader_fetches_what_drafts_too(deployment: Make) -> None:
    """With the credentials of both, under a name of its own; engines open the folder."""
    changes = {**SECRET, "model__source": "s3://models/tiny", "model__cache": {"size": "1Gi"}}
    plain, drafting = (render(deployment(**changes, **each)) for each in ({}, DRAFTS))
    arguments = pod(drafting, "Job")["containers"][0]["args"]
    assert arguments[:4] == [*pod(plain, "Job")["containers"][0]["args"][:4]]
    assert arguments[4:7] == ["--source", "hf://org/head", "--target"]
    assert settings_of(drafting)["speculative"]["source"] == f"file://{arguments[7]}"
    assert plain["Job"]["metadata"]["name"] != drafting["Job"]["metadata"]["name"]
    given = variables(pod(drafting, "Job")["containers"][0])
    assert {"AWS_ACCESS_KEY_ID", "HF_TOKEN"} <= given.keys()
    assert "HF_TOKEN" not in variables(pod(plain, "Job")["containers"][0])


def test_engines_without_a_loader_reach_what_drafts(deployment: Make) -> None:
    claim = {"model__source": "pvc://models/large"}
    plain, drafting = (render(deployment(**claim, **each)) for each in ({}, DRAFTS))
    assert settings_of(drafting)["speculative"]["source"] == "hf://org/head"
    opened = [str(each["NetworkPolicy"]["spec"]["egress"]).count("443") for each in (plain, drafting)]
    assert opened[0] < opened[1]
    beside = {"engine__speculative": {"method": "draft", "source": "pvc://models/small"}}
    assert settings_of(render(deployment(**claim, **beside)))["speculative"]["source"].endswith("/small")


@pytest.mark.parametrize(
    ("source", "model", "message"),
    [
        ("ftp://a/b", {}, "ftp"),
        (
            "pvc://other/small",
            {"model__source": "pvc://models/large"},
            "only the claim of spec.model.source is mounted",
        ),
        ("pvc://models/small", {}, "only the claim of spec.model.source is mounted"),
    ],
)
def test_a_source_of_what_drafts_that_pods_cannot_open_is_a_problem(
    deployment: Make, source: str, model: dict[str, Any], message: str
) -> None:
    drafts = {"engine__speculative": {"method": "draft", "source": source}}
    (problem,) = make_plan(deployment(**model, **drafts), "kubernetes").problems
    assert problem.field == "spec.engine.speculative.source"
    assert message in problem.message


def test_a_bare_name_is_planned_as_a_source_of_the_hub(deployment: Make) -> None:
    plan = make_plan(deployment(model__source="facebook/opt-125m", model__revision="v1"), "kubernetes")
    assert plan.source == "hf://facebook/opt-125m@v1"


def test_a_folder_of_the_node_is_filled_by_the_pods(deployment: Make) -> None:
    cache = {"hostPath": "/var/lib/models", "sizeLimit": "200Gi"}
    manifests = render(deployment(**SECRET, model__source="s3://models/tiny", model__cache=cache), loader_done=False)
    assert {"Job", "PersistentVolumeClaim"}.isdisjoint(manifests)
    spec = pod(manifests)
    (loader,) = spec["initContainers"]
    assert "--evict" in loader["args"]
    assert loader["args"][-2:] == ["--size-limit-bytes", str(200 * 2**30)]
    assert "AWS_SECRET_ACCESS_KEY" in variables(loader)
    (engine,) = spec["containers"]
    assert "bucket" not in str(engine)
    assert "affinity" not in spec, "every node has a folder of its own"
    (volume,) = [each for each in spec["volumes"] if each["name"] == "model"]
    assert volume["hostPath"] == {"path": "/var/lib/models", "type": "DirectoryOrCreate"}
    mounts = {each["name"]: each for each in engine["volumeMounts"]}
    assert mounts["model"]["readOnly"] is True
    kubernetes_validate.validate(manifests["Deployment"], "1.33", strict=True)


def test_an_image_is_a_volume_that_the_kubelet_pulls(deployment: Make) -> None:
    changes = {"model__source": "oci://host:5000/team/m:v1", "model__cache": {"imageVolume": True}}
    manifests = render(deployment(**SECRET, **changes), loader_done=False)
    spec = pod(manifests)
    assert {"Job", "PersistentVolumeClaim"}.isdisjoint(manifests)
    assert "initContainers" not in spec
    (volume,) = [each for each in spec["volumes"] if each["name"] == "model"]
    assert volume["image"] == {"reference": "host:5000/team/m:v1", "pullPolicy": "IfNotPresent"}
    assert [each["name"] for each in spec["imagePullSecrets"]] == ["own", "bucket"]
    assert '"model":"file:///models"' in str(manifests["ConfigMap"]["data"]).replace(" ", "")
    kubernetes_validate.validate(manifests["Deployment"], "1.33", strict=True)


@pytest.mark.parametrize(
    ("source", "environment", "ports"),
    [
        ("oci://registry:5000/team/m:v1", {}, {443, 5000}),
        ("s3://models/tiny", {"AWS_ENDPOINT_URL": "http://minio.storage:9000"}, {443, 9000}),
        ("gs://models/tiny", {"AWS_ENDPOINT_URL": "http://minio.storage:9000"}, {443}),
        ("hf://org/name", {"HTTPS_PROXY": "proxy:3128"}, {443, 3128}),
    ],
)
def test_pods_may_reach_the_ports_of_their_source(
    deployment: Make, source: str, environment: dict[str, str], ports: set[int]
) -> None:
    env = [{"name": name, "value": value} for name, value in environment.items()]
    template = {"spec": {"containers": [{"name": "engine", "env": env}]}}
    for given in ({"engine__env": env}, {"template": template}):
        rules = render(deployment(model__source=source, **given))["NetworkPolicy"]["spec"]["egress"]
        assert {port["port"] for rule in rules for port in rule["ports"] if "port" in port} - {53, 5353} == ports


@pytest.mark.parametrize(
    ("source", "environment", "namespaces"),
    [
        ("hf://org/name", {}, set()),
        ("hf://org/name", {"HF_ENDPOINT": "https://mirror.example.org/hub"}, set()),
        ("hf://org/name", {"HF_ENDPOINT": "http://mirror.tools.svc.cluster.local"}, {"tools"}),
        ("hf://org/name", {"HF_ENDPOINT": "http://mirror"}, {"default"}),
        ("hf://org/name", {"HTTPS_PROXY": "proxy.net:3128"}, {"net"}),
        ("hf://org/name", {"HTTPS_PROXY": "http://10.0.0.1:3128"}, set()),
        ("hf://org/name", {"HTTPS_PROXY": "http://[broken"}, set()),
        ("oci://registry:5000/team/m:v1", {}, {"default"}),
        ("s3://models/tiny", {"AWS_ENDPOINT_URL": "http://minio.storage:9000"}, {"storage"}),
    ],
)
def test_pods_may_reach_the_pods_behind_a_service_of_their_source(
    deployment: Make, source: str, environment: dict[str, str], namespaces: set[str]
) -> None:
    """A policy compares the pods' ports, such as 8080 behind 80, so the ports of the namespace are open."""
    env = [{"name": name, "value": value} for name, value in environment.items()]
    manifests = render(deployment(model__source=source, engine__env=env))
    peers = [peer for rule in manifests["NetworkPolicy"]["spec"]["egress"] for peer in rule.get("to", [])]
    named = [peer["namespaceSelector"]["matchLabels"] for peer in peers if "namespaceSelector" in peer]
    assert {each["kubernetes.io/metadata.name"] for each in named} == namespaces


def test_a_loader_runs_where_engines_with_gpus_can_and_asks_for_none(deployment: Make) -> None:
    """The volume of its claim may be made where it runs."""
    claims = [{"name": "net", "resourceClaimName": "net"}, {"name": "gpu", "resourceClaimTemplateName": "gpus"}]
    template = {"spec": {"resourceClaims": claims}}
    changes = {"model__source": "s3://models/tiny", "model__cache": {"size": "1Gi"}, "template": template}
    loader = pod(render(deployment(resources={"gpus": 1}, **changes)), "Job")
    terms = loader["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    labels = [term["preference"]["matchExpressions"][0]["key"] for term in terms]
    assert "nvidia.com/gpu.present" in labels
    assert loader["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert "nvidia.com/gpu" not in loader["containers"][0]["resources"]["limits"]
    assert loader["resourceClaims"] == claims[:1]
    plain = pod(render(deployment(**changes)), "Job")
    assert "nodeAffinity" not in plain.get("affinity", {})
    assert "tolerations" not in plain


def test_the_loader_has_the_security_context_of_the_template(deployment: Make) -> None:
    given = {"spec": {"securityContext": {"runAsUser": 1000, "fsGroup": None}}}
    changes = {"model__source": "s3://models/tiny", "model__cache": {"size": "1Gi"}, "template": given}
    context = pod(render(deployment(**changes)), "Job")["securityContext"]
    assert context["runAsUser"] == 1000
    assert "fsGroup" not in context
    assert context["runAsNonRoot"] is True


def test_ids_are_left_to_the_platform_where_the_setting_is_empty(deployment: Make) -> None:
    changes = {"model__source": "s3://models/tiny", "model__cache": {"size": "1Gi"}}
    rendered = render(deployment(**changes), engine_ids={}, loader_done=True)
    for kind in ("Job", "Deployment"):
        context = pod(rendered, kind)["securityContext"]
        assert {"runAsUser", "runAsGroup", "fsGroup"}.isdisjoint(context)
        assert context["runAsNonRoot"] is True


AUTHORITY = {
    "volumes": [
        {"name": "authority", "configMap": {"name": "private-ca"}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
        {"name": "unused", "emptyDir": {}},
    ],
    "containers": [
        {
            "name": "engine",
            "env": [
                {"name": "SSL_CERT_FILE", "value": "/etc/private/ca.crt"},
                {"name": "AWS_SECRET_ACCESS_KEY", "value": "not this one"},
                {"name": "HTTPS_PROXY", "valueFrom": {"secretKeyRef": {"name": "proxy", "key": "url"}}},
            ],
            "volumeMounts": [
                {"name": "authority", "mountPath": "/etc/private", "readOnly": True},
                {"name": "data", "mountPath": "/data"},
                {"name": "tmp", "mountPath": "/var/tmp"},
                {"name": "token", "mountPath": "/tokens"},
            ],
        },
        {"name": "beside", "image": "x", "volumeMounts": [{"name": "unused", "mountPath": "/unused"}]},
    ],
}


@pytest.mark.parametrize("cache", [{"size": "1Gi"}, {"hostPath": "/var/models"}], ids=["claim", "node"])
def test_the_loader_trusts_and_reaches_what_the_engine_does(deployment: Make, cache: dict[str, str]) -> None:
    """A private authority's volume and variables are the engine's, but no token, and no claim of one node."""
    changes = {**SECRET, "model__source": "s3://models/tiny", "model__cache": cache, "template": {"spec": AUTHORITY}}
    by_node = "hostPath" in cache
    manifests = render(deployment(**changes), loader_done=False)
    spec = pod(manifests, "Deployment" if by_node else "Job")
    (loader,) = spec["initContainers"] if by_node else spec["containers"]
    assert [each["name"] for each in loader["volumeMounts"]] == ["model", "tmp", "authority"]
    assert "authority" in [each["name"] for each in spec["volumes"]]
    if not by_node:
        assert [each["name"] for each in spec["volumes"]] == ["model", "tmp", "authority"]
        kubernetes_validate.validate(manifests["Job"], "1.33", strict=True)
    given = variables(loader)
    assert given["SSL_CERT_FILE"] == "/etc/private/ca.crt"
    assert given["HTTPS_PROXY"] == {"name": "proxy", "key": "url"}
    assert given["AWS_SECRET_ACCESS_KEY"] == {"name": "bucket", "key": "AWS_SECRET_ACCESS_KEY"}


def test_a_shared_volume_is_not_evicted(deployment: Make) -> None:
    def arguments(**cache: str) -> list[str]:
        manifests = render(deployment(model__source="s3://models/tiny", model__cache=cache))
        found: list[str] = pod(manifests, "Job")["containers"][0]["args"]
        return found

    assert "--evict" in arguments(size="1Gi")
    assert "--evict" not in arguments(claimName="shared")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("s4://models/tiny", "unknown scheme `s4`"),
        ("http://example.org/x", "unknown scheme `http`"),
        ("https://huggingface.co/org/name", "`hf://ORG/NAME"),
        ("s3://Models/tiny", "s3://BUCKET/PREFIX"),
        ("oci://host", "oci://HOST/REPOSITORY"),
    ],
)
def test_an_unknown_kind_of_source_is_refused_with_the_registrys_message(
    deployment: Make, source: str, words: str
) -> None:
    (problem,) = make_plan(deployment(model__source=source), "kubernetes").problems
    assert problem.field == "spec.model.source"
    assert words in problem.message


def test_an_unknown_kind_of_source_is_a_condition_before_anything_is_created(deployment: Make) -> None:
    plan = make_plan(deployment(model__source="http://example.org/x"), "kubernetes")
    found = {each.type: each for each in find_conditions(Observation(plan))}
    assert (found["Planned"].status, found["Ready"].reason) == ("False", "UnsupportedField")
    for part in ("spec.model.source", "`http://example.org/x`", "unknown scheme `http`", "`s3://BUCKET/PREFIX"):
        assert part in found["Planned"].message
