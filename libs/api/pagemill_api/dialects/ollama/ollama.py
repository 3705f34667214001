"""Ollama's API: `/api/chat` and `/api/generate`, and its lists of models. Both generate as chats; `raw` prompts use no
template."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from pagemill_api.dialects.base import Preparation
from pagemill_api.dialects.ollama import render
from pagemill_api.dialects.ollama.request import LATEST, OllamaChatRequest, OllamaGenerateRequest
from pagemill_api.dialects.pages import Page, PageRequest
from pagemill_api.dialects.translation import Renamed, TranslatedChat, TranslatedDialect, as_request
from pagemill_api.dialects.transport import NDJSON, NO_REQUEST, RequestInfo
from pagemill_api.openai.fields import Name, RequestModel
from pagemill_api.openai.parse import parse_body
from pagemill_api.openai.render import ModelCard
from pagemill_api.openai.schemas import ChatCompletionRequest
from pagemill_api.text.fill_in_middle import fill_in_middle
from pagemill_protocol.ids import new_id
from pagemill_protocol.request.answer_format import ParserSettings
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

if TYPE_CHECKING:
    from pagemill_api.text.tokenizer import Tokenizer

RENAMED = (
    ("response_format.json_schema.schema", "format"),
    ("response_format", "format"),
    ("The json_schema of", "The schema of"),
    ("max_tokens", "num_predict"),
    ("repetition_penalty", "repeat_penalty"),
    ("chat_template_kwargs.enable_thinking", "think"),
    ("chat_template_kwargs.thinking", "think"),
    ("reasoning_effort", "think"),
)


class OllamaChatDialect(TranslatedDialect):
    name = "ollama-chat"
    path = "/api/chat"
    prompt_field = "messages"
    transport = NDJSON
    error_body = staticmethod(render.error_body)
    error_event = staticmethod(render.error_event)

    def new_request_id(self) -> str:
        return f"ollama-{new_id()}"

    def parse(self, raw: bytes, info: RequestInfo = NO_REQUEST) -> TranslatedChat:
        request = parse_body(raw, OllamaChatRequest)
        chat = as_request(request.for_chat, RENAMED, ChatCompletionRequest)
        return TranslatedChat(chat, self.name, RENAMED, request.model)

    def renderer(self, request: GenerateRequest, system_fingerprint: str | None) -> render.OllamaRenderer:
        return render.OllamaRenderer(request, is_chat=True)


class OllamaGenerateDialect(OllamaChatDialect):
    name = "ollama-generate"
    path = "/api/generate"
    operation = "text_completion"
    prompt_field = "prompt"

    def parse(self, raw: bytes, info: RequestInfo = NO_REQUEST) -> TranslatedChat:
        request = parse_body(raw, OllamaGenerateRequest)
        chat = as_request(request.for_chat, RENAMED, ChatCompletionRequest)
        renamed = (*RENAMED, ("messages", "prompt"))
        if request.raw or request.suffix:
            return RawPrompt(chat, self.name, renamed, request.model, suffix=request.suffix)
        return TranslatedChat(chat, self.name, renamed, request.model)

    def renderer(self, request: GenerateRequest, system_fingerprint: str | None) -> render.OllamaRenderer:
        return render.OllamaRenderer(request, is_chat=False)


class RawPrompt(TranslatedChat):
    """A chat whose only message is the prompt as the model reads it."""

    renders = False

    def __init__(
        self, fields: ChatCompletionRequest, dialect: str, renamed: Sequence[Renamed], state: str, *, suffix: str
    ) -> None:
        super().__init__(fields, dialect, renamed, state)
        self._suffix = suffix

    async def render_inline(self, tokenizer: Tokenizer, parsers: ParserSettings) -> str | None:
        return self._text(tokenizer)

    def prepare(
        self, tokenizer: Tokenizer, preparation: Preparation, sampling: SamplingParams, text: str | None
    ) -> list[GenerateRequest]:
        parsers = preparation.parsers._replace(control_tokens="tokens")
        return super().prepare(tokenizer, preparation._replace(parsers=parsers), sampling, self._text(tokenizer))

    def _text(self, tokenizer: Tokenizer) -> str:
        prompt = self.fields.messages[-1].content
        return fill_in_middle(tokenizer, prompt, self._suffix) if self._suffix else prompt


class ShowRequest(RequestModel):
    IGNORED: ClassVar = {"verbose": "everything that is known is shown"}

    model: Name


def _listed(card: ModelCard) -> dict[str, Any]:
    """Return the entry of a model in Ollama's lists, where each name has a tag. Facts about files are empty."""
    name = card.id if ":" in card.id else card.id + LATEST
    return {"name": name, "model": name, "digest": "", "size": 0, **_described(card)}


def _described(card: ModelCard) -> dict[str, Any]:
    empty = dict.fromkeys(("parent_model", "format", "family", "parameter_size", "quantization_level"), "")
    modified_at = datetime.fromtimestamp(card.created_unix_s, UTC).isoformat()
    return {"modified_at": modified_at, "details": {**empty, "families": []}}


def _tags(request: PageRequest) -> bytes:
    return orjson.dumps({"models": [_listed(card) for card in request.cards]})


def _running(request: PageRequest) -> bytes:
    cards = [card for card in request.cards if card.max_model_len is not None]
    return orjson.dumps(
        {"models": [{**_listed(card), "size_vram": 0, "context_length": card.max_model_len} for card in cards]}
    )


def _show(request: PageRequest) -> bytes:
    card = request.card(parse_body(request.raw, ShowRequest).model.removesuffix(LATEST))
    info = {"general.architecture": "pagemill", "general.basename": card.id}
    return orjson.dumps(
        {
            **_described(card),
            "modelfile": "",
            "parameters": "",
            "template": "",
            "model_info": {**info, "pagemill.context_length": card.max_model_len},
            "capabilities": ["embedding"] if card.pools else ["completion", "tools"],
        }
    )


def _version(request: PageRequest) -> bytes:
    return orjson.dumps({"version": request.version})


_page = partial(Page, error_body=render.error_body)
PAGES = (
    _page("/api/tags", _tags),
    _page("/api/ps", _running),
    _page("/api/show", _show, method="POST"),
    _page("/api/version", _version),
)
