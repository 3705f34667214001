"""The contents of weights may be anything: tensors with other bytes become values, or are refused by name.

Headers of files are mutated by `tests/protocol/test_mutated_models.py` and `make fuzz`.
"""

from __future__ import annotations

import json
import random
import time
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from mutated_models import VALUES
from packed_records import RECORDS, Folder, tensors_of

from examples import num_examples
from pagemill_execution.weights.codes import CODE_KINDS, read_blocks, read_codes
from pagemill_execution.weights.dequantize import block_bytes, dequantize_into
from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.packed.formats import BUILT_IN

MAX_S = 2.0
"""CPU time for a matrix of a few thousand values."""
MAX_BYTES = 64 * 2**20


def read(settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Read all matrices of a folder, as an engine does; raises `LoadError` for those that are refused."""
    found = BUILT_IN[settings["quant_method"]].matrices(settings, Folder(tensors))
    for matrix in found.values():
        for values in (matrix.floats(), *([] if matrix.codes is None else [matrix.codes().dequantize()])):
            assert values.shape == matrix.shape
            assert values.nbytes < MAX_BYTES


def changed_contents(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    raw = bytearray(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    for _ in range(rng.choice((1, 4, len(raw)))):
        raw[rng.randrange(len(raw))] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
    return torch.frombuffer(raw, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


def changed_shape(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    flat = tensor.reshape(-1)
    return rng.choice((flat[: len(flat) // 2], flat, flat[:1], tensor[None], flat[:0], tensor.to(torch.float32)))


@pytest.mark.parametrize("name", RECORDS)
def test_packed_matrices_with_other_contents_are_values_or_are_refused(name: str) -> None:
    record, rng = RECORDS[name], random.Random(name)
    tensors = {f"m.{key}": each for key, each in tensors_of(record).items()}
    refusals: list[str] = []
    for _ in range(num_examples(600)):
        at = rng.choice(list(tensors))
        change = rng.choice((changed_contents, changed_contents, changed_shape))
        began_s = time.thread_time()
        try:
            with np.errstate(all="ignore"):  # values of any size become infinite ones
                read(record["settings"], tensors | {at: change(tensors[at], rng)})
        except LoadError as error:
            refusals.append(str(error))
        assert time.thread_time() - began_s < MAX_S, at
    assert refusals, "some shapes are wrong"
    assert all("tensor `m." in each or "quantization_config" in each for each in refusals), refusals


@pytest.mark.parametrize("name", [name for name in RECORDS if "bitsandbytes" in name and "f" in name])
def test_the_settings_inside_a_tensor_may_have_any_value(name: str) -> None:
    record = RECORDS[name]
    tensors = {f"m.{key}": each for key, each in tensors_of(record).items()}
    ((at, state),) = [(key, each) for key, each in tensors.items() if "quant_state" in key]
    settings, longest = json.loads(bytes(state.tolist())), 0
    for key in settings:
        for value in (*VALUES, 2**16, [2**31, 2**31], [1, 1], [64]):
            raw = json.dumps(settings | {key: value}).encode()
            began_s = time.thread_time()
            try:
                with np.errstate(all="ignore"):
                    read(record["settings"], tensors | {at: torch.frombuffer(bytearray(raw), dtype=torch.uint8)})
            except LoadError as error:
                longest = max(longest, len(str(error)))
            assert time.thread_time() - began_s < MAX_S, (key, value)
    assert 0 < longest < 1000


@pytest.mark.parametrize("kind", sorted(CODE_KINDS))
def test_blocks_of_any_bytes_are_values(kind: str) -> None:
    """Scales of blocks may be infinite or no numbers; reading them raises nothing and changes no shape."""
    rng = np.random.default_rng(5)
    shape = (4, 512)
    num_bytes = shape[0] * shape[1] // gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0] * block_bytes(kind)
    anything = rng.integers(0, 256, num_bytes, np.uint8)
    for raw in (anything, np.full_like(anything, 255), np.full_like(anything, 0x7C), np.zeros_like(anything)):
        out = np.empty(shape, np.float32)
        dequantize_into(kind, raw, out)
        codes = read_codes(kind, raw, shape)
        with np.errstate(all="ignore"):
            assert codes.dequantize().shape == out.shape
        read_blocks(kind, raw, shape)
