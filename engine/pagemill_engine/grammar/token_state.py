"""What the scheduler asks about a sequence whose tokens are prescribed in part: by a form, by a budget of reasoning."""

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
        """A bit for each token that may follow; `None`: any may."""
        ...

    @property
    def due(self) -> GrammarState | None:
        """Whose mask has to be computed, and may be beside the step: `masks.begin_masks`."""
        ...

    @property
    def ended(self) -> bool:
        """No text may follow."""
        ...

    @property
    def is_free(self) -> bool:
        """It prescribes nothing any more."""
        ...

    @property
    def forced(self) -> Sequence[int]:
        """The next tokens where nothing else may follow, one after the other; empty: there is a choice, or it costs too
        much to find out."""
        ...

    def advance(self, token_id: int) -> str:
        """Take the next token. Returns what is wrong with it; empty: nothing."""
        ...


class TokenStates(Protocol):
    """What one request prescribes; every sequence has a state of its own."""

    def state(self, token_ids: Sequence[int], *, keeps_on: bool) -> TokenState:
        """After these tokens of an answer. `keeps_on`: no end-of-sequence token while anything else may follow. Raises
        `PagemillError` if they do not fit."""
        ...
