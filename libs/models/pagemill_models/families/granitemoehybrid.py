"""Granite 4 (IBM, 2025): Mamba 2's state spaces in most layers, attention in the others, experts beside a shared MLP,
and Granite's multipliers."""

from __future__ import annotations

from pagemill_models.declaration.changes import changed_head, replace, with_attention
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import BlockSpec, BranchSpec, DecoderSpec, LayerSpec, SharedExpertSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.declaration.parts import linear, sequential
from pagemill_models.families.llama_like import Numbers, decoder, gguf_names, mlp, numbers_from_config
from pagemill_models.families.mamba2 import (
    FULL,
    RECURRENT,
    gguf_keys,
    gguf_kinds,
    kinds_of_layers,
    state_space_from_config,
    with_state_spaces,
)
from pagemill_models.families.moe import mixture, mixture_from_config

INNER = "shared_intermediate_size"
PARTS = ("gate_proj", "up_proj", "down_proj")
STACKED = {
    ".block_sparse_moe.input_linear.weight": (
        ".block_sparse_moe.experts.*.gate_proj.weight",
        ".block_sparse_moe.experts.*.up_proj.weight",
    ),
    ".block_sparse_moe.output_linear.weight": (".block_sparse_moe.experts.*.down_proj.weight",),
}


def read_config(config: ConfigValues) -> DecoderSpec:
    return _hybrid(config, numbers_from_config(config, default_context=2048, inner_key=INNER))


def _hybrid(config: ConfigValues, numbers: Numbers, *, fused: bool = True) -> DecoderSpec:
    """Declare the decoder. `fused`: whether a shared MLP's gate and up projection are stored as one matrix."""
    biased = config.flag("attention_bias", False)
    numbers = replace(numbers, attention_bias=biased, attention_output_bias=biased)
    size, eps = numbers.hidden_size, numbers.rms_norm_eps
    kinds = kinds_of_layers(config, numbers.num_layers, "layer_types") or [RECURRENT] * numbers.num_layers
    experts = None
    if config.integer("num_local_experts", default=8):
        experts = mixture_from_config(config, size_key="intermediate_size", renormalized=True)
    residual = config.number("residual_multiplier", default=1.0)

    def forward(name: str) -> BlockSpec:
        shared, inner = mlp(numbers, f"{name}.shared_mlp"), numbers.intermediate_size
        if fused:
            up = linear(size, (f"{name}.shared_mlp.input_linear", 2 * inner))
            shared = replace(shared, up=up, down=linear(inner, (f"{name}.shared_mlp.output_linear", size)))
        if experts is None:
            return shared
        sparse = f"{name}.block_sparse_moe"
        return replace(
            mixture(experts, sparse, PARTS),
            router=linear(size, (f"{sparse}.router.layer", experts.num_experts)),
            shared=SharedExpertSpec(mlp=shared),
        )

    def layer(plain: LayerSpec, kind: str) -> LayerSpec:
        name, (first, second) = plain.name, plain.norms()
        mixer = next(plain.blocks())
        if kind != FULL:
            mixer = state_space_from_config(config, f"{name}.mamba", eps=eps)
        return sequential(name, (first, mixer), (second, forward(name))).with_branches(scaled)

    def scaled(branch: BranchSpec) -> BranchSpec:
        return replace(branch, scale=residual)

    plain = decoder(numbers)
    plain = replace(
        plain,
        embedding=replace(plain.embedding, scale=config.number("embedding_multiplier", default=1.0)),
        layers=tuple(layer(each, kind) for each, kind in zip(plain.layers, kinds, strict=True)),
        stacked=STACKED if experts is not None else {},
        head=changed_head(plain, scale=1 / (config.optional_number("logits_scaling") or 1.0)),
    )
    scale = config.number("attention_multiplier", default=1.0)
    rope = numbers.rope if config.text("position_embedding_type", "none") == "rope" else None
    return with_attention(plain, lambda _, spec: replace(spec, scale=scale, rope=rope))


def read_gguf(values: GGUFValues) -> DecoderSpec:
    """Declare a GGUF file's decoder: Granite's, or Bamba's, whose attention has a rotation and no multipliers."""
    num_kv_heads, kinds = gguf_kinds(values)
    inner = values.integer("feed_forward_length")
    found = [f"blk.0.ffn_up{suffix}.weight" for suffix in ("_shexp", "")]
    rotated = values.flag("rope.scaling.finetuned", False)
    head_dim = values.head_dim(
        values.size("hidden_size", "embedding_length"), values.size("num_heads", "attention.head_count")
    )
    config = GGUFConfig(
        values,
        attention_bias=values.has_in_layers("attn_q.bias"),
        attention_multiplier=values.number("attention.scale", head_dim**-0.5),
        embedding_multiplier=values.number("embedding_scale", 1.0),
        intermediate_size=inner,
        layer_types=kinds,
        logits_scaling=values.number("logit_scale", 1.0),
        num_experts_per_tok=values.integer("expert_used_count", 0),
        num_key_value_heads=num_kv_heads,
        num_local_experts=values.integer("expert_count", 0),
        position_embedding_type="rope" if rotated else None,
        residual_multiplier=values.number("residual_scale", 1.0),
        **{INNER: values.rows("intermediate_size", *found, default=inner)},
        **gguf_keys(values),
    )
    partial = ("partial_rotary_factor", 1.0)
    numbers = numbers_from_config(config, default_context=2048, inner_key=INNER, partial_rotary=partial)
    return _hybrid(config, numbers, fused=False)


_IN_LAYER = {
    **{
        f"ffn_{part}{suffix}": f"shared_mlp.{part}_proj" for part in ("gate", "up", "down") for suffix in ("", "_shexp")
    },
    **{f"ffn_{part}_exps": f"block_sparse_moe.experts.*.{part}_proj" for part in ("gate", "up", "down")},
    **dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "post_attention_layernorm.weight"),
    "ffn_gate_inp": "block_sparse_moe.router.layer",
}
FAMILY = Family(read_config, read_gguf, with_state_spaces(gguf_names(interleaved=True), "mamba", _IN_LAYER))
