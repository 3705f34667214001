"""Builds the result of a step from what was sampled, for runners of every device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagemill_execution.runners.errors import NON_FINITE
from pagemill_execution.sampling.sampler import Sampled
from pagemill_execution.step import StepResult


def result_of_runs(request_ids: Sequence[str], sampled: Sampled, runs: Sequence[range]) -> StepResult:
    """Return the result of a step with proposed tokens. `runs`: the places of each request's
    tokens, as from `sampling.runs.runs_of`."""
    result = StepResult()
    for name, run in zip(request_ids, runs, strict=True):
        if not sampled.finite[run].all():
            result.failed[name] = NON_FINITE
            continue
        result.token_ids[name] = sampled.token_ids[run].tolist()
        if run.start in sampled.logprobs:
            result.logprobs[name] = [sampled.logprobs[place] for place in run]
    return result


def result_of(request_ids: Sequence[str], sampled: Sampled) -> StepResult:
    """Return the result of a step in which each request sampled one token."""
    result = StepResult(token_ids=dict(zip(request_ids, sampled.token_ids[:, None].tolist(), strict=True)))
    result.logprobs = {request_ids[index]: [entry] for index, entry in sampled.logprobs.items()}
    for index in np.flatnonzero(~sampled.finite).tolist():
        del result.token_ids[request_ids[index]]
        result.failed[request_ids[index]] = NON_FINITE
    return result
