"""For all values, Kubernetes accepts the rendered objects, and their pods meet the restricted profile."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import referencing
import yaml
from foreign_kinds import VALIDATORS

ROOT = Path(__file__).resolve().parents[2]
OLDEST, NEWEST = "1.30.0", "1.37.0"
CLUSTER_KINDS = {
    "ClusterRole",
    "ClusterRoleBinding",
    "CustomResourceDefinition",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}


@cache
def schema_folder(version: str) -> Path:
    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / f"v{version}-local-strict"
    assert folder.is_dir(), sorted(each.name for each in folder.parent.iterdir())
    return folder


@cache
def definitions(version: str) -> Any:
    return referencing.Resource.from_contents(json.loads((schema_folder(version) / "_definitions.json").read_text()))


@cache
def validator(version: str, kind: str, api_version: str) -> jsonschema.Draft202012Validator:
    """Return the validator of the kind: Kubernetes' schema of this version, or the excerpt of another project's."""
    if kind in VALIDATORS:
        return VALIDATORS[kind]
    group, _, revision = api_version.rpartition("/")
    file = f"{kind.lower()}-{group.split('.')[0]}-{revision}.json" if group else f"{kind.lower()}-{revision}.json"
    schema = json.loads((schema_folder(version) / file).read_text())
    registry = referencing.Resource.from_contents(schema) @ (definitions(version) @ referencing.Registry())
    return jsonschema.Draft202012Validator(schema, registry=registry)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_objects_match_the_schemas_of_their_kinds(rendered: Any, version: str) -> None:
    problems = [
        f"{each['kind']} {each['metadata']['name']}: {error.json_path}: {error.message}"
        for each in rendered.objects
        for error in validator(version, each["kind"], each["apiVersion"]).iter_errors(each)
    ]
    assert problems == []


def test_kinds_of_other_projects_are_included(variant: Callable[[str], Any]) -> None:
    found = {each["kind"] for name in ("everything", "service-monitor") for each in variant(name).objects}
    assert set(VALIDATORS) <= found


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("PodMonitor", "spec.podMetricsEndpoints.0.interval", "15 seconds"),
        ("PodMonitor", "spec.podMetricsEndpoints.0.port", 8080),
        ("PodMonitor", "spec.podMetricsEndpoints.0.relabelings.0.source_labels", ["__name__"]),
        ("PodMonitor", "spec.podMetricsEndpoints.0.metricRelabelings.0.action", "remove"),
        ("PodMonitor", "spec.endpoints", []),
        ("ServiceMonitor", "spec.podMetricsEndpoints", []),
        ("ServiceMonitor", "metadata.labels.release", 1),
        ("PrometheusRule", "spec.groups.4.rules.0.record", "both:at:once"),
        ("PrometheusRule", "spec.groups.4.rules.0.for", "soon"),
        ("PrometheusRule", "apiVersion", "monitoring.coreos.com/v1alpha1"),
        ("HTTPRoute", "spec.rules.0.filters.0.type", "RequestRedirect"),
        ("HTTPRoute", "spec.rules.0.timeouts.request", "1.5s"),
        ("HTTPRoute", "spec.rules.0.backendRefs.0.port", "80"),
        ("HTTPRoute", "spec.hostnames.0", "llm.example.com:443"),
    ],
)
def test_an_object_that_other_projects_would_refuse_is_detected(
    variant: Callable[[str], Any], kind: str, path: str, value: object
) -> None:
    rendered = variant("service-monitor" if kind == "ServiceMonitor" else "everything")
    broken = copy.deepcopy(rendered.all(kind)[0])
    *parents, last = path.split(".")
    place: Any = broken
    for step in parents:
        place = place[int(step) if isinstance(place, list) else step]
    place[int(last) if isinstance(place, list) else last] = value
    assert list(VALIDATORS[kind].iter_errors(broken))


def test_groups_of_rules_have_unique_names(variant: Callable[[str], Any]) -> None:
    """The list is a map by name, and the API server refuses a repeated name."""
    names = [group["name"] for group in variant("everything").one("PrometheusRule")["spec"]["groups"]]
    assert len(names) == len(set(names))


def test_no_two_objects_have_the_same_name(rendered: Any) -> None:
    keys = Counter(
        (each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in rendered.objects
    )
    assert {key: count for key, count in keys.items() if count > 1} == {}


def test_names_have_valid_lengths_and_namespaces_are_set(rendered: Any) -> None:
    own = [each for each in rendered.objects if "labels" in each["metadata"]]
    assert own
    for each in own:
        assert len(each["metadata"]["name"]) <= 63
        assert ("namespace" in each["metadata"]) != (each["kind"] in CLUSTER_KINDS), each["metadata"]


def test_names_are_valid_with_the_longest_release_and_namespace(render: Callable[..., Any], anonymous: Any) -> None:
    long = render(anonymous, name="r" * 53, namespace="n" * 63)
    for each in long.objects:
        limit = 253 if each["kind"] in {*CLUSTER_KINDS, "Role", "RoleBinding"} else 63
        assert len(each["metadata"]["name"]) <= limit, each["metadata"]["name"]


def test_every_object_has_the_common_labels(variant: Callable[[str], Any]) -> None:
    everything = variant("everything")
    own = [each for each in everything.objects if not each["metadata"]["name"].endswith(("-extra", "-text"))]
    for each in own:
        assert each["metadata"]["labels"]["team"] == "platform", each["metadata"]["name"]
        assert each["metadata"]["annotations"]["example.com/owner"] == "platform", each["metadata"]["name"]


def test_pods_meet_the_restricted_profile(rendered: Any) -> None:
    found = {name: list(violations(spec)) for name, spec in rendered.pod_specs().items()}
    assert {name: problems for name, problems in found.items() if problems} == {}


def violations(spec: dict[str, Any]) -> Iterator[str]:
    """Yield violations of the restricted Pod Security Standard and of the project's own rules."""
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield field
    pod = spec.get("securityContext", {})
    if pod.get("runAsNonRoot") is not True or pod.get("runAsUser", 0) == 0:
        yield "runs as root"
    if pod.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield "no seccomp profile"
    for volume in spec.get("volumes", []):
        if not {"configMap", "secret", "emptyDir", "projected", "downwardAPI"} & volume.keys():
            yield f"volume {volume['name']} is of a kind that is not allowed"
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        yield from container_violations(container)


def container_violations(container: dict[str, Any]) -> Iterator[str]:
    security = container.get("securityContext", {})
    if security.get("allowPrivilegeEscalation") is not False or security.get("privileged"):
        yield "may escalate its privileges"
    if security.get("capabilities") != {"drop": ["ALL"]}:
        yield "keeps capabilities"
    if security.get("readOnlyRootFilesystem") is not True:
        yield "may write to its root"
    if "memory" not in container["resources"].get("limits", {}):
        yield "may take all memory"
    if not {"cpu", "memory"} <= container["resources"].get("requests", {}).keys():
        yield "asks for no resources"


def test_a_pod_that_violates_the_profile_is_detected() -> None:
    root = {"containers": [{"name": "x", "resources": {}}], "hostPID": True, "volumes": [{"name": "v", "hostPath": {}}]}
    assert len(list(violations(root))) == 9


def test_images_have_an_immutable_tag(rendered: Any) -> None:
    for spec in rendered.pod_specs().values():
        for container in spec["containers"]:
            tag = container["image"].split("@")[0].rpartition(":")[2]
            assert tag not in ("", "latest")
            assert "/" not in tag, "a name without a tag means latest"


def test_a_digest_follows_the_tag(variant: Callable[[str], Any]) -> None:
    pinned = variant("api-keys")
    (gateway,) = pinned.component("Deployment", "gateway")["spec"]["template"]["spec"]["containers"]
    assert gateway["image"] == f"registry.example.com/pagemill/gateway:0.1.0@sha256:{'2' * 64}"
    assert pinned.component("Pod", "test")["spec"]["containers"][0]["image"] == gateway["image"]


def test_only_pods_that_use_the_api_server_get_a_token(rendered: Any) -> None:
    mounted = {name: spec["automountServiceAccountToken"] for name, spec in rendered.pod_specs().items()}
    assert all(mounts != name.endswith(("-test", "-redis")) for name, mounts in mounted.items())
    assert all(each["automountServiceAccountToken"] is False for each in rendered.all("ServiceAccount"))


def test_the_crds_are_those_of_the_models(variant: Callable[[str], Any]) -> None:
    for crd, plural in zip(
        variant("anonymous").all("CustomResourceDefinition"), ("llmdeployments", "loraadapters"), strict=True
    ):
        assert crd["spec"] == yaml.safe_load((ROOT / "crds" / f"{plural}.yaml").read_text())["spec"]
        assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_the_crd_can_be_left_out_or_kept(variant: Callable[[str], Any]) -> None:
    assert variant("namespaced").all("CustomResourceDefinition") == []
    kept, annotated = (variant(each).all("CustomResourceDefinition") for each in ("single", "everything"))
    assert all("annotations" not in each["metadata"] for each in kept)
    assert len(kept) == len(annotated) == 2
    for each in annotated:
        annotations = each["metadata"]["annotations"]
        assert annotations["argocd.argoproj.io/sync-options"] == "ServerSideApply=true"
        assert annotations["helm.sh/resource-policy"] == "keep"


def test_administrators_of_namespaces_may_grant_what_the_chart_grants(variant: Callable[[str], Any]) -> None:
    """Of objects that Kubernetes' role `admin` does not know; no user can grant a right that the user lacks."""
    role = yaml.safe_load((ROOT / "crds" / "namespace-admins.yaml").read_text())
    assert role["metadata"]["labels"] == {"rbac.authorization.k8s.io/aggregate-to-admin": "true"}
    held = set(_rights(role["rules"]))
    namespaced = variant("namespaced")
    assert namespaced.all("ClusterRole") == []
    granted = {right for each in namespaced.all("Role") for right in _rights(each["rules"]) if "." in right[0]}
    known = ("discovery.k8s.io", "networking.k8s.io", "coordination.k8s.io")
    assert {right for right in granted if right[0] not in known} <= held
    assert any(resource == "llmdeployments/status" for _, resource, _ in granted)


def _rights(rules: list[Any]) -> list[tuple[str, str, str]]:
    return [
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    ]


def test_notes_contain_three_commands(rendered: Any) -> None:
    scheme = "https" if rendered.name == "redis" else "http"
    for command in ("helm test pagemill", "kubectl apply", f"curl {scheme}://127.0.0.1:8080/v1/chat/completions"):
        assert command in rendered.notes
    assert "kind: LLMDeployment" in rendered.notes
