"""Further choices of one prompt (n > 1): they wait for the first and then share its KV.

The first choice, the leader, computes the prompt; when all but the prompt's last token is there, the held ones fork
from it. Each computes the last prompt token itself, since its logits are what it samples from. Should the leader end
before that, the next choice takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagemill_engine.scheduler.request import Request


@dataclass(slots=True)
class ChoiceGroup:
    leader: Request
    held: list[Request]


class HeldChoices:
    def __init__(self) -> None:
        self._groups: dict[str, ChoiceGroup] = {}
        self.num_held = 0

    def hold(self, leader: Request, held: list[Request]) -> None:
        if not held:
            return
        self._groups[leader.request_id] = ChoiceGroup(leader, held)
        self.num_held += len(held)

    def forkable(self, leader: Request) -> list[Request]:
        """The choices that may fork from `leader` now; they are held no longer."""
        return self._release(leader) if self.fork_is_due(leader) else []

    def fork_is_due(self, leader: Request) -> bool:
        """Choices wait for `leader`, and all that they share is computed, if only by a step in flight."""
        return leader.num_computed_tokens >= leader.num_prompt_tokens - 1 and leader.request_id in self._groups

    def successor(self, leader: Request) -> Request | None:
        """The leader ended before its prompt was computed: the choice that starts in its place."""
        held = self._release(leader)
        if not held:
            return None
        self.hold(held[0], held[1:])
        return held[0]

    def drop(self, held: Request) -> None:
        """A held choice was aborted."""
        for group in self._groups.values():
            if held in group.held:
                group.held.remove(held)
                self.num_held -= 1
                return

    def _release(self, leader: Request) -> list[Request]:
        group = self._groups.pop(leader.request_id, None)
        if group is None:
            return []
        self.num_held -= len(group.held)
        return group.held
