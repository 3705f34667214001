# /// script
# dependencies = ["pydantic-ai-slim[openai]==2.68.0"]
# ///
"""pydantic-ai, with its chat model of OpenAI."""

from __future__ import annotations

from typing import Any

from checks import (
    EMBEDDING_MODEL,
    JSON_QUESTION,
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
from openai import AsyncOpenAI
from pydantic_ai import Agent, Embedder, NativeOutput, PromptedOutput, RunContext, ToolOutput
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=base_url(), api_key=KEY))
SETTINGS: Any = {"max_tokens": MAX_TOKENS, "temperature": 0, "parallel_tool_calls": False}


def agent(output: Any, settings: Any = SETTINGS, **options: Any) -> Agent[None, Any]:
    return Agent(model, output_type=output, model_settings=settings, **options)


@check("text, and streamed text")
async def text() -> None:
    assert (await agent(str).run(QUESTION)).output
    async with agent(str).run_stream(QUESTION) as stream:
        assert [part async for part in stream.stream_text(delta=True)]


@check("`ToolOutput`")
async def tool_output() -> None:
    assert isinstance((await agent(ToolOutput(City)).run(QUESTION)).output, City)


@check("`NativeOutput`")
async def native_output() -> None:
    assert isinstance((await agent(NativeOutput(City)).run(QUESTION)).output, City)


@check("`PromptedOutput`")
async def prompted_output() -> None:
    assert isinstance((await agent(PromptedOutput(City)).run(JSON_QUESTION)).output, City)


@check("a tool, then text")
async def function_tool() -> None:
    seen: list[int] = []

    def look_up(number: int) -> str:
        """Look a city up by its number."""
        seen.append(number)
        return "Paris, 2 million people"

    def settings(context: RunContext[None]) -> Any:
        return {**SETTINGS, "tool_choice": ["look_up"] if context.run_step == 1 else "none"}

    assert (await agent(str, settings, tools=[look_up]).run("Look up city 7.")).output
    assert seen


@check("`Embedder`: of documents and of a query")
async def embeddings() -> None:
    async with AsyncOpenAI(base_url=base_url(), api_key=KEY) as client:  # the shared one belongs to another event loop
        embedder = Embedder(OpenAIEmbeddingModel(EMBEDDING_MODEL, provider=OpenAIProvider(openai_client=client)))
        await _embed(embedder)


async def _embed(embedder: Embedder) -> None:
    assert_embeddings((await embedder.embed_documents(["paris", "berlin"])).embeddings)
    assert_embeddings((await embedder.embed_query("paris")).embeddings, count=1)


if __name__ == "__main__":
    report_all()
