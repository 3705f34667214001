"""Models with windows hold little, hit as much as with a full cache, and read nothing that was freed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expert_models import MODELS as EXPERTS
from family_models import GEMMA3, MODELS, write_model

from pagemill_engine.config import EngineConfig
from pagemill_engine.kv.integrity import check_integrity
from pagemill_engine.kv.manager import CacheManager
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.sizing.kv_sizes import cache_kinds, kv_bytes_per_token
from pagemill_execution.step import StepPlan
from pagemill_kernels.kv_store.kinds import token_bytes
from pagemill_models.spec.model_files import load_model_spec
from pagemill_models.spec.model_spec import ModelSpec, kinds_of
from pagemill_protocol.report.cache_kinds import CacheKind, one_kind, sequence_bytes
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

LONG = 32 * 1024
BLOCK = 16
CHUNK = 512
FAMILIES: dict[str, tuple[str, dict[str, Any], float]] = {
    "1,024 in five of six layers": (
        "Gemma3ForCausalLM",
        {**GEMMA3, "sliding_window": 1024, "max_position_embeddings": LONG + CHUNK},
        0.20,
    ),
    "128 in every second layer": (
        EXPERTS["gpt-oss"][0],
        {
            **EXPERTS["gpt-oss"][1],
            "num_hidden_layers": 4,
            "sliding_window": 128,
            "max_position_embeddings": LONG + CHUNK,
        },
        0.51,
    ),
}


@dataclass(eq=False)
class Row:
    token_ids: list[int]
    request_id: str = "a"
    num_computed_tokens: int = 0
    cache_root: bytes = b"root"
    block_hashes: list[bytes] = field(default_factory=list)
    num_pending_tokens: int = 0


@pytest.fixture(params=FAMILIES)
def windowed(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ModelSpec, float]:
    architecture, config, share = FAMILIES[request.param]
    write_model(architecture, config, tmp_path)
    return load_model_spec(tmp_path), share


def kinds_at(spec: ModelSpec, longest: int) -> list[CacheKind]:
    return kinds_of(spec.decoder, BLOCK, lambda size: token_bytes("bfloat16", size), longest)


def test_a_long_sequence_holds_little_of_what_a_full_cache_holds(windowed: tuple[ModelSpec, float]) -> None:
    spec, share = windowed
    kinds = kinds_at(spec, LONG + CHUNK)
    full = [one_kind(kinds)]
    assert full[0].block_bytes == BLOCK * kv_bytes_per_token(spec, "bfloat16")
    held = sequence_bytes(kinds, LONG, 1, BLOCK)
    assert held <= share * sequence_bytes(full, LONG, 1, BLOCK)
    assert sequence_bytes(full, LONG, 1, BLOCK) == LONG * kv_bytes_per_token(spec, "bfloat16")

    # The same by the blocks that a manager holds after prefill and at every border of a decode.
    counts = [LONG // BLOCK + 40] * len(kinds)
    kv = CacheManager(counts, BLOCK, kinds=kinds, max_step_tokens=CHUNK)
    row = Row(list(range(LONG + 40)))
    kv.start(row, kv.match(row))
    most = 0
    for start in range(0, LONG, CHUNK):
        assert kv.allocate(row, CHUNK) is not None
        active = sum(each.num_active * each.kind.block_bytes for each in kv.usage())
        assert active <= sequence_bytes(kinds, start + CHUNK, CHUNK, BLOCK)
        kv.launch([row.request_id])
        kv.commit(row, CHUNK)
    for _ in range(40):
        assert kv.allocate(row, 1) is not None
        kv.launch([row.request_id])
        kv.commit(row, 1)
        most = max(most, sum(each.num_active * each.kind.block_bytes for each in kv.usage()))
    assert most <= sequence_bytes(kinds, LONG + 40, 1, BLOCK)
    assert most <= share * sequence_bytes(full, LONG + 40, 1, BLOCK)
    check_integrity(kv)


def test_the_memory_is_divided_as_sequences_of_the_usual_length_need_it(windowed: tuple[ModelSpec, float]) -> None:
    spec, _ = windowed
    num_blocks = 8 * LONG // BLOCK
    cache = cache_kinds(EngineConfig(model="m", max_model_len=LONG), spec, "bfloat16", num_blocks)
    full, usual = sequence_bytes([one_kind(cache.kinds)], 4096, 1, BLOCK), sequence_bytes(cache.kinds, 4096, 1, BLOCK)
    total = num_blocks * BLOCK * kv_bytes_per_token(spec, "bfloat16")
    assert 0.99 * total < cache.num_bytes <= total
    fitting = min(
        count / (sequence_bytes([kind], 4096, 1, BLOCK) / kind.block_bytes)
        for kind, count in zip(cache.kinds, cache.counts, strict=True)
    )
    assert fitting >= 0.9 * (total / usual) > 1.5 * total / full


def test_a_window_of_the_whole_context_is_no_kind_of_its_own(windowed: tuple[ModelSpec, float]) -> None:
    spec, _ = windowed
    (kind,) = kinds_at(spec, 100)
    assert (kind.window, kind.layers) == (None, tuple(range(spec.num_layers)))


def test_small_caches_keep_one_kind(windowed: tuple[ModelSpec, float]) -> None:
    """A prompt's chunk needs its own blocks and the window's in each kind; in a small cache that would cost context."""
    spec, _ = windowed
    cache = cache_kinds(EngineConfig(model="m", max_model_len=LONG), spec, "bfloat16", 40)
    assert cache.counts == (40,)
    assert cache.kinds[0].layers == tuple(range(spec.num_layers))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3")
    write_model(*MODELS["gemma3"], folder)
    return folder


PROMPTS = [[(7 * index + 3 * number) % 120 for index in range(90 + 13 * number)] for number in range(3)]


def tokens_of(runner: Any, before_step: Callable[[EngineCore], None], **settings: Any) -> dict[str, list[int]]:
    core = EngineCore(EngineConfig(model="m", **settings), runner)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    for number, prompt in enumerate(PROMPTS):
        core.add(GenerateRequest(request_id=f"r{number}", model="m", prompt_token_ids=prompt, sampling=params))
    found: dict[str, list[int]] = {}
    while core.has_work:
        before_step(core)
        for output in core.step().outputs:
            found.setdefault(output.request_id, []).extend(output.token_ids)
        core.check_integrity()
    runner._rows.release(list(runner._rows._row_of))
    return found


@pytest.mark.parametrize("backend", ["cpu_native", "cpu"])
@pytest.mark.parametrize("overlap", [False, True])
def test_values_of_freed_blocks_change_no_bit(
    gemma: Path, runner_loader: Callable[..., Any], backend: str, overlap: bool
) -> None:
    """Kernels read whole tiles and multiply what no row may see by zero: a value that is not finite would show."""
    runner = runner_loader(gemma, backend=backend)
    assert [kind.window for kind in runner.info.kinds] == [None, 24]
    settings = {"enable_prefix_caching": False, "overlap": overlap, "max_num_batched_tokens": 40}
    poisoned = 0

    def poison(core: EngineCore) -> None:
        """Fill every block that no sequence holds. With steps in flight their blocks are held until they are read."""
        nonlocal poisoned
        for number, own in enumerate(runner.kv_cache.of_kinds):
            free = np.array([each.block_id for each in core.scheduler.kv.caches[number].pool.free_list])
            poisoned += len(free)
            for layer in own.layers:
                layer[free] = np.nan

    sound = tokens_of(runner, lambda core: None, **settings)
    launch = runner.launch

    def launch_cleared(plan: StepPlan) -> Any:
        """Clear what sequences take: torch reads a block's unwritten slots as well."""
        for number, (own, changes) in enumerate(zip(runner.kv_cache.of_kinds, plan.tables, strict=True)):
            taken = [block_id for block_ids in changes.appended.values() for block_id in block_ids]
            taken += [block_id for each in plan.admitted for block_id in each.tables[number].block_ids]
            for layer in own.layers:
                layer[np.array(taken, dtype=np.int64)] = 0
        return launch(plan)

    runner.launch = launch_cleared
    assert tokens_of(runner, poison, **settings) == sound
    assert poisoned > 0


def test_an_unnamed_freed_block_would_show(
    gemma: Path, runner_loader: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above detects that a plan does not name the blocks behind a window."""
    monkeypatch.setattr(CacheManager, "take_dropped", lambda self: [[] for _ in self.kinds])
    with pytest.raises(AssertionError):
        test_values_of_freed_blocks_change_no_bit(gemma, runner_loader, "cpu_native", overlap=False)


@pytest.mark.parametrize("backend", ["cpu_native", "cpu"])
def test_tokens_are_the_same_while_memory_moves(
    gemma: Path, runner_loader: Callable[..., Any], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More prompts than fit, short and long ones, in a small cache: the border moves, and with it blocks in use."""
    draw = random.Random(4)
    shared = [draw.randrange(120) for _ in range(64)]
    lengths = [draw.choice([10, 30, 150, 200]) for _ in range(14)]
    texts = [[*shared[: draw.choice([0, 20, 64])], *(draw.randrange(120) for _ in range(length))] for length in lengths]
    prompts = [text[:210] for text in texts]
    answers, num_moved = [], []
    options = {"dtype": "float32", "deterministic": backend == "cpu_native"}
    for num_blocks in (400, 24):
        runner = runner_loader(
            gemma, backend=backend, num_kv_blocks=num_blocks, **options, max_num_seqs=4, max_num_batched_tokens=48
        )
        assert runner.info.shares_memory
        config = EngineConfig(model="m", max_num_seqs=4, max_num_batched_tokens=48, overlap=num_blocks < 400)
        core = EngineCore(config, runner)
        launch, copied = runner.launch, []

        def noting(plan: StepPlan, launch: Any = launch, copied: list[int] = copied) -> Any:
            copied += [len(changes.copies) for changes in plan.tables]
            return launch(plan)

        monkeypatch.setattr(runner, "launch", noting)
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        found: dict[str, list[int]] = {}
        for number, prompt in enumerate(prompts):
            core.add(GenerateRequest(request_id=f"r{number}", model="m", prompt_token_ids=prompt, sampling=params))
        while core.has_work:
            for output in core.step().outputs:
                found.setdefault(output.request_id, []).extend(output.token_ids)
            core.check_integrity()
        answers.append(found)
        num_moved.append(sum(copied))
    assert answers[0] == answers[1]
    assert num_moved[0] == 0 < num_moved[1]


def test_a_second_turn_hits_as_much_as_in_a_full_cache(
    gemma: Path, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    runner = runner_loader(gemma)
    driver = make_driver(runner)
    first = driver.greedy([PROMPTS[0]], 40)[0]
    turn = [*PROMPTS[0], *first.token_ids, 5, 6, 7]
    hits = driver.greedy([PROMPTS[0], turn, [*turn, 1], PROMPTS[0]], 40, waves=True)
    alone = [driver.greedy([prompt], 40)[0] for prompt in (PROMPTS[0], turn, [*turn, 1], PROMPTS[0])]
    assert [each.token_ids for each in hits] == [each.token_ids for each in alone]
    computed = len(PROMPTS[0]) + 40 - 1
    assert hits[1].num_cached_tokens == computed // BLOCK * BLOCK
    assert hits[2].num_cached_tokens == len(turn) // BLOCK * BLOCK
    assert hits[3].num_cached_tokens == (len(PROMPTS[0]) - 1) // BLOCK * BLOCK


def test_the_load_is_the_share_of_the_memory_that_is_held(gemma: Path, runner_loader: Callable[..., Any]) -> None:
    runner = runner_loader(gemma)
    shares = []

    def compare(core: EngineCore) -> None:
        load, usage = core.load(), core.scheduler.kv.usage()
        held = sum(each.num_active * each.kind.block_bytes for each in usage)
        assert load.kv_cache_usage == held / load.num_kv_bytes_total
        assert load.num_kv_bytes_total == runner.kv_cache.num_bytes
        assert sum(each.active for each in load.kind_bytes) == load.num_kv_bytes_active == held
        shares.append(load.kv_cache_usage)

    tokens_of(runner, compare)
    assert max(shares) > 0.01
