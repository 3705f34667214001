# /// script
# dependencies = ["litellm==1.106.2", "mcp==2.3.0"]
# ///
"""litellm, with its providers `openai` and `hosted_vllm`. For tools, also install the package `mcp`."""

from __future__ import annotations

from typing import Any

import litellm
from checks import (
    CITY_TOOL,
    EMBEDDING_MODEL,
    KEY,
    MAX_TOKENS,
    MODEL,
    QUESTION,
    TEXT_TOKENS,
    City,
    assert_embeddings,
    base_url,
    check,
    report_all,
)

litellm.suppress_debug_info = True
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
PROVIDERS = ("openai", "hosted_vllm")
NAMED = {"type": "function", "function": {"name": "record_city"}}


def ask(provider: str = "openai", **fields: Any) -> Any:
    given = {"messages": MESSAGES, "max_tokens": MAX_TOKENS, "temperature": 0, "num_retries": 0, **fields}
    return litellm.completion(model=f"{provider}/{MODEL}", api_base=base_url(), api_key=KEY, **given)


@check("chat, with `openai/` and `hosted_vllm/`")
def chat() -> None:
    assert all(ask(provider, max_tokens=TEXT_TOKENS).choices[0].message.content for provider in PROVIDERS)


@check("chat, streamed with usage")
def stream() -> None:
    chunks = list(ask(max_tokens=TEXT_TOKENS, stream=True, stream_options={"include_usage": True}))
    whole: Any = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.content
    assert whole.usage.completion_tokens


@check("text completion")
def text_completion() -> None:
    answer: Any = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="Once", max_tokens=4, api_base=base_url(), api_key=KEY
    )
    assert answer.choices[0].text


@check("`response_format` with a type")
def response_format() -> None:
    for provider in PROVIDERS:
        City.model_validate_json(ask(provider, response_format=City).choices[0].message.content)


@check("tools: `required` and named, streamed too")
def tools() -> None:
    for choice in ("required", NAMED):
        forced = {"tools": [CITY_TOOL], "tool_choice": choice, "parallel_tool_calls": False}
        _assert_calls(ask(**forced))
        chunks = list(ask(**forced, stream=True))
        _assert_calls(litellm.stream_chunk_builder(chunks))


@check("a prompt beyond the context: `ContextWindowExceededError`")
def overflow() -> None:
    for provider in PROVIDERS:
        try:
            ask(provider, messages=[{"role": "user", "content": "word " * 10_000}])
        except litellm.ContextWindowExceededError:
            continue
        raise AssertionError(f"{provider} answered")


@check("embeddings, with `openai/` and `hosted_vllm/`")
def embeddings() -> None:
    for provider in PROVIDERS:
        made = litellm.embedding(
            f"{provider}/{EMBEDDING_MODEL}", input=["paris", "berlin"], api_base=base_url(), api_key=KEY
        )
        assert_embeddings([item["embedding"] for item in made.data])


def _assert_calls(answer: Any) -> None:
    calls = answer.choices[0].message.tool_calls
    assert calls
    for call in calls:
        assert call.function.name == "record_city"
        City.model_validate_json(call.function.arguments)


if __name__ == "__main__":
    report_all()
