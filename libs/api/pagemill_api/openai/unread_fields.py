"""Finds the fields of a chat that have no effect with this model: those that only chat templates read and its own does
not, and schemas of tools that a forced choice cannot hold calls to.

Servers call it after they prepared a request, and name the fields in `UNREAD_HEADER` of the answer. They are not
refused: clients send the same body to many models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pagemill_api.openai import prepare
from pagemill_api.openai.chat_form import unheld_fields
from pagemill_api.openai.chat_format import chat_format
from pagemill_api.openai.schemas import ChatCompletionRequest
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.answer_format import ParserSettings

if TYPE_CHECKING:
    from pagemill_api.text.tokenizer import Tokenizer

UNREAD_HEADER = "x-pagemill-unread-fields"
"""The response header with the names of the fields, separated by commas; absent if there are none."""
MAX_NAMES, MAX_NAME_CHARS = 32, 64
_UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.()\[\] -]")
"""What a client's own name may contain and a header may not."""
_SWITCHES = ("enable_thinking", "thinking")
"""Variables that templates read as a switch for reasoning. Clients set both, and templates read one of them."""


def unread_fields(
    req: ChatCompletionRequest, tokenizer: Tokenizer, parsers: ParserSettings, client_name: Callable[[str], str] = str
) -> list[str]:
    """Return the client's names of the fields that have no effect with this model, sorted.

    `client_name` returns the client's name for a field of OpenAI's API. Blocks while the chat is rendered without names
    if its messages have any.
    """
    variables: dict[str, set[str]] = {}
    for field, names in _variables(req).items():
        variables.setdefault(client_name(field), set()).update(names)
    template = tokenizer.chat_template
    unread = [field for field, names in variables.items() if not any(map(template.mentions, names))]
    if req.forces_calls:
        unread += [client_name(each) for each in unheld_fields(req, chat_format(req, tokenizer, parsers).syntax)]
    if has_names(req) and not _reads_names(req, tokenizer, parsers):
        unread.append(client_name("messages.name"))
    return sorted(unread)


def unread_headers(fields: Sequence[str]) -> dict[str, str]:
    """Return the header of an answer that names these fields; none without fields."""
    if not fields:
        return {}
    names = [_UNPRINTABLE.sub("?", name)[:MAX_NAME_CHARS] for name in fields[:MAX_NAMES]]
    return {UNREAD_HEADER: ", ".join([*names, "..."] if len(fields) > MAX_NAMES else names)}


def has_names(req: ChatCompletionRequest) -> bool:
    return any(message.name is not None for message in req.messages)


def _variables(req: ChatCompletionRequest) -> dict[str, tuple[str, ...]]:
    """Return the variables of the template that each field sets."""
    found: dict[str, tuple[str, ...]] = {} if req.verbosity is None else {"verbosity": ("verbosity",)}
    for field, effort in (
        ("reasoning_effort", req.reasoning_effort),
        ("reasoning.effort", req.reasoning.effort if req.reasoning is not None else None),
    ):
        if effort is not None:
            found[field] = ("reasoning_effort", *(_SWITCHES if effort == "none" else ()))
    for name in req.chat_template_kwargs:
        found[f"chat_template_kwargs.{name}"] = _SWITCHES if name in _SWITCHES else (name,)
    return found


def _reads_names(req: ChatCompletionRequest, tokenizer: Tokenizer, parsers: ParserSettings) -> bool:
    """Whether the prompt is another one without the names of messages."""
    messages = [message.model_copy(update={"name": None}) for message in req.messages]
    without = req.model_copy(update={"messages": messages})
    try:
        return prepare.render(without, tokenizer, parsers) != prepare.render(req, tokenizer, parsers)
    except PagemillError:  # the template needs the names
        return True
