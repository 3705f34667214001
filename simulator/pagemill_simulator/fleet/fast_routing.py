"""Where a request goes among many pods at the cost of some array operations: the default policy and the room check.

What a cost takes from the pod alone is the gateway's own `CostBasis`, worked out when the pod changes; the rest is
`routing.cost_terms` over all pods at once, operation by operation in the same order, so that every cost has the same
bits and a tie there is a tie here. The room check asks `brain.endpoints.record` for the blocks. Pods are alike: one
engine configuration, one model of step times. What a pod has not reported yet is added to its report.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from pagemill_engine.scheduler.limits import SchedulerLimits
from pagemill_gateway.admission.reservations import Need, Reservations
from pagemill_gateway.brain.endpoints.record import num_blocks_left
from pagemill_gateway.routing.cost import NEAR_MS, NEAR_SHARE
from pagemill_gateway.routing.cost_terms import cost_basis_of
from pagemill_gateway.routing.policy import Candidate, RequestView, RoutingPolicy
from pagemill_simulator.fleet.fast_pod import PodLoad
from pagemill_simulator.fleet.fast_policies import choose_by, load_of, report_of
from pagemill_simulator.fleet.fast_steps import StepTimes

_REQUEST_BITS = 40
_CHUNK = 64
"""Slots that are added at once."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_NONE_CACHED: Mapping[int, int] = {}
_NOTHING = PodLoad(0, 0, 0, 0, 0, 0)


_FLOATS = (
    "ahead_products",
    "full_ms",
    "step_ms",
    "decode_ms",
    "harm_ms",
    "num_tokens_without_wait",
    "num_over_capacity",
)
_INTS = ("num_running", "num_ahead", "budget", "num_blocks_available", "num_blocks_active")
_float_fields, _int_fields = attrgetter(*_FLOATS), attrgetter(*_INTS)


class PodTable:
    """What the gateway knows of every pod, by slot."""

    def __init__(self, limits: SchedulerLimits, steps: StepTimes) -> None:
        self._limits = limits
        self._steps = steps
        params = steps.model.params()
        self._decode_context_ms = params.decode_context_ms
        self._chunk_context_ms = params.chunk_context_ms
        self._base_ms: Floats = np.array(steps.base_ms)
        self._free: list[int] = []
        self._num_decisions = 0
        self._reports: list[PodLoad] = []
        self._unreported: list[tuple[int, int]] = []
        """Requests that a report does not count, and tokens of theirs to compute."""
        self._reserved: list[Reservations] = []
        self._num_slots = 0
        self._closed: Floats = np.zeros(0)
        """By slot. 0; infinite: no requests any more."""
        self._context_ms: Floats = np.zeros(0)
        """By slot: of a step, for the contexts of the running requests."""
        self._floats: Floats = np.zeros((len(_FLOATS), 0))
        """Fields of each pod's `CostBasis`, by field and slot."""
        self._ints: Ints = np.ones((len(_INTS), 0), np.int64)
        """The others."""
        self._busyness: Ints = np.zeros(0, np.int64)
        """By slot: requests there, then the number of the decision that chose it last."""

    def open(self, load: PodLoad) -> int:
        """A pod takes requests from now on; its slot."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._closed[slot] = 0.0
        self._busyness[slot] = 0
        self._reserved[slot] = Reservations()
        self.observe(slot, load)
        return slot

    def close(self, slot: int) -> None:
        """It takes no more."""
        self._closed[slot] = np.inf

    def forget(self, slot: int) -> None:
        """Nothing of it is left."""
        self.close(slot)
        self._free.append(slot)

    def reserved(self, slot: int) -> Reservations:
        return self._reserved[slot]

    def observe(self, slot: int, load: PodLoad, num_unreported: int = 0, num_unreported_tokens: int = 0) -> None:
        """The pod's report, and what it does not count."""
        self._reports[slot] = load
        self._weigh(slot, num_unreported, num_unreported_tokens)

    def _weigh(self, slot: int, num_unreported: int, num_unreported_tokens: int) -> None:
        self._unreported[slot] = num_unreported, num_unreported_tokens
        report = report_of(self._reports[slot], self._limits, self._steps.model)
        assert report.step_time is not None
        basis = cost_basis_of(report, report.step_time, num_unreported, num_unreported_tokens)
        self._floats[:, slot] = _float_fields(basis)
        self._ints[:, slot] = _int_fields(basis)
        self._context_ms[slot] = self._decode_context_ms * basis.num_context_tokens

    # -- decisions -----------------------------------------------------------------------------------------------

    def choose(
        self, num_prompt_tokens: int, mean_output_tokens: float, need: Need, cached: Mapping[int, int] = _NONE_CACHED
    ) -> int | None:
        """The slot of the pod where the request costs least, of those with room if that one has none; None: no room.

        `cached`: tokens of the prompt that a pod has, by slot.
        """
        if not self._num_slots:
            return None
        costs = self._costs(num_prompt_tokens, mean_output_tokens, cached)
        slot = self._best(costs)
        if slot is None or self.fits(slot, need.with_cached(cached.get(slot, 0))):
            return slot
        # Rarely are pods full, so only now all are looked at.
        return self._best(np.where(self._roomy(need, cached), costs, np.inf))

    def choose_by(
        self, policy: RoutingPolicy, view: RequestView, need: Need, cached: Mapping[int, int] = _NONE_CACHED
    ) -> int | None:
        """As `choose`, by another policy."""
        candidates = {
            slot: self._candidate(slot, cached.get(slot, 0))
            for slot in range(self._num_slots)
            if self._closed[slot] == 0.0
        }
        return choose_by(policy, view, candidates, lambda slot: self.fits(slot, need.with_cached(cached.get(slot, 0))))

    def account(self, slot: int, need: Need) -> int:
        """It goes there, and no report counts it yet. Returns the number of the decision."""
        self._num_decisions += 1
        reserved = self._reserved[slot]
        reserved.reserve(self._num_decisions, need, self._limits.block_size)
        self._busyness[slot] = (reserved.num_sequences << _REQUEST_BITS) + self._num_decisions
        self._add_unreported(slot, 1, need.num_uncached_tokens)
        return self._num_decisions

    def computed(self, slot: int, num_uncached_tokens: int) -> None:
        """The first token of a request is here, before a report counts it."""
        self._add_unreported(slot, -1, -num_uncached_tokens)

    def _add_unreported(self, slot: int, num_requests: int, num_tokens: int) -> None:
        num_before, num_tokens_before = self._unreported[slot]
        self._weigh(slot, num_before + num_requests, num_tokens_before + num_tokens)

    def release(self, slot: int, decision: int) -> None:
        """It is over there."""
        self._reserved[slot].release(decision)
        self._busyness[slot] -= 1 << _REQUEST_BITS

    def _candidate(self, slot: int, num_cached_tokens: int) -> Candidate:
        num_unreported, num_unreported_tokens = self._unreported[slot]
        num_requests, last_chosen = divmod(int(self._busyness[slot]), 1 << _REQUEST_BITS)
        return Candidate(
            endpoint_id=str(slot),
            in_flight=num_requests,
            external=0,
            last_chosen=last_chosen,
            report=report_of(self._reports[slot], self._limits, self._steps.model),
            believed=True,
            num_cached_tokens=num_cached_tokens,
            num_unreported=num_unreported,
            num_unreported_tokens=num_unreported_tokens,
        )

    def _grow(self) -> None:
        first = self._num_slots
        self._num_slots = first + _CHUNK
        self._free += range(self._num_slots - 1, first - 1, -1)
        self._reports += [_NOTHING] * _CHUNK
        self._unreported += [(0, 0)] * _CHUNK
        self._reserved += [Reservations()] * _CHUNK
        self._closed = np.append(self._closed, np.full(_CHUNK, np.inf))
        self._context_ms = np.append(self._context_ms, np.zeros(_CHUNK))
        self._busyness = np.append(self._busyness, np.zeros(_CHUNK, np.int64))
        self._floats = np.append(self._floats, np.zeros((len(_FLOATS), _CHUNK)), axis=1)
        # Of a slot that never had a pod: something to divide by.
        self._ints = np.append(self._ints, np.ones((len(_INTS), _CHUNK), np.int64), axis=1)

    def _best(self, costs: Floats) -> int | None:
        best = costs.min()
        if best == np.inf:
            return None
        near = np.flatnonzero(costs <= best + max(NEAR_MS, best * NEAR_SHARE))
        return int(near[self._busyness[near].argmin()])

    def _costs(self, num_prompt_tokens: int, mean_output_tokens: float, cached: Mapping[int, int]) -> Floats:
        """As `routing.cost` adds up what `routing.cost_terms` finds."""
        ahead_products, full_ms, step_ms, decode_ms, harm_ms, num_tokens_without_wait, num_over_capacity = self._floats
        num_running, num_ahead, budget, num_blocks_available, num_blocks_active = self._ints
        uncached, own_products = self._uncached(num_prompt_tokens, cached)
        work = num_ahead + uncached
        answer_ms = mean_output_tokens * decode_ms
        wait_ms = num_over_capacity * answer_ms / self._limits.max_num_seqs
        waits = work >= num_tokens_without_wait
        if waits.any():
            num_missing = work // self._limits.block_size + 1 - num_blocks_available
            blocks_ms = np.divide(num_missing * answer_ms, num_blocks_active, out=np.zeros_like(wait_ms), where=waits)
            wait_ms = np.where(waits, np.maximum(wait_ms, blocks_ms), wait_ms)
        num_full, rest = np.divmod(work - 1, budget)
        last_ms = self._base_ms[num_running + (rest + 1)] + self._context_ms
        last_ms += self._chunk_context_ms * np.floor(own_products + ahead_products)
        prefill_ms = num_full * full_ms + last_ms
        costs: Floats = step_ms + wait_ms + prefill_ms + harm_ms * (uncached + mean_output_tokens)
        costs += self._closed
        return costs

    def _uncached(self, num_prompt_tokens: int, cached: Mapping[int, int]) -> tuple[int | Ints, float | Floats]:
        """Tokens to compute, and their products with contexts."""
        if not cached:
            num_uncached = max(1, num_prompt_tokens)
            return num_uncached, num_uncached * (num_uncached / 2)
        there = np.zeros(self._num_slots, np.int64)
        for slot, num_tokens in cached.items():
            there[slot] = num_tokens
        uncached = np.maximum(1, num_prompt_tokens - there)
        return uncached, uncached * (uncached / 2 + there)

    # -- room ----------------------------------------------------------------------------------------------------

    def fits(self, slot: int, need: Need) -> bool:
        """As `has_room`."""
        limits, reserved = self._limits, self._reserved[slot]
        if self._closed[slot]:
            return False
        if not reserved.num_sequences:
            return True
        if reserved.num_sequences + 1 > limits.max_num_seqs:
            return False
        wanted = min(limits.num_blocks, need.num_blocks(limits.block_size))
        return wanted <= num_blocks_left(load_of(self._reports[slot], limits), reserved, limits.block_size)

    def _roomy(self, need: Need, cached: Mapping[int, int]) -> NDArray[np.bool_]:
        fits = [self.fits(slot, need.with_cached(cached.get(slot, 0))) for slot in range(self._num_slots)]
        return np.array(fits)
