# /// script
# dependencies = ["llama-index-llms-openai-like==0.8.1", "llama-index-embeddings-openai-like==0.4.0"]
# ///
"""LlamaIndex, with its client for servers that speak OpenAI's API."""

from __future__ import annotations

from typing import Any

from checks import (
    EMBEDDING_MODEL,
    KEY,
    MAX_TOKENS,
    MODEL,
    QUESTION,
    City,
    assert_embeddings,
    base_url,
    check,
    report_all,
)
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike


def llm(**options: Any) -> OpenAILike:
    given = {"max_tokens": MAX_TOKENS, "temperature": 0, "is_chat_model": True, "max_retries": 0, **options}
    return OpenAILike(model=MODEL, api_base=base_url(), api_key=KEY, context_window=4096, **given)


@check("`chat`, `stream_chat` and `complete`")
def chat() -> None:
    message = ChatMessage(role="user", content=QUESTION)
    assert llm().chat([message]).message.content
    assert list(llm().stream_chat([message]))[-1].message.content
    assert llm().complete(QUESTION).text
    assert llm(is_chat_model=False).complete("Once").text


@check("`as_structured_llm` by a response format")
def structured_by_format() -> None:
    structured = llm(should_use_structured_outputs=True).as_structured_llm(City)
    assert isinstance(structured.complete(QUESTION).raw, City)


@check("`as_structured_llm` by a tool call")
def structured_by_tool() -> None:
    structured = llm(is_function_calling_model=True).as_structured_llm(City)
    assert isinstance(structured.complete(QUESTION).raw, City)


@check("`chat_with_tools`, a call required")
def tools() -> None:
    def record_city(name: str, people: int) -> str:
        """Record a city."""
        return f"{name}: {people}"

    model = llm(is_function_calling_model=True)
    tool = FunctionTool.from_defaults(record_city)
    answer = model.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    calls = model.get_tool_calls_from_response(answer)
    assert [call.tool_name for call in calls] == ["record_city"] * len(calls)
    assert tool(**calls[0].tool_kwargs).raw_output


@check("`OpenAILikeEmbedding`: of texts and of a query")
def embeddings() -> None:
    embedder = OpenAILikeEmbedding(model_name=EMBEDDING_MODEL, api_base=base_url(), api_key=KEY)
    assert_embeddings(embedder.get_text_embedding_batch(["paris", "berlin"]))
    assert_embeddings([embedder.get_query_embedding("paris")], count=1)


if __name__ == "__main__":
    report_all()
