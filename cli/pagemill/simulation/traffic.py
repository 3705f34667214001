"""Turns the options into a workload: from a trace, or from a generator with parameters."""

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
    """The options of the traffic; `None` if not given."""

    trace: Path | None
    workload: str | None
    rps: float | None
    duration: str | None
    limit: int | None
    speedup: float | None
    skip_broken: bool


def workload_of(options: Traffic, seed: int) -> tuple[Workload, Generator | None]:
    """Return the workload, and its generator unless it was recorded. Raises `PlanError`."""
    if (options.trace is None) == (options.workload is None):
        raise PlanError("give either --trace FILE or --workload NAME, such as --workload ramp:from_rate=2,to_rate=10")
    try:
        if options.trace is not None:
            return _recorded(options, options.trace), None
        generator = _generator(options, options.workload or "")
        return generator.workload(seed), generator
    except TraceError as error:
        raise PlanError(f"--trace {error}") from None
    except ParameterError as error:
        raise PlanError(f"--workload {error}") from None


def _recorded(options: Traffic, path: Path) -> Workload:
    for option, value in (("--rps", options.rps), ("--duration", options.duration)):
        if value is not None:
            raise PlanError(f"{option} {value}: does not apply to a trace; use --limit and --speedup, or --workload")
    speedup = 1.0 if options.speedup is None else options.speedup
    return read_trace(path, limit=options.limit, speedup=speedup, skip_broken=options.skip_broken)


def _generator(options: Traffic, choice: str) -> Generator:
    for option, value in (("--limit", options.limit), ("--speedup", options.speedup)):
        if value is not None:
            raise PlanError(f"{option} {value}: applies to traces only; set parameters with NAME:PARAMETER=VALUE")
    if options.skip_broken:
        raise PlanError("--skip-broken: applies to traces only; remove it")
    name, parameters = split_choice(choice)
    for option, parameter, given in (("--rps", "rate", options.rps), ("--duration", "duration_s", options.duration)):
        if given is not None and parameter in parameters:
            raise PlanError(
                f"{option} {given}: --workload sets {parameter}={parameters[parameter]} already; remove one of them"
            )
    if options.rps is not None:
        parameters["rate"] = str(options.rps)
    if options.duration is not None:
        parameters["duration_s"] = str(seconds("--duration", options.duration))
    return make_generator(name, parameters)


def usual_lengths(workload: Workload, max_model_len: int | None) -> tuple[int, int]:
    """Return the mean tokens of a prompt and of an answer, limited to what the engine accepts."""
    requests = workload.requests
    count = max(1, len(requests))
    prompt = max(1, round(sum(each.num_prompt_tokens for each in requests) / count))
    output = max(1, round(sum(each.num_output_tokens for each in requests) / count))
    if max_model_len is not None:
        prompt = max(1, min(prompt, max_model_len - 1))
        output = max(1, min(output, max_model_len - prompt))
    return prompt, output
