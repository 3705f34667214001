"""OpenAI's `POST /v1/responses/compact`: a conversation becomes one item, which takes its place in later requests.

The model summarizes the conversation; the item contains the summary, so that nothing is stored (`opaque`). `items`
reads it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import orjson
from pydantic import ConfigDict

from pagemill_api.answers.events import Content, Event
from pagemill_api.dialects.base import AnswerRenderer, ChoiceEnd, FinishedChoice, Piece
from pagemill_api.dialects.openai_responses.opaque import sealed
from pagemill_api.dialects.openai_responses.render import usage_fields
from pagemill_api.dialects.openai_responses.request import ItemFields
from pagemill_api.dialects.openai_responses.responses import ItemsChat, chat_of, client_names
from pagemill_api.dialects.translation import Renamed, TranslatedChat, TranslatedDialect
from pagemill_api.dialects.transport import NO_REQUEST, RequestInfo
from pagemill_api.openai.call_ids import CallIds
from pagemill_api.openai.parse import parse_body
from pagemill_api.openai.render import head
from pagemill_api.openai.unsupported import CACHED, ONE_TIER, Unsupported
from pagemill_protocol.errors import error_body
from pagemill_protocol.ids import new_id
from pagemill_protocol.request.answer_format import ParserSettings
from pagemill_protocol.request.generate import GenerateRequest, Usage

if TYPE_CHECKING:
    from pagemill_api.text.tokenizer import Tokenizer

ASK = (
    "Summarize this conversation for the assistant that continues it and sees nothing else of it. Quote what the user "
    "asked for. Say what was done and found, with names, paths and values, what failed, and what remains to be done."
)
_WHOLE = Unsupported("Send the whole conversation as `input`.")


class CompactRequest(ItemFields):
    """Body of `POST /v1/responses/compact`."""

    model_config = ConfigDict(extra="allow")

    UNSUPPORTED: ClassVar = dict.fromkeys(("conversation", "previous_response_id"), _WHOLE) | {
        "stream": Unsupported("A compaction is one item; wait for it.", (False,))
    }
    IGNORED: ClassVar = {
        **dict.fromkeys(("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"), CACHED),
        "service_tier": ONE_TIER,
        **dict.fromkeys(("parallel_tool_calls", "tool_choice", "tools"), "a compaction calls no tools"),
    }


class CompactDialect(TranslatedDialect):
    name = "responses-compact"
    path = "/v1/responses/compact"
    prompt_field = "input"
    error_body = staticmethod(error_body)
    error_event = staticmethod(error_body)
    """Compactions are not streamed."""

    def new_request_id(self) -> str:
        return f"resp_{new_id()}"

    def parse(self, raw: bytes, info: RequestInfo = NO_REQUEST) -> TranslatedChat:
        request = parse_body(raw, CompactRequest)
        found, chat = chat_of(request, asks={"role": "user", "content": ASK})
        return CompactBody(chat, self.name, client_names(found), request.unread + found.messages.unread)

    def renderer(self, request: GenerateRequest, system_fingerprint: str | None) -> CompactionRenderer:
        return CompactionRenderer(request)


class CompactBody(TranslatedChat):
    def __init__(self, chat: ItemsChat, dialect: str, renamed: Sequence[Renamed], unread: list[str]) -> None:
        super().__init__(chat, dialect, renamed)
        self._unread = unread

    def unread_fields(self, tokenizer: Tokenizer, parsers: ParserSettings) -> list[str]:
        return sorted({*super().unread_fields(tokenizer, parsers), *self._unread})


class CompactionRenderer(AnswerRenderer):
    def __init__(self, request: GenerateRequest) -> None:
        self._request = request

    def resume(self, choice: int, events: Sequence[Event], end: ChoiceEnd | None) -> None:
        """Compactions are not streamed."""

    def chunk(self, piece: Piece) -> bytes:
        return b""

    def end(self, usage: Usage) -> bytes:
        return b""

    def body(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        (choice,) = choices
        events = [Content(choice.text)] if choice.events is None else choice.events
        summary = "".join(event.text for event in events if isinstance(event, Content)).strip()
        response_id = head(self._request).id
        item_id = CallIds(response_id).of(0, 0, prefix="cmp")
        item = {"id": item_id, "type": "compaction", "encrypted_content": sealed(summary)}
        return orjson.dumps(
            {
                "id": response_id,
                "object": "response.compaction",
                "created_at": self._request.created_unix_s,
                "model": self._request.model,
                "output": [item],
                "usage": usage_fields(usage),
            }
        )
