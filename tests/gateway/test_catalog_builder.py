"""The catalogue that a gateway derives from the objects of a cluster."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_gateway.discovery.catalog import check_catalog
from pagemill_gateway.discovery.kubernetes.builder import build_catalog
from pagemill_gateway.discovery.kubernetes.objects import EndpointSlice, WatchedDeployment
from pagemill_protocol.catalog import Catalog, Endpoint
from pagemill_protocol.engine_token import EngineKeys, derive_token
from pagemill_protocol.resource.served import QueueLimits

KEYS = EngineKeys(b"c" * 32, b"n" * 32, b"p" * 32)


def llmd(name: str, *, created: int = 0, planned: dict[str, Any] | None = None, **spec: Any) -> WatchedDeployment:
    conditions = [{"type": "Planned", "observedGeneration": 1, "lastTransitionTime": "x", **planned}] if planned else []
    raw = {
        "apiVersion": "pagemill.dev/v1beta1",
        "kind": "LLMDeployment",
        "metadata": {
            "name": name,
            "namespace": "ns",
            "generation": 1,
            "creationTimestamp": f"2026-01-01T00:00:{created:02d}Z",
        },
        "spec": {"model": {"source": "package://m", **spec.pop("model", {})}, **spec},
        "status": {"conditions": conditions, "readyReplicas": 1},
    }
    return msgspec.json.decode(msgspec.json.encode(raw), type=WatchedDeployment)


def test_the_adapters_of_a_deployment_are_those_that_its_operator_accepted() -> None:
    adapters = [{"name": "sql", "loaded": ["pod"]}, {"name": "taken", "reason": "NameConflict"}]
    served = llmd("a")
    status = msgspec.convert({"adapters": adapters}, type(served.status))
    (model,) = build_catalog([msgspec.structs.replace(served, status=status)], [], KEYS).models
    assert model.adapters == ["sql"]


def renamed(name: str, shown: str, former: str = "", **spec: Any) -> WatchedDeployment:
    deployment = llmd(name, **spec)
    status = msgspec.convert({"plan": {"modelName": shown, "formerName": former}}, type(deployment.status))
    return msgspec.structs.replace(deployment, status=status)


def test_a_former_name_is_served_while_the_status_shows_it_and_no_deployment_claims_it() -> None:
    new = renamed("a", "old", model={"name": "new", "aliases": ["b"]})
    assert [model.names for model in build_catalog([new], [], KEYS).models] == [("new", "b", "old")]
    seen = renamed("a", "new", "old", model={"name": "new"})
    assert [model.names for model in build_catalog([seen], [], KEYS).models] == [("new", "old")]
    done = renamed("a", "new", model={"name": "new"})
    assert [model.names for model in build_catalog([done], [], KEYS).models] == [("new",)]
    other = llmd("c", created=1, model={"name": "old"})
    assert [model.names for model in build_catalog([new, other], [], KEYS).models] == [("new", "b"), ("old",)]
    twin = renamed("d", "old", created=2, model={"name": "newer"})
    assert [model.names for model in build_catalog([new, twin], [], KEYS).models] == [("new", "b", "old"), ("newer",)]


def pod(uid: str, address: str, **conditions: bool) -> dict[str, Any]:
    return {"addresses": [address], "conditions": conditions, "targetRef": {"kind": "Pod", "name": uid, "uid": uid}}


def endpoint_slice(deployment: str, *pods: dict[str, Any], name: str = "s", **fields: Any) -> EndpointSlice:
    raw = {
        "metadata": {"name": name, "namespace": "ns", "labels": {"pagemill.dev/deployment": deployment}},
        "addressType": "IPv4",
        "endpoints": list(pods),
        "ports": [
            {"name": "data", "port": 8000, "protocol": "TCP"},
            {"name": "control", "port": 8001, "protocol": "TCP"},
        ],
        **fields,
    }
    return msgspec.json.decode(msgspec.json.encode(raw), type=EndpointSlice)


def names(catalog: Catalog) -> list[str]:
    return [model.deployment for model in catalog.models]


def test_a_deployment_is_listed_with_its_pods() -> None:
    deployment = llmd(
        "chat",
        model={"name": "smol", "aliases": ["tiny"], "chatTemplate": "{{ x }}"},
        engine={"prefixCaching": {"scope": "tenant"}},
        routing={"weight": 7, "policy": "Auto"},
    )
    pods = [pod("u1", "10.0.0.1", ready=True), pod("u2", "10.0.0.2", ready=False)]
    (model,) = build_catalog([deployment], [endpoint_slice("chat", *pods)], KEYS).models
    assert (model.namespace, model.deployment, model.name, model.aliases) == ("ns", "chat", "smol", ["tiny"])
    assert (model.weight, model.prefix_scope, model.chat_template) == (7, "tenant", "{{ x }}")
    assert model.engine_token == derive_token(KEYS.current, "ns", "chat")
    assert model.endpoints == [
        Endpoint(id="u1", data_url="http://10.0.0.1:8000", control_url="http://10.0.0.1:8001", probed_ready=True),
        Endpoint(id="u2", data_url="http://10.0.0.2:8000", control_url="http://10.0.0.2:8001"),
    ]


def test_defaults_are_those_of_the_resource() -> None:
    (model,) = build_catalog([llmd("chat")], [], KEYS).models
    assert (model.name, model.share, model.prefix_scope, model.endpoints) == ("chat", 100, "tenant", [])


def test_the_queues_limits_come_from_the_resource_in_bytes_and_seconds() -> None:
    queue = {"maxRequests": 5, "maxBytes": "1.5Mi", "timeout": "1m30s"}
    (model,) = build_catalog([llmd("chat", routing={"queue": queue})], [], KEYS).models
    assert model.queue == QueueLimits(max_requests=5, max_bytes=3 * 2**19, timeout_s=90.0)


@pytest.mark.parametrize(
    ("autoscaling", "wakes"),
    [
        (None, False),
        ({}, True),
        ({"mode": "Active"}, True),
        ({"mode": "External"}, True),
        ({"mode": "Advisory"}, False),
    ],
)
def test_requests_wait_for_an_engine_if_the_operator_starts_one(autoscaling: Any, wakes: bool) -> None:
    (model,) = build_catalog([llmd("chat", autoscaling=autoscaling)], [], KEYS).models
    assert model.wakes is wakes


@pytest.mark.parametrize("queue", [None, {"maxBytes": "much"}, {"timeout": "soon"}, {"maxRequests": -1}])
def test_an_unusable_queue_section_means_the_gateways_own_settings(queue: dict[str, Any] | None) -> None:
    (model,) = build_catalog([llmd("chat", routing={"queue": queue})], [], KEYS).models
    assert model.queue is None


def test_a_terminating_pod_stays_listed_and_accepts_nothing() -> None:
    slices = [endpoint_slice("chat", pod("u1", "10.0.0.1", ready=False, serving=True, terminating=True))]
    (endpoint,) = build_catalog([llmd("chat")], slices, KEYS).models[0].endpoints
    assert endpoint.terminating
    assert not endpoint.probed_ready


def test_a_pod_in_several_slices_is_one_endpoint() -> None:
    slices = [
        endpoint_slice("chat", pod("u1", "fd00::1", ready=True), name="v6", addressType="IPv6"),
        endpoint_slice("chat", pod("u1", "10.0.0.1", ready=True), name="v4-old"),
        endpoint_slice("chat", pod("u1", "10.0.0.1", ready=False, terminating=True), name="v4-new"),
    ]
    (endpoint,) = build_catalog([llmd("chat")], slices, KEYS).models[0].endpoints
    assert endpoint.data_url == "http://10.0.0.1:8000"
    assert endpoint.terminating, "a state in any slice applies"
    (endpoint,) = build_catalog([llmd("chat")], slices[:1], KEYS).models[0].endpoints
    assert endpoint.data_url == "http://[fd00::1]:8000"


def test_during_a_tls_rollout_each_pod_is_contacted_as_its_slice_declares() -> None:
    tls_ports = [{"name": "data", "port": 8443}, {"name": "control", "port": 8444}]
    slices = [
        endpoint_slice("chat", pod("u1", "10.0.0.1", ready=True), name="before"),
        endpoint_slice("chat", pod("u2", "10.0.0.2", ready=True), name="after", ports=tls_ports),
    ]
    before, after = build_catalog([llmd("chat")], slices, KEYS).models[0].endpoints
    assert (before.data_url, before.control_url) == ("http://10.0.0.1:8000", "http://10.0.0.1:8001")
    assert (after.data_url, after.control_url) == ("https://10.0.0.2:8443", "https://10.0.0.2:8444")


@pytest.mark.parametrize(
    "fields",
    [
        {"ports": None},
        {"ports": [{"name": "data", "port": 8000}]},
        {"endpoints": None},
        {"addressType": "FQDN"},
        {"endpoints": [{"addresses": ["10.0.0.1"], "conditions": {}}]},
        {"endpoints": [{"addresses": ["10.0.0.1"], "conditions": {}, "targetRef": {"kind": "Node", "uid": "n"}}]},
    ],
)
def test_an_object_that_is_no_engine_pod_is_no_endpoint(fields: dict[str, Any]) -> None:
    slices = [endpoint_slice("chat", pod("u1", "10.0.0.1"), **fields)]
    assert build_catalog([llmd("chat")], slices, KEYS).models[0].endpoints == []


def test_pods_of_other_namespaces_or_deployments_are_excluded() -> None:
    other = endpoint_slice("other", pod("u1", "10.0.0.1"))
    elsewhere = msgspec.structs.replace(
        other,
        metadata=msgspec.structs.replace(other.metadata, namespace="b", labels={"pagemill.dev/deployment": "chat"}),
    )
    assert build_catalog([llmd("chat")], [other, elsewhere], KEYS).models[0].endpoints == []


def test_a_refused_spec_is_served_only_while_pods_of_an_earlier_spec_run() -> None:
    refused = llmd("chat", planned={"status": "False", "reason": "UnsupportedField"})
    assert names(build_catalog([refused], [], KEYS)) == []
    assert names(build_catalog([refused], [endpoint_slice("chat", pod("u", "10.0.0.1"))], KEYS)) == ["chat"]


def test_a_condition_of_an_earlier_spec_does_not_count() -> None:
    deployment = llmd("chat", planned={"status": "False", "reason": "UnsupportedField", "observedGeneration": 0})
    assert names(build_catalog([deployment], [], KEYS)) == ["chat"]


def test_in_a_name_conflict_the_older_deployment_has_the_name() -> None:
    slices = [endpoint_slice(name, pod(name, "10.0.0.1"), name=name) for name in ("old", "new")]
    judged = llmd("new", model={"name": "m"}, planned={"status": "False", "reason": "NameConflict"})
    assert names(build_catalog([judged], slices, KEYS)) == []
    old, new = llmd("old", created=1, model={"name": "m"}), llmd("new", created=2, model={"aliases": ["m"]})
    assert names(build_catalog([new, old], slices, KEYS)) == ["old"], (
        "the older deployment must have the name before the operator reports the conflict"
    )
    weighted = llmd("new", created=2, model={"name": "m"}, routing={"weight": 10})
    assert names(build_catalog([old, weighted], slices, KEYS)) == ["old"], "both deployments must agree to share"
    stable = llmd("old", created=1, model={"name": "m"}, routing={"weight": 90})
    assert names(build_catalog([stable, weighted], slices, KEYS)) == ["old", "new"]


def test_a_deployment_that_is_being_deleted_is_removed_and_frees_its_name() -> None:
    old, new = llmd("old", created=1, model={"name": "m"}), llmd("new", created=2, model={"name": "m"})
    going = msgspec.structs.replace(old, metadata=msgspec.structs.replace(old.metadata, deletion_timestamp="now"))
    assert names(build_catalog([going, new], [], KEYS)) == ["new"]


def test_without_keys_engines_are_listed_and_cannot_be_contacted() -> None:
    assert build_catalog([llmd("chat")], [], None).models[0].engine_token == ""


objects = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(0, 3), st.sampled_from(["m", "n"]), st.sampled_from([None, 0, 50])),
    unique_by=lambda row: row[0],
)


@given(objects, st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["p", "q"]), st.booleans())), st.randoms())
def test_every_catalogue_is_valid_and_independent_of_the_order_of_objects(
    rows: Any, pods: Any, chance: random.Random
) -> None:
    deployments = [
        llmd(name, created=created, model={"name": model}, routing={} if weight is None else {"weight": weight})
        for name, created, model, weight in rows
    ]
    slices = [
        endpoint_slice(name, pod(f"{name}-{uid}", "10.0.0.1", terminating=flag), name=str(index))
        for index, (name, uid, flag) in enumerate(pods)
    ]
    catalog = build_catalog(deployments, slices, KEYS)
    check_catalog(catalog)
    chance.shuffle(deployments)
    chance.shuffle(slices)
    assert build_catalog(deployments, slices, KEYS) == catalog
    unshared = [model.name for model in catalog.models if model.weight == 100]
    assert len(unshared) == len(set(unshared)), "no deployment may share a name without its own consent"
