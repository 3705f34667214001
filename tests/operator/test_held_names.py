"""The operator and the gateway agree on which deployment has a model name."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import pytest

from pagemill_gateway.discovery.kubernetes.builder import build_catalog
from pagemill_gateway.discovery.kubernetes.objects import WatchedDeployment
from pagemill_operator.controller.watching.cache import ClaimedNames, claim_of


class Claim(NamedTuple):
    """A deployment `key` and the other names that it requests."""

    key: str
    names: tuple[str, ...]
    weight: int | None = None
    created: int = 0


TABLE: dict[str, tuple[list[Claim], set[str]]] = {
    "alone": ([Claim("ns/a", ("x",))], {"ns/a"}),
    "older wins": ([Claim("ns/a", ("x",), created=1), Claim("ns/b", ("x",))], {"ns/b"}),
    "alias against name": ([Claim("ns/a", ("x", "y")), Claim("ns/b", ("y",), created=1)], {"ns/a"}),
    "both share": ([Claim("ns/a", ("x",), 90), Claim("ns/b", ("x",), 10, 1)], {"ns/a", "ns/b"}),
    "one alone wants to share": ([Claim("ns/a", ("x",)), Claim("ns/b", ("x",), 10, 1)], {"ns/a"}),
    "zero is a weight": ([Claim("ns/a", ("x",), 100), Claim("ns/b", ("x",), 0, 1)], {"ns/a", "ns/b"}),
    "who lost holds nothing": (
        [Claim("ns/a", ("x",)), Claim("ns/b", ("x", "y"), created=1), Claim("ns/c", ("y",), created=2)],
        {"ns/a", "ns/c"},
    ),
    "who lost its alias does not keep its name": (
        [Claim("ns/a", ("x",)), Claim("ns/b", ("y", "x"), created=1), Claim("ns/c", ("y",), created=2)],
        {"ns/a", "ns/c"},
    ),
    "born together": ([Claim("a/x", ("m",)), Claim("a-b/x", ("m",))], {"a/x"}),
}


def raw(claim: Claim) -> dict[str, Any]:
    namespace, _, name = claim.key.partition("/")
    routing = {} if claim.weight is None else {"weight": claim.weight}
    return {
        "apiVersion": "pagemill.dev/v1beta1",
        "kind": "LLMDeployment",
        "metadata": {
            "namespace": namespace,
            "name": name,
            "generation": 1,
            "creationTimestamp": f"2026-01-01T00:00:{claim.created:02d}Z",
        },
        "spec": {
            "model": {"source": "package://m", "name": claim.names[0], "aliases": list(claim.names[1:])},
            "routing": routing,
        },
    }


@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize("turn", [1, -1])
def test_operator_and_gateway_agree_on_the_owner_of_a_name(row: str, turn: int) -> None:
    fields, holders = TABLE[row]
    objects = [raw(claim) for claim in fields[::turn]]
    names = ClaimedNames()
    for claim, manifest in zip(fields[::turn], objects, strict=True):
        names.claim(claim_of(claim.key, manifest))
    assert {claim.key for claim in fields if names.conflict(claim.key) is None} == holders
    decoded = [msgspec.json.decode(msgspec.json.encode(each), type=WatchedDeployment) for each in objects]
    assert {f"{model.namespace}/{model.deployment}" for model in build_catalog(decoded, [], None).models} == holders
