# /// script
# dependencies = ["pydantic"]
# [tool.pagemill]
# npm = "openai@7.59.0"
# ///
"""OpenAI's own client for JavaScript."""

from __future__ import annotations

import json

from checks import City, check, report_all
from node_programs import run

CLIENT = """
import OpenAI from "openai";
const client = new OpenAI({baseURL: given.url, apiKey: given.key, maxRetries: 0});
const ask = {model: given.model, temperature: 0, max_tokens: given.maxTokens,
             messages: [{role: "user", content: given.question}]};
"""
TOOL = """
const tool = {type: "function", function: {name: "record_city", parameters: given.schema}};
"""


@check("chat, streamed with usage")
def chat() -> None:
    found = run(
        CLIENT
        + """
        const texts = []; let usage = null;
        const stream = await client.chat.completions.create(
            {...ask, max_tokens: 16, stream: true, stream_options: {include_usage: true}});
        for await (const chunk of stream) {
            if (chunk.choices.length) texts.push(chunk.choices[0].delta.content ?? "");
            usage = chunk.usage ?? usage;
        }
        console.log(JSON.stringify({texts, usage}));
        """
    )
    assert len(found["texts"]) > 1
    assert found["usage"]["completion_tokens"] <= 16


@check("a required call, and an answer to its result")
def tools() -> None:
    found = run(
        CLIENT
        + TOOL
        + """
        const first = await client.chat.completions.create({...ask, tools: [tool], tool_choice: "required"});
        const call = first.choices[0].message.tool_calls[0];
        const messages = [...ask.messages, first.choices[0].message,
                          {role: "tool", tool_call_id: call.id, content: "recorded"}];
        const second = await client.chat.completions.create({...ask, messages, tools: [tool], max_tokens: 8});
        console.log(JSON.stringify({call, second: second.choices[0].message}));
        """
    )
    assert found["call"]["function"]["name"] == "record_city"
    City.model_validate(json.loads(found["call"]["function"]["arguments"]))
    assert found["second"]["role"] == "assistant"


@check("Responses, streamed, and in the background")
def responses() -> None:
    found = run(
        CLIENT
        + """
        const types = [];
        const given_ = {model: given.model, input: given.question, max_output_tokens: 16};
        for await (const event of await client.responses.create({...given_, stream: true})) types.push(event.type);
        let later = await client.responses.create({...given_, background: true});
        const begun = later.status;
        while (later.status === "queued" || later.status === "in_progress") {
            await new Promise(done => setTimeout(done, 50));
            later = await client.responses.retrieve(later.id);
        }
        console.log(JSON.stringify({types, begun, ended: later.status, text: later.output_text}));
        """
    )
    assert found["types"][0] == "response.created"
    assert found["types"][-1] in ("response.completed", "response.incomplete")
    assert (found["begun"], found["ended"] in ("completed", "incomplete")) == ("queued", True)


@check("a schema, and an error by its field")
def forms() -> None:
    found = run(
        CLIENT
        + """
        const format = {type: "json_schema", json_schema: {name: "city", schema: given.schema, strict: true}};
        const answer = await client.chat.completions.create({...ask, response_format: format});
        let param = null;
        try { await client.chat.completions.create({...ask, temperature: 9}); } catch (error) { param = error.param; }
        console.log(JSON.stringify({city: JSON.parse(answer.choices[0].message.content), param}));
        """
    )
    City.model_validate(found["city"])
    assert found["param"] == "temperature"


if __name__ == "__main__":
    report_all()
