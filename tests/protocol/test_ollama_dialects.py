"""Ollama's API: the chats that bodies are translated to, and the lines, lists and errors of answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal_of

from pagemill_api.answers.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from pagemill_api.dialects.base import FinishedChoice, Piece, Preparation
from pagemill_api.dialects.ollama.ollama import PAGES, OllamaChatDialect, OllamaGenerateDialect, RawPrompt
from pagemill_api.dialects.pages import PageRequest
from pagemill_api.dialects.transport import NO_REQUEST
from pagemill_api.openai.render import ModelCard
from pagemill_api.openai.schemas import ChatCompletionRequest
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.answer_format import ParserSettings
from pagemill_protocol.request.generate import GenerateRequest, Usage
from pagemill_protocol.request.sampling import SamplingParams

CHAT, GENERATE = OllamaChatDialect(), OllamaGenerateDialect()
HI: dict[str, Any] = {"role": "user", "content": "hi"}
TIMES = ("total_duration", "prompt_eval_duration", "eval_duration")
PIECES = st.text(max_size=3)
EVENTS = st.lists(st.one_of(st.builds(Content, PIECES), st.builds(Reasoning, PIECES), st.lists(PIECES, max_size=3)))


def parse(**fields: Any) -> ChatCompletionRequest:
    body = CHAT.parse(json.dumps({"model": "m", "messages": [HI], **fields}).encode())
    body.sampling()
    body.check_form()
    return body.fields


refused = partial(refusal_of, parse)


def request() -> GenerateRequest:
    return GenerateRequest(
        request_id="ollama-1",
        model="m",
        prompt_token_ids=[1, 2],
        sampling=SamplingParams(),
        client_fields="m:latest",
        created_unix_s=1,
    )


def lines_of(raw: bytes) -> list[dict[str, Any]]:
    assert raw.endswith(b"\n")
    return [json.loads(line) for line in raw.splitlines()]


def numbered(drawn: list[Any]) -> list[Event]:
    """Return numbered events; a list stands for a call with these pieces of arguments."""
    events: list[Event] = []
    num_calls = 0
    for each in drawn:
        if isinstance(each, list):
            text = json.dumps({"a": "".join(each)})
            pieces = (CallArguments(text[:4], num_calls), CallArguments(text[4:], num_calls))
            events += [CallBegin("f", num_calls), *pieces, CallEnd()]
            num_calls += 1
        else:
            events.append(each)
    return events


def test_settings_are_translated_to_chat_fields() -> None:
    options = {"num_predict": 9, "repeat_penalty": 1.2, "top_k": 4, "min_p": 0.1, "stop": ["END"], "num_ctx": 512}
    fields = parse(options=options, think="low", format={"type": "object"}, stream=False, keep_alive="5m")
    assert (fields.max_tokens, fields.repetition_penalty, fields.top_k, fields.min_p) == (9, 1.2, 4, 0.1)
    assert (fields.stop, fields.stream, fields.reasoning_effort) == (["END"], False, "low")
    assert fields.template_kwargs["thinking"]
    assert fields.form is not None


def test_answers_are_streamed_by_default_and_a_negative_limit_is_none() -> None:
    assert parse().stream
    assert parse(options={"num_predict": -1}).max_tokens is None
    assert parse(think=False).template_kwargs == {"enable_thinking": False, "thinking": False}


def test_the_tag_latest_is_optional_in_a_models_name() -> None:
    assert parse(model="m:latest").model == "m"
    assert parse(model="m:7b").model == "m:7b"


def test_tool_results_belong_to_the_calls_of_their_name() -> None:
    calls = [{"function": {"name": name, "arguments": {"x": 1}}} for name in ("f", "g", "f")]
    results = [{"role": "tool", "content": str(at), "tool_name": name} for at, name in enumerate(("g", "f", "f"))]
    _, assistant, *found = parse(messages=[HI, {"role": "assistant", "tool_calls": calls}, *results]).messages
    assert [json.loads(call["function"]["arguments"]) for call in assistant.tool_calls] == [{"x": 1}] * 3
    assert [each.tool_call_id for each in found] == ["call_1_1", "call_1_0", "call_1_2"]


def test_a_prompt_is_a_chat_and_a_raw_prompt_is_sent_unchanged() -> None:
    body = {"model": "m", "prompt": "hi", "system": "Be brief."}
    fields = GENERATE.parse(json.dumps(body).encode()).fields
    assert [(each.role, each.content) for each in fields.messages] == [("system", "Be brief."), ("user", "hi")]
    raw = {"model": "m", "prompt": "hi", "raw": True}
    assert isinstance(GENERATE.parse(json.dumps(raw).encode()), RawPrompt)
    for name, value in (("system", "Be brief."), ("think", True)):
        with pytest.raises(PagemillError, match=f"With `raw` no chat template is rendered, so `{name}`") as refused:
            GENERATE.parse(json.dumps({**raw, name: value}).encode())
        assert refused.value.param == name


async def test_a_suffix_requests_fill_in_the_middle(
    byte_tokenizer: Tokenizer, with_tokens: Callable[[Sequence[str]], Tokenizer]
) -> None:
    body = GENERATE.parse(json.dumps({"model": "m", "prompt": "be", "suffix": "end"}).encode())
    tokenizer = with_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    assert await body.render_inline(tokenizer, ParserSettings()) == "<fim_prefix>be<fim_suffix>end<fim_middle>"
    (request,) = body.prepare(tokenizer, Preparation(100, "ollama-1", 1), body.sampling(), None)
    assert request.prompt_token_ids == [256, *tokenizer.encode("be"), 257, *tokenizer.encode("end"), 258]
    with pytest.raises(PagemillError, match="no tokens for that"):
        await body.render_inline(byte_tokenizer, ParserSettings())


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": [HI, {**HI, "images": ["aa"]}]}, "`messages[1].images[0]` is an image"),
        ({"messages": []}, "`messages` must have at least 1"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "has a call with the id"),
        ({"options": {"mirostat": 2}}, "`mirostat` is not supported"),
        ({"options": {"repeat_penalty": 0}}, "repeat_penalty must be"),
        ({"options": {"num_predict": 0}}, "`num_predict` must be"),
        ({"options": 7}, "`options` must be an object"),
        ({"format": "yaml"}, "`format"),
        ({"format": {"type": 7}}, "`format`"),
        ({"logprobs": True}, "`logprobs` is not supported"),
        ({"model": 7}, "`model` must be a string"),
    ],
)
def test_an_invalid_field_is_named(fields: dict[str, Any], named: str) -> None:
    assert named in refused(**fields).message


@pytest.mark.parametrize(
    "fields", [{"template": "x"}, {"suffix": 7}, {"context": [1]}, {"images": ["aa"]}, {"prompt": ""}]
)
def test_fields_that_a_prompt_cannot_have_are_named(fields: dict[str, Any]) -> None:
    with pytest.raises(PagemillError, match=next(iter(fields))):
        GENERATE.parse(json.dumps({"model": "m", "prompt": "x", **fields}).encode())


@given(EVENTS, st.lists(st.integers(1, 4)), st.integers(0, 9))
def test_a_stream_in_any_chunks_has_the_content_of_the_whole_answer(
    drawn: list[Any], sizes: list[int], begun: int
) -> None:
    """`begun` are the events that another engine had delivered."""
    events = numbered(drawn)
    begun = min(begun, len(events))
    first, renderer = CHAT.renderer(request(), None), CHAT.renderer(request(), None)
    raw = b"".join(first.chunk(Piece(0, "", False, None, None, None, [event])) for event in events[:begun])
    renderer.resume(0, events[:begun], None)
    rest = events[begun:]
    for size in [*sizes, len(rest)]:
        raw += renderer.chunk(Piece(0, "", False, None, None, None, rest[:size]))
        rest = rest[size:]
    raw += renderer.chunk(Piece(0, "", False, "length", None, None, []))
    *lines, last = lines_of(raw + renderer.end(Usage(2, 5)))
    choice = FinishedChoice(0, "", "length", None, events)
    whole = json.loads(CHAT.renderer(request(), None).body([choice], Usage(2, 5)))
    messages = [line["message"] for line in lines]
    assert "".join(each["content"] for each in messages) == whole["message"]["content"]
    assert "".join(each.get("thinking", "") for each in messages) == whole["message"].get("thinking", "")
    calls = [call for each in messages for call in each.get("tool_calls", [])]
    assert calls == whole["message"].get("tool_calls", [])
    assert not any(line["done"] for line in lines)
    assert {k: v for k, v in last.items() if k not in (*TIMES, "message")} == {
        k: v for k, v in whole.items() if k not in (*TIMES, "message")
    }


def test_the_last_line_has_counts_and_durations() -> None:
    renderer = GENERATE.renderer(request(), None)
    first, last = lines_of(renderer.chunk(Piece(0, "hm", True, "stop", None, None)) + renderer.end(Usage(2, 5)))
    head = {"model": "m:latest", "created_at": "1970-01-01T00:00:01Z"}
    assert first == {**head, "response": "hm", "done": False}
    assert (last["response"], last["done"], last["done_reason"]) == ("", True, "stop")
    assert (last["prompt_eval_count"], last["eval_count"]) == (2, 5)
    assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"] - 2


def test_a_call_is_one_line_with_its_arguments_as_an_object() -> None:
    renderer = CHAT.renderer(request(), None)
    events: list[Event] = [CallBegin("f", 0), CallArguments('{"a":', 0)]
    assert renderer.chunk(Piece(0, "", True, None, None, None, events)) == b""
    events = [CallArguments("1}", 0), CallEnd()]
    (line,) = lines_of(renderer.chunk(Piece(0, "", False, None, None, None, events)))
    (call,) = line["message"]["tool_calls"]
    assert call["function"] == {"index": 0, "name": "f", "arguments": {"a": 1}}


def test_errors_have_ollamas_format() -> None:
    error = PagemillError("Wrong.", param="model")
    assert json.loads(CHAT.error_body(error)) == {"error": "Wrong."}
    assert lines_of(CHAT.error_event(error)) == [{"error": "Wrong."}]


def test_lists_name_models_with_their_tags() -> None:
    cards = [ModelCard("m", 1, max_model_len=64), ModelCard("cold:7b", 1)]
    tags, running, show, version = (page.body for page in PAGES)
    asked = PageRequest(cards, NO_REQUEST, b'{"model": "m:latest"}', "1.2")
    assert [each["model"] for each in json.loads(tags(asked))["models"]] == ["m:latest", "cold:7b"]
    assert [each["context_length"] for each in json.loads(running(asked))["models"]] == [64]
    assert json.loads(show(asked))["model_info"]["pagemill.context_length"] == 64
    assert json.loads(version(asked)) == {"version": "1.2"}
    pooled = asked._replace(cards=[cards[0]._replace(pools=True)])
    assert json.loads(show(asked))["capabilities"] == ["completion", "tools"]
    assert json.loads(show(pooled))["capabilities"] == ["embedding"]
    with pytest.raises(PagemillError, match="`x` does not exist"):
        show(asked._replace(raw=b'{"model": "x"}'))
