"""Ids of tool calls, in the form that the model's chat template takes, also for calls that other servers made.

An id follows from the response's id and the call's position: engines that continue an answer make the same ids.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from pagemill_api.answers.registry import detect_tools, has_short_call_ids
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
        return cls(request.response_id or request.request_id, has_short_call_ids(tools))

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
def needs_short_ids(template: str, tool_format: str) -> bool:
    """Whether a chat template takes ids of nine letters and digits only. `tool_format`: the deployment's parser."""
    formats = {tool_format, detect_tools(template)}
    return any(map(has_short_call_ids, formats)) or _CHECKS_LENGTH.search(template) is not None


def with_short_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages for templates with all ids of calls short; equal ids stay equal."""
    return [_with_short_ids(message) for message in messages]


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    changed = dict(message)
    if "tool_calls" in message:
        changed["tool_calls"] = [{**call, "id": _shortened(call["id"])} for call in message["tool_calls"]]
    if "tool_call_id" in message:
        changed["tool_call_id"] = _shortened(message["tool_call_id"])
    return changed


def _shortened(call_id: str) -> str:
    return call_id if _SHORT.fullmatch(call_id) else short_id(call_id)
