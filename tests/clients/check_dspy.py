# /// script
# dependencies = ["dspy==3.4.1"]
# ///
"""dspy. For unknown models it asks for plain JSON; register a provider that supports schemas and tools."""

from __future__ import annotations

from typing import Any

import dspy
from checks import KEY, MAX_TOKENS, MODEL, QUESTION, City, base_url, check, report_all
from dspy import lm15

PROVIDER = lm15.ProviderDefinition.chat(
    lm15.AccessPolicy(provider="pagemill", base_url=base_url()), compat=lm15.OpenAIChatCompat()
)
lm15.register_provider(PROVIDER, supports=lm15.ModelSupport(function_calling=True, response_schema=True))
OPTIONS: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0, "cache": False, "num_retries": 0}
lm = dspy.LM(f"pagemill/{MODEL}", api_base=base_url(), api_key=KEY, **OPTIONS)


class Extract(dspy.Signature):
    """Extract the city."""

    text: str = dspy.InputField()
    city: City = dspy.OutputField()


@check("text")
def text() -> None:
    assert lm(QUESTION)


@check("`JSONAdapter` with a type")
def json_adapter() -> None:
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        assert isinstance(dspy.Predict(Extract)(text=QUESTION).city, City)


@check("`JSONAdapter` with native tool calls")
def native_tools() -> None:
    def record_city(name: str) -> str:
        """Record a city."""
        return name

    class Act(dspy.Signature):
        """Call a tool."""

        text: str = dspy.InputField()
        tools: list[dspy.Tool] = dspy.InputField()
        outputs: dspy.ToolCalls = dspy.OutputField()

    with dspy.context(lm=lm, adapter=dspy.JSONAdapter(use_native_function_calling=True, parallel_tool_calls=False)):
        predict = dspy.Predict(Act, tool_choice="required")
        answer = predict(text=QUESTION, tools=[dspy.Tool(record_city)])
    assert [call.name for call in answer.outputs.tool_calls] == ["record_city"] * len(answer.outputs.tool_calls)


if __name__ == "__main__":
    report_all()
