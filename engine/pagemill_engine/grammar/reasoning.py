"""Ends the reasoning of a sequence at its budget, by forcing the tokens of the end marker.

It reads the tokens' bytes as parsers read the text. A form of the whole answer has a state of its own.
"""

from __future__ import annotations

import codecs
import copy
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemill_api.answers.events import Parser
from pagemill_engine.grammar.token_state import TokenState

if TYPE_CHECKING:
    from pagemill_engine.grammar.state import GrammarState


class ReasoningLimit(NamedTuple):
    max_tokens: int
    """Most tokens between the markers."""
    begin: bytes
    end: bytes
    end_token_ids: Sequence[int]
    is_open: bool
    """Whether the prompt contains `begin` already."""
    token_bytes: Callable[[int], bytes]
    vocab_size: int
    make_parser: Callable[[], Parser] | None = None
    """Makes the parser of the reasoning, which a tool call may end too; `None`: only `end` ends it."""


class LimitedReasoning:
    """`TokenState` of a sequence with a reasoning budget."""

    def __init__(self, limit: ReasoningLimit, form: TokenState | None) -> None:
        self._limit = limit
        self._form = form
        self._next = self._inside if limit.is_open else self._before
        self._read = b""
        """Bytes in which the markers are searched."""
        self._num_tokens = 0
        self._forced: deque[int] = deque()
        self._parser = limit.make_parser() if limit.make_parser is not None else None
        self._utf8_decoder = codecs.getincrementaldecoder("utf-8")("replace")
        if limit.is_open:
            self._check_budget()

    @property
    def mask(self) -> NDArray[np.int32] | None:
        if not self._forced:
            return self._form.mask if self._form is not None else None
        bits = np.zeros(-(-self._limit.vocab_size // 32), dtype=np.int32)
        bits.view(np.uint32)[self._forced[0] // 32] = np.uint32(1 << self._forced[0] % 32)
        return bits

    @property
    def due(self) -> GrammarState | None:
        return self._form.due if self._form is not None and not self._forced else None

    @property
    def forced(self) -> Sequence[int]:
        """Tokens that must follow.

        Before the reasoning is over, a form's tokens are taken one at a time, because the budget may be spent after
        each.
        """
        if self._forced or self._form is None:
            return tuple(self._forced)
        return self._form.forced if self._next == self._after else self._form.forced[:1]

    @property
    def ended(self) -> bool:
        return self._form is not None and self._form.ended

    @property
    def is_free(self) -> bool:
        return self._next == self._after and self._form is None

    def copy(self) -> LimitedReasoning:
        twin = copy.copy(self)
        twin._form = None if self._form is None else self._form.copy()
        twin._next = getattr(twin, self._next.__name__)
        twin._forced = self._forced.copy()
        twin._parser = copy.deepcopy(self._parser)
        twin._utf8_decoder = codecs.getincrementaldecoder("utf-8")("replace")
        twin._utf8_decoder.setstate(self._utf8_decoder.getstate())
        return twin

    def advance(self, token_id: int) -> str:
        fault = self._form.advance(token_id) if self._form is not None else ""
        if fault:
            return fault
        if self._forced:
            return self._take_forced(token_id)
        self._read += self._limit.token_bytes(token_id)
        text = self._utf8_decoder.decode(self._limit.token_bytes(token_id))
        if self._parser is not None and self._next != self._after:
            self._parser.push(text)
        self._next()
        return ""

    def _take_forced(self, token_id: int) -> str:
        if token_id != self._forced.popleft():
            return f"token {token_id} does not end its reasoning, whose budget is spent"
        if not self._forced:
            self._next = self._after
        return ""

    def _before(self) -> None:
        """Look for the begin marker. Reasoning may begin only at the start of the answer."""
        begun = self._read.lstrip()
        if begun.startswith(self._limit.begin):
            self._read = begun.removeprefix(self._limit.begin)
            self._next = self._inside
            self._check_budget()
        elif not self._limit.begin.startswith(begun):
            self._next = self._after

    def _inside(self) -> None:
        if self._limit.end in self._read or (self._parser is not None and not self._parser.in_reasoning):
            self._next = self._after
            return
        self._read = self._read[-len(self._limit.end) :]
        self._num_tokens += 1
        self._check_budget()

    def _check_budget(self) -> None:
        """Force the end marker if the budget is spent and the last character is complete."""
        is_complete = not self._utf8_decoder.getstate()[0]
        if self._num_tokens >= self._limit.max_tokens and is_complete:
            self._forced.extend(self._limit.end_token_ids)

    def _after(self) -> None:
        self._read = b""
