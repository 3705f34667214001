"""Answers whose engines are lost at any byte, any number of times, have the bytes of an undisturbed run.

The engines are scripts rendered by the engine's own output process, and the relay is the gateway's. A simulated network
between them cuts each answer at random positions, after which another engine gets the relay's next request.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import msgspec
import pytest
from byte_bundle import byte_bundle
from frame_stream import FrameStream
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import num_examples
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.ipc.messages import LogprobsOut, TokensOut
from pagemill_engine.output.processor import Frame, OutputProcessor
from pagemill_gateway.metrics.worker import WorkerMetrics
from pagemill_gateway.relay.answer_stream import AskLiveness
from pagemill_gateway.relay.delivery import AnswerBroken
from pagemill_gateway.relay.journal import Journal, JournalCapacity, JournalGap
from pagemill_gateway.relay.keep_alive import KeepAlive
from pagemill_gateway.relay.relay import Relay
from pagemill_gateway.relay.sinks import BodySink, StreamSink
from pagemill_gateway.request_record import RequestRecord
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.frames import encode_frame
from pagemill_protocol.request.generate import ChoiceResume, FrameMeta, GenerateRequest, Usage
from pagemill_protocol.request.sampling import SamplingParams
from pagemill_routing.attempts.attempts import MAX_ENDS
from pagemill_routing.brain.interface import (
    DEFAULT_TICKET,
    Assignment,
    CompletedRequest,
    FailureKind,
    HashScheme,
    Liveness,
    QueueTicket,
    RetryContext,
    RoutingRequest,
    Target,
)

TEXTS = st.lists(st.text(alphabet="abé€😀 \n", min_size=1, max_size=25), min_size=1, max_size=3)
STOPS = st.lists(st.text(alphabet="abé€ ", min_size=1, max_size=4), max_size=2)
TARGET = Target("ns/d", "m", "bundle", 4096, None, "deployment", HashScheme("w", "float32", 16, 4))
End = Literal["reset", "eof", "garbage"]


def _encoded(frame: Frame) -> bytes:
    return encode_frame(frame.meta, b"".join((frame.payload, *frame.rest)))


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer of bytes, so that any cut may fall inside a character."""
    return Tokenizer(byte_bundle())


class Break(NamedTuple):
    """The position at which the network ends one attempt, as a share of its bytes, and the size of the pieces."""

    share: float
    piece_bytes: int
    how: End


BREAKS = st.lists(
    st.builds(Break, st.floats(0, 1), st.integers(1, 400), st.sampled_from(["reset", "eof", "garbage"])), max_size=4
)


class Engines:
    """The other end of the relay: a brain that always finds another engine, and the network to it."""

    def __init__(self, tokenizer: Tokenizer, texts: list[str], breaks: list[Break]) -> None:
        self.requests: list[GenerateRequest] = []
        self.agains: list[RetryContext | None] = []
        self.num_computed = 0
        """The number of tokens that engines have generated."""
        self.weights_digests: list[str] = []
        """The digests of the engines in turn; afterwards all have "w"."""
        self.record = RequestRecord(route="/v1/completions")
        """The record of the latest request."""
        self._tokenizer = tokenizer
        self._texts = texts
        self._breaks = breaks

    # The brain.

    async def choose(
        self,
        target: Target,
        tried: frozenset[str],
        routing_request: RoutingRequest,
        *,
        ticket: QueueTicket = DEFAULT_TICKET,
        retry: RetryContext | None = None,
    ) -> Assignment:
        self.agains.append(retry)
        return Assignment(len(self.agains), f"engine-{len(self.agains)}", "", "")

    def accepted(self, choice: Assignment) -> None: ...

    def started(self, choice: Assignment, ttft_ms: float | None = None) -> None: ...

    async def liveness(self, endpoint_id: str) -> Liveness:
        return "working"

    async def expected_s(self, model: str, ticket: QueueTicket) -> float | None:
        return None

    def freed(self, choice: Assignment) -> None: ...

    def finished(self, choice: Assignment, served: CompletedRequest | None = None) -> None: ...

    def failed(self, choice: Assignment, kind: FailureKind) -> None: ...

    # The network.

    async def open(
        self,
        choice: Assignment,
        body: bytes,
        request_id: str,
        liveness: AskLiveness,
        on_accepted: Callable[[], None],
        on_freed: Callable[[], None],
    ) -> FrameStream:
        request = msgspec.msgpack.decode(body, type=GenerateRequest)
        self.requests.append(request)
        digest = self.weights_digests.pop(0) if self.weights_digests else "w"
        network_break = self._breaks.pop(0) if self._breaks else None
        on_accepted()
        return FrameStream(_Network(self._answer(request), network_break), digest, 10.0, liveness)

    def _answer(self, request: GenerateRequest) -> list[bytes]:
        processor = OutputProcessor(request, self._tokenizer, "fp")
        if processor.complete:
            return [_encoded(processor.last_frame())]
        frames: list[bytes] = []
        resumes = {resume.index: resume for resume in request.resume}
        first = request.prompt_index * request.sampling.n
        turns = [self._turns(first + number, text, resumes) for number, text in enumerate(self._texts)]
        while any(turns):
            for mine in turns:
                if mine:
                    frames += [_encoded(frame) for frame in processor.push(mine.pop(0)).frames]
        return frames

    def _turns(self, choice: int, text: str, resumes: dict[int, ChoiceResume]) -> list[TokensOut]:
        resume = resumes.get(choice, ChoiceResume(choice, [], 0))
        if resume.finished:
            return []
        token_ids = self._tokenizer.encode(text)
        assert token_ids[: len(resume.token_ids)] == resume.token_ids
        rest = token_ids[len(resume.token_ids) :]
        self.num_computed += len(rest)
        outputs = [TokensOut(request_id="r", choice=choice, finish_reason="length")] if not rest else []
        for number, token_id in enumerate(rest, start=1):
            outputs.append(
                TokensOut(
                    request_id="r",
                    choice=choice,
                    token_ids=[token_id],
                    logprobs=[LogprobsOut([token_id, 97], [-token_id / 7, -0.5], 1)],
                    finish_reason="length" if number == len(rest) else None,
                    num_cached_tokens=len(self.requests) if number == 1 else 0,  # each engine has a cache of its own
                )
            )
        return outputs


class _Network:
    def __init__(self, frames: list[bytes], network_break: Break | None) -> None:
        self._break = network_break
        self._piece_bytes = network_break.piece_bytes if network_break else 64
        self._left = b"".join(frames)
        if network_break is None:
            return
        if network_break.how == "garbage":  # inside a frame, the end cannot be distinguished from the payload
            self._left = b"".join(frames[: int(len(frames) * network_break.share)])
        else:
            self._left = self._left[: int(len(self._left) * network_break.share)]

    async def receive(self) -> bytes:
        piece, self._left = self._left[: self._piece_bytes], self._left[self._piece_bytes :]
        if piece or self._break is None or self._break.how == "eof":
            return piece
        if self._break.how == "reset":
            raise ConnectionResetError
        return b"\xff" * 40


def _by_choice(data: bytes) -> dict[int, list[bytes]]:
    """Return the events of each choice, whose relative order is undefined, without the cached tokens."""
    events: dict[int, list[bytes]] = {}
    for event in re.sub(rb'"cached_tokens":\d+', b"", data).split(b"\n\n"):
        index = re.search(rb'"index":(\d+)', event)
        events.setdefault(int(index[1]) if index is not None else -1, []).append(event)
    return events


def serve(
    engines: Engines, request: GenerateRequest, capacity: int = 10_000, max_attempts: int = 5
) -> tuple[bytes, Usage]:
    """Serve the request; return the client's bytes and the usage."""
    written: list[bytes] = []

    async def write(data: bytes) -> None:
        written.append(data)

    async def run() -> Usage:
        keep_alive = KeepAlive(10.0)
        relay = Relay(
            engines,
            engines,  # type: ignore[arg-type]
            WorkerMetrics(),
            keep_alive,
            max_attempts=max_attempts,
            journal_tokens=capacity,
        )
        sink = StreamSink(write) if request.stream else BodySink()
        record = engines.record = RequestRecord(route="/v1/completions", stream=request.stream)
        try:
            usage = await relay.run(TARGET, request, RoutingRequest(len(request.prompt_token_ids)), sink, record)
            await sink.finish()
        finally:
            keep_alive.close()
            assert relay.journal_capacity.num_tokens == 0
        if isinstance(sink, BodySink):
            written.append(sink.body)
        return usage

    usage = asyncio.run(run())
    return b"".join(written), usage


def make_request(texts: list[str], *, stream: bool, **fields: Any) -> GenerateRequest:
    sampling = {"n": len(texts), "max_tokens": None, **fields.pop("sampling", {})}
    defaults: dict[str, Any] = {"prompt_token_ids": [104, 105], "created_unix_s": 7, "include_usage": stream}
    return GenerateRequest(
        request_id="r", model="m", sampling=SamplingParams(**sampling), stream=stream, **{**defaults, **fields}
    )


@settings(deadline=None, max_examples=num_examples(60))
@given(TEXTS, STOPS, BREAKS, st.sampled_from([None, 1]), st.sampled_from(["chat", "completions"]))
def test_a_stream_cut_at_any_byte_equals_the_undisturbed_one(
    byte_tokenizer: Tokenizer,
    texts: list[str],
    stop: list[str],
    breaks: list[Break],
    logprobs: int | None,
    dialect: str,
) -> None:
    fields = {"prompt_text": "hi", "prompt_index": 2} if dialect == "completions" else {}
    request = make_request(texts, stream=True, dialect=dialect, sampling={"stop": stop, "logprobs": logprobs}, **fields)
    expected, usage = serve(Engines(byte_tokenizer, texts, []), request)
    engines = Engines(byte_tokenizer, texts, list(breaks))
    got, got_usage = serve(engines, request)
    assert _by_choice(got) == _by_choice(expected)
    assert msgspec.structs.replace(got_usage, cached_tokens=1) == usage


@settings(deadline=None, max_examples=num_examples(60))
@given(TEXTS, STOPS, BREAKS)
def test_a_body_whose_engines_are_lost_equals_the_undisturbed_one(
    byte_tokenizer: Tokenizer, texts: list[str], stop: list[str], breaks: list[Break]
) -> None:
    texts = [text * 3 for text in texts]
    request = make_request(texts, stream=False, dialect="completions", sampling={"stop": stop}, prompt_text="hi")
    expected = json.loads(serve(Engines(byte_tokenizer, texts, []), request)[0])
    got = json.loads(serve(Engines(byte_tokenizer, texts, list(breaks)), request)[0])
    assert got["choices"] == expected["choices"]
    assert got["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]


@pytest.mark.parametrize("stream", [True, False])
def test_the_next_engine_computes_only_the_missing_tokens(byte_tokenizer: Tokenizer, stream: bool) -> None:
    text = "x" * 200
    engines = Engines(byte_tokenizer, [text], [Break(0.5 if stream else 0.9, 50, "reset")])
    serve(engines, make_request([text], stream=stream))
    first, second = engines.requests
    assert (first.resume, first.weights_digest) == ([], "")
    assert second.weights_digest == "w"
    (resume,) = second.resume
    assert len(resume.token_ids) > 50
    assert engines.num_computed == len(text) + len(text) - len(resume.token_ids)
    assert (second.request_id, second.response_id) == ("r-try2", "r")
    retry = engines.agains[1]
    assert retry is not None
    assert (retry.decision, retry.kind, retry.weights_digest) == (1, "lost", "w")


@pytest.mark.parametrize("fields", [{"logprobs": 1}, {"use_beam_search": True, "best_of": 1}])
def test_a_body_that_cannot_be_continued_starts_again(byte_tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    engines = Engines(byte_tokenizer, ["x" * 100], [Break(0.9, 50, "reset")])
    serve(engines, make_request(["x" * 100], stream=False, sampling=fields))
    assert [request.resume for request in engines.requests] == [[], []]


def test_an_answer_beyond_the_journals_capacity_is_served_and_cannot_be_continued(byte_tokenizer: Tokenizer) -> None:
    request = make_request(["x" * 50], stream=True)
    whole, _ = serve(Engines(byte_tokenizer, ["x" * 50], []), request, capacity=10)
    assert whole.endswith(b"data: [DONE]\n\n")
    with pytest.raises(AnswerBroken) as broken:
        serve(Engines(byte_tokenizer, ["x" * 50], [Break(0.5, 50, "reset")]), request, capacity=10)
    assert broken.value.error.code == "bad_upstream"


@pytest.mark.parametrize("capacity", [10_000, 10])
def test_generated_tokens_are_counted_once_however_often_they_are_computed(
    byte_tokenizer: Tokenizer, capacity: int
) -> None:
    """An answer within the journal's capacity is continued, a longer one starts again."""
    request = make_request(["x" * 100], stream=False)
    undisturbed = Engines(byte_tokenizer, ["x" * 100], [])
    usage = serve(undisturbed, request, capacity)[1]
    engines = Engines(byte_tokenizer, ["x" * 100], [Break(0.9, 50, "reset")])
    assert serve(engines, request, capacity)[1].completion_tokens == usage.completion_tokens == 100
    assert (engines.record.num_migrations, engines.record.num_retries) == ((1, 0) if capacity > 100 else (0, 1))
    assert engines.record.num_delivered == undisturbed.record.num_delivered


def test_an_engine_that_does_not_name_its_weights_is_not_continued(byte_tokenizer: Tokenizer) -> None:
    engines = Engines(byte_tokenizer, ["x" * 50], [Break(0.5, 50, "reset")])
    engines.weights_digests = [""]
    with pytest.raises(AnswerBroken):
        serve(engines, make_request(["x" * 50], stream=True))


def test_a_stream_that_makes_progress_may_be_lost_more_often_than_a_request_may_be_retried(
    byte_tokenizer: Tokenizer,
) -> None:
    text = "y" * 300
    request = make_request([text], stream=True)
    expected = serve(Engines(byte_tokenizer, [text], []), request)
    engines = Engines(byte_tokenizer, [text], [Break(0.2, 200, "reset") for _ in range(8)])
    assert serve(engines, request, max_attempts=2) == expected
    assert len(engines.requests) == 9


def test_every_ended_engine_is_reported_to_the_brain_and_their_number_is_bounded(byte_tokenizer: Tokenizer) -> None:
    breaks = [Break(0.5, 50, "reset"), *[Break(0.0, 50, "reset") for _ in range(20)]]
    engines = Engines(byte_tokenizer, ["x" * 100], breaks)
    with pytest.raises(PagemillError) as error:
        serve(engines, make_request(["x" * 100], stream=False))
    assert error.value.code == "bad_upstream"
    assert len(engines.requests) == MAX_ENDS, "an attempt with tokens begins a new row"
    engine_failures = engines.agains[-1].engine_failures  # type: ignore[union-attr]
    assert [end.decision for end in engine_failures] == list(range(1, MAX_ENDS))
    assert [end.progressed for end in engine_failures] == [True] + [False] * (MAX_ENDS - 2)
    assert {end.kind for end in engine_failures} == {"lost"}


# -- the journal itself ------------------------------------------------------------------------------------------------


def test_frames_that_skip_or_repeat_tokens_are_refused() -> None:
    request = make_request(["a"], stream=True)
    journal = Journal(request, JournalCapacity(100))
    journal.note(FrameMeta(token_ids=[1, 2], position=2), "w")
    journal.check([FrameMeta(token_ids=[3], position=3), FrameMeta(token_ids=[4, 5], position=5)])
    for wrong in (
        [FrameMeta(token_ids=[3], position=4)],
        [FrameMeta(token_ids=[3], position=2)],
        [FrameMeta(token_ids=[3], position=3), FrameMeta(token_ids=[4], position=3)],
        [FrameMeta(token_ids=[-1], position=3)],
        [FrameMeta(token_ids=[2**40], position=3)],
    ):
        with pytest.raises(JournalGap):
            journal.check(wrong)
    journal.note(FrameMeta(token_ids=[3], position=3, finish_reason="stop"), "w")
    with pytest.raises(JournalGap):
        journal.check([FrameMeta(token_ids=[4], position=4)])
    assert journal.continuation().resume == [ChoiceResume(0, [1, 2, 3], 0, True, "stop")]


def test_journals_share_one_capacity_and_release_it() -> None:
    capacity = JournalCapacity(5)
    first, second = (Journal(make_request(["a"], stream=True), capacity) for _ in range(2))
    first.note(FrameMeta(token_ids=[1, 2, 3], position=3), "w")
    second.note(FrameMeta(token_ids=[1, 2], position=2), "w")
    assert (capacity.num_tokens, second.can_continue) == (5, True)
    second.note(FrameMeta(token_ids=[3], position=3), "w")
    assert (capacity.num_tokens, first.can_continue, second.can_continue) == (3, True, False)
    assert second.continuation().resume == []
    first.close()
    assert capacity.num_tokens == 0


def test_a_tenants_journals_leave_capacity_to_others() -> None:
    capacity = JournalCapacity(10_000)
    request = make_request(["a"], stream=True)
    greedy = [Journal(request, capacity, "greedy") for _ in range(20)]
    for journal in greedy:
        journal.note(FrameMeta(token_ids=[1] * 1000, position=1000), "w")
    assert sum(journal.can_continue for journal in greedy) == 9
    assert capacity.num_tokens <= 9000
    other = Journal(request, capacity, "quiet")
    other.note(FrameMeta(token_ids=[1] * 100, position=100), "w")
    assert other.can_continue
    for journal in (*greedy, other):
        journal.close()
    assert capacity.num_tokens == 0
