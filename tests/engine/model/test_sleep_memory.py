"""Memory that goes and comes back: the pages of a cache, and what lies under weights that stay the tensors they are."""

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

from pagemill_engine.models.weights import weight_tensors
from pagemill_engine.runner import host_weights
from pagemill_engine.runner.host_weights import HostWeights
from pagemill_engine.runner.kv_cache import KVCache
from pagemill_engine.runner.sleep import SleepError
from pagemill_engine.runner.threaded import ThreadedRunner

PROMPT = [(7 * index) % 64 for index in range(20)]
SPEC: Any = SimpleNamespace(num_layers=2, cache_heads=4, head_dim=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), head_dim=16, num_hidden_layers=1)


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def test_a_cache_gives_its_pages_back_however_small_its_layers_are() -> None:
    """Layers of 4 MiB: the C library would keep such pieces for later once it has seen them."""
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
        assert resident() - empty < 0.2 * cache.num_bytes, "it takes memory only as it is written"
        assert all(not layer.any() for layer in cache.layers)


def test_a_runner_that_slept_computes_the_same(
    folder: Path, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    driver = make_driver(runner_loader(folder, num_kv_blocks=32, max_num_seqs=4))
    (before,) = driver.greedy([PROMPT], 5)
    assert driver.runner.sleep() == driver.runner.kv_cache.num_bytes
    driver.runner.wake()
    (after,) = driver.greedy([PROMPT], 5)
    assert after == before


def test_a_runner_on_a_thread_of_its_own_sleeps_there(folder: Path, runner_loader: Callable[..., Any]) -> None:
    inner = runner_loader(folder, num_kv_blocks=32, max_num_seqs=4)
    runner = ThreadedRunner(inner)
    runner.sleep()
    assert inner.kv_cache.layers == []
    runner.wake()
    assert len(inner.kv_cache.layers) == inner.model.spec.num_layers
    runner.close()


def test_weights_keep_their_identity_and_lose_their_memory() -> None:
    table = torch.arange(12.0).reshape(3, 4)
    part, twice = table[1:], table
    weights = HostWeights.of([table, part, twice, torch.empty(0)])
    assert weights.num_bytes == table.nbytes, "views of one storage count once"
    weights.offload()
    assert table.untyped_storage().nbytes() == 0
    weights.restore()
    assert torch.equal(table, torch.arange(12.0).reshape(3, 4))
    assert torch.equal(part, table[1:])


def test_pinned_memory_is_given_back_to_the_machine_once_all_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: torch keeps pinned memory that nothing uses until its cache is emptied."""
    calls: list[str] = []
    monkeypatch.setattr(host_weights, "_bytes", lambda storage: torch.empty(4, dtype=torch.uint8))
    monkeypatch.setattr(host_weights, "_copy", lambda storage: torch.empty(4, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("read"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: calls.append(f"{len(weights._copies)} held, given back"))
    storage = SimpleNamespace(device=torch.device("cuda"), nbytes=lambda: 4, resize_=lambda size: None)
    weights = HostWeights([cast(Any, storage)])
    weights.offload()
    weights.restore()
    assert calls == ["read", "0 held, given back"]


def test_a_host_without_room_leaves_weights_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(storage: Any) -> Any:
        raise RuntimeError("cannot pin")

    monkeypatch.setattr(host_weights, "_copy", refuse)
    table = torch.ones(4)
    with pytest.raises(SleepError, match=r"cannot pin.*resources\.memory"):
        HostWeights.of([table]).offload()
    assert torch.equal(table, torch.ones(4))


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_every_weight_of_the_gpus_layers_goes_and_comes_back(
    folder: Path, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any], quantization: str
) -> None:
    """On the device, or with Triton's interpreter, whose weights lie in the host's memory and move all the same."""
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
