"""The native layers of hybrids give the bits of single operations with the same kernels, in one call per step, and the
tokens of transformers; faults that are planted in their parts are detected."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from declared_families import declared
from family_models import VOCAB_SIZE
from hybrid_models import MODELS, OTHERS, SHORT, STATE_SPACES, VARIANTS, check_greedy, prompts_of, write_hybrid
from in_ranks import by_threads, outputs_natively, outputs_on_torch, smaller, whole_of
from scripted_adapters import MergedTensors, natively, scripted

from pagemill_execution.decoders.native.decoder import NativeDecoder
from pagemill_execution.decoders.native.layers import can_fuse
from pagemill_execution.runners.torch_model import TorchModel
from pagemill_kernels.cpu import launch, library
from pagemill_kernels.decoder_layer.native import NativeLayers
from pagemill_kernels.decoder_layer.parts import LayerParts, MoEParts
from pagemill_kernels.experts.native import NativeExperts
from pagemill_kernels.experts.parts import Gate
from pagemill_kernels.linear.native import pack_linear
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.sharding.shard import shard

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")

Loader = Callable[..., Any]
Drivers = Callable[[Any], Any]
CASES = MODELS | STATE_SPACES | SHORT | OTHERS | VARIANTS
SINGLE = [name for name in CASES if "kimi" not in name]
"""Models whose single operations use the native kernels: latents are attended to in torch there."""
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16, int8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int4, deterministic": {"quantization": "int4", "deterministic": True},
}


@pytest.fixture(scope="module", params=SINGLE)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("hybrid")
    write_hybrid(*CASES[request.param], made, VOCAB_SIZE)
    return made


@pytest.mark.sample("qwen3.5-float32", "falcon-h1-float32", "lfm3-float32", "olmo-hybrid-int4*", "*latents-float32")
@pytest.mark.parametrize("settings", SETTINGS)
def test_one_call_gives_the_bits_of_single_operations(
    folder: Path, settings: str, runner_loader: Loader, make_driver: Drivers
) -> None:
    asked = {"backend": "cpu_native", "num_kv_blocks": 4096, **SETTINGS[settings]}
    native, single = runner_loader(folder, **asked), runner_loader(folder, by_torch=True, **asked)
    assert (type(native.model), type(single.model)) == (NativeDecoder, TorchModel)
    assert native.info.weight_bytes == single.info.weight_bytes
    prompts = prompts_of((1, 16, 33))
    for chunk in (512, 7):
        driven = [make_driver(runner).greedy(prompts, 18, max_num_batched_tokens=chunk) for runner in (native, single)]
        assert [result.token_ids for result in driven[0]] == [result.token_ids for result in driven[1]]
        assert [result.logprobs for result in driven[0]] == [result.logprobs for result in driven[1]]


def test_a_step_makes_one_native_call_for_all_layers(
    tmp_path: Path, runner_loader: Loader, make_driver: Drivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hybrid(*MODELS["qwen3.5"], tmp_path, VOCAB_SIZE)
    runner = runner_loader(tmp_path, backend="cpu_native")
    called: Counter[str] = Counter()
    loaded = library.load()

    class Counting:
        def __getattr__(self, name: str) -> Any:
            called[name] += 1
            return getattr(loaded, name)

    monkeypatch.setattr(launch, "native", Counting)
    make_driver(runner).greedy([[1, 2, 3]], 4)
    # The call of all layers and that of the head's product were looked up before.
    del called["pagemill_sampling_columns"]
    assert called == {"pagemill_rms_norm": 4, "pagemill_sample": 4}


@pytest.fixture(scope="module")
def by_channel() -> DecoderSpec:
    """Kimi Linear's first layer, which is no attention."""
    decoder = smaller(declared("kimi-linear"), 1)
    assert can_fuse(decoder)
    return decoder


def assert_near(found: list[Any], expected: list[Any]) -> None:
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=5e-5 * np.abs(other).max())


def test_decays_by_channel_give_the_bits_of_single_operations(by_channel: DecoderSpec) -> None:
    whole = whole_of(by_channel)
    single = outputs_on_torch(by_channel, whole, None, backend="cpu_native")
    for mine, other in zip(outputs_natively(by_channel, whole, None), single, strict=True):
        assert mine.tobytes() == other.tobytes()


def test_adapters_and_ranks_with_decays_by_channel(by_channel: DecoderSpec) -> None:
    whole, adapter = whole_of(by_channel), scripted(by_channel, 1)
    rows = natively(by_channel, {0: adapter}, (0, 0))
    merged = outputs_natively(by_channel, whole, None, source=MergedTensors(by_channel, adapter))
    assert_near(outputs_natively(by_channel, whole, None, rows), merged)
    ranks = by_threads(lambda group: outputs_natively(by_channel, shard(by_channel, group.rank, 3), group), 3)
    assert_near(ranks[0], outputs_natively(by_channel, whole, None))


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.starting.factory import create_runner
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

for folder in sys.argv[1:]:
    config = EngineConfig(model=folder, num_kv_blocks=512, max_model_len=256)
    core = EngineCore(config, create_runner(config, lambda phase, detail: None))
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    core.add(GenerateRequest(request_id="r", model="m", prompt_token_ids=[1, 2, 3], sampling=sampling))
    print(sum(len(output.token_ids) for output in core.step().outputs), end=" ")
    while core.has_work:
        print(sum(len(output.token_ids) for output in core.step().outputs), end=" ")
"""


def test_hybrids_need_no_torch(tmp_path: Path) -> None:
    folders = []
    for name in ("qwen3.5-moe", "nemotron-h"):
        write_hybrid(*CASES[name], tmp_path / name, VOCAB_SIZE)
        folders.append(str(tmp_path / name))
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *folders], capture_output=True, text=True, check=False, timeout=120
    )
    assert found.returncode == 0, found.stderr
    assert sum(map(int, found.stdout.split())) == 20 * len(folders)


def of_mixer(change: Callable[[Any], Any]) -> Callable[[list[LayerParts]], list[LayerParts]]:
    """Return a change of all blocks that keep a state."""

    def changed(layers: list[LayerParts]) -> list[LayerParts]:
        return [each._replace(recurrent=each.recurrent and change(each.recurrent)) for each in layers]

    return changed


def exchanged_gates(layers: list[LayerParts]) -> list[LayerParts]:
    first, second, *_ = (each for each in layers if each.head_gates is not None)
    others = {id(first): second.head_gates, id(second): first.head_gates}
    return [each._replace(head_gates=others.get(id(each), each.head_gates)) for each in layers]


def of_experts(change: Callable[[MoEParts], MoEParts]) -> Callable[[list[LayerParts]], list[LayerParts]]:
    def changed(layers: list[LayerParts]) -> list[LayerParts]:
        return [each._replace(mlp=change(each.mlp)) if isinstance(each.mlp, MoEParts) else each for each in layers]

    return changed


def with_relu(mlp: MoEParts) -> MoEParts:
    return mlp._replace(experts=NativeExperts(*mlp.experts._kept, Gate("relu", None, False)))


def with_turned_sums(mlp: MoEParts) -> MoEParts:
    """Return experts whose sum is multiplied by the columns of the next value each."""
    if mlp.around is None:
        return mlp
    before, behind = mlp.around
    columns = np.eye(behind.in_features, dtype=np.float32)
    bias = behind(np.zeros((1, behind.in_features), dtype=np.float32))
    weight = np.roll(behind(columns) - bias, 1, axis=0).T
    return mlp._replace(around=(before, pack_linear(np.ascontiguousarray(weight), bias[0])))


def with_negative_bias(mlp: MoEParts) -> MoEParts:
    assert mlp.choice_bias is not None
    return mlp._replace(choice_bias=-mlp.choice_bias)


def key_taps_first(mixer: Any) -> Any:
    of_keys = mixer.num_keys * mixer.key_dim
    queries, keys, values = np.split(mixer.taps, [of_keys, 2 * of_keys], axis=1)
    return mixer._replace(taps=np.ascontiguousarray(np.concatenate([keys, queries, values], axis=1)))


PARTS: dict[str, tuple[str, Callable[[list[LayerParts]], list[LayerParts]]]] = {
    "gates of another layer": ("lfm3", exchanged_gates),
    "attention without its gates": ("qwen3.5-moe", lambda layers: [each._replace(gated=False) for each in layers]),
    "another activation of experts": ("nemotron-h", of_experts(with_relu)),
    "another bias of choices": ("lfm2-moe", of_experts(with_negative_bias)),
    "another order behind experts": ("nemotron-h with experts over latents", of_experts(with_turned_sums)),
    "kernels of decays by channel exchanged": ("kimi-linear", of_mixer(key_taps_first)),
    "rates up to one": ("olmo-hybrid", of_mixer(lambda mixer: mixer._replace(rate_scale=1.0))),
    "kernels of queries and keys exchanged": ("qwen3.5-moe", of_mixer(key_taps_first)),
    "norms with another epsilon": ("qwen3.5", of_mixer(lambda mixer: mixer._replace(eps=0.1))),
    "values are not added": ("bamba", of_mixer(lambda mixer: mixer._replace(skips=0 * mixer.skips))),
    "inputs without factors": ("falcon-h1", of_mixer(lambda mixer: mixer._replace(scales=None))),
    "gates before and behind exchanged": (
        "lfm2",
        of_mixer(lambda mixer: mixer._replace(places=mixer.places._replace(gates=0, mixed=mixer.places.gates))),
    ),
}
"""By fault: the model with the part, and what changes the parts of its layers."""


@pytest.mark.sample("gates of another layer", "kernels of queries*", "rates *", "another order behind experts")
@pytest.mark.parametrize("fault", PARTS)
def test_faults_planted_in_parts_are_detected(
    fault: str, tmp_path: Path, runner_loader: Loader, make_driver: Drivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, change = PARTS[fault]
    reference = write_hybrid(*CASES[name], tmp_path)
    runner = runner_loader(tmp_path)
    prompts = prompts_of((17, 40))
    for is_faulty in (False, True):
        if is_faulty:
            monkeypatch.setattr(runner.model, "_runs", [(0, NativeLayers(change(runner.model.layers)))])
        answers = [each.token_ids for each in make_driver(runner).greedy(prompts, 24, enable_prefix_caching=False)]
        with pytest.raises(AssertionError) if is_faulty else nullcontext():
            for prompt, answer in zip(prompts, answers, strict=True):
                check_greedy(reference, prompt, answer)
