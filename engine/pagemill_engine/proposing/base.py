"""The interface of methods and their proposers: what probably follows a sequence's tokens.

A proposal costs time in a step and never changes an answer: the model samples after every proposed token, and the
sequence keeps what it would have sampled without. `acceptance` learns how likely proposals are right, `gain` chooses
how many are made, and `scheduler.proposals` asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from pagemill_engine.proposing.acceptance import Acceptance


class KnownTokens(Protocol):
    """What proposers read of a sequence."""

    @property
    def token_ids(self) -> list[int]:
        """Its own list of tokens, prompt and output, to which tokens are appended."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def predicted_token_ids(self) -> list[int]:
        """What the client predicts."""
        ...

    @property
    def cache_root(self) -> bytes:
        """Sequences with another one must learn nothing of each other: they are of other tenants or adapters."""
        ...


class Proposer(Protocol):
    """Proposes tokens for one sequence."""

    agreement: int
    """Tokens before its last proposal that agree with the text that it was taken from: what the chances are learned
    by. 0 where nothing of that kind is known."""

    def propose(self, most: int) -> list[int]:
        """Return at most `most` tokens that may follow the sequence's, in order; empty if none are likely."""
        ...


@runtime_checkable
class Method(Protocol):
    """A way to propose tokens, of one engine. A package registers one as `loop.speculation` describes."""

    def begin(self, sequence: KnownTokens) -> Proposer | None:
        """Return the proposer of a sequence, before it is asked first; None: nothing is proposed for it."""
        ...

    def end(self, sequence: KnownTokens) -> None:
        """Take note that a sequence with a proposer has ended."""
        ...


@dataclass(slots=True)
class ProposalSource:
    """One proposer of a sequence, and how often it was right."""

    proposer: Proposer
    acceptance: Acceptance


@dataclass(slots=True)
class Proposing:
    """What is known about the proposals of one sequence; `scheduler.proposals` changes it."""

    sources: Sequence[ProposalSource]
    """The one from which most is expected is followed."""
    source: ProposalSource | None = None
    """The source of the last proposal, whose tokens were not compared with the sequence's so far."""
    token_ids: list[int] = field(default_factory=list)
    """The last proposal."""
    start: int = 0
    """Index of its first token in the sequence."""
    agreement: int = 0
    token_ms: float = 0.0
    """Milliseconds that a token took without proposals in the step that verifies the last ones."""
