"""Mixtures of experts: their numbers, and decoders with experts in place of Llama's MLPs."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import (
    Activation,
    BlockSpec,
    DecoderSpec,
    DrafterSpec,
    GatingSpec,
    LayerSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    ReadsSpec,
    SharedExpertSpec,
)
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.declaration.parts import linear, sequential

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
GGUF_IN_LAYER = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_up_exps": "mlp.experts.*.gate_up_proj",
}
"""Added to those of `llama_like.gguf_names`."""
ONE_ROW = {"ffn_gate_inp_shexp.weight": (1, -1)}
"""Shape of a matrix that files store as a vector."""


class Mixture(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a layer's experts."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    renormalized: bool
    activation: Activation = "silu"


def mixture_from_config(config: ConfigValues, *, size_key: str, renormalized: bool) -> Mixture:
    """Read the numbers. Raises `UnreadableModelError` for impossible ones."""
    num_experts = config.size("num_experts", *_COUNTS)
    config.check_parts("experts", num_experts)
    top_k = config.size("num_experts_per_tok", "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
    if top_k > num_experts:
        raise config.wrong("num_experts_per_tok", top_k, f"at most the {num_experts} experts of a layer")
    return Mixture(
        hidden_size=config.size("hidden_size"),
        intermediate_size=config.size(size_key),
        num_experts=num_experts,
        top_k=top_k,
        renormalized=renormalized,
        activation=config.activation("hidden_act", default="silu"),
    )


def mixture_from_gguf(values: GGUFValues, *, size_key: str, renormalized: bool) -> Mixture:
    num_experts, top_k = values.size("num_experts", "expert_count"), values.size("top_k", "expert_used_count")
    values.check_parts("experts", num_experts)
    if top_k > num_experts:
        raise values.unsupported(f"{top_k} of {num_experts} experts for each token")
    return Mixture(
        hidden_size=values.size("hidden_size", "embedding_length"),
        intermediate_size=values.size("intermediate_size", size_key),
        num_experts=num_experts,
        top_k=top_k,
        renormalized=renormalized,
    )


def mixture(numbers: Mixture, name: str, parts: tuple[str, str, str]) -> MoESpec:
    """Declare a mixture. `name`: prefix of the block. `parts`: names of an expert's gate, up and down projection."""
    experts = (f"{name}.experts.{index}" for index in range(numbers.num_experts))
    size, inner = numbers.hidden_size, numbers.intermediate_size
    return MoESpec(
        router=linear(size, (f"{name}.gate", numbers.num_experts)),
        experts=tuple(gated_mlp(expert, size, inner, numbers.activation, parts) for expert in experts),
        top_k=numbers.top_k,
        renormalized=numbers.renormalized,
    )


def with_shared_experts(
    numbers: Mixture,
    name: str,
    num_shared: int,
    gating_of: Callable[[str], GatingSpec],
    parts: tuple[str, str, str] = GATE_UP_DOWN,
) -> MoESpec:
    """Declare a mixture as `mixture`, with shared experts and the routing that `gating_of` returns for its name.

    `parts`: as those of `mixture`; shared experts have the usual names.
    """
    shared, inner = None, numbers.intermediate_size * num_shared
    if num_shared:
        mlp = gated_mlp(f"{name}.shared_experts", numbers.hidden_size, inner, numbers.activation, GATE_UP_DOWN)
        shared = SharedExpertSpec(mlp=mlp)
    return msgspec.structs.replace(mixture(numbers, name, parts), shared=shared, gating=gating_of(name))


def num_drafting(config: ConfigValues, default: int) -> int:
    """Return the number of layers behind the last one, which draft further tokens."""
    drafting = config.integer("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", default=default)
    return max(0, min(drafting, 64))


def with_drafting(longer: DecoderSpec, num_layers: int, drafting: int) -> DecoderSpec:
    """Return a decoder of `num_layers` layers. `longer`: it, with the `drafting` layers behind them."""
    prefixes = tuple(f"model.layers.{num_layers + index}." for index in range(drafting))
    layers, heads = longer.layers[:num_layers], longer.layers[num_layers:]
    found = () if longer.norm is None else tuple(_drafter(each, longer.norm, longer.hidden_size) for each in heads)
    return msgspec.structs.replace(longer, layers=layers, ignored_layers=prefixes, mtp=found)


def _drafter(layer: LayerSpec, last: NormSpec, size: int) -> DrafterSpec:
    name = layer.name
    norms = {part: msgspec.structs.replace(last, name=f"{name}.{part}") for part in ("enorm", "hnorm")}
    reads = ReadsSpec(
        embedding_norm=norms["enorm"],
        hidden_norm=norms["hnorm"],
        projection=linear(2 * size, (f"{name}.eh_proj", size)),
        prefix=f"{name}.",
    )
    return DrafterSpec(reads, layer, msgspec.structs.replace(last, name=f"{name}.shared_head.norm"))


def stored_together(spec: MoESpec, *, transposed: bool = False) -> MoESpec:
    """Return the mixture with an expert's gate and up projection in one matrix, `gate_up_proj`."""
    experts = []
    for each in spec.experts:
        down, size, inner = each.down.parts[0].name, each.up.in_features, each.down.in_features
        fused = f"{down.rpartition('.')[0]}.gate_up_proj"
        experts.append(
            msgspec.structs.replace(
                each,
                up=linear(size, (fused, 2 * inner), transposed=transposed),
                down=linear(inner, (down, size), transposed=transposed),
            )
        )
    return msgspec.structs.replace(spec, experts=tuple(experts))


def gated_mlp(name: str, size: int, inner: int, activation: Activation, parts: tuple[str, str, str]) -> MLPSpec:
    gate, up, down = (f"{name}.{part}" for part in parts)
    return MLPSpec(
        up=linear(size, (gate, inner), (up, inner)),
        down=linear(inner, (down, size)),
        activation=activation,
        gated=True,
    )


def with_experts(plain: DecoderSpec, block_of: Callable[[int, LayerSpec], BlockSpec | None]) -> DecoderSpec:
    """Return `plain`, a decoder like Llama, with `block_of(index, layer)` in place of an MLP unless it is None."""
    layers = (_replaced(layer, block_of(index, layer)) for index, layer in enumerate(plain.layers))
    return msgspec.structs.replace(plain, layers=tuple(layers))


def _replaced(layer: LayerSpec, block: BlockSpec | None) -> LayerSpec:
    if block is None:
        return layer
    attention, _ = layer.blocks()
    first, second = layer.norms()
    return sequential(layer.name, (first, attention), (second, block))
