"""Ids of tool calls, in the form that the model's chat template takes, also for calls that other servers made.

An id follows from the response's id and the call's position: engines that continue an answer make the same ids.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from pagemill_api.answers.registry import call_id_form, detect_tools
from pagemill_protocol.request.generate import GenerateRequest

_LETTERS = string.ascii_letters + string.digits
_SHORT = re.compile(r"[A-Za-z0-9]{9}")
_CHECKS_LENGTH = re.compile(r"\bid\s*\|\s*length\s*!=\s*9\b")
"""Mistral's chat templates, which refuse other ids."""


class CallIds(NamedTuple):
    """The ids of one response."""

    response_id: str
    is_short: bool = False
    """Nine letters and digits."""

    @classmethod
    def of_request(cls, request: GenerateRequest) -> CallIds:
        tools = request.answer_format.tools if request.answer_format is not None else ""
        return cls(request.response_id or request.request_id, call_id_form(tools) == "short")

    def of(self, choice: int, index: int, *, prefix: str = "call") -> str:
        place = f"{self.response_id}/{choice}/{index}"
        if self.is_short:
            return short_id(place)
        return f"{prefix}_{hashlib.blake2b(place.encode(), digest_size=12).hexdigest()}"


def short_id(text: str) -> str:
    """Return nine letters and digits that depend on `text` only."""
    number = int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest())
    letters: list[str] = []
    for _ in range(9):
        number, digit = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[digit])
    return "".join(letters)


@lru_cache(maxsize=256)
def _form_of(template: str, tool_format: str) -> str:
    if _CHECKS_LENGTH.search(template) is not None:
        return "short"
    return call_id_form(tool_format) or call_id_form(detect_tools(template))


def with_template_ids(messages: Sequence[dict[str, Any]], template: str, tool_format: str) -> list[dict[str, Any]]:
    """Return the messages with the ids of calls that the chat template takes; equal ids stay equal.

    `tool_format`: the deployment's parser.
    """
    form = _form_of(template, tool_format)
    if form == "short":
        return [_with_ids(message, _shortened) for message in messages]
    return _with_named_ids(messages) if form == "named" else list(messages)


def _with_named_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Number all calls of the chat. Results refer to the last call of their id."""
    changed, names, number = [], dict[str, str](), 0
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[call["id"]] = f"functions.{call['function']['name']}:{number}"
            number += 1
        changed.append(_with_ids(message, lambda call_id: names.get(call_id, call_id)))
    return changed


def _with_ids(message: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    changed = dict(message)
    if "tool_calls" in message:
        changed["tool_calls"] = [{**call, "id": change(call["id"])} for call in message["tool_calls"]]
    if "tool_call_id" in message:
        changed["tool_call_id"] = change(message["tool_call_id"])
    return changed


def _shortened(call_id: str) -> str:
    return call_id if _SHORT.fullmatch(call_id) else short_id(call_id)
