"""Fetch the headers of a model without its weights, from a remote source into a local folder.

The small JSON files beside the weights (`config.json`, the index) are fetched whole; of a weight file only the header
is read, by range. A safetensors header becomes an index, which also names tensors and their bytes. A GGUF file is
created in its full size as a sparse file with its header and the tensors that describe its model. `resolve` fetches
whole models, for engines; `model_files` reads the folder.
"""

from __future__ import annotations

from pathlib import Path

import orjson

from pagemill_models.declaration.config_values import AUTO_GPTQ_FILE, CONFIG_FILE
from pagemill_models.declaration.gguf_values import DESCRIBING
from pagemill_models.files.gguf_file import header_bytes, tensors_in
from pagemill_models.files.safetensors_header import INDEX_FILE, MAX_HEADER_BYTES, SINGLE_FILE, index_of_header
from pagemill_models.sources.base import Listing, ReadsRanges, RemoteFile, Repository
from pagemill_models.sources.registry import find_kind, in_full
from pagemill_models.sources.selection import select_files
from pagemill_models.sources.store.reach import check_reachable
from pagemill_protocol.source_errors import FetchError, SourceError

CONFIG_FILES = frozenset(
    {
        CONFIG_FILE,
        AUTO_GPTQ_FILE,
        "modules.json",
        "config_sentence_transformers.json",
        "sentence_bert_config.json",
        INDEX_FILE,
    }
)
"""Files that describe a model and its weights, without the tokenizer."""
FIRST_BYTES = 256 * 1024
"""Bytes read first from a weight file: most headers of safetensors are shorter."""
MAX_GGUF_HEADER_BYTES = 256 * 1024 * 1024
MAX_DESCRIBING_BYTES = 1024 * 1024


def can_read_header(source: str) -> bool:
    """Whether the source is remote and parts of its files can be read."""
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
    """Return the folder, or its `.gguf` file, for `model_files.load_spec_without_weights`. Raises `SourceError`."""
    written = in_full(source)
    kind = find_kind(written, field)
    kind.check(written, field)
    try:
        repository = kind.open(written)
        try:
            check_reachable(kind, written)
            return _Header(repository, repository.list_files(), folder).fetch(kind.file_of(written))
        finally:
            repository.close()
    except FetchError as error:
        raise FetchError(error.reason, error.message, field) from error


def read_safetensors_header(repository: Repository, file: RemoteFile, version: str) -> bytes:
    """Return the beginning of a safetensors file, the length included, up to its first tensor. Raises `FetchError`."""
    assert isinstance(repository, ReadsRanges), "the caller asks first"
    start = repository.read_range(file, version, 0, FIRST_BYTES)
    end = 8 + int.from_bytes(start[:8], "little")
    if len(start) < 8 or end - 8 > min(MAX_HEADER_BYTES, file.num_bytes - 8):
        raise FetchError("ModelUnreadable", f"{repository.name}: `{file.path}` is not a safetensors file.")
    if end <= len(start):
        return start[:end]
    return start + repository.read_range(file, version, len(start), end - len(start))


def write_gguf_header(repository: Repository, file: RemoteFile, version: str, path: Path) -> None:
    """Write a sparse file with the header of a GGUF file and its tensors that describe the model. Raises `FetchError`
    and `GGUFError`.

    A header grows with the vocabulary, so it is read in growing parts until it is complete.
    """
    assert isinstance(repository, ReadsRanges), "the caller asks first"
    data, wanted = b"", FIRST_BYTES
    while True:
        data += repository.read_range(file, version, len(data), wanted - len(data))
        length = header_bytes(data, path)
        if length is not None or len(data) >= file.num_bytes:
            break
        if wanted > MAX_GGUF_HEADER_BYTES:
            raise FetchError("ModelUnreadable", f"{repository.name}: the header of `{file.path}` has no end.")
        wanted *= 4
    with path.open("wb") as out:
        out.write(data[:length])
        out.truncate(file.num_bytes)
        out.flush()
        tensors = tensors_in(path) if length is not None else {}
        for tensor in (tensors[name] for name in DESCRIBING if name in tensors):
            if tensor.num_bytes > MAX_DESCRIBING_BYTES:
                message = f"{repository.name}: `{tensor.name}` of `{file.path}` has {tensor.num_bytes} bytes"
                raise FetchError("ModelUnreadable", f"{message}, more than the {MAX_DESCRIBING_BYTES} allowed.")
            out.seek(tensor.offset)
            out.write(repository.read_range(file, version, tensor.offset, tensor.num_bytes))


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
            if file.path in CONFIG_FILES or file.path.endswith("/config.json"):
                (self._folder / file.path).parent.mkdir(exist_ok=True)
                with (self._folder / file.path).open("wb") as out:
                    self._repository.fetch(file, self._version, out)
        by_path = {file.path: file for file in chosen}
        if SINGLE_FILE in by_path:
            (self._folder / INDEX_FILE).write_bytes(orjson.dumps(self._index(by_path[SINGLE_FILE])))
        return self._folder

    def _index(self, file: RemoteFile) -> object:
        """Return an index that describes the single file."""
        raw = read_safetensors_header(self._repository, file, self._version)
        return index_of_header(raw[8:], f"{self._repository.name}: `{file.path}`")

    def _gguf(self, file: RemoteFile) -> Path:
        path = self._folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        write_gguf_header(self._repository, file, self._version, path)
        return path
