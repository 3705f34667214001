"""The GPU's runner, on a device or in Triton's interpreter: both loops, CUDA graphs of decodes, and failures;
nothing is read from the device between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from replay_recorder import ReplayRecorder
from tiny_llama import write_tiny_llama
from triton_device import DEVICE, NO_FP8

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.runners.device import device_runner
from pagemill_execution.runners.device.device_rows import DeviceRows
from pagemill_execution.runners.device.device_runner import DeviceRunner
from pagemill_execution.runners.device.graphs import CudaGraphCapturer, GraphShape, shapes_to_capture
from pagemill_execution.runners.errors import StepSkippedError
from pagemill_execution.sampling.rows import SamplingRows
from pagemill_execution.step import AdmittedSequence, HeldBlocks, StepPlan, TableChanges
from pagemill_kernels.kv_store import storage
from pagemill_kernels.request_rows.layout import RowLayout
from pagemill_kernels.request_rows.staging import Staging
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"temperature": 1.0, "min_tokens": 3, "stop_token_ids": list(range(0, 64, 3))},
    {"temperature": 0.8, "n": 2, "logprobs": 2},
]
DECODES = [GraphShape(1, 1, True), GraphShape(4, 4, True)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
Answers = dict[tuple[str, int], tuple[list[int], list[float]]]


def requests() -> list[GenerateRequest]:
    """Return requests with all kinds of sampling, stops and two choices, which need more than four blocks."""
    return [
        GenerateRequest(
            request_id=f"r{index}",
            model="m",
            prompt_token_ids=[(index * 7 + position) % 64 for position in range(13 + 9 * (index % 3))],
            sampling=SamplingParams(max_tokens=4 + index, seed=index - 2, **kind),
        )
        for index, kind in enumerate(KINDS)
    ]


def serve(runner: Any, *, overlap: bool = False) -> tuple[Answers, EngineCore]:
    config = EngineConfig(model="m", max_num_seqs=4, max_num_batched_tokens=24, overlap=overlap)
    info = runner.info
    runner.info = info._replace(num_blocks=4, step=None)
    core = EngineCore(config, runner)
    runner.info = info
    for each in requests():
        core.add(each)
    answers: Answers = {}
    while core.has_work:
        for output in core.step().outputs:
            assert output.error is None
            token_ids, logprobs = answers.setdefault((output.request_id, output.choice), ([], []))
            token_ids += output.token_ids
            logprobs += [value for entry in output.logprobs or [] for value in entry.logprobs]
    core.check_integrity()
    runner.wait(runner.launch(StepPlan(step=0, num_scheduled_tokens={}, released=list(runner._rows._row_of))))
    return answers, core


def assert_alike(ours: Answers, expected: Answers) -> None:
    assert {name: token_ids for name, (token_ids, _) in ours.items()} == {
        name: token_ids for name, (token_ids, _) in expected.items()
    }
    for name, (_, logprobs) in ours.items():
        assert logprobs == pytest.approx(expected[name][1], abs=1e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), head_dim=16, num_hidden_layers=1)


@pytest.fixture(scope="module")
def load(folder: Path, runner_loader: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **settings: runner_loader(folder, num_kv_blocks=6, max_model_len=64, max_num_seqs=4, **settings)


@pytest.fixture(scope="module")
def runner(load: Callable[..., Any]) -> Any:
    return load(device="cuda")


@pytest.fixture(scope="module")
def expected(load: Callable[..., Any]) -> Answers:
    """Return the answers of the torch backend on the CPU."""
    answers, core = serve(load(backend="cpu"))
    assert core.scheduler.num_preemptions > 0
    assert len(answers) == len(KINDS) + 1, "one of the requests has two choices"
    return answers


def admitted(name: str, token_ids: list[int], block_ids: list[int], **fields: Any) -> AdmittedSequence:
    values = {"num_prompt_tokens": len(token_ids), "num_computed_tokens": 0, "sampling": GREEDY, "choice": 0, "seed": 0}
    return AdmittedSequence(
        request_id=name, token_ids=token_ids, tables=[HeldBlocks(0, block_ids)], **{**values, **fields}
    )


def plan_of(scheduled: dict[str, int], **fields: Any) -> StepPlan:
    return StepPlan(step=0, num_scheduled_tokens=scheduled, **{"samples": set(scheduled), **fields})


# -- answers -----------------------------------------------------------------------------------------------------


def test_the_runner_is_that_of_a_gpu(runner: Any, load: Callable[..., Any]) -> None:
    assert isinstance(runner, DeviceRunner)
    assert isinstance(load(device="cuda", overlap=True), DeviceRunner), "the runner needs no thread to overlap"
    assert not isinstance(load(device="cpu"), DeviceRunner)
    assert runner.info.overlaps == (DEVICE.type == "cuda")


@pytest.mark.slow
@pytest.mark.sample("overlapped")
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_both_loops_give_the_answers_of_the_torch_backend(runner: Any, expected: Answers, overlap: bool) -> None:
    answers, core = serve(runner, overlap=overlap)
    assert_alike(answers, expected)
    assert core.scheduler.num_preemptions > 0


def test_a_step_uses_tokens_that_were_not_read(runner: Any) -> None:
    """Three steps are queued before the first one is read; tokens arrive step by step."""
    prompt = list(range(20, 30))
    read_each = [runner.wait(runner.launch(plan_of({"a": 10}, admitted=[admitted("a", prompt, [2])])))]
    read_each += [runner.wait(runner.launch(plan_of({"a": 1}))) for _ in range(2)]
    handles = [runner.launch(plan_of({"b": 10}, admitted=[admitted("b", prompt, [4])], released=["a"]))]
    handles += [runner.launch(plan_of({"b": 1})) for _ in range(2)]
    unread = [runner.wait(handle) for handle in handles]
    assert [each.token_ids["b"] for each in unread] == [each.token_ids["a"] for each in read_each]
    runner.wait(runner.launch(plan_of({}, released=["b"])))


def test_the_host_keeps_no_token_and_no_block(runner: Any) -> None:
    kept = {name for name, value in vars(runner._rows).items() if hasattr(value, "nbytes")}
    assert kept == {"num_tokens", "num_prompt_tokens", "num_computed_tokens", "num_blocks"}


def test_the_number_of_generated_tokens_of_a_row_is_known_before_they_are_read() -> None:
    rows, sampling, staging = DeviceRows(RowLayout.of(4, 64, 16)), SamplingRows(4, 64), Staging()
    both = [admitted("a", [1, 2, 3], [0]), admitted("b", [4, 5], [1], num_prompt_tokens=1)]
    plan = plan_of({"a": 2, "b": 2}, samples={"b"}, admitted=both)
    rows.apply(plan, sampling, staging)
    found = []
    for each in (plan, plan_of({"a": 1, "b": 1}), plan_of({"b": 1, "a": 1})):
        step = rows.step(each)
        found.append(dict(zip([step.request_ids[i] for i in step.sampling], rows.num_generated(step), strict=True)))
        rows.advance(step)
    assert found == [{"b": 1}, {"a": 0, "b": 2}, {"b": 3, "a": 1}]


def test_padding_does_not_affect_requests() -> None:
    rows = DeviceRows(RowLayout.of(4, 64, 16))
    rows.apply(plan_of({}, admitted=[admitted("a", [1], [0])]), SamplingRows(4, 64), Staging())
    step = rows.step(plan_of({"a": 1}))
    padded = step.padded(3, 3, rows.layout.padding_row)
    assert (padded.rows.tolist(), padded.sample_start_loc.tolist()) == ([step.rows[0], 4, 4], [0, 1, 1, 1])
    assert padded.query_start_loc.tolist() == [0, 1, 2, 3]
    assert (len(padded.sampling), padded.request_ids) == (1, ["a"])


def test_an_unchanged_decode_is_not_uploaded_again(load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is uploaded again if a block, a row, or the padding changes."""
    runner = load(device="cuda")
    runner.capture_graphs([GraphShape(4, 4, True)], ReplayRecorder)
    uploaded: list[int] = []
    upload = runner._upload
    monkeypatch.setattr(runner, "_upload", lambda *step: (uploaded.append(len(step[1].rows)), upload(*step))[1])

    def uploads_of(plan: StepPlan) -> list[int]:
        uploaded.clear()
        runner.wait(runner.launch(plan))
        return list(uploaded)

    both = [admitted("a", [5] * 14, [0]), admitted("b", [7] * 3, [1])]
    assert uploads_of(plan_of({"a": 14, "b": 3}, admitted=both)) == [2]
    decode = {"a": 1, "b": 1}
    assert [uploads_of(plan_of(decode)) for _ in range(2)] == [[4], []]
    assert uploads_of(plan_of(decode, tables=[TableChanges(appended={"a": [2]})])) == [4]
    assert uploads_of(plan_of(decode)) == []
    assert uploads_of(plan_of({"b": 1})) == [4]
    assert uploads_of(plan_of({"b": 1})) == []
    assert uploads_of(plan_of({"b": 1, "c": 1}, admitted=[admitted("c", [9], [3])])) == [4]
    assert uploads_of(plan_of({"b": 1, "c": 1}, released=["a"])) == [4]
    runner._graphs.forget()
    assert uploads_of(plan_of({"b": 1, "c": 1})) == [2]
    runner.wait(runner.launch(plan_of({}, released=["b", "c"])))


# -- CUDA graphs of decodes --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sample("overlapped")
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_padded_decodes_give_the_answers_of_unpadded_ones(
    load: Callable[..., Any], expected: Answers, overlap: bool
) -> None:
    runner, recorder = load(device="cuda"), ReplayRecorder()
    runner.capture_graphs(DECODES, lambda: recorder)
    answers, _ = serve(runner, overlap=overlap)
    assert_alike(answers, expected)
    assert recorder.num_recorded == 2
    assert recorder.num_run >= 8, "decodes must run as CUDA graphs"
    if overlap:
        return
    runner.sleep()
    assert not runner._graphs.shapes, "a graph must not read a cache that was freed"
    runner.wake()
    assert recorder.num_recorded == 4
    assert_alike(serve(runner)[0], expected)


@pytest.mark.slow
@pytest.mark.sample("overlapped")
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_padded_prompts_give_the_answers_of_unpadded_ones(
    load: Callable[..., Any], expected: Answers, overlap: bool
) -> None:
    """Prompts run alone, with decodes, in chunks, and after a preemption: no step launches single kernels."""
    runner, recorder = load(device="cuda"), ReplayRecorder()
    runner.capture_graphs(shapes_to_capture(4, 24), lambda: recorder)
    recorded = set(runner._graphs.shapes)
    assert recorded == set(shapes_to_capture(4, 24))
    runner._forward.logits = None  # called if no graph fits
    answers, core = serve(runner, overlap=overlap)
    assert_alike(answers, expected)
    assert core.scheduler.num_preemptions > 0
    assert recorder.num_run >= core.num_steps


def test_only_decodes_of_a_captured_size_run_as_graphs(load: Callable[..., Any]) -> None:
    runner, recorder = load(device="cuda"), ReplayRecorder()
    runner.capture_graphs([GraphShape(1, 1, True), GraphShape(2, 2, True), GraphShape(16, 2, False)], lambda: recorder)
    names = {"a": [0], "b": [1], "c": [2]}
    rows = [admitted(name, [5, 6], blocks) for name, blocks in names.items()]
    runner.wait(runner.launch(plan_of(dict.fromkeys(names, 2), admitted=rows)))
    runner.wait(runner.launch(plan_of(dict.fromkeys(names, 1))))
    assert recorder.num_run == 0, "more requests than any captured size"
    runner.wait(runner.launch(plan_of({"a": 1, "b": 1})))
    assert recorder.num_run == 1
    both = [admitted("a", [7] * 16, [0]), admitted("b", [7] * 16, [1])]
    runner.wait(runner.launch(plan_of({"a": 8, "b": 8}, samples=set(), admitted=both, released=list(names))))
    assert recorder.num_run == 2, "two prompts"
    runner.wait(runner.launch(plan_of({"a": 1, "b": 7}, samples={"b"})))
    assert recorder.num_run == 2, "eight more tokens would be padding"
    runner.wait(runner.launch(plan_of({"a": 7})))
    assert recorder.num_run == 3
    runner.wait(runner.launch(plan_of({}, released=["a", "b"])))


# -- failures ----------------------------------------------------------------------------------------------------


def test_only_the_request_with_values_that_are_not_finite_fails(runner: Any) -> None:
    good, bad = list(range(1, 18)), list(range(30, 50))
    alone = runner.wait(runner.launch(plan_of({"g": 17}, admitted=[admitted("g", good, [0, 1])]))).token_ids["g"]
    runner.wait(runner.launch(plan_of({"b": 19}, samples=set(), admitted=[admitted("b", bad, [3, 4])])))
    with torch.inference_mode():
        runner.kv_cache.layers[0][3] = float("nan")
    rows = [admitted("g", good, [0, 1])]
    result = runner.wait(runner.launch(plan_of({"b": 1, "g": 17}, admitted=rows, released=["g"])))
    assert result.token_ids == {"g": alone}
    assert "not finite" in result.failed["b"]
    runner.wait(runner.launch(plan_of({}, released=["g", "b"])))


def tokens_of(runner: Any) -> list[int]:
    """Return the tokens of a prompt in two chunks and its decodes, in blocks that it fills one after another."""
    prompt, blocks = list(range(30, 50)), [4, 1, 3]
    first = plan_of({"a": 9}, samples=set(), admitted=[admitted("a", prompt, blocks[:2])])
    runner.wait(runner.launch(first))
    plans = [plan_of({"a": 11}), *(plan_of({"a": 1}) for _ in range(14))]
    plans[13].tables = [TableChanges(appended={"a": blocks[2:]})]
    found = [runner.wait(runner.launch(plan)).token_ids["a"][0] for plan in plans]
    runner.wait(runner.launch(plan_of({}, released=["a"])))
    return found


@pytest.mark.sample("int8")
@pytest.mark.parametrize("kind", ["auto", "int8", pytest.param("fp8", marks=NO_FP8)])
def test_blocks_of_a_failed_request_do_not_affect_later_ones(load: Callable[..., Any], kind: str) -> None:
    """No kernel reads a slot that its request has not written, so nothing has to be cleared."""
    runner = load(device="cuda", kv_cache_dtype=kind)
    clean = tokens_of(runner)
    assert len(set(clean)) > 3
    with torch.inference_mode():
        for cache in runner.kv_cache.layers:
            (cache if kind == "auto" else storage.scales(cache)).fill_(float("nan"))
    assert tokens_of(runner) == clean


@contextmanager
def failing_once(runner: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the next forward pass raise, as a graph or as launches, like a launch without memory."""
    errors = [torch.OutOfMemoryError("no memory")]

    def fail(*arguments: Any) -> None:
        monkeypatch.undo()
        raise errors.pop()

    monkeypatch.setattr(runner, "_logits", fail)
    yield
    assert not errors, "no forward pass was requested"


def test_a_step_launched_after_a_failed_one_does_not_run(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with failing_once(runner, monkeypatch):
        failed = runner.launch(plan_of({"a": 2}, admitted=[admitted("a", [5, 6], [0])]))
        behind = runner.launch(plan_of({"a": 1}))
    with pytest.raises(torch.OutOfMemoryError):
        runner.wait(failed)
    with pytest.raises(StepSkippedError):
        runner.wait(behind)
    after = plan_of({"a": 2}, admitted=[admitted("a", [5, 6], [0])], released=["a"])
    assert list(runner.wait(runner.launch(after)).token_ids) == ["a"]
    runner.wait(runner.launch(plan_of({}, released=["a"])))


def test_a_failure_that_was_not_waited_for_affects_one_step(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens after Ctrl-C, which drops the steps in flight."""
    with failing_once(runner, monkeypatch):
        runner.launch(plan_of({"a": 2}, admitted=[admitted("a", [5, 6], [0])]))
    again = plan_of({"a": 2}, admitted=[admitted("a", [5, 6], [0])])
    with pytest.raises(StepSkippedError):
        runner.wait(runner.launch(again))
    assert list(runner.wait(runner.launch(again)).token_ids) == ["a"]
    runner.wait(runner.launch(plan_of({}, released=["a"])))


def test_a_failure_after_a_reported_one_is_reported_too(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that was skipped because of the first failure does not report the second."""
    admission = {"admitted": [admitted("a", [5, 6], [0])]}
    with failing_once(runner, monkeypatch):
        first = runner.launch(plan_of({"a": 2}, **admission))
    skipped = runner.launch(plan_of({"a": 1}))
    with pytest.raises(torch.OutOfMemoryError):
        runner.wait(first)
    with failing_once(runner, monkeypatch):
        second = runner.launch(plan_of({"a": 2}, **admission))
    with pytest.raises(StepSkippedError):
        runner.wait(skipped)
    with pytest.raises(StepSkippedError):
        runner.wait(runner.launch(plan_of({"a": 1})))
    with pytest.raises(torch.OutOfMemoryError):
        runner.wait(second)
    runner.wait(runner.launch(plan_of({}, released=["a"])))


def test_a_failure_of_a_cuda_graph_is_reported_like_that_of_a_launch(load: Callable[..., Any]) -> None:
    runner, recorder = load(device="cuda"), ReplayRecorder()
    runner.capture_graphs([GraphShape(1, 1, True), GraphShape(8, 2, False)], lambda: recorder)
    admission = {"admitted": [admitted("a", [5, 6], [0])]}
    for plan in (plan_of({"a": 2}, **admission), plan_of({"a": 1})):
        recorder.errors.append(torch.OutOfMemoryError("no memory"))
        failed, behind = runner.launch(plan), runner.launch(plan_of({"a": 1}))
        with pytest.raises(torch.OutOfMemoryError):
            runner.wait(failed)
        with pytest.raises(StepSkippedError):
            runner.wait(behind)
        assert list(runner.wait(runner.launch(plan_of({"a": 2}, **admission))).token_ids) == ["a"]
    assert recorder.num_run == 4


@pytest.mark.slow
@pytest.mark.sample("overlapped")
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_requests_survive_a_failed_step(
    runner: Any, expected: Answers, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with failing_once(runner, monkeypatch):
        answers, _ = serve(runner, overlap=overlap)
    assert_alike(answers, expected)


def test_more_requests_than_rows_are_refused(runner: Any) -> None:
    rows = [admitted(f"r{index}", [1], [index]) for index in range(5)]
    handle = runner.launch(plan_of({row.request_id: 1 for row in rows}, admitted=rows))
    with pytest.raises(RuntimeError, match="4 requests hold all rows; raise max_num_seqs"):
        runner.wait(handle)
    runner.wait(runner.launch(plan_of({}, released=[row.request_id for row in rows])))
    assert len(runner._rows) == 0


# -- on a device -------------------------------------------------------------------------------------------------


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise an error on everything that makes the host wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
def test_launching_never_waits_for_the_device(
    load: Callable[..., Any], expected: Answers, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(device="cuda")
    if not recorded:
        runner._graphs = None
    serve(runner, overlap=True)
    queue = runner._queue

    def watched(plan: StepPlan) -> Any:
        with no_waiting():
            return queue(plan)

    monkeypatch.setattr(runner, "_queue", watched)
    answers, _ = serve(runner, overlap=True)
    assert_alike(answers, expected)


@pytest.mark.gpu
def test_cuda_graphs_give_the_answers_of_launches(load: Callable[..., Any], expected: Answers) -> None:
    runner = load(device="cuda")
    assert runner._graphs is not None
    assert_alike(serve(runner, overlap=True)[0], expected)
    runner.sleep()
    runner.wake()
    assert_alike(serve(runner, overlap=True)[0], expected)
    runner.capture_graphs([GraphShape(2, 2, True), GraphShape(4, 4, True)], CudaGraphCapturer)
    assert_alike(serve(runner)[0], expected)


def arriving(runner: Any) -> tuple[Answers, EngineCore, list[int], int]:
    """Add prompts of all lengths, some with common prefixes, one by one while others decode, beyond the cache's size.

    Return the answers, the core, the number of tokens of each step, and the number of prefix-cached tokens.
    """
    info = runner.info
    runner.info = info._replace(num_blocks=7, step=None)
    core = EngineCore(EngineConfig(model="m", max_num_seqs=6, max_num_batched_tokens=40, overlap=True), runner)
    runner.info = info
    waiting = [
        GenerateRequest(
            request_id=f"r{index}",
            model="m",
            prompt_token_ids=[
                *([3] * 16 if index % 3 == 0 else []),
                *((index * 7 + position) % 64 for position in range(1 + index * 11 % 32)),
            ],
            sampling=SamplingParams(max_tokens=14 + index % 5, seed=index, logprobs=0, temperature=0.8 * (index % 2)),
        )
        for index in range(12)
    ]
    answers: Answers = {}
    sizes: list[int] = []
    num_cached = 0
    while waiting or core.has_work:
        if waiting:
            core.add(waiting.pop(0))
        outputs = core.step()
        sizes.append(outputs.num_step_tokens)
        for output in outputs.outputs:
            assert output.error is None
            token_ids, logprobs = answers.setdefault((output.request_id, output.choice), ([], []))
            token_ids += output.token_ids
            logprobs += [value for entry in output.logprobs or [] for value in entry.logprobs]
            num_cached += output.num_cached_tokens
    core.check_integrity()
    runner.wait(runner.launch(StepPlan(step=0, num_scheduled_tokens={}, released=list(runner._rows._row_of))))
    return answers, core, sizes, num_cached


@pytest.mark.gpu
def test_requests_that_arrive_during_decodes_get_the_answers_of_single_launches(
    folder: Path, runner_loader: Callable[..., Any]
) -> None:
    runner = runner_loader(folder, num_kv_blocks=12, max_model_len=64, max_num_seqs=6, device="cuda")
    runner._graphs = None
    eager, _, _, _ = arriving(runner)
    runner.capture_graphs(shapes_to_capture(6, 40), CudaGraphCapturer)
    runner._forward.logits = None  # called if no graph fits
    recorded, core, sizes, num_cached = arriving(runner)
    assert_alike(recorded, eager)
    assert len(recorded) == 12
    assert {len(token_ids) for token_ids, _ in recorded.values()} == {14, 15, 16, 17, 18}
    assert core.scheduler.num_preemptions > 0
    assert max(sizes) == 40, "prompts must run in chunks"
    assert num_cached > 0


@pytest.mark.gpu
def test_a_step_of_thousands_of_tokens_runs_as_a_cuda_graph(tmp_path: Path, runner_loader: Callable[..., Any]) -> None:
    """Two prompts, then decodes that read what the prompts wrote."""
    folder = write_tiny_llama(tmp_path, head_dim=16, max_position_embeddings=2048)
    runner = runner_loader(folder, num_kv_blocks=160, max_model_len=2048, max_num_seqs=3, device="cuda")
    runner._graphs = None

    def answered() -> list[dict[str, int]]:
        prompts = {"a": [(7 * i) % 61 for i in range(1900)], "b": [(5 * i) % 59 for i in range(300)]}
        blocks = {"a": list(range(120)), "b": list(range(120, 140))}
        rows = [admitted(name, prompts[name], blocks[name]) for name in prompts]
        plans = [plan_of({"a": 1900, "b": 300}, admitted=rows), *(plan_of({"a": 1, "b": 1}) for _ in range(4))]
        found = [runner.wait(runner.launch(plan)).token_ids for plan in plans]
        runner.wait(runner.launch(plan_of({}, released=["a", "b"])))
        return found

    launched = answered()
    runner.capture_graphs(shapes_to_capture(3, 4000), CudaGraphCapturer)
    runner._forward.logits = None  # called if no graph fits
    assert answered() == launched


@pytest.mark.gpu
def test_nothing_is_compiled_after_the_first_request(load: Callable[..., Any]) -> None:
    import triton

    compiled: list[str] = []
    runner = load(device="cuda")
    triton.knobs.runtime.jit_post_compile_hook = lambda *, key, **rest: compiled.append(key)
    try:
        serve(runner, overlap=True)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert compiled == []


@pytest.mark.gpu
def test_a_failing_device_is_reported_as_lost(tmp_path: Path) -> None:
    """The test runs in a process of its own, which cannot use the device afterwards."""
    import subprocess
    import sys

    code = (
        "import torch\n"
        "from types import SimpleNamespace\n"
        "from pagemill_execution.runners.device.device_runner import DeviceRunner\n"
        "try:\n"
        "    torch.zeros(4, device='cuda')[torch.tensor([9], device='cuda')].cpu()\n"
        "except Exception as error:\n"
        "    runner = SimpleNamespace(_ops=SimpleNamespace(device=torch.device('cuda')))\n"
        "    print(type(DeviceRunner._explained(runner, error)).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "DeviceLostError", done.stderr


@pytest.mark.parametrize(("cores", "sleeps"), [(1, True), (2, False)])
def test_a_wait_for_the_device_leaves_the_only_core_to_other_threads(
    monkeypatch: pytest.MonkeyPatch, cores: int, sleeps: bool
) -> None:
    made: list[bool] = []

    def event(*, blocking: bool) -> Any:
        made.append(blocking)
        return SimpleNamespace(record=lambda stream: None)

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(device_runner, "usable_cores", lambda: cores)
    device_runner._has_one_core.cache_clear()
    device_runner._mark(torch.device("cuda"))
    device_runner._has_one_core.cache_clear()
    assert made == [sleeps]
