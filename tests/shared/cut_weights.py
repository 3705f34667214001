"""Compares weights of which parts are read with parts that are cut out of whole tensors."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from pagemill_execution.weights import files
from pagemill_execution.weights.source import CutWeights


def noted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the bytes of each read of a file of weights."""
    found: list[int] = []
    preadv = os.preadv

    def noted(file: int, buffers: Any, offset: int) -> int:
        found.append(preadv(file, buffers, offset))
        return found[-1]

    monkeypatch.setattr(files.os, "preadv", noted)
    return found


class Uncut:
    """A source that reads whole tensors."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def cut(self, slices: Any) -> CutWeights:
        return CutWeights(self, slices)  # type: ignore[arg-type]


def float_values(weights: Any, name: str) -> Any:
    out = np.empty(weights.shapes[name], dtype=np.float32)
    weights.read_into(name, out)
    return out


def stored_form(weights: Any, name: str) -> list[Any]:
    """Return the tensor in the form in which a decoder reads it first."""
    blocks = weights.read_blocks(name)
    if blocks is not None:
        return [blocks.data]
    codes = weights.read_codes(name)
    if codes is not None:
        return [codes.codes, codes.scales, codes.offsets]
    out = np.empty(weights.shapes[name], dtype=np.uint16 if weights.is_bfloat16(name) else np.float32)
    weights.read_into(name, out)
    return [weights.code_kind(name), out]


def same(found: list[Any], expected: list[Any]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
