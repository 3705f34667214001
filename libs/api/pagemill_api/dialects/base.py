"""The interface of dialects: from a client's body to engine requests, and from tokens and text to the client's bytes.

Dialects, their bodies and renderers derive from the three classes here. What most of them do not need is no abstract
method: it has a default.

`registry` lists the implementations. They neither open sockets nor sample tokens; `pagemill_engine.output` decides on
the order of events (which chunk when), the routes transport the bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pagemill_api.answers.events import Event
from pagemill_api.dialects.transport import NO_REQUEST, RequestInfo, Transport
from pagemill_api.openai.logprobs import CollectedLogprobs, PositionLogprobs
from pagemill_api.openai.schemas import SamplingFields
from pagemill_api.openai.unknown_fields import COLLECTED, UnknownFields
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.json_pieces import JsonRows
from pagemill_protocol.request.answer_format import ParserSettings
from pagemill_protocol.request.generate import FinishReason, GenerateRequest, Usage
from pagemill_protocol.request.pooling import check_task
from pagemill_protocol.request.sampling import MAX_ANSWER_VALUES, SamplingParams

if TYPE_CHECKING:
    from pagemill_api.text.tokenizer import Tokenizer


class PromptReport(NamedTuple):
    """The report on the prompt that the client asked for: once per choice, in a stream with its first piece."""

    token_ids: Sequence[int] | None = None
    """`None`: not asked for."""
    logprobs: JsonRows | None = None
    """`prompt_logprobs`: by token id for each token, null for the first; `None`: not asked for."""
    echoed: CollectedLogprobs | None = None
    """Log probabilities of the echoed prompt, in the dialect's shape; `None`: not asked for."""


class Piece(NamedTuple):
    """The part of one choice of a streamed answer that one engine output adds."""

    choice: int
    """The client's index of the choice."""
    text: str
    is_first: bool
    """Whether this is the first piece of its choice."""
    finish_reason: FinishReason | None
    positions: Sequence[PositionLogprobs] | None
    """Log probabilities of the piece's tokens; `None` if the client did not ask for them."""
    usage: Usage | None
    """Tokens so far, for clients that ask for usage in every chunk."""
    events: Sequence[Event] | None = None
    """Reasoning, content and calls that `text` adds; `None`: the request has no answer format."""
    calls_are_complete: bool = False
    """Whether the choice has tool calls so far, and all of them have ended."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the choice, or None."""
    token_ids: Sequence[int] | None = None
    """Tokens that no earlier piece had; `None` if the client did not ask for them."""
    prompt: PromptReport = PromptReport()


class FinishedChoice(NamedTuple):
    """One choice of an answer that is not streamed. Fields as in `Piece`; `text` is the whole text."""

    choice: int
    text: str
    finish_reason: FinishReason
    logprobs: CollectedLogprobs | None = None
    """Log probabilities of its tokens, from `collector`; `None` if the client did not ask for them."""
    events: Sequence[Event] | None = None
    stop_reason: str | int | None = None
    token_ids: Sequence[int] | None = None
    prompt: PromptReport = PromptReport()
    first_token_s: float = 0.0
    """Seconds from the request's arrival in the engine to its first output."""
    pooled: bytes = b""
    """In place of text: the vector or score of the prompt, float32, little-endian."""


class ChoiceEnd(NamedTuple):
    finish_reason: FinishReason
    stop_reason: str | int | None
    """As `Piece.stop_reason`."""


class AnswerRenderer(ABC):
    """Renders one answer. Chunks are complete events, as `Dialect.transport` defines them."""

    num_events = 0
    """The number of events of the stream so far, where the dialect numbers them."""

    @abstractmethod
    def resume(self, choice: int, events: Sequence[Event], end: ChoiceEnd | None) -> None:
        """Restore the state of a choice whose stream another engine began and of which it delivered `events`.

        Called before any other method. `end`: how the choice ended, if it has.
        """

    @abstractmethod
    def chunk(self, piece: Piece) -> bytes: ...

    @abstractmethod
    def end(self, usage: Usage) -> bytes:
        """Return the bytes after the last chunk of all choices."""

    @abstractmethod
    def body(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes | list[bytes]:
        """Return the body of an answer that is not streamed, or its pieces, of which one may occur several times."""

    def failure(self, error: PagemillError) -> bytes | None:
        """Return the event that ends the stream with an error, or None for the dialect's `error_event`."""
        return None

    def collected_logprobs(self, of_prompt: bool) -> CollectedLogprobs | None:
        """Return what collects the log probabilities of one choice of a body, or of the echoed prompt; None: the
        dialect shows none."""
        return None


class Preparation(NamedTuple):
    """Values that the server adds to a client's body."""

    max_model_len: int
    """0: not known; the engine checks the length."""
    request_id: str
    created_unix_s: int
    cache_salt: str = ""
    parsers: ParserSettings = ParserSettings()
    """The deployment's parsers of answers."""
    max_answer_values: int = MAX_ANSWER_VALUES
    """Most values of an answer that is not streamed (`generate.check_answer`)."""


class ParsedBody(ABC):
    """A checked body, ready for `sampling`, then `prepare`."""

    fields: SamplingFields
    """The fields that all generating dialects share: model, priority, stream and sampling."""
    renders: bool
    """Whether `prepare` runs a chat template: then `render_inline` may render it without a thread."""
    unknown_fields: Sequence[str] = ()
    """The client's names of fields that no schema has; set by `parsed`."""

    @abstractmethod
    def prompt_texts(self, max_chars: int) -> list[str]:
        """Return the beginning of each prompt, for routing by prompt."""

    @abstractmethod
    def sampling(self, defaults: Mapping[str, Any] = {}) -> SamplingParams:
        """Return the sampling parameters, checked as far as possible without a model. Raises `PagemillError` 400.

        `defaults`: those of the model (`TokenizerBundle.sampling_defaults`), once it is known.
        """

    def check_kind(self, tokenizer: Tokenizer) -> None:
        """Refuse a body for text at a model that pools, and the reverse. Raises `PagemillError` 400."""
        check_task(None, tokenizer.bundle.pooling)

    def check_form(self) -> None:  # noqa: B027
        """Refuse a form of answers that cannot be compiled. Blocks while it is compiled. Raises `PagemillError` 400."""

    async def render_inline(self, tokenizer: Tokenizer, parsers: ParserSettings) -> str | None:
        """Render the prompt of a short body on the event loop, or return None: then `prepare` renders it."""
        return None

    @abstractmethod
    def prepare(
        self, tokenizer: Tokenizer, preparation: Preparation, sampling: SamplingParams, text: str | None
    ) -> list[GenerateRequest]:
        """Return one request per prompt, in order. Raises `PagemillError` 400.

        `sampling` and `text`: results of the methods above.
        """

    def unread_fields(self, tokenizer: Tokenizer, parsers: ParserSettings) -> list[str]:
        """Return the client's names of fields that only chat templates read, and the model's does not.

        It may render the chat again, so call it where `prepare` is called.
        """
        return []


def parsed(dialect: Dialect, raw: bytes, info: RequestInfo = NO_REQUEST) -> ParsedBody:
    """Parse a body like the dialect, and remember which of its fields nothing reads. Raises `PagemillError` 400."""
    found = UnknownFields()
    token = COLLECTED.set(found)
    try:
        body = dialect.parse(raw, info)
    finally:
        COLLECTED.reset(token)
    if found.by_schema or found.placed:
        body.unknown_fields = found.names()
    return body


def unread_fields(body: ParsedBody, tokenizer: Tokenizer, parsers: ParserSettings) -> list[str]:
    """Return the client's names of all fields without effect, of a body from `parsed`."""
    names = body.unread_fields(tokenizer, parsers)
    return sorted({*names, *body.unknown_fields}) if body.unknown_fields else names


class Dialect(ABC):
    name: str
    """Value of `GenerateRequest.dialect`."""
    path: str
    """The route, for example `/v1/chat/completions`; may have parameters, written as in Starlette."""
    alias_paths: tuple[str, ...] = ()
    """Further routes."""
    transport: Transport
    operation: str
    """`gen_ai.operation.name` of traces (OpenTelemetry semantic conventions)."""
    prompt_field: str
    """The field that errors about the prompt name."""

    @abstractmethod
    def new_request_id(self) -> str: ...

    @abstractmethod
    def parse(self, raw: bytes, info: RequestInfo = NO_REQUEST) -> ParsedBody:
        """Parse and check a body. Raises `PagemillError` 400."""

    @abstractmethod
    def renderer(self, request: GenerateRequest, system_fingerprint: str | None) -> AnswerRenderer: ...

    @abstractmethod
    def error_body(self, error: PagemillError) -> bytes: ...

    @abstractmethod
    def error_event(self, error: PagemillError) -> bytes:
        """Return the event that ends a broken stream."""

    def numbered_error_event(self, error: PagemillError, num_events: int, request: GenerateRequest | None) -> bytes:
        """Return the event that ends a broken stream after `num_events` events, where the dialect numbers them.

        `request`: None before it was prepared.
        """
        return self.error_event(error)

    @abstractmethod
    def merged_end(self, request: GenerateRequest, usage: Usage) -> bytes:
        """Return the end of a stream that merges the answers of several prompts; `request`: the first of them."""

    @abstractmethod
    def merge_bodies(self, bodies: Sequence[bytes]) -> bytes | Iterator[bytes]:
        """Return one body made of the bodies of several prompts, which need not be in order, or an iterator over its
        pieces. Each piece takes little time, so that an event loop can do other work between two of them.
        """


Factory = Callable[[], Dialect]
