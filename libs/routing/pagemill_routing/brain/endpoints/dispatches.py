"""Tracks our requests at one pod, and which of them its latest report does not count yet.

Reports name no requests. If a report shows fewer sequences than the pod has (ours and others), the newest of ours are
taken as missing. The time of a report does not decide, because a heartbeat during a long step repeats the state before
the step.
"""

from __future__ import annotations

import msgspec

EXPIRY_S = 2.0
"""How long after a request's first token the pod is expected to have its prefix or adapter without reporting it.

The pod sends many reports in that time."""


class Dispatch(msgspec.Struct, frozen=True, gc=False):
    """A request that was sent to the pod."""

    num_uncached_tokens: int
    num_sequences: int = 1


class Dispatches:
    def __init__(self) -> None:
        self._open: dict[int, Dispatch] = {}
        """All requests at the pod by decision, oldest first."""
        self._uncomputed: dict[int, Dispatch] = {}
        """The requests without a token."""
        self._unreported: dict[int, Dispatch] = {}
        """The requests that the latest report does not count, newest first after a report."""
        self.num_unreported_tokens = 0
        """Uncached prompt tokens of the requests that the latest report does not count."""
        self.num_uncomputed_tokens = 0
        """Uncached prompt tokens of the requests without a token; known without any report."""

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def decisions(self) -> frozenset[int]:
        return frozenset(self._open)

    @property
    def uncomputed(self) -> frozenset[int]:
        """The decisions of the requests without a token."""
        return frozenset(self._uncomputed)

    @property
    def num_unreported(self) -> int:
        return len(self._unreported)

    @property
    def num_uncomputed(self) -> int:
        return len(self._uncomputed)

    def is_computed(self, decision: int) -> bool:
        """Whether the request is at the pod and has its first token."""
        return decision in self._open and decision not in self._uncomputed

    def sent(self, decision: int, dispatch: Dispatch) -> None:
        self._open[decision] = self._uncomputed[decision] = self._unreported[decision] = dispatch
        self.num_unreported_tokens += dispatch.num_uncached_tokens
        self.num_uncomputed_tokens += dispatch.num_uncached_tokens

    def computed(self, decision: int) -> None:
        """Note the first token of a decision, so its prompt is computed."""
        dispatch = self._uncomputed.pop(decision, None)
        if dispatch is not None:
            self.num_uncomputed_tokens -= dispatch.num_uncached_tokens
        self._leave_unreported(decision)

    def ended(self, decision: int) -> None:
        self.computed(decision)
        self._open.pop(decision, None)

    def reported(self, num_missing: int) -> None:
        """Apply a report that lacks this many of the pod's sequences."""
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
