"""Reads the arguments of the offline API: prompts, conversations and parameters, used exactly as given or refused by
name.

Different forms of one argument (one prompt or a list, text or token ids, numpy's integers, one stop string) are
converted to one form. Nothing is rounded, cut or left out. `SamplingParams.validate` checks ranges, and `llm` runs the
result.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeAlias, TypedDict

import msgspec
import numpy as np

from pagemill_engine.config import EngineConfig
from pagemill_engine.vllm_arguments import translated
from pagemill_protocol.errors import invalid_field, show_python
from pagemill_protocol.request.keywords import check_keywords
from pagemill_protocol.request.sampling import (
    MAX_CHOICES,
    MAX_PRIORITY,
    MAX_TOP_LOGPROBS,
    MIN_PRIORITY,
    BeamSearchParams,
    SamplingParams,
    check_int,
)


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or `{"prompt": text}` / `{"prompt_token_ids": ids}`."""
Message: TypeAlias = dict[str, Any]

UNLIMITED = 2**31 - 1
_PROMPT_KEYS = ("prompt", "prompt_token_ids")
_NOT_HERE = ("multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids", "prompt_embeds", "encoder_prompt")
"""Keys of vLLM's prompts that no model of this engine can use."""


def config_of(model: str | os.PathLike[str], settings: Mapping[str, Any]) -> EngineConfig:
    """Return the engine's configuration. Raises `TypeError` that names an unknown setting or a wrong value."""
    settings = translated(settings)
    check_keywords("LLM", settings, EngineConfig.__struct_fields__)
    if not isinstance(model, str | os.PathLike):
        raise TypeError(f"LLM settings: model must be a string or a path, got {_show(model)}.")
    values = {name: _plain(value) for name, value in settings.items()}
    try:
        return msgspec.convert(
            {"max_num_waiting": UNLIMITED, "max_answer_values": UNLIMITED, **values, "model": os.fspath(model)},
            EngineConfig,
        )
    except msgspec.ValidationError as error:
        raise TypeError(f"LLM settings: {error}") from None


def prompts_of(prompts: Any) -> list[str | list[int]]:
    """Return each prompt as text or token ids. Raises `PagemillError`."""
    if isinstance(prompts, str | Mapping):
        return [_prompt(prompts, "prompts")]
    items = _items(prompts, "prompts", "text, token ids, a dictionary, or a list of these")
    if any(_is_scalar(item) for item in items):
        return [_token_ids(items, "prompts")]
    return [_prompt(item, f"prompts[{index}]") for index, item in enumerate(items)]


def _prompt(prompt: Any, field: str) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        return _unwrapped(prompt, field)
    return _token_ids(_items(prompt, field, "text, token ids, or a dictionary"), field)


def _unwrapped(prompt: Mapping[str, Any], field: str) -> str | list[int]:
    given = {key: value for key, value in prompt.items() if value is not None}
    for key in given:
        if key not in _PROMPT_KEYS:
            raise invalid_field(
                field, f"{field} has the key {_show(key)}, {_remedy_of(key)}", code="unsupported_parameter"
            )
    if len(given) != 1:
        what = "both `prompt` and `prompt_token_ids`" if given else "neither `prompt` nor `prompt_token_ids`"
        raise invalid_field(field, f"{field} has {what}. A prompt dictionary needs exactly one of them.")
    if "prompt_token_ids" in given:
        name = f"{field}.prompt_token_ids"
        return _token_ids(_items(given["prompt_token_ids"], name, "a list of token ids"), name)
    if not isinstance(given["prompt"], str):
        raise invalid_field(field, f"{field}.prompt must be a string, got {_show(given['prompt'])}.")
    return given["prompt"]


def _remedy_of(key: Any) -> str:
    if key in _NOT_HERE:
        return "which no model here can use: they read text only. Remove it."
    near = get_close_matches(str(key), _PROMPT_KEYS, n=1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    return f"which is not known.{meant} Known keys: prompt, prompt_token_ids."


def _token_ids(items: list[Any], field: str) -> list[int]:
    if not items:
        raise invalid_field(field, f"{field} has no token ids. Send at least one.")
    if set(map(type, items)) == {int} and min(items) >= 0:
        return items
    index, wrong = next((index, item) for index, item in enumerate(items) if type(item) is not int or item < 0)
    raise invalid_field(field, f"{field}[{index}] must be a token id, an integer of at least 0, got {_show(wrong)}.")


def check_tokens(token_ids: Sequence[int], field: str, vocab_size: int) -> None:
    """Raise `PagemillError` for a prompt without tokens, or with a token outside the vocabulary."""
    if not token_ids:
        raise invalid_field(field, f"{field} has no tokens. Send some text, or at least one token id.")
    if max(token_ids) >= vocab_size:
        index = next(index for index, token_id in enumerate(token_ids) if token_id >= vocab_size)
        raise invalid_field(
            field,
            f"{field}[{index}] is the token id {_show(token_ids[index])}; this model's go from 0 to {vocab_size - 1}.",
        )


def conversations_of(messages: Any) -> list[list[Message]]:
    """Return each conversation as a list of messages for the template. Raises `PagemillError`."""
    items = _items(messages, "messages", "a conversation (a list of messages) or a list of conversations")
    if any(isinstance(item, Mapping) for item in items):
        return [_conversation(items, "messages")]
    return [
        _conversation(_items(item, f"messages[{index}]", "a list of messages"), f"messages[{index}]")
        for index, item in enumerate(items)
    ]


def _conversation(items: list[Any], field: str) -> list[Message]:
    if not items:
        raise invalid_field(field, f"{field} has no messages. Send at least one.")
    return [_message(item, f"{field}[{index}]") for index, item in enumerate(items)]


def _message(message: Any, field: str) -> Message:
    if not isinstance(message, Mapping):
        raise invalid_field(
            field, f"{field} must be a message such as {{'role': 'user', 'content': 'Hello'}}, got {_show(message)}."
        )
    if not isinstance(message.get("role"), str):
        raise invalid_field(field, f"{field}.role must be a string, got {_show(message.get('role'))}.")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    parts = _items(content, f"{field}.content", "a string or a list of text parts")
    texts = [_part(part, f"{field}.content[{index}]") for index, part in enumerate(parts)]
    return {**message, "content": "\n".join(texts)}


def _part(part: Any, field: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    raise invalid_field(
        field,
        f"{field} must be a part such as {{'type': 'text', 'text': 'Hello'}}, got {_show(part)}. Models here "
        "read text only.",
    )


def check_chat_options(
    add_generation_prompt: Any,
    continue_final_message: Any,
    tools: Any,
    chat_template_kwargs: Any,
    content_format: Any = "auto",
) -> None:
    """Raise `PagemillError` for options of `LLM.chat` of a wrong type."""
    if content_format not in ("auto", "string"):
        name = "chat_template_content_format"
        raise invalid_field(name, f"{name} must be 'auto' or 'string', got {_show(content_format)}.")
    flags = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise invalid_field(name, f"{name} must be True or False, got {_show(value)}.")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise invalid_field("tools", f"tools must be a list of dictionaries, got {_show(tools)}.")
    if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
        name = "chat_template_kwargs"
        raise invalid_field(name, f"{name} must be a dictionary, got {_show(chat_template_kwargs)}.")


def priorities_of(priority: Any, num_prompts: int) -> list[int]:
    """Return the priority of each prompt; smaller is served first. Raises `PagemillError`."""
    if priority is None:
        return [0] * num_prompts
    items = _items(priority, "priority", "None or a list of integers")
    if len(items) != num_prompts:
        raise invalid_field("priority", f"{num_prompts} prompts came with {len(items)} priorities. Send one each.")
    for index, item in enumerate(items):
        check_int(f"priority[{index}]", item, MIN_PRIORITY, MAX_PRIORITY)
    return items


def sampling_of(params: Any, num_prompts: int, default: SamplingParams | None = None) -> list[SamplingParams]:
    """Return the parameters of each prompt; `default` if `params` is None. Raises `PagemillError`."""
    if params is None or isinstance(params, SamplingParams):
        return [_exact(params or default or SamplingParams())] * num_prompts
    items = _items(params, "sampling_params", "a SamplingParams or a list of them")
    for index, item in enumerate(items):
        if not isinstance(item, SamplingParams):
            raise invalid_field(
                "sampling_params", f"sampling_params[{index}] must be a SamplingParams, got {_show(item)}."
            )
    if len(items) != num_prompts:
        raise invalid_field(
            "sampling_params", f"{num_prompts} prompts came with {len(items)} sampling_params. Send one, or one each."
        )
    return [_exact(item) for item in items]


def search_of(params: Any) -> SamplingParams:
    """Return the engine's parameters of a beam search. Raises `PagemillError`."""
    if not isinstance(params, BeamSearchParams):
        raise invalid_field("params", f"params must be a BeamSearchParams, got {_show(params)}.")
    beam_width = _plain(params.beam_width)
    check_int("beam_width", beam_width, 1, MAX_CHOICES)
    return _exact(
        SamplingParams(
            n=beam_width,
            use_beam_search=True,
            temperature=params.temperature,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            include_stop_str_in_output=params.include_stop_str_in_output,
            stop_token_ids=params.stop_token_ids,
            logprobs=min(2 * beam_width, MAX_TOP_LOGPROBS),
        )
    )


def _exact(given: SamplingParams) -> SamplingParams:
    """Return `given` with plain values: numpy's numbers as Python's, tuples as lists, one stop string as a list."""
    values = {name: _plain(getattr(given, name)) for name in SamplingParams.__struct_fields__}
    if isinstance(values["stop"], str):
        values["stop"] = [values["stop"]]
    for name in ("stop", "stop_token_ids", "bad_words"):
        values[name] = [] if values[name] is None else values[name]
    return SamplingParams(**values)


def _items(value: Any, field: str, wanted: str) -> list[Any]:
    """Return the elements of a list, a tuple, an array or an iterator, with numpy's numbers as Python's."""
    plain = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(plain, Sequence | Iterator) and not isinstance(plain, str | bytes | bytearray | memoryview):
        return [item.tolist() if isinstance(item, np.generic) else item for item in plain]
    raise invalid_field(field, f"{field} must be {wanted}, got {_show(value)}.")


def _plain(value: Any) -> Any:
    """Return the value without numpy types and tuples; other values unchanged."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return value


def _is_scalar(item: Any) -> bool:
    return isinstance(item, bool | int | float | complex)


def _show(value: Any) -> str:
    return f"{show_python(value)} ({type(value).__name__})"
