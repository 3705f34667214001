"""The log probabilities of one request's prompt that steps have reported so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pagemill_engine.ipc.messages import LogprobsOut
from pagemill_execution.step import PromptTargets, TokenLogprobs


@dataclass(slots=True, eq=False)
class PromptLogprobs:
    """The prompt report of one client request; its choices share it."""

    num_top: int
    entries: list[LogprobsOut] = field(default_factory=list)
    """Entries that were not sent yet."""
    num_reported: int = 0
    """Number of reported tokens, counted from the prompt's second token."""

    def add(self, targets: PromptTargets, entries: Iterable[TokenLogprobs]) -> None:
        """Add the entries that a step computed. Entries that were reported before are dropped."""
        assert targets.first <= self.num_reported, "a step reports behind tokens that none has reported"
        new = list(entries)[self.num_reported - targets.first :]
        self.entries += [LogprobsOut(each.token_ids, each.logprobs, each.rank) for each in new]
        self.num_reported += len(new)

    def take(self) -> list[LogprobsOut]:
        entries, self.entries = self.entries, []
        return entries
