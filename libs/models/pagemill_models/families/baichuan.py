"""Baichuan 1 and 2 (arXiv 2309.10305): Llama with queries, keys and values in one matrix; 13B has ALiBi instead of a
rotary embedding."""

from __future__ import annotations

from pagemill_models.declaration.changes import changed_head, replace, with_attention
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import AttentionSpec, DecoderSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.declaration.parts import alibi_slopes, linear
from pagemill_models.families.llama_like import Numbers, decoder, gguf_names, numbers_from_config, numbers_from_gguf

SIZES_OF_7B, SIZES_OF_13B = (4096, 32), (5120, 40)
"""Hidden size and heads: both kinds of headers identify the model with a rotary embedding by nothing else."""
CONTEXT_OF_ROTATED = "max_position_embeddings"
"""For other sizes: the key is in 7B's config.json and not in 13B's."""
NORMALIZED_VOCABULARY = 125_696
"""Vocabulary of Baichuan 2, whose head's rows are normalized; nothing else in config.json distinguishes the two."""


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=config.integer("model_max_length", default=4096))
    plain = _positioned(numbers, rotates=_rotates(numbers, config))

    def attention(index: int, spec: AttentionSpec) -> AttentionSpec:
        size = numbers.hidden_size
        return replace(spec, qkv=linear(size, (f"{plain.layers[index].name}.self_attn.W_pack", 3 * size)))

    return with_attention(plain, attention)


def read_gguf(values: GGUFValues) -> DecoderSpec:
    """Declare a GGUF file's decoder, in which converters have split the matrix."""
    numbers = numbers_from_gguf(values)
    rotates = _size(numbers) == SIZES_OF_7B
    if not rotates and _size(numbers) != SIZES_OF_13B:
        raise values.unsupported(f"{_described(numbers)}: neither 7B, which has a rotation, nor 13B, which has ALiBi")
    return _positioned(numbers, rotates=rotates)


def _rotates(numbers: Numbers, config: ConfigValues) -> bool:
    if _size(numbers) in (SIZES_OF_7B, SIZES_OF_13B):
        return _size(numbers) == SIZES_OF_7B
    if config.has(CONTEXT_OF_ROTATED):
        return True
    raise config.unsupported(
        f"{_described(numbers)} and no `{CONTEXT_OF_ROTATED}`: neither 7B, which has a rotation, nor 13B, which has "
        f"ALiBi. Add `{CONTEXT_OF_ROTATED}` to config.json if the model has a rotation"
    )


def _size(numbers: Numbers) -> tuple[int, int]:
    return numbers.hidden_size, numbers.num_heads


def _described(numbers: Numbers) -> str:
    return f"a hidden size of {numbers.hidden_size} and {numbers.num_heads} heads"


def _positioned(numbers: Numbers, *, rotates: bool) -> DecoderSpec:
    plain = decoder(numbers)
    head = changed_head(plain, normalized=numbers.vocab_size == NORMALIZED_VOCABULARY)
    plain = replace(plain, head=head)
    if rotates:
        return plain
    slopes = alibi_slopes(numbers.num_heads)
    return with_attention(plain, lambda _, spec: replace(spec, rope=None, alibi_slopes=slopes))


FAMILY = Family(read_config, read_gguf, gguf_names(interleaved=True))
