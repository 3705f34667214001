"""Log probabilities of prompts equal those of transformers within 1e-4 in float32, and each is reported once.

Batches, chunks, prefix hits and preemption must not change them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from triton_device import DEVICE

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.messages import LogprobsOut
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.runners.device.device_runner import DeviceRunner
from pagemill_execution.runners.eager import ThreadedRunner
from pagemill_execution.runners.prompt_logprobs import MIN_PIECE, PromptRows
from pagemill_execution.step import StepPlan
from pagemill_protocol.request.generate import ChoiceResume, GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

VOCAB_SIZE = 96
LENGTHS = (2, 15, 16, 17, 33, 90)
NUM_TOP = 3
ASKS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=NUM_TOP, logprobs=NUM_TOP)


@pytest.fixture(scope="module")
def model() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runner(folder: Path, backend: str, runner_loader: Callable[..., Any]) -> Any:
    return runner_loader(folder, backend=backend)


def prompt_of(length: int) -> list[int]:
    tokens = torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length))
    return [int(token) for token in tokens]


def request_of(prompt: list[int], name: str = "r", **fields: Any) -> GenerateRequest:
    fields = {"sampling": ASKS, **fields}
    return GenerateRequest(request_id=name, model="m", prompt_token_ids=prompt, **fields)


class Answered:
    def __init__(self) -> None:
        self.prompts: dict[str, list[LogprobsOut]] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.cached: dict[str, int] = {}
        self.core: EngineCore


def serve(runner: Any, requests: list[GenerateRequest], *, num_blocks: int | None = None, **settings: Any) -> Answered:
    """Serve `requests` concurrently."""
    info = runner.info
    runner.info = info._replace(num_blocks=num_blocks or info.num_blocks, step=None)
    answered = Answered()
    answered.core = core = EngineCore(EngineConfig(model="m", block_size=info.block_size, **settings), runner)
    runner.info = info
    run(core, requests, answered)
    core.check_integrity()
    assert core.load().num_kv_bytes_active == 0
    rows = getattr(runner, "_inner", runner)._rows
    rows.release(list(rows._row_of))
    return answered


def run(core: EngineCore, requests: list[GenerateRequest], answered: Answered) -> None:
    for each in requests:
        core.add(each)
    while core.has_work:
        for out in core.step().outputs:
            assert out.error is None
            answered.prompts.setdefault(out.request_id, []).extend(out.prompt_logprobs)
            answered.tokens.setdefault((out.request_id, out.choice), []).extend(out.token_ids)
            cached = answered.cached.get(out.request_id, 0)
            answered.cached[out.request_id] = max(cached, out.num_cached_tokens)


def assert_as_transformers(model: Any, prompt: list[int], found: list[LogprobsOut], atol: float = 1e-4) -> None:
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    assert [entry.token_ids[0] for entry in found] == prompt[1:]
    for entry, row, token_id in zip(found, expected, prompt[1:], strict=True):
        assert len(entry.token_ids) == 1 + NUM_TOP
        assert entry.logprobs == pytest.approx(row[entry.token_ids].tolist(), abs=atol)
        assert entry.logprobs[1:] == pytest.approx(row.topk(NUM_TOP).values.tolist(), abs=atol)
        assert entry.rank == 1 + int((row > row[token_id]).sum())


def prompts() -> list[GenerateRequest]:
    return [request_of(prompt_of(length), f"r{length}") for length in LENGTHS]


@pytest.mark.parametrize("chunk", [7, 32, 512])
def test_a_batch_in_chunks_equals_transformers(model: Any, runner: Any, chunk: int) -> None:
    answered = serve(runner, prompts(), max_num_batched_tokens=chunk, max_num_seqs=4)
    for length in LENGTHS:
        assert_as_transformers(model, prompt_of(length), answered.prompts[f"r{length}"])


def test_a_prompt_of_one_token_has_no_log_probability(runner: Any) -> None:
    answered = serve(runner, [request_of([5])])
    assert answered.prompts == {"r": []}
    assert len(answered.tokens["r", 0]) == ASKS.max_tokens


def test_prompt_logprobs_do_not_change_the_generated_tokens(runner: Any) -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    asked, unasked = (serve(runner, [request_of(prompt_of(33), sampling=each)]).tokens for each in (ASKS, plain))
    assert asked == unasked


def test_cached_tokens_are_computed_again(model: Any, runner: Any) -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=1)
    answered = serve(runner, [request_of(prompt_of(90), "first", sampling=plain)])
    run(answered.core, [request_of(prompt_of(90), "second", sampling=plain)], answered)
    run(answered.core, [request_of(prompt_of(90), "third")], answered)
    assert (answered.cached["second"], answered.cached["third"]) == (80, 0)
    assert_as_transformers(model, prompt_of(90), answered.prompts["third"])


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_a_preemption_within_the_prompt_neither_repeats_nor_loses_values(
    model: Any, folder: Path, runner_loader: Callable[..., Any], overlap: bool
) -> None:
    """An answer grows until the blocks of the next prompt are taken."""
    runner = runner_loader(folder, block_size=4, overlap=overlap)
    assert isinstance(runner, ThreadedRunner) == overlap
    plans: list[StepPlan] = []
    launch = runner.launch
    runner.launch = lambda plan: (plans.append(plan), launch(plan))[1]
    growing = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    requests = [request_of(prompt_of(8), "growing", sampling=growing), request_of(prompt_of(40), "asks")]
    settings = {"num_blocks": 14, "max_num_batched_tokens": 4, "overlap": overlap}
    answered = serve(runner, requests, enable_prefix_caching=False, **settings)
    starts = [each for plan in plans for each in plan.admitted if each.request_id == "asks/0"]
    before = [plan for plan in plans if "asks/0" not in plan.samples and "asks/0" in plan.num_scheduled_tokens]
    assert len(starts) > 1
    assert len(starts[-1].token_ids) == 40, "no token of the answer must be known when the request starts over"
    assert sum(plan.num_scheduled_tokens["asks/0"] for plan in before) > 40, (
        "a part of the prompt must be computed twice"
    )
    assert_as_transformers(model, prompt_of(40), answered.prompts["asks"])
    runner.close()


def test_of_several_choices_only_one_reports_the_prompt(model: Any, runner: Any) -> None:
    sampling = SamplingParams(n=3, max_tokens=3, seed=1, ignore_eos=True, prompt_logprobs=NUM_TOP)
    answered = serve(runner, [request_of(prompt_of(33), sampling=sampling)], max_num_batched_tokens=16)
    assert_as_transformers(model, prompt_of(33), answered.prompts["r"])
    assert [len(answered.tokens["r", choice]) for choice in range(3)] == [3, 3, 3]


def test_a_choice_that_takes_over_continues_the_report(model: Any, runner: Any) -> None:
    sampling = SamplingParams(n=2, max_tokens=3, seed=1, ignore_eos=True, prompt_logprobs=NUM_TOP)
    answered = serve(runner, [], max_num_batched_tokens=16)
    answered.core.add(request_of(prompt_of(90), sampling=sampling))
    answered.core.step()
    answered.core.step()
    answered.core.abort("r", 0)
    run(answered.core, [], answered)
    assert_as_transformers(model, prompt_of(90), answered.prompts["r"])
    assert len(answered.tokens["r", 1]) == 3


@pytest.mark.parametrize(("stream", "expects"), [(True, False), (False, True)], ids=["stream", "body"])
def test_a_continued_answer_reports_only_the_values_that_the_client_lacks(
    model: Any, runner: Any, stream: bool, expects: bool
) -> None:
    """A stream has sent them with its first chunk; the last engine makes the whole body."""
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=NUM_TOP)
    begun = serve(runner, [request_of(prompt_of(33), sampling=sampling)]).tokens["r", 0]
    resume = [ChoiceResume(0, begun[:2], 3)]
    answered = serve(runner, [request_of(prompt_of(33), sampling=sampling, stream=stream, resume=resume)])
    assert answered.tokens["r", 0] == begun[2:]
    if expects:
        assert_as_transformers(model, prompt_of(33), answered.prompts["r"])
    else:
        assert answered.prompts["r"] == []


@pytest.mark.slow
def test_a_gpu_reports_prompt_logprobs(model: Any, folder: Path, runner_loader: Callable[..., Any]) -> None:
    """Triton runs in the interpreter without a GPU: chunks, and a wait that reads two steps later."""
    runner = runner_loader(folder, device="cuda", num_kv_blocks=16, max_model_len=64, max_num_seqs=4)
    assert isinstance(runner, DeviceRunner)
    requests = [request_of(prompt_of(length), f"r{length}") for length in (2, 17, 33)]
    answered = serve(runner, requests, max_num_batched_tokens=20, max_num_seqs=4, overlap=True)
    for length in (2, 17, 33):
        assert_as_transformers(model, prompt_of(length), answered.prompts[f"r{length}"], atol=1e-3)
    assert answered.core.runner.info.device in ("cuda", DEVICE.type)


def test_the_number_of_rows_with_logits_is_bounded(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    sound = type(runner.model).logits

    def logits(self: Any, hidden: Any, adapters: Any) -> Any:
        rows.append(len(hidden))
        return sound(self, hidden, adapters)

    monkeypatch.setattr(type(runner.model), "logits", logits)
    monkeypatch.setattr(runner, "_piece_rows", MIN_PIECE)
    serve(runner, [request_of(prompt_of(90))])
    assert max(rows) == MIN_PIECE
    assert sum(rows) == 89 + 4, "one row for each of the prompt's and the answer's tokens"


def test_a_wrong_row_is_detected(model: Any, runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = PromptRows.of.__func__  # type: ignore[attr-defined]
    shifted = classmethod(lambda cls, *given: (found := sound(cls, *given))._replace(rows=found.rows.clip(1) - 1))
    monkeypatch.setattr(PromptRows, "of", shifted)
    answered = serve(runner, [request_of(prompt_of(33))])
    with pytest.raises(AssertionError):
        assert_as_transformers(model, prompt_of(33), answered.prompts["r"])
