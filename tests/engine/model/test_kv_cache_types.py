"""`kv_cache_dtype`: size, copies and clearing of a runner's cache with rounded values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_llama import write_tiny_llama

from pagemill_execution.runners.device.device_kv_cache import DeviceKVCache
from pagemill_execution.runners.kv_cache import KVCache
from pagemill_kernels.cpu import library
from pagemill_kernels.kv_store import storage
from pagemill_kernels.kv_store.kinds import KVType
from pagemill_kernels.torch_arrays import to_torch
from pagemill_models.spec.model_files import load_model_spec
from pagemill_models.spec.model_spec import ModelSpec

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")

Loader = Callable[..., Any]
HEAD_DIM, NUM_LAYERS, NUM_KV_HEADS, BLOCK = 16, 2, 2, 16
BYTES = {"float32": 4 * HEAD_DIM, "bfloat16": 2 * HEAD_DIM, "int8": HEAD_DIM + 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(
        tmp_path_factory.mktemp("model"),
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=NUM_LAYERS,
        num_key_value_heads=NUM_KV_HEADS,
        initializer_range=0.2,
    )


@pytest.fixture(scope="module")
def spec(folder: Path) -> ModelSpec:
    return load_model_spec(folder)


@pytest.mark.parametrize("kind", BYTES)
def test_the_same_memory_holds_more_tokens(folder: Path, runner_loader: Loader, kind: str) -> None:
    memory_bytes = 10 * BLOCK * 2 * NUM_LAYERS * NUM_KV_HEADS * BYTES["float32"]
    runner = runner_loader(
        folder, kv_cache_dtype=kind, num_kv_blocks=None, kv_cache_memory_bytes=memory_bytes, max_model_len=128
    )
    info = runner.info
    assert (info.kv_dtype, info.kv_bytes_per_token) == (kind, 2 * NUM_LAYERS * NUM_KV_HEADS * BYTES[kind])
    assert info.num_blocks == 10 * BYTES["float32"] // BYTES[kind]
    held = sum(layer[:-1].nbytes for layer in runner.kv_cache.layers)
    assert held == info.num_blocks * BLOCK * info.kv_bytes_per_token <= memory_bytes


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_answers_stay_close_to_those_of_a_float32_cache(
    folder: Path, runner_loader: Loader, make_driver: Callable[[Any], Any], kind: str
) -> None:
    prompts = torch.randint(0, 128, (4, 40), generator=torch.Generator().manual_seed(3)).tolist()
    exact, rounded = (
        make_driver(runner_loader(folder, kv_cache_dtype=name)).greedy(prompts, 1) for name in ("float32", kind)
    )
    assert [result.token_ids for result in rounded] == [result.token_ids for result in exact]
    for a, b in zip(rounded, exact, strict=True):
        assert a.logprobs != b.logprobs
        assert a.logprobs == pytest.approx(b.logprobs, abs=0.05 if kind == "bfloat16" else 0.15)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_prefix_hits_and_preemption_change_no_token(
    folder: Path, runner_loader: Loader, make_driver: Callable[[Any], Any], kind: str
) -> None:
    driver = make_driver(runner_loader(folder, kv_cache_dtype=kind, deterministic=True))
    prompts = torch.randint(0, 128, (5, 40), generator=torch.Generator().manual_seed(4)).tolist()
    alone = [result.token_ids for result in driver.greedy(prompts, 30, waves=True, enable_prefix_caching=False)]
    again = driver.greedy(prompts * 2, 30, waves=True)
    assert [result.token_ids for result in again] == alone * 2
    assert sum(result.num_cached_tokens for result in again) >= 5 * 32
    squeezed = driver.greedy(prompts, 30, num_blocks=12, enable_prefix_caching=False)
    assert [result.token_ids for result in squeezed] == alone
    assert sum(result.num_preemptions for result in squeezed) > 0


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("on_device", [False, True])
def test_copies_include_the_scales(spec: ModelSpec, kind: KVType, on_device: bool) -> None:
    cache: Any = (
        DeviceKVCache(spec, [4], BLOCK, kind, torch.device("cpu")) if on_device else KVCache(spec, 4, BLOCK, kind)
    )
    for layer in cache.layers:
        values = torch.randint(1, 100, layer[1].shape)
        layer[1] = values.to(layer.dtype) if on_device else values.numpy().astype(layer.dtype)
    if on_device:
        cache.copy_blocks([[(1, 3)]])
    else:
        cache.of_kinds[0].fill([3], cache.of_kinds[0].contents([1]))
    assert all((layer[1] == layer[3]).all() for layer in cache.layers)
    assert not any(layer[2].any() for layer in cache.layers)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_cleared_blocks_have_finite_values_and_others_are_unchanged(spec: ModelSpec, kind: KVType) -> None:
    cache = KVCache(spec, 4, BLOCK, kind)
    # The same memory as tensors, so that torch's definition of the layout is used to read it.
    layers = [to_torch(layer) for layer in cache.layers]
    for layer in layers:
        whole = layer.contiguous()
        values = storage.scales(whole) if kind == "int8" else whole
        values[1], values[2] = float("nan"), float("inf")
        values[3] = 2.0
        whole.flatten(2)[3, 0, :4] = 1
        layer.copy_(whole)
    kept = [layer[3].clone() for layer in layers]
    cache.of_kinds[0].scrub(np.array([1, 3]))
    for layer, before in zip(layers, kept, strict=True):
        decoded = storage.decode(layer.contiguous())
        assert decoded[1].isfinite().all()
        assert not decoded[1].any()
        assert torch.equal(layer[3], before)
