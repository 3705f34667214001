"""Computes the forecast of separate roles for every pair of devices: prefill on one, decode on the same or another.

`answering` computes the plans of the devices, `roles` one forecast; `role_table` and `comparison` show them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from pagemill.planning.answering import AnswerOrError, PlanAnswer, Question, most_of
from pagemill.planning.choosing import Subject
from pagemill.planning.errors import PlanError
from pagemill.planning.forecast import is_positive
from pagemill.planning.prices import price_of
from pagemill.planning.roles.roles import GBIT_PER_S, Prices, RolesForecast, forecast_roles
from pagemill_operator.autoscaler.settings import Slo
from pagemill_operator.autoscaler.slo import meets


class PairAnswer(NamedTuple):
    """The forecast for the replicas of two plans, of which one is for prefill and the other for decode."""

    prefill: Subject
    decode: Subject
    gpus: tuple[int, int]
    """The GPUs of one replica of each role; 0 if it computes on CPUs."""
    slo: Slo
    gbit_per_s: float
    forecast: RolesForecast

    @property
    def devices(self) -> list[str]:
        return [self.prefill.device, self.decode.device]

    @property
    def idle_meets(self) -> bool:
        """Whether a request alone meets the SLO."""
        return meets(self.forecast.idle, self.slo)


def check_roles(has_roles: bool, gbit_per_s: float | None, output_tokens: int) -> float | None:
    """Return the speed of the links; `None` if roles are not asked for. Raises `PlanError`."""
    if gbit_per_s is not None and not has_roles:
        raise PlanError(f"--link-gbit-per-s {gbit_per_s:g}: needs --roles, whose replicas the link connects")
    if has_roles and output_tokens < 2:
        raise PlanError(
            f"--output {output_tokens}: an answer of one token needs no decode; leave out --roles, or raise --output"
        )
    if gbit_per_s is not None and not is_positive(gbit_per_s):
        raise PlanError(f"--link-gbit-per-s {gbit_per_s:g}: must be a number above 0, such as {GBIT_PER_S:g}")
    return (gbit_per_s or GBIT_PER_S) if has_roles else None


def pair_answers(question: Question, found: Sequence[AnswerOrError], gbit_per_s: float) -> list[PairAnswer]:
    """Return the forecast of every pair of the plans of a model; devices without a plan are left out."""
    planned = [(each.subject, each.answer) for each in found if each.answer is not None]
    return [
        _pair_answer(question, prefill, decode, gbit_per_s)
        for prefill, decode in product(planned, repeat=2)
        if prefill[0].label == decode[0].label
    ]


def _pair_answer(
    question: Question, prefill: tuple[Subject, PlanAnswer], decode: tuple[Subject, PlanAnswer], gbit_per_s: float
) -> PairAnswer:
    subjects, plans = (prefill[0], decode[0]), (prefill[1], decode[1])
    money = [
        price_of(subject, question.prices, len(plan.replica.ranks))
        for subject, plan in zip(subjects, plans, strict=True)
    ]
    gpus = (plans[0].gpus, plans[1].gpus)
    if money[0] is None or money[1] is None:
        prices = Prices(float(gpus[0] or 1), float(gpus[1] or 1), is_money=False)
    else:
        prices = Prices(money[0], money[1], is_money=True)
    replicas = (plans[0].replica, plans[1].replica)
    most = most_of(subjects[0])
    forecast = forecast_roles(replicas, question.load, question.users, question.slo, most, prices, gbit_per_s)
    return PairAnswer(*subjects, gpus, question.slo, gbit_per_s, forecast)
