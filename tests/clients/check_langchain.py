# /// script
# dependencies = ["langchain-openai==1.7.3"]
# ///
"""LangChain's client for OpenAI."""

from __future__ import annotations

from typing import Any

from checks import (
    CITY_TOOL,
    EMBEDDING_MODEL,
    JSON_QUESTION,
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
    run_howto,
)
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import SecretStr

model = ChatOpenAI(
    base_url=base_url(),
    api_key=KEY,
    model=MODEL,
    max_tokens=MAX_TOKENS,
    temperature=0,
    max_retries=0,
    stream_usage=True,
)


@check("the example of the how-to guide")
def howto() -> None:
    assert run_howto("LangChain")["answer"].name


@check("`invoke`, `stream` and `ainvoke`")
async def chat() -> None:
    short = model.model_copy(update={"max_tokens": TEXT_TOKENS})
    assert short.invoke(QUESTION).content
    chunks = list(short.stream(QUESTION))
    assert "".join(str(chunk.content) for chunk in chunks)
    assert any(chunk.usage_metadata for chunk in chunks)
    assert (await short.ainvoke(QUESTION)).content


@check("`with_structured_output`, method `json_schema`")
def json_schema() -> None:
    for strict in (None, True):
        typed = model.with_structured_output(City, method="json_schema", strict=strict)
        assert isinstance(typed.invoke(QUESTION), City)


@check("`with_structured_output`, method `function_calling`")
def function_calling() -> None:
    for strict in (None, True):
        typed = model.with_structured_output(City, method="function_calling", strict=strict)
        assert isinstance(typed.invoke(QUESTION), City)


@check("`with_structured_output`, method `json_mode`")
def json_mode() -> None:
    assert isinstance(model.with_structured_output(City, method="json_mode").invoke(JSON_QUESTION), City)


@check("`bind_tools`: `any`, by name, strict, and an answer to the result")
def bind_tools() -> None:
    for choice in ("any", "record_city"):
        answer: Any = model.bind_tools([CITY_TOOL], tool_choice=choice, strict=True, parallel_tool_calls=False).invoke(
            QUESTION
        )
        _assert_calls(answer.tool_calls)
    results = [ToolMessage("Recorded.", tool_call_id=call["id"]) for call in answer.tool_calls]
    assert model.bind_tools([CITY_TOOL], tool_choice="none").invoke([HumanMessage(QUESTION), answer, *results])


@check("`bind_tools`, streamed")
def stream_tools() -> None:
    answer: Any = None
    for chunk in model.bind_tools([CITY_TOOL], tool_choice="any", parallel_tool_calls=False).stream(QUESTION):
        answer = chunk if answer is None else answer + chunk
    _assert_calls(answer.tool_calls)


@check("`OpenAIEmbeddings` with `check_embedding_ctx_length=False`; else it sends token ids of another model")
async def embeddings() -> None:
    embedder = OpenAIEmbeddings(
        model=EMBEDDING_MODEL, base_url=base_url(), api_key=SecretStr(KEY), check_embedding_ctx_length=False
    )
    assert_embeddings(embedder.embed_documents(["paris", "berlin"]))
    assert_embeddings(await embedder.aembed_documents(["paris", "berlin"]))
    assert_embeddings([embedder.embed_query("paris")], count=1)


def _assert_calls(calls: Any) -> None:
    assert calls
    for call in calls:
        assert call["name"] == "record_city"
        City.model_validate(call["args"])


if __name__ == "__main__":
    report_all()
