"""Who holds a name: the operator and the gateway give the same answer."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import pytest

from pagemill_gateway.discovery.kubernetes.builder import build_catalog
from pagemill_gateway.discovery.kubernetes.objects import LLMDeployment
from pagemill_operator.controller.cache import Names, claim_of


class Wish(NamedTuple):
    """One deployment, called `key`, with the names that it wants beside that."""

    key: str
    names: tuple[str, ...]
    weight: int | None = None
    created: int = 0


TABLE: dict[str, tuple[list[Wish], set[str]]] = {
    "alone": ([Wish("ns/a", ("x",))], {"ns/a"}),
    "older wins": ([Wish("ns/a", ("x",), created=1), Wish("ns/b", ("x",))], {"ns/b"}),
    "alias against name": ([Wish("ns/a", ("x", "y")), Wish("ns/b", ("y",), created=1)], {"ns/a"}),
    "both share": ([Wish("ns/a", ("x",), 90), Wish("ns/b", ("x",), 10, 1)], {"ns/a", "ns/b"}),
    "one alone wants to share": ([Wish("ns/a", ("x",)), Wish("ns/b", ("x",), 10, 1)], {"ns/a"}),
    "zero is a weight": ([Wish("ns/a", ("x",), 100), Wish("ns/b", ("x",), 0, 1)], {"ns/a", "ns/b"}),
    "who lost holds nothing": (
        [Wish("ns/a", ("x",)), Wish("ns/b", ("x", "y"), created=1), Wish("ns/c", ("y",), created=2)],
        {"ns/a", "ns/c"},
    ),
    "who lost its alias does not keep its name": (
        [Wish("ns/a", ("x",)), Wish("ns/b", ("y", "x"), created=1), Wish("ns/c", ("y",), created=2)],
        {"ns/a", "ns/c"},
    ),
    "born together": ([Wish("a/x", ("m",)), Wish("a-b/x", ("m",))], {"a/x"}),
}


def raw(wish: Wish) -> dict[str, Any]:
    namespace, _, name = wish.key.partition("/")
    routing = {} if wish.weight is None else {"weight": wish.weight}
    return {
        "apiVersion": "pagemill.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {
            "namespace": namespace,
            "name": name,
            "generation": 1,
            "creationTimestamp": f"2026-01-01T00:00:{wish.created:02d}Z",
        },
        "spec": {
            "model": {"source": "package://m", "name": wish.names[0], "aliases": list(wish.names[1:])},
            "routing": routing,
        },
    }


@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize("turn", [1, -1])
def test_operator_and_gateway_agree_on_who_holds_a_name(row: str, turn: int) -> None:
    wishes, holders = TABLE[row]
    objects = [raw(wish) for wish in wishes[::turn]]
    names = Names()
    for wish, manifest in zip(wishes[::turn], objects, strict=True):
        names.claim(claim_of(wish.key, manifest))
    assert {wish.key for wish in wishes if names.conflict(wish.key) is None} == holders
    decoded = [msgspec.json.decode(msgspec.json.encode(each), type=LLMDeployment) for each in objects]
    assert {f"{model.namespace}/{model.deployment}" for model in build_catalog(decoded, [], None).models} == holders
