"""The interface of proposers: what probably follows a sequence's tokens.

A proposal costs time in a step and never changes an answer: the model samples after every proposed token, and the
sequence keeps what it would have sampled without. `acceptance` learns how likely proposals are right, `gain` chooses
how many are made, and `scheduler.proposals` asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pagemill_engine.proposing.acceptance import Acceptance


class Proposer(Protocol):
    """Proposes tokens for one sequence."""

    agreement: int
    """Tokens before its last proposal that agree with the text that it was taken from: what the chances are learned
    by. 0 where nothing of that kind is known."""

    def propose(self, most: int) -> list[int]:
        """Return at most `most` tokens that may follow the sequence's, in order; empty if none are likely."""
        ...


ProposerOf = Callable[[list[int]], Proposer]
"""Returns the proposer of a sequence. Its argument is the sequence's own list of tokens, prompt and output, to which
tokens are appended."""


@dataclass(slots=True)
class ProposalSource:
    """One proposer of a sequence, and how often it was right."""

    proposer: Proposer
    acceptance: Acceptance


@dataclass(slots=True)
class Proposing:
    """What is known about the proposals of one sequence; `scheduler.proposals` changes it."""

    sources: Sequence[ProposalSource]
    """The first one that proposes something is followed."""
    source: ProposalSource | None = None
    """The source of the last proposal, whose tokens were not compared with the sequence's so far."""
    token_ids: list[int] = field(default_factory=list)
    """The last proposal."""
    start: int = 0
    """Index of its first token in the sequence."""
    agreement: int = 0
    token_ms: float = 0.0
    """Milliseconds that a token took without proposals in the step that verifies the last ones."""
