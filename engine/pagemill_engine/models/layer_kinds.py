"""Finds the layers of a decoder that launch the same kernels.

A run of one layer of each kind compiles everything that a run of all layers needs. Two layers are of one kind if their
declarations differ only in names, and their contents only in values. `runner.device_forward` runs them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import torch
from torch import Tensor

from pagemill_engine.models.decoder import DecoderLayer


def one_of_each(layers: Iterable[DecoderLayer]) -> list[DecoderLayer]:
    """Return the first layer of each kind, in order."""
    return list({_kind(layer): layer for layer in reversed(list(layers))}.values())[::-1]


def _kind(layer: DecoderLayer) -> tuple[Any, ...]:
    declared = msgspec.json.encode(layer.spec).replace(f'"{layer.spec.name}'.encode(), b'"')
    return declared, *(_held(each.held()) for each in layer.layers())


def _held(value: Any) -> Any:
    """Return everything that launches can depend on. Triton compiles pointers divisible by 16 separately."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.data_ptr() % 16 == 0
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return type(value), *map(_held, value)
    if fields := getattr(value, "__dict__", None):
        return type(value), *((name, _held(each)) for name, each in fields.items())
    # Other objects are equal only if they are the same object.
    return type(value), id(value)
