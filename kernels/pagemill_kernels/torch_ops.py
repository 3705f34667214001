"""The native operations for tensors, which the registry offers to models that torch runs.

Each calls the launcher of the same name (`native.py` in the operation's package) over the same memory. Formulas and
shapes are in its `reference.py`, which also computes types that the launchers do not support. The engine's native
decoder calls the launchers directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagemill_kernels.activation import native as activation
from pagemill_kernels.activation import reference as activation_reference
from pagemill_kernels.adapters.cpu import NativeTensorRows
from pagemill_kernels.adapters.rows import ExpertRows
from pagemill_kernels.experts import native as experts
from pagemill_kernels.experts import reference as reference_experts
from pagemill_kernels.experts.parts import ExpertParts, FusedExperts, Gate, Gating
from pagemill_kernels.experts.reference import PlainExperts
from pagemill_kernels.linear import native as linear
from pagemill_kernels.linear.groups import CodeBlocks, GroupCodes
from pagemill_kernels.norm import native as norm
from pagemill_kernels.norm import reference as norm_reference
from pagemill_kernels.paged_attention import native as attention
from pagemill_kernels.paged_attention.batch import AttentionBatch
from pagemill_kernels.recurrent import native as recurrent
from pagemill_kernels.recurrent.batch import StateBatch
from pagemill_kernels.recurrent.reference import Convolution, DeltaHeads
from pagemill_kernels.recurrent.state_space import StateSpaceHeads
from pagemill_kernels.rope import native as rope
from pagemill_kernels.rope import reference as reference_rope
from pagemill_kernels.torch_arrays import from_torch, to_torch

Plan = attention.NativePlan


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return to_torch(norm.rms_norm(from_torch(x), from_torch(weight), eps))


def rms_norm_to_bfloat16(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return to_torch(norm.rms_norm_to_bfloat16(from_torch(x), from_torch(weight), eps))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    if any(each is not None and each.dtype != torch.float32 for each in (x, weight, bias)):
        return norm_reference.layer_norm(x, weight, bias, eps)
    return to_torch(norm.layer_norm(from_torch(x), from_torch(weight), _optional(bias), eps))


def rope_and_store(heads: Tensor, num_heads: int, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor) -> None:
    turning = from_torch(cos), from_torch(sin)
    rope.rope_and_store(from_torch(heads), num_heads, *turning, from_torch(cache), from_torch(slots))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    if x.dtype != torch.float32 or x.stride()[1:] != (x.shape[2], 1):
        reference_rope.apply_rope(x, cos, sin)
        return
    rope.rotate(from_torch(x), from_torch(cos.contiguous()), from_torch(sin.contiguous()))


def store(heads: Tensor, num_heads: int, cache: Tensor, slots: Tensor) -> None:
    rope.store(from_torch(heads), num_heads, from_torch(cache), from_torch(slots))


def plan_states(batch: StateBatch) -> recurrent.NativeStates:
    return recurrent.NativeStates(batch)


def causal_convolution(
    x: Tensor, kernel: Convolution, windows: Tensor, inputs: Tensor, plan: recurrent.NativeStates
) -> Tensor:
    weights = from_torch(kernel.taps), _optional(kernel.bias), kernel.activated
    of_layer = from_torch(windows), from_torch(inputs)
    return to_torch(recurrent.causal_convolution(from_torch(x.float()), *weights, *of_layer, plan))


def delta_rule(
    x: Tensor,
    rates: Tensor,
    gates: Tensor,
    heads: DeltaHeads,
    states: Tensor,
    log: Tensor,
    plan: recurrent.NativeStates,
) -> Tensor:
    of_step = from_torch(x), from_torch(rates.float()), from_torch(gates.float())
    of_heads = from_torch(heads.decays), from_torch(heads.biases), from_torch(heads.norm.float())
    kept = from_torch(states), from_torch(log)
    return to_torch(recurrent.delta_rule(*of_step, *of_heads, heads.eps, heads.rate_scale, *kept, plan))


def channel_delta_rule(
    x: Tensor,
    rates: Tensor,
    steps: Tensor,
    gates: Tensor,
    heads: DeltaHeads,
    states: Tensor,
    log: Tensor,
    plan: recurrent.NativeStates,
) -> Tensor:
    of_step = from_torch(x.float()), from_torch(rates.float()), from_torch(steps.float()), from_torch(gates.float())
    of_heads = from_torch(heads.decays), from_torch(heads.biases), from_torch(heads.norm.float())
    kept = from_torch(states), from_torch(log)
    return to_torch(recurrent.channel_delta_rule(*of_step, *of_heads, heads.eps, heads.rate_scale, *kept, plan))


def state_space(
    x: Tensor,
    steps: Tensor,
    gates: Tensor | None,
    heads: StateSpaceHeads,
    states: Tensor,
    log: Tensor,
    plan: recurrent.NativeStates,
) -> Tensor:
    return to_torch(
        recurrent.state_space(
            from_torch(x.float()),
            from_torch(steps.float()),
            None if gates is None else from_torch(gates.float()),
            from_torch(heads.decays),
            from_torch(heads.biases),
            from_torch(heads.skips),
            _optional(heads.norm),
            heads.norm_size,
            heads.eps,
            heads.gates_first,
            heads.step_limits,
            from_torch(states),
            from_torch(log),
            plan,
        )
    )


def plan_attention(batch: AttentionBatch, sliding_window: int | None, dtype: torch.dtype, device: torch.device) -> Plan:
    return attention.plan_attention(batch, sliding_window)


def plan_invariant_attention(
    batch: AttentionBatch, sliding_window: int | None, dtype: torch.dtype, device: torch.device
) -> Plan:
    return attention.plan_invariant_attention(batch, sliding_window)


def plan_bfloat16_attention(
    batch: AttentionBatch, sliding_window: int | None, dtype: torch.dtype, device: torch.device
) -> Plan:
    return attention.plan_bfloat16_attention(batch, sliding_window)


def paged_attention(
    query: Tensor,
    cache: Tensor,
    plan: Plan,
    scale: float,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    extras = (soft_cap, _optional(alibi_slopes), _optional(sinks))
    return to_torch(attention.paged_attention(from_torch(query), from_torch(cache), plan, scale, *extras))


def silu_and_mul(gate_up: Tensor) -> Tensor:
    return to_torch(activation.silu_and_mul(from_torch(gate_up)))


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    return activate_and_mul(gate_up, "gelu_tanh")


def activate_and_mul(gate_up: Tensor, name: str, limit: float | None = None) -> Tensor:
    if gate_up.dtype != torch.float32:
        return activation_reference.activate_and_mul(gate_up, name, limit)
    return to_torch(activation.activate_and_mul(from_torch(gate_up), name, limit))


def gate_heads(x: Tensor, gates: Tensor) -> Tensor:
    if x.dtype != torch.float32 or gates.dtype != torch.float32:
        return activation_reference.gate_heads(x, gates)
    activation.gate_heads(from_torch(x), from_torch(gates))
    return x


def activate(x: Tensor, name: str) -> Tensor:
    if x.dtype != torch.float32:
        return activation_reference.activate(x, name)
    return to_torch(activation.activate(from_torch(x), name))


class TorchLinear:
    """A `linear.native.NativeLinear` as a `PackedLinear`."""

    can_gather = True

    def __init__(self, packed: linear.NativeLinear) -> None:
        self.native = packed
        self.out_features, self.in_features = packed.out_features, packed.in_features

    @property
    def num_bytes(self) -> int:
        return self.native.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty(*x.shape[:-1], self.out_features)
        self._run(x, out, accumulate=0)
        return out

    def add_to(self, out: Tensor, x: Tensor) -> None:
        self._run(x, out, accumulate=1)

    def gather(self, ids: Tensor) -> Tensor:
        return to_torch(self.native.gather(from_torch(ids)))

    def _run(self, x: Tensor, out: Tensor, accumulate: int) -> None:
        flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        flat = flat if flat.stride(1) == 1 else flat.contiguous()
        self.native.check(flat.shape, flat.dtype, flat.dtype == torch.float32)
        self.native.multiply(flat.data_ptr(), len(flat), flat.stride(0), out.data_ptr(), accumulate)


class TorchExperts:
    """An `experts.native.NativeExperts` as `FusedExperts`."""

    def __init__(self, packed: experts.NativeExperts, plain: PlainExperts) -> None:
        """Wrap packed experts. `plain`: the same ones, computed one by one for steps with adapters."""
        self.native, self._plain = packed, plain

    @property
    def num_bytes(self) -> int:
        return self.native.num_bytes

    def add_to(self, out: Tensor, x: Tensor, chosen: Tensor, weights: Tensor, rows: ExpertRows | None = None) -> None:
        adapters = None if rows is None else rows.adapters
        if rows is not None and not isinstance(adapters, NativeTensorRows):
            self._plain.add_to(out, x, chosen, weights, rows)
            return
        self.native.add_to(
            from_torch(out),
            from_torch(x),
            from_torch(chosen),
            from_torch(weights),
            adapters.native if isinstance(adapters, NativeTensorRows) else None,
            0 if rows is None else rows.first,
        )


def route(logits: Tensor, top_k: int, renormalized: bool) -> tuple[Tensor, Tensor]:
    chosen, weights = experts.route(from_torch(logits.float()), top_k, renormalized)
    return to_torch(chosen), to_torch(weights)


def route_by_groups(
    logits: Tensor, top_k: int, renormalized: bool, gating: Gating, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    arguments = from_torch(logits.float()), top_k, renormalized, gating, _optional(bias)
    chosen, weights = experts.route_by_groups(*arguments)
    return to_torch(chosen), to_torch(weights)


def add_gated(out: Tensor, x: Tensor, gates: Tensor) -> None:
    if out.dtype != torch.float32:
        reference_experts.add_gated(out, x, gates)
        return
    experts.add_gated(from_torch(out), from_torch(x.float().contiguous()), from_torch(gates.float()))


def pack_experts(parts: Sequence[ExpertParts], gate: Gate) -> FusedExperts:
    """Pack experts; uses the reference if the weights are not natively packed."""
    ups = [each.up.native for each in parts if isinstance(each.up, TorchLinear)]
    downs = [each.down.native for each in parts if isinstance(each.down, TorchLinear)]
    if not len(ups) == len(downs) == len(parts):
        return PlainExperts(parts, gate)
    return TorchExperts(experts.NativeExperts(ups, downs, gate), PlainExperts(parts, gate))


def pack_linear(weight: Tensor, bias: Tensor | None) -> TorchLinear:
    return _packed_floats(linear.pack_linear, weight, bias)


def pack_pairs(weight: Tensor, bias: Tensor | None) -> TorchLinear:
    return _packed_floats(linear.pack_pairs, weight, bias)


def pack_codes(weight: GroupCodes, bias: Tensor | None) -> TorchLinear:
    return _packed(linear.pack_codes, weight, bias)


def pack_codes_for_dots(weight: GroupCodes, bias: Tensor | None) -> TorchLinear:
    return _packed(linear.pack_codes_for_dots, weight, bias)


def pack_codes_for_bfloat16(weight: GroupCodes, bias: Tensor | None) -> TorchLinear:
    return _packed(linear.pack_codes_for_bfloat16, weight, bias)


def pack_blocks(weight: CodeBlocks, bias: Tensor | None) -> TorchLinear:
    return _packed(linear.pack_blocks, weight, bias)


def pack_blocks_for_dots(weight: CodeBlocks, bias: Tensor | None) -> TorchLinear:
    return _packed(linear.pack_blocks_for_dots, weight, bias)


def pack_blocks_for_bfloat16(weight: CodeBlocks, bias: Tensor | None) -> TorchLinear:
    return _packed(linear.pack_blocks_for_bfloat16, weight, bias)


def _packed_floats(pack: Callable[..., linear.NativeLinear], weight: Tensor, bias: Tensor | None) -> TorchLinear:
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"linear: weights of {weight.dtype} are not packed; float32 or bfloat16 are")
    return _packed(pack, from_torch(weight), bias)


def _packed(pack: Callable[..., linear.NativeLinear], weight: Any, bias: Tensor | None) -> TorchLinear:
    return TorchLinear(pack(weight, _optional(bias)))


def _optional(tensor: Tensor | None) -> np.ndarray[Any, Any] | None:
    return None if tensor is None else from_torch(tensor)
