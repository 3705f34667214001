"""The contents of a family's file: readers of both kinds of headers, and GGUF's names for its tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.gguf_values import GGUFValues

_LAYER_NAME = re.compile(r"blk\.(\d+)\.([\w.]+)\.(weight|bias)")


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
    convolutions: tuple[str, ...] = ()
    """Kernels of a layer, [channels, width], which Hugging Face stores as [channels, 1, width]."""

    def heads_key(self, name: str) -> str | None:
        """Return the metadata key of the number of heads of a tensor with interleaved rows; None for other tensors."""
        return self.interleaved.get(name.split(".")[2]) if name.startswith("blk.") else None

    def is_convolution(self, name: str) -> bool:
        match = _LAYER_NAME.fullmatch(name)
        return match is not None and match[3] == "weight" and match[2] in self.convolutions

    def hugging_face_name(self, name: str) -> str:
        """Return the Hugging Face name of a tensor; a name without a counterpart is returned unchanged."""
        match = _LAYER_NAME.fullmatch(name)
        if match is not None and f"{match[2]}.{match[3]}" in self.in_layer:
            return f"{self.layers}.{match[1]}.{self.in_layer[f'{match[2]}.{match[3]}']}"
        if match is None or match[2] not in self.in_layer:
            return self.outside_layers.get(name, name)
        return f"{self.layers}.{match[1]}.{self.in_layer[match[2]]}.{match[3]}"


class Family(NamedTuple):
    """A model family: the `FAMILY` of a built-in file, or the object of an entry point."""

    read_config: Callable[[ConfigValues], DecoderSpec]
    """Raises `SourceError` for invalid or unsupported values."""
    read_gguf: Callable[[GGUFValues], DecoderSpec] | None = None
    gguf_names: GGUFNames | None = None
