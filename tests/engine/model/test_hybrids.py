"""Hybrids, which have recurrent layers beside attention, give the greedy answers of transformers without a cache.

The tests run prompts alone, in batches, in chunks, with prefix hits, preempted, forked and continued elsewhere. Memory
that was not written is not a number, so nothing may read it. Planted faults must be detected.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hybrid_models import (
    EXPERTS,
    LFM2,
    MODELS,
    QWEN,
    SHORT,
    STATE_SPACES,
    VARIANTS,
    check_greedy,
    prompts_of,
    write_hybrid,
)
from safetensors.numpy import load_file, save_file

from pagemill_engine.config import EngineConfig
from pagemill_engine.decoders.step_model import StateArrays
from pagemill_engine.executing.inputs import StateRows
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.weights.errors import LoadError
from pagemill_kernels.recurrent.batch import StateBatch
from pagemill_models.declaration.errors import UnsupportedModelArchitecture
from pagemill_models.spec.spec_from_config import check_config
from pagemill_protocol.request.generate import ChoiceResume, GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams
from pagemill_protocol.source_errors import UnreadableModelError

NUM_TOKENS = 24
BAMBA = STATE_SPACES["bamba"][1]
BLOCK = 16


class Hybrid(NamedTuple):
    folder: Path
    reference: Any
    runner: Any
    driver: Any

    def check(self, prompts: list[list[int]], **settings: Any) -> list[Any]:
        results = self.driver.greedy(prompts, NUM_TOKENS, **settings)
        for prompt, result in zip(prompts, results, strict=True):
            check_greedy(self.reference, prompt, result.token_ids)
        return results


Load = Callable[..., Hybrid]


def spoil(runner: Any) -> None:
    """Overwrite what no step has written."""
    states = runner.kv_cache.of_kinds[-1]
    states.fill(range(states.num_blocks), np.nan)
    for cache in runner.kv_cache.layers:
        if isinstance(cache, StateArrays):
            cache.log[:] = cache.inputs[:] = np.nan


@pytest.fixture(scope="module")
def load(
    tmp_path_factory: pytest.TempPathFactory, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> Load:
    made: dict[str, Hybrid] = {}

    def get(name: str) -> Hybrid:
        if name not in made:
            folder = tmp_path_factory.mktemp("hybrid")
            reference = write_hybrid(*(MODELS | VARIANTS | SHORT | STATE_SPACES)[name], folder)
            runner = runner_loader(folder)
            spoil(runner)
            made[name] = Hybrid(folder, reference, runner, make_driver(runner))
        return made[name]

    return get


@pytest.mark.parametrize("name", ["qwen3.5-moe", *(pytest.param(n, marks=pytest.mark.full) for n in MODELS)])
def test_answers_equal_transformers(name: str, load: Load) -> None:
    hybrid = load(name)
    prompts = prompts_of()
    hybrid.check(prompts, enable_prefix_caching=False)
    hybrid.check(prompts, max_num_batched_tokens=13, enable_prefix_caching=False)


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("settings", [{"waves": True}, {"max_num_batched_tokens": 1}, {"overlap": True}], ids=str)
def test_any_way_to_compute_equals_transformers(name: str, settings: dict[str, Any], load: Load) -> None:
    load(name).check(prompts_of(), **settings)


@pytest.mark.parametrize(
    "name", ["qwen3-next with some plain MLPs", *(pytest.param(n, marks=pytest.mark.full) for n in VARIANTS)]
)
def test_variants_equal_transformers(name: str, load: Load) -> None:
    load(name).check(prompts_of((1, 17, 90)), max_num_batched_tokens=40)


@pytest.mark.parametrize("name", SHORT)
def test_short_convolutions_equal_transformers(name: str, load: Load) -> None:
    hybrid = load(name)
    prompts = prompts_of((1, 2, 15, 33, 90))
    hybrid.check(prompts, max_num_batched_tokens=40)
    hybrid.check(prompts, max_num_batched_tokens=7, enable_prefix_caching=False)


@pytest.mark.parametrize("name", STATE_SPACES)
def test_state_spaces_equal_transformers(name: str, load: Load) -> None:
    hybrid = load(name)
    prompts = prompts_of((1, 2, 15, 33, 90))
    hybrid.check(prompts, max_num_batched_tokens=40)
    hybrid.check(prompts, max_num_batched_tokens=7, enable_prefix_caching=False)


@pytest.mark.full
@pytest.mark.parametrize("name", [*MODELS, *SHORT, *STATE_SPACES])
@pytest.mark.parametrize("backend", ["reference", "cpu", "cpu_native"])
def test_every_backend_equals_transformers(
    name: str, backend: str, load: Load, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    hybrid = load(name)
    runner = runner_loader(hybrid.folder, backend=backend)
    hybrid._replace(runner=runner, driver=make_driver(runner)).check(prompts_of(), max_num_batched_tokens=50)


def ask(name: str, prompt: list[int], points: tuple[int, ...] = (), **more: Any) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, **more.pop("sampling", {}))
    return GenerateRequest(
        request_id=name, model="m", prompt_token_ids=prompt, sampling=sampling, reuse_points=list(points), **more
    )


class Served(NamedTuple):
    token_ids: list[int]
    num_cached: int


class Core:
    """An engine's loop over a loaded model, whose prefix cache stays."""

    def __init__(self, hybrid: Hybrid, **settings: Any) -> None:
        self.runner = hybrid.runner
        names = list(self.runner._rows._row_of)
        self.runner._rows.release(names)
        self.core = EngineCore(EngineConfig(model="m", block_size=BLOCK, **settings), self.runner)
        self.num_computed: dict[str, int] = {}

    def serve(self, *requests: GenerateRequest) -> dict[str, Served]:
        found: dict[str, Served] = {}
        for request in requests:
            self.core.add(request)
        while self.core.has_work:
            for output in self.core.step().outputs:
                name = f"{output.request_id}/{output.choice}"
                before = found.get(name, Served([], 0))
                cached = max(before.num_cached, output.num_cached_tokens)
                found[name] = Served(before.token_ids + list(output.token_ids), cached)
            self.core.check_integrity()
        return found


def test_turns_of_a_chat_resume_behind_the_text_that_they_share(load: Load) -> None:
    """The next turn has neither the generation prompt nor the reasoning of the last one: it resumes at the history's
    end, of which at least 95 % is a hit; a system prompt is a hit at its second use."""
    hybrid = load("qwen3.5-moe")
    core, system = Core(hybrid), prompts_of((70,))[0]
    for chat in range(2):
        history = [*system, 11 + chat]
        shared, hits, kept = 0, 0, len(system) if chat else 0
        for turn in range(1 if chat else 10):
            history += [20 + chat, turn, 7]
            prompt = [*history, 1, 2, 3]  # what asks for the answer, which the next turn does not have
            served = core.serve(ask(f"{chat}.{turn}", prompt, (len(system), len(history))))[f"{chat}.{turn}/0"]
            check_greedy(hybrid.reference, prompt, served.token_ids)
            assert kept - BLOCK < served.num_cached <= kept
            shared, hits = shared + kept // BLOCK * BLOCK, hits + served.num_cached
            kept = len(history)
            history += served.token_ids[4:10]
        assert hits >= 0.95 * shared


def test_equal_prompts_that_arrive_at_once_are_computed_once(load: Load) -> None:
    hybrid = load("qwen3.5-moe")
    core, prompt = Core(hybrid, max_num_seqs=32), prompts_of((200,))[0]
    found = core.serve(*(ask(str(number), prompt, (len(prompt) - 1,)) for number in range(32)))
    assert len({tuple(each.token_ids) for each in found.values()}) == 1
    check_greedy(hybrid.reference, prompt, found["0/0"].token_ids)
    tails = 31 * (200 - 192)
    assert sum(200 - each.num_cached for each in found.values()) <= 1.1 * 200 + tails


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_requests_equal_transformers(caching: bool, load: Load) -> None:
    hybrid = load("qwen3.5-moe")
    core = Core(hybrid, enable_prefix_caching=caching)
    prompts = dict(zip("abc", prompts_of((40, 90, 61)), strict=True))
    found: dict[str, list[int]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        core.core.add(ask(name, prompt))
    for step in range(400):
        for output in core.core.step().outputs if core.core.has_work else ():
            found[output.request_id] += output.token_ids
        running = core.core.scheduler._sequences.by_id
        if step in (9, 15, 20):
            core.core.scheduler._preempt(list(running.values())[step % 2])
    for name, prompt in prompts.items():
        check_greedy(hybrid.reference, prompt, found[name])


def test_choices_and_continued_answers_equal_transformers(load: Load) -> None:
    hybrid = load("qwen3.5-moe")
    prompt = prompts_of((75,))[0]
    whole = Core(hybrid).serve(ask("whole", prompt, sampling={"n": 3}))
    assert len(whole) == 3
    for served in whole.values():
        check_greedy(hybrid.reference, prompt, served.token_ids)
    begun = whole["whole/0"].token_ids[:9]
    resumed = Core(hybrid).serve(ask("resumed", prompt, resume=[ChoiceResume(0, begun, 0)]))
    assert begun + resumed["resumed/0"].token_ids[-(NUM_TOKENS - 9) :] == whole["whole/0"].token_ids


FAULTS = ("a state is not zeroed at admission", "a state lacks a token", "a window is shifted", "folded twice")


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_detected(fault: str, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    hybrid = load("qwen3.5-moe")
    prompts = [prompt for prompt in prompts_of((40, 90)) for _ in range(2)]
    spoil(hybrid.runner)
    admit, gather = StateRows.admit, StateRows.gather

    def admitted(rows: StateRows, row: int, sequence: Any) -> None:
        slot = rows._slots[row]
        admit(rows, row, sequence)
        if not sequence.num_computed_tokens:
            rows._slots[row] = slot

    def gathered(rows: StateRows, inputs: Any, computed: Any) -> StateBatch:
        batch = gather(rows, inputs, computed)
        if fault == "a window is shifted":
            last = hybrid.runner.kv_cache.layers[0].inputs
            last[:] = np.roll(last, 1, axis=1)
        elif fault == "a state lacks a token":
            return batch._replace(num_logged=np.maximum(batch.num_logged - 1, 0))
        else:
            again = np.intersect1d(batch.writes[:, 0], np.flatnonzero(batch.num_logged))
            rows._slots[batch.rows[again]] = batch.sources[again]
        return batch

    if fault == "a state is not zeroed at admission":
        monkeypatch.setattr(StateRows, "admit", admitted)
    else:
        monkeypatch.setattr(StateRows, "gather", gathered)
    with pytest.raises(AssertionError):
        hybrid.check(prompts, waves=True, max_num_batched_tokens=25)


def test_the_bytes_of_the_plan_are_those_of_the_arrays(load: Load) -> None:
    runner = load("qwen3.5-moe").runner
    full, states = runner.info.kinds
    arrays = [cache for cache in runner.kv_cache.layers if isinstance(cache, StateArrays)]
    num_slots, num_rows = len(arrays[0].states), len(arrays[0].log)
    assert (full.layers, states.layers) == ((3,), (0, 1, 2))
    assert sum(each.states.nbytes + each.windows.nbytes for each in arrays) == num_slots * states.block_bytes
    assert sum(each.log.nbytes + each.inputs.nbytes for each in arrays) == num_rows * states.row_bytes
    assert num_rows == runner.info.step.max_num_seqs
    assert runner.kv_cache.num_bytes <= 512 * BLOCK * runner.info.kv_bytes_per_token


def test_states_that_do_not_fit_are_refused_with_the_sequences_that_would(
    load: Load, runner_loader: Callable[..., Any]
) -> None:
    folder = load("qwen3.5-moe").folder
    with pytest.raises(
        LoadError, match=r"`state` alone takes .* of maxNumSeqs 64. Lower maxNumSeqs to \d+ "
    ) as refused:
        runner_loader(folder, num_kv_blocks=100)
    fits = int(refused.value.message.split("maxNumSeqs to ")[1].split()[0])
    assert runner_loader(folder, num_kv_blocks=100, max_num_seqs=fits, max_model_len=32).info.kind_blocks[1] > 1
    with pytest.raises(LoadError, match=rf"Lower maxNumSeqs to {fits} "):
        runner_loader(folder, num_kv_blocks=100, max_num_seqs=fits + 1)
    with pytest.raises(LoadError, match=r"maxNumSeqs 64. Raise kvCacheMemory"):
        runner_loader(folder, num_kv_blocks=3)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("deterministic", True),
        ("tensor_parallel_size", 2),
        ("speculative", {"method": "ngram"}),
        ("device", "cuda"),
    ],
)
def test_what_is_not_supported_with_states_is_refused_by_name(
    setting: str, value: Any, load: Load, runner_loader: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = load("qwen3.5-moe").folder
    monkeypatch.setattr("pagemill_engine.sizing.sizing.open_weights", None)  # no weight is read
    converted = msgspec.convert({"model": "m", setting: value}, EngineConfig)
    with pytest.raises(LoadError, match=f"`{setting}.*which keeps recurrent states. Set {setting}"):
        runner_loader(folder, **{setting: getattr(converted, setting)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "`layer_types` is .*; it must be a list of 4 names"),
        ({"layer_types": ["full_attention"] * 3 + ["mamba"]}, "layers of the type `mamba`"),
        ({"layer_types": ["linear_attention"] * 4}, "no attention layer"),
        ({"layer_types": None, "full_attention_interval": 9}, "no attention layer"),
        ({"full_attention_interval": 0, "layer_types": None}, "declares full_attention_interval = 0"),
        ({"linear_num_value_heads": 3}, "`linear_num_value_heads` is '3'; it must be a multiple of the 2"),
        ({**LFM2, "full_attn_idxs": [4]}, r"`full_attn_idxs` is '\[4\]'; it must be numbers of the 4 layers"),
        ({**LFM2, "full_attn_idxs": []}, "no attention layer"),
        ({**LFM2, "layer_types": ["conv"] * 3}, "`layer_types` is .*; it must be a list of 4 names"),
        ({"hidden_act": "gelu"}, "the activation `gelu` beside a gated delta rule"),
        ({**BAMBA, "attn_layer_indices": [4]}, r"`attn_layer_indices` is '\[4\]'; it must be numbers of the 4 layers"),
        ({**BAMBA, "mamba_n_heads": 7}, "`mamba_n_heads` is '7'; it must be a divisor of the 96"),
        ({**BAMBA, "mamba_n_groups": 3}, "`mamba_n_groups` is '3'; it must be a divisor of the 8"),
        ({**BAMBA, "time_step_limit": [0.1]}, "`time_step_limit` .* a list of 2 numbers"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused_by_the_header(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(_config(changes))
    with pytest.raises((UnreadableModelError, UnsupportedModelArchitecture), match=message):
        check_config(tmp_path)


def _config(changes: dict[str, Any]) -> str:
    names = {"full_attn_idxs": "Lfm2ForCausalLM", "attn_layer_indices": "BambaForCausalLM"}
    name = next((names[key] for key in names if key in changes), "Qwen3_5ForCausalLM")
    values = {**QWEN, "vocab_size": 50, "architectures": [name], **changes}
    return msgspec.json.encode(values).decode()


def test_experts_that_are_stored_together_are_those_stored_one_by_one(
    load: Load, tmp_path: Path, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    """Published files of Qwen3.5 have the experts of a layer in two tensors."""
    hybrid = load("qwen3.5-moe")
    tensors = load_file(hybrid.folder / "model.safetensors")
    for layer in range(4):
        name = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([tensors.pop(f"{name}.{expert}.{part}_proj.weight") for expert in range(EXPERTS["num_experts"])])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{name}.gate_up_proj": np.concatenate([gate, up], 1), f"{name}.down_proj": down}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((hybrid.folder / "config.json").read_bytes())
    hybrid._replace(driver=make_driver(runner_loader(tmp_path))).check(prompts_of((17, 40)))


def test_missing_tensors_are_named(load: Load, tmp_path: Path, runner_loader: Callable[..., Any]) -> None:
    folder = load("qwen3.5-moe").folder
    tensors = load_file(folder / "model.safetensors")
    gone = [f"model.layers.1.linear_attn.{name}" for name in ("A_log", "conv1d.weight")]
    save_file({name: each for name, each in tensors.items() if name not in gone}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(LoadError, match=r"missing: `model.layers.1.linear_attn.A_log`, .*conv1d.weight`"):
        runner_loader(tmp_path)
