"""Which of our requests one pod has, and which of them its last report cannot count yet.

A report names no request, so the count decides: when it shows fewer sequences than are there (ours, and those from
elsewhere), the newest of ours are the missing ones. Time would not tell: a heartbeat of an engine in the middle of a
long step repeats what was true before the step.
"""

from __future__ import annotations

from typing import NamedTuple

EXPIRY_S = 2.0
"""A prefix or adapter that a request brings to its pod is expected there for this long after its first token.

By then its prompt was computed, and the pod has sent many reports."""


class Dispatch(NamedTuple):
    """One request as it was sent to the pod."""

    num_uncached_tokens: int
    num_sequences: int = 1
    num_cached_tokens: int = 0


class Dispatches:
    def __init__(self) -> None:
        self._open: dict[int, Dispatch] = {}
        """By decision, oldest first."""
        self._uncomputed: dict[int, Dispatch] = {}
        """Those without a token so far."""
        self._unreported: dict[int, Dispatch] = {}
        self.num_unreported_tokens = 0
        """Uncached prompt tokens of requests that the last report does not count."""
        self.num_uncomputed_tokens = 0
        """The same of all our requests without a token so far: what is known without any report."""

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def decisions(self) -> frozenset[int]:
        return frozenset(self._open)

    @property
    def uncomputed(self) -> frozenset[int]:
        """Decisions of those without a token so far."""
        return frozenset(self._uncomputed)

    @property
    def num_unreported(self) -> int:
        return len(self._unreported)

    def unreported(self) -> list[tuple[int, Dispatch]]:
        """With their decisions, oldest first."""
        return list(reversed(self._unreported.items()))

    def waiting(self, num_waiting: int) -> list[Dispatch] | None:
        """The newest of this many sequences that the report counts as waiting, oldest first; `None`: there are not as
        many.
        """
        rows: list[Dispatch] = []
        if num_waiting <= 0:
            return rows
        for decision, each in reversed(self._open.items()):
            if decision in self._unreported:
                continue
            rows.append(each)
            num_waiting -= each.num_sequences
            if num_waiting <= 0:
                return rows[::-1]
        return None

    @property
    def num_uncomputed(self) -> int:
        return len(self._uncomputed)

    def num_answers(self, decision: int) -> int:
        """Its running sequences: all once its first token is here, before that none."""
        dispatch = self._open.get(decision)
        return dispatch.num_sequences if dispatch is not None and decision not in self._uncomputed else 0

    def sent(self, decision: int, dispatch: Dispatch) -> None:
        self._open[decision] = self._uncomputed[decision] = self._unreported[decision] = dispatch
        self.num_unreported_tokens += dispatch.num_uncached_tokens
        self.num_uncomputed_tokens += dispatch.num_uncached_tokens

    def computed(self, decision: int) -> None:
        """Its first token is here: its prompt is computed."""
        dispatch = self._uncomputed.pop(decision, None)
        if dispatch is not None:
            self.num_uncomputed_tokens -= dispatch.num_uncached_tokens
        self._leave_unreported(decision)

    def ended(self, decision: int) -> None:
        self.computed(decision)
        self._open.pop(decision, None)

    def reported(self, num_missing: int) -> None:
        """A report that lacks this many of the sequences that are there."""
        if num_missing <= 0 and not self._unreported:
            return
        self._unreported = {}
        for decision, each in reversed(self._open.items()):
            if num_missing <= 0:
                break
            num_missing -= each.num_sequences
            if decision in self._uncomputed:
                self._unreported[decision] = each
        self.num_unreported_tokens = sum(each.num_uncached_tokens for each in self._unreported.values())

    def _leave_unreported(self, decision: int) -> None:
        dispatch = self._unreported.pop(decision, None)
        if dispatch is not None:
            self.num_unreported_tokens -= dispatch.num_uncached_tokens
