"""Greedy answers with adapters equal those of PEFT's model, alone and in batches of many adapters and the base."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_engine import NUM_TOKENS, Engine
from peft_adapters import ATTENTION, CASES, PROMPTS, Adapted, Base, write_adapter, write_base
from safetensors.numpy import load_file, save_file

from pagemill_execution.adapters.reading import read_values
from pagemill_models.adapters.errors import AdapterError
from pagemill_models.adapters.folder import read_adapter
from pagemill_models.spec.model_files import load_model_spec
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.generate import ChoiceResume, GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Base] = {}

    def base(name: str) -> Base:
        if name not in made:
            made[name] = write_base(name, tmp_path_factory.mktemp("base"))
        return made[name]

    return base


@pytest.mark.parametrize("natively", [True, False])
def test_the_plan_has_the_memory_that_adapters_take(
    natively: bool, bases: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not natively:
        monkeypatch.setattr("pagemill_execution.sizing.compute.can_fuse", lambda decoder: False)
    base = bases("llama")
    modules = [*ATTENTION, "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"]
    adapted = write_adapter(base, tmp_path, r=16, target_modules=modules)
    planned = []
    for max_cpu_loras in (8, 9):
        engine = Engine(base.folder, max_cpu_loras=max_cpu_loras)
        memory = engine.core.runner.info.memory
        assert memory is not None
        planned.append(memory.adapter_bytes)
    assert engine.core.adapters is not None
    loaded = engine.core.adapters.load(adapted.folder)
    one = planned[1] - planned[0]
    assert one * 0.8 <= loaded.num_bytes <= one
    assert planned[0] > 9 * one  # one more, and its values while they are read


@pytest.mark.slow
@pytest.mark.sample(
    "llama, all-linear*",
    "llama, patterns",
    "llama, ends of names",
    "llama, layers of a list",
    "llama, tied head",
    "gpt2, embedding",
    "phi3",
    "gpt_oss",
    "qwen3_moe, one parameter",
    "qwen2_moe, all-linear",
)
@pytest.mark.parametrize("case", CASES)
def test_greedy_answers_equal_pefts(case: str, bases: Any, tmp_path: Path) -> None:
    name, settings = CASES[case]
    base = bases(name)
    adapted = write_adapter(base, tmp_path, **settings)
    engine = Engine(base.folder)
    check(engine, base, adapted)


@pytest.mark.slow
@pytest.mark.sample("gpt_neox", "mixtral")
@pytest.mark.parametrize(
    "case",
    ["llama", "gpt_neox", "mixtral", pytest.param("deepseek_v3", marks=pytest.mark.full), "llama, embedding and head"],
)
def test_models_that_torch_runs_serve_them_too(
    case: str, bases: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, settings = CASES[case]
    base = bases(name)
    monkeypatch.setattr("pagemill_execution.sizing.compute.can_fuse", lambda decoder: False)
    check(Engine(base.folder), base, write_adapter(base, tmp_path, **settings))


def test_experts_one_by_one_are_the_stacked_ones(bases: Any, tmp_path: Path) -> None:
    base = bases("mixtral")
    stacked = write_adapter(base, tmp_path / "stacked", target_parameters=["mlp.experts.down_proj"], target_modules=[])
    tensors, single = load_file(stacked.folder / WEIGHTS), {}
    experts = 4
    for name, value in tensors.items():
        for expert in range(experts):
            rank = len(value) // experts if "lora_A" in name else value.shape[1] // experts
            part = (
                value.reshape(experts, rank, -1)[expert]
                if "lora_A" in name
                else value.reshape(len(value), rank, experts)[:, :, expert]
            )
            own = name.replace(".mlp.experts.", f".block_sparse_moe.experts.{expert}.w2.")
            single[own.replace("base_layer.", "")] = part.copy()
    folder = tmp_path / "single"
    folder.mkdir()
    save_file(single, folder / WEIGHTS)
    config = json.loads((stacked.folder / "adapter_config.json").read_text())
    config |= {"target_parameters": None, "target_modules": ["w2"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    engine = Engine(base.folder)
    digests = [engine.load(stacked.folder), engine.load(folder)]
    answers = [engine.greedy(PROMPTS[:4], [digest] * 4) for digest in digests]
    assert answers[0] == answers[1]
    assert answers[0][0] == stacked.greedy(PROMPTS[0], NUM_TOKENS)[0]
    assert answers[0] != engine.greedy(PROMPTS[:4], [""] * 4)


def check(engine: Engine, base: Base, adapted: Adapted) -> None:
    digest = engine.load(adapted.folder)
    plain = Adapted(base.folder, base.model)
    expected = [adapted.greedy(prompt, NUM_TOKENS) for prompt in PROMPTS[:3]]
    unadapted = [plain.greedy(prompt, NUM_TOKENS) for prompt in PROMPTS[:3]]
    assert [tokens for tokens, _ in expected] != [tokens for tokens, _ in unadapted]
    for prompt, (tokens, gap) in zip(PROMPTS, expected, strict=False):
        assert gap > 1e-3, "near ties do not show what is wrong"
        assert engine.greedy([prompt], [digest]) == [tokens]
    assert engine.greedy(PROMPTS[:3], [""] * 3) == [tokens for tokens, _ in unadapted]


@pytest.mark.slow
@pytest.mark.sample("llama", "gpt2")
@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "mixtral", "llama of 4 bits"])
def test_a_batch_of_eight_adapters_and_the_base(name: str, bases: Any, tmp_path: Path) -> None:
    case, quantization = name.removesuffix(" of 4 bits"), "int4" if name.endswith("of 4 bits") else "none"
    base = bases(case)
    engine = Engine(base.folder, quantization=quantization)
    adapters = [
        write_adapter(base, tmp_path / str(seed), seed, **{**CASES[case][1], "r": 4 * (1 + seed % 4), "lora_alpha": 16})
        for seed in range(8)
        if seed % 4 != 2  # scales are powers of two
    ]
    adapters += [write_adapter(base, tmp_path / f"more {seed}", seed, **CASES[case][1]) for seed in (20, 21)]
    digests = ["", *(engine.load(each.folder) for each in adapters)]
    assert len(set(digests)) == 9
    of_prompts = [digests[index % 9] for index in range(32)]
    together = engine.greedy(PROMPTS, of_prompts)
    alone = [engine.greedy([prompt], [digest])[0] for prompt, digest in zip(PROMPTS, of_prompts, strict=True)]
    assert together == alone
    if quantization == "none":
        models = [Adapted(base.folder, base.model), *adapters]
        for index in range(9):
            tokens, gap = models[index].greedy(PROMPTS[index], NUM_TOKENS)
            assert gap > 1e-3
            assert together[index] == tokens
    swapped = engine.greedy(PROMPTS, [digests[(index + 1) % 9] for index in range(32)])
    assert sum(one != other for one, other in zip(together, swapped, strict=True)) > 24, "a swap of slots is seen"


def test_an_adapter_that_waits_for_a_slot_is_not_overtaken_for_ever(bases: Any, tmp_path: Path) -> None:
    base = bases("llama")
    engine = Engine(base.folder, max_loras=1, max_cpu_loras=2, max_num_seqs=4)
    first, second = (
        engine.load(write_adapter(base, tmp_path / str(seed), seed, **CASES["llama"][1]).folder) for seed in (1, 2)
    )
    ends = order_of_ends(engine, [first, second, *[first] * 12])
    assert ends.index(1) < 10
    assert engine.core.adapters is not None
    assert engine.core.adapters.counts() == ([], [])


def test_requests_for_adapters_with_a_slot_share_steps_while_another_waits(bases: Any, tmp_path: Path) -> None:
    """One after the other they take 16 times the steps of one answer."""
    base = bases("llama")
    engine = Engine(base.folder, max_loras=1, max_cpu_loras=2)
    digests = [
        engine.load(write_adapter(base, tmp_path / str(seed), seed, **CASES["llama"][1]).folder) for seed in (1, 2)
    ]
    for index in range(16):
        engine.add(str(index), PROMPTS[index], digests[index % 2])
    num_steps, ends = 0, list[int]()
    while engine.core.has_work:
        ends += [int(out.request_id) for out in engine.core.step().outputs if out.finish_reason]
        num_steps += 1
    assert num_steps < 6 * (NUM_TOKENS + 2), "adapters change after each answer"
    assert sorted(ends) == [*range(16)]


def test_the_adapter_that_was_used_longest_ago_is_dropped_also_if_all_have_slots(bases: Any, tmp_path: Path) -> None:
    base = bases("llama")
    engine = Engine(base.folder, max_loras=2, max_cpu_loras=2)
    folders = [write_adapter(base, tmp_path / str(seed), seed, target_modules=["q_proj"]).folder for seed in range(3)]
    often, once = (engine.load(folder) for folder in folders[:2])
    for digest in (often, once, often):
        engine.greedy(PROMPTS[:1], [digest], 1)
    assert engine.core.adapters is not None
    assert engine.core.adapters.counts() == ([], [])
    last = engine.load(folders[2])
    assert engine.core.adapters.slots().resident == [often, last]


def test_a_pinned_adapter_is_dropped_after_all_others(bases: Any, tmp_path: Path) -> None:
    base = bases("llama")
    engine = Engine(base.folder, max_loras=1, max_cpu_loras=2)
    folders = [write_adapter(base, tmp_path / str(seed), seed, target_modules=["q_proj"]).folder for seed in range(4)]
    requests = engine.core.adapters
    assert requests is not None
    pinned = requests.load(folders[0], pinned=True).digest
    digests = [engine.load(folder) for folder in folders[1:]]
    for digest in (*digests, *digests):
        engine.greedy(PROMPTS[:1], [digest], 1)
        assert requests.store.loaded == [pinned, digest]
    requests.store.forget(pinned)
    assert requests.store.loaded == digests[-1:]


def test_requests_that_wait_for_an_adapter_are_load(bases: Any, tmp_path: Path) -> None:
    """Gateways choose engines, and the operator their number, by what reports count as waiting."""
    base = bases("llama")
    engine = Engine(base.folder, max_loras=1, max_cpu_loras=2)
    digests = [
        engine.load(write_adapter(base, tmp_path / str(seed), seed, target_modules=["q_proj"]).folder)
        for seed in (1, 2)
    ]
    requests = engine.core.adapters
    assert requests is not None
    for index in range(3):
        engine.add(str(index), PROMPTS[index], digests[min(index, 1)])
    engine.core.step()
    load = requests.counted(engine.core.load())
    assert (load.num_requests_running, load.num_requests_waiting) == (1, 2)
    assert load.num_tokens_waiting == 2 * len(PROMPTS[0])
    while engine.core.has_work:
        engine.core.step()
    load = requests.counted(engine.core.load())
    assert (load.num_requests_running, load.num_requests_waiting, load.num_tokens_waiting) == (0, 0, 0)


def order_of_ends(engine: Engine, digests: Sequence[str]) -> list[int]:
    for index, digest in enumerate(digests):
        engine.add(str(index), PROMPTS[index], digest)
    ends = []
    while engine.core.has_work:
        ends += [int(out.request_id) for out in engine.core.step().outputs if out.finish_reason]
    return ends


@pytest.mark.slow
def test_a_thousand_swaps_leak_nothing(bases: Any, tmp_path: Path) -> None:
    base = bases("llama")
    engine = Engine(base.folder, max_loras=1, max_cpu_loras=2)
    adapters = [write_adapter(base, tmp_path / str(seed), seed, target_modules=["q_proj"]) for seed in range(3)]
    digests = [engine.load(adapted.folder) for adapted in adapters]
    expected = [engine.greedy(PROMPTS[:1], [digest], 1) for digest in digests]
    for swap in range(1000):
        assert engine.greedy(PROMPTS[:1], [digests[swap % 3]], 1) == expected[swap % 3]
    requests = engine.core.adapters
    assert requests is not None
    assert (requests.store.num_loads, len(requests.store.loaded), requests.counts()) == (1006, 2, ([], []))
    assert engine.core.load().num_kv_bytes_active == 0
    engine.core.check_integrity()


def test_a_load_beside_steps_is_done_in_pieces(bases: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = bases("llama")
    engine = Engine(base.folder, max_loras=2)
    adapted = write_adapter(base, tmp_path, target_modules=["q_proj"])
    monkeypatch.setattr("pagemill_execution.adapters.store.PIECE_S", 0.0)
    monkeypatch.setattr("pagemill_execution.adapters.store.LONGEST_STEP_S", 60.0)
    assert engine.core.adapters is not None
    store, num_turns = engine.core.adapters.store, 0
    store.pace.is_free = False
    future = store.read(adapted.folder)
    while not wait([future], 0.02).done:
        store.pace.turn()
        num_turns += 1
    assert num_turns >= 6  # a turn for each tensor
    digest = engine.load(adapted.folder)  # all at once: no step runs
    assert digest == future.result().digest


@pytest.mark.parametrize("number", [40, pytest.param(1000, marks=pytest.mark.full)])
def test_many_adapters_need_the_memory_of_a_few(number: int, bases: Any, tmp_path: Path) -> None:
    base = bases("llama")
    engine = Engine(base.folder, max_loras=4, max_cpu_loras=8, max_num_seqs=16)
    adapted = write_adapter(base, tmp_path / "0", target_modules=["q_proj"], layers_to_transform=[0])
    tensors, digests = load_file(adapted.folder / WEIGHTS), []
    for index in range(number):
        folder = tmp_path / f"copy {index}"
        folder.mkdir()
        (folder / "adapter_config.json").write_bytes((adapted.folder / "adapter_config.json").read_bytes())
        save_file(
            {name: value * np.float32(2 ** (index % 3)) + index for name, value in tensors.items()}, folder / WEIGHTS
        )
        digests.append(engine.load(folder))
    requests = engine.core.adapters
    assert requests is not None
    assert len(set(digests)) == number
    asked = [digests[(17 * index) % number] for index in range(32)]
    for index, digest in enumerate(asked):
        engine.add(f"many-{index}", PROMPTS[index], digest)
    for index in range(20, 32):  # those that are waited for, some of them loading
        engine.core.abort(f"many-{index}")
    answers: dict[str, list[int]] = {f"many-{index}": [] for index in range(32)}
    most_running = 0
    while engine.core.has_work:
        for out in engine.core.step().outputs:
            assert out.error is None
            answers[out.request_id] += out.token_ids
        running, _ = requests.counts()
        most_running = max(most_running, len(running))
        assert len(requests.store.loaded) <= 8
        assert len(running) <= 4
    assert most_running == 4
    assert requests.store.loading == []
    alone = [engine.greedy([PROMPTS[index]], [asked[index]])[0] for index in range(20)]
    assert [answers[f"many-{index}"] for index in range(20)] == alone


def test_prefixes_are_shared_by_requests_of_one_adapter_only(bases: Any, tmp_path: Path) -> None:
    base = bases("llama")
    engine = Engine(base.folder)
    first = engine.load(write_adapter(base, tmp_path / "1", 1, **CASES["llama"][1]).folder)
    copy = engine.load(write_adapter(base, tmp_path / "copy", 1, **CASES["llama"][1]).folder)
    other = engine.load(write_adapter(base, tmp_path / "2", 2, **CASES["llama"][1]).folder)
    assert first == copy != other
    prompt = [token for prompt in PROMPTS[:4] for token in prompt]
    cached = []
    for index, digest in enumerate([first, first, other, "", first]):
        engine.add(f"cached-{index}", prompt, digest)
        outs = [out for _ in range(100) if engine.core.has_work for out in engine.core.step().outputs]
        cached.append(max(out.num_cached_tokens for out in outs))
    assert cached == [0, 32, 0, 0, 32]


@pytest.mark.parametrize("has_it", [True, False], ids=["it has the adapter", "it loads the adapter"])
def test_another_engine_continues_an_answer_with_an_adapter(has_it: bool, bases: Any, tmp_path: Path) -> None:
    base = bases("llama")
    adapters = [write_adapter(base, tmp_path / str(seed), seed, **CASES["llama"][1]) for seed in (1, 2)]
    first, second = Engine(base.folder), Engine(base.folder, max_loras=1, max_cpu_loras=1)
    digest = first.load(adapters[0].folder)
    expected = first.greedy(PROMPTS[:1], [digest], 12)[0]
    assert [second.load(each.folder) for each in (adapters if not has_it else adapters[::-1])].count(digest) == 1
    requests = second.core.adapters
    assert requests is not None
    assert (digest in requests.store.loaded) == has_it
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    resume = [ChoiceResume(0, expected[:5], 0)]
    second.core.add(
        GenerateRequest(
            request_id="r", model="m", prompt_token_ids=PROMPTS[0], adapter_digest=digest, sampling=sampling,
            resume=resume,
        )
    )  # fmt: skip
    tokens = []
    while second.core.has_work:
        for out in second.core.step().outputs:
            assert out.error is None
            tokens += out.token_ids
    assert tokens == expected[5:]


def test_an_adapter_that_is_removed_while_it_generates_ends_well(bases: Any, tmp_path: Path) -> None:
    base = bases("llama")
    engine = Engine(base.folder, max_loras=1)
    digest = engine.load(write_adapter(base, tmp_path, **CASES["llama"][1]).folder)
    expected = engine.greedy(PROMPTS[:2], [digest, ""])
    engine.add("running", PROMPTS[0], digest)
    engine.core.step()
    requests = engine.core.adapters
    assert requests is not None
    requests.store.forget(digest)
    with pytest.raises(PagemillError, match="does not have the adapter"):
        engine.add("late", PROMPTS[0], digest)
    tokens = []
    while engine.core.has_work:
        tokens += [token for out in engine.core.step().outputs for token in out.token_ids]
    assert expected[0][-len(tokens) :] == tokens
    requests.counts()
    assert requests.store.loaded == []
    assert engine.greedy(PROMPTS[1:2], [""]) == expected[1:]


def test_an_adapter_whose_files_are_gone_fails_its_requests_only(bases: Any, tmp_path: Path) -> None:
    base = bases("llama")
    engine = Engine(base.folder, max_loras=1, max_cpu_loras=1)
    adapters = [write_adapter(base, tmp_path / str(seed), seed, target_modules=["q_proj"]) for seed in (1, 2)]
    first, second = (engine.load(each.folder) for each in adapters)
    (adapters[0].folder / "adapter_model.safetensors").unlink()
    engine.add("1", PROMPTS[0], first)
    engine.add("2", PROMPTS[0], second)
    outs = {}
    while engine.core.has_work:
        outs |= {out.request_id: out.error for out in engine.core.step().outputs if out.finish_reason}
    assert "has no `adapter_model.safetensors`" in str(outs["1"])
    assert outs["2"] is None


@pytest.mark.parametrize(
    ("num_bytes", "message"),
    [(8, "changed while it was read"), (-2000, "ends within tensor")],
    ids=["grows", "shrinks"],
)
def test_a_folder_that_changes_while_it_is_read_is_refused(
    num_bytes: int, message: str, bases: Any, tmp_path: Path
) -> None:
    base = bases("llama")
    adapted = write_adapter(base, tmp_path, target_modules=["q_proj"])
    path = adapted.folder / WEIGHTS
    files = read_adapter(adapted.folder, load_model_spec(base.folder).decoder, 16)
    size = path.stat().st_size
    whole = read_values(files, lambda name: np.empty(0))
    with pytest.raises(AdapterError, match=message):
        read_values(files, lambda name: np.empty(0), lambda: os.truncate(path, size + num_bytes))
    assert len(whole.parts) == 3
