# /// script
# dependencies = ["openai-agents==0.24.0"]
# ///
"""OpenAI's Agents SDK."""

from __future__ import annotations

from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import KEY, MAX_TOKENS, MODEL, QUESTION, City, base_url, check, report_all

set_tracing_disabled(True)
RECORDED: list[str] = []


@function_tool
def record_city(name: str) -> str:
    """Record a city."""
    RECORDED.append(name)
    return "Recorded."


def agent(
    name: str = "writer", tool_choice: str | None = None, api: type[Any] = OpenAIChatCompletionsModel, **options: Any
) -> Agent[Any]:
    model = api(MODEL, openai.AsyncOpenAI(base_url=base_url(), api_key=KEY, max_retries=0))
    settings = ModelSettings(max_tokens=MAX_TOKENS, temperature=0, tool_choice=tool_choice, parallel_tool_calls=False)
    return Agent(name=name, instructions="Answer.", model=model, model_settings=settings, **options)


@check("text")
async def text() -> None:
    assert (await Runner.run(agent(), QUESTION)).final_output


@check("an output type")
async def output_type() -> None:
    assert isinstance((await Runner.run(agent(output_type=City), QUESTION)).final_output, City)


@check("a tool, its result, and the answer after it")
async def tool() -> None:
    RECORDED.clear()
    result = await Runner.run(agent(tool_choice="required", tools=[record_city]), QUESTION)
    assert RECORDED
    assert {"tool_call_item", "tool_call_output_item"} <= {item.type for item in result.new_items}


@check("a tool, streamed")
async def tool_stream() -> None:
    result = Runner.run_streamed(agent(tool_choice="required", tools=[record_city]), QUESTION)
    kinds = {event.type async for event in result.stream_events()}
    assert {"raw_response_event", "run_item_stream_event"} <= kinds


@check("a handoff to an agent with an output type")
async def handoff() -> None:
    clerk = agent("clerk", output_type=City)
    result = await Runner.run(agent("greeter", tool_choice="required", handoffs=[clerk]), QUESTION)
    assert result.last_agent.name == "clerk"
    assert isinstance(result.final_output, City)


@check("Responses: a tool, and an output type")
async def responses() -> None:
    forced = agent(api=OpenAIResponsesModel, tool_choice="required", tools=[record_city])
    assert (await Runner.run(forced, QUESTION)).new_items
    typed = agent(api=OpenAIResponsesModel, output_type=City)
    assert isinstance((await Runner.run(typed, QUESTION)).final_output, City)


if __name__ == "__main__":
    report_all()
