"""Which implementation of each operation runs on which device; imported only when a model is built on that device.

A device that has no implementation of an operation gets the torch reference, so a new device works before it is fast.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

REFERENCE = "reference"

_IMPLEMENTATIONS: dict[str, dict[str, str]] = {
    "rms_norm": {REFERENCE: "norm.reference:rms_norm", "cpu": "norm.cpu:rms_norm"},
    "apply_rope": {REFERENCE: "rope.reference:apply_rope", "cpu": "rope.cpu:apply_rope"},
    "silu_and_mul": {REFERENCE: "activation.reference:silu_and_mul", "cpu": "activation.cpu:silu_and_mul"},
    "pack_linear": {REFERENCE: "linear.reference:pack_linear", "cpu": "linear.cpu:pack_linear"},
    "store_kv": {REFERENCE: "kv_store.reference:store_kv", "cpu": "kv_store.cpu:store_kv"},
    "plan_attention": {
        REFERENCE: "paged_attention.reference:plan_attention",
        "cpu": "paged_attention.plan:plan_attention",
    },
    "paged_attention": {
        REFERENCE: "paged_attention.reference:paged_attention",
        "cpu": "paged_attention.cpu:paged_attention",
    },
}


class Ops(NamedTuple):
    """The operations a model is made of. Shapes and formulas: each folder's `reference.py`."""

    rms_norm: Callable[..., Any]
    apply_rope: Callable[..., Any]
    silu_and_mul: Callable[..., Any]
    pack_linear: Callable[..., Any]
    store_kv: Callable[..., Any]
    plan_attention: Callable[..., Any]
    paged_attention: Callable[..., Any]


def resolve(operation: str, device_type: str) -> Callable[..., Any]:
    """The implementation of `operation` for a device type ("cpu", "cuda", "reference"...)."""
    by_device = _IMPLEMENTATIONS[operation]
    target = by_device.get(device_type, by_device[REFERENCE])
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(f"pagemill_kernels.{module}"), name)
    return function


@cache
def ops_for(device_type: str) -> Ops:
    return Ops(**{operation: resolve(operation, device_type) for operation in _IMPLEMENTATIONS})
