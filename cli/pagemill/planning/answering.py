"""Plans of all subjects under one load: each subject's replica, the load on it, and the forecast.

`choosing` finds the subjects; `forecast` predicts and `rehearsal` simulates the chosen number; `report` shows one plan
and `comparison` several.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pagemill.planning.choosing import Subject, seconds, tell
from pagemill.planning.errors import PlanError
from pagemill.planning.forecast import Forecast, Workload, forecast, is_positive, of_users
from pagemill.planning.placement import note_of
from pagemill.planning.prices import Prices, price_of
from pagemill.planning.rehearsal import Rehearsed, rehearse
from pagemill.planning.replica import Means, Replica, replica_of
from pagemill.planning.users import Users
from pagemill_operator.autoscaler.settings import Slo
from pagemill_operator.plan.types import Plan

MOST_REPLICAS = 1000
"""Considered if the file sets no maximum."""


class Question(NamedTuple):
    """What is asked of every subject."""

    load: Workload
    """Its rate is that of the users, where there are any."""
    users: Users | None
    slo: Slo
    prices: Prices
    fit: Path | None
    measure_s: float


class Answer(NamedTuple):
    plan: Plan
    replica: Replica
    workload: Workload
    slo: Slo
    forecast: Forecast
    rehearsed: Rehearsed | None
    gpus: int
    """Of one replica; 0: it computes on CPUs."""
    note: str | None = None
    """What is to be known of the device."""
    is_of_file: bool = True
    """A deployment that a file describes; otherwise a model with all else left open."""


class Answered(NamedTuple):
    subject: Subject
    answer: Answer | None
    error: str = ""
    """Why there is no answer."""


def answers(question: Question, subjects: Sequence[Subject]) -> list[Answered]:
    """In the order of the subjects. Raises `PlanError` where there is one alone and it has none."""
    found = []
    for subject in subjects:
        try:
            found.append(Answered(subject, answer(question, subject, simulates=len(subjects) == 1)))
        except PlanError as error:
            if len(subjects) == 1:
                raise
            found.append(Answered(subject, None, str(error)))
    return found


def answer(question: Question, subject: Subject, *, simulates: bool = True) -> Answer:
    """Raises `PlanError`."""
    load, slo = question.load, question.slo
    means = Means(question.fit, subject.accelerator, subject.model, question.measure_s, tell)
    found, spec = subject.loaded.plan, subject.loaded.deployment.spec
    replica = replica_of(found, means, load.input_tokens, load.output_tokens)
    most = spec.autoscaling.max_replicas if spec.autoscaling else MOST_REPLICAS
    workload = load if question.users is None else of_users(replica, load, question.users, slo, most)
    result = forecast(replica, workload, slo, most, price_of(subject, question.prices))
    rehearsed = None
    # A replica that cannot keep up has no latency, and the simulation caches no prompt in part.
    if simulates and result.chosen.ttft_ms is not None and not workload.cached_tokens:
        rate = workload.requests_per_s / result.chosen.replicas
        rehearsed = rehearse(
            replica.shape, workload.input_tokens, workload.output_tokens, rate, slo.share, overlaps=replica.overlaps
        )
    on_device = subject.accelerator is not None
    gpus = found.groups[0].process.gpus or int(on_device)
    note = note_of(subject.accelerator) if subject.accelerator is not None else None
    return Answer(found, replica, workload, slo, result, rehearsed, gpus, note, subject.is_of_file)


def load_of(
    rps: float | None, users: int | None, think: str | None, input_tokens: int, output_tokens: int, cached: int
) -> tuple[Workload, Users | None]:
    """The options of the load. Raises `PlanError`."""
    if (rps is None) == (users is None):
        raise PlanError("give either --rps with requests per second, or --users with --think, such as --users 100")
    if (users is None) != (think is None):
        raise PlanError("--users and --think go together: --users 100 --think 30s")
    if rps is not None and not is_positive(rps):
        raise PlanError(f"--rps {rps:g}: must be a number above 0")
    if cached >= input_tokens:
        raise PlanError(
            f"--cached {cached}: must be less than --input {input_tokens}; the last token is always computed"
        )
    load = Workload(rps or 0.0, input_tokens, output_tokens, cached)
    return load, None if users is None or think is None else Users(users, seconds("--think", think))
