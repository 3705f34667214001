"""Baichuan 1 and 2 (arXiv 2309.10305): Llama with queries, keys and values in one matrix; 13B has ALiBi instead of a
rotation."""

from __future__ import annotations

from pagemill_protocol.models.changes import replace, with_attention
from pagemill_protocol.models.config_values import ConfigValues
from pagemill_protocol.models.declaration import AttentionSpec, DecoderSpec
from pagemill_protocol.models.family import Family
from pagemill_protocol.models.llama_like import decoder, numbers_from_config
from pagemill_protocol.models.parts import alibi_slopes, linear

CONTEXT_OF_ROTATED = "max_position_embeddings"
"""The key is in 7B's config.json and not in 13B's; nothing else there says which of the two is rotated."""
NORMALIZED_VOCABULARY = 125_696
"""Of Baichuan 2, which divides the rows of its head by their lengths; nothing else in config.json is different."""


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=config.integer("model_max_length", default=4096))
    plain = decoder(numbers)
    head = replace(plain.head, normalized=numbers.vocab_size == NORMALIZED_VOCABULARY)
    rotates = config.has(CONTEXT_OF_ROTATED)

    def attention(index: int, spec: AttentionSpec) -> AttentionSpec:
        size = numbers.hidden_size
        qkv = linear(size, (f"{plain.layers[index].name}.self_attn.W_pack", 3 * size))
        if rotates:
            return replace(spec, qkv=qkv)
        return replace(spec, qkv=qkv, rope=None, alibi_slopes=alibi_slopes(numbers.num_heads))

    return with_attention(replace(plain, head=head), attention)


FAMILY = Family(read_config)
