"""Models with windows on a GPU, or in Triton's interpreter: what is behind a window is freed, and answers are those of
the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import GEMMA3, GEMMA4, write_model
from triton_device import DEVICE

from pagemill_engine.config import EngineConfig
from pagemill_engine.kv import manager
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.runners.device.device_runner import DeviceRunner
from pagemill_execution.runners.device.graphs import shapes_to_capture
from pagemill_execution.sizing.budget import Sizes
from pagemill_execution.sizing.memory import MemoryState
from pagemill_execution.starting.memory_profiling import profile_memory
from pagemill_models.spec.model_files import load_model_spec
from pagemill_protocol.report.cache_kinds import first_needed, one_kind, sequence_bytes
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

pytestmark = pytest.mark.slow

BLOCK, LONG = 16, 32 * 1024
WINDOWED = {
    **GEMMA3,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
}
PROMPTS = [[(7 * index + 3 * number) % 120 for index in range(50 + 13 * number)] for number in range(2)]
Answers = tuple[list[list[int]], list[float]]
STEPS = {"max_num_seqs": 4, "max_num_batched_tokens": 40}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windowed")
    write_model("Gemma3ForCausalLM", WINDOWED, folder)
    return folder


@pytest.fixture(scope="module")
def runner(folder: Path, runner_loader: Callable[..., Any]) -> Any:
    return runner_loader(folder, device="cuda", max_num_seqs=4)


@pytest.fixture(scope="module")
def on_cpu(folder: Path, runner_loader: Callable[..., Any]) -> Any:
    return runner_loader(folder, backend="cpu", max_num_seqs=4)


@pytest.mark.full
def test_gemma_4_gives_the_answers_of_the_cpu(
    tmp_path: Path, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    """Heads of two sizes, and layers that read the keys of others."""
    kinds = ["sliding_attention", "full_attention"] * 2
    own = {"num_hidden_layers": 4, "layer_types": kinds, "num_kv_shared_layers": 2, "global_head_dim": 32}
    write_model("Gemma4ForCausalLM", {**GEMMA4, **WINDOWED, **own}, tmp_path)
    answers = [
        answers_of(make_driver(runner_loader(tmp_path, max_num_seqs=4, **place)))
        for place in ({"device": "cuda"}, {"backend": "cpu"})
    ]
    assert_alike(*answers)


def answers_of(driver: Any, **settings: Any) -> Answers:
    """Return the tokens and log probabilities of three requests; one has two choices, which copy a block they share."""
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, seed=1, logprobs=0)
    chosen = SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True, seed=2, n=2, logprobs=0)
    found = driver.choices([*PROMPTS, PROMPTS[0][:20]], [greedy, chosen, greedy], **{**STEPS, **settings})
    choices = [choice for choices in found for choice in choices]
    return [each.token_ids for each in choices], [value for each in choices for value in each.logprobs]


def assert_alike(ours: Answers, theirs: Answers) -> None:
    assert ours[0] == theirs[0]
    assert ours[1] == pytest.approx(theirs[1], abs=1e-4)


@pytest.fixture(scope="module")
def expected(on_cpu: Any, make_driver: Callable[[Any], Any]) -> Answers:
    return answers_of(make_driver(on_cpu))


def test_kinds_and_memory_are_those_of_the_cpu(runner: Any, on_cpu: Any) -> None:
    assert isinstance(runner, DeviceRunner)
    assert [kind.window for kind in runner.info.kinds] == [None, 24]
    assert (runner.info.kinds, runner.info.kind_blocks) == (on_cpu.info.kinds, on_cpu.info.kind_blocks)
    assert runner.kv_cache.num_bytes == on_cpu.kv_cache.num_bytes
    counts = runner.info.kind_blocks
    by_kind = dict(zip(runner.info.kinds, counts, strict=True))
    assert sum(count * kind.block_bytes for kind, count in by_kind.items()) == runner.kv_cache.num_bytes
    assert runner.info.shares_memory
    memory = {layer.untyped_storage().data_ptr(): layer.untyped_storage().nbytes() for layer in runner.kv_cache.layers}
    (num_bytes,) = memory.values()
    low, high = (kind.block_bytes for kind in runner.info.kinds)
    assert runner.kv_cache.num_bytes + high < num_bytes <= runner.kv_cache.num_bytes + high + 2 * low


def test_a_long_sequence_holds_as_little_as_on_the_cpu(tmp_path: Path, runner_loader: Callable[..., Any]) -> None:
    write_model("Gemma3ForCausalLM", {**WINDOWED, "sliding_window": 1024, "max_position_embeddings": LONG}, tmp_path)
    held = []
    for where in ({"device": "cuda"}, {"backend": "cpu"}):
        runner = runner_loader(tmp_path, num_kv_blocks=3 * LONG // BLOCK, max_model_len=LONG, max_num_seqs=4, **where)
        core = EngineCore(EngineConfig(model="m", max_num_batched_tokens=512), runner)
        kv, row = core.scheduler.kv, Row(LONG)
        kv.start(row, kv.match(row))
        most = 0
        for start in range(0, LONG - 64, 64):
            assert kv.allocate(row, 64) is not None, start
            kv.launch([row.request_id])
            kv.commit(row, 64)
            most = max(most, sum(each.num_active * each.kind.block_bytes for each in kv.usage()))
        held.append((most, core.load().kv_cache_usage))
        kinds = runner.info.kinds
        runner.close()
    assert held[0] == held[1]
    # A full layer and one whose window is a thirty-second of the sequence.
    assert held[0][0] < 0.55 * sequence_bytes([one_kind(kinds)], LONG, 1, BLOCK)


class Row:
    """A sequence of the cache manager's, of which only the length matters."""

    def __init__(self, num_tokens: int) -> None:
        self.request_id, self.token_ids = "a", list(range(num_tokens))
        self.num_computed_tokens = self.num_pending_tokens = 0
        self.cache_root, self.block_hashes = b"root", []


@pytest.mark.sample("overlapped")
@pytest.mark.parametrize("settings", [{}, {"overlap": True}, {"num_blocks": 8}], ids=["plain", "overlapped", "small"])
def test_answers_are_those_of_the_cpu(
    runner: Any, make_driver: Callable[[Any], Any], expected: Answers, settings: dict[str, Any]
) -> None:
    assert_alike(answers_of(make_driver(runner), **settings), expected)


def test_a_second_turn_hits_as_much_as_on_the_cpu(runner: Any, on_cpu: Any, make_driver: Callable[[Any], Any]) -> None:
    first = make_driver(on_cpu).greedy(PROMPTS[:1], 20)[0]
    turns = [PROMPTS[0], [*PROMPTS[0], *first.token_ids, 5, 6, 7]]
    ours, theirs = (make_driver(each).greedy(turns, 20, waves=True) for each in (runner, on_cpu))
    for mine, other in zip(ours, theirs, strict=True):
        assert_alike((mine.token_ids, mine.logprobs), (other.token_ids, other.logprobs))
    assert [each.num_cached_tokens for each in ours] == [0, (len(PROMPTS[0]) + 19) // BLOCK * BLOCK]


# -- freed blocks -------------------------------------------------------------------------------------------------


@contextmanager
def poisoned(runner: Any, core: EngineCore, value: float) -> Iterator[None]:
    """Fill every block that no sequence holds with a value, before every step."""
    launch = runner.launch

    def launch_poisoned(plan: Any) -> Any:
        with torch.inference_mode():
            for layer, number in zip(runner.kv_cache.layers, (1, 0), strict=True):
                free = [block.block_id for block in core.scheduler.kv.caches[number].pool.free_list]
                layer[torch.tensor(free, device=DEVICE)] = value
        return launch(plan)

    runner.launch = launch_poisoned
    try:
        yield
    finally:
        del runner.launch


def logprobs_of(runner: Any, poison: float | None = None) -> dict[str, list[float]]:
    core = EngineCore(EngineConfig(model="m", enable_prefix_caching=False, **STEPS), runner)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)
    for number, prompt in enumerate(PROMPTS):
        core.add(GenerateRequest(request_id=f"r{number}", model="m", prompt_token_ids=prompt, sampling=params))
    found: dict[str, list[float]] = {}

    with poisoned(runner, core, poison) if poison is not None else nullcontext():
        while core.has_work:
            for output in core.step().outputs:
                assert output.error is None
                found.setdefault(output.request_id, []).extend(entry.logprobs[0] for entry in output.logprobs or [])
    runner._rows.release(list(runner._rows._row_of))
    return found


@pytest.fixture(scope="module")
def sound(runner: Any) -> dict[str, list[float]]:
    return logprobs_of(runner)


def test_kernels_read_nothing_behind_a_window(runner: Any, sound: dict[str, list[float]]) -> None:
    assert logprobs_of(runner, poison=float("nan")) == sound
    assert [len(values) for values in sound.values()] == [20, 20]


def test_a_block_freed_too_early_would_show(
    runner: Any, sound: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above detects a window whose blocks are freed one block early."""
    early = lambda kind, num_tokens, size: first_needed(kind, num_tokens + size, size)  # noqa: E731
    monkeypatch.setattr(manager, "first_needed", early)
    # The interpreter refuses to compute with what is not a number.
    assert logprobs_of(runner, poison=1e3) != sound


# -- recorded steps and measured memory ---------------------------------------------------------------------------


class Replays:
    """Replaces CUDA graphs if there is no device: a captured function runs again on the same buffers."""

    def __init__(self) -> None:
        self.num_recorded = self.num_run = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1

        def again() -> None:
            self.num_run += 1
            run()

        return again


def test_recorded_steps_give_the_same_answers_and_are_not_more(
    folder: Path, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any], expected: Answers
) -> None:
    runner, replays = runner_loader(folder, device="cuda", max_num_seqs=4), Replays()
    shapes = shapes_to_capture(4, 40)
    runner.capture_graphs(shapes, lambda: replays)
    assert replays.num_recorded == len(shapes)
    runner._forward.logits = None  # called if no graph fits
    assert_alike(answers_of(make_driver(runner)), expected)
    assert replays.num_run > 20


@pytest.mark.full
def test_measured_memory_is_divided_among_the_kinds(
    folder: Path, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any], expected: Answers
) -> None:
    """And a memory too small for several kinds makes rows with one block table."""
    runner = runner_loader(folder, device="cuda", max_num_seqs=4)
    spec = load_model_spec(folder)
    sizes = Sizes(0, runner.info.kv_bytes_per_token, 4, gathers=False)
    block_bytes = BLOCK * runner.info.kv_bytes_per_token
    state = MemoryState(1 << 30, 1 << 30, 0, is_gpu=True)
    for num_blocks, step_tokens, windows in ((16, 256, [None]), (600, 40, [None, 24])):
        steps = {"max_num_seqs": 4, "max_num_batched_tokens": step_tokens}
        config = EngineConfig(model="m", max_model_len=256, num_kv_blocks=num_blocks, **steps)
        profile_memory(runner, config, spec, sizes, state, NoMemory())
        assert [kind.window for kind in runner.info.kinds] == windows
        assert 0.95 * num_blocks * block_bytes < runner.kv_cache.num_bytes <= num_blocks * block_bytes
        tables = runner._state.tables
        assert tables[:, runner._rows.layout.padding_row, 0].tolist() == runner.kv_cache.padding_blocks
    assert_alike(answers_of(make_driver(runner)), expected)


class NoMemory:
    """A device on which nothing takes memory."""

    def free_bytes(self) -> int:
        return 1 << 30

    def peak_bytes(self, run: Callable[[], None]) -> int:
        run()
        return 0


def test_sleep_frees_the_blocks_of_all_kinds(runner: Any, make_driver: Callable[[Any], Any]) -> None:
    before = make_driver(runner).greedy(PROMPTS[1:], 8)[0].token_ids
    runner.sleep()
    assert runner.kv_cache.layers == []
    runner.wake()
    assert [len(layer) - 1 for layer in runner.kv_cache.layers] == list(reversed(runner.kv_cache.padding_blocks))
    assert make_driver(runner).greedy(PROMPTS[1:], 8)[0].token_ids == before
