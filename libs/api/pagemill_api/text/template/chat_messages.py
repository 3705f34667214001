"""Normalize clients' messages for chat templates, and check the extra variables that clients may set.

Templates expect `content` as one string and tool arguments as objects. Anything else is refused with the field's path.
"""

from __future__ import annotations

import json
import keyword
from typing import Any

from pagemill_protocol.errors import PagemillError, invalid_field, show

MAX_TEMPLATE_KWARGS = 32
_PART_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_SET_BY_THE_SERVER = """
    messages tools conversation add_generation_prompt continue_final_message chat_template
    bos_token eos_token pad_token unk_token sep_token cls_token mask_token additional_special_tokens
    tokenize truncation padding max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs
"""
_NAMES_OF_THE_LANGUAGE = """
    raise_exception strftime_now range dict lipsum cycler joiner namespace loop self super caller varargs kwargs
    true false none True False None
"""
RESERVED_NAMES = frozenset(f"{_SET_BY_THE_SERVER} {_NAMES_OF_THE_LANGUAGE}".split())


def normalize_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a copy in which every `content` is a string. Raises `PagemillError` 400 that names the wrong part."""
    if not isinstance(messages, list) or not messages:
        raise invalid_field("messages", "messages must be a list of at least one message.")
    return [_normalize(message, f"messages[{index}]") for index, message in enumerate(messages)]


def check_template_kwargs(template_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the variables that a client adds for the template (`enable_thinking`, `documents`). Raises 400."""
    if not isinstance(template_kwargs, dict) or len(template_kwargs) > MAX_TEMPLATE_KWARGS:
        raise invalid_field(
            "chat_template_kwargs", f"chat_template_kwargs must be an object of at most {MAX_TEMPLATE_KWARGS} entries."
        )
    for name in template_kwargs:
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_") or len(name) > 64:
            raise invalid_field(
                "chat_template_kwargs", f"chat_template_kwargs has the unusable name {show(str(name))}."
            )
        if name in RESERVED_NAMES or keyword.iskeyword(name):
            raise invalid_field(
                f"chat_template_kwargs.{name}", f"chat_template_kwargs must not set `{name}`: the server sets it."
            )
    return template_kwargs


def _normalize(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise invalid_field(path, f"{path} must be an object, got {type(message).__name__}.")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise invalid_field(f"{path}.role", f"{path}.role must be a non-empty string.")
    normalized = {**message, "content": _text(message.get("content"), f"{path}.content")}
    if message.get("tool_calls") is not None:
        normalized["tool_calls"] = _tool_calls(message["tool_calls"], f"{path}.tool_calls")
    return normalized


def _text(content: Any, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid_field(path, f"{path} must be a string or a list of text parts, got {type(content).__name__}.")
    return "\n".join(_part_text(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise invalid_field(path, f"{path} must be an object with a `type`.")
    if kind not in _PART_TEXT_KEYS:
        raise PagemillError(
            f"{path} has the type `{kind[:64]}`; this model takes only text. Send parts of the type `text`.",
            param=f"{path}.type",
            code="unsupported_content",
        )
    text = part.get(_PART_TEXT_KEYS[kind])
    if not isinstance(text, str):
        raise invalid_field(f"{path}.{_PART_TEXT_KEYS[kind]}", f"{path}.{_PART_TEXT_KEYS[kind]} must be a string.")
    return text


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise invalid_field(path, f"{path} must be a list of objects.")
    return [_with_parsed_arguments(call) for call in calls]


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments, which OpenAI's API sends as JSON text, as an object for templates."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
