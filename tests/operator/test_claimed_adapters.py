"""Who gets the name of an adapter, which replicas serve one, and what a LoRAAdapter's conditions say."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from pagemill_operator.controller.reporting.adapter_statuses import adapter_findings
from pagemill_operator.plan.adapters import (
    MAX_PODS,
    AdapterClaim,
    ClaimedAdapters,
    listed_claims,
    mounted_claim,
    resource_claim,
    serving_replicas,
)
from pagemill_protocol.report.adapters import AdapterStatus, WantedAdapter


def wanted(name: str = "sql", source: str = "hf://a/b") -> WantedAdapter:
    return WantedAdapter(name=name, source=source)


def resource(called: str, created: int, deployment: str = "chat", **spec: Any) -> AdapterClaim:
    metadata = {"name": called, "namespace": "ns", "creationTimestamp": f"2026-01-01T00:00:{created:02}Z"}
    return resource_claim({"metadata": metadata, "spec": {"deployment": deployment, "source": "hf://a/b", **spec}})


def listed(created: int, *names: str, deployment: str = "chat") -> list[AdapterClaim]:
    owner = {
        "metadata": {"creationTimestamp": f"2026-01-01T00:00:{created:02}Z"},
        "spec": {"model": {"adapters": [{"name": each, "source": "hf://a/b"} for each in names]}},
    }
    return [*listed_claims(f"ns/{deployment}", owner)]


def claimed(*claims: AdapterClaim, **models: list[str]) -> ClaimedAdapters:
    found = ClaimedAdapters()
    for number, claim in enumerate(claims):
        found.claim("LoRAAdapter", str(number), [claim])
    for deployment, names in models.items():
        found.name_models(f"ns/{deployment}", names)
    return found


def refusals(found: ClaimedAdapters, *claims: AdapterClaim) -> list[str]:
    return ["" if (refusal := found.refusal(each)) is None else refusal.reason for each in claims]


def test_of_claims_on_one_name_the_oldest_wins_whatever_the_order_of_their_arrival() -> None:
    claims = [resource("late", 9, name="sql"), resource("sql", 3), *listed(5, "sql")]
    for order in permutations(claims):
        assert refusals(claimed(*order), *claims) == ["NameConflict", "", "NameConflict"]
    found = claimed(*claims)
    assert [each.source for each in found.wanted("ns/chat")] == ["hf://a/b"]
    refusal = found.refusal(claims[2])
    assert refusal is not None
    assert refusal.message.startswith("LoRAAdapter ns/sql has the name sql already")


def test_an_entry_of_an_older_deployment_wins_and_its_end_gives_the_name_away() -> None:
    late, entry = resource("sql", 7), listed(5, "sql")
    found = claimed(late)
    assert found.claim("LLMDeployment", "ns/chat", entry) == {"ns/chat"}
    assert refusals(found, late, *entry) == ["NameConflict", ""]
    assert found.claim("LLMDeployment", "ns/chat", ()) == {"ns/chat"}
    assert refusals(found, late) == [""]
    assert found.claim("LLMDeployment", "ns/chat", ()) == set(), "nothing has changed"


def test_adapters_have_no_name_of_a_model_and_deployments_share_names_only_as_canaries() -> None:
    one, other = resource("one", 1, "chat", name="sql"), resource("other", 2, "beta", name="sql")
    assert refusals(claimed(one, other), one, other) == ["", "NameConflict"]
    assert refusals(claimed(one, other, chat=["m"], beta=["m"]), one, other) == ["", ""]
    found = claimed(one, other)
    assert found.name_models("ns/third", ["sql"]) == {"ns/chat", "ns/beta"}
    assert refusals(found, one, other) == ["NameConflict", "NameConflict"]
    assert found.name_models("ns/third", ()) == {"ns/chat", "ns/beta"}
    assert refusals(found, one, other) == ["", "NameConflict"]


@pytest.mark.parametrize("source", ["pvc://claim/a", "unknown://x/y"])
def test_a_source_that_engines_cannot_read_is_refused(source: str) -> None:
    claim = resource("a", 1, source=source)
    assert refusals(claimed(claim), claim) == ["UnsupportedSource"]


def test_a_source_on_the_models_claim_is_served_by_its_path_in_the_pods() -> None:
    own, other = resource("a", 1, source="pvc://models/loras/a b"), resource("b", 2, source="pvc://others/b")
    found = claimed(own, other)
    found.mount("ns/chat", mounted_claim({"model": {"source": "pvc://models/base"}}))
    assert refusals(found, own, other) == ["", "UnsupportedSource"]
    refusal = found.refusal(other)
    assert refusal is not None
    assert "ns/chat mount the claim models only" in refusal.message
    (asked,) = found.wanted("ns/chat")
    assert asked == WantedAdapter(name="a", source="file:///models/loras/a%20b")
    assert found.asked(own) == asked, "as engines report it"
    for model in ({"source": "hf://a/b"}, {"source": "pvc://models/base", "cache": {"size": "1Gi"}}):
        found.mount("ns/chat", mounted_claim({"model": model}))
        assert refusals(found, own) == ["UnsupportedSource"]


def status(state: Any, source: str = "hf://a/b", **fields: str) -> AdapterStatus:
    return AdapterStatus(name="sql", source=source, state=state, **fields)


def test_replicas_are_sorted_by_what_their_engines_report() -> None:
    reports = {
        "u1": [status("known", digest="d")],
        "u2": [status("fetching")],
        "u3": [status("refused", reason="AdapterTooLarge", message="rank 64 is over 16")],
        "u4": [status("known", "hf://old/source", digest="x")],
        "gone": [status("known", digest="d")],
    }
    pods = {f"u{number}": f"pod-{number}" for number in range(1, 6)}
    found = serving_replicas(wanted(), reports, pods)
    assert (found.loaded_replicas, found.loaded, found.loading) == (1, ["pod-1"], ["pod-2"])
    assert [(each.pod, each.reason) for each in found.refused] == [("pod-3", "AdapterTooLarge")]
    many = {f"u{number}": [status("known", digest="d")] for number in range(100)}
    found = serving_replicas(wanted(), many, {uid: uid for uid in many})
    assert (found.loaded_replicas, len(found.loaded)) == (100, MAX_PODS)


def test_an_adapter_is_ready_once_all_replicas_that_report_serve_it() -> None:
    reports = {"u1": [status("known", digest="d")], "u2": [status("fetching")]}
    pods = {"u1": "pod-1", "u2": "pod-2"}
    replicas = serving_replicas(wanted(), reports, pods)
    assert [each[:3] for each in adapter_findings(None, replicas, 2)] == [
        ("Accepted", "True", "Accepted"), ("Ready", "False", "Loading"),
    ]  # fmt: skip
    assert adapter_findings(None, replicas, 1)[1][1:3] == ("True", "Loaded")
    unnamed = adapter_findings(None, replicas, 1, is_named=False)[1]
    assert unnamed[1:3] == ("False", "Loading"), "gateways answer that there is no such model"
    assert "the status of the LLMDeployment" in unnamed.message
    assert adapter_findings(None, replicas.model_copy(update={"loaded_replicas": 0}), 0)[1].reason == "NoReplicas"
    refused = serving_replicas(wanted(), {"u1": [status("refused", reason="AdapterTooLarge", message="big")]}, pods)
    assert adapter_findings(None, refused, 2)[1][1:] == (
        "False",
        "AdapterTooLarge",
        "0 of 2 replicas serve it; pod-1: big",
    )
