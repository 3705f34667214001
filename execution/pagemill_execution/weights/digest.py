"""The weights digest, which identifies the weights of a KV block or a resumed stream.

It is blake2b-128 over every tensor's name, type, shape and bytes. Tensors larger than `WHOLE_TENSOR_BYTES` in models
larger than `WHOLE_MODEL_BYTES` contribute only their first, middle and last `SAMPLE_BYTES`, so that the digest takes
far less time than loading. The digest distinguishes checkpoints; it does not protect against forgery, since an attacker
who can write the weights controls the model anyway.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pagemill_models.files.gguf_file import GGUFFile, GGUFTensor

WHOLE_MODEL_BYTES = 256 * 1024 * 1024
WHOLE_TENSOR_BYTES = 256 * 1024
SAMPLE_BYTES = 64 * 1024
REMOTE_READERS = 8
"""Tensors of a network that are read at once."""


class TensorBytes(Protocol):
    """An array, or bytes that are read when they are needed."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> NDArray[np.uint8]: ...


class StoredTensor(NamedTuple):
    name: str
    kind: str
    shape: tuple[int, ...]
    data: TensorBytes
    """The stored bytes, one-dimensional."""


def digest_tensors(tensors: Iterable[StoredTensor], total_bytes: int, num_readers: int = 1) -> str:
    """Return the hex digest. The order of the tensors does not matter. `num_readers`: tensors that are read at once."""
    hasher = hashlib.blake2b(digest_size=16)
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    with ThreadPoolExecutor(num_readers) as pool:
        read = partial(_pieces, total_bytes=total_bytes)
        found = pool.map(read, ordered) if num_readers > 1 else map(read, ordered)
        for tensor, pieces in zip(ordered, found, strict=True):
            hasher.update(f"{tensor.name}|{tensor.kind}|{tensor.shape}|{len(tensor.data)}|".encode())
            for piece in pieces:
                hasher.update(piece.data)
    return hasher.hexdigest()


def gguf_digest(file: GGUFFile, data: Callable[[GGUFTensor], TensorBytes] | None = None, num_readers: int = 1) -> str:
    """Return the digest of a file. `data`: reads a tensor's bytes; None: they are in the file."""
    tensors, read = file.tensors.values(), data or file.data_of
    stored = (StoredTensor(each.name, each.ggml_type.name, each.shape, read(each)) for each in tensors)
    return digest_tensors(stored, sum(tensor.num_bytes for tensor in tensors), num_readers)


def _pieces(tensor: StoredTensor, total_bytes: int) -> list[NDArray[np.uint8]]:
    data = tensor.data
    if total_bytes <= WHOLE_MODEL_BYTES or len(data) <= WHOLE_TENSOR_BYTES:
        return [data[:]]
    middle = len(data) // 2
    return [data[:SAMPLE_BYTES], data[middle : middle + SAMPLE_BYTES], data[-SAMPLE_BYTES:]]
