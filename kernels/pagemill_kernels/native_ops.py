"""Operations of the engine's native decoder, by backend: numpy arrays in and out, no torch.

`registry` has the operations of other executors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pagemill_kernels.arrays import Array, FloatType
from pagemill_kernels.linear import native as linear
from pagemill_kernels.linear.groups import CodeBlocks, GroupCodes
from pagemill_kernels.linear.native import NativeLinear
from pagemill_kernels.paged_attention import native as attention
from pagemill_kernels.paged_attention.batch import AttentionBatch
from pagemill_kernels.paged_attention.native import NativePlan
from pagemill_kernels.registry import Backend


class NativeOps(NamedTuple):
    """Functions that pack weights and plan attention."""

    weight_type: FloatType
    """Type of float matrices whose stored type is not kept."""
    keeps_bfloat16: bool
    """Whether matrices that are stored in bfloat16 stay in it."""
    pack_linear: Callable[[Array, Array | None], NativeLinear]
    pack_codes: Callable[[GroupCodes, Array | None], NativeLinear]
    pack_blocks: Callable[[CodeBlocks, Array | None], NativeLinear]
    plan_attention: Callable[[AttentionBatch, int | None], NativePlan]


_OPS: dict[Backend, NativeOps] = {
    "cpu_native": NativeOps(
        weight_type="float32",
        keeps_bfloat16=True,
        pack_linear=linear.pack_linear,
        pack_codes=linear.pack_codes,
        pack_blocks=linear.pack_blocks,
        plan_attention=attention.plan_attention,
    ),
    "cpu_bfloat16": NativeOps(
        weight_type="float32",
        keeps_bfloat16=False,
        pack_linear=linear.pack_pairs,
        pack_codes=linear.pack_codes_for_bfloat16,
        pack_blocks=linear.pack_blocks_for_bfloat16,
        plan_attention=attention.plan_bfloat16_attention,
    ),
}


def native_ops(
    backend: Backend, weight_type: FloatType, *, batch_invariant: bool = False, rounds_activations: bool = False
) -> NativeOps:
    """Return the operations of a backend. Arguments: as for `registry.ops_for`.

    Raises KeyError if the backend has no native layers, or cannot be batch-invariant.
    """
    ops = _OPS[backend]._replace(weight_type=weight_type)
    if rounds_activations:
        ops = ops._replace(pack_codes=linear.pack_codes_for_dots, pack_blocks=linear.pack_blocks_for_dots)
    if batch_invariant:
        ops = ops._replace(plan_attention={"cpu_native": attention.plan_invariant_attention}[backend])
    return ops
