"""Predicts latencies if some replicas only compute prompts (prefill) and the others only decode.

Both are the autoscaler's prediction, with steps that have prompts only or decodes only. In addition, the keys and
values of each prompt pass over a link to a decode replica; a request's first token counts from their arrival. `roles`
chooses the numbers of replicas.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from pagemill.planning.forecast import IDLE_RPS, PlannedWorkload, predictor_of
from pagemill.planning.replica import PlannedReplica
from pagemill.planning.users import Users, answer_s, asking_at, steady
from pagemill_operator.autoscaler.settings import Slo
from pagemill_protocol.report.prediction import OfferedLoad, Prediction, waits_s


class RolePair(NamedTuple):
    """The number of replicas of each role."""

    prefill: int
    decode: int


class RolePools:
    """Predicts latencies at the SLO's percentile for any numbers of replicas of the two roles."""

    def __init__(self, prefill: PlannedReplica, decode: PlannedReplica, slo: Slo, gbit_per_s: float) -> None:
        """`gbit_per_s`: speed of the link of each replica. Raises `PlanError` if step times are unknown."""
        self._prefill = predictor_of(prefill, slo)
        self._decode = predictor_of(decode, slo)
        self._share = slo.share
        self._kv_bytes_per_token = prefill.kv_bytes_per_token
        self._bytes_per_s = gbit_per_s * 1e9 / 8

    def transfer_bytes(self, load: OfferedLoad) -> float:
        """Return the size of a prompt's keys and values. Cached tokens are transferred too."""
        return load.prompt_tokens * self._kv_bytes_per_token

    def transfer_s(self, load: OfferedLoad) -> float:
        """Return the time that a prompt's keys and values take on an idle link."""
        return self.transfer_bytes(load) / self._bytes_per_s

    def link_utilization(self, load: OfferedLoad, pair: RolePair) -> float:
        """Return the utilization of the busier end's links."""
        return _rate_of_busier_end(load, pair) * self.transfer_s(load)

    def predict(self, load: OfferedLoad, pair: RolePair) -> Prediction:
        """Predict the latencies of requests, which pass through both roles."""
        prefill, decode = self.predict_prefill(load, pair), self.predict_decode(load, pair)
        return Prediction(prefill.ttft_ms, decode.tpot_ms, prefill.limit or decode.limit)

    def predict_prefill(self, load: OfferedLoad, pair: RolePair) -> Prediction:
        """Predict the time until the keys and values of a prompt are at a decode replica; the time per token is 0."""
        transfer_s = self.transfer_s(load)
        wait_s, high_wait_s = waits_s(_rate_of_busier_end(load, pair), transfer_s, self._share)
        if not math.isfinite(wait_s):
            return Prediction(math.inf, math.inf, "link")
        computed = self._prefill.predict_prefill(load, pair.prefill, transfer_s + wait_s)
        moved_ms = (transfer_s + max(wait_s, high_wait_s)) * 1000
        return msgspec.structs.replace(computed, ttft_ms=computed.ttft_ms + moved_ms)

    def predict_decode(self, load: OfferedLoad, pair: RolePair) -> Prediction:
        """Predict the time per token of decode replicas; the time to first token is 0."""
        return self._decode.predict_decode(load, pair.decode)


def _rate_of_busier_end(load: OfferedLoad, pair: RolePair) -> float:
    """Return the prompts per second on a link of the role with fewer replicas, whose links are busier."""
    return load.requests_per_s / min(pair)


class Loads:
    """Finds the load on given numbers of replicas: a fixed rate, or that of users, who ask more if answers are fast."""

    def __init__(self, means: RolePools, lengths: PlannedWorkload, users: Users | None) -> None:
        """`means`: predicts means; without `users`, `lengths` has the rate."""
        self._means = means
        self._lengths = lengths
        self._users = users

    def at(self, pair: RolePair) -> PlannedWorkload | None:
        """Return the load; `None` if users saturate the replicas."""
        if self._users is None:
            return self._lengths
        found = steady(self._users, lambda rate: self._answer_s(rate, pair))
        return None if found is None else self._of(self._users, found.requests_per_s)

    def at_most(self) -> PlannedWorkload:
        """Return the load if every answer were as fast as on idle replicas: the upper bound."""
        if self._users is None:
            return self._lengths
        cycle_s = self._users.think_s + self._answer_s(0.0, RolePair(1, 1))
        return self._of(self._users, self._users.num_users / cycle_s)

    def _answer_s(self, rate: float, pair: RolePair) -> float:
        load = self._lengths.at(max(rate, IDLE_RPS)).offered
        return answer_s(self._means.predict(load, pair), self._lengths.output_tokens)

    def _of(self, users: Users, rate: float) -> PlannedWorkload:
        asking = asking_at(users, rate)
        return self._lengths._replace(requests_per_s=rate, users=users, answering=asking.answering)
