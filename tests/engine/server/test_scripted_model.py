"""The model of `scripted_model`, which the tests of agents talk to: its answers are the given ones, token for token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from scripted_model import call, write_scripted_model

pytestmark = pytest.mark.model
TEXT = "I will write the file now. I will write the file now, with “quotes” and 你好.\n"
COMMAND = "printf '%s' 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' > a.txt"
AGAIN = "Once more."
"""Before the same call, so that the ends of two answers are equal."""
LAST = "The file is written. The file is written."
USER = {"role": "user", "content": "Write it."}
TOOL: Any = {"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}


@pytest.fixture
def client(tmp_path: Path, start_server: Callable[..., Any]) -> Iterator[openai.OpenAI]:
    model = tmp_path / "model"
    write_scripted_model(model, [TEXT + call("shell", command=COMMAND), AGAIN + call("shell", command=COMMAND), LAST])
    own = {"null_runner": False, "max_model_len": None, "num_kv_blocks": None}
    server = start_server(engine={"model": str(model), "served_names": ["scripted"], **own})
    server.wait_for("ready")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def answer(client: openai.OpenAI, messages: list[Any], **fields: Any) -> Any:
    return client.chat.completions.create(model="scripted", messages=messages, tools=[TOOL], **fields).choices[0]


@pytest.mark.slow
def test_it_calls_a_tool_and_then_says_the_next_text_at_any_temperature_in_a_context_of_32k(
    client: openai.OpenAI,
) -> None:
    messages: list[Any] = [USER]
    first = answer(client, messages, temperature=1.5, seed=3)
    (call,) = first.message.tool_calls
    assert (first.finish_reason, first.message.content.strip()) == ("tool_calls", TEXT.strip())
    assert (call.function.name, COMMAND in call.function.arguments.replace('\\"', '"')) == ("shell", True)
    for text, reason in ((AGAIN, "tool_calls"), (LAST, "stop"), (LAST, "stop")):
        messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": TEXT}]
        last = answer(client, messages)
        assert (last.finish_reason, last.message.content) == (reason, text)
        assert [each.function for each in last.message.tool_calls or []] == [call.function] * (reason == "tool_calls")
    assert client.models.retrieve("scripted").model_extra["max_model_len"] == 32_768  # type: ignore[index]
    counted = client.completions.create(model="scripted", prompt="The file is written.", max_tokens=1).usage
    assert counted is not None
    assert counted.prompt_tokens == 5, "as many as with the embedded model"
