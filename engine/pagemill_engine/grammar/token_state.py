"""The scheduler's interface to the token constraints of a sequence: its form and its reasoning budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pagemill_engine.grammar.state import GrammarState


class TokenState(Protocol):
    @property
    def mask(self) -> NDArray[np.int32] | None:
        """Mask of the tokens that may follow, one bit per token; None: any token."""
        ...

    @property
    def due(self) -> GrammarState | None:
        """The grammar state whose mask must be computed and may be computed during the step (`begin_masks`),
        or None."""
        ...

    @property
    def ended(self) -> bool:
        """Whether no text may follow."""
        ...

    @property
    def is_free(self) -> bool:
        """Whether it no longer constrains the sequence."""
        ...

    @property
    def forced(self) -> Sequence[int]:
        """The next tokens, in order, that are certain to follow.

        Empty if there is a choice, or if finding out costs too much.
        """
        ...

    def copy(self) -> TokenState:
        """Return an independent state after the same tokens."""
        ...

    def advance(self, token_id: int) -> str:
        """Take the next token. Returns the fault of a token that does not fit, or ""."""
        ...


class TokenStates(Protocol):
    """The constraints of one request. Every sequence has a state of its own."""

    def state(self, token_ids: Sequence[int], *, forbids_end: bool) -> TokenState:
        """Return the state after these tokens of an answer. Raises `PagemillError` if they do not fit.

        `forbids_end`: whether end-of-sequence tokens are forbidden while any other token may follow.
        """
        ...
