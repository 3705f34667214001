"""The record of what one answer has delivered so far, with which another engine can continue it.

It has counters and token ids, and no text. The relay notes a frame when the client has got it, so that the journal and
the client's bytes are always equal. All journals share a limited capacity; answers beyond it are served, but cannot be
continued. The relay decides about continuations.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import msgspec

from pagemill_protocol.frames import PartMeta
from pagemill_protocol.request.continuing import can_be_continued
from pagemill_protocol.request.generate import ChoiceResume, FinishReason, FrameMeta, GenerateRequest
from pagemill_protocol.shares import SharedLimit

LARGEST_TOKEN_ID = 2**31 - 1
ROOM_TOKENS = 64


class JournalGap(Exception):
    """A token is missing or repeated in the frames, so the engine's answer is invalid."""


class JournalCapacity:
    """The number of tokens that all journals of a process may have together, of which each tenant has a share."""

    def __init__(self, max_tokens: int) -> None:
        self._tokens = SharedLimit(max_tokens)

    @property
    def num_tokens(self) -> int:
        return self._tokens.used

    def take(self, tenant: str, num_tokens: int) -> bool:
        """Take capacity for tokens. Return whether there was enough."""
        return self._tokens.take(tenant, num_tokens)

    def release(self, tenant: str, num_tokens: int) -> None:
        self._tokens.release(tenant, num_tokens)


@dataclass(slots=True)
class _ChoiceProgress:
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    num_text_chars: int = 0
    num_events: int = 0
    finish_reason: FinishReason | None = None


class Journal:
    """The journal of one `GenerateRequest`. `close` it when the answer is over."""

    def __init__(self, request: GenerateRequest, capacity: JournalCapacity, tenant: str = "") -> None:
        """`tenant` has the request, and its share of `capacity`."""
        self._tenant = tenant
        self._request = request
        self._capacity = capacity
        self._choices: dict[int, _ChoiceProgress] = {}
        self._first = request.prompt_index * request.sampling.n
        self._cached_tokens: int | None = None
        self._num_taken = self._num_spare = 0
        """The tokens of `capacity` that are taken, and those of them that are not used."""
        self._keeps = can_be_continued(request)
        self.num_tokens = 0
        """The delivered tokens of all choices, whether or not they are kept."""
        self.weights_digest = ""
        """The weights of the engine that sent the first tokens; only the same weights can continue."""

    @property
    def can_continue(self) -> bool:
        """Whether an engine with the same weights can continue the answer."""
        return self._keeps and bool(self._choices) and bool(self.weights_digest)

    @property
    def num_kept(self) -> int:
        return sum(len(choice.token_ids) for choice in self._choices.values())

    def note(self, meta: FrameMeta, weights_digest: str) -> None:
        """Note a frame that the client has got."""
        if meta.last or not (meta.token_ids or meta.finish_reason):
            return
        self.num_tokens += len(meta.token_ids)
        if not self._keeps:
            return
        self._num_spare -= len(meta.token_ids)
        if not weights_digest or (self._num_spare < 0 and not self._take_more()):
            self.close()
            return
        choice = self._choices.get(meta.choice)
        if choice is None:
            choice = self._choices[meta.choice] = _ChoiceProgress()
        choice.token_ids.extend(meta.token_ids)
        choice.num_text_chars = meta.num_text_chars
        choice.num_events = meta.num_events
        choice.finish_reason = meta.finish_reason
        self.weights_digest = weights_digest
        if self._cached_tokens is None and meta.choice == self._first:
            self._cached_tokens = meta.cached_tokens

    def check(self, metas: list[FrameMeta]) -> None:
        """Raise `JournalGap` unless these frames follow the noted ones. Positions of 0 are not checked.

        Parts of a large payload carry nothing before their end, which has the fields of the frame.
        """
        positions: dict[int, int] = {}
        for meta in metas:
            if not meta.last and (not isinstance(meta, PartMeta) or meta.is_end):
                positions[meta.choice] = self.check_next(meta, positions.get(meta.choice))

    def check_next(self, meta: FrameMeta, known: int | None = None) -> int:
        """Check one frame that is not the last, like `check`, and return the tokens of its choice after it.

        `known`: the tokens of the choice before it; by default those that were noted.
        """
        token_ids = meta.token_ids
        for token_id in token_ids:
            if not 0 <= token_id <= LARGEST_TOKEN_ID:
                raise JournalGap("a token id is out of range")
        before = self._choices.get(meta.choice)
        if before is not None:
            if before.finish_reason is not None:
                raise JournalGap(f"choice {meta.choice} goes on after its end")
            if known is None:
                known = len(before.token_ids)
        position = (known or 0) + len(token_ids)
        if meta.position and meta.position != position and self._keeps:
            raise JournalGap(f"choice {meta.choice} is at {meta.position} after {position} tokens")
        return position

    def continuation(self) -> GenerateRequest:
        """Return the request for the rest of the answer, or the original request if nothing can be continued."""
        if not self.can_continue:
            return self._request
        resume = [
            ChoiceResume(
                index,
                choice.token_ids.tolist(),
                choice.num_text_chars,
                choice.finish_reason is not None,
                choice.finish_reason,
                choice.num_events,
            )
            for index, choice in sorted(self._choices.items())
        ]
        return msgspec.structs.replace(
            self._request, resume=resume, weights_digest=self.weights_digest, cached_tokens=self._cached_tokens
        )

    def begin_anew(self) -> None:
        """Forget all tokens, because the answer is restarted."""
        self._forget()
        self.num_tokens = 0

    def close(self) -> None:
        self._forget()
        self._keeps = False

    def _take_more(self) -> bool:
        """Take capacity for the tokens that have none, and for further frames. Return whether there was enough."""
        for wanted in (max(ROOM_TOKENS, -self._num_spare), -self._num_spare):
            if self._capacity.take(self._tenant, wanted):
                self._num_taken += wanted
                self._num_spare += wanted
                return True
        return False

    def _forget(self) -> None:
        self._capacity.release(self._tenant, self._num_taken)
        self._num_taken = self._num_spare = 0
        self._choices.clear()
        self._cached_tokens = None
        self.weights_digest = ""
