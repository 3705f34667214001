"""Building blocks shared by all Llama-like models: fused projections, attention over the paged cache, gated MLP.

Submodules are named as in Hugging Face checkpoints. A fused layer declares the parts it is made of; every layer says
which tensors it wants (`shapes`) and takes them (`load`), one layer after another, so that a whole model is never in
memory twice.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from pagemill_engine.models.context import ForwardContext
from pagemill_engine.models.tensors import Shapes, TensorSource, blocks_stacked, codes_stacked, read_stacked
from pagemill_kernels.linear.packed import PackedLinear
from pagemill_kernels.registry import Ops
from pagemill_protocol.model_spec import ModelSpec


class Linear(nn.Module):
    """One matrix made of one or several checkpoint matrices stacked by rows, in the device's layout.

    `parts`: {checkpoint name beside this module, or "" for the module's own name: rows}.
    """

    packed: PackedLinear

    def __init__(self, ops: Ops, in_features: int, parts: dict[str, int], bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = parts
        self.in_features = in_features
        self.has_bias = bias
        self.dtype = dtype
        self._ops = ops

    def shapes(self, name: str) -> Shapes:
        wanted: Shapes = {}
        for part, rows in self._named_parts(name).items():
            wanted[f"{part}.weight"] = (rows, self.in_features)
            if self.has_bias:
                wanted[f"{part}.bias"] = (rows,)
        return wanted

    def load(self, name: str, source: TensorSource) -> None:
        parts = self._named_parts(name)
        biases: Shapes = {f"{part}.bias": (rows,) for part, rows in parts.items()}
        bias = read_stacked(source, biases, self.dtype) if self.has_bias else None
        weights: Shapes = {f"{part}.weight": (rows, self.in_features) for part, rows in parts.items()}
        in_codes = _pack_codes(self._ops, source, list(weights), bias)
        self.packed = in_codes or self._ops.pack_linear(_read_matrix(self._ops, source, weights, self.dtype), bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.packed(x)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """out += self(x), in place."""
        self.packed.add_to(out, x)

    def _named_parts(self, name: str) -> dict[str, int]:
        parent = name.rpartition(".")[0]
        return {f"{parent}.{part}" if part else name: rows for part, rows in self.parts.items()}


class RMSNorm(nn.Module):
    def __init__(self, ops: Ops, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.empty(size, dtype=dtype)
        self.eps = eps
        self._rms_norm = ops.rms_norm
        self._device = ops.device

    def shapes(self, name: str) -> Shapes:
        return {f"{name}.weight": tuple(self.weight.shape)}

    def load(self, name: str, source: TensorSource) -> None:
        source.read_into(f"{name}.weight", self.weight)
        self.weight = self.weight.to(self._device)

    def forward(self, x: Tensor) -> Tensor:
        return self._rms_norm(x, self.weight, self.eps)


class Embedding(nn.Module):
    """A table of rows; stored as a linear layer's weight, so that a tied head can lend it."""

    rows: PackedLinear

    def __init__(self, ops: Ops, num_rows: int, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = (num_rows, size)
        self.dtype = dtype
        self._ops = ops

    def shapes(self, name: str) -> Shapes:
        return {f"{name}.weight": self.shape}

    def load(self, name: str, source: TensorSource) -> None:
        in_codes = _pack_codes(self._ops, source, list(self.shapes(name)), None)
        self.rows = in_codes or self._ops.pack_rows(_read_matrix(self._ops, source, self.shapes(name), self.dtype))

    def tie(self, head: Linear) -> bool:
        """Read the loaded head's rows from now on; False where its layout cannot give them back."""
        if head.packed.can_gather:
            self.rows = head.packed
        return head.packed.can_gather

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.rows.gather(token_ids).to(self.dtype)


class Attention(nn.Module):
    """Grouped-query attention over the paged cache; `qk_norm` normalises queries and keys per head before rotation."""

    def __init__(self, spec: ModelSpec, ops: Ops, dtype: torch.dtype, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.scale = spec.head_dim**-0.5
        self.sliding_window = spec.layer_sliding_window(layer)
        rows = {
            "q_proj": spec.num_heads * spec.head_dim,
            "k_proj": spec.num_kv_heads * spec.head_dim,
            "v_proj": spec.num_kv_heads * spec.head_dim,
        }
        self.qkv_proj = Linear(ops, spec.hidden_size, rows, spec.attention_bias, dtype)
        self.o_proj = Linear(
            ops, spec.num_heads * spec.head_dim, {"": spec.hidden_size}, spec.attention_output_bias, dtype
        )
        if spec.qk_norm:
            self.q_norm = RMSNorm(ops, spec.head_dim, spec.rms_norm_eps, dtype)
            self.k_norm = RMSNorm(ops, spec.head_dim, spec.rms_norm_eps, dtype)
        self.has_qk_norm = spec.qk_norm
        self.ops = ops

    def forward(self, x: Tensor, context: ForwardContext, residual: Tensor) -> None:
        """Adds its output to `residual` in place."""
        # A product may come in the type of its weights; from here on the positions' type counts.
        heads = self.qkv_proj(x).to(context.cos.dtype).view(x.shape[0], -1, self.head_dim)
        query = heads[:, : self.num_heads]
        if self.has_qk_norm:
            query.copy_(self.q_norm(query))
            key = heads[:, self.num_heads : self.num_heads + self.num_kv_heads]
            key.copy_(self.k_norm(key))
        cache = context.kv_caches[self.layer]
        # The whole step's keys and values are stored first, so that a prefix hit within the step reads them.
        self.ops.rope_and_store(heads, self.num_heads, context.cos, context.sin, cache, context.kv_slots)
        plan = context.attention_plans[self.sliding_window]
        attended = self.ops.paged_attention(query, cache, plan, self.scale)
        self.o_proj.add_to(residual, attended.view(x.shape[0], -1))


class GatedMLP(nn.Module):
    def __init__(self, spec: ModelSpec, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__()
        rows = {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size}
        self.gate_up_proj = Linear(ops, spec.hidden_size, rows, spec.mlp_bias, dtype)
        self.down_proj = Linear(ops, spec.intermediate_size, {"": spec.hidden_size}, spec.mlp_bias, dtype)
        self.ops = ops

    def forward(self, x: Tensor, residual: Tensor) -> None:
        """Adds its output to `residual` in place."""
        self.down_proj.add_to(residual, self.ops.silu_and_mul(self.gate_up_proj(x)))


class CausalLM(nn.Module):
    """A decoder stack under a head: the face that the runner sees. Subclasses set `self.model`."""

    model: nn.Module

    def __init__(self, spec: ModelSpec, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.dtype = dtype
        self.lm_head = Linear(ops, spec.hidden_size, {"": spec.vocab_size}, bias=False, dtype=dtype)

    @property
    def embedding(self) -> Embedding:
        return cast(Embedding, self.model.embed_tokens)

    def forward(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        """token_ids: int64 [tokens]. Returns normalised hidden states [tokens, hidden]."""
        return self.model(token_ids, context)  # type: ignore[no-any-return]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden]. Returns float32 [rows, vocab]."""
        logits: Tensor = self.lm_head(hidden)
        return logits.float()


def _read_matrix(ops: Ops, source: TensorSource, shapes: Shapes, dtype: torch.dtype) -> Tensor:
    """The named tensors stacked, in the type that this device holds such weights in."""
    if ops.keeps_bfloat16 and all(source.is_bfloat16(name) for name in shapes):
        return read_stacked(source, shapes, torch.bfloat16)
    return read_stacked(source, shapes, ops.weight_dtype or dtype)


def _pack_codes(ops: Ops, source: TensorSource, names: list[str], bias: Tensor | None) -> PackedLinear | None:
    """The named tensors packed in the codes they are stored in; `None` where source or device has no codes."""
    if ops.pack_blocks is not None and (blocks := blocks_stacked(source, names)) is not None:
        return ops.pack_blocks(blocks, bias)
    if ops.pack_codes is None:
        return None
    codes = codes_stacked(source, names)
    return None if codes is None else ops.pack_codes(codes, bias)
