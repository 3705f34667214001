"""Computes how many replicas of each role a load needs if some only compute prompts and the others only decode.

Pagemill serves both in every replica (ADR 82), so the result is a forecast, to be compared with that of `forecast`.
`role_pools` predicts the latencies, `role_pairs` chooses the devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from pagemill.planning.forecast import IDLE_RPS, PlannedWorkload, ServingCost, cost_of, highest_rate
from pagemill.planning.replica import PlannedReplica, check_length
from pagemill.planning.roles.pools import Loads, RolePair, RolePools
from pagemill.planning.users import MEAN, Users
from pagemill_operator.autoscaler.settings import Slo
from pagemill_operator.autoscaler.slo import meets
from pagemill_protocol.report.prediction import OfferedLoad, Prediction

GBIT_PER_S = 25.0
"""The default speed of the link of each replica."""
_BEYOND = 1.01
"""The factor on the capacity at which the limit of the capacity shows."""


class Prices(NamedTuple):
    """What one replica of each role takes per hour: money, or if prices are unknown, devices."""

    prefill: float
    decode: float
    is_money: bool

    def of(self, pair: RolePair) -> float:
        return pair.prefill * self.prefill + pair.decode * self.decode


class Role(NamedTuple):
    """The replicas of one role."""

    replicas: int
    capacity: float
    """Requests per second that one of them serves within the SLO."""
    utilization: float
    """The load as a share of what all of them serve."""
    limit: str
    """What limits the capacity: TTFT, TPOT or the resource that is exhausted."""


class Chosen(NamedTuple):
    """The cheapest numbers of replicas that meet the SLO."""

    prefill: Role
    decode: Role
    latencies: Prediction
    link_utilization: float
    """Of the links of the role with fewer replicas."""
    cost: ServingCost | None

    @property
    def replicas(self) -> RolePair:
        return RolePair(self.prefill.replicas, self.decode.replicas)


class RolesForecast(NamedTuple):
    """The result for one pair of devices."""

    workload: PlannedWorkload
    """The load; with users at the rate that they reach."""
    most: int
    """The largest number of replicas of each role that was tried."""
    idle: Prediction
    """The latencies of a request alone: the lower bound for any numbers of replicas."""
    transfer_bytes: int
    """The size of a prompt's keys and values."""
    transfer_ms: float
    """The time that they take on an idle link."""
    chosen: Chosen | None
    """`None`: no numbers up to `most` meet the SLO."""


def forecast_roles(
    replicas: tuple[PlannedReplica, PlannedReplica],
    lengths: PlannedWorkload,
    users: Users | None,
    slo: Slo,
    most: int,
    prices: Prices,
    gbit_per_s: float = GBIT_PER_S,
) -> RolesForecast:
    """Compute the forecast for a prefill and a decode replica. Raises `PlanError` if requests are too long.

    `lengths` has the rate unless there are `users`; `most` limits each role.
    """
    for replica in replicas:
        check_length(lengths.input_tokens, lengths.output_tokens, replica.max_model_len)
    pools = RolePools(*replicas, slo, gbit_per_s)
    means = RolePools(*replicas, msgspec.structs.replace(slo, share=MEAN), gbit_per_s)
    loads = Loads(means, lengths, users)

    def feasible(pair: RolePair) -> bool:
        load = loads.at(pair)
        return load is not None and meets(pools.predict(load.offered, pair), slo)

    needed = cheapest(feasible, most, prices.of)
    workload = (None if needed is None else loads.at(needed)) or loads.at_most()
    idle_load = workload.at(IDLE_RPS).offered
    return RolesForecast(
        workload=workload,
        most=most,
        idle=pools.predict(idle_load, RolePair(1, 1)),
        transfer_bytes=round(pools.transfer_bytes(idle_load)),
        transfer_ms=pools.transfer_s(idle_load) * 1000,
        chosen=None if needed is None else _chosen(pools, workload, slo, needed, prices),
    )


def cheapest(feasible: Callable[[RolePair], bool], most: int, price: Callable[[RolePair], float]) -> RolePair | None:
    """Return the cheapest feasible pair with up to `most` replicas of each role; `None` if there is none.

    More replicas of a role never make a pair infeasible, so each number is found by bisection. More decode replicas
    than the fewest help only by their links, and only up to the number of prefill replicas.
    """

    def fewest_prefill(decode: int) -> int:
        return _fewest(lambda number: feasible(RolePair(number, decode)), most)

    least_prefill = fewest_prefill(most)
    best: RolePair | None = None
    for decode in range(_fewest(lambda number: feasible(RolePair(most, number)), most), most + 1):
        if best is not None and (decode > best.prefill or price(RolePair(least_prefill, decode)) >= price(best)):
            break
        found = RolePair(fewest_prefill(decode), decode)
        if found.prefill <= most and (best is None or price(found) < price(best)):
            best = found
    return best


def _fewest(suffices: Callable[[int], bool], most: int) -> int:
    """Return the smallest number that suffices, or `most` + 1 if none does."""
    low, high = 1, most + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle + 1, high)
    return low


def _chosen(pools: RolePools, workload: PlannedWorkload, slo: Slo, pair: RolePair, prices: Prices) -> Chosen:
    load = workload.offered
    no_tpot, no_ttft = (msgspec.structs.replace(slo, **{limit: None}) for limit in ("tpot_ms", "ttft_ms"))
    return Chosen(
        prefill=_role(pair.prefill, workload, lambda each: pools.predict_prefill(each, pair), no_tpot, "TTFT"),
        decode=_role(pair.decode, workload, lambda each: pools.predict_decode(each, pair), no_ttft, "TPOT"),
        latencies=pools.predict(load, pair),
        link_utilization=pools.link_utilization(load, pair),
        cost=cost_of(prices.of(pair), workload) if prices.is_money else None,
    )


def _role(
    replicas: int, workload: PlannedWorkload, predict: Callable[[OfferedLoad], Prediction], slo: Slo, latency: str
) -> Role:
    """Return what `replicas` serve; `latency` names the one that the SLO limits."""
    capacity = highest_rate(lambda rate: meets(predict(workload.at(rate).offered), slo))
    limit = predict(workload.at(capacity * _BEYOND).offered).limit or latency
    return Role(replicas, capacity / replicas, workload.requests_per_s / capacity, limit)
