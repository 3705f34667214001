"""Compares blocks and throughput of parallel samples and beam searches with the same answers as separate requests.

Runs the embedded model. One side forks its answers from one prompt and copies a block only when a shared one is
written; the other sends each answer as a request of its own (for a beam search: as many greedy answers of the same
length), with nothing shared. Prefix caching is off on both sides. Both run with memory for everything, and with a small
KV cache, where sharing determines how many answers are generated concurrently.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from report import emit
from workload import MODEL

from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.starting.factory import create_runner
from pagemill_models.sources import resolve_source
from pagemill_models.tokenizer_files.load_bundle import load_bundle
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

TEXT = Path(__file__).parents[1] / "LICENSE"
"""Prompts are parts of this text: how often beams branch depends on what the model reads."""
BLOCK_SIZE = 16
AMPLE_BLOCKS = 2048


class Case(NamedTuple):
    name: str
    width: int
    beams: bool


class Measured(NamedTuple):
    peak_blocks: int
    waste_percent: float
    seconds: float
    tokens_per_s: float
    """Tokens per second of all generated answers."""


CASES = [
    *(Case(f"n = {width}", width, False) for width in (4, 8, 16)),
    *(Case(f"{width} beams", width, True) for width in (4, 8)),
]


def make_prompts(num_prompts: int, num_tokens: int) -> list[list[int]]:
    tokenizer = Tokenizer(load_bundle(resolve_source(MODEL)))
    token_ids = tokenizer.encode(TEXT.read_text())
    tokenizer.close()
    return [token_ids[start * num_tokens :][:num_tokens] for start in range(1, num_prompts + 1)]


def make_core(num_blocks: int, max_model_len: int, max_num_seqs: int) -> EngineCore:
    config = EngineConfig(
        model=MODEL,
        block_size=BLOCK_SIZE,
        num_kv_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=False,
    )
    return EngineCore(config, create_runner(config, lambda phase, detail: None))


def shared(case: Case, num_tokens: int) -> Iterator[SamplingParams]:
    if case.beams:
        yield SamplingParams(n=case.width, use_beam_search=True, max_tokens=num_tokens, ignore_eos=True)
    else:
        yield SamplingParams(n=case.width, max_tokens=num_tokens, ignore_eos=True, seed=1)


def apart(case: Case, num_tokens: int) -> Iterator[SamplingParams]:
    for seed in range(case.width):
        temperature = 0.0 if case.beams else 1.0
        yield SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=seed, temperature=temperature)


def measure(core: EngineCore, prompts: list[list[int]], params: list[SamplingParams]) -> Measured:
    for number, prompt in enumerate(prompts):
        for place, sampling in enumerate(params):
            core.add(
                GenerateRequest(
                    request_id=f"{number}-{place}", model="bench", prompt_token_ids=prompt, sampling=sampling
                )
            )
    peak = allocated = used = num_tokens = 0
    started_s = time.perf_counter()
    while core.has_work:
        for out in core.step().outputs:
            if out.error is not None:
                raise SystemExit(f"a request failed: {out.error}")
            num_tokens += len(out.token_ids)
        peak = max(peak, core.scheduler.kv.usage()[0].num_active)
        usage = core.scheduler.kv.slot_usage()
        allocated, used = allocated + usage.allocated_slots, used + usage.used_slots
    seconds = time.perf_counter() - started_s
    core.check_integrity()
    return Measured(peak, 100 * (1 - used / allocated), seconds, num_tokens / seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=160)
    parser.add_argument("--output-tokens", type=int, default=40)
    parser.add_argument("--small-cache-blocks", type=int, default=96)
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES])
    args = parser.parse_args()
    prompts = make_prompts(args.prompts, args.prompt_tokens)
    cases = [case for case in CASES if case.name in args.cases]
    max_num_seqs = args.prompts * max(case.width for case in cases)
    caches = {"ample": AMPLE_BLOCKS, "small": args.small_cache_blocks}
    results: dict[str, dict[str, dict[str, Measured]]] = {case.name: {} for case in cases}
    for cache, num_blocks in caches.items():
        core = make_core(num_blocks, args.prompt_tokens + args.output_tokens, max_num_seqs)
        measure(core, prompts[:1], [SamplingParams(max_tokens=4, ignore_eos=True)])
        for case in cases:
            results[case.name][cache] = {
                "apart": measure(core, prompts, list(apart(case, args.output_tokens))),
                "shared": measure(core, prompts, list(shared(case, args.output_tokens))),
            }
        core.runner.close()
    rows = [list(row(name, each)) for name, each in results.items()]
    columns = [
        "answers a prompt", "blocks apart", "shared", "less %", "waste % apart", "shared", "tokens/s apart", "shared",
        "ratio", "small cache: apart", "shared", "ratio",
    ]  # fmt: skip
    emit(
        "kv_sharing",
        columns,
        rows,
        {
            **{name: getattr(args, name) for name in ("prompts", "prompt_tokens", "output_tokens")},
            "caches": caches,
            "results": {
                name: {cache: {side: each._asdict() for side, each in sides.items()} for cache, sides in of.items()}
                for name, of in results.items()
            },
        },
    )


def row(name: str, of: dict[str, dict[str, Measured]]) -> Iterator[str | int | float]:
    ample, small = of["ample"], of["small"]
    yield name
    yield from (ample["apart"].peak_blocks, ample["shared"].peak_blocks)
    yield 100 * (1 - ample["shared"].peak_blocks / ample["apart"].peak_blocks)
    yield from (ample["apart"].waste_percent, ample["shared"].waste_percent)
    for sides in (ample, small):
        yield from (sides["apart"].tokens_per_s, sides["shared"].tokens_per_s)
        yield sides["shared"].tokens_per_s / sides["apart"].tokens_per_s


if __name__ == "__main__":
    main()
