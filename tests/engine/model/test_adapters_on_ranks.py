"""Ranks and stages with adapters give the answers of one process: each has its part of A and B."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hybrid_models import ALL, write_hybrid
from in_ranks import LENGTHS, by_threads, outputs_natively, outputs_on_torch, whole_of
from node_engine import NodeThread, kept_threads, load_first, node_config, of_node
from peft_adapters import ATTENTION, CASES, PROMPTS, Base, write_adapter, write_base
from ranked_engine import SETTINGS, Ranks
from triton_device import DEVICE

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.adapters.messages import ReadAdapter
from pagemill_execution.adapters.packing import pack_for_torch, pack_natively
from pagemill_execution.adapters.ranks import FollowedAdapters, pack_part
from pagemill_execution.adapters.reading import AdapterValues, BaseMatrix, read_values
from pagemill_execution.sizing.sizing import weights_of
from pagemill_kernels.adapters.native import NativeAdapters
from pagemill_kernels.cpu import library
from pagemill_models.adapters.errors import AdapterError
from pagemill_models.adapters.folder import read_adapter
from pagemill_models.sharding.linears import linears
from pagemill_models.sharding.shard import Shard, shard
from pagemill_models.spec.model_files import load_model_spec
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")
WHOLE: dict[str, Any] = {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"]}
BASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", WHOLE, "none"),
    "phi3": (*CASES["phi3"], "none"),
    "gpt_neox": (*CASES["gpt_neox"], "none"),
    "gpt2, embedding": (*CASES["gpt2, embedding"], "none"),
    "mixtral": (*CASES["mixtral"], "none"),
    "llama of 4 bits": ("llama", WHOLE, "int4"),
}  # fmt: skip


@pytest.mark.parametrize(("case", "size"), [*((case, 2) for case in BASES), ("llama", 3)])
def test_ranks_by_threads_compute_what_one_does(case: str, size: int, tmp_path: Path) -> None:
    name, settings, quantization = BASES[case]
    base = write_base(name, tmp_path / "base")
    spec, values = load_model_spec(base.folder), values_of(base, tmp_path / "adapter", settings)
    config = EngineConfig(model=str(base.folder), dtype="float32", quantization=quantization)  # type: ignore[arg-type]
    source = weights_of(config, base.folder, spec, keeps_small_floats=False)

    def outputs(part: Shard, group: Any, *, adapted: bool = True) -> list[Any]:
        packed = pack_part(pack_natively, part.decoder, part.slices, 0)(spec.decoder, values)
        tables = NativeAdapters({1: packed}, len(linears(part.decoder)))  # type: ignore[dict-item]
        slots = (1, -1) if adapted else (-1, -1)
        rows = lambda counts: tables.rows(np.repeat(np.array(slots, dtype=np.int32), counts))  # noqa: E731
        return outputs_natively(spec.decoder, part, group, rows, source)

    expected = outputs(whole_of(spec.decoder), None)
    base_alone = outputs(whole_of(spec.decoder), None, adapted=False)
    for found in by_threads(lambda group: outputs(shard(spec.decoder, group.rank, size), group), size):
        for mine, other, plain in zip(found, expected, base_alone, strict=True):
            assert np.abs(mine - other).max() < 1e-4 * np.abs(other).max()
            assert np.abs(other - plain).max() > 1e-2
            assert (mine.argmax(-1) == other.argmax(-1)).all()


HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3-next": {"target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj", *ATTENTION]},
    "nemotron-h": {"target_modules": ["in_proj", "up_proj", "down_proj"]},
    "lfm2": {"target_modules": ["in_proj", "out_proj", "w2"]},
    "kimi-linear": {"target_modules": [*ATTENTION, "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"]},
}


@pytest.mark.full
@pytest.mark.parametrize("case", ["deepseek_v3", "mixtral", "llama, embedding and head", *HYBRIDS])
def test_ranks_by_torch_compute_what_one_does(case: str, tmp_path: Path) -> None:
    import torch

    from pagemill_kernels.adapters.reference import PlainAdapterRows

    name, settings = (case, HYBRIDS[case]) if case in HYBRIDS else CASES[case]
    if case in HYBRIDS:
        base = Base(tmp_path / "base", write_hybrid(*ALL[name], tmp_path / "base"))
    else:
        base = write_base(name, tmp_path / "base")
    spec, values = load_model_spec(base.folder), values_of(base, tmp_path / "adapter", settings)
    config = EngineConfig(model=str(base.folder), dtype="float32")
    source = weights_of(config, base.folder, spec, keeps_small_floats=False)

    def outputs(part: Shard, group: Any) -> list[Any]:
        packed = pack_part(pack_for_torch, part.decoder, part.slices, 0)(spec.decoder, values)
        slots = lambda counts: torch.from_numpy(np.repeat(np.array((1, -1)), counts))  # noqa: E731
        return outputs_on_torch(
            spec.decoder, part, group, lambda counts: PlainAdapterRows(slots(counts), {1: packed}), source
        )

    expected = outputs(whole_of(spec.decoder), None)
    assert len(expected[0]) == sum(LENGTHS)
    for found in by_threads(lambda group: outputs(shard(spec.decoder, group.rank, 2), group), 2):
        for mine, other in zip(found, expected, strict=True):
            assert np.abs(mine - other).max() < 1e-4 * np.abs(other).max()


def values_of(base: Base, folder: Path, settings: dict[str, Any]) -> AdapterValues:
    folder = write_adapter(base, folder, **settings).folder
    tensors = base.model.state_dict()
    files = read_adapter(folder, load_model_spec(base.folder).decoder, 16)
    return read_values(files, lambda name: BaseMatrix(tensors[name].float().numpy()))


class Adapted:
    """An engine whose requests take turns: two adapters and the base."""

    def __init__(self, runner: Any, folders: list[Path]) -> None:
        settings = SETTINGS | {"num_kv_blocks": 64, "enable_lora": True, "max_loras": 2}
        self.core = EngineCore(EngineConfig(model="test", **settings), runner)
        assert self.core.adapters is not None
        self.adapters = self.core.adapters
        self.digests = [*(self.adapters.load(folder).digest for folder in folders), ""]

    def answers(self) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=1)
        answers: dict[str, list[int]] = {}
        for index, prompt in enumerate(PROMPTS[:6]):
            answers[str(index)] = []
            digest = self.digests[index % 3]
            self.core.add(
                GenerateRequest(
                    request_id=str(index), model="m", prompt_token_ids=prompt, adapter_digest=digest, sampling=params
                )
            )
        while self.core.has_work:
            for out in self.core.step().outputs:
                assert out.error is None
                answers[out.request_id] += out.token_ids
        return list(answers.values())


@pytest.mark.sample("llama*-2-2", "mixtral-2-1")
@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("case", ["llama", "mixtral", "llama of 4 bits"])
def test_processes_give_the_tokens_of_one(
    case: str, size: int, num_stages: int, tmp_path: Path, ranks: Ranks, runner_loader: Any
) -> None:
    name, settings, quantization = BASES[case]
    base = write_base(name, tmp_path / "base")
    folders = [write_adapter(base, tmp_path / str(seed), seed, **settings).folder for seed in (1, 2, 3)]
    more: dict[str, Any] = {"quantization": quantization, "enable_lora": True, "max_loras": 2}
    single = runner_loader(base.folder, **SETTINGS | more)
    expected = Adapted(single, folders[:2]).answers()
    single.close()
    assert len({tuple(answer) for answer in expected}) == 6
    runner = ranks(base.folder, size, num_stages=num_stages, **more)
    engine = Adapted(runner, folders[:2])
    assert engine.answers() == expected
    # A third takes the place of one that is forgotten; a fourth that is cut is refused, and harms no other.
    store = engine.adapters.store
    engine.adapters.counts()  # notices that all requests have ended
    store.forget(engine.digests[0])
    third = engine.adapters.load(folders[2]).digest
    (folders[2] / "adapter_config.json").write_text("{}")
    with pytest.raises(AdapterError):
        engine.adapters.load(folders[2])
    assert store.loaded == [engine.digests[1], third]
    engine.digests[0] = engine.digests[1]
    assert engine.answers()[1] == expected[1]


@pytest.mark.full
@pytest.mark.skipif(DEVICE.type == "cuda" and torch.cuda.device_count() < 2, reason="this machine has one GPU")
@pytest.mark.parametrize(("case", "num_stages"), [("llama", 1), ("llama", 2), ("mixtral", 1), ("llama of 4 bits", 1)])
def test_devices_give_the_tokens_of_one(
    case: str, num_stages: int, tmp_path: Path, ranks: Ranks, runner_loader: Any
) -> None:
    name, settings, quantization = BASES[case]
    base = write_base(name, tmp_path / "base")
    folders = [write_adapter(base, tmp_path / str(seed), seed, **settings).folder for seed in (1, 2)]
    more: dict[str, Any] = {"quantization": quantization, "enable_lora": True, "max_loras": 2, "device": "cuda"}
    single = runner_loader(base.folder, **SETTINGS | more)
    expected = Adapted(single, folders).answers()
    single.close()
    assert len({tuple(answer) for answer in expected}) == 6
    assert Adapted(ranks(base.folder, 2, num_stages=num_stages, **more), folders).answers() == expected


@pytest.mark.parametrize("num_stages", [1, pytest.param(2, marks=pytest.mark.full)])
def test_nodes_give_the_tokens_of_one_and_get_the_files(
    num_stages: int, tmp_path: Path, runner_loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other node reads no folder of node 0, and keeps no file; one that has no room for files harms no other."""
    base = write_base("llama", tmp_path / "base")
    folders = [write_adapter(base, tmp_path / str(seed), seed, **WHOLE).folder for seed in (1, 2, 3)]
    more: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3}
    single = runner_loader(base.folder, **SETTINGS | more)
    expected = Adapted(single, folders[:2]).answers()
    single.close()
    received = tmp_path / "received"
    received.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(received))
    read, messages = FollowedAdapters.read, []

    def noted(self: FollowedAdapters, message: Any) -> None:
        messages.append(message)
        read(self, message)

    monkeypatch.setattr(FollowedAdapters, "read", noted)
    config = node_config(base.folder, 2, num_stages, **more)
    with kept_threads():
        node = NodeThread(of_node(config, 1))
        runner = load_first(config)
        engine = Adapted(runner, folders[:2])
        assert engine.answers() == expected
        read_folders = [message.folder for message in messages if isinstance(message, ReadAdapter)]
        assert read_folders == ["", ""]
        assert list(received.iterdir()) == []
        received.rmdir()
        with pytest.raises(AdapterError, match="Not all ranks could read the adapter: its files cannot be kept"):
            engine.adapters.load(folders[2])
        assert engine.answers() == expected
        runner.close()
        assert node.join() is None


def test_an_adapter_that_a_follower_cannot_read_is_refused(tmp_path: Path, ranks: Ranks) -> None:
    base = write_base("llama", tmp_path / "base")
    folders = [write_adapter(base, tmp_path / str(seed), seed, **WHOLE).folder for seed in (1, 2)]
    runner = ranks(base.folder, 2, enable_lora=True, max_loras=2)
    engine = Adapted(runner, folders[:1])
    store = engine.adapters.store
    read_elsewhere = store.read_elsewhere
    assert read_elsewhere is not None

    def changed(folder: Path, digest: str) -> object:
        (folder / "adapter_config.json").unlink()
        return read_elsewhere(folder, digest)

    store.read_elsewhere = changed
    with pytest.raises(AdapterError, match=r"Not all ranks could read the adapter: .*adapter_config\.json"):
        engine.adapters.load(folders[1])
    engine.digests = engine.digests[:1] * 3
    assert len(engine.answers()) == 6
