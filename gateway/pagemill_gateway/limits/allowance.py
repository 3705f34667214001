"""The tokens that the engine requests of one client request may generate, reserved in parts while they run.

`limiter` reserves the first part, `relay.growth` reserves more in time, and engines end an answer at its allowance.
`joint` counts the use. Tokens are counted as engines report them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from pagemill_protocol.request.continuing import PROGRESS_TOKENS, can_be_continued
from pagemill_protocol.request.generate import FrameMeta, GenerateRequest

MARGIN_TOKENS = 128
"""An allowance is low when a sequence has fewer tokens left: a second or more of generation, in which more is reserved.
"""
LEAST_GROWTH_TOKENS = 256


class TokenNeed(NamedTuple):
    """The tokens that each sequence of one engine request needs."""

    request: GenerateRequest
    first: int
    """The tokens to reserve at first."""
    most: int
    """The tokens that it can use at most."""


class Reserved:
    """The tokens of one reservation: the spare ones, which no engine request may use yet, and the allowances."""

    def __init__(
        self,
        extend: Callable[[int, int], Awaitable[int]],
        num_prompt_tokens: int,
        granted: int,
        needs: Sequence[TokenNeed],
    ) -> None:
        """`granted` tokens were reserved: the prompts and at least one token for each sequence.

        `extend(used, tokens)` reserves up to `tokens` more, and returns how many.
        """
        self._extend = extend
        self._num_prompt_tokens = num_prompt_tokens
        self._spare = granted - num_prompt_tokens
        share = self._spare // sum(need.request.sampling.num_sequences for need in needs)
        self.allowances = [Allowance(self, need, min(need.first, share)) for need in needs]
        self._spare -= sum(each.num_sequences * each.tokens for each in self.allowances)

    @property
    def used(self) -> int:
        return self._num_prompt_tokens + sum(each.num_generated for each in self.allowances)

    @property
    def ended_answer(self) -> bool:
        """Whether a limit ended a sequence that could have continued."""
        return any(each.ended_answer for each in self.allowances)

    @property
    def num_possible(self) -> int:
        """The upper bound of the tokens that engines have generated, reported or not."""
        return sum(each.num_possible for each in self.allowances)

    async def take(self, wanted: int) -> int:
        """Take up to `wanted` tokens, and return how many. Raises `PagemillError` if they cannot be counted."""
        own = min(self._spare, wanted)  # negative after an answer was restarted
        if own < wanted:
            self._spare -= own
            try:
                self._spare += own + await self._extend(self.used, wanted - own)
            except BaseException:
                self._spare += own
                raise
        taken = max(0, min(self._spare, wanted))
        self._spare -= taken
        return taken

    def release(self, tokens: int) -> None:
        self._spare += tokens

    def close(self) -> None:
        """Break the reference cycle with the allowances after the request, which spares the garbage collector work."""
        self.allowances = []


class Allowance:
    """The number of tokens that each sequence of one engine request may generate."""

    def __init__(self, reserved: Reserved, need: TokenNeed, tokens: int) -> None:
        self.tokens = tokens
        self.num_sequences = need.request.sampling.num_sequences
        self.ended_answer = False
        self._reserved = reserved
        self._most = need.most
        self._is_reported = can_be_continued(need.request)
        """Whether the engine reports its progress while it runs; otherwise only at the end."""
        self._num_unreported = 0 if need.request.stream else PROGRESS_TOKENS - 1
        self._began = False
        self._running: dict[int, int] = {}
        """The generated tokens of each running sequence that has some."""
        self._finished: dict[int, int] = {}

    @property
    def num_generated(self) -> int:
        """The reported tokens."""
        return sum(self._running.values()) + sum(self._finished.values())

    @property
    def num_possible(self) -> int:
        """The upper bound of the tokens that the engine has generated."""
        if not self._began:
            return 0
        if not self._is_reported:
            return self.num_sequences * self.tokens
        counts = [*self._running.values(), *[0] * (self._num_running - len(self._running))]
        return sum(self._finished.values()) + sum(min(self.tokens, each + self._num_unreported) for each in counts)

    @property
    def low(self) -> bool:
        """Whether it is time to reserve more."""
        if self.tokens >= self._most or not self._is_reported or not self._num_running:
            return False
        return self.tokens - max(self._running.values(), default=0) < MARGIN_TOKENS

    @property
    def _num_running(self) -> int:
        return self.num_sequences - len(self._finished)

    def begin(self) -> int:
        """Note that an engine gets the request or its continuation. Return the allowance of each sequence."""
        self._began = True
        return self.tokens

    def begin_anew(self) -> None:
        """Discard what was generated, because the answer is restarted."""
        self._reserved.release(sum(self._finished.values()) - len(self._finished) * self.tokens)
        self._running.clear()
        self._finished.clear()

    def count(self, meta: FrameMeta) -> bool:
        """Count the tokens of a frame. Return whether few reserved tokens are left."""
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
            self._reserved.release(self.tokens - count)
        self.ended_answer = self.ended_answer or (meta.finish_reason == "length" and self.tokens < self._most)
        return self.low

    async def grow(self) -> bool:
        """Reserve more tokens, as far as the limits allow. Return whether there were any. Raises `PagemillError`."""
        each = min(self._most - self.tokens, max(LEAST_GROWTH_TOKENS, self.tokens // 2))
        taken = await self._reserved.take(each * self._num_running)
        # Sequences may have ended during the reservation.
        each = min(each, taken // self._num_running) if self._num_running else 0
        self._reserved.release(taken - each * self._num_running)
        self.tokens += each
        return each > 0
