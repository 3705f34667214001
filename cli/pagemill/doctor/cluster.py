"""Checks of a cluster. They only read, with the user's rights; an object that the user may not read becomes a note."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

from pagemill.doctor.findings import CheckResult, ok
from pagemill_crds.generate import adapter_definition, custom_resource_definition
from pagemill_kube.client import Client
from pagemill_kube.errors import ApiError
from pagemill_operator.backends.kubernetes.kinds import LLM_DEPLOYMENT, LORA_ADAPTER

CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
PART_OF_SELECTOR = "app.kubernetes.io/part-of=pagemill"
COMPONENT = "app.kubernetes.io/component"
GPU = "nvidia.com/gpu"
DRIVER_LABELS = ("nvidia.com/cuda.driver-version.full", "nvidia.com/cuda.driver.major")
INSTALL = "install the chart: docs/how-to/install-with-helm.md"
MONITORING = "docs/how-to/see-capacity.md"
RIGHTS = (("list", LLM_DEPLOYMENT.group, "llmdeployments", ""), ("get", "", "pods", "proxy"))
"""The rights that `pagemill why` and `pagemill top` need."""
OPERATOR_RIGHTS = (
    ("watch", LLM_DEPLOYMENT.group, "llmdeployments", ""),
    ("patch", LLM_DEPLOYMENT.group, "llmdeployments", "status"),
    ("patch", LORA_ADAPTER.group, "loraadapters", "status"),
    ("patch", "apps", "deployments", ""),
    ("patch", "", "services", ""),
)


async def look_at_cluster(client: Client, context: str) -> list[CheckResult]:
    """Return the findings of all checks. Raises `Unreachable` if the API server does not respond."""
    found = [ok("version", f"pagemill {version('pagemill')}")]
    try:
        served = await client.get("/version")
        found.append(ok("API server", f"{served.get('gitVersion', 'unknown version')}, context {context}"))
    except ApiError as error:
        return [*found, CheckResult("error", "API server", str(error), "log in again, or choose another --context")]
    for subject, check in CHECKS.items():
        try:
            found += [finding async for finding in check(client)]
        except ApiError as error:
            remedy = f"ask for the right to read it, or let an administrator run this ({error.status})"
            found.append(CheckResult("note", subject, f"could not be checked: {error}", remedy))
    return found


async def crd(client: Client) -> AsyncIterator[CheckResult]:
    found = [await _definition(client, ours) for ours in (custom_resource_definition(), adapter_definition())]
    faults = [each for each in found if each.level != "ok"]
    yield faults[0] if faults else found[0]


async def _definition(client: Client, ours: dict[str, Any]) -> CheckResult:
    name = ours["metadata"]["name"]
    installed = await _find(client, f"{CRD}/{name}")
    if installed is None:
        return CheckResult("error", "CRD", f"{name} is not installed", INSTALL)
    missing = [f"the version {name}" for name in sorted(_served(ours) - _served(installed))]
    missing += sorted(_fields(ours) - _fields(installed))
    if missing:
        shown = ", ".join(missing[:5])
        apply = f"apply crds/{ours['spec']['names']['plural']}.yaml of this version; Helm does it with crds.install"
        return CheckResult("error", "CRD", f"{name} is from another version: it lacks {shown}", apply)
    return ok("CRD", f"{name} has all fields of this version")


def _served(definition: dict[str, Any]) -> set[str]:
    return {each["name"] for each in definition["spec"]["versions"] if each["served"]}


def _fields(definition: dict[str, Any]) -> set[str]:
    """Return the dotted names of the spec's fields, two levels deep."""
    (schema,) = [
        each["schema"]["openAPIV3Schema"]
        for each in definition["spec"]["versions"]
        if each["name"] == LLM_DEPLOYMENT.version
    ] or [{}]
    fields = schema.get("properties", {}).get("spec", {}).get("properties", {})
    inner = {f"spec.{name}.{each}" for name, field in fields.items() for each in field.get("properties", {})}
    return {f"spec.{name}" for name in fields} | inner


async def rights(client: Client) -> AsyncIterator[CheckResult]:
    denied = [right for right in RIGHTS if not await _may(client, "selfsubjectaccessreviews", right, {})]
    if denied:
        names = ", ".join(_right_name(right) for right in denied)
        yield CheckResult(
            "note", "RBAC", f"you may not {names}", "ask for it; `pagemill why` and `pagemill top` need it"
        )
    else:
        yield ok("RBAC", "you may do what `pagemill why` and `pagemill top` need")
    for deployment in await _deployments_of(client, "operator"):
        namespace = deployment["metadata"]["namespace"]
        account = deployment["spec"]["template"]["spec"].get("serviceAccountName", "default")
        user = {"user": f"system:serviceaccount:{namespace}:{account}"}
        denied = [right for right in OPERATOR_RIGHTS if not await _may(client, "subjectaccessreviews", right, user)]
        if denied:
            names = ", ".join(_right_name(right) for right in denied)
            remedy = "this is intended with watchNamespaces; otherwise set rbac.create and upgrade the release"
            yield CheckResult("note", "RBAC", f"{user['user']} may not {names} in all namespaces", remedy)
        else:
            yield ok("RBAC", f"{user['user']} may do what an operator that watches all namespaces needs")


async def _may(client: Client, kind: str, right: tuple[str, str, str, str], who: dict[str, str]) -> bool:
    verb, group, resource, subresource = right
    attributes = {"verb": verb, "group": group, "resource": resource, "subresource": subresource}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview" if kind.startswith("self") else "SubjectAccessReview",
        "spec": {"resourceAttributes": attributes, **who},
    }
    answer = await client.request("POST", f"/apis/authorization.k8s.io/v1/{kind}", body=review)
    return bool(answer.get("status", {}).get("allowed"))


def _right_name(right: tuple[str, str, str, str]) -> str:
    verb, _, resource, subresource = right
    return f"{verb} {resource}" + (f"/{subresource}" if subresource else "")


async def gpus(client: Client) -> AsyncIterator[CheckResult]:
    nodes = (await client.get("/api/v1/nodes")).get("items", [])
    with_gpu = [node for node in nodes if int(node["status"].get("allocatable", {}).get(GPU, 0))]
    if not with_gpu:
        remedy = f"install NVIDIA's GPU operator for `resources.gpus`; without {GPU} engines compute on the CPU"
        yield CheckResult("note", "GPUs", f"none of {len(nodes)} nodes offers {GPU}", remedy)
        return
    count = sum(int(node["status"]["allocatable"][GPU]) for node in with_gpu)
    labels = [node["metadata"].get("labels", {}) for node in with_gpu]
    drivers = sorted({each[name] for each in labels for name in DRIVER_LABELS[:1] if name in each}) or sorted(
        {each[name] for each in labels for name in DRIVER_LABELS[1:] if name in each}
    )
    shown = f"driver {', '.join(drivers)}" if drivers else "the nodes' labels do not name the driver"
    yield ok("GPUs", f"{count} on {len(with_gpu)} of {len(nodes)} nodes, {shown}")


async def programs(client: Client) -> AsyncIterator[CheckResult]:
    """Check operator and gateway, whose absence is an error, and the chart's Redis."""
    for component in ("operator", "gateway"):
        found = await _deployments_of(client, component)
        if not found:
            yield CheckResult("error", component, "is not installed", INSTALL)
        for deployment in found:
            yield _program(deployment, component)
    stateful = await _list(client, "/apis/apps/v1/statefulsets", f"{PART_OF_SELECTOR},{COMPONENT}=redis")
    for redis in stateful:
        yield _program(redis, "Redis")
    if not stateful:
        yield ok("Redis", "not installed by the chart: gateways count limits alone, or in that of redis.existingSecret")


def _program(workload: dict[str, Any], subject: str) -> CheckResult:
    metadata, wanted = workload["metadata"], workload["spec"].get("replicas", 1)
    name, ready = f"{metadata['namespace']}/{metadata['name']}", workload.get("status", {}).get("readyReplicas", 0)
    if ready < wanted:
        remedy = f"see `kubectl -n {metadata['namespace']} describe pods -l {COMPONENT}={subject.lower()}`"
        return CheckResult("error", subject, f"{name} has {ready} of {wanted} replicas ready", remedy)
    installed = metadata.get("labels", {}).get("app.kubernetes.io/version", "")
    if installed and installed != version("pagemill"):
        remedy = "use the pagemill command of that version, or upgrade the release"
        return CheckResult("note", subject, f"{name} has version {installed}", remedy)
    return ok(subject, f"{name}, {ready} of {wanted} replicas ready")


async def prometheus(client: Client) -> AsyncIterator[CheckResult]:
    if await _find(client, f"{CRD}/podmonitors.monitoring.coreos.com") is None:
        remedy = f"install kube-prometheus-stack, or scrape the pods' port `control` yourself: {MONITORING}"
        yield CheckResult("note", "Prometheus", "the Prometheus operator is not installed (no kind PodMonitor)", remedy)
        return
    servers = await _list(client, "/apis/monitoring.coreos.com/v1/prometheuses")
    rules = await _list(client, "/apis/monitoring.coreos.com/v1/prometheusrules", PART_OF_SELECTOR)
    if not servers:
        yield CheckResult("note", "Prometheus", "there is no Prometheus object", f"create one: {MONITORING}")
    elif not rules:
        remedy = f"set monitoring.prometheusRule.enabled and monitoring.podMonitor.enabled: {MONITORING}"
        yield CheckResult("note", "Prometheus", "the chart's rules and alerts are not installed", remedy)
    else:
        yield ok("Prometheus", f"{len(servers)} installed, {len(rules)} PrometheusRule objects of the chart")


async def grafana(client: Client) -> AsyncIterator[CheckResult]:
    pods = await _list(client, "/api/v1/pods", "app.kubernetes.io/name=grafana")
    sidecars = [
        container["name"] for pod in pods for container in pod["spec"]["containers"] if "dashboard" in container["name"]
    ]
    dashboards = [
        each for each in await _list(client, "/api/v1/configmaps", PART_OF_SELECTOR) if "-dashboard-" in _name(each)
    ]
    if not pods:
        remedy = f"install Grafana, or import the dashboard files: {MONITORING}"
        yield CheckResult("note", "Grafana", "no pods of its chart are running", remedy)
    elif not sidecars:
        remedy = f"set sidecar.dashboards.enabled in the values of Grafana's chart: {MONITORING}"
        yield CheckResult("note", "Grafana", "its pods have no sidecar that loads dashboards", remedy)
    elif not dashboards:
        yield CheckResult(
            "note", "Grafana", "the chart's dashboards are not installed", "set monitoring.dashboards.enabled"
        )
    else:
        yield ok("Grafana", f"a sidecar and {len(dashboards)} ConfigMaps with dashboards are installed")


async def _deployments_of(client: Client, component: str) -> list[dict[str, Any]]:
    return await _list(client, "/apis/apps/v1/deployments", f"{PART_OF_SELECTOR},{COMPONENT}={component}")


async def _list(client: Client, path: str, labels: str = "") -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = (await client.get(path, {"labelSelector": labels} if labels else None)).get(
        "items", []
    )
    return items


async def _find(client: Client, path: str) -> dict[str, Any] | None:
    try:
        return await client.get(path)
    except ApiError as error:
        if error.status == 404:
            return None
        raise


def _name(manifest: dict[str, Any]) -> str:
    return str(manifest["metadata"]["name"])


CHECKS = {
    "CRD": crd,
    "RBAC": rights,
    "GPUs": gpus,
    "operator, gateway": programs,
    "Prometheus": prometheus,
    "Grafana": grafana,
}
