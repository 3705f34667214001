"""The download of a file: ranges are read ahead, returned in order, and hashed and synced while they arrive."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import WAIT_LIMIT_S

from pagemill_models.sources.base import RemoteFile
from pagemill_models.sources.schemes import ranges
from pagemill_models.sources.store import part
from pagemill_models.sources.store.part import PartFile

CONTENT = bytes(range(251)) * 400


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "RANGE_BYTES", 1000)


@given(start=st.integers(0, 50_000), length=st.integers(0, 20_000), chunk=st.integers(1, 1500))
def test_the_ranges_of_a_file_give_its_content(start: int, length: int, chunk: int) -> None:
    asked: list[tuple[int, int]] = []

    def read(first: int, end: int) -> Iterator[bytes]:
        asked.append((first, end))
        yield from (CONTENT[at : min(at + chunk, end)] for at in range(first, end, chunk))

    end = start + length
    assert b"".join(ranges.read_in_order(read, start, end)) == CONTENT[start:end]
    assert sum(last - first for first, last in asked) == length


def test_ranges_are_read_concurrently() -> None:
    together = threading.Barrier(ranges.NUM_RANGES, timeout=WAIT_LIMIT_S)

    def read(first: int, end: int) -> Iterator[bytes]:
        together.wait()
        yield CONTENT[first:end]

    end = 1000 * ranges.NUM_RANGES
    assert b"".join(ranges.read_in_order(read, 0, end)) == CONTENT[:end]


def test_the_received_bytes_of_a_failed_range_are_returned_before_its_error() -> None:
    def read(first: int, end: int) -> Iterator[bytes]:
        yield CONTENT[first : first + 300]
        if first == 2000:
            raise ConnectionError("cut")
        yield CONTENT[first + 300 : end]

    arrived: list[bytes] = []
    with pytest.raises(ConnectionError):
        arrived.extend(ranges.read_in_order(read, 0, 9000))
    assert b"".join(arrived) == CONTENT[:2300]


def test_a_stalled_range_does_not_delay_the_error_of_another() -> None:
    gate = threading.Event()

    def read(first: int, end: int) -> Iterator[bytes]:
        if first == 0:
            raise ConnectionError("cut")
        gate.wait(WAIT_LIMIT_S)
        yield CONTENT[first:end]

    with pytest.raises(ConnectionError):
        list(ranges.read_in_order(read, 0, 9000))
    assert not gate.is_set()
    gate.set()


@given(pieces=st.lists(st.binary(max_size=300), max_size=8), kept=st.integers(0, 8), starts_again=st.booleans())
def test_the_digest_is_that_of_the_file_however_it_arrives(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], kept: int, starts_again: bool
) -> None:
    content = b"".join(pieces)
    file = RemoteFile("model.safetensors", len(content), hashlib.sha256(content).hexdigest())
    path = tmp_path_factory.mktemp("part") / "model.part"
    path.write_bytes(b"".join(pieces[:kept]))
    with PartFile(path, file) as out:
        assert out.tell() == path.stat().st_size
        if starts_again:
            out.seek(0)
            out.truncate()
        for piece in pieces if starts_again else pieces[kept:]:
            out.write(piece)
        assert out.hexdigest() == file.sha256
        out.sync()
    assert path.read_bytes() == content


def test_files_of_git_have_their_own_digest(tmp_path: Path) -> None:
    content = b"{}\n"
    with PartFile(tmp_path / "part", RemoteFile("config.json", len(content), git_sha1="of git")) as out:
        out.write(content)
        assert out.hexdigest() == "0967ef424bce6791893e9a57bb952f80fd536e93"


def test_an_error_of_the_disk_between_two_syncs_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(part, "SYNC_BYTES", 10)
    with PartFile(tmp_path / "part", RemoteFile("model.safetensors", 20)) as out:
        monkeypatch.setattr(os, "fdatasync", failing)
        out.write(bytes(12))
        with pytest.raises(OSError, match="No space"):
            out.sync()
