"""OpenAI's Responses API (`POST /v1/responses`): a chat of items, and an answer of items.

The dialect stores nothing. A gateway that stores responses makes a `StoredResponsesDialect` for each request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import PrivateAttr
from pydantic_core import PydanticCustomError

from pagemill_api.dialects.base import Preparation
from pagemill_api.dialects.openai_responses import render
from pagemill_api.dialects.openai_responses.items import Item
from pagemill_api.dialects.openai_responses.request import (
    InputTokensRequest,
    ItemFields,
    ResponsesRequest,
    Translation,
)
from pagemill_api.dialects.translation import Renamed, TranslatedChat, TranslatedDialect, as_request
from pagemill_api.dialects.transport import NO_REQUEST, RequestInfo
from pagemill_api.openai.chat_form import writes_json
from pagemill_api.openai.chat_format import chat_format
from pagemill_api.openai.parse import from_refusal, parse_body
from pagemill_api.openai.schemas import ChatCompletionRequest, ChatMessage, TokenizeRequest
from pagemill_api.structural_tags import Format
from pagemill_protocol.errors import PagemillError, error_body, invalid_field
from pagemill_protocol.ids import new_id
from pagemill_protocol.request.answer_format import ParserSettings
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from pagemill_api.text.tokenizer import Tokenizer

RENAMED = (
    (".function.", "."),
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("verbosity", "text.verbosity"),
)
_Attempt = Callable[[list[ChatMessage]], list[GenerateRequest] | PagemillError]
CONTEXT_EXCEEDED = "context_length_exceeded"


class ResponsesDialect(TranslatedDialect):
    name = "responses"
    path = "/v1/responses"
    prompt_field = "input"
    error_body = staticmethod(error_body)
    error_event = staticmethod(render.error_event)

    def new_request_id(self) -> str:
        return f"resp_{new_id()}"

    def parse(self, raw: bytes, info: RequestInfo = NO_REQUEST) -> ResponsesBody:
        request = parse_body(raw, ResponsesRequest)
        for name in ("previous_response_id", "conversation"):
            if getattr(request, name) is not None:
                raise invalid_field(
                    name,
                    f"`{name}` is not supported here: responses are not stored. Gateways whose settings have "
                    "`stored_responses` store them. Send the whole conversation as `input`.",
                    code="unsupported_parameter",
                )
        if request.background:
            raise invalid_field(
                "background",
                "`background` is not supported here: responses are not stored. Gateways whose settings have "
                "`stored_responses` store them. Wait for the answer, or stream it.",
                code="unsupported_parameter",
            )
        return translated(request)

    def numbered_error_event(self, error: PagemillError, num_events: int, request: GenerateRequest | None) -> bytes:
        if request is None or not num_events:
            return render.error_event(error, num_events)
        renderer = render.ResponsesRenderer(request)
        renderer.num_events = num_events
        return renderer.failure(error)

    def renderer(self, request: GenerateRequest, system_fingerprint: str | None) -> render.ResponsesRenderer:
        return render.ResponsesRenderer(request)


class StoredResponsesDialect(ResponsesDialect):
    """The dialect of one request to a gateway that stores responses."""

    def __init__(self, before: Sequence[Item] = (), *, may_store: bool = True) -> None:
        """Make the dialect. `before`: items of the previous response, including its input. `may_store`: false where
        only a connection keeps responses."""
        self._before = before
        self._may_store = may_store
        self.in_background = False
        """Whether the client does not wait for the answer."""
        self.stores = False
        """Whether the answer is to be stored; set once the body is parsed."""
        self.input: list[Item] = []
        """All items from which the answer is generated."""

    def parse(self, raw: bytes, info: RequestInfo = NO_REQUEST) -> ResponsesBody:
        request = parse_body(raw, ResponsesRequest)
        self.stores, self.in_background = request.store and self._may_store, request.background
        self.input = [*self._before, *request.input]
        return translated(request, self._before, stored=self.stores)


class ItemsChat(ChatCompletionRequest):
    _forms: dict[str, Format] = PrivateAttr(default_factory=dict)

    @property
    def call_forms(self) -> Mapping[str, Format]:
        return self._forms

    @property
    def keeps_logprobs(self) -> bool:
        return self.logprobs

    @property
    def max_tokens_field(self) -> str:
        return "max_output_tokens"


class ResponsesBody(TranslatedChat):
    """A body as a chat, of which `unread_fields` also names the fields, items and tools without effect."""

    def __init__(self, chat: ItemsChat, request: ResponsesRequest, found: Translation, shown: str) -> None:
        super().__init__(chat, ResponsesDialect.name, client_names(found), shown)
        self._request = request
        self._found = found

    @property
    def shown(self) -> dict[str, Any]:
        """The fields of the request that a response repeats."""
        found: dict[str, Any] = orjson.loads(self._added["client_fields"])
        return {name: value for name, value in found.items() if name not in (render.CLIENT_TOOLS, render.INCLUDE)}

    def unread_fields(self, tokenizer: Tokenizer, parsers: ParserSettings) -> list[str]:
        found = super().unread_fields(tokenizer, parsers)
        grammars = self._grammars_without_effect(tokenizer, parsers)
        unread = {*found, *self._request.unread, *self._found.messages.unread, *grammars}
        return sorted(unread) + self._ignored_tools()

    def _grammars_without_effect(self, tokenizer: Tokenizer, parsers: ParserSettings) -> list[str]:
        """Return the grammars of custom tools, if the model does not write arguments as JSON."""
        places = [f"{each.place}.format" for each in self._found.functions if each.arguments is not None]
        return places if places and not writes_json(chat_format(self.fields, tokenizer, parsers).syntax) else []

    def _ignored_tools(self) -> list[str]:
        return [f"{place} ({kind})" for place, kind in self._request.ignored_tools.items()]

    def prepare(
        self, tokenizer: Tokenizer, preparation: Preparation, sampling: SamplingParams, text: str | None
    ) -> list[GenerateRequest]:
        if ignored := self._request.ignored_tools:
            if preparation.parsers.hosted_tools == "refuse":
                place, kind = next(iter(ignored.items()))
                raise invalid_field(
                    f"{place}.type",
                    f'Tools of type "{kind}" do not run here, and the setting `hosted_tools` refuses them. Remove it.',
                    code="unsupported_parameter",
                )
            logger.info(
                "request %s: left out are tools of type %s", preparation.request_id, ", ".join(ignored.values())
            )
        if self._request.truncation == "disabled":
            return super().prepare(tokenizer, preparation, sampling, text)
        try:
            return super().prepare(tokenizer, preparation, sampling, text)
        except PagemillError as error:
            if error.code != CONTEXT_EXCEEDED:
                raise
        return self._shortened(tokenizer, preparation, sampling)

    def _shortened(
        self, tokenizer: Tokenizer, preparation: Preparation, sampling: SamplingParams
    ) -> list[GenerateRequest]:
        """Prepare the chat without as few of its oldest messages as possible. Raises as for the shortest one."""
        whole = self.fields

        def attempt(messages: list[ChatMessage]) -> list[GenerateRequest] | PagemillError:
            self.fields = whole.model_copy(update={"messages": messages})
            try:
                return super(ResponsesBody, self).prepare(tokenizer, preparation, sampling, None)
            except PagemillError as error:
                if error.code != CONTEXT_EXCEEDED:
                    raise
                return error
            finally:
                self.fields = whole

        return _oldest_dropped(whole.messages, self._found.num_instructions, attempt)


def client_names(found: Translation) -> tuple[Renamed, ...]:
    return (found.renamed, *RENAMED, ("messages", "input"))


def _oldest_dropped(messages: Sequence[ChatMessage], num_instructions: int, attempt: _Attempt) -> list[GenerateRequest]:
    """Return the requests for the longest end of the conversation that fits.

    The first `num_instructions` messages and further ones of the system stay. An end does not begin with a tool's
    output, whose call would be missing. `attempt` returns the error of messages that are too long; that of the shortest
    end is raised.
    """
    kept = num_instructions
    while kept < len(messages) - 1 and messages[kept].role in ("system", "developer"):
        kept += 1
    starts = [at for at in range(kept + 1, len(messages)) if messages[at].role != "tool"]
    low, high = 0, len(starts) - 1
    best: list[GenerateRequest] | None = None
    error: PagemillError | None = None
    while low <= high:
        middle = (low + high) // 2
        found = attempt([*messages[:kept], *messages[starts[middle] :]])
        if isinstance(found, PagemillError):
            error, low = found, middle + 1
        else:
            best, high = found, middle - 1
    if best is not None:
        return best
    if error is None:  # there is nothing to leave out
        found = attempt(list(messages))
        assert isinstance(found, PagemillError)
        error = found
    raise error


def translated(request: ResponsesRequest, before: Sequence[Item] = (), *, stored: bool = False) -> ResponsesBody:
    """Return the body as a chat. Raises `PagemillError` 400."""
    found, chat = chat_of(request, before)
    chat._forms.update((each.name, form) for each in found.functions if (form := each.arguments) is not None)
    shown = request.shown(stored=stored)
    special = {each.name: [*each.tool] for each in found.functions if not each.is_plain}
    shown |= {
        name: value for name, value in ((render.CLIENT_TOOLS, special), (render.INCLUDE, request.include)) if value
    }
    return ResponsesBody(chat, request, found, orjson.dumps(shown).decode())


def read_count(raw: bytes) -> TokenizeRequest:
    """Return the prompt to count of a body of `POST /v1/responses/input_tokens`. Raises `PagemillError` 400."""
    request = parse_body(raw, InputTokensRequest)
    found, chat = chat_of(request)
    given = {"model": chat.model, "messages": found.chat["messages"], "tools": chat.prompt_tools}
    variables = {"chat_template_kwargs": chat.template_kwargs}
    return as_request(lambda: given | variables, client_names(found), TokenizeRequest)


def chat_of(
    request: ItemFields, before: Sequence[Item] = (), asks: dict[str, Any] | None = None
) -> tuple[Translation, ItemsChat]:
    """Return the chat of a request, after the items `before`. `asks`: a message after all of its own.

    Raises `PagemillError` 400.
    """
    try:
        found = request.translated(before)
    except PydanticCustomError as error:
        raise from_refusal(error) from None
    given = found.chat if asks is None else {**found.chat, "messages": [*found.chat["messages"], asks]}
    return found, as_request(lambda: given, client_names(found), ItemsChat)
