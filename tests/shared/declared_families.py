"""The declarations of tiny models of all families, without files, and random tensors that fill them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import encoder_models
import expert_models
import family_checkpoints
import hybrid_models
import numpy as np
import transformers
from family_matrix import BASES
from family_models import GPTJ, NEOX, ODD_SHAPES, VARIANTS

from pagemill_execution.weights.source import CutWeights
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.spec.decoders import decoder_from_config

VOCAB_SIZE = 203
FOUR_HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("GPTNeoXForCausalLM", {**NEOX, "num_attention_heads": 4}),
    "gptj": ("GPTJForCausalLM", {**GPTJ, "n_head": 4, "rotary_dim": 8}),
}
"""Models that other tests give fewer heads than there are ranks here."""
_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    **BASES,
    **{f"variant: {name}": case for name, case in VARIANTS.items()},
    **{f"odd: {name}": case for name, case in ODD_SHAPES.items()},
    **{f"experts: {name}": case for name, case in expert_models.VARIANTS.items()},
    **encoder_models.ENCODERS,
    **{f"classifier: {name}": case for name, case in encoder_models.CLASSIFIERS.items()},
    **FOUR_HEADS,
}
KINDS = {name: kind for name, kind in family_checkpoints.KINDS.items() if not kind.alibi}
"""Without Baichuan's 13B, which is known by its size."""
RECURRENT = {
    name: (architecture, overrides | {"num_attention_heads": 4})
    for name, (architecture, overrides) in (hybrid_models.ALL | hybrid_models.VARIANTS).items()
    if "heads of 256" not in name
}
"""Models with states, with heads for four ranks."""
NAMES = [*_TRANSFORMERS, *KINDS, *RECURRENT]


def architecture_of(name: str) -> str:
    return KINDS[name].architecture if name in KINDS else (_TRANSFORMERS | RECURRENT)[name][0]


@cache
def declared(name: str) -> DecoderSpec:
    if name in KINDS:
        kind = KINDS[name]
        values = {**family_checkpoints.CONFIG, **kind.config, "architectures": [kind.architecture]}
        return decoder_from_config(values, Path("config.json"))
    architecture, overrides = (_TRANSFORMERS | RECURRENT)[name]
    asked = {"vocab_size": VOCAB_SIZE} | overrides
    config: Any = getattr(transformers, architecture).config_class(**asked)
    values = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [architecture]}
    return decoder_from_config(values, Path("config.json"))


class RandomTensors:
    """A `TensorSource` of float32 tensors, each the same in every instance."""

    def __init__(self, decoder: DecoderSpec) -> None:
        self.shapes = decoder.shapes()
        self.read: list[str] = []

    def array(self, name: str) -> Any:
        generator = np.random.default_rng(abs(hash_of(name)))
        shape = self.shapes[name]
        values = generator.standard_normal(shape, dtype=np.float32)
        if name.endswith("A_log"):
            return values - 3  # states remember many tokens
        # Norms stay near 1, and products near the size of their inputs.
        return 1 + 0.2 * values if len(shape) == 1 and "bias" not in name else values * np.float32(0.2)

    def read_into(self, name: str, out: Any) -> None:
        self.read.append(name)
        out[...] = self.array(name)

    def code_kind(self, name: str) -> None:
        return None

    def read_codes(self, name: str) -> None:
        return None

    def read_blocks(self, name: str) -> None:
        return None

    def is_bfloat16(self, name: str) -> bool:
        return False

    def cut(self, slices: Any) -> CutWeights:
        return CutWeights(self, slices)  # type: ignore[arg-type]


def hash_of(name: str) -> int:
    """Return a number of the name that is the same in every process."""
    return int.from_bytes(name.encode()[-6:], "big") + 1_000_003 * sum(name.encode())
