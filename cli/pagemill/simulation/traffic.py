"""The requested traffic: the file of a trace, or a generator with its parameters."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pagemill.planning.choosing import seconds
from pagemill.planning.errors import PlanError
from pagemill_simulator.parameters import ParameterError, split_choice
from pagemill_simulator.workloads.generator import Generator
from pagemill_simulator.workloads.generators import make_generator
from pagemill_simulator.workloads.request import Workload
from pagemill_simulator.workloads.traces import TraceError, read_trace


class Traffic(NamedTuple):
    """Options of the traffic; `None`: not given."""

    trace: Path | None
    workload: str | None
    rps: float | None
    duration: str | None
    limit: int | None
    speedup: float | None
    skip_broken: bool


def workload_of(asked: Traffic, seed: int) -> tuple[Workload, Generator | None]:
    """The workload, and what draws it unless it was recorded. Raises `PlanError`."""
    if (asked.trace is None) == (asked.workload is None):
        raise PlanError("give either --trace FILE or --workload NAME, such as --workload ramp:from_rate=2,to_rate=10")
    try:
        if asked.trace is not None:
            return _recorded(asked, asked.trace), None
        generator = _generator(asked, asked.workload or "")
        return generator.workload(seed), generator
    except TraceError as error:
        raise PlanError(f"--trace {error}") from None
    except ParameterError as error:
        raise PlanError(f"--workload {error}") from None


def _recorded(asked: Traffic, path: Path) -> Workload:
    for option, value in (("--rps", asked.rps), ("--duration", asked.duration)):
        if value is not None:
            raise PlanError(f"{option} {value}: a trace has its own; use --limit and --speedup, or --workload")
    return read_trace(path, limit=asked.limit, speedup=asked.speedup or 1.0, skip_broken=asked.skip_broken)


def _generator(asked: Traffic, choice: str) -> Generator:
    for option, value in (("--limit", asked.limit), ("--speedup", asked.speedup)):
        if value is not None:
            raise PlanError(f"{option} {value}: is for traces; a workload has parameters, as NAME:PARAMETER=VALUE")
    name, parameters = split_choice(choice)
    if asked.rps is not None:
        parameters["rate"] = str(asked.rps)
    if asked.duration is not None:
        parameters["duration_s"] = str(seconds("--duration", asked.duration))
    return make_generator(name, parameters)


def usual_lengths(workload: Workload, max_model_len: int | None) -> tuple[int, int]:
    """Mean tokens of a prompt and of an answer, within what the engine accepts."""
    requests = workload.requests
    count = max(1, len(requests))
    prompt = max(1, round(sum(each.num_prompt_tokens for each in requests) / count))
    output = max(1, round(sum(each.num_output_tokens for each in requests) / count))
    if max_model_len is not None:
        prompt = max(1, min(prompt, max_model_len - 1))
        output = max(1, min(output, max_model_len - prompt))
    return prompt, output
