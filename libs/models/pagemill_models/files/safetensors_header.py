"""Read names, types, sizes and offsets of the tensors in safetensors files, from their headers only.

Format: huggingface.co/docs/safetensors. The engine's loader reads the data.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from pagemill_models.files.encoder_files import needed_files
from pagemill_models.files.json_file import read_object, read_text
from pagemill_models.files.partial_download import awaited_bytes
from pagemill_models.files.regular_file import MODULES_FILE, open_regular
from pagemill_protocol.source_errors import UnreadableModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
MAX_DIMS = 8
MAX_SIZE = 1 << 60
"""No dimension and no offset reaches it: a file of that size does not exist."""
MAX_SHOWN = 120
"""Characters of a tensor's name that a message contains."""
_POINTER = b"version https://git-lfs.github.com/spec/"
_DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


class WeightIndex(NamedTuple):
    """The contents of a weight index, whose weights may be absent."""

    names: frozenset[str]
    """Names of the stored tensors."""
    num_bytes: int
    """Total size of the tensors; 0: not in the index."""


class TensorHeader(NamedTuple):
    name: str
    dtype: str
    """Name of the type in the format, for example `BF16`."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def read_folder_headers(folder: Path) -> dict[str, TensorHeader]:
    """Return the tensors of all shards by name. Raises `UnreadableModelError`."""
    tensors: dict[str, TensorHeader] = {}
    for shard in shard_paths(folder):
        for tensor in read_shard(folder, shard):
            if tensor.name in tensors:
                raise UnreadableModelError(f"`{folder}`: the tensor `{tensor.name}` is in two files.")
            tensors[tensor.name] = tensor
    return tensors


def shard_paths(folder: Path) -> list[Path]:
    """Return the weight files of a folder: the single file if there is one, otherwise those of the index, as
    transformers, except files of encoders, and those of its modules.

    Raises `UnreadableModelError`.
    """
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE, *_module_files(folder)]
    if (folder / INDEX_FILE).is_file():
        return [*(folder / name for name in sorted(set(weight_map(folder).values()))), *_module_files(folder)]
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        raise UnreadableModelError(
            f"`{folder}` holds pickled weights ({pickled[0]}), which may run code and are not read. "
            "Convert them with `save_pretrained(..., safe_serialization=True)`."
        )
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    remedy = f" Rename `{others[0]}` to `{SINGLE_FILE}`." if len(others) == 1 else " Fetch them."
    raise UnreadableModelError(f"`{folder}` holds no weights: neither `{SINGLE_FILE}` nor `{INDEX_FILE}`.{remedy}")


def read_shard(folder: Path, shard: Path) -> list[TensorHeader]:
    """Return the tensors of one of the folder's files as `read_header`; those of a module begin with its folder's
    name."""
    prefix = "" if shard.parent == folder else f"{shard.parent.name}."
    return [tensor._replace(name=prefix + tensor.name) for tensor in read_header(shard, root=folder)]


def _module_files(folder: Path) -> list[Path]:
    path = folder / MODULES_FILE
    if not path.is_file():
        return []
    try:
        names = {str(each["path"]) for each in orjson.loads(read_text(path)) if each.get("path")}
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
        return []  # said by those who read the modules
    files = (folder / name / SINGLE_FILE for name in sorted(names) if Path(name).name == name)
    return [file for file in files if file.is_file()]


def weight_map(folder: Path) -> dict[str, str]:
    """Return tensor name -> file from the folder's index; empty if the index is not used."""
    if (folder / SINGLE_FILE).is_file() or not (folder / INDEX_FILE).is_file():
        return {}
    files = _entries(folder)
    for name in sorted(set(files.values())):
        if Path(name).name != name:
            raise UnreadableModelError(f"`{folder / INDEX_FILE}` names the file `{name}`, which is outside the folder.")
        if not (folder / name).is_file():
            raise UnreadableModelError(f"`{folder}` lacks the weight file `{name}` that its index names. Fetch it.")
    return files


def lacks_weights(folder: Path) -> bool:
    """Whether the folder has an index and lacks files that it names, or has Git LFS pointers in their place."""
    if (folder / SINGLE_FILE).is_file() and not _is_pointer(folder / SINGLE_FILE):
        return False
    if not (folder / INDEX_FILE).is_file():
        return False
    shards = (folder / name for name in set(_entries(folder).values()))
    return any(not shard.is_file() or _is_pointer(shard) for shard in shards)


def read_index(folder: Path) -> WeightIndex:
    """Read the folder's index. Raises `UnreadableModelError`."""
    metadata = read_object(folder / INDEX_FILE).get("metadata")
    num_bytes = metadata.get("total_size") if isinstance(metadata, dict) else None
    is_size = type(num_bytes) in (int, float) and num_bytes is not None and num_bytes > 0
    return WeightIndex(frozenset(_entries(folder)), int(num_bytes) if is_size and num_bytes else 0)


def index_of_header(raw: bytes, where: str) -> dict[str, Any]:
    """Return an index with the contents of a single file's header. Raises `UnreadableModelError`."""
    try:
        header = orjson.loads(raw)
        tensors = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
        num_bytes = sum(int(end) - int(start) for start, end in tensors.values())
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnreadableModelError(f"{where} has a header that cannot be read ({str(error)[:120]}).") from None
    return {"metadata": {"total_size": num_bytes}, "weight_map": dict.fromkeys(tensors, SINGLE_FILE)}


def _is_pointer(path: Path) -> bool:
    """Whether the file is a Git LFS pointer, which stands for a large file that was not fetched."""
    try:
        with open(open_regular(path), "rb") as file:
            return file.read(len(_POINTER)) == _POINTER
    except (OSError, UnreadableModelError):
        return False


def _entries(folder: Path) -> dict[str, str]:
    """Return tensor name -> file of the index, without files of encoders."""
    files = _indexed(folder)
    needed = needed_files(files)
    return {tensor: name for tensor, name in files.items() if name in needed}


def _indexed(folder: Path) -> dict[str, str]:
    entries = read_object(folder / INDEX_FILE).get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise UnreadableModelError(f"`{folder / INDEX_FILE}` has no `weight_map`.")
    return {tensor: str(name) for tensor, name in entries.items()}


def encoder_files(folder: Path) -> set[str]:
    """Return the files of the folder's index that hold encoders only. Raises `UnreadableModelError`."""
    return set(_indexed(folder).values()) - set(_entries(folder).values())


def header_end(start: bytes) -> int:
    """Return the offset at which a file's header ends. `start`: the first 8 bytes or more."""
    return 8 + int.from_bytes(start[:8], "little")


def read_header(path: Path, file_bytes: int | None = None, root: Path | None = None) -> list[TensorHeader]:
    """Return the tensors of one file, in file order, checked against the file's size. Raises `UnreadableModelError`.

    `file_bytes`: final size of the file; `None`: that of `partial_download` while the file arrives, else its current
    size. `root`: the model's folder, by default the one that contains the file.
    """
    try:
        file_bytes = file_bytes or awaited_bytes(path) or path.stat().st_size
        with open(open_regular(path, root), "rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if file_bytes < 8 or header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
                raise _damaged(path, f"its header claims {header_bytes} bytes, the file has {file_bytes}")
            raw = file.read(header_bytes)
    except OSError as error:
        raise UnreadableModelError(f"`{path}` cannot be read: {error.strerror}.") from error
    try:
        header = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _damaged(path, f"its header is not JSON ({str(error)[:120]})") from None
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not an object")
    data_start = 8 + header_bytes
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    if repeated := _repeated_name(raw, len(entries)):
        raise _damaged(path, f"its header has two tensors `{_short(repeated)}`")
    data_bytes = file_bytes - data_start
    tensors = [_tensor(path, name, entry, data_start, data_bytes) for name, entry in entries.items()]
    _check_places(path, tensors, data_start, data_bytes)
    return tensors


def _repeated_name(raw: bytes, num_entries: int) -> str | None:
    """Return a name that a header has twice; JSON parsers keep only the last one."""
    if raw.count(b'"data_offsets"') == num_entries and b"\\u" not in raw:
        return None  # the usual case, decided in a fraction of the time
    found: list[str] = []

    def keep(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(name for name, _ in pairs)
        found.extend(name for name, count in counts.items() if count > 1)
        return dict(pairs)

    json.loads(raw, object_pairs_hook=keep)
    return found[0] if found else None


def _check_places(path: Path, tensors: list[TensorHeader], data_start: int, data_bytes: int) -> None:
    """Check that the tensors follow one another and fill the data, as the format demands."""
    end, before = data_start, "the header"
    for tensor in sorted(tensors, key=lambda each: (each.offset, each.num_bytes)):
        if tensor.offset != end:
            how = "overlaps with" if tensor.offset < end else "leaves a hole after"
            raise _damaged(path, f"tensor `{_short(tensor.name)}` {how} {before}")
        end, before = tensor.offset + tensor.num_bytes, f"`{_short(tensor.name)}`"
    if end != data_start + data_bytes:
        raise _damaged(path, f"its tensors end {data_start + data_bytes - end} bytes before the file")


def _tensor(path: Path, name: str, entry: Any, data_start: int, data_bytes: int) -> TensorHeader:
    fields = entry if isinstance(entry, dict) else {}
    dtype = str(fields.get("dtype"))
    shape, offsets = _sizes(fields.get("shape"), MAX_DIMS), _sizes(fields.get("data_offsets"), 2)
    shown = _short(name)
    if shape is None or offsets is None or len(offsets) != 2 or dtype not in _DTYPE_BITS:
        raise _damaged(
            path, f"tensor `{shown}` has no valid dtype, shape (of at most {MAX_DIMS} sizes) and data_offsets"
        )
    start, end = offsets
    if not start <= end <= data_bytes:
        raise _damaged(path, f"tensor `{shown}` ends at byte {end} of {data_bytes} bytes of data")
    if max(shape, default=0) > 8 * data_bytes:
        raise _damaged(path, f"tensor `{shown}` has the shape {shape}, which {data_bytes} bytes of data cannot hold")
    if math.prod(shape) * _DTYPE_BITS[dtype] != (end - start) * 8:
        raise _damaged(path, f"tensor `{shown}` of shape {shape} and type {dtype} does not have {end - start} bytes")
    return TensorHeader(name, dtype, tuple(shape), data_start + start, end - start)


def _sizes(value: Any, most: int) -> list[int] | None:
    valid = isinstance(value, list) and len(value) <= most
    return value if valid and all(type(entry) is int and 0 <= entry < MAX_SIZE for entry in value) else None


def _short(name: str) -> str:
    return name if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]}..."


def _damaged(path: Path, problem: str) -> UnreadableModelError:
    return UnreadableModelError(
        f"`{path}` cannot be read as safetensors: {problem}. Fetch it again and compare its size with the publisher's."
    )
