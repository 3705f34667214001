"""`best_of`: decides which of several candidates the client gets. Texts are `output.choice`'s part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagemill_engine.ipc.messages import LogprobsOut


class MeanLogprob:
    """The mean log probability of one candidate's tokens under the model."""

    def __init__(self) -> None:
        self._total = 0.0
        self._num_tokens = 0

    def add(self, entries: Iterable[LogprobsOut]) -> None:
        """Add tokens. The caller leaves out overshoot behind a stop string."""
        for entry in entries:
            self._total += entry.logprobs[0]
            self._num_tokens += 1

    @property
    def value(self) -> float:
        return self._total / self._num_tokens if self._num_tokens else float("-inf")


def best(candidates: Sequence[MeanLogprob], n: int) -> list[int]:
    """Return the positions of the `n` most likely candidates, best first; of equal ones the earlier first."""
    return sorted(range(len(candidates)), key=lambda at: -candidates[at].value)[:n]
