"""Asks for tokens that may follow a decode, so that one step verifies several, and decides which sequences are asked.

A proposed token is no token of its sequence before the model has sampled it: it counts for the step's budget and
blocks, and nowhere else. A sequence waits for its step in flight only while tokens are proposed for it; without, it
runs ahead as others do. `proposing` has the proposers, `scheduler` schedules and applies proposals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from pagemill_engine.proposing.base import ProposerOf, Proposing
from pagemill_engine.scheduler.sequence import Sequence
from pagemill_engine.scheduler.token_masks import masks_along
from pagemill_protocol.request.sampling import SamplingParams

if TYPE_CHECKING:
    from pagemill_engine.scheduler.restriction import Mask

MOST_PROPOSED = 8
"""Tokens proposed for a sequence in one step."""
MAX_REJECTED = 2
"""Proposals in a row of which no token was sampled, after which a sequence is not asked for some tokens."""
PAUSE_TOKENS = 16


class Proposal(NamedTuple):
    token_ids: list[int]
    masks: list[Mask | None] | None
    """The mask of each token that may be sampled, one more than tokens; None: any token, here and for all."""


class Proposals:
    def __init__(
        self,
        proposer_of: ProposerOf,
        most: int = MOST_PROPOSED,
        *,
        can_verify: Callable[[SamplingParams], bool] = lambda _: True,
    ) -> None:
        """`most`: tokens proposed for a sequence in one step. `can_verify`: whether the runner samples several tokens
        of a request with these parameters in one step."""
        self._proposer_of = proposer_of
        self._most = most
        self._can_verify = can_verify

    def propose(self, sequence: Sequence, most: int) -> Proposal | None:
        """Return at most `most` tokens for a sequence whose newest token is known, or None."""
        # The last token that may be sampled comes after the proposed ones.
        if not self._can_verify(sequence.sampling):
            return None
        most = min(most, self._most, sequence.max_total_tokens - len(sequence.token_ids) - 1)
        proposing = self._of(sequence)
        if most < 1 or len(sequence.token_ids) < proposing.resumes_at:
            proposing.waits = False
            return None
        token_ids, masks = masks_along(sequence, proposing.proposer.propose(most))
        proposing.waits = bool(token_ids)
        return Proposal(token_ids, masks) if token_ids else None

    def judge(self, sequence: Sequence, num_accepted: int) -> None:
        """Record how many tokens of its last proposal a sequence sampled."""
        proposing = self._of(sequence)
        proposing.num_rejected = 0 if num_accepted else proposing.num_rejected + 1
        if proposing.num_rejected == MAX_REJECTED:
            proposing.num_rejected, proposing.waits = 0, False
            proposing.resumes_at = len(sequence.token_ids) + PAUSE_TOKENS

    def look_ahead(self, sequence: Sequence) -> None:
        """Let a sequence wait for its step in flight if something would be proposed behind the tokens that are known
        so far."""
        if not self._can_verify(sequence.sampling):
            return
        proposing = self._of(sequence)
        if sequence.num_pending_tokens and not proposing.waits and len(sequence.token_ids) >= proposing.resumes_at:
            proposing.waits = bool(proposing.proposer.propose(1))

    def _of(self, sequence: Sequence) -> Proposing:
        if sequence.proposing is None:
            sequence.proposing = Proposing(self._proposer_of(sequence.token_ids))
        return sequence.proposing


def may_propose(sequence: Sequence) -> bool:
    """Whether tokens may be proposed for a running sequence: it decodes, and its newest token is known."""
    return (
        not sequence.num_pending_tokens
        and len(sequence.token_ids) - sequence.num_computed_tokens == 1
        and sequence.search is None
        and sequence.pooling is None
        and not sequence.aborted
    )
