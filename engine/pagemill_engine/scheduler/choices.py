"""Further choices of one prompt (n > 1), which wait for the first choice and then share its KV.

The first choice, the leader, computes the prompt. When all but the prompt's last token is computed, the held choices
fork from it. Each computes the last prompt token itself, because it samples from that token's logits. If the leader
ends earlier, the next choice becomes the leader.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagemill_engine.scheduler.sequence import Sequence


@dataclass(slots=True)
class ChoiceGroup:
    leader: Sequence
    held: list[Sequence]


class WaitingChoices:
    def __init__(self) -> None:
        self._groups: dict[str, ChoiceGroup] = {}
        self.num_waiting = 0

    def add(self, leader: Sequence, held: list[Sequence]) -> None:
        if not held:
            return
        leader.reuse_points += (leader.num_prompt_tokens - 1,)
        self._groups[leader.request_id] = ChoiceGroup(leader, held)
        self.num_waiting += len(held)

    def forkable(self, leader: Sequence) -> list[Sequence]:
        """Release and return the choices that can fork from `leader` now, or an empty list."""
        return self._release(leader) if self.fork_is_due(leader) else []

    def fork_is_due(self, leader: Sequence) -> bool:
        """Whether choices wait for `leader` and a step has computed, or is computing, the tokens they share."""
        return leader.num_computed_tokens >= leader.num_prompt_tokens - 1 and leader.request_id in self._groups

    def successor(self, leader: Sequence) -> Sequence | None:
        """Return the choice that replaces `leader`, which ended before its prompt was computed, or None."""
        held = self._release(leader)
        if not held:
            return None
        self.add(held[0], held[1:])
        return held[0]

    def drop(self, held: Sequence) -> None:
        """Remove a held choice that was aborted."""
        for group in self._groups.values():
            if held in group.held:
                group.held.remove(held)
                self.num_waiting -= 1
                return

    def _release(self, leader: Sequence) -> list[Sequence]:
        group = self._groups.pop(leader.request_id, None)
        if group is None:
            return []
        self.num_waiting -= len(group.held)
        return group.held
