"""Where a request goes among many pods at the cost of some array operations: the default policy and the room check.

The same formulas as `pagemill_gateway.routing.cost` with `routing.cost_terms`, and
`pagemill_gateway.brain.endpoints.record`, over all pods at once; the tests hold them against those. What of a formula
depends on the pod alone is worked out when the pod changes, not when it is asked. Pods are alike: one engine
configuration, one law of step times. What a pod has not reported yet is added to its report.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from pagemill_engine.scheduler.limits import SchedulerLimits
from pagemill_gateway.admission.reservations import Need, Reservations
from pagemill_gateway.routing.cost import NEAR_MS, NEAR_SHARE
from pagemill_gateway.routing.cost_terms import HARM_SHARE
from pagemill_gateway.routing.policy import Candidate, RequestView, RoutingPolicy
from pagemill_simulator.fleet.fast_pod import PodLoad
from pagemill_simulator.fleet.fast_policies import choose_by, report_of
from pagemill_simulator.fleet.fast_steps import StepTimes

_PLENTY = 1 << 60
_REQUEST_BITS = 40
_CHUNK = 64
"""Slots that are added at once."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_NONE_CACHED: Mapping[int, int] = {}
_NOTHING = PodLoad(0, 0, 0, 0, 0, 0)


class PodTable:
    """What the gateway knows of every pod, by slot."""

    def __init__(self, limits: SchedulerLimits, steps: StepTimes) -> None:
        self._limits = limits
        self._steps = steps
        self._decode_context_ms = 1000 * steps.decode_context_s
        self._chunk_context_ms = 1000 * steps.chunk_context_s
        self._base_ms: Floats = np.array(steps.base_ms)
        self._free: list[int] = []
        self._num_decisions = 0
        self._loads: list[PodLoad] = []
        """As reported, with what is not reported yet."""
        self._reports: list[PodLoad] = []
        self._reserved: list[Reservations] = []
        self._num_slots = 0
        # By slot: what a pod's load means to every request that is weighed.
        self._closed: Floats = np.zeros(0)
        """0; infinite: no requests any more."""
        self._num_ahead: Ints = np.zeros(0, np.int64)
        """Tokens that wait there."""
        self._num_running: Ints = np.zeros(0, np.int64)
        self._budget: Ints = np.zeros(0, np.int64)
        self._full_ms: Floats = np.zeros(0)
        self._fixed_ms: Floats = np.zeros(0)
        """Of the cost, what no request changes: the step that runs, and the contexts of the last one."""
        self._harm_ms: Floats = np.zeros(0)
        """By the token."""
        self._seat_ms: Floats = np.zeros(0)
        """Until a seat is free, by the token of an answer."""
        self._num_blocks: Ints = np.zeros(0, np.int64)
        """Free or evictable."""
        self._block_ms: Floats = np.zeros(0)
        """Until another one is free, by the token of an answer; 0: none is held."""
        self._num_roomy_tokens: Ints = np.zeros(0, np.int64)
        """Prompts of fewer tokens wait for no block."""
        self._busyness: Ints = np.zeros(0, np.int64)
        """Requests there, then the number of the decision that chose it last."""

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
        self._weigh(slot, load.plus(num_unreported, num_unreported_tokens))

    def _weigh(self, slot: int, load: PodLoad) -> None:
        limits, steps = self._limits, self._steps
        num_running, ahead = load.num_running, load.num_tokens_waiting
        base_ms = steps.base_ms
        budget = max(1, limits.max_num_batched_tokens - num_running)
        context_ms = self._decode_context_ms * load.num_tokens_running
        # As `pace_of` and `standing_of` work them out.
        decode_ms = base_ms[num_running + 1] + context_ms
        full_ms = base_ms[num_running + budget] + context_ms
        step_ms = 0.0
        if num_running or ahead:
            step_ms = full_ms if ahead >= budget else base_ms[num_running + ahead] + context_ms
        products_ms = self._chunk_context_ms * (ahead * ahead / 2)
        token_ms = max(0.0, full_ms - decode_ms) / budget
        num_over = num_running + load.num_waiting + 1 - limits.max_num_seqs
        self._loads[slot] = load
        self._num_ahead[slot] = ahead
        self._num_running[slot] = num_running
        self._budget[slot] = budget
        self._full_ms[slot] = full_ms
        self._fixed_ms[slot] = step_ms + context_ms + products_ms
        self._harm_ms[slot] = HARM_SHARE * num_running * token_ms
        self._seat_ms[slot] = num_over * decode_ms / limits.max_num_seqs if num_over > 0 else 0.0
        self._num_blocks[slot] = load.num_blocks_available
        active = load.num_blocks_active
        self._block_ms[slot] = decode_ms / active if active else 0.0
        # Where no block is held none is waited for.
        num_roomy_tokens = load.num_blocks_available * limits.block_size - ahead
        self._num_roomy_tokens[slot] = num_roomy_tokens if active else _PLENTY

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
        self._weigh(slot, self._loads[slot].plus(1, need.num_uncached_tokens))
        return self._num_decisions

    def computed(self, slot: int, num_uncached_tokens: int) -> None:
        """The first token of a request is here, before a report counts it."""
        self._weigh(slot, self._loads[slot].plus(-1, -num_uncached_tokens))

    def release(self, slot: int, decision: int) -> None:
        """It is over there."""
        self._reserved[slot].release(decision)
        self._busyness[slot] -= 1 << _REQUEST_BITS

    def _candidate(self, slot: int, num_cached_tokens: int) -> Candidate:
        report, load = self._reports[slot], self._loads[slot]
        num_requests, last_chosen = divmod(int(self._busyness[slot]), 1 << _REQUEST_BITS)
        return Candidate(
            endpoint_id=str(slot),
            in_flight=num_requests,
            external=0,
            last_chosen=last_chosen,
            report=report_of(report, self._limits, self._steps.model),
            believed=True,
            num_cached_tokens=num_cached_tokens,
            num_unreported=load.num_waiting - report.num_waiting,
            num_unreported_tokens=load.num_tokens_waiting - report.num_tokens_waiting,
        )

    def _grow(self) -> None:
        first = self._num_slots
        self._num_slots = first + _CHUNK
        self._free += range(self._num_slots - 1, first - 1, -1)
        self._loads += [_NOTHING] * _CHUNK
        self._reports += [_NOTHING] * _CHUNK
        self._reserved += [Reservations()] * _CHUNK
        for name in ("_closed", "_full_ms", "_fixed_ms", "_harm_ms", "_seat_ms", "_block_ms"):
            setattr(self, name, np.append(getattr(self, name), np.zeros(_CHUNK)))
        for name in ("_num_ahead", "_num_running", "_budget", "_num_blocks", "_num_roomy_tokens", "_busyness"):
            setattr(self, name, np.append(getattr(self, name), np.ones(_CHUNK, np.int64)))
        self._closed[first:] = np.inf

    def _best(self, costs: Floats) -> int | None:
        best = costs.min()
        if best == np.inf:
            return None
        near = np.flatnonzero(costs <= best + max(NEAR_MS, best * NEAR_SHARE))
        return int(near[self._busyness[near].argmin()])

    def _costs(self, num_prompt_tokens: int, mean_output_tokens: float, cached: Mapping[int, int]) -> Floats:
        """As `expected`, time to the first token and harm."""
        uncached: int | Ints = max(1, num_prompt_tokens)
        halves: float | Floats = num_prompt_tokens * num_prompt_tokens / 2
        if cached:
            uncached, halves = self._uncached(num_prompt_tokens, cached)
        ahead = self._num_ahead
        work = ahead + uncached
        num_full, rest = np.divmod(work - 1, self._budget)
        costs: Floats = self._base_ms[self._num_running + (rest + 1)]
        costs += num_full * self._full_ms
        costs += self._fixed_ms
        costs += self._harm_ms * (uncached + mean_output_tokens)
        costs += self._chunk_context_ms * halves
        costs += self._closed
        return costs + self._wait_ms(uncached, work, mean_output_tokens)

    def _wait_ms(self, uncached: int | Ints, work: Ints, mean_output_tokens: float) -> Floats:
        wait_ms: Floats = self._seat_ms * mean_output_tokens
        if (uncached >= self._num_roomy_tokens).any():
            missing = np.maximum(work // self._limits.block_size + 1 - self._num_blocks, 0)
            wait_ms = np.maximum(wait_ms, missing * self._block_ms * mean_output_tokens)
        return wait_ms

    def _uncached(self, num_prompt_tokens: int, cached: Mapping[int, int]) -> tuple[Ints, Floats]:
        """Tokens to compute, and their products with contexts."""
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
        return min(limits.num_blocks, need.num_blocks(limits.block_size)) <= self._blocks_left(slot)

    def _blocks_left(self, slot: int) -> int:
        report, reserved = self._reports[slot], self._reserved[slot]
        num_to_come, num_seen = 0, reserved.num_seen_sequences
        if num_seen:
            share = min(1.0, num_seen / max(1, report.num_running + report.num_waiting))
            num_there = int(share * (report.num_tokens_running + report.num_tokens_waiting))
            num_to_come = max(0, reserved.num_seen_prompt_tokens + reserved.num_seen_output_tokens - num_there)
        num_growing_blocks = -(-(num_to_come + report.num_tokens_waiting) // self._limits.block_size) + num_seen
        return report.num_blocks_available - reserved.num_unseen_blocks - num_growing_blocks

    def _roomy(self, need: Need, cached: Mapping[int, int]) -> NDArray[np.bool_]:
        fits = [self.fits(slot, need.with_cached(cached.get(slot, 0))) for slot in range(self._num_slots)]
        return np.array(fits)
