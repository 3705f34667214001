"""Measures the CPU time of sampling one step, in native code and in the reference: `python bench/sampling.py`."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

import numpy as np
from report import emit, median

from pagemill_kernels.cpu import launch
from pagemill_kernels.sampling import native, randomness, reference
from pagemill_kernels.sampling.batch import Draws, Penalties, Reports, SamplingBatch
from pagemill_kernels.sampling.filters import DRAWS
from pagemill_kernels.sampling.penalties import PENALTIES

VOCABULARIES = (49_152, 151_936)
ROWS = (1, 32, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    launch.set_num_threads(1)
    rows = [
        measured(kind, num_rows, vocab_size, options.rounds)
        for vocab_size in VOCABULARIES
        for num_rows in ROWS
        for kind in KINDS
    ]
    columns = ["asked for", "rows", "vocabulary", "native, CPU ms", "reference, CPU ms", "times"]
    emit("Sampling", columns, rows, {"rows": [dict(zip(columns, row, strict=True)) for row in rows]})


def measured(kind: str, num_rows: int, vocab_size: int, rounds: int) -> list[str | int | float]:
    random = np.random.default_rng(0)
    logits = random.normal(0, 2.5, (num_rows, vocab_size)).astype(np.float32)
    logits[np.arange(num_rows), random.integers(0, vocab_size, num_rows)] += 12  # as peaked as a model's logits
    batch = KINDS[kind](num_rows, vocab_size)
    ours, theirs = [], []
    for _ in range(rounds + 1):
        ours.append(cpu_ms(functools.partial(native.sample_tokens, logits, batch)))
        theirs.append(cpu_ms(functools.partial(reference.sample_tokens, logits.copy(), batch)))
    ours, theirs = ours[1:], theirs[1:]
    times = median([other / own for own, other in zip(ours, theirs, strict=True)])
    return [kind, num_rows, vocab_size, round(median(ours), 2), round(median(theirs), 2), round(times, 1)]


def cpu_ms(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return (time.process_time() - started) * 1e3


def draws(num_rows: int, **changes: float) -> Draws:
    zeros = np.zeros(num_rows, dtype=np.int64)
    settings = DRAWS.filled(num_rows, {"temperature": 0.8, **changes})
    return Draws(settings, randomness.keys(np.arange(num_rows, dtype=np.uint64), zeros, zeros))


def penalties(num_rows: int, vocab_size: int) -> Penalties:
    random = np.random.default_rng(1)
    seen = np.zeros((num_rows, vocab_size), dtype=np.bool_)
    seen[:, random.integers(0, vocab_size, 500)] = True
    values = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
    rows = np.arange(num_rows)
    return Penalties(rows, PENALTIES.filled(num_rows, values), rows, seen, seen.astype(np.int32))


KINDS: dict[str, Callable[[int, int], SamplingBatch]] = {
    "the best token": lambda rows, vocab: SamplingBatch(),
    "temperature": lambda rows, vocab: SamplingBatch(draws(rows)),
    "top_k 50, top_p 0.95": lambda rows, vocab: SamplingBatch(draws(rows, top_k=50, top_p=0.95)),
    "top_p 0.95": lambda rows, vocab: SamplingBatch(draws(rows, top_p=0.95)),
    "temperature, penalties": lambda rows, vocab: SamplingBatch(draws(rows), penalties=penalties(rows, vocab)),
    "5 log probabilities": lambda rows, vocab: SamplingBatch(reports=Reports(np.arange(rows), np.full(rows, 5))),
}


if __name__ == "__main__":
    main()
