"""The cache of models on one machine: one download, a size limit, eviction by last use, and verification."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
from tiny_files import model_files
from waiting import WAIT_LIMIT_S, wait_until

from pagemill_models.sources import FetchError, resolve_source
from pagemill_models.sources.base import Listing, RemoteFile, Repository, SourceKind
from pagemill_models.sources.settings import parse_size
from pagemill_models.sources.store.cache import ModelCache, entry_name
from pagemill_models.sources.store.record import NAME

FILES = model_files(num_shards=2, shard_bytes=1_000_000)
MODEL_BYTES = sum(map(len, FILES.values()))


class Shelf(SourceKind, Repository):
    """A kind of source, as in an external package, with the same files under any name; it counts the calls."""

    scheme = "shelf"
    where = "network"
    form = "shelf://NAME"
    about = "Files of a test."
    name = "`shelf`"

    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def fault(self, source: str) -> str | None:
        return None

    def open(self, source: str) -> Repository:
        return self

    def list_files(self) -> Listing:
        return Listing("1", [RemoteFile(path, len(content)) for path, content in FILES.items()])

    def fetch(self, file: RemoteFile, version: str, out: BinaryIO) -> None:
        assert self.gate.wait(WAIT_LIMIT_S)
        self.fetched.append(file.path)
        out.write(FILES[file.path][out.tell() :])

    def close(self) -> None: ...


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def fetch(root: Path, shelf: Shelf, name: str, limit_bytes: int | None = None, *, evicts: bool = True) -> Path:
    return ModelCache(root, limit_bytes, evicts=evicts).fetch(shelf, f"shelf://{name}", lambda **_: None, name=name)


def elsewhere(root: Path, name: str) -> Iterator[Path]:
    """Download the model as another process that has ended, so that this process does not use it."""
    code = "import sys; sys.path[:0] = sys.argv[3:]; import test_model_cache as t, pathlib; "
    code += "t.fetch(pathlib.Path(sys.argv[1]), t.Shelf(), sys.argv[2])"
    here = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "shared")]
    subprocess.run([sys.executable, "-c", code, str(root), name, *here], check=True, timeout=WAIT_LIMIT_S)
    yield root / name


def fill(root: Path, *names: str) -> None:
    """Add models that no process uses, from the longest to the most recently used."""
    for age, name in enumerate(names):
        (path,) = elsewhere(root, name)
        os.utime(path / NAME, (1000 + age, 1000 + age))


def test_a_second_replica_on_the_machine_downloads_nothing(tmp_path: Path, shelf: Shelf) -> None:
    fetch(tmp_path, shelf, "a")
    fetch(tmp_path, shelf, "a")
    assert sorted(shelf.fetched) == sorted(FILES)


def test_replicas_that_start_together_download_once(tmp_path: Path, shelf: Shelf) -> None:
    shelf.gate.clear()
    threads = [threading.Thread(target=fetch, args=(tmp_path, shelf, "a")) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: (tmp_path / ".a.loading").is_dir())
    shelf.gate.set()
    for thread in threads:
        thread.join(WAIT_LIMIT_S)
    assert sorted(shelf.fetched) == sorted(FILES)
    assert (tmp_path / "a" / "model-1.safetensors").read_bytes() == FILES["model-1.safetensors"]


def test_the_least_recently_used_model_is_evicted(tmp_path: Path, shelf: Shelf) -> None:
    fill(tmp_path, "old", "new")
    fetch(tmp_path, shelf, "next", limit_bytes=int(2.5 * MODEL_BYTES))
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")} == {"new", "next"}


def test_a_used_model_becomes_the_last_to_be_evicted(tmp_path: Path, shelf: Shelf) -> None:
    fill(tmp_path, "old", "new")
    (used,) = elsewhere(tmp_path, "old")
    fetch(tmp_path, shelf, "next", limit_bytes=int(2.5 * MODEL_BYTES))
    assert used.is_dir()
    assert not (tmp_path / "new").exists()


def test_a_model_in_use_is_never_removed(tmp_path: Path, shelf: Shelf) -> None:
    fill(tmp_path, "served")
    code = "import sys; from pagemill_models.sources import resolve_source; "
    code += "print(resolve_source('file://' + sys.argv[1]), flush=True); sys.stdin.read()"
    engine = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "served")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert engine.stdout is not None
    assert engine.stdout.readline()
    with pytest.raises(FetchError, match=r"within the limit of 3 MiB.* served \(2 MiB\); in use") as caught:
        fetch(tmp_path, shelf, "next", limit_bytes=int(1.5 * MODEL_BYTES))
    assert caught.value.reason == "DiskFull"
    assert "sizeLimit" in caught.value.message
    engine.communicate()
    fetch(tmp_path, shelf, "next", limit_bytes=int(1.5 * MODEL_BYTES))
    assert not (tmp_path / "served").exists()


def test_a_process_that_uses_a_model_leaves_no_file_open(tmp_path: Path, shelf: Shelf) -> None:
    folder = fetch(tmp_path, shelf, "one")
    code = (
        "import sys\nfrom pathlib import Path\nfrom pagemill_models.sources.store.record import SHARED_LOCKS, NAME\n"
        "SHARED_LOCKS.acquire(Path(sys.argv[1]))\n"
        "assert [*SHARED_LOCKS._held.values()][0].name == str(Path(sys.argv[1], NAME))"
    )
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_LIMIT_S)
    assert (done.returncode, done.stderr) == (0, "")


def test_partial_downloads_without_a_loader_are_removed_first(tmp_path: Path, shelf: Shelf) -> None:
    fill(tmp_path, "kept")
    (tmp_path / ".gone.loading").mkdir()
    (tmp_path / ".gone.loading" / "model.safetensors.part").write_bytes(bytes(MODEL_BYTES))
    os.utime(tmp_path / ".gone.loading", (10, 10))
    fetch(tmp_path, shelf, "next", limit_bytes=int(2.5 * MODEL_BYTES))
    assert (tmp_path / "kept").is_dir()
    assert not (tmp_path / ".gone.loading").exists()


def test_nothing_is_removed_from_a_shared_volume(tmp_path: Path, shelf: Shelf) -> None:
    fill(tmp_path, "theirs")
    with pytest.raises(FetchError, match="delete the folders that are not used"):
        fetch(tmp_path, shelf, "next", limit_bytes=MODEL_BYTES, evicts=False)
    assert (tmp_path / "theirs").is_dir()


def test_a_model_larger_than_the_limit_is_refused_before_its_download(tmp_path: Path, shelf: Shelf) -> None:
    with pytest.raises(FetchError, match="needs 2 MiB more within the limit of 1 MiB"):
        fetch(tmp_path, shelf, "a", limit_bytes=2**20)
    assert shelf.fetched == ["config.json", "model.safetensors.index.json"], "the index says which weights are needed"


def test_a_damaged_file_is_detected_by_its_digest_and_downloaded_again(tmp_path: Path, shelf: Shelf) -> None:
    fill(tmp_path, "a")
    path = tmp_path / "a" / "model-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    fetch(tmp_path, shelf, "a")
    assert path.read_bytes() == FILES["model-0.safetensors"]


def test_a_touched_file_is_accepted_after_its_digest_is_verified(tmp_path: Path, shelf: Shelf) -> None:
    fill(tmp_path, "a")
    os.utime(tmp_path / "a" / "model-0.safetensors", (5, 5))
    fetch(tmp_path, shelf, "a")
    assert shelf.fetched == []


def test_a_full_disk_is_one_clear_error(tmp_path: Path, shelf: Shelf) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted: run the tests as root")
    try:
        with pytest.raises(FetchError, match=rf"{disk} has 1 MiB left.*free space") as caught:
            fetch(disk, shelf, "a")
        assert caught.value.reason == "DiskFull"
        (disk / "filler").write_bytes(bytes(2**19))
        with pytest.raises(FetchError, match="is full") as caught:
            _fetch_past_the_check(disk, shelf)
        assert caught.value.reason == "DiskFull"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _fetch_past_the_check(disk: Path, shelf: Shelf) -> None:
    """Download to a disk that becomes full while files are written."""

    class Careless(ModelCache):
        def _lack_bytes(self, missing_bytes: int) -> int:
            return 0

    Careless(disk).fetch(shelf, "shelf://a", lambda **_: None)


def test_each_source_has_a_folder_of_its_own() -> None:
    assert entry_name("s3://a/b") != entry_name("s3://a/c")
    assert len(entry_name("s3://a/b")) == 16


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("5", 5), ("200Gi", 200 * 2**30), ("1.5T", 1_500_000_000_000), ("3Mi", 3 * 2**20)]
)
def test_sizes_are_written_like_in_kubernetes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "Gi", "5 bananas", "1e400", "-"])
def test_an_invalid_size_names_the_variable(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="write bytes"):
        parse_size(text)
    monkeypatch.setenv("PAGEMILL_MODEL_CACHE_SIZE", text or "Gi")
    with pytest.raises(Exception, match="PAGEMILL_MODEL_CACHE_SIZE"):
        resolve_source("s3://bucket/model")
