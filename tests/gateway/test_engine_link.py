"""The gateway's end of a link: concurrent streams, credit, cancellation, silence, and an engine that dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import uvloop
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from waiting import WAIT_LIMIT_S, eventually

from pagemill_gateway.relay.answer_stream import Frame
from pagemill_gateway.relay.engine_link import RECORDS_PER_ITERATION, Backlog, EngineLink, LinkStream, LinkTimeouts
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.frames import encode_frame
from pagemill_protocol.link import (
    PIECE_BYTES,
    WINDOW_BYTES,
    Record,
    RecordDecoder,
    RecordKind,
    Refusal,
    decode_number,
    encode_pieces,
    encode_record,
)
from pagemill_protocol.request.generate import FrameMeta, Usage
from pagemill_routing.attempts.attempt_failures import UpstreamFailure
from pagemill_routing.brain.interface import Liveness

LAST = encode_frame(FrameMeta(last=True, usage=Usage(1, 2)), b"data: [DONE]\n\n")
PATIENT = LinkTimeouts(60.0, 60.0)


class Engine(asyncio.Transport):
    """The other end of the link: the frames that it received and sends."""

    def __init__(self) -> None:
        super().__init__()
        self.link: EngineLink
        self.backlog = Backlog()
        self.records: list[Record] = []
        self.aborted = self.closed = False
        self.liveness: Liveness = "working"
        self.num_asked = 0
        self._decoder = RecordDecoder()

    def write(self, data: Any) -> None:
        self.records += self._decoder.feed(data)

    def is_closing(self) -> bool:
        return self.aborted or self.closed

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closed = True

    async def ask(self) -> Liveness:
        self.num_asked += 1
        return self.liveness

    def send(self, kind: RecordKind, number: int, data: bytes = b"") -> None:
        self.link.data_received(encode_record(kind, number, data))
        self.backlog.process_all()

    def send_frame(self, number: int, payload: bytes) -> None:
        self.link.data_received(b"".join(encode_pieces(RecordKind.DATA, number, token(payload))))
        self.backlog.process_all()

    async def stream(self, body: bytes = b"body", accepted: Callable[[], None] = lambda: None) -> LinkStream:
        return await self.link.send(body, "r-1", self.ask, accepted, lambda: None)


def token(payload: bytes) -> bytes:
    return encode_frame(FrameMeta(token_ids=[1]), payload)


def run(scenario: Callable[[Engine], Awaitable[None]], timeouts: LinkTimeouts = PATIENT) -> None:
    async def main() -> None:
        engine = Engine()
        engine.link = EngineLink(timeouts, 60.0, engine.backlog)
        engine.link.connection_made(engine)
        async with asyncio.timeout(WAIT_LIMIT_S):
            await scenario(engine)
        engine.link.connection_lost(None)

    asyncio.run(main())


async def all_of(stream: LinkStream) -> list[bytes]:
    payloads: list[bytes] = []
    while frames := await stream.read():
        payloads += [payload for _, payload in frames]
    return payloads


@given(st.lists(st.binary(min_size=1, max_size=200), max_size=6), st.lists(st.integers(1, 90), min_size=1, max_size=9))
def test_two_answers_are_separated_however_the_bytes_are_cut(pieces: list[bytes], cuts: list[int]) -> None:
    async def scenario(engine: Engine) -> None:
        streams = [await engine.stream(), await engine.stream()]
        data = b""
        for number in (1, 2):
            data += encode_record(RecordKind.ACCEPTED, number, b"w")
        for piece in pieces:
            for number in (1, 2):
                data += encode_record(RecordKind.DATA, number, token(piece * number))
        for number in (2, 1):
            data += encode_record(RecordKind.DATA, number, LAST) + encode_record(RecordKind.END, number)
        for number in range(len(data)):
            size = cuts[number % len(cuts)]
            engine.link.data_received(data[:size])
            data = data[size:]
            if not data:
                break
        for factor, stream in enumerate(streams, 1):
            assert await all_of(stream) == [*(piece * factor for piece in pieces), b"data: [DONE]\n\n"]
            assert stream.weights_digest == "w"
            stream.close()
        assert [kind for kind, _, _ in engine.records] == 2 * [RecordKind.REQUEST_ID, RecordKind.REQUEST]

    run(scenario)


def test_frames_are_processed_at_once_without_waking_the_reader() -> None:
    async def scenario(engine: Engine) -> None:
        stream, taken = await engine.stream(), []

        def take(frames: list[Frame]) -> bool:
            taken.extend(payload for _, payload in frames)
            return not frames[-1][0].last

        reading = asyncio.create_task(stream.read(take))
        await asyncio.sleep(0)
        engine.send(RecordKind.ACCEPTED, 1)
        for payload in (b"a", b"b"):
            engine.send_frame(1, payload)
            assert taken[-1] == payload
            await asyncio.sleep(0)
            assert not reading.done()
        engine.send(RecordKind.DATA, 1, LAST)
        assert len(await reading) == 1

    run(scenario)


def test_a_first_frame_does_not_wait_for_later_ones_of_other_streams() -> None:
    async def scenario(engine: Engine) -> None:
        order: list[bytes] = []

        def take(frames: list[Frame]) -> bool:
            order.extend(payload for _, payload in frames)
            return True

        reading = [asyncio.create_task((await engine.stream()).read(take)) for _ in range(2)]
        await asyncio.sleep(0)
        accepted = [encode_record(RecordKind.ACCEPTED, number) for number in (1, 2)]
        later = [
            encode_record(RecordKind.DATA, 1, token(b"%d" % number)) for number in range(2 * RECORDS_PER_ITERATION)
        ]
        first = encode_record(RecordKind.DATA, 2, token(b"first"))
        engine.link.data_received(b"".join([accepted[0], later[0], *later[1:], accepted[1], first]))
        assert order == [b"0", b"first"]
        await asyncio.sleep(0)
        assert len(order) == 2 + RECORDS_PER_ITERATION, "each turn processes a few frames"
        await asyncio.sleep(0)
        assert order == [b"0", b"first", *(b"%d" % number for number in range(1, 2 * RECORDS_PER_ITERATION))]
        for task in reading:
            task.cancel()

    run(scenario)


@pytest.mark.parametrize("is_closed", [True, False])
def test_frames_before_a_broken_link_are_delivered_except_to_closed_streams(is_closed: bool) -> None:
    async def scenario(engine: Engine) -> None:
        stream = await engine.stream()
        engine.link.data_received(
            encode_record(RecordKind.ACCEPTED, 1) + encode_record(RecordKind.DATA, 1, token(b"a"))
        )
        engine.link.data_received(encode_record(RecordKind.DATA, 1, token(b"b")) * 20)
        if is_closed:
            stream.close()
        engine.link.connection_lost(None)
        frames = await stream.read() if not is_closed else stream._frames
        assert [payload for _, payload in frames] == [b"a", *([] if is_closed else [b"b"] * 20)]

    run(scenario)


def test_a_failing_callback_passes_its_error_to_the_reader() -> None:
    async def scenario(engine: Engine) -> None:
        stream = await engine.stream()

        def take(_: list[Frame]) -> bool:
            raise UpstreamFailure("broken", "no")

        reading = asyncio.create_task(stream.read(take))
        await asyncio.sleep(0)
        engine.send(RecordKind.ACCEPTED, 1)
        engine.send_frame(1, b"a")
        with pytest.raises(UpstreamFailure, match="no"):
            await reading
        stream.close()
        assert engine.records[-1][:2] == (RecordKind.CANCEL, 1)

    run(scenario)


def test_unread_bytes_are_not_credited_and_other_streams_continue() -> None:
    async def scenario(engine: Engine) -> None:
        slow, quick = await engine.stream(), await engine.stream()
        for number in (1, 2):
            engine.send(RecordKind.ACCEPTED, number)
        for _ in range(4):
            engine.send_frame(1, b"x" * (WINDOW_BYTES // 4))
        assert not [record for record in engine.records if record[0] == RecordKind.CREDIT]
        engine.send_frame(2, b"y")
        assert await quick.read() == [(FrameMeta(token_ids=[1]), b"y")]
        assert len(await slow.read()) == 4
        ((_, number, data),) = [record for record in engine.records if record[0] == RecordKind.CREDIT]
        assert number == 1
        assert decode_number(data) >= WINDOW_BYTES

    run(scenario)


def test_a_payload_larger_than_the_window_is_read_in_parts_and_credited_as_they_are_read() -> None:
    async def scenario(engine: Engine) -> None:
        stream = await engine.stream()
        engine.send(RecordKind.ACCEPTED, 1)
        data = token(b"x" * (3 * WINDOW_BYTES))
        sent, parts = 0, [b""]
        while sent < len(data):
            engine.send(RecordKind.DATA, 1, data[sent : sent + PIECE_BYTES])
            sent += PIECE_BYTES
            parts += [payload for _, payload in await stream.read()]
            credited = sum(decode_number(each) for kind, _, each in engine.records if kind == RecordKind.CREDIT)
            assert sent - credited < WINDOW_BYTES
        assert b"".join(parts) == b"x" * (3 * WINDOW_BYTES)
        assert max(map(len, parts)) <= PIECE_BYTES

    run(scenario)


def test_a_reader_that_does_not_read_gets_no_credit_for_a_large_payload() -> None:
    async def scenario(engine: Engine) -> None:
        stream = await engine.stream()
        engine.send(RecordKind.ACCEPTED, 1)
        data = token(b"x" * (3 * WINDOW_BYTES))[:WINDOW_BYTES]
        for start in range(0, len(data), PIECE_BYTES):
            engine.send(RecordKind.DATA, 1, data[start : start + PIECE_BYTES])
        assert not [record for record in engine.records if record[0] == RecordKind.CREDIT]
        await stream.read()
        assert [record for record in engine.records if record[0] == RecordKind.CREDIT]

    run(scenario)


def test_a_large_request_is_sent_in_pieces_and_pauses_while_the_socket_is_full() -> None:
    async def scenario(engine: Engine) -> None:
        body = bytes(range(256)) * 2000
        engine.link.pause_writing()
        sending = asyncio.create_task(engine.stream(body))
        await asyncio.sleep(0.01)
        assert not engine.records
        small = await engine.stream(b"small")
        engine.link.resume_writing()
        await sending
        parts = [data for kind, number, data in engine.records if number == 1 and kind != RecordKind.REQUEST_ID]
        assert b"".join(parts) == body
        assert len(parts) > 2
        assert (RecordKind.REQUEST, 2, b"small") in engine.records
        small.close()

    run(scenario)


def test_closing_before_the_end_cancels_the_request_and_later_frames_are_dropped() -> None:
    async def scenario(engine: Engine) -> None:
        stream = await engine.stream()
        engine.send(RecordKind.ACCEPTED, 1)
        stream.close()
        assert engine.records[-1][:2] == (RecordKind.CANCEL, 1)
        engine.send_frame(1, b"late")
        engine.send(RecordKind.END, 1)
        assert engine.link.is_usable

    run(scenario)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [(503, "draining", "declined"), (503, None, "refused"), (429, "x", "refused"), (401, "x", "broken")],
)
def test_a_refusal_over_a_link_means_the_same_as_over_http(status: int, code: str | None, kind: str) -> None:
    async def scenario(engine: Engine) -> None:
        stream, accepted = await engine.stream(accepted=lambda: accepted.append(1)), []
        body = msgspec.json.encode({"error": {"message": "no", "type": "t", "param": None, "code": code}})
        engine.send(RecordKind.REFUSED, 1, msgspec.msgpack.encode(Refusal(status, body, "7")))
        with pytest.raises(UpstreamFailure) as refused:
            await stream.read()
        assert (refused.value.kind, refused.value.retry_after_s) == (kind, 7.0 if kind != "broken" else None)
        assert not accepted

    run(scenario)


def test_a_request_that_every_engine_would_refuse_is_the_clients_error() -> None:
    async def scenario(engine: Engine) -> None:
        stream = await engine.stream()
        body = b'{"error":{"message":"too long","type":"invalid_request_error","param":"messages","code":null}}'
        engine.send(RecordKind.REFUSED, 1, msgspec.msgpack.encode(Refusal(400, body)))
        with pytest.raises(PagemillError, match="too long"):
            await stream.read()

    run(scenario)


def test_a_dead_engine_ends_all_streams_after_the_received_bytes() -> None:
    async def scenario(engine: Engine) -> None:
        first, second = await engine.stream(), await engine.stream()
        engine.send(RecordKind.ACCEPTED, 1)
        engine.send_frame(1, b"a")
        engine.link.connection_lost(ConnectionResetError())
        assert [payload for _, payload in await first.read()] == [b"a"]
        for stream in (first, second):
            with pytest.raises(UpstreamFailure) as lost:
                await stream.read()
            assert lost.value.kind == "lost"
            stream.close()
        assert not engine.link.is_usable
        with pytest.raises(UpstreamFailure):
            await engine.stream()

    run(scenario)


@pytest.mark.parametrize(
    "garbage", [b"\xff" * 64, encode_record(RecordKind.REQUEST, 1), encode_record(RecordKind.REFUSED, 1, b"?")]
)
def test_garbage_ends_the_link_and_all_its_streams(garbage: bytes) -> None:
    async def scenario(engine: Engine) -> None:
        stream = await engine.stream()
        engine.link.data_received(garbage)
        with pytest.raises(UpstreamFailure) as broken:
            await stream.read()
        assert broken.value.kind == "broken"
        assert engine.aborted

    run(scenario)


@pytest.mark.parametrize("frames", [b"\xff" * 16, LAST + token(b"more"), token(b"cut")[:-1]])
def test_an_answer_without_valid_frames_breaks_only_its_own_stream(frames: bytes) -> None:
    async def scenario(engine: Engine) -> None:
        stream, other = await engine.stream(), await engine.stream()
        engine.send(RecordKind.ACCEPTED, 1)
        engine.send(RecordKind.DATA, 1, frames)
        engine.send(RecordKind.END, 1)
        with pytest.raises(UpstreamFailure):
            await all_of(stream)
        engine.send(RecordKind.DATA, 2, LAST)
        assert len(await other.read()) == 1

    run(scenario)


@pytest.mark.parametrize("is_accepted", [True, False])
def test_the_state_of_a_silent_engine_is_checked_and_a_stuck_one_is_abandoned(is_accepted: bool) -> None:
    async def scenario(engine: Engine) -> None:
        stream = await engine.stream()
        if is_accepted:
            engine.send(RecordKind.ACCEPTED, 1)
        reading = asyncio.create_task(stream.read())
        await eventually(lambda: engine.num_asked >= 3)
        assert not reading.done()
        engine.liveness = "stuck"
        with pytest.raises(UpstreamFailure) as stalled:
            await reading
        assert stalled.value.kind == "stalled"
        assert engine.records[-1][:2] == (RecordKind.CANCEL, 1)
        assert not engine.link.is_usable
        assert engine.closed

    run(scenario, LinkTimeouts(60.0, 0.05))


def test_an_engine_that_never_accepts_is_abandoned_in_time() -> None:
    async def scenario(engine: Engine) -> None:
        with pytest.raises(UpstreamFailure) as stalled:
            await (await engine.stream()).read()
        assert stalled.value.kind == "stalled"

    run(scenario, LinkTimeouts(0.05, 60.0))


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (401, None, "(broken): The engine answered 401: not this one"),
        (403, None, "(broken): The engine answered 403: not this one"),
        (426, "unsupported_protocol", "(broken): The engine answered 426: not this one"),
        (400, None, "(broken): The engine answered 400 to the request for a link: not this one"),
        (503, "draining", "(declined): not this one"),
        (503, None, "(refused): not this one"),
    ],
)
async def test_a_refused_link_says_why_and_another_engine_serves(
    gateways: Any,
    engines: Any,
    fake: Any,
    caplog: pytest.LogCaptureFixture,
    status: int,
    code: str | None,
    message: str,
) -> None:
    """The status and the body are judged like those of a refused request."""
    error = {"message": "not this one", "type": "t", "param": None, "code": code}
    first, second = engines[:2]
    first.refuses_link = lambda: web.json_response({"error": error}, status=status)
    gateway = await gateways(first, second, catalog=fake.catalog_of(first, second, routing_policy="RoundRobin"))
    caplog.set_level(logging.INFO, "pagemill.gateway.relay")
    assert [(await gateway.chat()).text for _ in range(2)] == ["hello world"] * 2
    assert (first.num_links, second.num_links) == (0, 1)
    assert any(each.getMessage().endswith(message) for each in caplog.records)


async def test_all_requests_to_an_engine_share_one_link(gateways: Any, engines: Any, fake: Any) -> None:
    gate = asyncio.Event()
    engine = engines[0]
    engine.behaviour = fake.says("a", "b", gate=gate)
    gateway = await gateways(engine)
    chats = [asyncio.create_task(gateway.chat(stream=True)) for _ in range(12)]
    await eventually(lambda: engine.num_inside == 12)
    gate.set()
    assert {(await chat).streamed_text for chat in chats} == {"ab"}
    assert engine.num_links == 1


def test_a_check_that_is_due_already_on_uvloop_does_not_fail_the_next_request() -> None:
    """uvloop returns a handle without `when()` for a time that is over, as after a pause of the process."""

    async def main() -> None:
        engine = Engine()
        engine.link = EngineLink(PATIENT, 60.0, engine.backlog)
        engine.link.connection_made(engine)
        engine.link._schedule_check(engine.link.now() - 1.0)
        await engine.stream()
        engine.link.connection_lost(None)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
