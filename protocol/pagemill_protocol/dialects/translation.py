"""From a body that another dialect has translated to the chat request, with errors at the client's own fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from pagemill_protocol.errors import PagemillError
from pagemill_protocol.openai.parse import from_refusal, from_validation
from pagemill_protocol.openai.schemas import ChatCompletionRequest

Chat = TypeVar("Chat", bound=ChatCompletionRequest)


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
