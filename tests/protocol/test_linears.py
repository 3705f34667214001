"""All linear layers of a declaration have a number, a role, and the names and rows of their stored matrices."""

from __future__ import annotations

from collections import Counter

import pytest
from declared_families import NAMES, declared

from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.sharding.linears import LinearUse, linears


def embedded(decoder: DecoderSpec) -> Counter[str]:
    return Counter([f"{decoder.embedding.name}.weight"])


@pytest.mark.parametrize("name", NAMES)
def test_every_matrix_of_a_family_is_in_one_linear_layer(name: str) -> None:
    decoder = declared(name)
    uses = linears(decoder)
    assert [use.number for use in uses] == list(range(len(uses)))
    named = Counter(stored.name for use in uses for stored in use.stored())
    tables = (decoder.embedding.positions, decoder.embedding.token_types)
    not_linear = {f"{table.name}.weight" for table in tables if table is not None}
    for attention in decoder.attentions():
        norms = (attention.query_norm, getattr(attention, "key_norm", None))
        not_linear |= {name for norm in norms if norm is not None for name in norm.weight_shapes()}
    matrices = {name for name, shape in decoder.shapes().items() if len(shape) == 2} - not_linear
    assert named.keys() == matrices
    tied = decoder.head is not None and decoder.head.tied
    assert {name for name, times in named.items() if times > 1} == (set(embedded(decoder)) if tied else set())
    for use in uses:
        assert [stored.end - stored.first for stored in use.stored()] == [part.rows for part in use.spec.parts]


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_of_a_layer_follow_the_order_of_its_blocks(name: str) -> None:
    decoder = declared(name)
    by_layer: dict[int, list[LinearUse]] = {}
    for use in linears(decoder):
        if use.layer is not None:
            by_layer.setdefault(use.layer, []).append(use)
    for index, layer in enumerate(decoder.layers):
        declared_order = [each for block in layer.blocks() for each in block.linears()]
        assert [use.spec for use in by_layer[index]] == declared_order
        numbers = [use.number for use in by_layer[index]]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_roles_of_a_mixture_name_its_experts() -> None:
    every = linears(declared("qwen2_moe"))
    sparse = next(use.layer for use in every if use.role == "router")
    uses = [use for use in every if use.layer == sparse]
    experts = [use.expert for use in uses if use.role == "expert_up"]
    assert experts == list(range(len(experts)))
    assert len(experts) > 1
    assert [use.role for use in uses if use.expert is None] == [
        "qkv", "output", "router", "shared_up", "shared_down", "shared_gate",
    ]  # fmt: skip
