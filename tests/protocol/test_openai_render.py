"""Answers have the types of the official client and are read by its stream parser."""

from __future__ import annotations

import math
from typing import Any

import orjson
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from pagemill_api.openai import logprobs, render
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_protocol.errors import unavailable
from pagemill_protocol.request.generate import GenerateRequest, Usage
from pagemill_protocol.request.sampling import SamplingParams

HEAD = render.Head("chatcmpl-1", "m", 7, "fp_abc")
USAGE = Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=4)
USAGE_OBJECT = {
    "prompt_tokens": 5,
    "completion_tokens": 3,
    "total_tokens": 8,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def position(tokenizer: Tokenizer, text: str = "ab", num_top: int = 2) -> logprobs.PositionLogprobs:
    chosen, other = tokenizer.encode(text)
    return logprobs.position(tokenizer, [chosen, chosen, other], [-0.5, -0.5, -math.inf], num_top)


def test_a_stream_of_chat_chunks_has_the_clients_types() -> None:
    chunks = [
        render.chat_chunk(HEAD, 0, "", role=True),
        render.chat_chunk(HEAD, 0, "Hé\n"),
        render.chat_chunk(HEAD, 0, None, finish_reason="stop"),
        render.usage_chunk(HEAD, "chat.completion.chunk", USAGE),
    ]
    parsed = [ChatCompletionChunk.model_validate(orjson.loads(chunk)) for chunk in chunks]
    assert [chunk.id for chunk in parsed] == ["chatcmpl-1"] * 4
    assert {chunk.object for chunk in parsed} == {"chat.completion.chunk"}
    assert parsed[0].choices[0].delta.role == "assistant"
    assert parsed[0].choices[0].delta.content == ""
    assert parsed[1].choices[0].delta.content == "Hé\n"
    assert parsed[1].choices[0].finish_reason is None
    assert orjson.loads(chunks[2])["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert orjson.loads(chunks[3])["choices"] == []
    assert orjson.loads(chunks[3])["usage"] == USAGE_OBJECT


def test_requested_usage_is_null_in_all_chunks_but_the_last() -> None:
    assert orjson.loads(render.chat_chunk(HEAD, 0, "a", include_usage=True))["usage"] is None
    assert "usage" not in orjson.loads(render.chat_chunk(HEAD, 0, "a"))
    assert orjson.loads(render.completion_chunk(HEAD, 0, "a", include_usage=True))["usage"] is None


def test_a_chat_body_has_the_clients_type(byte_tokenizer: Tokenizer) -> None:
    content = logprobs.chat([position(byte_tokenizer)])
    choices = [render.Choice(0, "a", "stop", content), render.Choice(1, "b", "length")]
    body = orjson.loads(render.chat_body(HEAD, choices, USAGE))
    parsed = ChatCompletion.model_validate(body)
    assert (parsed.object, parsed.created, parsed.model, parsed.system_fingerprint) == (
        "chat.completion",
        7,
        "m",
        "fp_abc",
    )
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "a", "refusal": None}
    assert [choice.finish_reason for choice in parsed.choices] == ["stop", "length"]
    assert body["usage"] == USAGE_OBJECT
    entry = parsed.choices[0].logprobs.content[0]  # type: ignore[union-attr,index]
    assert (entry.token, entry.bytes, entry.logprob) == ("a", [97], -0.5)
    assert [(top.token, top.logprob) for top in entry.top_logprobs] == [("a", -0.5), ("b", -9999.0)]


def test_a_completion_body_and_chunk_have_the_clients_types(byte_tokenizer: Tokenizer) -> None:
    values = logprobs.completions([position(byte_tokenizer)._replace(text_offset=each) for each in (10, 11)])
    body = orjson.loads(render.completion_body(HEAD, [render.Choice(0, "aa", "stop", values)], USAGE))
    parsed = Completion.model_validate(body)
    assert parsed.object == "text_completion"
    assert body["choices"][0]["logprobs"] == {
        "text_offset": [10, 11],
        "token_logprobs": [-0.5, -0.5],
        "tokens": ["a", "a"],
        "top_logprobs": [{"a": -0.5, "b": -9999.0}] * 2,
    }
    chunk = Completion.model_validate(orjson.loads(render.completion_chunk(HEAD, 2, "x", finish_reason="length")))
    assert (chunk.choices[0].index, chunk.choices[0].text, chunk.choices[0].finish_reason) == (2, "x", "length")


def test_without_alternatives_top_logprobs_are_empty_or_null(byte_tokenizer: Tokenizer) -> None:
    only_chosen = [position(byte_tokenizer, num_top=0)]
    assert logprobs.chat(only_chosen)["content"][0]["top_logprobs"] == []
    assert logprobs.completions(only_chosen)["top_logprobs"] is None


def test_logprobs_of_half_a_character_contain_its_bytes(byte_tokenizer: Tokenizer) -> None:
    entry = logprobs.chat([position(byte_tokenizer, "é")])["content"][0]
    assert entry["bytes"] == [0xC3]
    orjson.dumps(entry)


def test_bodies_of_several_prompts_are_merged_into_one() -> None:
    bodies = [
        render.completion_body(HEAD, [render.Choice(index, str(index), "stop") for index in indices], USAGE)
        for indices in ([2, 3], [0, 1])
    ]
    merged = orjson.loads(b"".join(render.merge_completion_bodies(bodies)))
    assert [choice["index"] for choice in merged["choices"]] == [0, 1, 2, 3]
    assert merged["usage"]["total_tokens"] == 16
    assert merged["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
    assert merged["id"] == "chatcmpl-1"


def test_metadata_and_choice_index_follow_the_request() -> None:
    request = GenerateRequest(
        request_id="cmpl-1-2", response_id="cmpl-1", model="m", prompt_token_ids=[1], sampling=SamplingParams(n=3),
        prompt_index=2, created_unix_s=7,
    )  # fmt: skip
    assert render.head(request, "fp_x") == render.Head("cmpl-1", "m", 7, "fp_x")
    assert [render.choice_index(request, choice) for choice in range(3)] == [6, 7, 8]
    alone = GenerateRequest(request_id="cmpl-9", model="m", prompt_token_ids=[1], sampling=SamplingParams())
    assert render.head(alone).id == "cmpl-9"


def test_the_fingerprint_identifies_the_weights() -> None:
    assert render.fingerprint("0123456789abcdef") == "fp_0123456789ab"
    assert render.fingerprint("") == "fp_unknown"


def test_events_are_formatted_as_server_sent_events() -> None:
    assert render.sse(b"{}") == b"data: {}\n\n"
    assert render.SSE_DONE == b"data: [DONE]\n\n"
    event = render.sse_error(unavailable("The engine is gone."))
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert orjson.loads(event[6:])["error"]["message"] == "The engine is gone."


async def test_the_official_client_reads_the_stream_to_its_end_and_raises_its_error() -> None:
    import httpx2
    import openai

    chunks = render.sse(render.chat_chunk(HEAD, 0, "a", role=True)) + b": keep-alive\n\n"
    chunks += render.sse(render.chat_chunk(HEAD, 0, "b", finish_reason="stop"))

    def client(stream: bytes) -> openai.AsyncOpenAI:
        def answer(request: httpx2.Request) -> httpx2.Response:
            return httpx2.Response(200, content=stream, headers={"content-type": render.SSE_CONTENT_TYPE})

        http = httpx2.AsyncClient(transport=httpx2.MockTransport(answer))
        return openai.AsyncOpenAI(api_key="k", base_url="http://test/v1", http_client=http)

    async def read(stream: bytes) -> str:
        text = ""
        async with client(stream) as api:
            answer: Any = await api.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}], stream=True
            )
            async for chunk in answer:
                text += chunk.choices[0].delta.content
        return text

    assert await read(chunks + render.SSE_DONE) == "ab"
    with pytest.raises(openai.APIError, match=r"The engine is gone\."):
        await read(chunks + render.sse_error(unavailable("The engine is gone.")))


def test_the_model_list_has_the_clients_type() -> None:
    body = orjson.loads(render.models_body([render.ModelCard("a", 5, 2048, "package://x"), render.ModelCard("b", 5)]))
    assert body["object"] == "list"
    assert [Model.model_validate(entry).id for entry in body["data"]] == ["a", "b"]
    assert body["data"][0]["max_model_len"] == 2048
    assert body["data"][0]["root"] == "package://x"
    assert orjson.loads(render.model_body(render.ModelCard("b", 5))) == body["data"][1]


def test_answers_of_tokenize_and_detokenize_have_their_fields() -> None:
    assert orjson.loads(render.tokenize_body([1, 2], 100)) == {
        "count": 2,
        "max_model_len": 100,
        "tokens": [1, 2],
        "token_strs": None,
    }
    assert orjson.loads(render.tokenize_body([1], 100, ["a"]))["token_strs"] == ["a"]
    assert orjson.loads(render.detokenize_body("x")) == {"prompt": "x"}
