"""GPT-2 (Radford et al., 2019): learned positions, layer norms, Conv1D matrices stored as [inputs, outputs]."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import (
    Activation,
    AttentionSpec,
    DecoderSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    PositionsSpec,
)
from pagemill_models.declaration.family import Family, GGUFNames
from pagemill_models.declaration.gguf_values import HEAD, GGUFValues
from pagemill_models.declaration.parts import head_size, layer_norm, linear, plain_mlp, sequential


class GPT2Numbers(NamedTuple):
    architecture: str
    num_layers: int
    size: int
    intermediate_size: int
    num_heads: int
    vocab_size: int
    context: int
    eps: float
    tied: bool
    activation: Activation = "gelu_tanh"
    conv1d: bool = True
    """Whether matrices are stored transposed; converters to GGUF transpose them."""
    scaled: bool = True
    scaled_by_layer: bool = False
    """Whether scores are also divided by the layer's number."""


def read_config(config: ConfigValues) -> DecoderSpec:
    return decoder(numbers_from_config(config))


def numbers_from_config(config: ConfigValues) -> GPT2Numbers:
    if config.flag("add_cross_attention", False):
        raise config.unsupported("cross-attention")
    size = config.size("hidden_size", "n_embd", "hidden_size", default=768)
    return GPT2Numbers(
        architecture=config.architecture,
        num_layers=config.size("num_layers", "n_layer", "num_hidden_layers", default=12),
        size=size,
        intermediate_size=config.size("intermediate_size", "n_inner", default=4 * size),
        num_heads=config.size("num_heads", "n_head", "num_attention_heads", default=12),
        vocab_size=config.size("vocab_size", default=50_257),
        context=config.size("max_position_embeddings", "n_positions", "n_ctx", default=1024),
        eps=config.epsilon("layer_norm_epsilon", default=1e-5),
        tied=config.flag("tie_word_embeddings", True),
        activation=config.activation("activation_function", default="gelu_new"),
        scaled=config.flag("scale_attn_weights", True),
        scaled_by_layer=config.flag("scale_attn_by_inverse_layer_idx", False),
    )


def read_gguf(values: GGUFValues) -> DecoderSpec:
    return decoder(
        GPT2Numbers(
            architecture=values.architecture,
            num_layers=values.size("num_layers", "block_count"),
            size=values.size("hidden_size", "embedding_length"),
            intermediate_size=values.size("intermediate_size", "feed_forward_length"),
            num_heads=values.size("num_heads", "attention.head_count"),
            vocab_size=values.vocab_size(),
            context=values.size("max_position_embeddings", "context_length"),
            eps=values.epsilon("attention.layer_norm_epsilon", 1e-5),
            tied=not values.has(HEAD),
            conv1d=False,
        )
    )


def decoder(numbers: GPT2Numbers) -> DecoderSpec:
    size = numbers.size
    positions = PositionsSpec(name="transformer.wpe", num_rows=numbers.context)
    return DecoderSpec(
        architecture=numbers.architecture,
        hidden_size=size,
        vocab_size=numbers.vocab_size,
        max_position_embeddings=numbers.context,
        embedding=EmbeddingSpec(name="transformer.wte", num_rows=numbers.vocab_size, size=size, positions=positions),
        layers=tuple(_layer(numbers, index) for index in range(numbers.num_layers)),
        norm=layer_norm("transformer.ln_f", size, numbers.eps),
        head=HeadSpec(name="lm_head", tied=numbers.tied),
        ignored=(".attn.bias", ".attn.masked_bias"),
        optional_prefix="transformer.",
    )


def _layer(numbers: GPT2Numbers, index: int) -> LayerSpec:
    name, size, inner = f"transformer.h.{index}", numbers.size, numbers.intermediate_size
    head_dim = head_size(size, numbers.num_heads)
    product = partial(linear, bias=True, transposed=numbers.conv1d)
    scale = head_dim**-0.5 if numbers.scaled else 1.0
    attention = AttentionSpec(
        num_heads=numbers.num_heads,
        num_kv_heads=numbers.num_heads,
        head_dim=head_dim,
        qkv=product(size, (f"{name}.attn.c_attn", 3 * size)),
        output=product(size, (f"{name}.attn.c_proj", size)),
        scale=scale / (index + 1) if numbers.scaled_by_layer else scale,
    )
    mlp = plain_mlp(
        product(size, (f"{name}.mlp.c_fc", inner)),
        product(inner, (f"{name}.mlp.c_proj", size)),
        numbers.activation,
    )
    norms = [layer_norm(f"{name}.ln_{number}", size, numbers.eps) for number in (1, 2)]
    return sequential(name, (norms[0], attention), (norms[1], mlp))


GGUF_NAMES = GGUFNames(
    layers="transformer.h",
    in_layer={
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    outside_layers={
        "token_embd.weight": "transformer.wte.weight",
        "position_embd.weight": "transformer.wpe.weight",
        "output_norm.weight": "transformer.ln_f.weight",
        "output_norm.bias": "transformer.ln_f.bias",
        HEAD: "lm_head.weight",
    },
    interleaved={},
)

FAMILY = Family(read_config, read_gguf, GGUF_NAMES)
