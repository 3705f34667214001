"""Hybrids, which have recurrent layers beside attention, give the greedy answers of transformers without a cache.

The tests run prompts alone, in batches, in chunks, with prefix hits, preempted, forked and continued elsewhere. Memory
that was not written is not a number, so nothing may read it. Planted faults must be detected.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hybrid_models import (
    ALL,
    EXPERTS,
    LFM2,
    MODELS,
    OTHERS,
    QWEN,
    SHORT,
    STATE_SPACES,
    VARIANTS,
    check_greedy,
    prompts_of,
    write_hybrid,
)
from ranked_engine import SETTINGS, Ranks, answers
from safetensors.numpy import load_file, save_file

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.config import SpeculationConfig
from pagemill_execution.decoders.step_model import StateArrays
from pagemill_execution.runners.inputs import StateRows
from pagemill_execution.sizing.sizing import weights_of
from pagemill_execution.weights.errors import LoadError
from pagemill_kernels.cpu import library
from pagemill_kernels.recurrent.batch import StateBatch
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.errors import UnsupportedModelArchitecture
from pagemill_models.spec.decoders import decoder_from_config
from pagemill_models.spec.model_files import load_model_spec
from pagemill_models.spec.spec_from_config import check_config
from pagemill_models.spec.stored_names import declared_names
from pagemill_protocol.request.generate import ChoiceResume, GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams
from pagemill_protocol.source_errors import UnreadableModelError

NUM_TOKENS = 24
HYBRIDS = ALL | VARIANTS
FAMILIES = [*ALL]
"""At least one shape of each family."""
BAMBA = STATE_SPACES["bamba"][1]
LFM2_MOE, LFM3, OLMO, NEMOTRON, KIMI = (OTHERS[name][1] for name in OTHERS)
PATTERN = {key: value for key, value in NEMOTRON.items() if key != "layers_block_type"}
KIMI_LISTS = {**KIMI, "layer_types": None, "num_experts": 6, "num_experts_per_token": 2}
BLOCK = 16
PLAIN = "qwen3-next with some plain MLPs"
LATENT = "nemotron-h with experts over latents"


class Hybrid(NamedTuple):
    folder: Path
    reference: Any
    runner: Any
    driver: Any

    def check(self, prompts: list[list[int]], **settings: Any) -> list[Any]:
        results: list[Any] = self.driver.greedy(prompts, NUM_TOKENS, **settings)
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
            reference = write_hybrid(*HYBRIDS[name], folder)
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


def sample(*names: str) -> list[Any]:
    """Return all families, of which `make test` has these."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.full) for name in FAMILIES]


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("settings", [{"waves": True}, {"max_num_batched_tokens": 1}, {"overlap": True}], ids=str)
def test_any_way_to_compute_equals_transformers(name: str, settings: dict[str, Any], load: Load) -> None:
    load(name).check(prompts_of(), **settings)


@pytest.mark.parametrize(
    "name", [n if n in (PLAIN, LATENT) else pytest.param(n, marks=pytest.mark.full) for n in VARIANTS]
)
def test_variants_equal_transformers(name: str, load: Load) -> None:
    load(name).check(prompts_of((1, 17, 90)), max_num_batched_tokens=40)


@pytest.mark.parametrize("name", SHORT)
def test_short_convolutions_equal_transformers(name: str, load: Load) -> None:
    hybrid = load(name)
    prompts = prompts_of((1, 2, 15, 33, 90))
    hybrid.check(prompts, max_num_batched_tokens=40)
    hybrid.check(prompts, max_num_batched_tokens=7, enable_prefix_caching=False)


@pytest.mark.parametrize("name", [*STATE_SPACES, *OTHERS])
def test_state_spaces_and_further_families_equal_transformers(name: str, load: Load) -> None:
    hybrid = load(name)
    prompts = prompts_of((1, 2, 15, 33, 90))
    hybrid.check(prompts, max_num_batched_tokens=40)
    hybrid.check(prompts, max_num_batched_tokens=7, enable_prefix_caching=False)


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("backend", ["reference", "cpu", "cpu_native"])
def test_every_backend_equals_transformers(
    name: str, backend: str, load: Load, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    hybrid = load(name)
    runner = runner_loader(hybrid.folder, backend=backend)
    hybrid._replace(runner=runner, driver=make_driver(runner)).check(prompts_of(), max_num_batched_tokens=50)


def ask(name: str, prompt: list[int], points: tuple[int, ...] = (), **more: Any) -> GenerateRequest:
    asked = {"max_tokens": NUM_TOKENS} | more.pop("sampling", {})
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, **asked)
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


@pytest.mark.parametrize("drops", [True, False], ids=["dropped reasoning", "kept text"])
def test_turns_of_a_chat_resume_behind_the_text_that_they_share(load: Load, drops: bool) -> None:
    """Where the next turn has neither the generation prompt nor the reasoning of the last one, it resumes at the
    history's end, else at the answer's, of which at least 95 % is a hit; a system prompt is a hit at its second use."""
    hybrid = load("qwen3.5-moe")
    core, system = Core(hybrid), prompts_of((70,))[0]
    for chat in range(2):
        history = [*system, 11 + chat]
        shared, hits, kept = 0, 0, len(system) if chat else 0
        for turn in range(1 if chat else 10):
            history += [20 + chat, turn, 7]
            prompt = [*history, 1, 2, 3]  # what asks for the answer, which the next turn does not have
            name, points = f"{chat}.{turn}", (len(system), len(history))
            served = core.serve(ask(name, prompt, points, sampling={"max_tokens": 12}))[f"{name}/0"]
            check_greedy(hybrid.reference, prompt, served.token_ids)
            assert kept - BLOCK < served.num_cached <= kept
            shared, hits = shared + kept // BLOCK * BLOCK, hits + served.num_cached
            kept = len(history) if drops else len(prompt) + len(served.token_ids) - 1
            history = [*history, *served.token_ids[4:10]] if drops else [*prompt, *served.token_ids]
        assert hits >= 0.95 * shared


def test_equal_prompts_that_arrive_at_once_are_computed_once(load: Load) -> None:
    hybrid = load("qwen3.5-moe")
    core, prompt = Core(hybrid, max_num_seqs=32), prompts_of((200,))[0]
    found = core.serve(*(ask(str(number), prompt, (len(prompt) - 1,)) for number in range(32)))
    assert len({tuple(each.token_ids) for each in found.values()}) == 1
    check_greedy(hybrid.reference, prompt, found["0/0"].token_ids)
    tails = 31 * (200 - 192)
    assert sum(200 - each.num_cached for each in found.values()) <= 1.1 * 200 + tails


@pytest.mark.parametrize("name", sample("qwen3.5-moe", "bamba", "lfm2"))
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_requests_equal_transformers(caching: bool, name: str, load: Load) -> None:
    hybrid = load(name)
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


@pytest.mark.parametrize("name", sample("qwen3.5-moe", "kimi-linear", "bamba", "lfm2"))
def test_choices_and_continued_answers_equal_transformers(name: str, load: Load) -> None:
    hybrid = load(name)
    prompt = prompts_of((75,))[0]
    whole = Core(hybrid).serve(ask("whole", prompt, sampling={"n": 3}))
    assert len(whole) == 3
    for served in whole.values():
        check_greedy(hybrid.reference, prompt, served.token_ids)
    begun = whole["whole/0"].token_ids[:9]
    resumed = Core(hybrid).serve(ask("resumed", prompt, resume=[ChoiceResume(0, begun, 0)]))
    assert begun + resumed["resumed/0"].token_ids[-(NUM_TOKENS - 9) :] == whole["whole/0"].token_ids


@pytest.mark.slow
@pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")
@pytest.mark.sample("qwen3.5-2")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h", "lfm2", LATENT])
def test_ranks_give_the_tokens_of_one(
    name: str, size: int, load: Load, ranks: Ranks, runner_loader: Callable[..., Any]
) -> None:
    """Processes that divide heads with states serve chunked prompts, choices and hits of the prefix cache."""
    folder = load(name).folder
    single = runner_loader(folder, **SETTINGS | {"num_kv_blocks": 256})
    expected = answers(single)
    single.close()
    runner = ranks(folder, size, num_kv_blocks=256)
    assert runner.info.kinds[-1].state
    assert answers(runner) == expected


FAULTS = ("a state is not zeroed at admission", "a state lacks a token", "a window is shifted", "folded twice")


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_detected(fault: str, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    hybrid = load("qwen3.5-moe")
    prompts = [prompt for prompt in prompts_of((40, 90)) for _ in range(2)]
    spoil(hybrid.runner)
    admit, gather = StateRows.admit, StateRows.gather

    def admitted(rows: StateRows, row: int, sequence: Any, *, is_new: bool) -> None:
        slot = rows._slots[row]
        admit(rows, row, sequence, is_new=is_new)
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


def test_what_may_be_proposed_takes_memory_only_where_it_is_set(load: Load, runner_loader: Callable[..., Any]) -> None:
    """By default a part of the cache, of which small caches have less; as much as is set; nothing if it is off."""
    folder, row_bytes = load("qwen3.5-moe").folder, {}
    cases: dict[str, dict[str, Any]] = {
        "off": {"speculative": SpeculationConfig(method="off")},
        "default": {},
        "large": {"num_kv_blocks": 2000},
        "set": {"speculative": SpeculationConfig(num_tokens=16)},
    }
    for name, settings in cases.items():
        runner = runner_loader(folder, **settings)
        arrays = [cache for cache in runner.kv_cache.layers if isinstance(cache, StateArrays)]
        row_bytes[name] = runner.info.kinds[-1].row_bytes
        assert sum(each.log.nbytes + each.inputs.nbytes for each in arrays) == 64 * row_bytes[name]
        room = {"off": 0, "default": 3, "large": 8, "set": 16}[name]
        assert (runner.info.most_proposed, arrays[0].log.shape[1]) == (room, BLOCK + room)
        proposals = EngineCore(EngineConfig(model="m", block_size=BLOCK, **settings), runner)._proposals
        assert room == (0 if proposals is None else proposals._most)
        runner.close()
    token = (row_bytes["large"] - row_bytes["off"]) // 8
    assert row_bytes["set"] == row_bytes["off"] + 16 * token
    assert row_bytes["default"] == row_bytes["off"] + 3 * token


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


def test_what_is_not_supported_with_states_is_refused_by_name(
    load: Load, runner_loader: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = load("qwen3.5-moe").folder
    monkeypatch.setattr("pagemill_execution.sizing.sizing.open_weights", None)  # no weight is read
    with pytest.raises(LoadError, match=r"`pipeline_parallel_size.*which keeps recurrent states. Set pipeline_para"):
        runner_loader(folder, pipeline_parallel_size=2)
    with pytest.raises(LoadError, match=r"`block_size` 32.*recurrent states every 16 tokens. Set block_size to 16"):
        runner_loader(folder, device="cuda", block_size=32)


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
        ({**LFM2_MOE, "layer_types": None}, "`layer_types` is missing; it must be a list of 4 names"),
        ({**LFM2_MOE, "layer_types": ["conv"] * 3}, "`layer_types` is .*; it must be a list of 4 names"),
        ({**LFM2_MOE, "num_experts_per_tok": 9}, "`num_experts_per_tok` is '9'; it must be at most the 5 experts"),
        ({**LFM3, "layer_types": ["conv"] * 6}, "no attention layer"),
        ({**LFM3, "layer_types": ["conv"] * 5 + ["mamba"]}, "layers of the type `mamba`"),
        ({**OLMO, "layer_types": ["linear_attention"] * 4}, "no attention layer"),
        ({**OLMO, "linear_num_value_heads": 3}, "`linear_num_value_heads` is '3'; it must be a multiple of the 2"),
        ({**OLMO, "hidden_act": "gelu"}, "the activation `gelu` beside a gated delta rule"),
        ({**NEMOTRON, "num_hidden_layers": 7}, "`layers_block_type` is .*; it must be a list of 7 names"),
        (
            {**PATTERN, "hybrid_override_pattern": "M*-E", "num_hidden_layers": 5},
            r"`hybrid_override_pattern` is 'M\*-E'; it must be 5 letters, one for each layer",
        ),
        ({**PATTERN, "hybrid_override_pattern": "M*X"}, "layers of the type `X` .`hybrid_override_pattern`"),
        ({**PATTERN, "hybrid_override_pattern": None}, "`layers_block_type` is missing"),
        ({**PATTERN, "hybrid_override_pattern": "MM-"}, "no attention layer"),
        ({**NEMOTRON, "n_groups": 4}, "`n_groups` is '4'; it must be a divisor of the 6 mamba_num_heads"),
        ({**NEMOTRON, "moe_latent_size": 0}, "hidden_size = 0; it must be from 1"),
        (
            {**KIMI_LISTS, "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3]}},
            "`linear_attn_config.kda_layers` is .* with full_attn_layers the numbers from 1 to 4; 4 is missing",
        ),
        (
            {**KIMI_LISTS, "linear_attn_config": {"full_attn_layers": [2, 5], "kda_layers": [1, 3, 4]}},
            "`linear_attn_config.full_attn_layers` is .*; it must be numbers from 1 to 4, each in one of",
        ),
        ({**KIMI_LISTS, "mlp_layer_types": ["dense"] * 3}, "`mlp_layer_types` is .*; it must be a list of 4 names"),
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


ROTATED = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}


@pytest.mark.parametrize(
    ("published", "same"),
    [
        ({**PATTERN, "hybrid_override_pattern": "M*-EM*"}, NEMOTRON),
        (
            {"layer_types": None, "full_attention_interval": 2},
            {"layer_types": ["linear_attention", "full_attention"] * 2},
        ),
        (LFM2, {**LFM2, "full_attn_idxs": None, "layer_types": ["conv", "full_attention"] * 2}),
        ({"rope_theta": 500.0, "partial_rotary_factor": 0.25}, {"rope_parameters": ROTATED}),
    ],
    ids=["pattern", "interval", "full", "rotation"],
)
def test_settings_of_older_files_declare_the_layers_that_those_of_newer_ones_do(
    published: dict[str, Any], same: dict[str, Any]
) -> None:
    one, other = (decoder_from_config(json.loads(_config(each)), Path("config.json")) for each in (published, same))
    assert one == other


def _config(changes: dict[str, Any]) -> str:
    names = {
        "num_dense_layers": "Lfm2MoeForCausalLM",
        "sliding_window": "Lfm3ForCausalLM",
        "kv_lora_rank": "KimiLinearForCausalLM",
        "ssm_state_size": "NemotronHForCausalLM",
        "full_attn_idxs": "Lfm2ForCausalLM",
        "attn_layer_indices": "BambaForCausalLM",
        "linear_num_key_heads": "OlmoHybridForCausalLM",
    }
    name = next((names[key] for key in names if key in changes), "Qwen3_5ForCausalLM")
    own = QWEN if name == "Qwen3_5ForCausalLM" else {}
    values = {**own, "vocab_size": 50, "architectures": [name], **changes}
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


@pytest.mark.parametrize("name", [*sample("falcon-h1", "kimi-linear"), pytest.param(LATENT, marks=pytest.mark.full)])
@pytest.mark.parametrize("mode", ["int8", pytest.param("int4", marks=pytest.mark.full)])
def test_quantized_answers_are_those_of_the_rounded_weights(
    name: str,
    mode: Any,
    load: Load,
    tmp_path: Path,
    runner_loader: Callable[..., Any],
    make_driver: Callable[[Any], Any],
) -> None:
    """Matrices are rounded, and what gives the rates of states is not; states stay float32."""
    hybrid = load(name)
    spec = load_model_spec(hybrid.folder)
    rounded = weights_of(EngineConfig(model="m", quantization=mode), hybrid.folder, spec, False)
    tensors = load_file(hybrid.folder / "model.safetensors")
    changed = 0
    for declared, stored in declared_names(tensors, spec.decoder).items():
        before = tensors[stored].copy()
        for part, out in _parts_of(declared, tensors[stored], spec.decoder):
            rounded.read_into(part, out)
        changed += not np.array_equal(before, tensors[stored])
    assert changed >= 2
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((hybrid.folder / "config.json").read_bytes())
    reference = type(hybrid.reference).from_pretrained(tmp_path, attn_implementation="eager").eval()
    runner = runner_loader(hybrid.folder, quantization=mode)
    own = hybrid._replace(reference=reference, runner=runner, driver=make_driver(runner))
    own.check(prompts_of((17, 40)), max_num_batched_tokens=25)


@pytest.mark.parametrize("name", ["nemotron-h", "olmo-hybrid"])
def test_layers_that_draft_are_named_at_the_start_and_not_used(
    name: str, load: Load, tmp_path: Path, runner_loader: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    hybrid = load(name)
    extra = {"mtp.layers.0.enorm.weight": np.ones(64, dtype=np.float32)}
    save_file(load_file(hybrid.folder / "model.safetensors") | extra, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((hybrid.folder / "config.json").read_bytes())
    caplog.set_level("INFO")
    runner_loader(tmp_path).close()
    assert "has layers that draft tokens (`mtp.layers.0.enorm.weight`), which are not used." in caplog.text


def _parts_of(name: str, tensor: Any, decoder: DecoderSpec) -> Iterator[tuple[str, Any]]:
    """Yield the names of the declared tensors in a stored one, with their places."""
    suffix = next((each for each in decoder.stacked if name.endswith(each)), None)
    if suffix is None:
        yield name, tensor
        return
    parts = decoder.stacked[suffix]
    for expert, whole in enumerate(tensor):
        for part, rows in zip(parts, np.split(whole, len(parts)), strict=True):
            yield name.removesuffix(suffix) + part.replace("*", str(expert)), rows


MISSING = {
    "qwen3.5-moe": ("model.layers.1.linear_attn.A_log", "model.layers.1.linear_attn.conv1d.weight"),
    "olmo-hybrid": ("model.layers.1.linear_attn.A_log", "model.layers.1.linear_attn.k_conv1d.weight"),
    "nemotron-h": ("model.layers.0.mixer.A_log", "model.layers.0.mixer.conv1d.weight"),
    "kimi-linear": ("model.layers.0.self_attn.forget_gate.A_log", "model.layers.0.self_attn.q_conv1d.weight"),
    "lfm3": ("model.layers.0.conv.conv.weight", "model.layers.2.self_attn.g_proj.weight"),
}
"""Names as transformers' modules have them."""


@pytest.mark.sample("qwen*", "kimi*")
@pytest.mark.parametrize("name", MISSING)
def test_missing_tensors_are_named(name: str, load: Load, tmp_path: Path, runner_loader: Callable[..., Any]) -> None:
    folder, first, second = load(name).folder, *MISSING[name]
    bare = [each.partition(".layers.")[2] for each in (first, second)]
    ends = tuple(each.replace("forget_gate.", "").replace("g_proj", "gate_proj") for each in bare)
    tensors = load_file(folder / "model.safetensors")
    kept = {stored: each for stored, each in tensors.items() if not stored.endswith(ends)}
    assert len(kept) == len(tensors) - 2
    save_file(kept, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(LoadError, match=rf"missing: `{first}`, .*`{second}`"):
        runner_loader(tmp_path)
