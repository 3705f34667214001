"""Gemma 3 (arXiv 2503.19786), text: Gemma 2 without caps, with norms of queries and keys and two rotary embeddings."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace, with_attention, with_whole_norms
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import AttentionSpec, DecoderSpec, NormSpec, RopeSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.families import gemma2

FULL, WINDOWED = "full_attention", gemma2.WINDOWED
LAYERS_OF_27B = 62
DEFAULT_PATTERN = 6
"""Period of the layers that attend to the whole context."""


def read_config(config: ConfigValues) -> DecoderSpec:
    if config.optional_number("attn_logit_softcapping") is not None:
        raise config.unsupported("capped scores (`attn_logit_softcapping`)")
    causal = not config.flag("use_bidirectional_attention", False)
    num_layers = config.size("num_layers", "num_hidden_layers")
    period = config.size("period", "sliding_window_pattern", "_sliding_window_pattern", default=DEFAULT_PATTERN)
    kinds = config.layer_types(num_layers) or [
        WINDOWED if (layer + 1) % period else FULL for layer in range(num_layers)
    ]
    plain = gemma2.read_layers(config, kinds, default_context=131_072, rope_kind=FULL)
    context = plain.max_position_embeddings

    def attention(index: int, spec: AttentionSpec) -> AttentionSpec:
        name = f"{plain.layers[index].name}.self_attn"
        norm = NormSpec(name=f"{name}.q_norm", size=spec.head_dim, eps=_eps(config), weight_offset=1.0)
        rope = spec.rope if kinds[index] != WINDOWED else local_rope(config, spec.head_dim, context)
        norms = {"query_norm": norm, "key_norm": replace(norm, name=f"{name}.k_norm")}
        # EmbeddingGemma's windows reach as far ahead as back, and their size is that of both sides.
        window = spec.window if causal or spec.window is None else spec.window // 2 + 1
        return replace(spec, **norms, rope=rope, causal=causal, window=window)

    return with_attention(plain, attention)


def _eps(config: ConfigValues) -> float:
    return config.epsilon("rms_norm_eps", default=1e-6)


def local_rope(config: ConfigValues, head_dim: int, context: int) -> RopeSpec:
    """Return the rotary embedding of layers with a window; files before transformers 5 declare only its base."""
    if WINDOWED in config.object("rope_parameters"):
        return config.rope(head_dim, context, kind=WINDOWED)
    return RopeSpec(theta=config.number("rope_local_base_freq", default=10_000.0), rotary_dim=head_dim)


def read_gguf(values: GGUFValues) -> DecoderSpec:
    period = values.size("period", "attention.sliding_window_pattern", DEFAULT_PATTERN) if values.window() else 1
    config = GGUFConfig(
        values,
        sliding_window_pattern=period,
        rope_local_base_freq=values.number("rope.freq_base_swa", 10_000.0),
        final_logit_softcapping=values.number("final_logit_softcapping", 0.0) or None,
        **gemma2.scale_of_scores(values, LAYERS_OF_27B),
    )
    return with_whole_norms(read_config(config))


FAMILY = Family(read_config, read_gguf, gemma2.GGUF_NAMES)
