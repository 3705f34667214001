"""Request fields that clients know and this server does not support, as data.

Ignoring such a field would silently give the client something it did not ask for, so it is refused with 400 and the
remedy. A value without effect beyond the default (`tools: []`, `echo: false`) is harmless and accepted. Fields in no
table and no schema are ignored; `IGNORED` lists those of OpenAI's APIs. A field that becomes supported moves from here
to `schemas`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Unsupported(NamedTuple):
    """The remedy for an unsupported field; values in `harmless` are accepted."""

    remedy: str
    harmless: tuple[Any, ...] = ()

    def refuses(self, value: Any) -> bool:
        return not any(type(value) is type(ok) and value == ok for ok in self.harmless)


_NO_FUNCTIONS = "It is OpenAI's older form; send `tools` and `tool_choice`."
TEXT_ONLY = "This server reads and writes text only; remove it."
NO_MODERATION = "This server does not moderate; check prompt and answer yourself, and remove it."
_REMOVE = "Remove it."

COMMON: Mapping[str, Unsupported] = {
    "prompt_embeds": Unsupported("Send the prompt as text or token ids."),
    "logits_processors": Unsupported("Use `logit_bias`.", ([],)),
    "spaces_between_special_tokens": Unsupported(_REMOVE, (True,)),
    "return_tokens_as_token_ids": Unsupported("Send `return_token_ids` to get token ids.", (False,)),
    "cache_salt": Unsupported("The operator isolates prefix caches with `engine.prefixCaching.scope`; remove it."),
    "kv_transfer_params": Unsupported("KV transfer is arranged by the platform; remove it."),
}

CHAT: Mapping[str, Unsupported] = {
    **COMMON,
    "functions": Unsupported(_NO_FUNCTIONS, ([],)),
    "function_call": Unsupported(_NO_FUNCTIONS, ("none",)),
    "audio": Unsupported(TEXT_ONLY),
    "modalities": Unsupported(TEXT_ONLY, (["text"], [])),
    "mm_processor_kwargs": Unsupported(TEXT_ONLY, ({},)),
    "web_search_options": Unsupported("This server does not search the web; remove it."),
    "documents": Unsupported("Put the documents into a message.", ([],)),
    "chat_template": Unsupported("Templates come from the model or from `model.chatTemplate` of its LLMDeployment."),
    "echo": Unsupported("Only /v1/completions echoes its prompt.", (False,)),
    "moderation": Unsupported(NO_MODERATION),
}

COMPLETIONS: Mapping[str, Unsupported] = {
    **COMMON,
    "thinking_token_budget": Unsupported("Only chats have reasoning; send it to /v1/chat/completions.", (-1,)),
}

MESSAGE: Mapping[str, Unsupported] = {
    "function_call": Unsupported("It is OpenAI's older form; send `tool_calls`."),
    "audio": Unsupported(TEXT_ONLY),
}

CACHED = "the prefix of every prompt is cached"
NO_USERS = "API keys identify callers"
ONE_TIER = "there is one tier; `priority` orders requests"

IGNORED: Mapping[str, str] = {
    "access_programs": "OpenAI's programs do not exist here",
    "background_options": "there are none: they belong to `background`",
    "image": "images are refused",
    "max_tool_calls": "it limits tools that run at OpenAI",
    "metadata": "chat completions are not stored; responses repeat it",
    "prompt_cache_key": CACHED,
    "prompt_cache_options": CACHED,
    "prompt_cache_retention": CACHED,
    "safety_identifier": "there is no moderation; API keys identify callers",
    "service_tier": ONE_TIER,
    "store": "chat completions are not stored; responses are, where the gateway stores them",
    "stream_options": "responses always have usage, and events are not obfuscated",
    "suffix": "chats have no text after the answer; completions fill in the middle",
    "user": NO_USERS,
}
"""Fields of OpenAI's APIs that are accepted without effect because they change no answer, with the reason."""


def _ignored(*names: str) -> Mapping[str, str]:
    return {name: IGNORED[name] for name in names}


_OF_ALL = ("access_programs", "metadata", "safety_identifier", "service_tier", "store", "user")
_OF_CACHES = ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")
IGNORED_IN_COMPLETIONS = _ignored(*_OF_ALL, *_OF_CACHES)
IGNORED_IN_CHAT = _ignored(*_OF_ALL, *_OF_CACHES, "suffix")
IGNORED_IN_RESPONSES = _ignored(
    *("access_programs", "background_options", "image", "max_tool_calls", "safety_identifier", "service_tier"),
    *("stream_options", "user"),
    *_OF_CACHES,
)
