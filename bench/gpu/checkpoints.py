"""Checkpoints with random weights, which every engine loads from the same files: config.json, safetensors, tokenizer.

The weights are those of `models.RandomWeights`, in bfloat16. They are written to memory where there is enough of it. A
tokenizer of the model's whole vocabulary is beside them: servers refuse to start without one.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paths
import torch
from models import CONFIGS, NUM_RANDOM, random_numbers, spec_of

IN_MEMORY = Path("/dev/shm")
SPARE_BYTES = 8 << 30
"""What stays free of the folder that checkpoints are written to."""
ALIGNMENT = 64
WRITERS = 8


class _Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    begin: int
    """Its first byte behind the header."""

    @property
    def num_bytes(self) -> int:
        return 2 * math.prod(self.shape)


def written(name: str) -> Path:
    """Return the folder of a checkpoint of `models.CONFIGS`; write it if it does not exist."""
    size = 2 * sum(math.prod(shape) for shape in spec_of(name).decoder.shapes().values())
    folder = _parent(size) / f"pagemill-random-{name}"
    if folder.exists():
        return folder
    draft = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    config = CONFIGS[name]
    (draft / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}, indent=1))
    write_tokenizer(draft, config["vocab_size"])
    write_weights(draft / "model.safetensors", spec_of(name).decoder.shapes())
    draft.rename(folder)
    return folder


def removed(name: str) -> None:
    for parent in (IN_MEMORY, paths.STATE):
        shutil.rmtree(parent / f"pagemill-random-{name}", ignore_errors=True)


def _parent(num_bytes: int) -> Path:
    fits = IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > num_bytes + SPARE_BYTES
    return IN_MEMORY if fits else paths.STATE


def write_weights(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write all tensors, each the repeated random sequence from its start; one-dimensional ones are ones."""
    tensors, end = [], 0
    for name, shape in shapes.items():
        tensors.append(_Tensor(name, tuple(shape), end))
        end += tensors[-1].num_bytes
    header = json.dumps(
        {
            each.name: {
                "dtype": "BF16",
                "shape": each.shape,
                "data_offsets": [each.begin, each.begin + each.num_bytes],
            }
            for each in tensors
        }
        | {"__metadata__": {"format": "pt"}}
    ).encode()
    header += b" " * (-(len(header) + 8) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
    space = np.memmap(path, dtype=np.uint16, mode="r+", offset=8 + len(header)) if end else np.empty(0, np.uint16)
    numbers = _bits(random_numbers())
    one = _bits(np.ones(1, dtype=np.float32))[0]
    with ThreadPoolExecutor(WRITERS) as threads:
        list(threads.map(lambda piece: _fill(space, piece, numbers, one), _pieces(tensors)))


class _Piece(NamedTuple):
    tensor: _Tensor
    start: int
    """Its first value, counted from the tensor's."""
    end: int


def _pieces(tensors: list[_Tensor]) -> Iterator[_Piece]:
    for tensor in tensors:
        for start in range(0, tensor.num_bytes // 2, 64 * NUM_RANDOM):
            yield _Piece(tensor, start, min(tensor.num_bytes // 2, start + 64 * NUM_RANDOM))


def _fill(space: Any, piece: _Piece, numbers: Any, one: Any) -> None:
    tensor, start, end = piece
    begin = tensor.begin // 2
    if len(tensor.shape) == 1:
        space[begin + start : begin + end] = one
        return
    for at in range(start, end, NUM_RANDOM):
        size = min(NUM_RANDOM, end - at)
        space[begin + at : begin + at + size] = numbers[:size]


def _bits(values: Any) -> Any:
    return torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer of bytes; the other tokens are numbers, which no text is split into."""
    letters = [_letter(byte) for byte in range(256)]
    vocab = {token: index for index, token in enumerate((letters + [f"#{i}" for i in range(vocab_size)])[:vocab_size])}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": False, "ignore_merges": False}
    document: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _letter(byte: int) -> str:
    """Return the printable letter that byte-level tokenizers use for a byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + sum(1 for other in range(byte) if other not in printable))
