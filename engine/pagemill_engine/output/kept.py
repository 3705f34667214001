"""The parts of an answer that is not streamed, kept until its end: text, events, and rendered log probabilities.

What is kept is compact, and its size is known, so that the server can bound the memory of all answers. `processor`
decides what belongs to an answer; the dialect's renderer makes the body of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import orjson

from pagemill_api.answers.events import CallArguments, Content, Event, Reasoning
from pagemill_api.dialects.base import AnswerRenderer, PromptReport
from pagemill_api.openai import logprobs
from pagemill_api.openai.logprobs import CollectedLogprobs, PositionLogprobs
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.ipc.messages import LogprobsOut
from pagemill_protocol.json_pieces import JsonRows
from pagemill_protocol.request.generate import GenerateRequest

NUM_LOOSE = 256
"""Number of pieces that are then joined: a string and an event for each token take ten times the text."""
TOKEN_ID_BYTES = 40
"""Memory of one token id in a list."""


class KeptChoice:
    """One choice so far."""

    __slots__ = ("_events", "_joined", "_loose", "_loose_events", "logprobs", "token_ids")

    def __init__(self, collected: CollectedLogprobs | None, with_token_ids: bool) -> None:
        self.logprobs = collected
        self.token_ids: list[int] | None = [] if with_token_ids else None
        """The tokens, if the client asked for them."""
        self._joined: list[str] = []
        self._loose: list[str] = []
        self._events: list[Event] | None = None
        self._loose_events: list[Event] = []

    def add(
        self,
        text: str,
        events: Sequence[Event] | None,
        positions: Sequence[PositionLogprobs],
        token_ids: Sequence[int],
    ) -> int:
        """Add the next part; return how many bytes it takes. `events`: those of `text`, which then is not kept."""
        num_bytes = len(text)
        if events is not None:
            self._events = [] if self._events is None else self._events
            self._loose_events += events
            if len(self._loose_events) >= NUM_LOOSE:
                self._join_events()
        elif text:
            self._loose.append(text)
            if len(self._loose) >= NUM_LOOSE:
                self._joined.append("".join(self._loose))
                self._loose = []
        if positions and self.logprobs is not None:
            before = self.logprobs.num_bytes
            self.logprobs.add(positions)
            num_bytes += self.logprobs.num_bytes - before
        if self.token_ids is not None:
            self.token_ids += token_ids
            num_bytes += TOKEN_ID_BYTES * len(token_ids)
        return num_bytes

    @property
    def text(self) -> str:
        """The whole text; empty where the answer has events."""
        return "".join([*self._joined, *self._loose])

    @property
    def events(self) -> list[Event] | None:
        """The events of the whole text; None without an answer format."""
        self._join_events()
        return self._events

    def _join_events(self) -> None:
        loose, self._loose_events = self._loose_events, []
        if self._events is not None:
            self._events += _merged(loose)


def _merged(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events with texts that follow each other joined."""
    for (kind, call), group in groupby(events, lambda event: (type(event), getattr(event, "call", 0))):
        if kind is CallArguments:
            yield CallArguments("".join(each.text for each in group if isinstance(each, CallArguments)), call)
        elif kind is Content:
            yield Content("".join(each.text for each in group if isinstance(each, Content)))
        elif kind is Reasoning:
            yield Reasoning("".join(each.text for each in group if isinstance(each, Reasoning)))
        else:
            yield from group


class ReportedPrompt:
    """What an answer says about its prompt: rendered once, however many choices repeat it."""

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer, renderer: AnswerRenderer) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._entries: JsonRows | None = None
        self._echoed: CollectedLogprobs | None = None
        if request.sampling.prompt_logprobs is not None:
            self._entries = JsonRows()
            self._entries.add(b"null")
        if request.prompt_text is not None and request.sampling.num_alternatives is not None:
            self._echoed = renderer.collected_logprobs(of_prompt=True)
            self._offsets = logprobs.PromptOffsets(tokenizer, request.prompt_text)
            if self._echoed is not None:
                self._offsets.next(request.prompt_token_ids[0])
                self._echoed.add([logprobs.first_of_prompt(tokenizer, request.prompt_token_ids[0])])

    @property
    def _num_bytes(self) -> int:
        return sum(each.num_bytes for each in (self._entries, self._echoed) if each is not None)

    def add(self, entries: Sequence[LogprobsOut]) -> int:
        """Render the log probabilities of the prompt's next tokens; return how many bytes they take."""
        before = self._num_bytes
        tokenizer, sampling = self._tokenizer, self._request.sampling
        if self._entries is not None:
            num_top = sampling.prompt_logprobs or 0
            for each in entries:
                found = logprobs.by_token_id(tokenizer, each.token_ids, each.logprobs, each.rank, num_top)
                self._entries.add(orjson.dumps(found))
        if self._echoed is not None:
            num_top = sampling.logprobs or 0
            for each in entries:
                offset = self._offsets.next(each.token_ids[0])
                self._echoed.add([logprobs.position(tokenizer, each.token_ids, each.logprobs, num_top, offset)])
        return self._num_bytes - before

    def report(self) -> PromptReport:
        token_ids = self._request.prompt_token_ids if self._request.return_token_ids else None
        return PromptReport(token_ids, self._entries, self._echoed)
