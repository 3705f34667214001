"""Granite 4 (IBM, 2025): Mamba 2's state spaces in most layers, attention in the others, experts beside a shared MLP,
and Granite's multipliers."""

from __future__ import annotations

from pagemill_models.declaration.changes import changed_head, replace, with_attention
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import BlockSpec, BranchSpec, DecoderSpec, LayerSpec, SharedExpertSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.parts import linear, sequential
from pagemill_models.families.llama_like import decoder, mlp, numbers_from_config
from pagemill_models.families.mamba2 import FULL, RECURRENT, kinds_of_layers, state_space_from_config
from pagemill_models.families.moe import mixture, mixture_from_config

PARTS = ("gate_proj", "up_proj", "down_proj")
STACKED = {
    ".block_sparse_moe.input_linear.weight": (
        ".block_sparse_moe.experts.*.gate_proj.weight",
        ".block_sparse_moe.experts.*.up_proj.weight",
    ),
    ".block_sparse_moe.output_linear.weight": (".block_sparse_moe.experts.*.down_proj.weight",),
}


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=2048, inner_key="shared_intermediate_size")
    biased = config.flag("attention_bias", False)
    numbers = replace(numbers, attention_bias=biased, attention_output_bias=biased)
    size, eps = numbers.hidden_size, numbers.rms_norm_eps
    kinds = kinds_of_layers(config, numbers.num_layers, "layer_types") or [RECURRENT] * numbers.num_layers
    experts = None
    if config.integer("num_local_experts", default=8):
        experts = mixture_from_config(config, size_key="intermediate_size", renormalized=True)
    residual = config.number("residual_multiplier", default=1.0)

    def forward(name: str) -> BlockSpec:
        fused = mlp(numbers, f"{name}.shared_mlp")
        inner = fused.down.in_features
        shared = replace(
            fused,
            up=linear(size, (f"{name}.shared_mlp.input_linear", 2 * inner)),
            down=linear(inner, (f"{name}.shared_mlp.output_linear", size)),
        )
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


FAMILY = Family(read_config)
