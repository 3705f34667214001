"""Nemotron-H and Nemotron 3 (arXiv 2504.03624): layers of one block each, which is a state space of Mamba 2, attention
without a rotation, an MLP, or experts without gates."""

from __future__ import annotations

import math
from collections.abc import Callable

from pagemill_models.declaration.changes import replace
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import (
    AttentionSpec,
    BlockSpec,
    DecoderSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    SharedExpertSpec,
)
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.declaration.parts import linear, plain_mlp, sequential
from pagemill_models.families.deepseek_v3 import sigmoid_gating
from pagemill_models.families.llama_like import gguf_names
from pagemill_models.families.mamba2 import (
    FULL,
    RECURRENT,
    gguf_keys,
    gguf_kinds,
    kinds_of_layers,
    state_space,
    with_state_spaces,
)
from pagemill_models.families.moe import mixture_from_config

MLP, EXPERTS = "mlp", "moe"
PATTERN = {"M": RECURRENT, "E": EXPERTS, "*": FULL, "-": MLP}
"""The letters of `hybrid_override_pattern`."""
RENAMED = {"backbone.": "model."}
STACKED: dict[str, tuple[str, ...]] = {
    ".experts.up_proj": (".experts.*.up_proj.weight",),
    ".experts.down_proj": (".experts.*.down_proj.weight",),
}
UNUSED = ("mtp.",)
"""Layers that draft further tokens."""


def read_config(config: ConfigValues) -> DecoderSpec:
    size, context = config.size("hidden_size"), config.size("max_position_embeddings", default=4096)
    vocab_size, eps = config.size("vocab_size"), config.epsilon("layer_norm_epsilon", default=1e-5)
    if config.in_use("sliding_window"):
        raise config.unsupported("a sliding window (`sliding_window`)")
    kinds = _kinds(config)
    config = config.replaced(num_hidden_layers=len(kinds))
    blocks: dict[str, Callable[[str], BlockSpec]] = {
        RECURRENT: lambda name: _state_space(config, name, eps),
        FULL: lambda name: _attention(config, name),
        MLP: lambda name: _mlp(config, name, config.size("intermediate_size", default=21_504)),
    }
    if EXPERTS in kinds:
        blocks[EXPERTS] = _experts(config)

    def layer(index: int, kind: str) -> LayerSpec:
        name = f"model.layers.{index}"
        norm = NormSpec(name=f"{name}.norm", size=size, eps=eps)
        return sequential(name, (norm, blocks[kind](f"{name}.mixer")))

    return DecoderSpec(
        architecture=config.architecture,
        hidden_size=size,
        vocab_size=vocab_size,
        max_position_embeddings=context,
        embedding=EmbeddingSpec(name="model.embeddings", num_rows=vocab_size, size=size),
        layers=tuple(layer(index, kind) for index, kind in enumerate(kinds)),
        norm=NormSpec(name="model.norm_f", size=size, eps=eps),
        head=HeadSpec(name="lm_head", tied=config.flag("tie_word_embeddings", False)),
        ignored_layers=UNUSED,
        renamed=RENAMED,
        stacked=STACKED if EXPERTS in kinds else {},
    )


def _kinds(config: ConfigValues) -> list[str]:
    """Return the kind of each layer: of `layers_block_type`, or by the letters of the pattern in older files."""
    key = next((key for key in ("layers_block_type", "layer_types") if config.has(key)), None)
    if key is None:
        pattern = config.text("hybrid_override_pattern", "")
        unknown = next((letter for letter in pattern if letter not in PATTERN), None)
        if unknown is not None:
            raise config.unsupported(f"layers of the type `{unknown}` (`hybrid_override_pattern`)")
        if not pattern:
            raise config.wrong("layers_block_type", None, "a list with the kind of each layer")
        declared = config.size("num_layers", "num_hidden_layers", default=len(pattern))
        if declared != len(pattern):
            raise config.wrong("hybrid_override_pattern", pattern, f"{declared} letters, one for each layer")
        return [PATTERN[letter] for letter in pattern]
    num_layers = config.size("num_layers", "num_hidden_layers", default=len(config.names(key)))
    return kinds_of_layers(config, num_layers, key, (MLP, EXPERTS)) or []


def _state_space(config: ConfigValues, name: str, eps: float) -> BlockSpec:
    num_heads, num_groups = (
        config.size("mamba_num_heads", default=128),
        config.size("n_groups", "n_groups", "mamba_n_groups", default=8),
    )
    if num_heads % num_groups:
        raise config.wrong("n_groups", num_groups, f"a divisor of the {num_heads} mamba_num_heads")
    if config.activation("mamba_hidden_act", default="silu") != "silu":
        raise config.unsupported("another activation than `silu` beside a state space (`mamba_hidden_act`)")
    return state_space(
        name,
        config.size("hidden_size"),
        num_heads=num_heads,
        head_dim=config.size("mamba_head_dim", default=64),
        num_groups=num_groups,
        state_size=config.size("ssm_state_size", default=128),
        width=config.size("conv_kernel", "conv_kernel", "mamba_d_conv", default=4),
        bias=config.flag("use_conv_bias", config.flag("mamba_conv_bias", True)),
        biased=config.flag("use_bias", False),
        eps=eps,
        # The bound of transformers' class for sequences of several tokens, whatever `time_step_limit` is.
        step_limits=(config.number("time_step_min", "time_step_min", "mamba_dt_min", default=0.001), math.inf),
    )


def _attention(config: ConfigValues, name: str) -> AttentionSpec:
    # transformers' class does not read `attention_bias`.
    size, num_heads = config.size("hidden_size"), config.size("num_heads", "num_attention_heads", default=32)
    num_kv_heads = config.size("num_kv_heads", "num_key_value_heads", default=num_heads)
    head_dim = config.size("head_dim", "head_dim", "attention_head_dim", default=128)
    rows = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        qkv=linear(size, *((f"{name}.{part}_proj", count) for part, count in rows.items())),
        output=linear(rows["q"], (f"{name}.o_proj", size)),
        scale=head_dim**-0.5,
    )


def _mlp(config: ConfigValues, name: str, inner: int) -> MLPSpec:
    size, biased = config.size("hidden_size"), config.flag("mlp_bias", False)
    return plain_mlp(
        linear(size, (f"{name}.up_proj", inner), bias=biased),
        linear(inner, (f"{name}.down_proj", size), bias=biased),
        config.activation("mlp_hidden_act", default="relu2"),
    )


def _experts(config: ConfigValues) -> Callable[[str], BlockSpec]:
    renormalized = config.flag("norm_topk_prob", True)
    numbers = mixture_from_config(config, size_key="moe_intermediate_size", renormalized=renormalized)
    gating = sigmoid_gating(config, numbers, default=(1, 1), scale=1.0)
    activation = config.activation("mlp_hidden_act", default="relu2")
    size, inner = numbers.hidden_size, numbers.intermediate_size
    shared = config.size("moe_shared_expert_intermediate_size", default=7688)
    latent = config.size("hidden_size", "moe_latent_size") if config.has("moe_latent_size") else None
    biased, width = config.flag("mlp_bias", False), latent or size

    def block(name: str) -> MoESpec:
        experts = (f"{name}.experts.{index}" for index in range(numbers.num_experts))
        return MoESpec(
            router=linear(size, (f"{name}.gate", numbers.num_experts)),
            experts=tuple(
                plain_mlp(
                    linear(width, (f"{expert}.up_proj", inner)),
                    linear(inner, (f"{expert}.down_proj", width)),
                    activation,
                )
                for expert in experts
            ),
            top_k=numbers.top_k,
            renormalized=renormalized,
            shared=SharedExpertSpec(mlp=_mlp(config, f"{name}.shared_experts", shared)),
            gating=gating(name),
            before=None if latent is None else linear(size, (f"{name}.fc1_latent_proj", latent), bias=biased),
            behind=None if latent is None else linear(latent, (f"{name}.fc2_latent_proj", size), bias=biased),
        )

    return block


def read_gguf(values: GGUFValues) -> DecoderSpec:
    """Declare a GGUF file's decoder: layers without key heads and inner values are recurrent."""
    drafting, num_layers = values.drafting(), values.size("num_layers", "block_count")
    num_kv_heads, mixers = gguf_kinds(values)
    widths = values.by_layer("feed_forward_length", num_layers)
    sparse = values.integer("expert_count", 0) > 0
    kinds = [
        mixer if mixer == FULL or not width else EXPERTS if sparse else MLP
        for mixer, width in zip(mixers, widths, strict=True)
    ][: num_layers - drafting]
    of_experts = {
        "moe_intermediate_size": values.integer("expert_feed_forward_length", 0),
        "moe_latent_size": values.integer("moe_latent_size", 0) or None,
        "moe_shared_expert_intermediate_size": values.integer("expert_shared_feed_forward_length", 0),
        "n_group": values.integer("expert_group_count", 1),
        "n_routed_experts": values.integer("expert_count", 0),
        "norm_topk_prob": values.flag("expert_weights_norm", True),
        "num_experts_per_tok": values.integer("expert_used_count", 0),
        "routed_scaling_factor": values.number("expert_weights_scale", 1.0),
        "topk_group": values.integer("expert_group_used_count", 1),
    }
    spaces = gguf_keys(values)
    config = GGUFConfig(
        values,
        **(of_experts if sparse else {}),
        intermediate_size=max(widths) or None,
        layer_norm_epsilon=values.epsilon("attention.layer_norm_rms_epsilon", 1e-5),
        layers_block_type=kinds,
        mamba_head_dim=spaces["mamba_d_head"],
        mamba_num_heads=spaces["mamba_n_heads"],
        mlp_bias=values.has_in_layers("ffn_up.bias"),
        n_groups=spaces["mamba_n_groups"],
        num_key_value_heads=num_kv_heads,
        ssm_state_size=spaces["mamba_d_state"],
        conv_kernel=spaces["mamba_d_conv"],
        use_bias=spaces["mamba_proj_bias"],
        use_conv_bias=spaces["mamba_conv_bias"],
    )
    # A block that drafts has attention and experts, and is not run.
    drafts = tuple(
        f"{prefix}.{number}." for number in range(len(kinds), num_layers) for prefix in ("model.layers", "blk")
    )
    return replace(read_config(config), ignored_layers=drafts)


_IN_LAYER = {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.*.up_proj",
    "ffn_down_exps": "mixer.experts.*.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_NAMES = gguf_names(interleaved=True)
_OUTSIDE = {"token_embd.weight": "model.embeddings.weight", "output_norm.weight": "model.norm_f.weight"}
GGUF_NAMES = with_state_spaces(_NAMES._replace(outside_layers=_NAMES.outside_layers | _OUTSIDE), "mixer", _IN_LAYER)
FAMILY = Family(read_config, read_gguf, GGUF_NAMES)
