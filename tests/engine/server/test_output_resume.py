"""An answer that another engine continues has exactly the frames that the first engine would have sent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.ipc.messages import LogprobsOut, TokensOut
from pagemill_engine.output.processor import Frame, OutputProcessor
from pagemill_protocol.request.answer_format import AnswerFormat
from pagemill_protocol.request.continuing import PROGRESS_TOKENS, needs_prompt_logprobs
from pagemill_protocol.request.generate import ChoiceResume, FinishReason, GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

CALL = '<tool_call>{"name": "f", "arguments": {"é": "a b"}}</tool_call>'
MARKUP = st.lists(st.sampled_from(["<think>", "</think>", CALL, CALL[:40], "a\n", " é"]), max_size=4).map("".join)
TEXTS = st.lists(st.text(alphabet="abé€😀 \n", max_size=30) | MARKUP, min_size=1, max_size=3)
FORMATS = st.sampled_from(
    [None, AnswerFormat(tools="hermes"), AnswerFormat(tools="hermes", reasoning="think", starts_in_reasoning=True)]
)
DIALECTS = st.sampled_from(["chat", "completions", "messages", "responses"])
STOPS = st.lists(st.text(alphabet="abé€ ", min_size=1, max_size=4), max_size=2)
SIZES = st.lists(st.integers(1, 4), max_size=40)


class Script(NamedTuple):
    """The engine's outputs for a request: those of all choices in the order in which they arrive."""

    outputs: list[TokensOut]
    num_cached_tokens: int


def write_script(tokenizer: Tokenizer, request: GenerateRequest, texts: list[str], sizes: list[int]) -> Script:
    """Return a script in which all choices in turn send their text in pieces of these sizes and end by "length"."""
    pieces: list[list[TokensOut]] = []
    first = request.prompt_index * request.sampling.n
    for choice, text in enumerate(texts, start=first):
        token_ids = tokenizer.encode(text) if text else []
        cuts = [*sizes, *[1] * (len(token_ids) + 1)]
        mine: list[TokensOut] = []
        while token_ids or not mine:
            size = cuts.pop(0)
            finish: FinishReason | None = "length" if len(token_ids) <= size else None
            mine.append(make_output(request, choice, token_ids[:size], finish, cached=0 if mine else 2))
            token_ids = token_ids[size:]
        pieces.append(mine)
    turns = range(max(map(len, pieces)))
    return Script(with_prompt(request, [mine[turn] for turn in turns for mine in pieces if turn < len(mine)]), 2)


def with_prompt(request: GenerateRequest, outputs: list[TokensOut]) -> list[TokensOut]:
    """Add the prompt's log probabilities to the first output if a part of the answer still needs them."""
    if not needs_prompt_logprobs(request) or not outputs:
        return outputs
    entries = [LogprobsOut([token_id, 97], [-0.25, -0.5], 2) for token_id in request.prompt_token_ids[1:]]
    return [msgspec.structs.replace(outputs[0], prompt_logprobs=entries), *outputs[1:]]


def make_output(
    request: GenerateRequest, choice: int, token_ids: Sequence[int], finish: FinishReason | None, cached: int
) -> TokensOut:
    entries = None
    if request.sampling.logprobs is not None:
        entries = [LogprobsOut([token_id, token_id], [-0.5 * token_id, -0.5], 1) for token_id in token_ids]
    return TokensOut(
        request_id="r",
        choice=choice,
        token_ids=list(token_ids),
        logprobs=entries,
        finish_reason=finish,
        num_cached_tokens=cached,
    )


def rest_of(request: GenerateRequest, script: Script) -> list[TokensOut]:
    """Return the outputs of an engine that continues `request` and whose prefix cache has other contents."""
    given_tokens = {resume.index: len(resume.token_ids) for resume in request.resume}
    over = {resume.index for resume in request.resume if resume.finished}
    rest: list[TokensOut] = []
    begun: set[int] = set()
    for out in script.outputs:
        skipped = min(given_tokens.get(out.choice, 0), len(out.token_ids))
        given_tokens[out.choice] = given_tokens.get(out.choice, 0) - skipped
        if out.choice in over or (skipped == len(out.token_ids) and out.finish_reason is None):
            continue
        cached = 0 if out.choice in begun else 3
        begun.add(out.choice)
        rest.append(make_output(request, out.choice, out.token_ids[skipped:], out.finish_reason, cached))
    return with_prompt(request, rest)


def play(tokenizer: Tokenizer, request: GenerateRequest, outputs: list[TokensOut]) -> list[Frame]:
    processor = OutputProcessor(request, tokenizer)
    if processor.complete:
        return [processor.last_frame()]
    return [frame for out in outputs for frame in processor.push(out).frames]


def continued(request: GenerateRequest, frames: list[Frame]) -> GenerateRequest:
    """Return the request that a gateway sends to the next engine after these frames."""
    resumes: dict[int, ChoiceResume] = {}
    cached: int | None = None
    for meta, *_ in frames:
        before = resumes.get(meta.choice, ChoiceResume(meta.choice, [], 0))
        resumes[meta.choice] = ChoiceResume(
            meta.choice,
            [*before.token_ids, *meta.token_ids],
            meta.num_text_chars,
            meta.finish_reason is not None,
            meta.finish_reason,
            meta.num_events,
        )
        assert meta.position == len(resumes[meta.choice].token_ids)
        if cached is None and meta.choice == request.prompt_index * request.sampling.n:
            cached = meta.cached_tokens
    return msgspec.structs.replace(request, resume=list(resumes.values()), cached_tokens=cached)


def make_request(n: int, **fields: Any) -> GenerateRequest:
    of_sampling = {name: fields.pop(name) for name in ("logprobs", "stop", "prompt_logprobs") if name in fields}
    sampling = SamplingParams(n=n, max_tokens=None, **of_sampling)
    return GenerateRequest(
        request_id="r",
        model="m",
        prompt_token_ids=[104, 105, 106],
        sampling=sampling,
        created_unix_s=7,
        include_usage=True,
        **fields,
    )


@settings(deadline=None)
@given(TEXTS, STOPS, SIZES, st.sampled_from([None, 0, 1]), DIALECTS, st.data())
def test_a_stream_cut_after_any_frame_continues_byte_by_byte(
    byte_tokenizer: Tokenizer,
    texts: list[str],
    stop: list[str],
    sizes: list[int],
    logprobs: int | None,
    dialect: str,
    data: st.DataObject,
) -> None:
    echo: dict[str, Any] = {}
    if dialect == "completions":
        echo = {"prompt_text": "abc", "prompt_index": data.draw(st.integers(0, 2))}
    else:
        echo["answer_format"] = data.draw(FORMATS)
    if dialect in ("messages", "responses"):
        texts = texts[:1]
    echo["continuous_usage"] = data.draw(st.booleans(), "usage in every chunk")
    echo["return_token_ids"] = data.draw(st.booleans(), "token ids")
    echo["prompt_logprobs"] = data.draw(st.sampled_from([None, 0, 1]), "prompt logprobs")
    request = make_request(len(texts), stop=stop, logprobs=logprobs, stream=True, dialect=dialect, **echo)
    script = write_script(byte_tokenizer, request, texts, sizes)
    whole = play(byte_tokenizer, request, script.outputs)
    assert whole[-1].meta.last
    for _ in range(data.draw(st.integers(1, 2), "breaks")):
        num_frames = data.draw(st.integers(0, len(whole) - 1), "frames that arrived")
        second = continued(request, whole[:num_frames])
        rest = play(byte_tokenizer, second, rest_of(second, script))
        if second.cached_tokens is None:  # the first engine did not report its cache, so this is the second one's
            rest[-1] = whole[-1]
        whole_bytes = b"".join(frame.payload for frame in whole)
        assert b"".join(frame.payload for frame in [*whole[:num_frames], *rest]) == whole_bytes
        assert [frame.meta for frame in rest if not frame.meta.cached_tokens][-1] == whole[-1].meta


@settings(deadline=None)
@given(TEXTS, STOPS, SIZES, st.data())
def test_a_body_whose_engine_is_lost_after_any_frame_is_the_same(
    byte_tokenizer: Tokenizer, texts: list[str], stop: list[str], sizes: list[int], data: st.DataObject
) -> None:
    texts = [text * 2 for text in texts]  # long enough for several frames
    fields: dict[str, Any] = {"dialect": "completions", "prompt_text": "abc"}
    if data.draw(st.booleans(), "chat"):
        fields = {"answer_format": data.draw(FORMATS)}
    fields["return_token_ids"] = data.draw(st.booleans(), "token ids")
    fields["prompt_logprobs"] = data.draw(st.sampled_from([None, 0, 1]), "prompt logprobs")
    request = make_request(len(texts), stop=stop, logprobs=None, **fields)
    script = write_script(byte_tokenizer, request, texts, sizes)
    whole = play(byte_tokenizer, request, script.outputs)
    second = continued(request, whole[: data.draw(st.integers(0, len(whole) - 1))])
    rest = play(byte_tokenizer, second, rest_of(second, script))
    if second.cached_tokens is not None:
        assert rest[-1] == whole[-1]
    got, expected = json.loads(rest[-1].payload), json.loads(whole[-1].payload)
    assert got["choices"] == expected["choices"]
    assert got["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]


def test_a_body_reports_its_tokens_in_groups_and_each_token_once(byte_tokenizer: Tokenizer) -> None:
    request = make_request(1, stop=[], logprobs=None)
    text = "x" * (2 * PROGRESS_TOKENS + 3)
    frames = play(byte_tokenizer, request, write_script(byte_tokenizer, request, [text], []).outputs)
    assert [len(frame.meta.token_ids) for frame in frames] == [PROGRESS_TOKENS, PROGRESS_TOKENS, 0]
    assert [frame.meta.cached_tokens for frame in frames[:2]] == [2, 0]
    assert [bool(frame.payload) for frame in frames] == [False, False, True]


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 1},
        {"best_of": 3},
        {"use_beam_search": True, "n": 1, "best_of": 2},
    ],
)
def test_a_body_that_cannot_be_continued_reports_no_progress(byte_tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    sampling = SamplingParams(max_tokens=None, **fields)
    request = GenerateRequest(request_id="r", model="m", prompt_token_ids=[1], sampling=sampling)
    processor = OutputProcessor(request, byte_tokenizer)
    token_ids = byte_tokenizer.encode("y" * 3 * PROGRESS_TOKENS)
    entries = [LogprobsOut([token_id], [-1.0], 1) for token_id in token_ids]
    assert processor.push(TokensOut(request_id="r", token_ids=token_ids, logprobs=entries)).frames == []
