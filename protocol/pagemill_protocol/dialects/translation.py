"""What dialects share whose bodies become chat requests: the translation, with errors at the client's own fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pydantic import FiniteFloat, ValidationError
from pydantic_core import PydanticCustomError

from pagemill_protocol.errors import PagemillError
from pagemill_protocol.generate import GenerateRequest, Usage
from pagemill_protocol.openai.fields import RequestModel
from pagemill_protocol.openai.parse import from_refusal, from_validation
from pagemill_protocol.openai.schemas import ChatCompletionRequest, Priority

Chat = TypeVar("Chat", bound=ChatCompletionRequest)


class SamplingExtensions(RequestModel):
    """Fields of no such dialect's own API: as in chat completions, which check their values."""

    seed: int | None = None
    min_p: FiniteFloat | None = None
    repetition_penalty: FiniteFloat | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    priority: Priority = 0

    @property
    def extensions(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SamplingExtensions.model_fields}


class TranslatedDialect:
    operation = "chat"

    def merged_end(self, request: GenerateRequest, usage: Usage) -> bytes:
        raise NotImplementedError("a body that becomes a chat is one prompt")

    def merge_bodies(self, bodies: Sequence[bytes]) -> bytes:
        (body,) = bodies
        return body


def as_chat(translate: Callable[[], dict[str, Any]], renamed: Sequence[tuple[str, str]], schema: type[Chat]) -> Chat:
    """The chat request of the body that `translate` returns. Raises `PagemillError` 400.

    `renamed`: places in a chat request, and the same ones in the client's.
    """
    try:
        return schema.model_validate(translate())
    except PydanticCustomError as error:
        raise from_refusal(error) from None
    except ValidationError as error:
        raise with_names(from_validation(error), renamed) from None


def with_names(error: PagemillError, renamed: Sequence[tuple[str, str]]) -> PagemillError:
    """`error` as the client's own fields name it."""
    for ours, theirs in renamed:
        error.message = error.message.replace(ours, theirs)
        error.param = error.param and error.param.replace(ours, theirs)
    return error
