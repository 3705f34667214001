"""The access rights are exactly those that the operator's and the gateway's code uses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from cel import evaluate

from pagemill_operator.backends.kubernetes.kinds import (
    AUTOSCALER,
    CHILD_KINDS,
    LEADER_WORKER_SET,
    LLM_DEPLOYMENT,
    LORA_ADAPTER,
    POD,
    POD_MONITOR,
    WATCHED_KINDS,
)

Variant = Callable[[str], Any]
Render = Callable[..., Any]
Rights = dict[tuple[str, str], set[str]]
"""Verbs by (group, resource), without rules that are restricted to a name."""

SECRETS, PODS = (f"pagemill-system.pagemill-operator-{kind}" for kind in ("secrets", "pods"))

CHILD_VERBS = {"get", "list", "watch", "create", "patch", "delete"}
READ = {"list", "watch"}


def rights(rules: Iterable[dict[str, Any]]) -> Rights:
    found: Rights = defaultdict(set)
    for rule in rules:
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                if "resourceNames" not in rule:
                    found[group, resource] |= set(rule["verbs"])
    return dict(found)


def rules_of(rendered: Any, kind: str, component: str) -> list[dict[str, Any]]:
    (role,) = [
        each
        for each in rendered.all(kind)
        if each["metadata"]["name"].endswith(f"-{component}")
        and (kind == "ClusterRole" or not each["metadata"]["name"].startswith("pagemill-system."))
    ]
    rules: list[dict[str, Any]] = role["rules"]
    return rules


def test_the_operator_has_the_rights_for_its_kinds(variant: Variant) -> None:
    wanted: Rights = {(kind.group, kind.plural): CHILD_VERBS for kind in CHILD_KINDS}
    wanted |= {
        (POD_MONITOR.group, POD_MONITOR.plural): CHILD_VERBS - {"watch"},
        # Only where a deployment has replicas of several pods: read by name, not watched.
        (LEADER_WORKER_SET.group, LEADER_WORKER_SET.plural): CHILD_VERBS - {"list", "watch"},
        (LLM_DEPLOYMENT.group, LLM_DEPLOYMENT.plural): READ,
        (LLM_DEPLOYMENT.group, f"{LLM_DEPLOYMENT.plural}/status"): {"patch"},
        (LORA_ADAPTER.group, LORA_ADAPTER.plural): READ,
        (LORA_ADAPTER.group, f"{LORA_ADAPTER.plural}/status"): {"patch"},
        (AUTOSCALER.group, AUTOSCALER.plural): READ,
        (POD.group, POD.plural): READ | {"patch"},
        (POD.group, f"{POD.plural}/log"): {"get"},
        ("", "events"): {"create", "patch"},
    }
    assert rights(rules_of(variant("all-namespaces"), "ClusterRole", "operator")) == wanted


def test_by_default_no_cluster_role_may_read_secrets(variant: Variant) -> None:
    default = variant("anonymous")
    opened = {
        resource for role in default.all("ClusterRole") for rule in role["rules"] for resource in rule["resources"]
    }
    of_deployments = {"llmdeployments", "llmdeployments/status", "llmdeployments/scale"}
    assert opened == of_deployments | {"loraadapters", "loraadapters/status"}, "the roles of users"
    assert default.all("ClusterRoleBinding") == []
    assert {each["metadata"]["namespace"] for each in default.all("Role")} == {"pagemill-system", "default"}
    (here,) = [
        each["rules"]
        for each in default.all("Role")
        if each["metadata"]["namespace"] == "pagemill-system" and each["metadata"]["name"] == "pagemill-operator"
    ]
    assert rights(here)["", "secrets"] == {"create", *READ}, "only its own keys, by name, may be changed"


def test_the_gateway_may_read_only_deployments_and_endpoints(variant: Variant) -> None:
    assert rights(rules_of(variant("all-namespaces"), "ClusterRole", "gateway")) == {
        ("pagemill.dev", "llmdeployments"): READ,
        ("discovery.k8s.io", "endpointslices"): READ,
    }


def test_the_gateway_may_read_one_secret_by_its_name(variant: Variant) -> None:
    (rule,) = rules_of(variant("anonymous"), "Role", "gateway")
    assert (rule["resources"], rule["resourceNames"]) == (["secrets"], ["pagemill-keys"])
    assert set(rule["verbs"]) == READ


def test_lease_and_keys_are_restricted_by_name(variant: Variant) -> None:
    rules = rules_of(variant("all-namespaces"), "Role", "operator")
    named = {
        (rule["resources"][0], rule["resourceNames"][0]): rule["verbs"] for rule in rules if "resourceNames" in rule
    }
    assert named == {
        ("leases", "pagemill-operator"): ["get", "update"],
        ("secrets", "pagemill-keys"): ["get", "patch"],
    }
    assert rights(rules) == {
        ("coordination.k8s.io", "leases"): {"create"},
        ("", "secrets"): {"create"},
    }


def test_the_operator_may_read_its_own_namespace_if_it_serves_others(
    render: Callable[..., Any], anonymous: Any
) -> None:
    rules = rules_of(render({**anonymous, "watchNamespaces": ["team-a"]}), "Role", "operator")
    rules = [rule for rule in rules if "list" in rule["verbs"]]
    watched = {(kind.group, kind.plural): {"list", "watch"} for kind in WATCHED_KINDS}
    assert rights(rules) == {**watched, (POD_MONITOR.group, POD_MONITOR.plural): {"list"}}


def test_a_namespaced_release_has_no_rights_outside_its_namespaces(variant: Variant) -> None:
    namespaced = variant("namespaced")
    for kind in ("ClusterRole", "ClusterRoleBinding", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"):
        assert namespaced.all(kind) == []
    assert {each["metadata"]["namespace"] for each in namespaced.all("Role")} == {"pagemill-system", "team-a"}
    everywhere = variant("all-namespaces")
    for component in ("operator", "gateway"):
        name = f"pagemill-system.pagemill-{component}"
        here = [each["rules"] for each in namespaced.all("Role") if each["metadata"]["name"] == name]
        assert here == [everywhere.one("ClusterRole", name)["rules"]] * 2


def test_cluster_objects_of_two_releases_have_different_names(render: Render, anonymous: Any) -> None:
    kinds = ("ClusterRole", "ClusterRoleBinding", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    names = [
        {(kind, each["metadata"]["name"]) for kind in kinds for each in rendered.all(kind)}
        for rendered in (
            render({**anonymous, "watchNamespaces": [], "fullnameOverride": "b-c"}, namespace="a"),
            render({**anonymous, "watchNamespaces": [], "fullnameOverride": "c"}, namespace="a-b"),
        )
    ]
    assert len(names[0]) == len(names[1]) == 10
    assert names[0].isdisjoint(names[1])


def test_bindings_bind_roles_to_accounts_of_pods(rendered: Any) -> None:
    accounts = {
        (spec["serviceAccountName"], "pagemill-system")
        for name, spec in rendered.pod_specs().items()
        if not name.endswith(("-test", "-redis"))
    }
    for binding in [*rendered.all("RoleBinding"), *rendered.all("ClusterRoleBinding")]:
        role = binding["roleRef"]
        assert rendered.all(role["kind"]), role
        assert role["name"] in {each["metadata"]["name"] for each in rendered.all(role["kind"])}
        (subject,) = binding["subjects"]
        assert (subject["name"], subject["namespace"]) in accounts


def test_users_get_their_rights_through_aggregated_cluster_roles(variant: Variant) -> None:
    view = variant("anonymous").one("ClusterRole", "pagemill-system.pagemill-view")
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert {verb for rule in view["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    edit = variant("anonymous").one("ClusterRole", "pagemill-system.pagemill-edit")
    assert "rbac.authorization.k8s.io/aggregate-to-view" not in edit["metadata"]["labels"]
    assert all("status" not in resource for rule in edit["rules"] for resource in rule["resources"])
    names = [each["metadata"]["name"] for each in variant("service-monitor").all("ClusterRole")]
    assert not any(name.endswith(("-view", "-edit")) for name in names)


def allowed(policy: dict[str, Any], secret: dict[str, Any]) -> bool:
    """Evaluate the policy's own expressions for one Secret."""
    label = secret.get("labels", {}).get("app.kubernetes.io/managed-by", "")
    optional = "variables.secret.metadata.?labels['app.kubernetes.io/managed-by'].orValue('')"
    variables: dict[str, Any] = {}
    for each in policy["spec"]["variables"][1:]:
        expression = each["expression"].replace(optional, f"'{label}'").replace("variables.secret.metadata", "metadata")
        variables[each["name"]] = bool(evaluate(expression, {"metadata": secret}))
    (validation,) = policy["spec"]["validations"]
    return bool(evaluate(validation["expression"], {"variables": variables}))


def test_the_operator_may_write_only_its_own_secrets(variant: Variant) -> None:
    policy = variant("anonymous").one("ValidatingAdmissionPolicy", SECRETS)
    own = {"app.kubernetes.io/managed-by": "pagemill-operator"}
    assert allowed(policy, {"namespace": "team-a", "name": "chat-engine-token", "labels": own})
    assert allowed(policy, {"namespace": "pagemill-system", "name": "pagemill-keys"})
    assert not allowed(policy, {"namespace": "team-a", "name": "pagemill-keys"})
    assert not allowed(policy, {"namespace": "team-a", "name": "database", "labels": own})
    assert not allowed(policy, {"namespace": "team-a", "name": "users-engine-token"})


def changed(policy: dict[str, Any], **fields: Any) -> bool:
    """Evaluate the policy for a change of an engine pod's fields."""
    labels = fields.pop("old_labels", {"app.kubernetes.io/managed-by": "pagemill-operator"})
    old = {"metadata": {"labels": labels}, "spec": {"image": "engine:1"}}
    new = {"metadata": {"labels": labels} | fields.pop("metadata", {}), "spec": {"image": "engine:1"} | fields}
    optional = "oldObject.metadata.?labels['app.kubernetes.io/managed-by'].orValue('')"
    (variable,) = policy["spec"]["variables"]
    expression = variable["expression"].replace(optional, f"'{labels.get('app.kubernetes.io/managed-by', '')}'")
    variables = {variable["name"]: bool(evaluate(expression, {}))}
    (validation,) = policy["spec"]["validations"]
    return bool(evaluate(validation["expression"], {"variables": variables, "object": new, "oldObject": old}))


def test_the_operator_may_change_only_annotations_of_engines(variant: Variant) -> None:
    policy = variant("anonymous").one("ValidatingAdmissionPolicy", PODS)
    assert changed(policy, metadata={"annotations": {"controller.kubernetes.io/pod-deletion-cost": "-1"}})
    assert not changed(policy, image="miner:1")
    assert not changed(policy, metadata={"labels": {"app.kubernetes.io/managed-by": "another"}})
    assert not changed(policy, old_labels={"app": "database"}, metadata={"annotations": {"a": "b"}})
    assert not changed(policy, old_labels={"app.kubernetes.io/managed-by": "Helm"})


@pytest.mark.parametrize("name", [SECRETS, PODS])
def test_policies_apply_to_the_operators_account_only(variant: Variant, name: str) -> None:
    policy = variant("anonymous").one("ValidatingAdmissionPolicy", name)
    binding = variant("anonymous").one("ValidatingAdmissionPolicyBinding", name)["spec"]
    assert binding == {"policyName": name, "validationActions": ["Deny"]}
    account = variant("anonymous").component("ServiceAccount", "operator")["metadata"]["name"]
    (condition,) = policy["spec"]["matchConditions"]
    assert condition["expression"].endswith(f"'system:serviceaccount:pagemill-system:{account}'")
    assert policy["spec"]["failurePolicy"] == "Fail"


def test_accounts_and_roles_can_be_provided_by_the_user(variant: Variant) -> None:
    single = variant("single")
    assert single.all("ServiceAccount") == single.all("Role") == single.all("ClusterRole") == []
    pods = single.pod_specs()
    assert pods["pm-operator"]["serviceAccountName"] == "my-operator"
    assert pods["pm-gateway"]["serviceAccountName"] == "default"
