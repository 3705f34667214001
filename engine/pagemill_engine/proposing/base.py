"""The interface of proposers: what probably follows a sequence's tokens.

A proposal costs time in a step and never changes an answer: the model samples after every proposed token, and the
sequence keeps what it would have sampled without. `scheduler.proposals` asks for proposals, and cuts and judges them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Proposer(Protocol):
    """Proposes tokens for one sequence."""

    def propose(self, most: int) -> list[int]:
        """Return at most `most` tokens that may follow the sequence's, in order; empty if none are likely."""
        ...


ProposerOf = Callable[[list[int]], Proposer]
"""Returns the proposer of a sequence. Its argument is the sequence's own list of tokens, prompt and output, to which
tokens are appended."""


@dataclass(slots=True)
class Proposing:
    """What is known about the proposals of one sequence; `scheduler.proposals` changes it."""

    proposer: Proposer
    waits: bool = False
    """Whether the sequence waits for its step in flight, because something will be proposed behind it."""
    num_rejected: int = 0
    """Proposals in a row of which no token was sampled."""
    resumes_at: int = 0
    """Number of tokens from which on it is asked again."""
