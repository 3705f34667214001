"""What drafts on the GPU's runner, on a device or in Triton's interpreter: what a head drafts is what the CPU's drafter
drafts, and answers are those without it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_bundle import byte_tokenizer
from device_rank import fails, recording
from eagle_heads import SIZE, VOCAB, write_eagle3
from recorded_drafts import Found, record_device_drafts, record_drafts
from replay_recorder import ReplayRecorder
from tiny_llama import write_tiny_llama
from triton_device import DEVICE, HAS_GPU

from pagemill import LLM, SamplingParams
from pagemill_execution.runners.device.device_drafter import DeviceDrafter, DraftForward
from pagemill_execution.runners.device.device_runner import DeviceRunner
from pagemill_execution.runners.device.graphs import GraphShape
from pagemill_kernels.ranks.device_marks import END

pytestmark = [] if HAS_GPU else [pytest.mark.slow]
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 64, "num_kv_blocks": 14, "max_num_seqs": 3, "max_num_batched_tokens": 24,
    "num_threads": 1,
}  # fmt: skip
PROMPTS = ["one two three four five six seven", "one two three four five six eight"]
SHAPES = [GraphShape(1, 1, True), GraphShape(3, 3, True), GraphShape(16, 4, False)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafts")
    found = {"heads": root / "heads", "drafts": root / "drafts"}
    for name, layers in (("heads", 4), ("drafts", 1)):
        write_tiny_llama(
            found[name], vocab_size=VOCAB, hidden_size=SIZE, num_attention_heads=2, num_key_value_heads=1,
            num_hidden_layers=layers, initializer_range=0.15,
        )  # fmt: skip
        (found[name] / "tokenizer.json").write_text(byte_tokenizer([("t", "h")]).to_str())
        (found[name] / "tokenizer_config.json").write_text("{}")
    found["eagle3"] = write_eagle3(root / "eagle3", eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    return found


def make(folders: dict[str, Path], kind: str, *, drafts: bool = True, **settings: Any) -> LLM:
    """Load a model with a head, or one that drafts for itself, which drafts as many tokens as it may."""
    config: dict[str, Any] = {"method": "off"}
    if drafts:
        config = {"method": "eagle3" if kind == "heads" else "draft_model", "num_speculative_tokens": 3}
        config["model"] = str(folders["eagle3" if kind == "heads" else kind])
    llm = LLM(str(folders[kind]), speculative_config=config, **{**SETTINGS, **settings})
    if llm._core._proposals is not None:
        llm._core._proposals._ms_of = None
    return llm


def answers(llm: LLM, **params: Any) -> tuple[list[Any], int, int]:
    """Return the answers, and the numbers of proposed tokens and of sampled ones among them."""
    given = [
        SamplingParams(**{"temperature": 0.0, "max_tokens": 10, "ignore_eos": True, "seed": n, "n": 1 + n, **params})
        for n in range(len(PROMPTS))
    ]
    outputs = llm.generate(PROMPTS, given, use_tqdm=False)
    metrics = [out.metrics for out in outputs if out.metrics is not None]
    counts = (sum(each.num_proposed_tokens for each in metrics), sum(each.num_accepted_tokens for each in metrics))
    return [[choice.token_ids for choice in out.outputs] for out in outputs], *counts


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> tuple[list[Any], dict[tuple[int, ...], list[int]]]:
    """The answers of the CPU's runner, and what the head drafts there behind which tokens."""
    with pytest.MonkeyPatch.context() as patch:
        found = record_drafts(patch)
        with make(folders, "heads", device="cpu") as llm:
            plain = answers(llm)[0]
    return plain, dict(found)


def wrong(found: Found, expected: dict[tuple[int, ...], list[int]]) -> int:
    """Return how many drafts differ from those of the CPU behind the same tokens."""
    compared = [(tokens, expected[known]) for known, tokens in found if known in expected]
    assert len(compared) > 8
    assert max(len(tokens) for tokens, _ in compared) == 3
    return sum(ours[: len(theirs)] != theirs[: len(ours)] for ours, theirs in compared)


def test_a_head_drafts_what_it_drafts_on_a_cpu(
    folders: dict[str, Path], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts of prompts, behind prefix hits and forks, launched one by one and as recorded steps."""
    found, (plain, drafts) = record_device_drafts(monkeypatch), expected
    with make(folders, "heads", device="cuda") as llm:
        runner = llm._core.runner
        assert isinstance(runner, DeviceRunner)
        assert runner.info.drafts
        assert answers(llm)[0] == plain
        assert wrong(found, drafts) == 0
        if HAS_GPU:  # steps are recorded anyway
            return
        with torch.inference_mode():
            runner.warm_up(3, 24)
        runner.resize_cache(runner.info)  # as behind the measurement of a device
        llm._core.scheduler.kv.reset_prefix_cache()
        recorder = ReplayRecorder()
        runner.capture_graphs(SHAPES, lambda: recorder)
        del found[:]
        assert answers(llm)[0] == plain
        assert wrong(found, drafts) == 0
        assert recorder.num_run > 20


def _losing_states(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DraftForward, "keep_drafted", lambda *_: None)


def _reading_the_first(patch: pytest.MonkeyPatch) -> None:
    init = DraftForward.__init__

    def changed(self: DraftForward, *args: Any) -> None:
        init(self, *args)
        self._first_key = 0

    patch.setattr(DraftForward, "__init__", changed)


@pytest.mark.parametrize("fault", [_losing_states, _reading_the_first])
def test_planted_faults_change_what_is_drafted(
    folders: dict[str, Path], expected: Any, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any], None]
) -> None:
    fault(monkeypatch)
    found = record_device_drafts(monkeypatch)
    with make(folders, "heads", device="cuda") as llm:
        assert answers(llm)[0] == expected[0]
    assert wrong(found, expected[1]) > 0


def test_a_model_that_drafts_for_itself_is_never_wrong(folders: dict[str, Path]) -> None:
    """With the key of the place, wherever its keys and values come from; also behind a sleep."""
    params = {"temperature": 0.8, "max_tokens": 24}
    with make(folders, "drafts", drafts=False, device="cuda") as llm:
        plain = answers(llm, **params)[0]
    with make(folders, "drafts", device="cuda") as llm:
        for _ in range(2):
            found, num_proposed, num_accepted = answers(llm, **params)
            assert found == plain
            assert num_accepted == num_proposed > 20
            assert llm._core.runner.sleep() > 0
            llm._core.runner.wake()
            llm._core.scheduler.kv.reset_prefix_cache()


@pytest.mark.parametrize("kind", ["heads", "drafts", pytest.param("recorded", marks=pytest.mark.full)])
def test_rank_0_of_devices_drafts(
    kind: str, folders: dict[str, Path], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind its part of each step, whose time is compared with that of others, and behind a sleep. The head has no
    embedding of its own."""
    if DEVICE.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    recorder, of = ReplayRecorder(), "drafts" if kind == "drafts" else "heads"
    found, (plain, drafts) = record_device_drafts(monkeypatch), expected
    if of == "drafts":
        with make(folders, of, drafts=False, device="cuda") as llm:
            plain = answers(llm)[0]
    settings: dict[str, Any] = {"device": "cuda", "tensor_parallel_size": 2, "num_threads": 2}
    if kind == "recorded":
        fails(monkeypatch, {"records": True})
    with recording(recorder) if kind == "recorded" else nullcontext():
        llm = make(folders, of, **settings)
    runner: Any = llm._core.runner
    ends, run = [], DeviceDrafter.run

    def noted(self: DeviceDrafter, *given: Any) -> Any:
        ends.append(runner._group._marks.read().exchange == END)
        return run(self, *given)

    monkeypatch.setattr(DeviceDrafter, "run", noted)
    with llm:
        for _ in range(1 + (kind == "drafts")):
            assert runner.sleep() > 0
            runner.wake()
            llm._core.scheduler.kv.reset_prefix_cache()
            ours, num_proposed, num_accepted = answers(llm)
            assert ours == plain
    assert all(ends)
    assert (recorder.num_run > 10) == (kind == "recorded")
    if of == "heads":
        assert wrong(found, drafts) == 0
    else:
        assert num_accepted == num_proposed > 10
