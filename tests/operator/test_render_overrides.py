"""Overrides of the pod template are merged like a strategic merge patch without losing what the operator needs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_crds.models import LLMDeployment
from pagemill_operator.backends.kubernetes.render.overrides import merge
from pagemill_operator.backends.kubernetes.render.pod import engine_template
from pagemill_operator.backends.kubernetes.snapshot import RenderContext
from pagemill_operator.plan import make_plan
from pagemill_operator.plan.support import Backend

Make = Callable[..., LLMDeployment]
CONTEXT = RenderContext(namespace="pagemill-system", engine_image="pagemill/engine:1")


def template(deployment: LLMDeployment) -> dict[str, Any]:
    plan = make_plan(deployment, "kubernetes")
    assert plan.problems == ()
    return engine_template(plan, CONTEXT)


def test_objects_are_merged_and_scalars_replaced() -> None:
    base = {"a": {"b": 1, "c": 2}, "d": 3}
    assert merge(base, {"a": {"b": 9}, "e": 4}) == {"a": {"b": 9, "c": 2}, "d": 3, "e": 4}


def test_items_with_equal_names_are_merged_and_others_added() -> None:
    base = {"containers": [{"name": "engine", "image": "x", "env": [{"name": "A", "value": "1"}]}]}
    override = {"containers": [{"name": "side"}, {"name": "engine", "env": [{"name": "B", "value": "2"}]}]}
    engine, side = merge(base, override)["containers"]
    assert engine == {"name": "engine", "image": "x", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]}
    assert side == {"name": "side"}


def test_tolerations_are_added_and_plain_lists_replaced() -> None:
    base = {"tolerations": [{"key": "a"}], "args": ["x"]}
    override = {"tolerations": [{"key": "b"}, {"key": "a"}], "args": ["y", "z"]}
    assert merge(base, override) == {"tolerations": [{"key": "a"}, {"key": "b"}], "args": ["y", "z"]}


def test_null_removes_nothing() -> None:
    base = {"securityContext": {"runAsNonRoot": True}, "containers": [{"name": "engine", "image": "x"}]}
    override = {"securityContext": None, "containers": [{"name": "engine", "image": None}], "new": {"a": None}}
    assert merge(base, override) == {**base, "new": {}}


def test_null_removes_the_ids_that_a_platform_assigns() -> None:
    base = {"securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "fsGroup": 65532}}
    override = {"securityContext": {"runAsUser": None, "fsGroup": None, "runAsGroup": None, "runAsNonRoot": None}}
    assert merge(base, override) == {"securityContext": {"runAsNonRoot": True}}


def json_of(fields: list[str]) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda children: (
            st.lists(children, max_size=3) | st.dictionaries(st.sampled_from(fields), children, max_size=3)
        ),
        max_leaves=12,
    )


JSON = json_of(["name", "env", "containers", "tolerations", "x"])
# An item without the key of its list has no identity: it is added each time, and the API server refuses it.
PLAIN = json_of(["name", "x", "y"])


@given(JSON, JSON)
def test_merging_accepts_everything_and_changes_neither_side(base: Any, override: Any) -> None:
    before = copy.deepcopy((base, override))
    merge(base, override)
    assert (base, override) == before


NAMED = st.lists(st.dictionaries(st.just("name"), st.sampled_from("ABC"), min_size=1), max_size=3)


@given(st.fixed_dictionaries({}, optional={"x": PLAIN, "tolerations": NAMED, "env": NAMED}))
def test_merging_twice_equals_merging_once(override: dict[str, Any]) -> None:
    base: dict[str, Any] = {"x": {"a": 1}, "env": [{"name": "A"}], "tolerations": []}
    once = merge(base, override)
    assert merge(once, override) == once


def test_all_fields_of_the_operator_survive_overrides(deployment: Make) -> None:
    overrides = {
        "metadata": {"labels": {"team": "search"}, "annotations": {"note": "x"}},
        "spec": {
            "priorityClassName": "high",
            "nodeSelector": {"disk": "ssd"},
            "securityContext": {"runAsUser": 1000},
            "volumes": [{"name": "extra", "emptyDir": {}}],
            "containers": [
                {
                    "name": "engine",
                    "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
                    "env": [{"name": "HOME", "value": "/extra"}],
                    "livenessProbe": {"failureThreshold": 10},
                    "resources": {"requests": {"cpu": "50m"}},
                },
                {"name": "side", "image": "side:1"},
            ],
        },
    }
    plain = template(deployment())
    merged = template(deployment(template=overrides, resources={"cpu": 1}))
    pod, (engine, side) = merged["spec"], merged["spec"]["containers"]
    assert plain["metadata"]["labels"].items() <= merged["metadata"]["labels"].items()
    assert merged["metadata"]["labels"]["team"] == "search"
    assert pod["securityContext"] == {**plain["spec"]["securityContext"], "runAsUser": 1000}
    assert [volume["name"] for volume in pod["volumes"]] == ["settings", "token", "tmp", "extra"]
    mounts = [mount["mountPath"] for mount in engine["volumeMounts"]]
    assert mounts == ["/etc/pagemill", "/var/run/secrets/pagemill", "/tmp", "/extra"]
    assert engine["env"] == [{"name": "HOME", "value": "/extra"}]
    assert engine["livenessProbe"]["failureThreshold"] == 10
    assert engine["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert engine["resources"] == {"requests": {"cpu": "50m"}, "limits": {"cpu": "1000m"}}
    assert engine["securityContext"] == plain["spec"]["containers"][0]["securityContext"]
    assert side == {"name": "side", "image": "side:1"}
    assert pod["priorityClassName"] == "high"


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"metadata": {"labels": {"pagemill.dev/deployment": "x"}}}, "metadata.labels[pagemill.dev/deployment]"),
        (
            {"metadata": {"labels": {"app.kubernetes.io/component": "x"}}},
            "metadata.labels[app.kubernetes.io/component]",
        ),
        ({"metadata": {"annotations": {"pagemill.dev/template": "x"}}}, "metadata.annotations[pagemill.dev/template]"),
        ({"spec": {"restartPolicy": "Never"}}, "spec.restartPolicy"),
        ({"spec": {"terminationGracePeriodSeconds": 60}}, "spec.terminationGracePeriodSeconds"),
        ({"spec": {"terminationGracePeriodSeconds": "long"}}, "spec.terminationGracePeriodSeconds"),
        ({"spec": {"volumes": [{"name": "token", "emptyDir": {}}]}}, "spec.volumes[0].name"),
        ({"spec": {"volumes": "none"}}, "spec.volumes"),
        ({"spec": {"containers": [{"name": "engine", "image": "x"}]}}, "spec.containers[0].image"),
        ({"spec": {"containers": [{"name": "engine", "args": ["--x"]}]}}, "spec.containers[0].args"),
        (
            {"spec": {"containers": [{"name": "engine", "lifecycle": {"preStop": {"sleep": {"seconds": 1}}}}]}},
            "spec.containers[0].lifecycle.preStop",
        ),
        (
            {"spec": {"containers": [{"name": "engine", "terminationMessagePath": "/tmp/x"}]}},
            "spec.containers[0].terminationMessagePath",
        ),
        (
            {"spec": {"containers": [{"name": "engine", "terminationMessagePolicy": "FallbackToLogsOnError"}]}},
            "spec.containers[0].terminationMessagePolicy",
        ),
        (
            {"spec": {"containers": [{"name": "engine", "volumeMounts": [{"mountPath": "/models/"}]}]}},
            "spec.containers[0].volumeMounts[0].mountPath",
        ),
        (
            {"spec": {"containers": [{"name": "engine", "ports": [{"containerPort": 8000}]}]}},
            "spec.containers[0].ports[0]",
        ),
        ({"spec": {"containers": [{"name": "engine", "env": {"A": "b"}}]}}, "spec.containers[0].env"),
    ],
    ids=str,
)
def test_an_override_that_would_break_a_pod_is_a_problem(
    deployment: Make, overrides: dict[str, Any], field: str
) -> None:
    (problem,) = make_plan(deployment(template=overrides), "kubernetes").problems
    assert problem.field == f"spec.template.{field}"


@pytest.mark.parametrize(
    "pod",
    [
        {"restartPolicy": None},
        {"containers": [{"name": "engine", "args": None, "image": None, "lifecycle": {"preStop": None}}]},
        {"containers": [{"name": "engine", "lifecycle": {"postStart": {"exec": {"command": ["true"]}}}}]},
        {"containers": [{"name": "side", "image": "x", "args": ["--x"], "lifecycle": {"preStop": {"sleep": {}}}}]},
    ],
    ids=str,
)
def test_null_and_the_users_own_containers_are_no_problem(deployment: Make, pod: dict[str, Any]) -> None:
    plan = make_plan(deployment(template={"spec": pod}), "kubernetes")
    assert (plan.problems, plan.notes) == ((), ())


@pytest.mark.parametrize("name", ["command", "livenessProbe", "readinessProbe", "startupProbe"])
def test_a_risky_override_is_noted(deployment: Make, name: str) -> None:
    containers = [{"name": "engine", name: ["x"]}, {"name": "side", "image": "x", name: ["x"]}]
    plan = make_plan(deployment(template={"spec": {"containers": containers}}), "kubernetes")
    assert [note.field for note in plan.notes] == [f"spec.template.spec.containers[0].{name}"]


def test_a_longer_grace_period_is_allowed(deployment: Make) -> None:
    longer = deployment(template={"spec": {"terminationGracePeriodSeconds": 600}})
    assert template(longer)["spec"]["terminationGracePeriodSeconds"] == 600


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"hostNetwork": True}, "hostNetwork"),
        ({"securityContext": {"runAsNonRoot": False}}, "securityContext.runAsNonRoot"),
        ({"securityContext": {"runAsUser": 0}}, "securityContext.runAsUser"),
        (
            {"containers": [{"name": "engine", "securityContext": {"privileged": True}}]},
            "containers[0].securityContext.privileged",
        ),
        (
            {"containers": [{"name": "a", "securityContext": {"capabilities": {"add": ["NET_ADMIN"]}}}]},
            "containers[0].securityContext.capabilities.add",
        ),
        (
            {"initContainers": [{"name": "a", "securityContext": {"seccompProfile": {"type": "Unconfined"}}}]},
            "initContainers[0].securityContext.seccompProfile",
        ),
    ],
    ids=str,
)
def test_an_override_that_weakens_security_is_noted(deployment: Make, overrides: dict[str, Any], field: str) -> None:
    plan = make_plan(deployment(template={"spec": overrides}), "kubernetes")
    assert plan.problems == ()
    assert [note.field for note in plan.notes] == [f"spec.template.spec.{field}"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("pvc://Claim_/x", "not the name of a PersistentVolumeClaim"),
        ("pvc://claim/../../etc", "leaves the volume"),
    ],
)
def test_a_source_that_no_pod_can_read_is_refused(deployment: Make, source: str, words: str) -> None:
    (problem,) = make_plan(deployment(model__source=source), "kubernetes").problems
    assert problem.field == "spec.model.source"
    assert words in problem.message


def test_credentials_without_a_loader_are_refused(deployment: Make) -> None:
    changes: dict[str, Any] = {"model__source": "hf://a/b", "model__credentialsSecretRef": {"name": "s"}}
    (problem,) = make_plan(deployment(**changes), "kubernetes").problems
    assert problem.field == "spec.model.credentialsSecretRef"
    assert make_plan(deployment(**changes, model__cache={"size": "1Gi"}), "kubernetes").problems == ()


@pytest.mark.parametrize("backend", ["kubernetes", "local"])
def test_an_engine_with_a_gpu_uses_it(deployment: Make, backend: Backend) -> None:
    plan = make_plan(deployment(resources={"gpus": 1}, engine={"dtype": "float16", "kvCacheDtype": "int8"}), backend)
    assert (plan.problems, plan.notes) == ((), ())
    assert plan.groups[0].process.settings["engine"]["device"] == "cuda"
    assert "device" not in make_plan(deployment(), backend).groups[0].process.settings["engine"]


def test_a_volume_of_one_node_for_several_pods_is_noted(deployment: Make) -> None:
    changes: dict[str, Any] = {"model__source": "hf://a/b", "replicas": 2}
    noted = make_plan(deployment(**changes, model__cache={"size": "1Gi"}), "kubernetes").notes
    assert [note.field for note in noted] == ["spec.model.cache.accessMode"]
    one: dict[str, Any] = {"model__source": "hf://a/b", "model__cache": {"size": "1Gi"}}
    assert [note.field for note in make_plan(deployment(**one), "kubernetes").notes] == ["spec.model.cache.accessMode"]
    alone = {"maxSurge": 0, "maxUnavailable": 1}
    assert make_plan(deployment(**one, rollout=alone), "kubernetes").notes == ()
    shared = {"size": "1Gi", "accessMode": "ReadWriteMany"}
    assert make_plan(deployment(**changes, model__cache=shared), "kubernetes").notes == ()
