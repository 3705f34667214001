"""Which implementation of each operation a backend uses; modules are imported when a model is built on that backend.

A backend that has no implementation of an operation gets the torch reference, so a new one works before it is fast.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pagemill_kernels.linear.packed import PackedLinear

Backend = Literal["reference", "cpu", "cpu_native"]
"""`cpu`: torch and oneDNN, any float type; `cpu_native`: our C++ (`pagemill_kernels.cpu`), float32 arithmetic."""

REFERENCE: Backend = "reference"

_IMPLEMENTATIONS: dict[str, dict[Backend, str]] = {
    "rms_norm": {
        "reference": "norm.reference:rms_norm",
        "cpu": "norm.cpu:rms_norm",
        "cpu_native": "norm.native:rms_norm",
    },
    "rope_and_store": {
        "reference": "rope.reference:rope_and_store",
        "cpu": "rope.cpu:rope_and_store",
        "cpu_native": "rope.native:rope_and_store",
    },
    "silu_and_mul": {
        "reference": "activation.reference:silu_and_mul",
        "cpu": "activation.cpu:silu_and_mul",
        "cpu_native": "activation.native:silu_and_mul",
    },
    "pack_linear": {
        "reference": "linear.reference:pack_linear",
        "cpu": "linear.cpu:pack_linear",
        "cpu_native": "linear.native:pack_linear",
    },
    "plan_slots": {
        "reference": "kv_store.reference:plan_slots",
        "cpu_native": "kv_store.native:plan_slots",
    },
    "plan_attention": {
        "reference": "paged_attention.reference:plan_attention",
        "cpu": "paged_attention.plan:plan_attention",
        "cpu_native": "paged_attention.native:plan_attention",
    },
    "paged_attention": {
        "reference": "paged_attention.reference:paged_attention",
        "cpu": "paged_attention.cpu:paged_attention",
        "cpu_native": "paged_attention.native:paged_attention",
    },
}
_PACK_CODES: dict[Backend, str] = {"cpu_native": "linear.native:pack_codes"}
_PACK_BLOCKS: dict[Backend, str] = {"cpu_native": "linear.native:pack_blocks"}
_BATCH_INVARIANT: dict[Backend, dict[str, str]] = {
    "cpu_native": {"plan_attention": "paged_attention.native:plan_invariant_attention"},
}
"""Backends whose rows can have the same bits in every batch, and what they need for it beside what they always do."""


class Ops(NamedTuple):
    """The operations a model is made of. Shapes and formulas: each folder's `reference.py`."""

    rms_norm: Callable[..., Tensor]
    rope_and_store: Callable[..., None]
    silu_and_mul: Callable[..., Tensor]
    pack_linear: Callable[[Tensor, Tensor | None], PackedLinear]
    plan_slots: Callable[..., Tensor]
    plan_attention: Callable[..., Any]
    paged_attention: Callable[..., Tensor]
    pack_codes: Callable[..., PackedLinear] | None
    """Packs `linear.groups.GroupCodes` without turning them into floats; `None`: this backend needs floats."""
    pack_blocks: Callable[..., PackedLinear] | None
    """Packs `linear.groups.CodeBlocks`; `None`: this backend needs them as `GroupCodes` or floats."""


def resolve(operation: str, backend: Backend) -> Callable[..., Any]:
    implementations = _IMPLEMENTATIONS[operation]
    return _load(implementations.get(backend, implementations[REFERENCE]))


@cache
def ops_for(backend: Backend, batch_invariant: bool = False) -> Ops:
    """`batch_invariant`: a row's result has the same bits whatever else is computed; KeyError where it cannot."""
    pack_codes = _load(_PACK_CODES[backend]) if backend in _PACK_CODES else None
    pack_blocks = _load(_PACK_BLOCKS[backend]) if backend in _PACK_BLOCKS else None
    operations = {operation: resolve(operation, backend) for operation in _IMPLEMENTATIONS}
    ops = Ops(**operations, pack_codes=pack_codes, pack_blocks=pack_blocks)
    if not batch_invariant:
        return ops
    return ops._replace(**{name: _load(target) for name, target in _BATCH_INVARIANT[backend].items()})


def cpu_backend(dtype: torch.dtype, head_dim: int, block_size: int, heads_per_kv_head: int) -> tuple[Backend, str]:
    """The fastest backend on this CPU that can run such a model, and in words what runs and why."""
    from pagemill_kernels.cpu import library
    from pagemill_kernels.paged_attention import native

    if dtype != torch.float32:
        return "cpu", f"torch (the native kernels compute in float32, not {dtype})"
    if library.load() is None:
        return "cpu", f"torch (no native kernels: {library.why_absent()})"
    if not native.supports(head_dim, block_size, heads_per_kv_head):
        return "cpu", f"torch (no native attention for heads of {head_dim} and blocks of {block_size})"
    return "cpu_native", "native kernels"


def _load(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(f"pagemill_kernels.{module}"), name)
    return function
