"""Models of all families that threads compute together, each a shard, give the outputs of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from declared_families import NAMES, RECURRENT, RandomTensors, architecture_of, declared
from in_process_ranks import InProcessGroup
from in_ranks import by_threads, outputs_natively, outputs_on_torch, whole_of
from scripted_adapters import natively as natively_adapted
from scripted_adapters import on_torch, scripted

from pagemill_execution.decoders.native.layers import can_fuse
from pagemill_kernels.cpu import library
from pagemill_kernels.ranks.group import GroupAborted
from pagemill_kernels.ranks.memory import SharedMemory
from pagemill_kernels.ranks.shared_memory import SharedMemoryGroup, group_bytes
from pagemill_models.declaration.caches import StateSpaceSpec
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.known import BUILT_IN
from pagemill_models.sharding.shard import Shard, shard, stage
from pagemill_models.sharding.slices import TensorSlice

SAMPLE = ("llama", "olmo2", "gpt_oss", "deepseek_v3", "gpt_neox", "bert", "qwen2_moe")
TOLERANCE = 1e-5
Change = Callable[[Shard, int], Shard]


def fits(name: str, size: int) -> bool:
    recurrent = (each.num_value_heads or size for each in declared(name).recurrent())
    return min(*(each.num_heads for each in declared(name).attentions()), *recurrent, size) >= size


HYBRIDS = {
    ("qwen3.5", 2), ("qwen3-next", 3), ("olmo-hybrid", 4), ("kimi-linear", 3), ("lfm2", 3), ("nemotron-h", 2),
    ("bamba", 4), ("falcon-h1 with norms before the gates", 3),
}  # fmt: skip
"""Of the models with states, those that `make test` divides, and among how many ranks."""
CASES = [
    pytest.param(name, size, marks=() if name in SAMPLE or (name, size) in HYBRIDS else pytest.mark.full)
    for name in NAMES
    for size in (2, 3, 4)
    if fits(name, size)
]
NATIVELY = [
    name
    for name in NAMES
    if can_fuse(declared(name)) and all(each.head_dim % 16 == 0 for each in declared(name).attentions())
]
NATIVE_SAMPLE = (*SAMPLE, "phi", "mixtral")
NATIVE_CASES = [
    pytest.param(
        name, size, marks=() if name in (*NATIVE_SAMPLE, "granite") or (name, size) in HYBRIDS else pytest.mark.full
    )
    for name in NATIVELY
    for size in (2, 3, 4)
    if fits(name, size)
]
natively = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")


def test_every_family_is_divided_here() -> None:
    divided = {architecture_of(name) for name in NAMES}
    assert [name for name, known in BUILT_IN.items() if not divided & {*known.architectures}] == []


def largest_difference(
    name: str,
    size: int,
    change: Change = lambda part, rank: part,
    outputs: Callable[..., list[Any]] = outputs_on_torch,
) -> float:
    """Return the largest difference of a rank's outputs to the whole's, relative to the largest output."""
    decoder = declared(name)
    expected = outputs(decoder, whole_of(decoder), None)

    def run(group: InProcessGroup) -> list[Any]:
        return outputs(decoder, change(shard(decoder, group.rank, size), group.rank), group)

    ranks = by_threads(run, size)
    for found in ranks[1:]:
        assert all(np.array_equal(mine, first) for mine, first in zip(found, ranks[0], strict=True))
    return max(
        float(np.abs(mine - whole).max() / max(1.0, np.abs(whole).max()))
        for mine, whole in zip(ranks[0], expected, strict=True)
    )


class LastBits(RandomTensors):
    """Random tensors whose embedding is rounded up or down in its last bits."""

    def __init__(self, decoder: DecoderSpec, seed: int) -> None:
        super().__init__(decoder)
        self._seed = seed

    def array(self, name: str) -> Any:
        found = super().array(name)
        if "embed" not in name:
            return found
        steps = np.random.default_rng(self._seed).integers(-1, 2, found.shape)
        return (found * (1 + steps * 2.0**-23)).astype(np.float32)


def tolerance_of(name: str, outputs: Callable[..., list[Any]]) -> float:
    """Return by how much ranks may differ: of a rule over random weights, which can amplify what is rounded, by no more
    than the outputs of one process when the last bits of its embedding change."""
    if name not in RECURRENT:
        return TOLERANCE
    decoder = declared(name)
    whole, found = outputs(decoder, whole_of(decoder), None), [TOLERANCE]
    for seed in range(4):
        other = outputs(decoder, whole_of(decoder), None, source=LastBits(decoder, seed))
        pairs = zip(other, whole, strict=True)
        found += [float(np.abs(mine - own).max() / max(1.0, np.abs(own).max())) for mine, own in pairs]
    return max(found)


@pytest.mark.parametrize(("name", "size"), CASES)
def test_shards_give_the_outputs_of_the_whole(name: str, size: int) -> None:
    difference = largest_difference(name, size)
    assert difference < TOLERANCE or difference < tolerance_of(name, outputs_on_torch)


@natively
@pytest.mark.parametrize(("name", "size"), NATIVE_CASES)
def test_native_shards_give_the_outputs_of_the_whole(name: str, size: int) -> None:
    difference = largest_difference(name, size, outputs=outputs_natively)
    assert difference < TOLERANCE or difference < tolerance_of(name, outputs_natively)


BY_ALL = [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.full) for name in NAMES]
NATIVELY_BY_ALL = [
    pytest.param(name, marks=() if name in (*NATIVE_SAMPLE, "qwen3.5", "nemotron-h") else pytest.mark.full)
    for name in NATIVELY
]


def same_bits(name: str, outputs: Callable[..., list[Any]], adapters_of: Callable[..., Any]) -> None:
    """The share of one rank, and adapters that no row has, must not change a bit of a family's float32 outputs."""
    decoder = declared(name)
    plain = outputs(decoder, whole_of(decoder), None)
    ranked = outputs(decoder, shard(decoder, 0, 1), None)
    beside = outputs(decoder, whole_of(decoder), None, adapters_of(decoder, {0: scripted(decoder, 1)}, (-1, -1)))
    for found in (ranked, beside):
        assert len(found) == len(plain)
        assert all(mine.tobytes() == other.tobytes() for mine, other in zip(found, plain, strict=True))


@pytest.mark.parametrize("name", BY_ALL)
def test_the_share_of_one_rank_and_unused_adapters_change_no_bit(name: str) -> None:
    same_bits(name, outputs_on_torch, on_torch)


@natively
@pytest.mark.parametrize("name", NATIVELY_BY_ALL)
def test_hooks_that_nothing_uses_change_no_bit_of_the_native_call(name: str) -> None:
    same_bits(name, outputs_natively, natively_adapted)


@natively
@pytest.mark.parametrize("name", ["phi", "olmo2", "mixtral", "gpt2"])
def test_native_layers_give_the_outputs_of_torch(name: str) -> None:
    decoder = declared(name)
    expected = outputs_on_torch(decoder, whole_of(decoder), None)
    for mine, torchs in zip(outputs_natively(decoder, whole_of(decoder), None), expected, strict=True):
        np.testing.assert_allclose(mine, torchs, rtol=TOLERANCE, atol=TOLERANCE * max(1.0, np.abs(torchs).max()))


@natively
@pytest.mark.parametrize(("name", "size"), [("llama", 2), ("olmo2", 3), ("phi", 4), ("mixtral", 3)])
def test_ranks_over_shared_memory_give_the_bits_of_threads(name: str, size: int) -> None:
    decoder = declared(name)

    def run(group: Any) -> list[Any]:
        return outputs_natively(decoder, shard(decoder, group.rank, size), group)

    memory = SharedMemory.create(group_bytes(size, capacity=100))
    groups = [SharedMemoryGroup(memory, rank, size, capacity=100) for rank in range(size)]
    for found, expected in zip(by_threads(run, size, groups), by_threads(run, size), strict=True):
        assert all(np.array_equal(mine, other) for mine, other in zip(found, expected, strict=True))
    memory.close()


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "gemma2", "deepseek_v3", "variant: opt with norms behind its blocks, and projections"]
)
def test_stages_give_the_outputs_of_the_whole(name: str) -> None:
    decoder = declared(name)
    ways = [outputs_on_torch]
    if can_fuse(decoder) and library.load() is not None:
        ways.append(outputs_natively)
    middle, end = 1, len(decoder.layers)
    for outputs in ways:
        expected = outputs(decoder, whole_of(decoder), None)
        first = outputs(decoder, whole_of(stage(decoder, 0, middle)), None)
        assert len(first) == 2  # hidden states of two steps, no logits
        # Steps of the last stage give hidden states and logits in turn.
        before = [first[0], first[0], first[1], first[1]]
        found = outputs(decoder, whole_of(stage(decoder, middle, end)), None, before=before)
        assert all(np.array_equal(mine, other) for mine, other in zip(found, expected, strict=True))


def with_bias_twice(part: Shard, rank: int) -> Shard:
    def biased(decoder: DecoderSpec) -> DecoderSpec:
        def block(block: Any) -> Any:
            if not hasattr(block, "down"):
                return block
            parts = tuple(msgspec.structs.replace(each, bias=True) for each in block.down.parts)
            return msgspec.structs.replace(block, down=msgspec.structs.replace(block.down, parts=parts))

        layers = tuple(
            layer.with_branches(lambda branch: msgspec.structs.replace(branch, block=block(branch.block)))
            for layer in decoder.layers
        )
        return msgspec.structs.replace(decoder, layers=layers)

    return part._replace(decoder=biased(part.decoder))


def with_heads_of_another(part: Shard, rank: int) -> Shard:
    """Read the output's columns of the other rank."""
    slices = dict(part.slices)
    for name, found in part.slices.items():
        if found.dimension == 1 and "o_proj" in name:
            size = found.size
            slices[name] = TensorSlice(1, ((size * (1 - rank), size * (2 - rank)),))
    return part._replace(slices=slices)


def with_states_of_another(part: Shard, rank: int) -> Shard:
    """Read the rates of states, or the kernels of a convolution, of the other rank."""
    slices = dict(part.slices)
    for name, found in part.slices.items():
        if name.endswith(("A_log", "conv.conv.weight")):
            size = found.size
            slices[name] = found._replace(ranges=((size * (1 - rank), size * (2 - rank)),))
    return part._replace(slices=slices)


def with_norms_of_a_rank(part: Shard, rank: int) -> Shard:
    """Normalise what a rank has by itself."""

    def changed(branch: Any) -> Any:
        if not isinstance(branch.block, StateSpaceSpec):
            return branch
        return msgspec.structs.replace(branch, block=msgspec.structs.replace(branch.block, norm_heads=None))

    layers = tuple(layer.with_branches(changed) for layer in part.decoder.layers)
    return part._replace(decoder=msgspec.structs.replace(part.decoder, layers=layers))


FAULTS: list[tuple[str, int, Change]] = [
    ("gpt2", 2, with_bias_twice),
    ("llama", 2, with_heads_of_another),
    ("qwen3.5", 2, with_states_of_another),
    ("kimi-linear with compressed queries, two shared experts, dense layers", 2, with_states_of_another),
    ("nemotron-h", 2, with_states_of_another),
    ("lfm2", 2, with_states_of_another),
    ("bamba", 4, with_norms_of_a_rank),
]


@pytest.mark.parametrize(("name", "size", "change"), FAULTS)
def test_a_planted_fault_is_found(name: str, size: int, change: Change) -> None:
    assert largest_difference(name, size, change) > 100 * TOLERANCE


def test_a_reduction_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    reduce, calls = InProcessGroup.all_reduce, [0, 0]

    def without_the_third(self: InProcessGroup, buffer: Any) -> None:
        calls[self.rank] += 1
        if calls[self.rank] != 3:
            reduce(self, buffer)

    monkeypatch.setattr(InProcessGroup, "all_reduce", without_the_third)
    decoder = declared("llama")
    expected = outputs_on_torch(decoder, whole_of(decoder), None)
    found = by_threads(lambda group: outputs_on_torch(decoder, shard(decoder, group.rank, 2), group), 2)[0]
    assert float(np.abs(found[0] - expected[0]).max()) > 100 * TOLERANCE


@natively
@pytest.mark.parametrize("outputs", [outputs_natively, outputs_on_torch])
def test_an_error_at_any_cut_ends_all_ranks_with_its_rank(
    outputs: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reduce, decoder = InProcessGroup.all_reduce, declared("olmo2")
    for cut in range(1, 1 + 4 * len(decoder.layers)):  # the embedding; then both norms, attention and MLP of each layer
        calls = [0, 0, 0]

        def failing(self: InProcessGroup, buffer: Any, cut: int = cut, calls: list[int] = calls) -> None:
            calls[self.rank] += 1
            if self.rank == 1 and calls[1] == cut:
                raise MemoryError(f"no memory at cut {cut}")
            reduce(self, buffer)

        monkeypatch.setattr(InProcessGroup, "all_reduce", failing)
        with pytest.raises((MemoryError, GroupAborted), match=f"no memory at cut {cut}"):
            by_threads(lambda group: outputs(decoder, shard(decoder, group.rank, 3), group), 3)
        assert calls[1] == cut


def test_sums_in_another_order_on_one_rank_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = InProcessGroup._exchange

    def reversed_on_rank_1(self: InProcessGroup, buffer: Any) -> list[Any]:
        given = gather(self, buffer)
        return given[::-1] if self.rank == 1 and buffer.ndim == 2 and buffer.shape[1] == 64 else given

    monkeypatch.setattr(InProcessGroup, "_exchange", reversed_on_rank_1)
    with pytest.raises(AssertionError):
        largest_difference("llama", 3)


def test_an_error_of_one_rank_ends_all() -> None:
    decoder = declared("llama")

    def run(group: InProcessGroup) -> list[Any]:
        if group.rank == 1:
            raise ValueError("rank 1 is broken")
        return outputs_on_torch(decoder, shard(decoder, group.rank, 2), group)

    with pytest.raises(ValueError, match="rank 1 is broken"):
        by_threads(run, 2)
