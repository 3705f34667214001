"""What a model is, without its weights: the files of a remote source that say it, in a folder of this machine.

Taken whole are the small JSON files beside the weights (`config.json`, the index); of a file of weights only its header
is read, by range. A safetensors header becomes an index, which names tensors and their bytes as well. A GGUF file is
made in its full size with nothing behind its header: no block of the disk is used for what was not fetched. `resolve`
fetches models whole, for those that compute; `model_files` reads what lies here.
"""

from __future__ import annotations

from pathlib import Path

import orjson

from pagemill_protocol.gguf_file import header_bytes
from pagemill_protocol.safetensors_header import INDEX_FILE, MAX_HEADER_BYTES, SINGLE_FILE, index_of_header
from pagemill_protocol.source_errors import FetchError, SourceError
from pagemill_protocol.sources.base import Listing, ReadsRanges, RemoteFile, Repository
from pagemill_protocol.sources.registry import find_kind, in_full
from pagemill_protocol.sources.selection import select_files

CONFIG_FILES = frozenset(
    {
        "config.json",
        "modules.json",
        "config_sentence_transformers.json",
        "sentence_bert_config.json",
        INDEX_FILE,
    }
)
"""What a model and its weights are; tokenizers are not among them."""
FIRST_BYTES = 256 * 1024
"""Of a file of weights: most headers of safetensors end before."""
MAX_GGUF_HEADER_BYTES = 256 * 1024 * 1024


def can_read_header(source: str) -> bool:
    """The source is remote, and parts of its files can be read."""
    written = in_full(source)
    try:
        kind = find_kind(written)
        if not kind.is_remote:
            return False
        repository = kind.open(written)
    except SourceError:
        return False
    try:
        return isinstance(repository, ReadsRanges)
    finally:
        repository.close()


def fetch_header(source: str, folder: Path, field: str = "model.source") -> Path:
    """The folder, or the `.gguf` file in it, for `model_files.load_outlined_spec`. Raises `SourceError`."""
    written = in_full(source)
    kind = find_kind(written, field)
    kind.check(written, field)
    try:
        repository = kind.open(written)
        try:
            return _Header(repository, repository.list_files(), folder).fetch(kind.file_of(written))
        finally:
            repository.close()
    except FetchError as error:
        raise FetchError(error.reason, error.message, field) from error


class _Header:
    def __init__(self, repository: Repository, listing: Listing, folder: Path) -> None:
        self._repository = repository
        self._version = listing.version
        self._files = listing.files
        self._folder = folder

    def fetch(self, wanted: str | None) -> Path:
        chosen = select_files(self._repository.name, wanted, self._files)
        if any(file.is_archive for file in chosen):
            message = "an image whose layers are archives, of which no header is read. Push the model's files as layers"
            raise FetchError("SourceUnsupported", f"{self._repository.name} is {message} (ORAS), or name a folder.")
        models = [file for file in chosen if file.path.endswith(".gguf")]
        if models:
            first, *_ = [self._gguf(file) for file in models]
            return first
        for file in chosen:
            if file.path in CONFIG_FILES:
                with (self._folder / file.path).open("wb") as out:
                    self._repository.fetch(file, self._version, out)
        by_path = {file.path: file for file in chosen}
        if SINGLE_FILE in by_path:
            (self._folder / INDEX_FILE).write_bytes(orjson.dumps(self._index(by_path[SINGLE_FILE])))
        return self._folder

    def _index(self, file: RemoteFile) -> object:
        """As one file in place of shards would have it."""
        start = self._read(file, 0, FIRST_BYTES)
        length = int.from_bytes(start[:8], "little")
        if len(start) < 8 or length > min(MAX_HEADER_BYTES, file.num_bytes - 8):
            raise FetchError("ModelUnreadable", f"{self._repository.name}: `{file.path}` is no safetensors file.")
        raw = start[8 : 8 + length]
        raw += self._read(file, 8 + len(raw), length - len(raw))
        return index_of_header(raw, f"{self._repository.name}: `{file.path}`")

    def _gguf(self, file: RemoteFile) -> Path:
        """Its header grows with the vocabulary: as much is read as it turns out to have."""
        path = self._folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        data, wanted = b"", FIRST_BYTES
        while True:
            data += self._read(file, len(data), wanted - len(data))
            length = header_bytes(data, path)
            if length is not None or len(data) >= file.num_bytes:
                break
            if wanted > MAX_GGUF_HEADER_BYTES:
                raise FetchError("ModelUnreadable", f"{self._repository.name}: the header of `{file.path}` has no end.")
            wanted *= 4
        with path.open("wb") as out:
            out.write(data[:length])
            out.truncate(file.num_bytes)
        return path

    def _read(self, file: RemoteFile, start: int, num_bytes: int) -> bytes:
        assert isinstance(self._repository, ReadsRanges), "`can_read_header` is asked first"
        return self._repository.read_range(file, self._version, start, num_bytes)
