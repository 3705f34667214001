"""Llama (arXiv 2302.13971), from which many decoders descend. In GGUF, `llama` includes Mistral and Mixtral."""

from __future__ import annotations

import msgspec

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.families.llama_like import decoder, gguf_names, numbers_from_config, numbers_from_gguf
from pagemill_models.families.mixtral import with_mixtral_experts
from pagemill_models.families.moe import mixture_from_gguf


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=2048)
    biased = config.flag("attention_bias", False)
    return decoder(
        msgspec.structs.replace(
            numbers,
            attention_bias=biased,
            attention_output_bias=biased,
            mlp_bias=config.flag("mlp_bias", False),
        )
    )


def read_gguf(values: GGUFValues) -> DecoderSpec:
    numbers = numbers_from_gguf(values)
    if numbers.window is not None:
        numbers = msgspec.structs.replace(numbers, architecture="MistralForCausalLM")
    if not values.number("expert_count", default=0):
        return decoder(numbers)
    experts = mixture_from_gguf(values, size_key="feed_forward_length", renormalized=True)
    return with_mixtral_experts(decoder(msgspec.structs.replace(numbers, architecture="MixtralForCausalLM")), experts)


_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
    "ffn_up_exps": "block_sparse_moe.experts.*.w3",
    "ffn_down_exps": "block_sparse_moe.experts.*.w2",
}
_NAMES = gguf_names(interleaved=True)
FAMILY = Family(read_config, read_gguf, _NAMES._replace(in_layer=_NAMES.in_layer | _MIXTRAL))
