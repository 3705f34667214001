"""The metadata of a GGUF file as a family reads it: each value checked, with an error that names the key.

Key names: docs/gguf.md of github.com/ggml-org/ggml. All but `general.*` begin with the architecture, which is left out
here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagemill_protocol.gguf_file import GGUFError, GGUFFile
from pagemill_protocol.models.declaration import RopeSpec
from pagemill_protocol.models.errors import UnsupportedModelArchitecture
from pagemill_protocol.models.limits import check_fraction, check_positive, check_size
from pagemill_protocol.models.registry import unsupported

EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
ROPE_DIVISORS = "rope_freq_divisors"
"""The name that `ROPE_FACTORS` has among Hugging Face names, which have none for it."""


class GGUFValues:
    """`architecture`: the canonical name of the one that the file declares."""

    def __init__(self, file: GGUFFile, prefix: str, architecture: str) -> None:
        self.file = file
        self.architecture = architecture
        self._prefix = prefix
        if self.number("expert_count", default=0):
            raise self.unsupported("experts")

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def size(self, field: str, key: str, default: int | None = None) -> int:
        """A positive number; a list of equal ones (a value for each layer) counts as one. `field` says which limit
        holds for it."""
        return check_size(self.file.path, field, self.integer(key, default))

    def integer(self, key: str, default: int | None = None) -> int:
        full_key = f"{self._prefix}.{key}"
        value = self.file.get(full_key, (int, list), default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise self.unsupported(f"layers of different `{key}`")
            value = value[0]
        if value is None or isinstance(value, bool) or not isinstance(value, int):
            raise GGUFError(f"`{self.file.path}` has no usable `{full_key}`. Convert the model again.")
        return value

    def number(self, key: str, default: float) -> float:
        return float(self.file.get(f"{self._prefix}.{key}", (int, float), default))

    def epsilon(self, key: str, default: float) -> float:
        return check_fraction(self.file.path, f"{self._prefix}.{key}", _shortest(self.number(key, default)))

    def head_dim(self, hidden_size: int, num_heads: int) -> int:
        head_dim = self.size("head_dim", "attention.key_length", hidden_size // num_heads)
        if self.integer("attention.value_length", head_dim) != head_dim:
            raise self.unsupported("keys and values of different lengths")
        return head_dim

    def vocab_size(self) -> int:
        embedding = self.file.tensors.get(EMBEDDING)
        if embedding is None:
            raise GGUFError(f"`{self.file.path}` has no tensor `{EMBEDDING}`. It does not hold a whole model.")
        return check_size(self.file.path, "vocab_size", embedding.shape[0])

    def window(self) -> int | None:
        return int(self.number("attention.sliding_window", 0)) or None

    def rope(self, head_dim: int, context: int, *, partial: bool = False) -> RopeSpec:
        rotary_dim = self.size("rotary_dim", "rope.dimension_count", head_dim)
        if rotary_dim != head_dim and not partial:
            raise self.unsupported("a partial rotary embedding")
        theta = check_positive(
            self.file.path, "rope.freq_base", _shortest(self.number("rope.freq_base", default=10_000.0))
        )
        divisors = ROPE_DIVISORS if self.has(ROPE_FACTORS) else None
        return RopeSpec(theta=theta, rotary_dim=rotary_dim, scaling=self._rope_scaling(context), divisors=divisors)

    def unsupported(self, feature: str) -> UnsupportedModelArchitecture:
        """The error for a variant of a known architecture that is not computed."""
        return unsupported(self._prefix, self.file.path, f" with {feature}")

    def _rope_scaling(self, context: int) -> dict[str, Any] | None:
        kind = self.file.get(f"{self._prefix}.rope.scaling.type", str, "none")
        factor = self.number("rope.scaling.factor", 0)
        if kind == "none" or not factor:
            return None
        scaling: dict[str, Any] = {"rope_type": kind, "factor": _shortest(factor)}
        if kind == "yarn":
            original = self.integer("rope.scaling.original_context_length", context)
            scaling["original_max_position_embeddings"] = original
        return scaling


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: the file's 9.9999997e-06 is what the author wrote as 1e-05."""
    return float(str(np.float32(value)))
