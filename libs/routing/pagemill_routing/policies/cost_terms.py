"""Computes the cost of a request on one pod, in milliseconds, by the pod's own step-time model.

The expected TTFT is the sum of the rest of the running step, the wait for a sequence slot or memory, and the steps for
the waiting tokens and the request's uncached ones within the token budget. The harm is the delay of the pod's running
requests by the longer steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from pagemill_protocol.report.cache_kinds import CacheKind, needed_bytes
from pagemill_protocol.report.step_time import StepTimePieces
from pagemill_routing.policies.report import PodReport
from pagemill_routing.policies.step_time_snapshot import StepTimeSnapshot

HARM_SHARE = 0.1
"""The weight of a millisecond of delay of a running answer, relative to one of TTFT."""


class CostTerms(NamedTuple):
    step_ms: float
    """The rest of the step that runs now."""
    wait_ms: float
    """The wait until a sequence slot and the memory are free."""
    prefill_ms: float
    """The steps for the waiting and the uncached tokens."""
    harm_ms: float

    @property
    def ttft_ms(self) -> float:
        """The expected time to the first token."""
        return self.step_ms + self.wait_ms + self.prefill_ms


class CostBasis(msgspec.Struct, frozen=True, gc=False):
    """The part of the cost that depends on the pod alone, computed when its state changes."""

    predict_ms: Callable[[int, int, int], float]
    """The pod's step-time model."""
    num_decode_tokens: int
    """The tokens that the running requests compute in a step."""
    num_context_tokens: int
    num_ahead: int
    """Prompt tokens that are computed before the request, reported or not."""
    ahead_products: float
    budget: int
    full_ms: float
    step_ms: float
    decode_ms: float
    """The time of a token of each running answer."""
    harm_ms: float
    """The harm per token of the request."""
    num_over_capacity: int
    """The number of requests that must end before a sequence slot is free."""
    max_num_seqs: int
    num_tokens_without_wait: float
    """A request waits for memory only with at least this many tokens ahead, its own included."""
    block_size: int
    block_bytes: int
    """The bytes of a block of the cache kinds that keep all blocks."""
    sparse_kinds: tuple[CacheKind, ...]
    """The other kinds, of which each of `num_new` sequences has a limited number of blocks."""
    num_new: int
    """Waiting and unreported requests, and this one."""
    num_bytes_available: int
    num_bytes_active: int
    pieces: StepTimePieces
    """The linear pieces of the step-time model."""


def cost_basis_of(
    report: PodReport, snapshot: StepTimeSnapshot, num_unreported: int, num_unreported_tokens: int
) -> CostBasis:
    """Return the basis. `snapshot` is the pod's own, or with another pod's model if it has reported none."""
    load, budget = report.load, snapshot.budget
    num_running, num_bytes_available = load.num_requests_running, load.num_kv_bytes_total - load.num_kv_bytes_active
    num_ahead = load.num_tokens_waiting + num_unreported_tokens
    num_before = num_running + load.num_requests_waiting + num_unreported
    num_keeping = num_before - load.num_low_priority_requests
    step_ms = 0.0
    if num_running or num_ahead:
        step_ms = snapshot.full_ms if num_ahead >= budget else snapshot.step_ms(num_ahead)
    block_bytes, block_size = report.block_bytes, report.block_size
    waits_for_memory = num_before > 0 and load.num_kv_bytes_active > 0
    return CostBasis(
        snapshot.model.predict_ms,
        snapshot.num_decode_tokens,
        snapshot.num_context_tokens,
        num_ahead,
        num_ahead * num_ahead / 2,
        budget,
        snapshot.full_ms,
        step_ms,
        snapshot.decode_ms / snapshot.model.tokens_per_decode,
        HARM_SHARE * num_running * (max(0.0, snapshot.full_ms - snapshot.decode_ms) / budget),
        num_keeping + 1 - report.max_num_seqs if 0 < report.max_num_seqs <= num_keeping else 0,
        report.max_num_seqs,
        num_bytes_available // max(1, block_bytes) * block_size if waits_for_memory else math.inf,
        block_size,
        block_bytes,
        report.sparse_kinds,
        num_before - num_running + 1,
        num_bytes_available,
        load.num_kv_bytes_active,
        snapshot.model.pieces,
    )


def cost_terms(
    bases: Sequence[CostBasis], cached: Sequence[int], num_prompt_tokens: int, num_output_tokens: float
) -> list[tuple[float, float, float, float]]:
    """Return the four `CostTerms` of each pod, from its basis and its cached tokens.

    It is one loop that makes plain tuples, because every decision computes them for every pod.
    """
    rows = []
    for basis, num_cached in zip(bases, cached, strict=True):
        num_uncached = num_prompt_tokens - num_cached
        if num_uncached < 1:
            num_uncached = 1
        num_rest, wait_ms, prefill_ms = basis.num_ahead + num_uncached, 0.0, 0.0
        # Requests are assumed to end one after the other; each frees a sequence slot and its share of the memory.
        if basis.num_over_capacity:
            wait_ms = basis.num_over_capacity * (num_output_tokens * basis.decode_ms) / basis.max_num_seqs
        if num_rest >= basis.num_tokens_without_wait:
            num_blocks = num_rest // basis.block_size + 1
            num_missing = num_blocks * basis.block_bytes - basis.num_bytes_available
            if basis.sparse_kinds:
                num_missing += needed_bytes(basis.sparse_kinds, num_blocks, basis.num_new, num_rest, basis.block_size)
            wait_ms = max(wait_ms, num_missing * (num_output_tokens * basis.decode_ms) / basis.num_bytes_active)
        if num_rest > basis.budget:
            num_full = (num_rest - 1) // basis.budget
            num_rest -= num_full * basis.budget
            prefill_ms = num_full * basis.full_ms
        products = num_uncached * (num_uncached / 2 + num_cached) + basis.ahead_products
        prefill_ms += basis.predict_ms(basis.num_decode_tokens + num_rest, basis.num_context_tokens, int(products))
        rows.append((basis.step_ms, wait_ms, prefill_ms, basis.harm_ms * (num_uncached + num_output_tokens)))
    return rows
