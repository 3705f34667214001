"""One request's output: events, bodies, and the metadata that a gateway keeps."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from special_tokens import with_special_tokens

from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.ipc.messages import LogprobsOut, TokensOut
from pagemill_engine.output.processor import Frame, OutputProcessor
from pagemill_protocol.errors import unavailable
from pagemill_protocol.request.answer_format import AnswerFormat
from pagemill_protocol.request.generate import ChoiceResume, GenerateRequest, Usage
from pagemill_protocol.request.sampling import SamplingParams


def make_request(sampling: SamplingParams | None = None, **fields: Any) -> GenerateRequest:
    defaults: dict[str, Any] = {"stream": True, "created_unix_s": 7, "prompt_token_ids": [1, 2, 3]}
    return GenerateRequest(
        request_id="r", model="m", sampling=sampling or SamplingParams(max_tokens=None), **{**defaults, **fields}
    )


def out(tokenizer: Tokenizer, text: str, choice: int = 0, finish: Any = None, **fields: Any) -> TokensOut:
    token_ids = tokenizer.encode(text) if text else []
    return TokensOut(request_id="r", choice=choice, token_ids=token_ids, finish_reason=finish, **fields)


def events(frames: list[Frame]) -> list[Any]:
    """Return the JSON of each SSE event; `[DONE]` stays text."""
    payload = b"".join(frame.payload for frame in frames).decode()
    assert payload == "" or payload.endswith("\n\n")
    lines = [event.removeprefix("data: ") for event in payload.split("\n\n") if event]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_a_streamed_chat_has_one_role_one_finish_reason_and_a_separate_end(byte_tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(make_request(include_usage=True), byte_tokenizer)
    progress = [
        processor.push(out(byte_tokenizer, "Hel", num_cached_tokens=2, queue_s=0.25)),
        processor.push(out(byte_tokenizer, "lo", finish="length")),
    ]
    frames = [frame for each in progress for frame in each.frames]
    first, second, usage, done = events(frames)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "Hel"}
    assert first["choices"][0]["finish_reason"] is None
    assert second["choices"][0]["delta"] == {"content": "lo"}
    assert second["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert done == "[DONE]"
    assert [each.done for each in progress] == [False, True]
    assert [frame.meta.last for frame in frames] == [False, False, True]
    assert frames[-1].meta.usage == Usage(3, 5, 2)
    assert [frame.meta.queue_s for frame in frames] == [0.0, 0.0, 0.25]
    assert (frames[0].meta.num_text_chars, frames[1].meta.num_text_chars, frames[1].meta.position) == (3, 5, 5)


@pytest.mark.parametrize("dialect", ["chat", "completions"])
def test_continuous_usage_counts_the_tokens_of_each_choice_in_every_chunk(
    byte_tokenizer: Tokenizer, dialect: str
) -> None:
    sampling = SamplingParams(n=2, max_tokens=None)
    request = make_request(sampling, include_usage=True, continuous_usage=True, dialect=dialect)
    processor = OutputProcessor(request, byte_tokenizer)
    outs = [("ab", 0, None), ("c", 1, None), ("", 0, "stop"), ("de", 1, None), ("f", 1, "length")]
    frames = [f for text, at, end in outs for f in processor.push(out(byte_tokenizer, text, at, end)).frames]
    *chunks, last, done = events(frames)
    counts = [(chunk["choices"][0]["index"], chunk["usage"]["completion_tokens"]) for chunk in chunks]
    assert counts == [(0, 2), (1, 1), (0, 2), (1, 3), (1, 4)]
    assert chunks[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert (last["choices"], last["usage"]["completion_tokens"], done) == ([], 6, "[DONE]")


def test_text_that_may_become_a_stop_string_gives_a_frame_without_an_event(byte_tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(make_request(SamplingParams(stop=["</s>"], max_tokens=None)), byte_tokenizer)
    held = processor.push(out(byte_tokenizer, "</"))
    assert (held.frames[0].payload, held.frames[0].meta.position, held.frames[0].meta.num_text_chars) == (b"", 2, 0)
    stopped = processor.push(out(byte_tokenizer, "s> and more"))
    assert stopped.stopped_choices == [0]
    assert stopped.done
    assert stopped.frames[0].meta.finish_reason == "stop"
    assert processor.usage.completion_tokens == len("</s>")
    assert not processor.push(out(byte_tokenizer, "", finish="abort")).frames


def test_choice_indices_start_at_the_prompts_own_index(byte_tokenizer: Tokenizer) -> None:
    request = make_request(SamplingParams(n=2, max_tokens=None), dialect="completions", prompt_index=3, stream=False)
    processor = OutputProcessor(request, byte_tokenizer)
    assert not processor.push(out(byte_tokenizer, "b", choice=7, finish="length")).done
    progress = processor.push(out(byte_tokenizer, "a", choice=6, finish="stop"))
    body = json.loads(progress.frames[0].payload)
    assert progress.done
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(6, ""), (7, "b")]
    assert body["usage"]["completion_tokens"] == 2


def test_an_echo_comes_once_before_the_text(byte_tokenizer: Tokenizer) -> None:
    request = make_request(dialect="completions", prompt_text="Say: ")
    processor = OutputProcessor(request, byte_tokenizer)
    chunks = events(processor.push(out(byte_tokenizer, "a")).frames + processor.push(out(byte_tokenizer, "b")).frames)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Say: a", "b"]


def test_logprobs_come_with_their_tokens_even_while_text_is_held(byte_tokenizer: Tokenizer) -> None:
    sampling = SamplingParams(stop=["xy"], max_tokens=None, logprobs=1)
    processor = OutputProcessor(make_request(sampling), byte_tokenizer)
    (x,) = byte_tokenizer.encode("x")
    entry = LogprobsOut([x, x, 5], [-0.5, -0.5, float("-inf")], 1)
    (chunk,) = events(processor.push(out(byte_tokenizer, "x", logprobs=[entry])).frames)
    (content,) = chunk["choices"][0]["logprobs"]["content"]
    assert (content["token"], content["logprob"], content["bytes"]) == ("x", -0.5, [120])
    assert [top["token"] for top in content["top_logprobs"]] == ["x"]


def test_a_resumed_stream_sends_no_second_role_and_no_text_twice(byte_tokenizer: Tokenizer) -> None:
    resume = [ChoiceResume(0, byte_tokenizer.encode("Hello"), num_text_chars=3)]
    processor = OutputProcessor(make_request(resume=resume), byte_tokenizer)
    progress = processor.push(out(byte_tokenizer, "!", finish="length"))
    chunk = events(progress.frames)[0]
    assert chunk["choices"][0]["delta"] == {"content": "lo!"}
    assert progress.frames[-1].meta.usage == Usage(3, 6, 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_failure_is_an_error_in_the_clients_format(byte_tokenizer: Tokenizer, stream: bool) -> None:
    processor = OutputProcessor(make_request(stream=stream), byte_tokenizer)
    frame = processor.failure(unavailable("no room"))
    body = frame.payload.removeprefix(b"data: ") if stream else frame.payload
    assert json.loads(body)["error"]["message"] == "no room"
    assert (frame.meta.last, frame.meta.error, frame.meta.error_status) == (True, "no room", 503)


def test_an_engine_error_keeps_its_status_code_and_field(byte_tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(make_request(), byte_tokenizer)
    progress = processor.push(
        TokensOut(request_id="r", error="too long", error_status=400, error_param="prompt", error_code="bad")
    )
    assert progress.error is not None
    assert (progress.error.status, progress.error.param, progress.error.code) == (400, "prompt", "bad")
    assert not progress.frames


def scored(tokenizer: Tokenizer, text: str, choice: int, *logprobs: float, **fields: Any) -> TokensOut:
    entries = [LogprobsOut([token], [value], 1) for token, value in zip(tokenizer.encode(text), logprobs, strict=True)]
    return out(tokenizer, text, choice, logprobs=entries, **fields)


def test_best_of_returns_the_most_likely_per_token_and_counts_all(byte_tokenizer: Tokenizer) -> None:
    sampling = SamplingParams(n=2, best_of=3, max_tokens=None, stop=["!"])
    request = make_request(sampling, dialect="completions", prompt_index=2, stream=False)
    processor = OutputProcessor(request, byte_tokenizer)
    # Engine choices 6 to 8: by their sums 8 would be the best, by their means it is the worst.
    progress = processor.push(scored(byte_tokenizer, "abc!x", 6, -1.0, -1.0, -0.5, -0.5, -90.0))
    assert (progress.stopped_choices, progress.frames, progress.done) == ([6], [], False)
    processor.push(scored(byte_tokenizer, "long", 7, -0.5, -0.5, -0.5, -0.5, finish="length"))
    progress = processor.push(scored(byte_tokenizer, "z", 8, -1.5, finish="stop"))
    body = json.loads(progress.frames[0].payload)
    assert progress.done
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(4, "long"), (5, "abc")]
    assert [choice["logprobs"] for choice in body["choices"]] == [None, None]
    assert body["usage"]["completion_tokens"] == 4 + 4 + 1


CALLS = 'Hm.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "g"}</tool_call>'
AGENT = AnswerFormat(tools="hermes", reasoning="think", starts_in_reasoning=True)


def test_streamed_calls_begin_with_id_and_name_followed_by_arguments(byte_tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(make_request(answer_format=AGENT), byte_tokenizer)
    frames = [
        frame
        for at, char in enumerate("why?\n</think>\n" + CALLS, start=1)
        for frame in processor.push(out(byte_tokenizer, char, finish="stop" if at == len(CALLS) + 14 else None)).frames
    ]
    *chunks, done = events(frames)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert done == "[DONE]"
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "why?"
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "why?"
    assert "".join(delta.get("content", "") for delta in deltas) == "Hm."
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    begins = [call for call in calls if "id" in call]
    assert [(call["index"], call["type"], call["function"]) for call in begins] == [
        (0, "function", {"name": "f", "arguments": ""}),
        (1, "function", {"name": "g", "arguments": ""}),
    ]
    assert begins[0]["id"] != begins[1]["id"]
    arguments = ["".join(call["function"]["arguments"] for call in calls if call["index"] == index) for index in (0, 1)]
    assert arguments == ['{"a": 1}', "{}"]
    assert len([call for call in calls if call["index"] == 0]) > 3, "arguments must arrive in pieces"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["tool_calls"]


def test_a_body_with_calls_has_the_ids_of_its_stream_and_counts_reasoning_tokens(byte_tokenizer: Tokenizer) -> None:
    text = "why?</think>" + CALLS
    bodies = [
        OutputProcessor(make_request(answer_format=AGENT, stream=stream), byte_tokenizer).push(
            out(byte_tokenizer, text, finish="stop")
        )
        for stream in (False, True)
    ]
    body = json.loads(bodies[0].frames[-1].payload)
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("Hm.", "why?", "why?")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "f", "arguments": '{"a": 1}'},
        {"name": "g", "arguments": "{}"},
    ]
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("why?</think>")}
    assert body["usage"]["completion_tokens"] == len(text)
    streamed = [
        call["id"]
        for chunk in events(bodies[1].frames)[:-1]
        for call in chunk["choices"][0]["delta"].get("tool_calls", ())
        if "id" in call
    ]
    assert [call["id"] for call in message["tool_calls"]] == streamed


def test_an_answer_of_calls_without_text_has_null_content(byte_tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(make_request(answer_format=AnswerFormat(tools="hermes"), stream=False), byte_tokenizer)
    body = json.loads(processor.push(out(byte_tokenizer, CALLS[3:], finish="length")).frames[-1].payload)
    assert body["choices"][0]["message"]["content"] is None
    assert body["choices"][0]["finish_reason"] == "length"
    assert "completion_tokens_details" not in body["usage"]


# -- prompt and token ids ----------------------------------------------------------------------------------------


def of_prompt(tokenizer: Tokenizer, text: str) -> list[LogprobsOut]:
    """Return the log probabilities of each character after the first: second most likely, after an "x"."""
    (x,) = tokenizer.encode("x")
    return [LogprobsOut([token_id, x], [-1.5, -0.5], 2) for token_id in tokenizer.encode(text)[1:]]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("dialect", ["chat", "completions"])
def test_prompt_logprobs_are_sent_once_in_vllms_format(byte_tokenizer: Tokenizer, dialect: str, stream: bool) -> None:
    sampling = SamplingParams(max_tokens=None, prompt_logprobs=1)
    prompt = byte_tokenizer.encode("abc")
    processor = OutputProcessor(
        make_request(sampling, dialect=dialect, stream=stream, prompt_token_ids=prompt), byte_tokenizer
    )
    entries = of_prompt(byte_tokenizer, "abc")
    frames = [
        *processor.push(out(byte_tokenizer, "Hi", prompt_logprobs=entries)).frames,
        *processor.push(out(byte_tokenizer, "!", finish="length")).frames,
    ]
    bodies = events(frames)[:-1] if stream else [json.loads(frames[-1].payload)]
    places = [body if dialect == "chat" else body["choices"][0] for body in bodies]
    assert ["prompt_logprobs" in place for place in places] == [at == 0 for at in range(len(places))]
    x = str(byte_tokenizer.encode("x")[0])
    assert places[0]["prompt_logprobs"] == [
        None,
        *(
            {
                str(token_id): {"logprob": -1.5, "rank": 2, "decoded_token": letter},
                x: {"logprob": -0.5, "rank": 1, "decoded_token": "x"},
            }
            for token_id, letter in zip(prompt[1:], "bc", strict=True)
        ),
    ]


@pytest.mark.parametrize("stream", [True, False])
def test_an_echo_with_logprobs_starts_with_the_prompts_tokens(byte_tokenizer: Tokenizer, stream: bool) -> None:
    sampling = SamplingParams(max_tokens=None, logprobs=1)
    request = make_request(
        sampling,
        dialect="completions",
        stream=stream,
        prompt_text="abc",
        prompt_token_ids=byte_tokenizer.encode("abc"),
    )
    processor = OutputProcessor(request, byte_tokenizer)
    d, e = ([LogprobsOut([token_id, token_id], [-0.25, -0.25], 1)] for token_id in byte_tokenizer.encode("de"))
    frames = [
        *processor.push(out(byte_tokenizer, "d", logprobs=d, prompt_logprobs=of_prompt(byte_tokenizer, "abc"))).frames,
        *processor.push(out(byte_tokenizer, "e", logprobs=e, finish="length")).frames,
    ]
    bodies = [each for each in events(frames)[:-1] if each["choices"]] if stream else [json.loads(frames[-1].payload)]
    choices = [body["choices"][0] for body in bodies]
    assert "".join(choice["text"] for choice in choices) == "abcde"
    assert [token for choice in choices for token in choice["logprobs"]["tokens"]] == list("abcde")
    assert [at for choice in choices for at in choice["logprobs"]["text_offset"]] == [0, 1, 2, 3, 4]
    values = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
    assert values == [None, -1.5, -1.5, -0.25, -0.25]
    tops = [top for choice in choices for top in choice["logprobs"]["top_logprobs"]]
    assert tops[:2] == [None, {"x": -0.5, "b": -1.5}]
    assert not any("prompt_logprobs" in choice for choice in choices), "prompt_logprobs was not requested by name"


def offsets_of(tokenizer: Tokenizer, prompt: str | None, prompt_ids: list[int], token_ids: list[int]) -> list[Any]:
    """Return tokens, offsets and text of a completion, each token in its own chunk. `prompt`: its echo, or None."""
    sampling = SamplingParams(max_tokens=None, logprobs=0)
    request = make_request(sampling, dialect="completions", prompt_text=prompt, prompt_token_ids=prompt_ids)
    processor = OutputProcessor(request, tokenizer)
    of_prompt = [LogprobsOut([each], [-0.5], 1) for each in prompt_ids[1:]] if prompt is not None else []
    frames = []
    for at, token_id in enumerate(token_ids):
        finish: Any = "length" if at == len(token_ids) - 1 else None
        entries = [LogprobsOut([token_id], [-0.5], 1)]
        pushed = TokensOut(request_id="r", token_ids=[token_id], logprobs=entries, finish_reason=finish)
        frames += processor.push(msgspec.structs.replace(pushed, prompt_logprobs=[] if at else of_prompt)).frames
    choices = [each["choices"][0] for each in events(frames)[:-1]]
    return [
        [token for choice in choices for token in choice["logprobs"]["tokens"]],
        [offset for choice in choices for offset in choice["logprobs"]["text_offset"]],
        "".join(choice["text"] for choice in choices),
    ]


def test_offsets_of_tokens_within_a_character_are_those_of_the_character(byte_tokenizer: Tokenizer) -> None:
    prompt, answer = "Hi 🙂 a", "é!"
    tokens, offsets, text = offsets_of(
        byte_tokenizer, prompt, byte_tokenizer.encode(prompt), byte_tokenizer.encode(answer)
    )
    assert text == prompt + answer
    assert offsets == [0, 1, 2, 3, 3, 3, 3, 4, 5, 6, 6, 7]
    assert len(tokens) == len(offsets)
    cut = byte_tokenizer.encode("🙂")[:2] + byte_tokenizer.encode("ab")
    assert offsets_of(byte_tokenizer, None, [1], cut)[1:] == [[0, 0, 1, 2], "\N{REPLACEMENT CHARACTER}ab"]


def test_offsets_point_into_the_text_which_leaves_out_special_tokens(byte_tokenizer: Tokenizer) -> None:
    tokenizer = with_special_tokens(byte_tokenizer, ["<s>", "<|x|>"])
    encode = tokenizer.encode
    prompt_ids, answer_ids = [256, *encode("a<|x|>b")], [*encode("c"), 257, *encode("d"), 256, *encode("e")]
    assert offsets_of(tokenizer, "a<|x|>b", prompt_ids, answer_ids) == [
        ["<s>", "a", "<|x|>", "b", "c", "<|x|>", "d", "<s>", "e"],
        [0, 0, 1, 6, 7, 8, 8, 9, 9],
        "a<|x|>bcde",
    ]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("dialect", ["chat", "completions"])
def test_each_token_id_is_sent_once_and_the_prompts_with_the_first(
    byte_tokenizer: Tokenizer, dialect: str, stream: bool
) -> None:
    request = make_request(
        SamplingParams(max_tokens=None, stop=["!?"]), dialect=dialect, stream=stream, return_token_ids=True
    )
    processor = OutputProcessor(request, byte_tokenizer)
    frames = [
        frame
        for text, end in (("Hi", None), ("!", None), ("", "length"))
        for frame in processor.push(out(byte_tokenizer, text, finish=end)).frames
    ]
    bodies = events(frames)[:-1] if stream else [json.loads(frames[-1].payload)]
    assert len(bodies) == (3 if stream else 1)
    assert [token for body in bodies for token in body["choices"][0]["token_ids"]] == byte_tokenizer.encode("Hi!")
    places = [body if dialect == "chat" else body["choices"][0] for body in bodies]
    assert [place.get("prompt_token_ids") for place in places] == [[1, 2, 3], *[None] * (len(places) - 1)]


def test_named_tokens_are_shown_instead_of_the_most_likely(byte_tokenizer: Tokenizer) -> None:
    sampling = SamplingParams(max_tokens=None, logprobs=0, logprob_token_ids=byte_tokenizer.encode("yz"))
    processor = OutputProcessor(make_request(sampling, dialect="completions", stream=False), byte_tokenizer)
    h, y, z = byte_tokenizer.encode("Hyz")
    pushed = out(byte_tokenizer, "H", finish="length", logprobs=[LogprobsOut([h, y, z], [-0.5, -1.0, -2.0], 1)])
    (choice,) = json.loads(processor.push(pushed).frames[-1].payload)["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"y": -1.0, "z": -2.0, "H": -0.5}]


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_of_the_prompt_alone_has_no_generated_token(byte_tokenizer: Tokenizer, stream: bool) -> None:
    request = make_request(
        SamplingParams(max_tokens=1, logprobs=1),
        dialect="completions",
        stream=stream,
        prompt_text="abc",
        prompt_only=True,
        prompt_token_ids=byte_tokenizer.encode("abc"),
    )
    processor = OutputProcessor(request, byte_tokenizer)
    pushed = out(byte_tokenizer, "d", finish="stop", prompt_logprobs=of_prompt(byte_tokenizer, "abc"))
    frames = processor.push(pushed).frames
    (choice,) = (events(frames)[0] if stream else json.loads(frames[-1].payload))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5, -1.5]
    assert processor.usage.completion_tokens == 0


@pytest.mark.parametrize("predicted", [[], [1, 2]])
def test_proposed_tokens_are_counted_for_the_log_and_those_of_a_prediction_for_the_client(
    byte_tokenizer: Tokenizer, predicted: list[int]
) -> None:
    processor = OutputProcessor(
        make_request(SamplingParams(n=2), stream=False, predicted_token_ids=predicted), byte_tokenizer
    )
    processor.push(out(byte_tokenizer, "abc", finish="length", num_proposed=4, num_accepted=2))
    last = processor.push(out(byte_tokenizer, "de", 1, "length", num_proposed=3, num_accepted=1)).frames[-1]
    details = json.loads(last.payload)["usage"].get("completion_tokens_details")
    assert details == ({"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 4} if predicted else None)
    assert (processor.usage.proposed_tokens, processor.usage.accepted_tokens) == (7, 3)
