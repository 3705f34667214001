"""Translation of bodies to requests of OpenAI's API, with errors at the client's own fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from pydantic import FiniteFloat, ValidationError
from pydantic_core import PydanticCustomError

from pagemill_api.dialects.base import Dialect, Preparation
from pagemill_api.dialects.chat_completions.chat import ChatBody
from pagemill_api.dialects.chat_completions.completions import CompletionsBody
from pagemill_api.dialects.transport import SSE
from pagemill_api.openai.fields import RequestModel
from pagemill_api.openai.parse import from_refusal, from_validation
from pagemill_api.openai.schemas import Priority
from pagemill_api.openai.unknown_fields import collecting_none
from pagemill_api.openai.unread_fields import unread_fields
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.answer_format import ParserSettings
from pagemill_protocol.request.generate import GenerateRequest, Usage
from pagemill_protocol.request.sampling import SamplingParams

if TYPE_CHECKING:
    from pagemill_api.text.tokenizer import Tokenizer

Request = TypeVar("Request", bound=RequestModel)
Renamed = tuple[str, str] | Callable[[str], str]
"""The name of a field in a request of OpenAI's API, and the client's name for it; or a function that replaces them in a
text."""


class SamplingExtensions(RequestModel):
    """Fields that are in no such dialect's own API: as in chat completions, which check their values."""

    seed: int | None = None
    min_p: FiniteFloat | None = None
    repetition_penalty: FiniteFloat | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    priority: Priority = 0

    @property
    def extensions(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SamplingExtensions.model_fields}


class TranslatedDialect(Dialect):
    operation = "chat"
    transport = SSE

    def merged_end(self, request: GenerateRequest, usage: Usage) -> bytes:
        raise NotImplementedError("a body that becomes a chat is one prompt")

    def merge_bodies(self, bodies: Sequence[bytes]) -> Iterator[bytes]:
        return iter(bodies)


class _Translated:
    """Base class to put before a body of OpenAI's API: its requests name their dialect, its errors the client's
    fields."""

    def __init__(self, fields: Any, dialect: str, renamed: Sequence[Renamed], client_fields: str = "") -> None:
        super().__init__(fields)  # type: ignore[call-arg]
        self._added = {"dialect": dialect, "client_fields": client_fields}
        self._renamed = renamed

    def sampling(self, defaults: Mapping[str, Any] = {}) -> SamplingParams:
        with self._named():
            return super().sampling(defaults)  # type: ignore[misc, no-any-return]

    def check_form(self) -> None:
        with self._named():
            super().check_form()  # type: ignore[misc]

    def prepare(
        self, tokenizer: Tokenizer, preparation: Preparation, sampling: SamplingParams, text: str | None
    ) -> list[GenerateRequest]:
        with self._named():
            prepared = super().prepare(tokenizer, preparation, sampling, text)  # type: ignore[misc]
        return [msgspec.structs.replace(each, **self._added) for each in prepared]

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except PagemillError as error:
            raise with_names(error, self._renamed) from None


class TranslatedChat(_Translated, ChatBody):
    """A body that was translated to a chat request."""

    def unread_fields(self, tokenizer: Tokenizer, parsers: ParserSettings) -> list[str]:
        return unread_fields(self.fields, tokenizer, parsers, partial(_renamed, renamed=self._renamed))


class TranslatedCompletion(_Translated, CompletionsBody):
    """A body that was translated to a completions request."""


def as_request(translate: Callable[[], dict[str, Any]], renamed: Sequence[Renamed], schema: type[Request]) -> Request:
    """Return the request for the body that `translate` returns. Raises `PagemillError` 400."""
    try:
        translated = translate()
        with collecting_none():  # the translation has no fields of the client
            return schema.model_validate(translated)
    except PydanticCustomError as error:
        raise from_refusal(error) from None
    except ValidationError as error:
        raise with_names(from_validation(error), renamed) from None


def with_names(error: PagemillError, renamed: Sequence[Renamed]) -> PagemillError:
    """Return `error` with the client's names of fields."""
    error.message = _renamed(error.message, renamed)
    error.param = error.param and _renamed(error.param, renamed)
    return error


def _renamed(text: str, renamed: Sequence[Renamed]) -> str:
    for each in renamed:
        text = text.replace(*each) if isinstance(each, tuple) else each(text)
    return text
