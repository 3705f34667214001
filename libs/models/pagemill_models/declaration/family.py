"""The contents of a family's file: readers of both kinds of headers, and GGUF's names for its tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.gguf_values import GGUFValues

_LAYER_NAME = re.compile(r"blk\.(\d+)\.([\w.]+)")
_SUFFIXES = ("weight", "bias")


class ValueHeads(NamedTuple):
    """Where a tensor of a delta rule has value heads: behind what else the dimension has."""

    dimension: int
    whole: bool
    """Whether each has as many indices as values; else one."""


class GGUFNames(NamedTuple):
    """Hugging Face names of a GGUF file's tensors."""

    layers: str
    """Prefix of a layer's names, before its number: `model.layers`."""
    in_layer: dict[str, str]
    """Names without `.weight` and `.bias`: {`attn_q`: `self_attn.q_proj`}; with it where the other name has none. `*`
    stands for the number of an expert: the tensor contains all experts of a layer."""
    outside_layers: dict[str, str]
    """Whole names: {`token_embd.weight`: `model.embed_tokens.weight`}."""
    interleaved: dict[str, str]
    """Matrices of a layer whose rows converters store with the two rotary halves of each head interleaved, and the
    metadata key of their number of heads: {`attn_q`: `attention.head_count`}."""
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    """Shapes of tensors that files store with others, by their whole names within a layer. -1 stands for what is left,
    and 0 for the last dimension: {`ssm_conv1d.weight`: (-1, 1, 0)}."""
    logarithms: tuple[str, ...] = ()
    """Whole names of vectors of which files store the negative exponentials."""
    tiled: Mapping[str, ValueHeads] = MappingProxyType({})
    """Whole names of tensors whose value heads are in another order: the first ones of all key heads, then the second
    ones, where Hugging Face has all of the first key head, then those of the second."""

    folded: bool = False
    """Whether converters multiply matrices by the model's factors, as in `DecoderSpec`."""

    def heads_key(self, name: str) -> str | None:
        """Return the metadata key of the number of heads of a tensor with interleaved rows; None for other tensors."""
        return self.interleaved.get(name.split(".")[2]) if name.startswith("blk.") else None

    def in_a_layer(self, name: str) -> str:
        """Return the name within its layer of a tensor, or its whole name."""
        match = _LAYER_NAME.fullmatch(name)
        return name if match is None else match[2]

    def shape(self, name: str, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a tensor among Hugging Face's."""
        wanted = self.shapes.get(self.in_a_layer(name))
        if wanted is None:
            return stored
        known = [stored[-1] if size == 0 else size for size in wanted]
        left = math.prod(stored) // math.prod(size for size in known if size != -1)
        return tuple(left if size == -1 else size for size in known)

    def hugging_face_name(self, name: str) -> str:
        """Return the Hugging Face name of a tensor; a name without a counterpart is returned unchanged."""
        match = _LAYER_NAME.fullmatch(name)
        if match is None:
            return self.outside_layers.get(name, name)
        layer, whole = f"{self.layers}.{match[1]}", match[2]
        if whole in self.in_layer:
            return f"{layer}.{self.in_layer[whole]}"
        short, _, suffix = whole.rpartition(".")
        if short in self.in_layer and suffix in _SUFFIXES:
            return f"{layer}.{self.in_layer[short]}.{suffix}"
        return name


class Family(NamedTuple):
    """A model family: the `FAMILY` of a built-in file, or the object of an entry point."""

    read_config: Callable[[ConfigValues], DecoderSpec]
    """Raises `SourceError` for invalid or unsupported values."""
    read_gguf: Callable[[GGUFValues], DecoderSpec] | None = None
    gguf_names: GGUFNames | None = None
