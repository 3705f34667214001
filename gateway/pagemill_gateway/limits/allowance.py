"""Tokens that the engine requests of one client request may generate, reserved a part at a time while they run.

`limiter` reserves the first part, `relay.growth` has it grow in time, and engines end an answer at its allowance. Who
counts is a `Store`. The tokens here are counted as engines report them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pagemill_gateway.limits.store import Ask, More, Store
from pagemill_protocol.continuing import PROGRESS_TOKENS, can_be_continued
from pagemill_protocol.generate import FrameMeta, GenerateRequest

MARGIN_TOKENS = 128
"""An allowance is low when a sequence has fewer left: a second or more of its generation, in which more is reserved."""
LEAST_GROWTH_TOKENS = 256


class Need(NamedTuple):
    """Of one engine request, tokens of each sequence."""

    request: GenerateRequest
    first: int
    """To begin with."""
    most: int
    """That it may ever take."""


class Reserved:
    """The tokens of one reservation: those that no engine request may use yet, and how many are used."""

    def __init__(self, store: Store, ask: Ask, num_prompt_tokens: int, granted: int, needs: Sequence[Need]) -> None:
        """`granted` are those of `ask`, at least one for each sequence besides the prompts."""
        self._store = store
        self._ask = ask
        self._num_prompt_tokens = num_prompt_tokens
        self._spare = granted - num_prompt_tokens
        share = self._spare // ask.sequences
        self.allowances = [Allowance(self, need, min(need.first, share)) for need in needs]
        self._spare -= sum(each.num_sequences * each.tokens for each in self.allowances)

    @property
    def used(self) -> int:
        return self._num_prompt_tokens + sum(each.num_generated for each in self.allowances)

    @property
    def ended_answer(self) -> bool:
        """A limit ended a sequence that might have gone on."""
        return any(each.ended_answer for each in self.allowances)

    @property
    def num_possible(self) -> int:
        """Tokens of answers that engines may have generated, reported or not."""
        return sum(each.num_possible for each in self.allowances)

    async def take(self, wanted: int) -> int:
        """As many of `wanted` as there are. Raises `PagemillError` when the store cannot be asked."""
        own = min(self._spare, wanted)  # below 0 after an answer was begun anew
        if own < wanted:
            more = More(self._ask.account, self._ask.lease, self.used, wanted - own, self._ask.limits)
            self._spare -= own
            try:
                self._spare += own + await self._store.extend(more)
            except BaseException:
                self._spare += own
                raise
        taken = max(0, min(self._spare, wanted))
        self._spare -= taken
        return taken

    def give_back(self, tokens: int) -> None:
        self._spare += tokens

    def close(self) -> None:
        """The request is over, and nothing is asked of this any more: it and its allowances no longer refer to each
        other, so that none of them is left to the garbage collector."""
        self.allowances = []


class Allowance:
    """What each sequence of one engine request may generate."""

    def __init__(self, reserved: Reserved, need: Need, tokens: int) -> None:
        self.tokens = tokens
        self.num_sequences = need.request.sampling.num_sequences
        self.ended_answer = False
        self._reserved = reserved
        self._most = need.most
        self._is_reported = can_be_continued(need.request)
        """Engines say while it runs how far it is; else only at its end."""
        self._num_unreported = 0 if need.request.stream else PROGRESS_TOKENS - 1
        self._began = False
        self._running: dict[int, int] = {}
        """Tokens by sequence, once it has any."""
        self._finished: dict[int, int] = {}

    @property
    def num_generated(self) -> int:
        """As far as reported."""
        return sum(self._running.values()) + sum(self._finished.values())

    @property
    def num_possible(self) -> int:
        """Generated, or possibly so."""
        if not self._began:
            return 0
        if not self._is_reported:
            return self.num_sequences * self.tokens
        counts = [*self._running.values(), *[0] * (self._num_running - len(self._running))]
        return sum(self._finished.values()) + sum(min(self.tokens, each + self._num_unreported) for each in counts)

    @property
    def low(self) -> bool:
        """It is time to reserve more."""
        if self.tokens >= self._most or not self._is_reported or not self._num_running:
            return False
        return self.tokens - max(self._running.values(), default=0) < MARGIN_TOKENS

    @property
    def _num_running(self) -> int:
        return self.num_sequences - len(self._finished)

    def begin(self) -> int:
        """An engine is asked for the answer, or for the rest of it; with this allowance."""
        self._began = True
        return self.tokens

    def begin_anew(self) -> None:
        """What was generated is void."""
        self._reserved.give_back(sum(self._finished.values()) - len(self._finished) * self.tokens)
        self._running.clear()
        self._finished.clear()

    def saw(self, meta: FrameMeta) -> bool:
        """Whether it is low now."""
        choice = meta.choice
        if not meta.last:
            if choice in self._finished:
                return self.low
            count = self._running.get(choice, 0) + len(meta.token_ids)
            if meta.finish_reason is None:
                self._running[choice] = count
                return self.tokens < self._most and self.low
            self._running.pop(choice, None)
            self._finished[choice] = count
            self._reserved.give_back(self.tokens - count)
        self.ended_answer = self.ended_answer or (meta.finish_reason == "length" and self.tokens < self._most)
        return self.low

    async def grow(self) -> bool:
        """Reserve more, as much as is left; whether there was any. Raises `PagemillError`."""
        each = min(self._most - self.tokens, max(LEAST_GROWTH_TOKENS, self.tokens // 2))
        taken = await self._reserved.take(each * self._num_running)
        # Sequences may have ended meanwhile.
        each = min(each, taken // self._num_running) if self._num_running else 0
        self._reserved.give_back(taken - each * self._num_running)
        self.tokens += each
        return each > 0
