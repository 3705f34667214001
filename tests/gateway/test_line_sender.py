"""The answer to one line of a batch as its file gets it: whole, cut short, too large, or broken off."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest
from waiting import WAIT_LIMIT_S

from pagemill_gateway.batches import answer_file
from pagemill_gateway.batches.answer_file import AnswerFile
from pagemill_gateway.batches.line_sender import LineReply, LineSender
from pagemill_protocol.errors import PagemillError, bad_upstream
from pagemill_servers.auth import hash_key
from pagemill_servers.keys.ring import KeyRing

MANY = b"x" * 1_000_000


def sent(parts: list[bytes], folder: Path, max_bytes: int = 2**40, *, breaks: bool = False) -> tuple[Any, ...]:
    """Return the reply, the body in the file, whether it is too large, and whether the route was asked to end."""
    has_left = False

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal has_left
        assert (await receive())["body"] == b"{}"
        leaving = asyncio.ensure_future(receive())
        headers = [(b"Content-Type", b"application/json; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await asyncio.sleep(0)
        has_left = leaving.done()
        leaving.cancel()
        if breaks:
            raise bad_upstream("The answer broke off.")

    async def send() -> tuple[LineReply, bytes, bool]:
        sender = LineSender(app, KeyRing([hash_key("sk-one")], None, shared=False))
        with AnswerFile(str(folder), max_bytes) as answer:
            reply = await sender.send("/v1/chat/completions", b"{}", hash_key("sk-one"), "r", answer)
            return reply, b"".join([each async for each in answer.pieces()]), answer.is_too_large

    return *asyncio.run(send()), has_left


@pytest.mark.parametrize("parts", [[], [b'{"a":', b"\n1}"], [b'["', MANY, MANY, b'"]']])
def test_an_answer_of_any_size_is_kept_as_one_line(tmp_path: Path, parts: list[bytes]) -> None:
    reply, body, is_too_large, _ = sent(parts, tmp_path)
    assert reply.ok
    assert reply.is_json
    assert body == b"".join(parts).replace(b"\n", b" ")
    assert not is_too_large


def test_a_large_answer_is_in_a_file_without_a_name(tmp_path: Path) -> None:
    async def write() -> None:
        with AnswerFile(str(tmp_path), 2**40) as answer:
            await answer.write(MANY)
            assert answer._file._file.fileno() > 0, "it must not be in memory"
            assert os.listdir(tmp_path) == []

    asyncio.run(write())
    assert len(MANY) > answer_file.MEMORY_BYTES


def test_a_file_is_closed_although_it_is_written_when_its_line_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    create = tempfile.TemporaryFile

    def create_later(*values: Any, **named: Any) -> Any:
        begun.set()
        assert goes_on.wait(WAIT_LIMIT_S)
        return create(*values, **named)

    monkeypatch.setattr(tempfile, "TemporaryFile", create_later)
    answer = AnswerFile(str(tmp_path), 2**40)

    async def write() -> None:
        with answer:
            await answer.write(MANY)

    async def cancel() -> None:
        line = asyncio.create_task(write())
        await asyncio.to_thread(begun.wait, WAIT_LIMIT_S)
        threading.Timer(0.05, goes_on.set).start()  # the file is created while the line ends
        line.cancel()
        with pytest.raises(asyncio.CancelledError):
            await line

    asyncio.run(cancel())
    assert answer._file.closed


def test_the_line_leaves_when_its_answer_is_too_large(tmp_path: Path) -> None:
    _, body, is_too_large, has_left = sent([MANY, MANY, MANY], tmp_path, 1_500_000)
    assert is_too_large
    assert has_left
    assert len(body) <= 1_500_000


def test_an_answer_that_breaks_off_is_an_error_and_not_a_shorter_answer(tmp_path: Path) -> None:
    reply, body, _, _ = sent([b'{"choices":[', MANY], tmp_path, breaks=True)
    assert (reply.status, reply.waits) == (502, False)
    assert orjson.loads(body)["error"]["message"] == "The answer broke off."


def test_a_full_disk_is_the_store_and_not_the_line(tmp_path: Path) -> None:
    with pytest.raises(PagemillError) as caught:
        sent([MANY], Path("/dev/null"))
    assert (caught.value.status, caught.value.code) == (503, "store_unavailable")
