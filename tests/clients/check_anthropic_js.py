# /// script
# dependencies = ["pydantic"]
# [tool.pagemill]
# npm = "@anthropic-ai/sdk@1.14.0"
# ///
"""Anthropic's own client for JavaScript."""

from __future__ import annotations

from checks import City, check, report_all
from node_programs import run

CLIENT = """
import Anthropic from "@anthropic-ai/sdk";
const client = new Anthropic({baseURL: given.url.replace(/\\/v1$/, ""), apiKey: given.key, maxRetries: 0});
const ask = {model: given.model, temperature: 0, max_tokens: given.maxTokens,
             messages: [{role: "user", content: given.question}]};
"""


@check("a message, streamed to its final message")
def streamed() -> None:
    found = run(
        CLIENT
        + """
        const stream = client.messages.stream({...ask, max_tokens: 16});
        let text = "";
        stream.on("text", part => { text += part; });
        const last = await stream.finalMessage();
        console.log(JSON.stringify({text, last}));
        """
    )
    assert found["last"]["content"][0]["text"] == found["text"] != ""
    assert found["last"]["usage"]["output_tokens"] <= 16


@check("a tool, and an answer to its result")
def tools() -> None:
    found = run(
        CLIENT
        + """
        const tools = [{name: "record_city", input_schema: given.schema}];
        const first = await client.messages.create({...ask, tools, tool_choice: {type: "any"}});
        const use = first.content.find(block => block.type === "tool_use");
        const messages = [...ask.messages, {role: "assistant", content: first.content},
            {role: "user", content: [{type: "tool_result", tool_use_id: use.id, content: "recorded"}]}];
        const second = await client.messages.create({...ask, tools, messages, max_tokens: 8});
        const count = await client.messages.countTokens({model: given.model, messages: ask.messages});
        console.log(JSON.stringify({use, second, count}));
        """
    )
    City.model_validate(found["use"]["input"])
    assert found["second"]["role"] == "assistant"
    assert found["count"]["input_tokens"] > 0


if __name__ == "__main__":
    report_all()
