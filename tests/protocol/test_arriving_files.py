"""A model that is loaded during its download: files that are complete at once, waiting for weights, and failures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

import pytest
from tiny_files import model_files
from waiting import WAIT_LIMIT_S, wait_until

from pagemill_models.files.partial_download import (
    FileLink,
    PartialDownload,
    awaited_bytes,
    partial_folder,
    wait_for_all,
    wait_until_complete,
)
from pagemill_models.files.safetensors_header import read_folder_headers
from pagemill_models.sources import FetchError
from pagemill_models.sources.base import Listing, RemoteFile, Repository, SourceKind
from pagemill_models.sources.store.cache import ModelCache
from pagemill_models.sources.store.fetch import Watch
from pagemill_protocol.source_errors import UnreadableModelError

SHARDS = [f"model-{number}.safetensors" for number in range(4)]
FILES = model_files(num_shards=4, shard_bytes=1_000_000)


class Slow(SourceKind, Repository):
    """A source whose headers are available at once and whose weights arrive when the test releases them."""

    scheme = "slow"
    where = "network"
    form = "slow://NAME"
    about = "Files of a test."
    name = "`slow`"
    connections = 2

    def __init__(self) -> None:
        self.gates = {name: threading.Event() for name in SHARDS}
        self.broken: dict[str, FetchError] = {}
        self.files = dict(FILES)

    def fault(self, source: str) -> str | None:
        return None

    def open(self, source: str) -> Repository:
        return self

    def list_files(self) -> Listing:
        return Listing("1", [RemoteFile(path, len(content)) for path, content in self.files.items()])

    def fetch(self, file: RemoteFile, version: str, out: BinaryIO) -> None:
        if gate := self.gates.get(file.path):
            assert gate.wait(WAIT_LIMIT_S)
        if error := self.broken.get(file.path):
            raise error
        out.write(self.files[file.path][out.tell() :])

    def read_range(self, file: RemoteFile, version: str, start: int, num_bytes: int) -> bytes:
        return self.files[file.path][start : start + min(num_bytes, 300)]

    def close(self) -> None: ...


class Loading:
    """A download in a thread."""

    def __init__(self, root: Path, kind: Slow) -> None:
        self.opened: list[Path] = []
        self.faults: list[FetchError] = []
        self.error: Exception | None = None
        self.path: Path | None = None
        watch = Watch(self.faults.append, self.opened.append)

        def run() -> None:
            try:
                self.path = ModelCache(root).fetch(kind, "slow://m", lambda **_: None, name="m", watch=watch)
            except Exception as error:
                self.error = error

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def folder(self) -> Path:
        wait_until(lambda: bool(self.opened))
        return self.opened[0]


@pytest.fixture
def kind() -> Iterator[Slow]:
    kind = Slow()
    yield kind
    for gate in kind.gates.values():
        gate.set()


def test_all_files_but_the_weights_are_complete_at_once_and_weights_arrive_one_by_one(
    tmp_path: Path, kind: Slow
) -> None:
    loading = Loading(tmp_path, kind)
    folder = loading.folder()
    for name in FILES.keys() - set(SHARDS):
        assert (folder / name).read_bytes() == FILES[name]
    assert [awaited_bytes(folder / name) for name in SHARDS] == [len(FILES[name]) for name in SHARDS]
    assert read_folder_headers(folder).keys() == {"w0", "w1", "w2", "w3"}
    kind.gates[SHARDS[0]].set()
    wait_until_complete(folder / SHARDS[0])
    assert (folder / SHARDS[0]).read_bytes() == FILES[SHARDS[0]]
    assert awaited_bytes(folder / SHARDS[1]) is not None
    for gate in kind.gates.values():
        gate.set()
    wait_for_all(folder)
    loading.thread.join()
    assert loading.path == tmp_path / "m"
    for name, content in FILES.items():
        assert (folder / name).read_bytes() == content, "publishing the model must not move the folder"


def test_a_failed_download_is_reported_at_once_and_ends_each_wait(tmp_path: Path, kind: Slow) -> None:
    kind.broken[SHARDS[1]] = FetchError("Unauthorized", "no")
    loading = Loading(tmp_path, kind)
    folder = loading.folder()
    kind.gates[SHARDS[1]].set()
    wait_until(lambda: bool(loading.faults))
    assert loading.faults == [kind.broken[SHARDS[1]]]
    with pytest.raises(UnreadableModelError, match=r"`model-1.safetensors` has not arrived"):
        wait_until_complete(folder / SHARDS[1])
    assert loading.thread.is_alive(), "another download continues"
    for gate in kind.gates.values():
        gate.set()
    loading.thread.join()
    assert loading.error is kind.broken[SHARDS[1]]
    wait_until_complete(folder / SHARDS[0])
    with pytest.raises(UnreadableModelError, match=r"`model-1.safetensors` has not arrived"):
        wait_for_all(folder)


def test_files_downloaded_before_are_complete_in_the_next_folder(tmp_path: Path, kind: Slow) -> None:
    kind.broken = dict.fromkeys(SHARDS[2:], FetchError("Unauthorized", "no"))
    for name in SHARDS[:2]:
        kind.gates[name].set()
    first = Loading(tmp_path, kind)
    wait_until(lambda: all((tmp_path / ".m.loading" / name).exists() for name in SHARDS[:2]))
    for name in SHARDS[2:]:
        kind.gates[name].set()
    first.thread.join()
    assert first.error is not None
    kind.broken.clear()
    for name in SHARDS[2:]:
        kind.gates[name].clear()
    second = Loading(tmp_path, kind)
    assert [name for name in SHARDS if awaited_bytes(second.folder() / name) is None] == SHARDS[:2]
    for name in SHARDS[2:]:
        kind.gates[name].set()
    second.thread.join()
    assert second.path == tmp_path / "m"


def test_a_partly_uploaded_file_is_detected_by_its_header(tmp_path: Path, kind: Slow) -> None:
    kind.files[SHARDS[2]] = FILES[SHARDS[2]][:-1000]
    loading = Loading(tmp_path, kind)
    loading.thread.join()
    assert isinstance(loading.error, FetchError)
    assert loading.error.reason == "ModelUnreadable"
    assert loading.error.message.startswith("`slow`: `model-2.safetensors` cannot be read")
    assert "upload the file again" in loading.error.message
    assert not loading.opened
    assert not any(gate.is_set() for gate in kind.gates.values()), "no weights may be requested"


def test_a_model_of_one_file_is_downloaded_as_a_whole(tmp_path: Path, kind: Slow) -> None:
    kind.files = model_files(num_shards=1)
    kind.gates[SHARDS[0]].set()
    loading = Loading(tmp_path, kind)
    loading.thread.join()
    assert loading.path == tmp_path / "m"
    assert not loading.opened


def test_the_folder_of_an_earlier_download_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"22")
    links = {"a": FileLink(tmp_path / "a", 1, is_complete=True), "b": FileLink(tmp_path / "b", 5, is_complete=False)}
    with closing(PartialDownload(tmp_path / "m", {"a": links["a"]})) as earlier:
        assert earlier.folder == partial_folder(tmp_path / "m")
    with closing(PartialDownload(tmp_path / "m", links)) as arriving:
        assert awaited_bytes(arriving.folder / "a") is None
        assert awaited_bytes(arriving.folder / "b") == 5
        arriving.mark_complete("b")
        wait_for_all(arriving.folder)


def test_a_volume_without_links_is_filled_without_arriving_files(
    tmp_path: Path, kind: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr("os.link", refused)
    for gate in kind.gates.values():
        gate.set()
    loading = Loading(tmp_path, kind)
    loading.thread.join()
    assert loading.path == tmp_path / "m"
    assert not loading.opened
    assert not partial_folder(tmp_path / "m").exists()
