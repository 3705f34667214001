"""The implementations of each operation by backend. Modules are imported when a model is built on a backend.

A backend without an implementation of an operation uses the torch reference, so a new backend works before it is fast.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pagemill_kernels.arrays import FloatType

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pagemill_kernels.experts.parts import ExpertParts, FusedExperts, Gate
    from pagemill_kernels.linear.packed import PackedLinear
    from pagemill_kernels.recurrent.batch import StateBatch
    from pagemill_kernels.sampling.batch import SampledTokens, SamplingBatch

Backend = Literal["reference", "cpu", "cpu_native", "cpu_bfloat16", "cpu_onednn", "triton"]
"""Backends.

`cpu`: torch and oneDNN, any float type. `cpu_native`: Pagemill's C++ (`pagemill_kernels.cpu`), float32 arithmetic over
weights of any type. `cpu_bfloat16`: the same, but linear layers multiply in bfloat16 (quantized weights with few rows
in 16-bit integers), and so does attention of many rows. `cpu_onednn`: as `cpu_native`, but oneDNN computes linear
layers in bfloat16. `triton`: an NVIDIA device, any float type.
"""

MatmulType = Literal["float", "w8a8", "fp8"]
"""The operands of linear layers: floats as they are, or 8-bit values on both sides, int8 or e4m3."""

Feature = Literal["alibi", "latent", "sinks", "soft_cap"]
"""Features of attention besides the softmax of scaled scores under a window.

Each is an argument of `paged_attention` of the same meaning; `latent`: batches that share vectors, and heads of any
size.
"""

REFERENCE: Backend = "reference"
NATIVE_BACKENDS: tuple[Backend, ...] = ("cpu_native", "cpu_bfloat16", "cpu_onednn")
"""Backends with float32 activations; weights and the KV cache have types of their own."""

_IMPLEMENTATIONS: dict[str, dict[Backend, str]] = {
    "rms_norm": {
        "reference": "norm.reference:rms_norm",
        "cpu": "norm.cpu:rms_norm",
        "cpu_native": "torch_ops:rms_norm",
        "cpu_onednn": "torch_ops:rms_norm_to_bfloat16",
        "triton": "norm.triton_launch:rms_norm",
    },
    "layer_norm": {
        "reference": "norm.reference:layer_norm",
        "cpu_native": "torch_ops:layer_norm",
        "triton": "norm.triton_launch:layer_norm",
    },
    "store": {
        "reference": "kv_store.reference:store",
        "cpu_native": "torch_ops:store",
        "triton": "rope.triton_launch:store",
    },
    "store_latents": {"reference": "kv_store.reference:store_latents"},
    "rotate": {"reference": "rope.reference:apply_rope", "cpu_native": "torch_ops:rotate"},
    "rope_and_store": {
        "reference": "rope.reference:rope_and_store",
        "cpu": "rope.cpu:rope_and_store",
        "cpu_native": "torch_ops:rope_and_store",
        "triton": "rope.triton_launch:rope_and_store",
    },
    "silu_and_mul": {
        "reference": "activation.reference:silu_and_mul",
        "cpu": "activation.cpu:silu_and_mul",
        "cpu_native": "torch_ops:silu_and_mul",
        "triton": "activation.triton_launch:silu_and_mul",
    },
    "gelu_and_mul": {
        "reference": "activation.reference:gelu_and_mul",
        "cpu_native": "torch_ops:gelu_and_mul",
        "triton": "activation.triton_launch:gelu_and_mul",
    },
    "activate_and_mul": {
        "reference": "activation.reference:activate_and_mul",
        "cpu_native": "torch_ops:activate_and_mul",
    },
    "activate": {"reference": "activation.reference:activate", "cpu_native": "torch_ops:activate"},
    "gate_heads": {"reference": "activation.reference:gate_heads", "cpu_native": "torch_ops:gate_heads"},
    "route": {"reference": "experts.reference:route", "cpu_native": "torch_ops:route"},
    "route_by_groups": {
        "reference": "experts.reference:route_by_groups",
        "cpu_native": "torch_ops:route_by_groups",
    },
    "add_gated": {"reference": "experts.reference:add_gated", "cpu_native": "torch_ops:add_gated"},
    "pack_experts": {
        "reference": "experts.reference:pack_experts",
        "cpu_native": "torch_ops:pack_experts",
        "triton": "experts.triton_launch:pack_experts",
    },
    "pack_linear": {
        "reference": "linear.reference:pack_linear",
        "cpu": "linear.cpu:pack_linear",
        "cpu_native": "torch_ops:pack_linear",
        "cpu_bfloat16": "torch_ops:pack_pairs",
        "cpu_onednn": "linear.onednn:pack_linear",
        "triton": "linear.triton_launch:pack_linear",
    },
    "pack_rows": {
        "reference": "linear.reference:pack_rows",
        "triton": "linear.triton_launch:pack_rows",
    },
    "gather_rows": {
        "reference": "gather.reference:gather_rows",
        "triton": "gather.triton_launch:gather_rows",
    },
    "plan_attention": {
        "reference": "paged_attention.reference:plan_attention",
        "cpu": "paged_attention.plan:plan_attention",
        "cpu_native": "torch_ops:plan_attention",
        "cpu_bfloat16": "torch_ops:plan_bfloat16_attention",
        "triton": "paged_attention.triton_launch:plan_attention",
    },
    "paged_attention": {
        "reference": "paged_attention.reference:paged_attention",
        "cpu": "paged_attention.cpu:paged_attention",
        "cpu_native": "torch_ops:paged_attention",
        "triton": "paged_attention.triton_launch:paged_attention",
    },
    "plan_states": {
        "reference": "recurrent.plan:plan_states",
        "cpu_native": "torch_ops:plan_states",
        "triton": "recurrent.triton_launch:plan_states",
    },
    "causal_convolution": {
        "reference": "recurrent.reference:causal_convolution",
        "cpu_native": "torch_ops:causal_convolution",
        "triton": "recurrent.triton_launch:causal_convolution",
    },
    "delta_rule": {"reference": "recurrent.reference:delta_rule", "cpu_native": "torch_ops:delta_rule"},
    "channel_delta_rule": {
        "reference": "recurrent.reference:channel_delta_rule",
        "cpu_native": "torch_ops:channel_delta_rule",
    },
    "state_space": {"reference": "recurrent.state_space:state_space", "cpu_native": "torch_ops:state_space"},
    "sample_tokens": {
        "reference": "sampling.reference:sample_tokens",
        "triton": "sampling.triton_launch:sample_tokens",
    },
}
_ATTENTION_FEATURES: dict[Backend, frozenset[Feature]] = {
    "reference": frozenset({"alibi", "latent", "sinks", "soft_cap"}),
    "cpu": frozenset({"alibi", "latent", "sinks", "soft_cap"}),
    "cpu_native": frozenset({"alibi", "sinks", "soft_cap"}),
    "triton": frozenset({"alibi", "sinks", "soft_cap"}),
}
"""Features of each backend's own `paged_attention`."""
_TORCH_ATTENTION: Backend = "cpu"
"""Replaces a CPU backend's own attention if that lacks a feature."""
_INHERITS: dict[Backend, Backend] = {"cpu_onednn": "cpu_native", "cpu_bfloat16": "cpu_native"}
"""The backend whose operations a backend uses if it lacks its own, before the reference."""
_PACK_CODES: dict[Backend, str] = {
    "cpu_native": "torch_ops:pack_codes",
    "cpu_bfloat16": "torch_ops:pack_codes_for_bfloat16",
    "triton": "linear.triton_launch:pack_codes",
}
_PACK_CODES_FOR_DOTS: dict[Backend, str] = {"cpu_native": "torch_ops:pack_codes_for_dots"}
_PACK_BLOCKS: dict[Backend, str] = {
    "cpu_native": "torch_ops:pack_blocks",
    "cpu_bfloat16": "torch_ops:pack_blocks_for_bfloat16",
}
_NORM_ROPE_AND_STORE: dict[Backend, str] = {"triton": "rope.triton_launch:norm_rope_and_store"}
_CONVOLVED_RULE: dict[Backend, str] = {"triton": "recurrent.triton_launch:convolved_rule"}
_PACK_BLOCKS_FOR_DOTS: dict[Backend, str] = {"cpu_native": "torch_ops:pack_blocks_for_dots"}
_PACK_SCALED: dict[Backend, dict[str, str]] = {
    "reference": {"w8a8": "scaled_linear.reference:pack_w8a8", "fp8": "scaled_linear.reference:pack_fp8"},
    "triton": {"w8a8": "scaled_linear.triton_launch:pack_w8a8", "fp8": "scaled_linear.triton_launch:pack_fp8"},
}
"""Linear layers that quantize activations too, by the name of their arithmetic."""
_KEEP_SMALL_FLOATS: tuple[Backend, ...] = ("cpu_native", "cpu_bfloat16")
"""Backends that multiply 8-bit floats, and values of a table of 16, as they are stored."""
_KEEP_BFLOAT16: tuple[Backend, ...] = ("cpu_native",)
"""Backends that multiply float32 by bfloat16 weights."""
_NATIVE_LAYERS: tuple[Backend, ...] = ("cpu_native", "cpu_bfloat16")
"""Backends that compute a decoder's layers in one call without torch, with the operations of `native_ops`."""
_ON_DEVICE: dict[Backend, dict[str, str]] = {
    "triton": {
        "write_rows": "request_rows.triton_launch:write_rows",
        "build_inputs": "request_rows.triton_launch:build_inputs",
        "advance_rows": "request_rows.triton_launch:advance_rows",
        "plan_attention": "paged_attention.triton_launch:plan_on_device",
        "plan_states": "recurrent.triton_launch:plan_on_device",
        "draw_tokens": "sampling.triton_launch:draw_tokens",
        "report_logprobs": "sampling.triton_launch:report",
    },
}
_OPAQUE: tuple[Backend, ...] = ("cpu", "cpu_onednn")
"""Backends that cannot read a row of a packed weight."""
_BATCH_INVARIANT: dict[Backend, dict[str, str]] = {
    "cpu_native": {"plan_attention": "torch_ops:plan_invariant_attention"},
}
"""Backends whose rows can have the same bits in every batch, and the operations that this requires."""


class WeightForms(NamedTuple):
    """The forms in which a backend's kernels store weights."""

    codes: bool = False
    """Whether matrices that are stored quantized stay so: the same values in less memory."""
    small_floats: bool = False
    """Whether these include 8-bit floats and values of a table of 16."""
    bfloat16: bool = False
    """Whether matrices that are stored in bfloat16 stay so, whatever type the model computes in."""
    rows: bool = True
    """Whether rows of packed weights can be read: a tied embedding takes no memory of its own."""


class DeviceOps(NamedTuple):
    """Operations of steps whose request rows stay on the device. None of them waits for the device."""

    write_rows: Callable[..., None]
    build_inputs: Callable[..., None]
    advance_rows: Callable[..., None]
    plan_attention: Callable[..., Any]
    plan_states: Callable[..., Any]
    draw_tokens: Callable[..., Any]
    report_logprobs: Callable[..., Any]


class Ops(NamedTuple):
    """The operations of a model. Shapes and formulas are in each package's `reference.py`."""

    rms_norm: Callable[..., Tensor]
    layer_norm: Callable[..., Tensor]
    store: Callable[..., None]
    store_latents: Callable[[Tensor, Tensor, Tensor], None]
    rotate: Callable[[Tensor, Tensor, Tensor], None]
    rope_and_store: Callable[..., None]
    silu_and_mul: Callable[..., Tensor]
    gelu_and_mul: Callable[..., Tensor]
    activate_and_mul: Callable[..., Tensor]
    activate: Callable[[Tensor, str], Tensor]
    gate_heads: Callable[[Tensor, Tensor], Tensor]
    route: Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]
    route_by_groups: Callable[..., tuple[Tensor, Tensor]]
    add_gated: Callable[[Tensor, Tensor, Tensor], None]
    pack_experts: Callable[[Sequence[ExpertParts], Gate], FusedExperts]
    pack_linear: Callable[[Tensor, Tensor | None], PackedLinear]
    pack_rows: Callable[[Tensor], PackedLinear]
    gather_rows: Callable[[Tensor, Tensor], Tensor]
    plan_attention: Callable[..., Any]
    paged_attention: Callable[..., Tensor]
    plan_states: Callable[[StateBatch], Any]
    causal_convolution: Callable[..., Tensor]
    delta_rule: Callable[..., Tensor]
    channel_delta_rule: Callable[..., Tensor]
    state_space: Callable[..., Tensor]
    sample_tokens: Callable[[Tensor, SamplingBatch], SampledTokens]
    device: torch.device
    """Device of all tensors."""
    pack_codes: Callable[..., PackedLinear] | None
    """Packs `linear.groups.GroupCodes` without dequantizing; None: this backend needs floats."""
    pack_blocks: Callable[..., PackedLinear] | None = None
    """Packs `linear.groups.CodeBlocks`; None: this backend needs `GroupCodes` or floats."""
    norm_rope_and_store: Callable[..., None] | None = None
    """Normalises queries and keys in the pass of `rope_and_store`; None: this backend has no such pass."""
    convolved_rule: Callable[..., Tensor] | None = None
    """Computes a recurrent layer's rule with the convolution before it; None: this backend has no such pass."""
    weight_dtype: torch.dtype | None = None
    """Type of float matrices; None: the type that the model computes in."""
    weight_forms: WeightForms = WeightForms()
    on_device: DeviceOps | None = None
    """None: a step's inputs are built on the host, and its tokens are read before the next step."""


def weight_forms(backend: Backend) -> WeightForms:
    return WeightForms(
        codes=backend in _PACK_CODES,
        small_floats=backend in _KEEP_SMALL_FLOATS,
        bfloat16=backend in _KEEP_BFLOAT16,
        rows=backend not in _OPAQUE,
    )


def has_native_layers(backend: Backend) -> bool:
    """Whether the backend has `native_ops`, with which a decoder needs no torch."""
    return backend in _NATIVE_LAYERS


def lacking(backend: Backend, wanted: frozenset[Feature]) -> frozenset[Feature]:
    """Return the features of attention that the backend's own kernels lack. Needs nothing loaded."""
    own = backend if backend in _ATTENTION_FEATURES else _INHERITS[backend]
    return wanted - _ATTENTION_FEATURES[own]


def resolve(operation: str, backend: Backend) -> Callable[..., Any]:
    implementations = _IMPLEMENTATIONS[operation]
    inherited = implementations.get(_INHERITS.get(backend, REFERENCE), implementations[REFERENCE])
    return _load(implementations.get(backend, inherited))


@cache
def ops_for(
    backend: Backend,
    batch_invariant: bool = False,
    weight_dtype: torch.dtype | None = None,
    rounds_activations: bool = False,
    matmul_type: MatmulType = "float",
    torch_attention: bool = False,
) -> Ops:
    """Return the operations of a backend.

    `batch_invariant`: a row's result has the same bits whatever else is computed; raises KeyError if that is
    impossible. `rounds_activations`: to 16 bits when multiplied by 4-bit weights, where that is faster. `matmul_type`:
    the form of packed float weights; raises KeyError if the backend does not have it. `torch_attention`: replaces a CPU
    backend's own attention, for features in `lacking`; it reads caches of floats.
    """
    pack_codes = _optional(_PACK_CODES_FOR_DOTS if rounds_activations else _PACK_CODES, backend)
    pack_blocks = _optional(_PACK_BLOCKS_FOR_DOTS if rounds_activations else _PACK_BLOCKS, backend)
    operations = {operation: resolve(operation, backend) for operation in _IMPLEMENTATIONS}
    if torch_attention:
        operations |= {name: resolve(name, _TORCH_ATTENTION) for name in ("plan_attention", "paged_attention")}
    if matmul_type != "float":
        operations["pack_linear"] = _load(_PACK_SCALED[backend][matmul_type])
    ops = Ops(
        **operations,
        pack_codes=pack_codes,
        pack_blocks=pack_blocks,
        norm_rope_and_store=_optional(_NORM_ROPE_AND_STORE, backend),
        convolved_rule=_optional(_CONVOLVED_RULE, backend),
        weight_dtype=weight_dtype,
        weight_forms=weight_forms(backend),
        device=_device(backend),
        on_device=_on_device(backend),
    )
    if not batch_invariant:
        return ops
    invariant: dict[str, Any] = {name: _load(target) for name, target in _BATCH_INVARIANT[backend].items()}
    return ops._replace(**invariant)


def cpu_backend(
    dtype: FloatType,
    head_dim: int,
    block_size: int,
    heads_per_kv_head: int,
    batch_invariant: bool = False,
    torch_attention: bool = False,
    prompts_alone: bool = False,
) -> tuple[Backend, str]:
    """Return the fastest backend on this CPU that can run such a model, and a description of it in words.

    `dtype`: type of float weights. `batch_invariant`: prefer a backend that can be so. `torch_attention`: attention is
    not the backend's own, and its heads may have any size. `prompts_alone`: no token follows a prompt, so that matmuls
    have many rows; they use one type for any number of rows.
    """
    from pagemill_kernels.cpu import library, processor
    from pagemill_kernels.paged_attention import native

    if dtype not in ("float32", "bfloat16"):
        return "cpu", f"torch (the native kernels have no {dtype})"
    if library.load() is None:
        return "cpu", f"torch (no native kernels: {library.unavailable_reason()})"
    if not torch_attention and not native.supports(head_dim, block_size, heads_per_kv_head):
        return "cpu", f"torch (no native attention for heads of {head_dim} and blocks of {block_size})"
    if dtype == "float32" or batch_invariant:
        return "cpu_native", "native kernels"
    if prompts_alone and processor.multiplies_floats_faster() and not processor.has_amx():
        return "cpu_native", "native kernels, products in float32"
    unit = bfloat16_unit() if processor.has_amx() or not library.has_bfloat16() else None
    if unit != "AMX" and library.has_bfloat16():
        return "cpu_bfloat16", "native kernels, products with AVX512_BF16"
    if unit is not None:
        return "cpu_onednn", f"native kernels, oneDNN with {unit}"
    return "cpu_native", "native kernels"


def bfloat16_unit() -> str | None:
    """Return the unit with which oneDNN multiplies bfloat16; None without such a unit or without torch."""
    from pagemill_kernels.cpu import processor

    if not (processor.has_amx() or processor.multiplies_bfloat16()) or not has_torch():
        return None
    from pagemill_kernels.linear import onednn

    return onednn.unit()


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def gpu_problem(head_dim: int, block_size: int, heads_per_kv_head: int) -> str | None:
    """Return why such a model cannot run on the `triton` backend here, or None."""
    from pagemill_kernels.gpu import launch

    absent = launch.unavailable_reason()
    if absent is not None:
        return absent
    from pagemill_kernels.paged_attention import triton_launch

    return triton_launch.supports(head_dim, block_size, heads_per_kv_head)


def fp8_problem() -> str | None:
    """Return why the `triton` backend has no fp8 here, or None. Call this only if `gpu_problem` returns None."""
    from pagemill_kernels.gpu import launch

    return launch.fp8_problem()


def _on_device(backend: Backend) -> DeviceOps | None:
    targets = _ON_DEVICE.get(backend)
    return None if targets is None else DeviceOps(**{name: _load(target) for name, target in targets.items()})


def _device(backend: Backend) -> torch.device:
    import torch

    if backend != "triton":
        return torch.device("cpu")
    from pagemill_kernels.gpu import launch

    return launch.device()


def _optional(targets: dict[Backend, str], backend: Backend) -> Callable[..., Any] | None:
    return _load(targets[backend]) if backend in targets else None


def _load(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(f"pagemill_kernels.{module}"), name)
    return function
