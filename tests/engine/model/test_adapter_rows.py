"""Adapters of a step's rows, by the native decoder and by torch: they compute what merged weights compute, and rows of
the base keep their bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from declared_families import declared
from in_ranks import LENGTHS, by_threads, outputs_natively, outputs_on_torch, whole_of
from scripted_adapters import MergedTensors, Scripted, natively, of_shard, on_torch, on_triton, scripted
from triton_device import HAS_GPU

from pagemill_kernels.cpu import library
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.sharding.linears import Role
from pagemill_models.sharding.shard import shard

TOLERANCE = 2e-5
NATIVE = [
    "llama", "gpt2", "gpt_neox", "phi", "olmo2", "mixtral", "gpt_oss", "internlm2", "qwen3_moe",
    "variant: opt with norms behind its blocks, and projections", "deepseek_v2", "deepseek_v3", "bert", "gemma4",
]  # fmt: skip
ON_TORCH = [*NATIVE, "qwen2_moe", "gemma2"]
WAYS: dict[str, tuple[Callable[..., list[Any]], Callable[..., Any]]] = {
    "natively": (outputs_natively, natively),
    "on torch": (outputs_on_torch, on_torch),
}
needs_kernels = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")
EVERY = [pytest.param(name, "natively", marks=needs_kernels) for name in NATIVE]
EVERY += [pytest.param(name, "on torch") for name in ON_TORCH]
MIXED = [("llama", "natively"), ("mixtral", "natively"), ("gpt_neox", "natively")]
MIXED += [("deepseek_v3", "natively"), ("deepseek_v3", "on torch")]


def run(way: str, decoder: DecoderSpec, loaded: dict[int, Scripted], of_requests: Sequence[int]) -> list[Any]:
    outputs, rows = WAYS[way]
    return outputs(decoder, whole_of(decoder), None, rows(decoder, loaded, of_requests))


def differences(found: list[Any], expected: list[Any], request: int) -> float:
    """Return the largest difference in a request's rows, relative to the largest value."""
    worst = 0.0
    for step, (mine, other) in enumerate(zip(found, expected, strict=True)):
        counts = LENGTHS if len(mine) == sum(LENGTHS) else (1,) * len(LENGTHS)
        first = sum(counts[:request])
        rows = slice(first, first + counts[request])
        worst = max(worst, float(np.abs(mine[rows] - other[rows]).max() / max(1.0, np.abs(other).max())))
        assert step < len(expected)
    return worst


def merged(way: str, decoder: DecoderSpec, adapter: Scripted) -> list[Any]:
    outputs, _ = WAYS[way]
    return outputs(decoder, whole_of(decoder), None, None, MergedTensors(decoder, adapter))


@pytest.mark.parametrize(("name", "way"), EVERY)
def test_two_adapters_and_the_base_compute_what_merged_weights_compute(name: str, way: str) -> None:
    decoder = declared(name)
    tied = decoder.head is not None and decoder.head.tied
    adapters = [scripted(decoder, seed) for seed in (1, 2)]
    if tied:  # the embedding's matrix is the head's, too
        adapters = [{n: each for n, each in one.items() if each.use.role != "embedding"} for one in adapters]
        adapters = [{n: each for n, each in one.items() if each.use.role != "head"} for one in adapters]
    found = run(way, decoder, {0: adapters[0], 3: adapters[1]}, (3, 0))
    assert differences(found, merged(way, decoder, adapters[1]), request=0) < TOLERANCE
    assert differences(found, merged(way, decoder, adapters[0]), request=1) < TOLERANCE
    base = run(way, decoder, {}, (-1, -1))
    assert differences(found, base, request=0) > 100 * TOLERANCE


@pytest.mark.slow
@pytest.mark.skipif(HAS_GPU, reason="the whole model is on the interpreter's device")
@pytest.mark.sample("llama")
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt_neox"])
def test_triton_adds_what_the_formulas_add(name: str) -> None:
    decoder = declared(name)
    whole, loaded = whole_of(decoder), {0: scripted(decoder, 1), 2: scripted(decoder, 2, rank=20)}
    expected = outputs_on_torch(decoder, whole, None, on_torch(decoder, loaded, (2, 0)))
    found = outputs_on_torch(decoder, whole, None, on_triton(decoder, loaded, (2, 0)), backend="triton")
    base = outputs_on_torch(decoder, whole, None, backend="triton")
    for request in (0, 1):
        assert differences(found, expected, request) < 5 * TOLERANCE
        assert differences(found, base, request) > 100 * TOLERANCE
    beside = outputs_on_torch(decoder, whole, None, on_triton(decoder, loaded, (-1, 0)), backend="triton")
    assert differences(beside, base, request=0) == 0.0


@pytest.mark.parametrize(("name", "way"), [case for case in MIXED if library.load() or case[1] == "on torch"])
def test_rows_of_the_base_have_equal_bits_in_any_batch(name: str, way: str) -> None:
    decoder = declared(name)
    outputs, _ = WAYS[way]
    alone = outputs(decoder, whole_of(decoder), None)
    loaded = {slot: scripted(decoder, slot) for slot in range(16)}
    for of_requests in ((-1, -1), (-1, 5), (-1, 15)):
        found = run(way, decoder, loaded, of_requests)
        assert differences(found, alone, request=0) == 0.0
    if way == "natively":
        # An adapter's rows do not depend on the others' either.
        together, single = run(way, decoder, loaded, (7, 9)), run(way, decoder, {7: loaded[7]}, (7, -1))
        assert differences(together, single, request=0) == 0.0


@pytest.mark.parametrize(("name", "way"), [case for case in MIXED if library.load() or case[1] == "on torch"])
def test_an_adapter_with_b_of_zero_gives_the_bases_bits(name: str, way: str) -> None:
    decoder = declared(name)
    outputs, _ = WAYS[way]
    without = {number: each._replace(b=each.b * 0) for number, each in scripted(decoder, 4).items()}
    found = run(way, decoder, {0: without}, (0, 0))
    for mine, base in zip(found, outputs(decoder, whole_of(decoder), None), strict=True):
        assert np.array_equal(mine, base)


@pytest.mark.parametrize("way", [pytest.param("natively", marks=needs_kernels), "on torch"])
@pytest.mark.parametrize("roles", [("expert_up", "expert_down"), ("head",), ("router",), ("qkv",)])
def test_an_adapter_of_a_few_layers_changes_what_merging_it_changes(way: str, roles: Sequence[Role]) -> None:
    decoder = declared("mixtral")
    adapter = scripted(decoder, 6, roles)
    found = run(way, decoder, {0: adapter}, (-1, 0))
    assert differences(found, merged(way, decoder, adapter), request=1) < TOLERANCE
    base = run(way, decoder, {}, (-1, -1))
    assert differences(found, base, request=0) == 0.0
    assert differences(found, base, request=1) > 0.0


@needs_kernels
def test_rows_behind_the_first_block_of_an_mlp_have_their_own_adapters() -> None:
    decoder = declared("llama")
    lengths = (150, 40)
    adapters = {0: scripted(decoder, 1), 1: scripted(decoder, 2)}
    rows = natively(decoder, adapters, (0, 1))
    found = outputs_natively(decoder, whole_of(decoder), None, rows, None, lengths)
    for slot, own in enumerate((slice(0, 150), slice(150, 190))):
        expected = outputs_natively(
            decoder, whole_of(decoder), None, None, MergedTensors(decoder, adapters[slot]), lengths
        )
        largest = max(1.0, np.abs(expected[0]).max())
        assert np.abs(found[0][own] - expected[0][own]).max() < TOLERANCE * largest


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "olmo2", "phi", "gpt_neox"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("way", [pytest.param("natively", marks=needs_kernels), "on torch"])
def test_shards_of_a_model_and_of_its_adapter_compute_the_whole(name: str, size: int, way: str) -> None:
    decoder = declared(name)
    outputs, rows = WAYS[way]
    adapter = scripted(decoder, 3)
    expected = run(way, decoder, {0: adapter}, (-1, 0))

    def rank(group: Any) -> list[Any]:
        part = shard(decoder, group.rank, size)
        return outputs(decoder, part, group, rows(part.decoder, {0: of_shard(adapter, part)}, (-1, 0)))

    for found in by_threads(rank, size):
        assert max(differences(found, expected, request) for request in (0, 1)) < TOLERANCE


@pytest.mark.parametrize("fault", ["rows shifted by one", "slots swapped", "scale forgotten"])
def test_a_planted_fault_is_found(fault: str) -> None:
    decoder = declared("llama")
    adapters = {0: scripted(decoder, 1), 1: scripted(decoder, 2)}
    of_requests, loaded = (0, 1), adapters
    rows = on_torch(decoder, loaded, of_requests)
    if fault == "rows shifted by one":
        plain = rows

        def rows(counts: Sequence[int]) -> Any:
            made = plain(counts)
            made._slots = made._slots.roll(1)
            return made

    elif fault == "slots swapped":
        rows = on_torch(decoder, loaded, (1, 0))
    else:
        halved = {number: each._replace(b=each.b / 2) for number, each in adapters[0].items()}
        rows = on_torch(decoder, {0: halved, 1: adapters[1]}, of_requests)
    found = outputs_on_torch(decoder, whole_of(decoder), None, rows)
    assert differences(found, merged("on torch", decoder, adapters[0]), request=0) > 100 * TOLERANCE
