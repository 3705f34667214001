"""Read GGUF files (github.com/ggml-org/ggml, docs/gguf.md): metadata, tensor table, and tensors as views of the map.

It does not dequantize (the engine's loader does) and does not interpret keys (`model_spec` and
`tokenizer_files.gguf_tokenizer` do). Every length is checked against the file before it is used, so that a corrupt file
is refused at once. Arrays of strings (a vocabulary has hundreds of thousands) are walked once and decoded at the first
access.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from pagemill_models.files.ggml_types import GGMLType as GGMLType
from pagemill_models.files.gguf_split import part_names
from pagemill_models.files.regular_file import exists, open_regular
from pagemill_protocol.source_errors import UnreadableModelError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_KEY_BYTES = 65_535
MAX_ENTRIES = 65_536
MAX_TENSORS = 1_000_000
MAX_ARRAY_ENTRIES = 4_000_000
MAX_NUMBERS = 8_000_000
"""Numbers in all arrays of a header together, each of which takes up to 32 bytes here."""
MAX_HEADER_BYTES = 256 * 1024 * 1024
MAX_SHOWN = 120
"""Characters of a name or value of the file that a message contains."""
_MIN_ENTRY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U64 = struct.Struct("<Q")


class GGUFError(UnreadableModelError):
    """The file cannot be read as GGUF; the message names the position and the remedy."""


class _Truncated(GGUFError):
    """The data ends inside the header."""


class GGUFTensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    """Row-major as in torch, while GGUF stores the fastest dimension first."""
    ggml_type: GGMLType
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int
    part: int = 0
    """Index of the file in a split model."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class StringArray(Sequence[str]):
    """An array of strings in the file, decoded as a whole at the first access."""

    def __init__(self, data: mmap.mmap | bytes, offset: int, count: int, key: str, path: Path) -> None:
        self._data = data
        self._offset = offset
        self._count = count
        self._key = key
        self._path = path
        self._strings: list[str] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self.to_list()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_list())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self.to_list() == list(other)

    def to_list(self) -> list[str]:
        if self._strings is None:
            self._strings = self._decode()
        return self._strings

    def _decode(self) -> list[str]:
        data, position, unpack = self._data, self._offset, _U64.unpack_from
        strings: list[str] = []
        try:
            for _ in range(self._count):
                start = position + 8
                position = start + unpack(data, position)[0]
                strings.append(data[start:position].decode())
        except UnicodeDecodeError:
            raise GGUFError(
                f"`{self._path}`: entry {len(strings)} of `{_short(self._key)}` is not UTF-8. {_REMEDY}"
            ) from None
        return strings


_REMEDY = "The file is damaged: fetch it again and compare its size and checksum with the publisher's."


class GGUFFile:
    """A mapped GGUF file: `metadata` by key and `tensors` by name, in file order.

    For a model that is split over several files, `path` is the first: the metadata is its own, the tensors are those of
    all files. Reading takes time linear in the header, not in the weights. Raises `GGUFError`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.paths = [self.path]
        """Paths of all parts; `GGUFTensor.part` is an index of this list."""
        self._parts = [_mapped(self.path)]
        header = _Header(self._parts[0], self.path)
        header.read()
        self.version = header.version
        self.alignment = header.alignment
        self.metadata: dict[str, Any] = header.metadata
        self.tensors: dict[str, GGUFTensor] = header.tensors
        for part, name in enumerate(_further_parts(header, self.path), start=1):
            self._add(part, self.path.with_name(name))

    def _add(self, part: int, path: Path) -> None:
        if not exists(path):
            raise GGUFError(f"`{self.path}` is the first file of a split model, and `{path.name}` is not beside it.")
        self._parts.append(_mapped(path))
        self.paths.append(path)
        header = _Header(self._parts[part], path)
        header.read()
        if header.split_number() != part:
            raise GGUFError(f"`{path}` calls itself part {header.split_number() + 1}, not {part + 1}. {_REMEDY}")
        twice = header.tensors.keys() & self.tensors.keys()
        if twice:
            raise GGUFError(f"`{path}` repeats the tensor `{_short(min(twice))}` of an earlier part. {_REMEDY}")
        self.tensors |= {name: tensor._replace(part=part) for name, tensor in header.tensors.items()}

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the tensor's stored bytes, uint8 [num_bytes], as a read-only view of the mapping without a copy."""
        return self.data_of(self.tensors[name])

    def data_of(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """Return the stored bytes of a tensor, or of a part of one, as `data` does."""
        import numpy as np

        return np.frombuffer(self._parts[tensor.part], dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return the metadata of a key, or `default`. Raises `GGUFError` for a value of another type than `kind`."""
        value = self.metadata.get(key, default)
        if value is default or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
            return value
        raise GGUFError(f"`{self.path}`: `{_short(key)}` has the wrong type {type(value).__name__}. {_REMEDY}")


def check_gguf(path: Path) -> None:
    """Check one file as `tensors_in`. Raises `GGUFError`."""
    tensors_in(path)


def tensors_in(path: Path) -> dict[str, GGUFTensor]:
    """Return the tensors of one file by itself, which may be any part of a split model. Raises `GGUFError`."""
    header = _Header(_mapped(path), path)
    header.read()
    return header.tensors


def header_bytes(data: bytes, path: Path) -> int | None:
    """Return the length in bytes of the header of a file that begins with `data`, or None if the header is longer.

    `path`: for messages. Raises `GGUFError` for data that is not GGUF.
    """
    header = _Header(data, path)
    try:
        header.read_table()
    except _Truncated:
        return None
    return header.end


def _mapped(path: Path) -> mmap.mmap:
    try:
        with open(open_regular(path), "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise GGUFError(f"`{path}` is empty. {_REMEDY}") from None
    except OSError as error:
        raise GGUFError(f"`{path}` cannot be read: {error.strerror}.") from error


def _further_parts(header: _Header, path: Path) -> list[str]:
    """Return the names of the other files of a split model. Raises `GGUFError`."""
    count = header.metadata.get("split.count", 0)
    if not isinstance(count, int) or count < 2:
        return []
    names = part_names(path.name)
    if len(names) != count:
        raise GGUFError(
            f"`{path}` is part {header.split_number() + 1} of a model split over {count} files, which its name does "
            f"not say. Name its parts `NAME-00001-of-{count:05}.gguf` and so on."
        )
    if header.split_number() != 0:
        raise GGUFError(f"`{path}` is part {header.split_number() + 1} of {count} of a model. Give `{names[0]}`.")
    return names[1:]


class _Header:
    """One pass over header, metadata and tensor table."""

    def __init__(self, data: mmap.mmap | bytes, path: Path) -> None:
        self._data = data
        self._path = path
        self._size = len(data)
        self._position = 0
        self.version = 0
        self.alignment = DEFAULT_ALIGNMENT
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        self._num_numbers = 0

    @property
    def end(self) -> int:
        """Position after all that was read."""
        return self._position

    def read(self) -> None:
        infos = self.read_table()
        end = data_start = -(-self._position // self.alignment) * self.alignment
        for info in infos:
            tensor = self._place(info, data_start)
            if tensor.offset != end:
                how = "overlaps with" if tensor.offset < end else "leaves a hole after"
                raise self._error(
                    f"tensor `{_short(tensor.name)}` {how} the data before it: it starts at byte "
                    f"{tensor.offset}, not {end}"
                )
            end = tensor.offset + -(-tensor.num_bytes // self.alignment) * self.alignment

    def read_table(self) -> list[tuple[str, tuple[int, ...], GGMLType, int]]:
        """Read metadata and tensor table without checking where the tensors' data lie."""
        num_tensors, num_entries = self._read_start()
        for _ in range(num_entries):
            key = self._string("a metadata key", MAX_KEY_BYTES)
            if self._position > MAX_HEADER_BYTES:
                raise self._error(f"its metadata takes more than the {MAX_HEADER_BYTES} bytes allowed")
            if key in self.metadata:
                raise self._error(f"the metadata key `{_short(key)}` appears twice")
            self.metadata[key] = self._value(self._scalar(4, key), key)
        self._read_alignment()
        return [self._tensor_info() for _ in range(num_tensors)]

    def _read_start(self) -> tuple[int, int]:
        magic = self._data[:4]
        if magic != MAGIC:
            raise GGUFError(
                f"`{self._path}` does not start with `GGUF` but with {magic!r}: not a GGUF file. "
                "Give a `.gguf` file, or the folder of a Hugging Face model."
            )
        self._position = 4
        self.version = self._scalar(4, "the version")
        if self.version not in SUPPORTED_VERSIONS:
            swapped = int.from_bytes(self.version.to_bytes(4, "little"), "big")
            if swapped in SUPPORTED_VERSIONS:
                raise GGUFError(f"`{self._path}` is a big-endian GGUF file. Convert it to little-endian.")
            raise GGUFError(f"`{self._path}` has the unsupported GGUF version {self.version}. Convert it to version 3.")
        num_tensors, num_entries = self._scalar(10, "the tensor count"), self._scalar(10, "the metadata count")
        many = f"it claims {num_tensors} tensors and {num_entries} metadata entries, too many"
        if num_tensors > MAX_TENSORS or num_entries > MAX_ENTRIES:
            raise self._error(many)
        if num_tensors * _MIN_TENSOR_BYTES + num_entries * _MIN_ENTRY_BYTES > self._size:
            raise self._truncated(many)
        return num_tensors, num_entries

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._scalar(kind, key)
        if kind == _STRING:
            return self._string(f"`{_short(key)}`")
        if kind == _ARRAY:
            return self._array(key)
        raise self._error(f"`{_short(key)}` has the unknown value type {kind}")

    def _array(self, key: str) -> Any:
        kind, count = self._scalar(4, key), self._scalar(10, key)
        if count > MAX_ARRAY_ENTRIES:
            raise self._error(
                f"array `{_short(key)}` claims {count} entries, more than the {MAX_ARRAY_ENTRIES} allowed"
            )
        if kind in _SCALARS:
            self._need(count * _SCALARS[kind].size, f"array `{_short(key)}` of {count} entries")
            self._num_numbers += count
            if self._num_numbers > MAX_NUMBERS:
                raise self._error(
                    f"with array `{_short(key)}` its arrays have more than the {MAX_NUMBERS} numbers allowed"
                )
            layout = _SCALARS[kind].format[1:]
            values = struct.unpack_from(f"<{count}{layout}", self._data, self._position)
            self._position += count * _SCALARS[kind].size
            return list(values)
        if kind == _STRING:
            return self._string_array(key, count)
        raise self._error(
            f"array `{_short(key)}` has entries of the type {kind}; numbers, booleans and strings are read"
        )

    def _string_array(self, key: str, count: int) -> StringArray:
        start = self._position
        self._need(count * 8, f"array `{_short(key)}` of {count} strings")
        data, position, unpack = self._data, start, _U64.unpack_from
        last = self._size - 8
        for index in range(count):
            if position > last:
                raise self._truncated(f"string {index} of {count} of `{_short(key)}` runs past the end")
            position += 8 + unpack(data, position)[0]
        if position > self._size:
            raise self._truncated(f"the last string of `{_short(key)}` runs past the end")
        self._position = position
        return StringArray(data, start, count, key, self._path)

    def _string(self, what: str, max_bytes: int | None = None) -> str:
        num_bytes = self._scalar(10, what)
        if max_bytes is not None and num_bytes > max_bytes:
            raise self._error(f"{what} has {num_bytes} bytes, more than the {max_bytes} allowed")
        self._need(num_bytes, what)
        raw = self._data[self._position : self._position + num_bytes]
        self._position += num_bytes
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self._error(f"{what} is not UTF-8") from None

    def _scalar(self, kind: int, what: str) -> Any:
        layout = _SCALARS[kind]
        self._need(layout.size, what)
        value = layout.unpack_from(self._data, self._position)[0]
        self._position += layout.size
        return value

    def _need(self, num_bytes: int, what: str) -> None:
        if num_bytes > self._size - self._position:
            raise self._truncated(f"{what} needs {num_bytes} bytes where {self._size - self._position} are left")

    def _read_alignment(self) -> None:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._error(f"`general.alignment` is {_short(repr(alignment))}, not a power of two from 8")
        self.alignment = alignment

    def split_number(self) -> int:
        """Return the 0-based index of this file in a split model."""
        number = self.metadata.get("split.no", 0)
        return number if isinstance(number, int) else 0

    def _tensor_info(self) -> tuple[str, tuple[int, ...], GGMLType, int]:
        name = self._string("a tensor name", MAX_KEY_BYTES)
        num_dims = self._scalar(4, f"tensor `{_short(name)}`")
        if not 0 < num_dims <= MAX_DIMS:
            raise self._error(f"tensor `{_short(name)}` has {num_dims} dimensions, from 1 to {MAX_DIMS} are allowed")
        dims = tuple(self._scalar(10, f"tensor `{_short(name)}`") for _ in range(num_dims))
        kind, offset = self._scalar(4, f"tensor `{_short(name)}`"), self._scalar(10, f"tensor `{_short(name)}`")
        try:
            ggml_type = GGMLType(kind)
        except ValueError:
            raise GGUFError(
                f"`{self._path}`: tensor `{_short(name)}` has the unknown storage type {kind}. Use another "
                "quantization."
            ) from None
        return name, tuple(reversed(dims)), ggml_type, offset

    def _place(self, info: tuple[str, tuple[int, ...], GGMLType, int], data_start: int) -> GGUFTensor:
        name, shape, ggml_type, offset = info
        if name in self.tensors:
            raise self._error(f"the tensor `{_short(name)}` appears twice")
        num_elements = math.prod(shape)
        if num_elements == 0 or shape[-1] % ggml_type.block_elements:
            raise self._error(
                f"tensor `{_short(name)}` has the shape {list(shape)}, impossible for type {ggml_type.name}"
            )
        num_bytes = num_elements // ggml_type.block_elements * ggml_type.block_bytes
        if offset % self.alignment:
            raise self._error(f"tensor `{_short(name)}` starts at {offset}, not a multiple of {self.alignment}")
        end = data_start + offset + num_bytes
        if end > self._size:
            raise self._error(
                f"tensor `{_short(name)}` of shape {list(shape)} ends at byte {end}, but the file has {self._size} "
                "bytes"
            )
        self.tensors[name] = GGUFTensor(name, shape, ggml_type, data_start + offset, num_bytes)
        return self.tensors[name]

    def _error(self, message: str) -> GGUFError:
        return GGUFError(self._why(message))

    def _truncated(self, message: str) -> GGUFError:
        return _Truncated(self._why(message))

    def _why(self, message: str) -> str:
        return f"`{self._path}` cannot be read as GGUF: {message}. {_REMEDY}"


def _short(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
