"""The writes that bring children to their rendered state: drift, spellings, fields of other clients, and deletions."""

from __future__ import annotations

import base64
import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_operator.backends.kubernetes.differences import (
    Answers,
    contains,
    differs,
    rolled_out,
    to_apply,
    to_delete,
    used_config_maps,
    with_digest,
)
from pagemill_operator.backends.kubernetes.slim import slim

Manifest = dict[str, Any]

scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


def deployment(replicas: int = 1, **changes: Any) -> Manifest:
    container = {"name": "engine", "image": "engine:1", "args": ["--settings", "x"], "env": []}
    pod = {
        "containers": [container],
        "volumes": [{"name": "settings", "configMap": {"name": "chat-engine-1"}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "chat-engine", "namespace": "default", "labels": {"app": "chat"}},
        "spec": {"replicas": replicas, "template": {"metadata": {"labels": {"app": "chat"}}, "spec": pod}, **changes},
    }


def stored(manifest: Manifest) -> Manifest:
    """Return the manifest as an API server returns it to the cache."""
    live = copy.deepcopy(manifest)
    live["metadata"] |= {"uid": "u", "resourceVersion": "7", "generation": 1, "managedFields": [{"manager": "m"}]}
    if live["kind"] == "Deployment":
        live["spec"]["progressDeadlineSeconds"] = 600
        container = live["spec"]["template"]["spec"]["containers"][0]
        container["terminationMessagePath"] = "/dev/termination-log"
        container.pop("env")
    return slim(manifest["kind"], live)


def live(*manifests: Manifest) -> dict[tuple[str, str], Manifest]:
    return {(each["kind"], each["metadata"]["name"]): each for each in manifests}


def test_a_child_equal_to_its_rendering_is_not_written() -> None:
    wanted = with_digest(deployment())
    assert list(to_apply([wanted], live(stored(wanted)), Answers())) == []


def test_a_missing_child_is_written() -> None:
    wanted = with_digest(deployment())
    assert list(to_apply([wanted], {}, Answers())) == [wanted]


def test_a_changed_rendering_is_written_even_if_the_old_one_contains_it() -> None:
    old = with_digest(deployment(minReadySeconds=5))
    new = with_digest(deployment())
    assert list(to_apply([new], live(stored(old)), Answers())) == [new]


@pytest.mark.parametrize(
    "path",
    [
        ("spec", "template", "spec", "containers", 0, "image"),
        ("spec", "template", "spec", "containers", 0, "args", 1),
        ("metadata", "labels", "app"),
    ],
)
def test_a_field_that_another_client_changed_is_written_again(path: tuple[Any, ...]) -> None:
    wanted = with_digest(deployment())
    changed = stored(wanted)
    node: Any = changed
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = "other"
    assert differs(wanted, changed)


def test_fields_that_others_add_are_not_changed() -> None:
    wanted = with_digest(deployment())
    grown = stored(wanted)
    grown["metadata"]["labels"]["team"] = "a"
    grown["spec"]["template"]["spec"]["containers"].append({"name": "sidecar", "image": "proxy"})
    grown["spec"]["template"]["spec"]["tolerations"] = [{"key": "gpu"}]
    assert not differs(wanted, grown)


def test_a_change_of_replicas_is_guarded_by_the_version_of_its_decision() -> None:
    known = stored(with_digest(deployment(1)))
    (manifest,) = to_apply([with_digest(deployment(3))], live(known), Answers())
    assert manifest["metadata"]["resourceVersion"] == "7"
    (manifest,) = to_apply([with_digest(deployment(1, minReadySeconds=5))], live(known), Answers())
    assert "resourceVersion" not in manifest["metadata"]


def test_an_existing_job_is_never_written_again() -> None:
    job = {"kind": "Job", "metadata": {"name": "chat-load-1", "namespace": "default"}, "spec": {"backoffLimit": 1}}
    known = stored(with_digest(job))
    assert list(to_apply([with_digest({**job, "spec": {"backoffLimit": 2}})], live(known), Answers())) == []


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ("1Gi", "1024Mi"),
        ("500m", "0.5"),
        (1, "1"),
        ("1", "1000m"),
        ("4Gi", 4 * 2**30),
        ("1e9", "1000e6"),
        ("1Ei", "1024Pi"),
        ("1G", "1E9"),
        ("1500u", "1.5m"),
    ],
)
def test_quantities_are_compared_by_amount(found: Any, wanted: Any) -> None:
    assert contains({"memory": found}, {"memory": wanted})


@pytest.mark.parametrize(("found", "wanted"), [("1Gi", "1G"), ("1", "1.5"), ("a", "b"), ("1m", "1M"), (True, "true")])
def test_other_values_differ(found: Any, wanted: Any) -> None:
    assert not contains({"value": found}, {"value": wanted})


@pytest.mark.parametrize("empty", [None, "", 0, False, [], {}])
def test_an_empty_value_may_be_absent(empty: Any) -> None:
    assert contains({}, {"field": empty})
    assert not contains({}, {"field": "value"})


def test_secrets_are_compared_by_digest_without_storing_them() -> None:
    def secret(value: bytes) -> Manifest:
        data = {"tokens": base64.b64encode(value).decode()}
        return {"kind": "Secret", "metadata": {"name": "t", "namespace": "default"}, "data": data}

    wanted = with_digest(secret(b"one"))
    known = stored(wanted)
    assert "b25l" not in str(known)
    assert not differs(wanted, known)
    other = stored({**wanted, "data": secret(b"two")["data"]})
    assert differs(wanted, other)


def test_string_data_is_what_the_api_server_stores_as_data() -> None:
    metadata = {"name": "t", "namespace": "default"}
    plain = slim("Secret", {"kind": "Secret", "metadata": metadata, "stringData": {"tokens": "one"}})
    encoded = slim("Secret", {"kind": "Secret", "metadata": metadata, "data": {"tokens": "b25l"}})
    assert plain == encoded


@given(values)
def test_every_value_contains_itself(value: Any) -> None:
    assert contains(value, value)


@given(st.dictionaries(st.text(max_size=4), values, max_size=4), st.dictionaries(st.text(max_size=4), values))
def test_a_dictionary_contains_each_of_its_parts(value: dict[str, Any], more: dict[str, Any]) -> None:
    assert contains({**more, **value}, value)


def config_map(name: str) -> Manifest:
    return stored({"kind": "ConfigMap", "metadata": {"name": name, "namespace": "default"}, "data": {"a": "b"}})


def pod(config: str) -> Manifest:
    volumes = [{"name": "settings", "configMap": {"name": config}}, {"name": "tmp", "emptyDir": {}}]
    return slim(
        "Pod", {"metadata": {"name": "p", "namespace": "default"}, "spec": {"volumes": volumes, "containers": []}}
    )


def test_a_config_map_is_deleted_when_no_pod_and_no_template_uses_it() -> None:
    known = live(config_map("chat-engine-0"), config_map("chat-engine-1"), config_map("chat-engine-2"))
    used = used_config_maps([pod("chat-engine-0")], [deployment()])
    gone = [each["metadata"]["name"] for each in to_delete([], known, used)]
    assert gone == ["chat-engine-2"]


def test_obsolete_children_are_deleted_except_those_that_serve() -> None:
    kinds = ["Deployment", "Service", "Secret", "Job", "PodDisruptionBudget", "PersistentVolumeClaim"]
    known = live(
        *(
            slim(kind, {"metadata": {"name": "chat-engine", "namespace": "default"}, "spec": {}, "kind": kind})
            for kind in kinds
        )
    )
    gone = {each["kind"] for each in to_delete([], known, frozenset())}
    assert gone == {"Job", "PodDisruptionBudget", "PersistentVolumeClaim"}


def test_needed_children_and_those_being_deleted_are_not_deleted() -> None:
    budget = {"kind": "PodDisruptionBudget", "metadata": {"name": "chat-engine", "namespace": "default"}, "spec": {}}
    assert list(to_delete([budget], live(stored(budget)), frozenset())) == []
    going = stored(budget)
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert list(to_delete([], live(going), frozenset())) == []


@pytest.mark.parametrize(
    ("status", "is_rolled_out"),
    [
        ({"observedGeneration": 2, "replicas": 2, "updatedReplicas": 2}, True),
        ({"observedGeneration": 1, "replicas": 2, "updatedReplicas": 2}, False),
        ({"observedGeneration": 2, "replicas": 3, "updatedReplicas": 2}, False),
        ({"observedGeneration": 2, "replicas": 2, "updatedReplicas": 1}, False),
        ({}, False),
    ],
)
def test_a_rollout_is_complete_when_every_pod_has_the_newest_template(status: Any, is_rolled_out: bool) -> None:
    found = {"kind": "Deployment", "metadata": {"generation": 2}, "spec": {"replicas": 2}, "status": status}
    assert rolled_out(found, []) is is_rolled_out


def test_a_webhooks_change_of_an_apply_is_accepted_until_it_changes_again() -> None:
    wanted, answers = with_digest(deployment()), Answers()
    answer = stored(wanted)
    answer["spec"]["template"]["spec"]["containers"][0]["image"] = "mirror/engine:1"
    assert list(to_apply([wanted], live(answer), answers)) == [wanted]
    answers.note(wanted, answer)
    later = {**answer, "metadata": {**answer["metadata"], "resourceVersion": "9"}, "status": {"replicas": 1}}
    assert list(to_apply([wanted], live(later), answers)) == []
    drifted = copy.deepcopy(later)
    drifted["spec"]["template"]["spec"]["containers"][0]["image"] = "theirs"
    assert list(to_apply([wanted], live(drifted), answers)) == [wanted]
    another = with_digest(deployment(minReadySeconds=5))
    assert list(to_apply([another], live(later), answers)) == [another]
