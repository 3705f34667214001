"""The lines of an uploaded file and the file in a form are the same wherever the parts of the body are cut."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_gateway.batches import lines
from pagemill_gateway.batches.directory import DirectoryStore
from pagemill_gateway.routes.multipart import Form, read_form
from pagemill_protocol.errors import PagemillError

BOUNDARY = b"--frontier"


def read_lines(content: bytes, piece: int, max_bytes: int) -> list[tuple[int, bytes | None]]:
    async def read(offset: int, size: int) -> bytes:
        return content[offset : offset + piece]

    async def collect() -> list[tuple[int, bytes | None]]:
        found = [each async for each in lines.scan_lines(read, max_bytes)]
        for each in found:
            assert content[each.offset : each.offset + each.num_bytes].startswith(each.beginning)
            assert b"\n" not in content[each.offset : each.offset + each.num_bytes]
        return [(each.number, None if each.num_bytes > max_bytes else each.beginning) for each in found]

    return asyncio.run(collect())


@given(st.lists(st.text("ab ", max_size=6)), st.integers(1, 9), st.booleans())
def test_lines_do_not_depend_on_how_the_file_is_read(texts: list[str], piece: int, ends: bool) -> None:
    content = ("\n".join(texts) + ("\n" if ends else "")).encode()
    expected = [
        (number, None if len(text) > 4 else text)
        for number, text in enumerate(content.split(b"\n"), 1)
        if text.strip() or len(text) > 4
    ]
    assert read_lines(content, piece, 4) == expected


def form(content: bytes, *, order: bool = True) -> bytes:
    purpose = b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    file = b'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\nContent-Type: x/y\r\n\r\n' + content
    parts = [purpose, file + b"\r\n"] if order else [file + b"\r\n", purpose]
    return b"".join(b"--" + BOUNDARY + b"\r\n" + part for part in parts) + b"--" + BOUNDARY + b"--\r\n"


def read(body: bytes, cuts: list[int]) -> tuple[Form, bytes]:
    places = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    pieces = [body[begin:end] for begin, end in pairwise(places)]
    found: list[bytes] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def write(data: bytes) -> None:
        found.append(data)

    scope = {"headers": [(b"content-type", b"multipart/form-data; boundary=" + BOUNDARY)]}
    return asyncio.run(read_form(scope, receive, write, asyncio.Semaphore(1))), b"".join(found)


@given(
    st.lists(st.sampled_from([b"\r\n", b"--", BOUNDARY, b"x", b"\n"]), max_size=8).map(b"".join),
    st.lists(st.integers(0, 10_000), max_size=6),
    st.booleans(),
)
def test_a_file_does_not_depend_on_how_its_form_is_cut(content: bytes, cuts: list[int], order: bool) -> None:
    if b"\r\n--" + BOUNDARY in b"\r\n" + content:
        return
    assert read(form(content, order=order), cuts) == (Form({"purpose": "batch"}, "a.jsonl"), content)


async def test_only_some_uploads_have_a_piece_processed_at_a_time() -> None:
    turns, pieces = asyncio.Semaphore(2), [4] * 20
    at_once, most = 0, 0

    async def upload(number: int) -> None:
        async def receive() -> Any:
            pieces[number] -= 1
            begun = b"--" + BOUNDARY + b"\r\n" + b'Content-Disposition: form-data; name="file"\r\n\r\n'
            return {"type": "http.request", "body": begun if pieces[number] == 3 else b"x", "more_body": True}

        async def write(data: bytes) -> None:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            for _ in range(3):
                await asyncio.sleep(0)
            at_once -= 1
            if pieces[number] <= 0:
                raise ConnectionError

        scope = {"headers": [(b"content-type", b"multipart/form-data; boundary=" + BOUNDARY)]}
        with pytest.raises(ConnectionError):
            await read_form(scope, receive, write, turns)

    await asyncio.gather(*(upload(number) for number in range(len(pieces))))
    assert most == 2


@pytest.mark.parametrize(
    "body",
    [
        form(b"x")[:-6],
        form(b"x").replace(b'name="purpose"', b'name="file"'),
        form(b"x").replace(b"batch", b"b" * 5000),
        b"--" + BOUNDARY + b"junk",
    ],
)
def test_a_broken_form_is_refused(body: bytes) -> None:
    with pytest.raises(PagemillError) as caught:
        read(body, [])
    assert caught.value.status == 400


@given(
    whole=st.lists(st.binary(max_size=5).map(lambda raw: raw.replace(b"\n", b"") + b"\n")), torn=st.binary(max_size=5)
)
def test_an_unfinished_line_is_truncated(
    tmp_path_factory: pytest.TempPathFactory, whole: list[bytes], torn: bytes
) -> None:
    torn = torn.replace(b"\n", b"")
    store = DirectoryStore(str(tmp_path_factory.mktemp("store")))

    async def trimmed() -> bytes:
        await store.append("file-1", b"".join(whole) + torn)
        await store.trim("file-1")
        return await store.read("file-1", 0, 1000)

    assert asyncio.run(trimmed()) == b"".join(whole)


@pytest.mark.parametrize("levels", [100, 300, 2000])
def test_a_line_whose_body_is_nested_too_deeply_is_named(levels: int) -> None:
    checker = lines.LineChecker("/v1/chat/completions", 10**6)
    line = b'{"custom_id":"%s","url":"/v1/chat/completions","body":{"x":%s}}'

    def check(number: int, text: bytes) -> lines.Line | lines.BrokenLine:
        return checker.check(lines.ScannedLine(number, 0, len(text), text))

    good = check(1, line % (b"good", b"[" * 99 + b"]" * 99))
    assert isinstance(good, lines.Line)
    bad = check(2, line % (b"bad", b"[" * levels + b"]" * levels))
    assert isinstance(bad, lines.BrokenLine)
    assert bad.fault.code == "nested_too_deeply"
    assert "`body.x[0]" in bad.fault.message
