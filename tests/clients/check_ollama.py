# /// script
# dependencies = ["ollama==0.6.3"]
# ///
"""Ollama's own Python client, on /api/chat, /api/generate and the lists of models."""

from __future__ import annotations

from typing import Any

import ollama
from checks import (
    CITY_SCHEMA,
    CITY_TOOL,
    EMBEDDING_MODEL,
    MAX_TOKENS,
    MODEL,
    QUESTION,
    TEXT_TOKENS,
    City,
    base_url,
    check,
    report_all,
)

URL = base_url().removesuffix("/v1")
client = ollama.Client(URL, timeout=60)
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
SHORT: Any = {"temperature": 0, "num_predict": TEXT_TOKENS, "num_ctx": 2048}
LONG: Any = {"temperature": 0, "num_predict": MAX_TOKENS}


@check("`chat`, also streamed, with counts and durations")
def chat() -> None:
    answer = client.chat(MODEL, MESSAGES, options=SHORT, keep_alive="5m")
    assert answer.message.content
    assert answer.done_reason in ("stop", "length")
    *parts, last = client.chat(f"{MODEL}:latest", MESSAGES, options=SHORT, stream=True)
    assert "".join(part.message.content or "" for part in parts) == answer.message.content
    assert last.model == f"{MODEL}:latest"
    assert last.eval_count == answer.eval_count
    assert all((last.done, last.prompt_eval_count, last.total_duration, last.eval_duration))


@check("`generate`, also streamed, with `system` and `raw`")
def generate() -> None:
    answer = client.generate(MODEL, QUESTION, system="Be brief.", options=SHORT)
    parts = client.generate(MODEL, QUESTION, system="Be brief.", options=SHORT, stream=True)
    assert "".join(part.response for part in parts) == answer.response
    raw = client.generate(MODEL, QUESTION, raw=True, options=SHORT)
    assert raw.response
    assert raw.prompt_eval_count < answer.prompt_eval_count


@check("`format` with a JSON schema")
def form() -> None:
    City.model_validate_json(client.chat(MODEL, MESSAGES, options=LONG, format=CITY_SCHEMA).message.content or "")
    City.model_validate_json(client.generate(MODEL, QUESTION, options=LONG, format=CITY_SCHEMA).response)


@check("an answer with tools offered, and an answer to a result")
def tools() -> None:
    answer = client.chat(MODEL, MESSAGES, tools=[CITY_TOOL], options=SHORT)
    assert answer.message.content or answer.message.tool_calls
    call = {"function": {"name": "record_city", "arguments": {"name": "Paris", "people": 2}}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "record_city", "content": "Recorded."},
    ]
    assert client.chat(MODEL, history, tools=[CITY_TOOL], options=SHORT).message.content


@check("`list`, `show`, `ps`")
def models() -> None:
    assert {each.model for each in client.list().models} == {f"{MODEL}:latest", f"{EMBEDDING_MODEL}:latest"}
    shown = client.show(f"{MODEL}:latest")
    assert shown.modelinfo["pagemill.context_length"] == 4096
    assert "completion" in (shown.capabilities or [])
    assert client.show(EMBEDDING_MODEL).capabilities == ["embedding"]
    assert {each.model: each.context_length for each in client.ps().models}[f"{MODEL}:latest"] == 4096


@check("the asynchronous client")
async def asynchronous() -> None:
    other = ollama.AsyncClient(URL, timeout=60)
    parts = [part async for part in await other.chat(MODEL, MESSAGES, options=SHORT, stream=True)]
    assert parts[-1].done


@check("errors raise the client's exceptions, also before a stream")
def errors() -> None:
    for stream in (False, True):
        status, message = 0, ""
        try:
            list(client.chat("nothing", MESSAGES, stream=stream))
        except ollama.ResponseError as error:
            status, message = error.status_code, error.error
        assert status == 404
        assert "nothing" in message


if __name__ == "__main__":
    report_all()
