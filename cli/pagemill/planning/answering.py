"""Computes the plan of every subject under one load: its replica, the load on it, and the forecast.

`choosing` finds the subjects, `forecast` computes the number of replicas and `simulated_latencies` simulates it;
`report` shows one plan and `comparison` several; `role_pairs` adds replicas of separate roles.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pagemill.planning.choosing import Subject, seconds, show_progress
from pagemill.planning.errors import DeviceTooSmall, PlanError
from pagemill.planning.forecast import Forecast, PlannedWorkload, forecast, is_positive, of_users
from pagemill.planning.placement import note_of
from pagemill.planning.prices import Prices, price_of
from pagemill.planning.ranks.chosen_ranks import ChosenRanks, choose_ranks
from pagemill.planning.replica import (
    PerDecode,
    PlannedReplica,
    ReplicaOptions,
    can_choose,
    divided_replicas,
    replica_of,
)
from pagemill.planning.simulated_latencies import SimulatedLatencies, simulate_latencies
from pagemill.planning.users import Users
from pagemill_operator.autoscaler.settings import Slo
from pagemill_operator.plan.types import Plan

MOST_REPLICAS = 1000
"""The maximum number of replicas if the file sets none."""


class Question(NamedTuple):
    """The load, the SLO and the other inputs that are the same for all subjects."""

    load: PlannedWorkload
    """The load; with `users` its rate is 0 until it is computed for a replica."""
    users: Users | None
    slo: Slo
    prices: Prices
    fit: Path | None
    measure_s: float
    per_decode: PerDecode | None = None
    """`None`: as `fit` says."""


class PlanAnswer(NamedTuple):
    plan: Plan
    replica: PlannedReplica
    workload: PlannedWorkload
    slo: Slo
    forecast: Forecast
    simulated: SimulatedLatencies | None
    gpus: int
    """The GPUs of one replica; 0 if it computes on CPUs."""
    note: str | None = None
    """A remark about the device."""
    is_of_file: bool = True
    """Whether a file describes the deployment; otherwise only its model is known."""
    ranks: ChosenRanks | None = None
    """The choice of several devices for a model that does not fit on one."""

    @property
    def is_served(self) -> bool:
        """Whether engines of this version are known to run so: on one device with kernels for it, or on CPUs."""
        return self.note is None


class AnswerOrError(NamedTuple):
    subject: Subject
    answer: PlanAnswer | None
    error: str = ""
    """The cause, if there is no answer."""


def answers(question: Question, subjects: Sequence[Subject], *, compares: bool) -> list[AnswerOrError]:
    """Return the answers in the order of the subjects. Raises `PlanError` if the only subject has no answer.

    `compares`: the answers are shown in one table, which has no simulations.
    """
    found = []
    for subject in subjects:
        try:
            found.append(AnswerOrError(subject, answer(question, subject, simulates=not compares)))
        except PlanError as error:
            if len(subjects) == 1:
                raise
            found.append(AnswerOrError(subject, None, str(error)))
    return found


def answer(question: Question, subject: Subject, *, simulates: bool = True) -> PlanAnswer:
    """Return the plan of one subject; `simulates`: with a simulation of one replica. Raises `PlanError`."""
    load, slo = question.load, question.slo
    options = ReplicaOptions(
        question.fit, subject.accelerator, subject.model, question.measure_s, show_progress, question.per_decode
    )
    found, most = subject.loaded.plan, most_of(subject)

    def weigh(replica: PlannedReplica) -> tuple[PlannedWorkload, Forecast]:
        workload = load if question.users is None else of_users(replica, load, question.users, slo, most)
        price = price_of(subject, question.prices, len(replica.ranks))
        return workload, forecast(replica, workload, slo, most, price)

    chosen = None
    try:
        replica = replica_of(found, options, load.input_tokens, load.output_tokens)
    except DeviceTooSmall as error:
        if question.fit is not None or not can_choose(found, options):
            raise
        planned = partial(divided_replicas, found, options, load.tokens)
        chosen = choose_ranks(planned, lambda each: weigh(each)[1], error)
        assert chosen.chosen.replica is not None, "only ranks that hold the model are chosen"
        replica = chosen.chosen.replica
    workload, result = weigh(replica)
    simulated = None
    # The latency of an overloaded replica has no bound, and the simulation knows no partly cached prompts.
    if simulates and result.chosen.ttft_ms is not None and not workload.cached_tokens:
        rate = workload.requests_per_s / result.chosen.replicas
        simulated = simulate_latencies(
            replica.shape,
            workload.input_tokens,
            workload.output_tokens,
            rate,
            slo.share,
            kinds=replica.kinds,
            overlaps=replica.overlaps,
        )
    on_device = subject.accelerator is not None
    gpus = max(found.groups[0].process.gpus, len(replica.ranks) or 1) if on_device else 0
    note = note_of(subject.accelerator, len(replica.ranks)) if subject.accelerator is not None else None
    return PlanAnswer(found, replica, workload, slo, result, simulated, gpus, note, subject.is_of_file, chosen)


def most_of(subject: Subject) -> int:
    """Return the maximum number of replicas."""
    autoscaling = subject.loaded.deployment.spec.autoscaling
    return autoscaling.max_replicas if autoscaling else MOST_REPLICAS


def load_of(
    rps: float | None, users: int | None, think: str | None, input_tokens: int, output_tokens: int, cached: int
) -> tuple[PlannedWorkload, Users | None]:
    """Return the load that the options describe. Raises `PlanError`."""
    if (rps is None) == (users is None):
        raise PlanError("give either --rps with requests per second, or --users with --think, such as --users 100")
    if (users is None) != (think is None):
        raise PlanError("--users and --think go together: --users 100 --think 30s")
    if rps is not None and not is_positive(rps):
        raise PlanError(f"--rps {rps:g}: must be a number above 0")
    if cached >= input_tokens:
        raise PlanError(
            f"--cached {cached}: must be less than --input {input_tokens}, because the last token is always computed"
        )
    load = PlannedWorkload(rps or 0.0, input_tokens, output_tokens, cached)
    return load, None if users is None or think is None else Users(users, seconds("--think", think))
