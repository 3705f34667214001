# /// script
# dependencies = ["haystack-ai==3.4.0"]
# ///
"""Haystack, with its chat generator for OpenAI."""

from __future__ import annotations

from typing import Any

from checks import (
    CITY_SCHEMA,
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
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, Document
from haystack.tools import Tool
from haystack.utils import Secret

TOOL = Tool(name="record_city", description="Record a city", parameters=CITY_SCHEMA, function=lambda **city: city)
FORCED = {"tool_choice": "required", "parallel_tool_calls": False}


def generator(fields: dict[str, Any] | None = None, **options: Any) -> OpenAIChatGenerator:
    return OpenAIChatGenerator(
        model=MODEL,
        api_base_url=base_url(),
        api_key=Secret.from_token(KEY),
        generation_kwargs={"max_tokens": MAX_TOKENS, "temperature": 0, **(fields or {})},
        max_retries=0,
        **options,
    )


def reply(made: OpenAIChatGenerator, *messages: ChatMessage) -> ChatMessage:
    answer: ChatMessage = made.run([ChatMessage.from_user(QUESTION), *messages])["replies"][0]
    return answer


@check("text, and streamed text")
def text() -> None:
    chunks: list[Any] = []
    assert reply(generator()).text
    assert reply(generator(streaming_callback=chunks.append)).text
    assert len(chunks) > 1


@check("`response_format` with a type")
def response_format() -> None:
    City.model_validate_json(str(reply(generator({"response_format": City})).text))


@check("tools, and an answer to the result")
def tools() -> None:
    answer = reply(generator(FORCED, tools=[TOOL]))
    _assert_calls(answer)
    result = ChatMessage.from_tool("Recorded.", origin=answer.tool_calls[0])
    assert reply(generator(tools=[TOOL]), answer, result)


@check("tools, streamed and strict")
def tool_stream() -> None:
    _assert_calls(reply(generator(FORCED, tools=[TOOL], tools_strict=True, streaming_callback=lambda chunk: None)))


def _assert_calls(message: ChatMessage) -> None:
    assert message.tool_calls
    for call in message.tool_calls:
        assert call.tool_name == "record_city"
        City.model_validate(call.arguments)


@check("embeddings of documents and of a text")
def embeddings() -> None:
    options: Any = {"model": EMBEDDING_MODEL, "api_base_url": base_url(), "api_key": Secret.from_token(KEY)}
    documents = [Document(content="paris"), Document(content="berlin")]
    made = OpenAIDocumentEmbedder(**options, progress_bar=False).run(documents)["documents"]
    assert_embeddings([each.embedding for each in made])
    assert_embeddings([OpenAITextEmbedder(**options).run("paris")["embedding"]], count=1)


if __name__ == "__main__":
    report_all()
