"""The CPU runner alone: rows, block copies, failing requests, and reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from tiny_llama import write_tiny_llama

from pagemill_execution.runners.inputs import RequestRows
from pagemill_execution.runners.kv_cache import KVCache
from pagemill_execution.step import AdmittedSequence, HeldBlocks, StepPlan, StepResult, TableChanges
from pagemill_protocol.request.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def runner(folder: Path, runner_loader: Callable[..., Any]) -> Any:
    return runner_loader(folder, num_kv_blocks=32, max_num_seqs=4)


def admitted(name: str, token_ids: list[int], block_ids: list[int], **fields: Any) -> AdmittedSequence:
    values = {"num_prompt_tokens": len(token_ids), "num_computed_tokens": 0, "sampling": GREEDY, "choice": 0, "seed": 0}
    return AdmittedSequence(
        request_id=name, token_ids=token_ids, tables=[HeldBlocks(0, block_ids)], **{**values, **fields}
    )


def step(runner: Any, scheduled: dict[str, int], samples: list[str], **fields: Any) -> StepResult:
    plan = StepPlan(step=0, num_scheduled_tokens=scheduled, samples=set(samples), **fields)
    result: StepResult = runner.wait(runner.launch(plan))
    return result


def test_a_chunk_that_does_not_finish_the_prompt_samples_nothing(runner: Any) -> None:
    row = admitted("a", list(range(10)), [3])
    assert step(runner, {"a": 6}, [], admitted=[row]).token_ids == {}
    assert list(step(runner, {"a": 4}, ["a"]).token_ids) == ["a"]


def test_rows_in_any_order_get_their_own_tokens(runner: Any) -> None:
    prompts = {"a": [5, 6, 7], "b": [9], "c": list(range(20))}
    blocks = {"a": [3], "b": [1], "c": [8, 2]}
    alone = {
        name: step(runner, {name: len(ids)}, [name], admitted=[admitted(name, ids, blocks[name])]).token_ids[name]
        for name, ids in prompts.items()
    }
    rows = [admitted(name, ids, blocks[name]) for name, ids in prompts.items()]
    together = step(
        runner, {"c": 20, "a": 3, "b": 1}, ["a", "b", "c"], admitted=rows, released=["a", "b", "c"]
    ).token_ids
    assert together == alone


def test_a_copied_block_continues_like_its_source(runner: Any) -> None:
    prompt = list(range(20, 40))
    first = step(runner, {"a": 20}, ["a"], admitted=[admitted("a", prompt, [4, 5])]).token_ids["a"]
    fork = admitted("b", [*prompt, *first], [4, 9], num_prompt_tokens=20, num_computed_tokens=20)
    result = step(runner, {"a": 1, "b": 1}, ["a", "b"], admitted=[fork], tables=[TableChanges(copies=[(5, 9)])])
    assert result.token_ids["a"] == result.token_ids["b"]


def test_a_cache_uses_memory_only_where_it_is_written(runner: Any) -> None:
    before = psutil.Process().memory_info().rss
    cache = KVCache(runner.model.spec, num_blocks=1 << 16, block_size=16, kind="bfloat16")
    assert cache.layers[0].nbytes > 32 << 20
    assert psutil.Process().memory_info().rss - before < 8 << 20
    assert not cache.layers[1][-1].any()
    assert cache.layers[0].ctypes.data % 64 == 0


def test_chained_copies_read_every_source_first(runner: Any) -> None:
    cache = runner.kv_cache.layers[0]
    cache[1], cache[2], cache[3] = 1.0, 2.0, 3.0
    own = runner.kv_cache.of_kinds[0]
    own.fill([2, 3], own.contents([1, 2]))
    assert (float(cache[2].mean()), float(cache[3].mean())) == (1.0, 2.0)


def test_only_the_request_with_values_that_are_not_finite_fails(runner: Any) -> None:
    good, bad = list(range(1, 18)), list(range(30, 50))
    expected = step(runner, {"g": 17}, ["g"], admitted=[admitted("g", good, [0, 1])]).token_ids["g"]
    step(runner, {"b": 19}, [], admitted=[admitted("b", bad, [6, 7])])
    runner.kv_cache.layers[1][6] = float("nan")
    rows = [admitted("g", good, [0, 1])]
    result = step(runner, {"b": 1, "g": 17}, ["b", "g"], admitted=rows, released=["g"])
    assert result.token_ids == {"g": expected}
    assert "not finite" in result.failed["b"]

    # The next user of the poisoned blocks must compute as if they had never been written.
    result = step(runner, {"n": 17}, ["n"], admitted=[admitted("n", good, [6, 7])], released=["b"])
    assert result.token_ids == {"n": expected}
    assert step(runner, {"n": 1, "g": 1}, ["n", "g"]).token_ids["n"] == step_token(runner, good, expected)


def step_token(runner: Any, prompt: list[int], first: list[int]) -> list[int]:
    row = admitted("fresh", [*prompt, *first], [20, 21], num_prompt_tokens=len(prompt))
    return step(runner, {"fresh": len(prompt) + 1}, ["fresh"], admitted=[row]).token_ids["fresh"]


def test_released_rows_are_reused_and_unknown_ones_ignored(runner: Any) -> None:
    for i in range(12):
        row = admitted(f"r{i}", [1, 2, 3], [i])
        step(runner, {f"r{i}": 3}, [f"r{i}"], admitted=[row], released=[f"r{i - 1}", "never seen"])


def test_a_step_without_tokens_only_releases_rows(runner: Any) -> None:
    step(runner, {"a": 1}, ["a"], admitted=[admitted("a", [1], [0])])
    assert step(runner, {}, [], released=["a"]).token_ids == {}
    assert len(runner._rows) == 0


def test_inputs_are_sorted_with_decodes_first_and_by_length() -> None:
    rows = RequestRows(max_rows=4, max_model_len=64, block_size=4)
    rows.admit(admitted("prefill", list(range(100, 110)), [7, 8, 9], num_computed_tokens=4))
    rows.admit(admitted("long", list(range(6)), [1, 2], num_computed_tokens=5))
    rows.admit(admitted("short", [50, 51], [3], num_computed_tokens=1))
    plan = StepPlan(step=0, num_scheduled_tokens={"prefill": 3, "long": 1, "short": 1}, samples={"long", "short"})
    inputs = rows.gather(plan)
    assert inputs.request_ids == ["short", "long", "prefill"]
    assert inputs.token_ids.tolist() == [51, 5, 104, 105, 106]
    assert inputs.positions.tolist() == [1, 5, 4, 5, 6]
    assert inputs.slots[0].tolist() == [3 * 4 + 1, 2 * 4 + 1, 8 * 4, 8 * 4 + 1, 8 * 4 + 2]
    assert inputs.query_start_loc.tolist() == [0, 1, 2, 5]
    assert inputs.seq_lens.tolist() == [2, 6, 7]
    assert inputs.sampling.tolist() == [0, 1]

    rows.advance(inputs, np.array([60, 61]))
    assert rows.token_ids[rows.row("long"), :7].tolist() == [0, 1, 2, 3, 4, 5, 61]
    assert rows.num_computed_tokens[rows.row("prefill")] == 7


def test_more_requests_than_rows_is_an_error() -> None:
    rows = RequestRows(max_rows=1, max_model_len=8, block_size=4)
    rows.admit(admitted("a", [1], [0]))
    with pytest.raises(RuntimeError, match="max_num_seqs"):
        rows.admit(admitted("b", [1], [1]))


def test_memory_follows_the_cgroup_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagemill_execution.sizing import memory

    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
    assert memory.available_memory(tmp_path) == 10_000
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("3000\n")
    assert memory.available_memory(tmp_path) == 10_000
    (tmp_path / "memory.max").write_text("5000\n")
    assert memory.available_memory(tmp_path) == 2000
    (tmp_path / "memory.stat").write_text("anon 2500\ninactive_file 400\nactive_file 100\n")
    assert memory.available_memory(tmp_path) == 2500
    (tmp_path / "memory.max").write_text("2000\n")
    assert memory.available_memory(tmp_path) == 0

    older = tmp_path / "v1"
    (older / "memory").mkdir(parents=True)
    (older / "memory" / "memory.limit_in_bytes").write_text("5000\n")
    (older / "memory" / "memory.usage_in_bytes").write_text("3000\n")
    (older / "memory" / "memory.stat").write_text("total_inactive_file 50\ntotal_active_file 50\n")
    assert memory.available_memory(older) == 2100


def test_loading_a_model_reports_progress_in_order(folder: Path) -> None:
    from pagemill_engine.config import EngineConfig
    from pagemill_execution.starting.factory import create_runner

    phases: list[str] = []
    config = EngineConfig(model=str(folder), dtype="float32", num_threads=1, num_kv_blocks=8)
    create_runner(config, lambda phase, detail: phases.append(phase))
    assert phases == ["loading", "allocating"]


def test_the_memory_limit_is_that_of_the_machine_or_of_the_cgroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagemill_execution.sizing import memory

    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(total=10_000))
    assert memory.memory_limit(tmp_path) == 10_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.memory_limit(tmp_path) == 10_000
    (tmp_path / "memory.max").write_text("5000\n")
    assert memory.memory_limit(tmp_path) == 5000
    older = tmp_path / "v1"
    (older / "memory").mkdir(parents=True)
    (older / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory.memory_limit(older) == 10_000
