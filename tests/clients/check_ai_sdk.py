# /// script
# dependencies = ["pydantic"]
# [tool.pagemill]
# npm = "ai@7.0.173"
# beside = [
#   "@ai-sdk/openai@4.0.118", "@ai-sdk/anthropic@4.0.105", "@ai-sdk/openai-compatible@3.0.92",
#   "ollama-ai-provider-v2@4.0.1"
# ]
# ///
"""The AI SDK for JavaScript, with four of its providers."""

from __future__ import annotations

from checks import City, check, report_all
from node_programs import run

PROGRAM = """
import {generateText, streamText, tool, jsonSchema, stepCountIs} from "ai";
%s
const ask = {model, temperature: 0, maxOutputTokens: given.maxTokens, maxRetries: 0, prompt: given.question};
const inputSchema = jsonSchema(given.schema);
const record = tool({description: "Record a city", inputSchema, execute: async () => "recorded"});
let text = "";
for await (const part of streamText({...ask, maxOutputTokens: 16}).textStream) text += part;
const called = await generateText({...ask, tools: {record_city: record}, toolChoice: "required"});
const steps = await generateText({...ask, tools: {record_city: record}, stopWhen: stepCountIs(2)});
console.log(JSON.stringify({text, calls: called.toolCalls, steps: steps.steps.length, usage: called.usage}));
"""


def tried(provider: str) -> None:
    found = run(PROGRAM % provider)
    assert found["text"]
    City.model_validate(found["calls"][0]["input"])
    assert found["steps"] >= 1
    assert found["usage"]["outputTokens"] > 0


@check("`@ai-sdk/openai-compatible`: a streamed text, a required call and its result")
def compatible() -> None:
    tried(
        'import {createOpenAICompatible} from "@ai-sdk/openai-compatible";'
        'const model = createOpenAICompatible({name: "pagemill", baseURL: given.url, apiKey: given.key})(given.model);'
    )


@check("`@ai-sdk/openai`, which uses Responses: the same")
def openai() -> None:
    tried(
        'import {createOpenAI} from "@ai-sdk/openai";'
        "const model = createOpenAI({baseURL: given.url, apiKey: given.key})(given.model);"
    )


@check("`@ai-sdk/anthropic`: the same")
def anthropic() -> None:
    tried(
        'import {createAnthropic} from "@ai-sdk/anthropic";'
        "const model = createAnthropic({baseURL: given.url, apiKey: given.key})(given.model);"
    )


# The provider sends `maxOutputTokens` by a name that Ollama's API does not have.
OLLAMA = """
import {streamText} from "ai";
import {createOllama} from "ollama-ai-provider-v2";
const model = createOllama({baseURL: given.url.replace(/v1$/, "api")})(given.model);
let text = "";
const providerOptions = {ollama: {options: {num_predict: 16}}};
const ask = {model, temperature: 0, maxRetries: 0, prompt: given.question, providerOptions};
for await (const part of streamText(ask).textStream) text += part;
console.log(JSON.stringify(text));
"""


@check("`ollama-ai-provider-v2`: a streamed text")
def ollama() -> None:
    assert run(OLLAMA)


if __name__ == "__main__":
    report_all()
