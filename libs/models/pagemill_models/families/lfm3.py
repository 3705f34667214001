"""LFM3 (Liquid AI, 2026): LFM2 with longer convolutions, windows in some layers of attention, a gate for each head, and
norms behind blocks as well."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import (
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    DecoderSpec,
    LayerSpec,
    NormSpec,
    ResidualSpec,
    RopeSpec,
)
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.parts import linear
from pagemill_models.declaration.rope_scaling import ProportionalScaling
from pagemill_models.families.gemma3 import FULL, WINDOWED
from pagemill_models.families.lfm2 import CONVOLUTION, PARTS, convolution, num_layers_of
from pagemill_models.families.llama_like import decoder, numbers_from_config
from pagemill_models.families.moe import gated_mlp

PARTIAL = ("partial_rotary_factor", 1.0)
RENAMED = {".self_attn.gate_proj.": ".self_attn.g_proj."}


def read_config(config: ConfigValues) -> DecoderSpec:
    size, num_layers = config.size("hidden_size"), num_layers_of(config)
    kinds = config.layer_types(num_layers) or _default_kinds(num_layers)
    unknown = next((kind for kind in kinds if kind not in (FULL, WINDOWED, CONVOLUTION)), None)
    if unknown is not None:
        raise config.unsupported(f"layers of the type `{unknown}`")
    of_attention = sorted({*kinds} - {CONVOLUTION})
    numbers = numbers_from_config(
        config,
        default_context=128_000,
        default_head_dim=128,
        default_tied=True,
        epsilon=("norm_eps", 1e-5),
        partial_rotary=PARTIAL,
        rope_kind=next(iter(of_attention), None),
    )
    biased = config.flag("attention_bias", False)
    numbers = replace(numbers, attention_bias=biased, attention_output_bias=biased, qk_norm=True)
    window, eps = config.window(default=256), numbers.rms_norm_eps
    ropes = {kind: _rope(config, numbers.head_dim, numbers.max_position_embeddings, kind) for kind in of_attention}
    gated, normed = config.flag("use_attention_gate", True), config.flag("use_sandwich_norm", True)

    def layer(plain: LayerSpec, kind: str) -> LayerSpec:
        name = plain.name

        def norm(which: str) -> NormSpec:
            return NormSpec(name=f"{name}.{which}_norm", size=size, eps=eps)

        mixer = next(plain.blocks())
        assert isinstance(mixer, AttentionSpec)
        gates = linear(size, (f"{name}.self_attn.g_proj", mixer.num_heads)) if gated else None
        block: BlockSpec = (
            convolution(config, f"{name}.conv", size)
            if kind == CONVOLUTION
            else replace(mixer, rope=ropes[kind], window=window if kind == WINDOWED else None, head_gates=gates)
        )
        forward = gated_mlp(f"{name}.feed_forward", size, numbers.intermediate_size, "silu", PARTS)
        branches = (
            BranchSpec(block=each, norm=norm(which), output_norm=norm(f"post_{which}") if normed else None)
            for which, each in (("operator", block), ("ffn", forward))
        )
        return LayerSpec(name, tuple(ResidualSpec((branch,)) for branch in branches))

    plain = decoder(numbers)
    return replace(
        plain,
        layers=tuple(map(layer, plain.layers, kinds)),
        norm=NormSpec(name="model.embedding_norm", size=size, eps=eps),
        renamed=RENAMED,
    )


def _default_kinds(num_layers: int) -> list[str]:
    period = (WINDOWED, CONVOLUTION, FULL, CONVOLUTION)
    return [CONVOLUTION, *(period[index % 4] for index in range(1, num_layers))][:num_layers]


def _rope(config: ConfigValues, head_dim: int, context: int, kind: str) -> RopeSpec:
    if config.has("rope_parameters"):
        return config.rope(head_dim, context, partial=PARTIAL, kind=kind)
    if kind == WINDOWED:
        return RopeSpec(theta=10_000.0, rotary_dim=head_dim)
    scaling = ProportionalScaling(share=0.5, factor=1.0)
    return RopeSpec(theta=1_000_000.0, rotary_dim=head_dim, scaling=scaling)


FAMILY = Family(read_config)
