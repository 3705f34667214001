"""Shards of all families: what ranks read covers each tensor once, and their declarations fit what they read."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from declared_families import NAMES, declared

from pagemill_models.declaration.caches import ChannelDeltaRuleSpec, DeltaRuleSpec, StateSpaceSpec
from pagemill_models.declaration.declaration import AttentionSpec, DecoderSpec, LinearSpec, MatrixSpec, RowGroups
from pagemill_models.sharding.linears import SPLITS, linears
from pagemill_models.sharding.shard import Shard, heads_of, layers_of_stages, shard, stage, units_of
from pagemill_models.sharding.slices import ShardError, TensorSlice, dealt, dealt_by_size, with_rows

SIZES = (2, 3, 4)


def shards_of(decoder: DecoderSpec, size: int) -> list[Shard]:
    """Return the shards, or none of a model with fewer heads than ranks, which must be refused."""
    counts = [each.num_heads for each in decoder.attentions()]
    counts += [each.num_value_heads or size for each in decoder.recurrent()]
    if min(counts) < size:
        with pytest.raises(ShardError, match=r"heads .*cannot be divided among"):
            shard(decoder, size - 1, size)
        return []
    return [shard(decoder, rank, size) for rank in range(size)]


def times_read(decoder: DecoderSpec, shards: list[Shard]) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    """Return how many ranks read each value of each tensor."""
    counts = {name: np.zeros(shape, dtype=np.int64) for name, shape in decoder.shapes().items()}
    for part in shards:
        for name in part.decoder.shapes():
            found = part.slices.get(name, TensorSlice(0, ((0, counts[name].shape[0]),)))
            for first, end in found.ranges:
                at = np.moveaxis(counts[name], found.dimension, 0)
                at[first:end] += 1
    return counts


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_slices_of_all_ranks_cover_each_tensor_once(name: str, size: int) -> None:
    decoder = declared(name)
    if not (shards := shards_of(decoder, size)):
        return
    counts = times_read(decoder, shards)
    divided = {stored.name: use for use in linears(decoder) for stored in use.stored() if use.split != "whole"}
    shared_keys = any(isinstance(each, AttentionSpec) and each.num_kv_heads < size for each in decoder.attentions())
    for tensor, times in counts.items():
        use = divided.get(tensor) or divided.get(tensor.removesuffix(".bias") + ".weight")
        if use is None:
            assert times.min() >= 1
        elif use.role == "qkv" and shared_keys:
            attention = next(each for each in decoder.attentions() if each.qkv is use.spec)
            assert isinstance(attention, AttentionSpec)
            # Each rank has one key and one value head.
            heads = sum(
                int(counts[part].reshape(len(counts[part]), -1)[:, 0].sum()) // attention.head_dim
                for part in (stored.name for stored in use.stored())
            )
            assert heads == attention.num_heads * (1 + attention.gated) + attention.key_parts * size
            assert times.min() >= 1
        elif use.role == "state_inputs" and num_repeated(decoder, size):
            # Each rank has one head of keys, or one group.
            rows = sum(counts[stored.name].sum() // use.spec.in_features for stored in use.stored())
            assert rows == use.spec.out_features + num_repeated(decoder, size)
            assert times.min() >= 1
        else:
            assert (times.min(), times.max()) == (1, 1), tensor


def num_repeated(decoder: DecoderSpec, size: int) -> int:
    """Return the rows of a recurrent layer's inputs that ranks have in addition to the whole model's."""
    spec = next(decoder.recurrent(), None)
    if isinstance(spec, DeltaRuleSpec):
        return 2 * spec.key_dim * max(0, size - spec.num_key_heads)
    return 2 * spec.state_size * max(0, size - spec.num_groups) if isinstance(spec, StateSpaceSpec) else 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_declarations_of_ranks_have_the_shapes_of_what_they_read(name: str, size: int) -> None:
    decoder = declared(name)
    whole = decoder.shapes()
    for part in shards_of(decoder, size):
        for tensor, shape in part.decoder.shapes().items():
            found = part.slices.get(tensor)
            read = list(whole[tensor])
            if found is not None:
                read[found.dimension] = found.size
            assert tuple(read) == shape, tensor
        assert part.slices.keys() <= part.decoder.shapes().keys()
        assert len(linears(part.decoder)) == len(linears(decoder))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_inputs_of_a_product_are_the_outputs_of_the_one_before(name: str, size: int) -> None:
    for part in shards_of(declared(name), size):
        for attention in part.decoder.attentions():
            if isinstance(attention, AttentionSpec):
                heads = attention.num_heads * (1 + attention.gated) + attention.key_parts * attention.num_kv_heads
                assert attention.qkv.out_features == heads * attention.head_dim
                assert attention.output.in_features == attention.num_heads * attention.head_dim
                slopes = attention.alibi_slopes
                assert slopes is None or len(slopes) == attention.num_heads
        for each in part.decoder.recurrent():
            size_of = {DeltaRuleSpec: "value_dim", ChannelDeltaRuleSpec: "value_dim", StateSpaceSpec: "head_dim"}
            inner = each.num_value_heads * getattr(each, size_of.get(type(each), ""), 0) or each.channels
            assert each.output.in_features == inner


def test_what_does_not_divide_is_dealt_as_evenly_as_it_goes() -> None:
    assert dealt(3, 2) == [(0, 2), (2, 3)]
    assert [heads.queries for heads in heads_of(12, 3, 2)] == [(0, 8), (8, 12)]
    assert [heads.keys for heads in heads_of(12, 3, 2)] == [(0, 2), (2, 3)]
    for count in range(1, 40):
        for size in range(1, min(count, 9) + 1):
            sizes = [end - first for first, end in dealt(count, size)]
            assert sum(sizes) == count
            assert max(sizes) - min(sizes) <= 1


def test_key_heads_are_repeated_where_there_are_fewer_than_ranks() -> None:
    found = heads_of(8, 2, 3)
    assert [heads.keys for heads in found] == [(0, 1), (0, 1), (1, 2)]
    assert [heads.queries for heads in found] == [(0, 2), (2, 4), (4, 8)]
    assert [heads.is_first for heads in found] == [True, False, True]
    with pytest.raises(ShardError, match="4 attention heads cannot be divided among 5 ranks"):
        heads_of(4, 1, 5)


@pytest.mark.parametrize(("inner", "size"), [(8960, 2), (4864, 3), (96, 4), (91, 3), (11008, 4), (1536, 2)])
def test_inner_units_are_whole_groups_of_quantized_matrices_where_it_goes(inner: int, size: int) -> None:
    units = units_of(inner, size)
    assert (units[0][0], units[-1][1]) == (0, inner)
    assert all(first[1] == second[0] for first, second in pairwise(units))
    if inner % 32 == 0 and inner // 32 >= size:
        assert all(first % 32 == 0 for first, _ in units)


def test_231_groups_are_116_and_115() -> None:
    for group in (32, 64, 256):
        assert units_of(231 * group, 2) == [(0, 116 * group), (116 * group, 231 * group)]


def test_parts_of_units_are_found_in_the_units_that_contain_them() -> None:
    assert TensorSlice(1, ((384, 768),)).in_units(256) == (TensorSlice(1, ((256, 768),)), TensorSlice(1, ((128, 512),)))
    twice = TensorSlice(0, ((10, 20), (30, 40), (100, 101)))
    assert twice.in_units(32) == (TensorSlice(0, ((0, 64), (96, 128))), TensorSlice(0, ((10, 20), (30, 40), (68, 69))))
    assert twice.in_units(1) == (twice, TensorSlice(0, ((0, 21),)))


def test_rows_of_groups_are_found_where_they_are_stored() -> None:
    grouped = LinearSpec(4, (MatrixSpec(name="wqkv", rows=24, groups=RowGroups(2, (8, 2, 2))),))
    # The second group's queries, key and value.
    spec, slices = with_rows(grouped, ((8, 16), (18, 20), (22, 24)))
    assert slices["wqkv.weight"] == TensorSlice(0, ((12, 24),))
    assert spec.parts[0].groups == RowGroups(1, (8, 2, 2))
    # Half of the first group's queries with its key and value.
    spec, slices = with_rows(grouped, ((0, 4), (16, 18), (20, 22)))
    assert slices["wqkv.weight"] == TensorSlice(0, ((0, 4), (8, 12)))
    assert spec.parts[0].groups == RowGroups(1, (4, 2, 2))
    with pytest.raises(ShardError, match="`wqkv` stores its rows in groups"):
        with_rows(grouped, ((0, 10), (16, 20)))


def test_a_model_whose_layers_read_more_than_the_one_before_has_no_stages() -> None:
    with pytest.raises(ShardError, match="inputs of layers, which stages do not pass on"):
        stage(declared("gemma4"), 0, 2)
    shared = msgspec.structs.replace(declared("gemma4").embedding, layer_inputs=None)
    with pytest.raises(ShardError, match="layers with the keys of others"):
        stage(msgspec.structs.replace(declared("gemma4"), embedding=shared), 0, 2)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gemma4"])
def test_stages_hold_each_tensor_once(name: str) -> None:
    decoder = declared(name)
    middle = len(decoder.layers) // 2
    stages = [stage(decoder, 0, middle), stage(decoder, middle, len(decoder.layers))]
    held = Counter(tensor for each in stages for tensor in each.shapes())
    assert held.keys() == decoder.shapes().keys()
    entry = f"{decoder.embedding.name}.weight"
    divisors = {rope.divisors for rope in decoder.ropes()}
    assert {tensor for tensor, times in held.items() if times > 1} - divisors == (
        {entry} if decoder.head is not None and decoder.head.tied else set()
    )
    assert sum(len(each.layers) for each in stages) == len(decoder.layers)
    with pytest.raises(ShardError, match="no stage of a model"):
        stage(decoder, middle, len(decoder.layers) + 1)


def test_stages_have_equal_work_whatever_the_head_takes() -> None:
    assert dealt_by_size([1] * 30 + [9], 2) == [(0, 20), (20, 31)]
    assert dealt_by_size([1] * 31, 4) == [(0, 8), (8, 16), (16, 24), (24, 31)]
    assert dealt_by_size([1, 1, 1, 100], 3) == [(0, 2), (2, 3), (3, 4)], "no stage is empty"
    layer = declared("llama").layers[0]
    decoder = msgspec.structs.replace(declared("llama"), layers=(layer,) * 10)
    rows_of_a_layer = sum(map(math.prod, layer.shapes().values())) // decoder.hidden_size
    for num_layers, ends in ((0, 5), (4, 7), (8, 9), (100, 9)):
        with_head = msgspec.structs.replace(decoder, vocab_size=num_layers * rows_of_a_layer + 1)
        assert layers_of_stages(with_head, 2) == [(0, ends), (ends, 10)]


def test_a_model_of_transformers_is_refused_by_name() -> None:
    decoder = msgspec.structs.replace(declared("llama"), by_transformers=True, architecture="FooForCausalLM")
    with pytest.raises(ShardError, match="`FooForCausalLM` runs by its class in transformers"):
        shard(decoder, 0, 2)


def test_every_role_says_how_it_is_divided() -> None:
    roles = {use.role for name in NAMES for use in linears(declared(name))}
    assert roles == SPLITS.keys()


def test_a_rank_holds_its_share_of_a_model() -> None:
    decoder = declared("llama")
    whole = sum(map(math.prod, decoder.shapes().values()))
    for part in shards_of(decoder, 2):
        assert sum(map(math.prod, part.decoder.shapes().values())) < 0.52 * whole
