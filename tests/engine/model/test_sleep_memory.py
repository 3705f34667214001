"""Memory that sleep releases and wake restores: the pages of a cache, and the storage of weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch
from tiny_llama import write_tiny_llama
from triton_device import HAS_GPU

from pagemill_execution.decoders.on_torch.filling import weight_tensors
from pagemill_execution.runners.device import sleeping
from pagemill_execution.runners.device.sleeping import HostWeights
from pagemill_execution.runners.eager import ThreadedRunner
from pagemill_execution.runners.kv_cache import KVCache
from pagemill_execution.runners.sleep import SleepError

PROMPT = [(7 * index) % 64 for index in range(20)]
SPEC: Any = SimpleNamespace(cache_shapes=[(4, 64)] * 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), head_dim=16, num_hidden_layers=1)


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def test_a_cache_releases_its_pages_however_small_its_layers_are() -> None:
    """With layers of 4 MiB, the C library would keep such allocations for later."""
    cache = KVCache(SPEC, num_blocks=512, block_size=16, kind="float32")
    for _ in range(3):
        for layer in cache.layers:
            layer[:] = 1.0
        del layer
        full = resident()
        cache.release()
        assert cache.layers == []
        assert full - resident() > 0.8 * cache.num_bytes
        empty = resident()
        cache.allocate()
        assert resident() - empty < 0.2 * cache.num_bytes, "memory must be used only as it is written"
        assert all(not layer.any() for layer in cache.layers)


def test_a_runner_gives_the_same_answers_after_sleep(
    folder: Path, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    driver = make_driver(runner_loader(folder, num_kv_blocks=32, max_num_seqs=4))
    (before,) = driver.greedy([PROMPT], 5)
    assert driver.runner.sleep() == driver.runner.kv_cache.num_bytes
    driver.runner.wake()
    (after,) = driver.greedy([PROMPT], 5)
    assert after == before


def test_a_threaded_runner_sleeps_in_its_thread(folder: Path, runner_loader: Callable[..., Any]) -> None:
    inner = runner_loader(folder, num_kv_blocks=32, max_num_seqs=4)
    runner = ThreadedRunner(inner)
    runner.sleep()
    assert inner.kv_cache.layers == []
    runner.wake()
    assert len(inner.kv_cache.layers) == inner.model.spec.num_layers
    runner.close()


def test_weights_keep_their_identity_and_release_their_memory() -> None:
    table = torch.arange(12.0).reshape(3, 4)
    part, twice = table[1:], table
    weights = HostWeights.of([table, part, twice, torch.empty(0)])
    assert weights.num_bytes == table.nbytes, "views of one storage must count once"
    weights.offload()
    assert table.untyped_storage().nbytes() == 0
    weights.restore()
    assert torch.equal(table, torch.arange(12.0).reshape(3, 4))
    assert torch.equal(part, table[1:])


def test_pinned_memory_is_released_once_everything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, torch keeps unused pinned memory until its cache is emptied."""
    calls: list[str] = []
    monkeypatch.setattr(sleeping, "_bytes", lambda storage: torch.empty(4, dtype=torch.uint8))
    monkeypatch.setattr(sleeping, "_copy", lambda storage: torch.empty(4, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("read"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: calls.append(f"{len(weights._copies)} held, given back"))
    storage = SimpleNamespace(device=torch.device("cuda"), nbytes=lambda: 4, resize_=lambda size: None)
    weights = HostWeights([cast(Any, storage)])
    weights.offload()
    weights.restore()
    assert calls == ["read", "0 held, given back"]


def test_without_host_memory_weights_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(storage: Any) -> Any:
        raise RuntimeError("cannot pin")

    monkeypatch.setattr(sleeping, "_copy", refuse)
    table = torch.ones(4)
    with pytest.raises(SleepError, match=r"cannot pin.*resources\.memory"):
        HostWeights.of([table]).offload()
    assert torch.equal(table, torch.ones(4))


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_every_weight_of_the_gpus_layers_is_offloaded_and_restored(
    folder: Path, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any], quantization: str
) -> None:
    """In Triton's interpreter, the weights are in host memory and are moved like on a device."""
    driver = make_driver(runner_loader(folder, device="cuda", num_kv_blocks=64, quantization=quantization))
    (before,) = driver.greedy([PROMPT], 2)
    if HAS_GPU:
        assert driver.runner.sleep() > driver.runner.kv_cache.num_bytes
        driver.runner.wake()
    else:
        weights = HostWeights.of(weight_tensors(driver.runner.model))
        assert weights.num_bytes >= driver.runner.info.weight_bytes
        weights.offload()
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in weight_tensors(driver.runner.model))
        weights.restore()
    (after,) = driver.greedy([PROMPT], 2)
    assert after == before
