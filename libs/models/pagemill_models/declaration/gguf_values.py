"""The metadata of a GGUF file for a family: each value is checked, and errors name the key.

Key names: docs/gguf.md of github.com/ggml-org/ggml. All but `general.*` begin with the architecture, which is left out
here.
"""

from __future__ import annotations

import math
import struct
from functools import cached_property

from pagemill_models.declaration.declaration import RopeSpec
from pagemill_models.declaration.errors import UnsupportedModelArchitecture
from pagemill_models.declaration.known import rope_errors, unsupported
from pagemill_models.declaration.limits import (
    Held,
    check_fraction,
    check_parts,
    check_positive,
    check_size,
    held_by,
)
from pagemill_models.declaration.rope_scaling import RopeError, RopeScaling, UnsupportedRopeError, check_long_rope
from pagemill_models.declaration.rope_settings import DEFAULT_THETA, read_gguf_scaling
from pagemill_models.files.gguf_file import MAX_SHOWN, GGMLType, GGUFError, GGUFFile
from pagemill_models.files.missing_values import warn_once

EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
LONG_ROPE = ("rope_factors_long.weight", "rope_factors_short.weight")
DESCRIBING = (ROPE_FACTORS, *LONG_ROPE)
"""Tensors whose values belong to the declaration, as metadata does."""
ROPE_DIVISORS = "rope_freq_divisors"
"""Name of `ROPE_FACTORS` among Hugging Face names, where it has no counterpart."""
MAX_WINDOW = 2**31
MAX_NUMBER = 1e300
_FLOAT32 = struct.Struct("<f")
_FLOAT32_DIGITS = 9
"""Number of decimal digits that distinguishes all float32 values."""


class GGUFValues:
    """The values of one file. `architecture`: canonical name of the one that the file declares."""

    def __init__(self, file: GGUFFile, prefix: str, architecture: str) -> None:
        self.file = file
        self.architecture = architecture
        self._prefix = prefix

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def has_in_layers(self, tensor: str) -> bool:
        """Whether any layer has a tensor of this name."""
        return any(self.has(f"blk.{index}.{tensor}") for index in range(self.size("num_layers", "block_count")))

    def rows(self, field: str, *tensors: str, default: int) -> int:
        """Return the rows of the first of the tensors that the file has. `field` selects their limit."""
        found = (self.file.tensors[name].shape[-2:][0] for name in tensors if self.has(name))
        return check_size(self.file.path, field, next(found, default), self.held)

    def size(self, field: str, key: str, default: int | None = None) -> int:
        """Return a positive number; a list of equal numbers (one per layer) counts as one. `field` selects its
        limit."""
        return check_size(self.file.path, field, self.integer(key, default), self.held)

    @cached_property
    def held(self) -> Held:
        """What the file's tensors hold."""
        return held_by(tensor.shape for tensor in self.file.tensors.values())

    def check_parts(self, what: str, num_parts: int) -> None:
        """Raise `UnreadableModelError` for more parts of layers than the files can hold. `what`: their name."""
        check_parts(self.file.path, what, num_parts, self.size("num_layers", "block_count"), self.held)

    def has_key(self, key: str) -> bool:
        return f"{self._prefix}.{key}" in self.file.metadata

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.file.get(f"{self._prefix}.{key}", bool, default))

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

    def by_layer(self, key: str, num_layers: int) -> list[int]:
        """Return a number for each layer, of a list or of one number for all."""
        value = self.file.get(f"{self._prefix}.{key}", (int, list), None)
        found = [value] * num_layers if type(value) is int else value
        if not isinstance(found, list) or len(found) != num_layers or any(type(each) is not int for each in found):
            raise self.wrong(key, value, f"a list of {num_layers} integers")
        return found

    def drafting(self) -> int:
        """Return the number of the last layers, which draft further tokens."""
        found, num_layers = self.integer("nextn_predict_layers", 0), self.size("num_layers", "block_count")
        if not 0 <= found < num_layers:
            raise self.wrong("nextn_predict_layers", found, f"at least 0 and less than the {num_layers} layers")
        return found

    def number(self, key: str, default: float) -> float:
        """Return a finite number."""
        value = self.file.get(f"{self._prefix}.{key}", (int, float), default)
        if isinstance(value, bool) or not abs(value) < MAX_NUMBER:
            raise self.wrong(key, value, "a finite number")
        return float(value)

    def wrong(self, key: str, value: object, wanted: str) -> GGUFError:
        """Return the error for a value of a key."""
        found = str(value)[:MAX_SHOWN]
        return GGUFError(f"`{self.file.path}`: `{self._prefix}.{key}` is {found}; it must be {wanted}.")

    def epsilon(self, key: str, default: float) -> float:
        if f"{self._prefix}.{key}" not in self.file.metadata:
            warn_once(
                f"`{self.file.path}` has no `{self._prefix}.{key}`, which every converter writes: {default:g} is used. "
                "Convert the model again."
            )
        return check_fraction(self.file.path, f"{self._prefix}.{key}", _shortest(self.number(key, default)))

    def head_dim(self, hidden_size: int, num_heads: int) -> int:
        head_dim = self.size("head_dim", "attention.key_length", hidden_size // num_heads)
        if self.integer("attention.value_length", head_dim) != head_dim:
            raise self.unsupported("keys and values of different lengths")
        return head_dim

    def vocab_size(self) -> int:
        embedding = self.file.tensors.get(EMBEDDING)
        if embedding is None:
            raise GGUFError(f"`{self.file.path}` has no tensor `{EMBEDDING}`. It is not a complete model.")
        return check_size(self.file.path, "vocab_size", embedding.shape[0])

    def window(self) -> int | None:
        """Return the tokens that a token attends to, or None where the key is missing or 0."""
        window = self.number("attention.sliding_window", 0)
        if not 0 <= window < MAX_WINDOW or window != int(window):
            raise self.wrong("attention.sliding_window", window, f"a whole number from 0 to {MAX_WINDOW - 1}")
        return int(window) or None

    def layer_types(self) -> list[str] | None:
        """Return the kind of each layer as in `config.json`, or None where the file does not say which have a
        window."""
        windowed = self.file.get(f"{self._prefix}.attention.sliding_window_pattern", list)
        return None if windowed is None else ["sliding_attention" if each else "full_attention" for each in windowed]

    def rope(self, head_dim: int, context: int, *, partial: bool = False) -> RopeSpec:
        rotary_dim = self.size("rotary_dim", "rope.dimension_count", head_dim)
        if rotary_dim != head_dim and not partial:
            raise self.unsupported("a partial rotary embedding")
        theta = check_positive(
            self.file.path, "rope.freq_base", _shortest(self.number("rope.freq_base", default=DEFAULT_THETA))
        )
        with rope_errors(self._prefix, self.file.path):
            scaling = read_gguf_scaling(self.file.metadata, self._prefix, theta, context, self._long_rope())
            self._check_divisors(rotary_dim, scaling)
            check_long_rope(scaling, rotary_dim, LONG_ROPE[1])
        divisors = ROPE_DIVISORS if self.has(ROPE_FACTORS) else None
        return RopeSpec(theta=theta, rotary_dim=rotary_dim, scaling=scaling, divisors=divisors)

    def _check_divisors(self, rotary_dim: int, scaling: RopeScaling | None) -> None:
        """Check the frequencies' divisors, which some converters write as a tensor in place of `llama3` scaling."""
        tensor = self.file.tensors.get(ROPE_FACTORS)
        if tensor is None:
            return
        if scaling is not None:
            raise UnsupportedRopeError(f"`{self._prefix}.rope.scaling.type` beside the tensor `{ROPE_FACTORS}`")
        if tensor.shape != (rotary_dim // 2,) or tensor.ggml_type is not GGMLType.F32:
            shape = " x ".join(map(str, tensor.shape))
            raise RopeError(f"`{ROPE_FACTORS}` is {shape} {tensor.ggml_type.name}; it must be {rotary_dim // 2} F32.")
        import numpy as np

        divisors = self.file.data(ROPE_FACTORS).view(np.float32)
        if not (np.isfinite(divisors) & (divisors > 0)).all():
            raise RopeError(f"`{ROPE_FACTORS}` holds {divisors.min()}; its values must be numbers greater than 0.")

    def _long_rope(self) -> dict[str, list[float]]:
        """Return the lists of LongRoPE, which converters write as tensors; empty where the file has none."""
        found = [name for name in LONG_ROPE if self.has(name)]
        if len(found) == 1:
            raise UnsupportedRopeError(f"the rope scaling `longrope` of one list (tensor `{found[0]}`)")
        if not found:
            return {}
        import numpy as np

        lists = {}
        for field, name in zip(("long_factor", "short_factor"), LONG_ROPE, strict=True):
            if self.file.tensors[name].ggml_type is not GGMLType.F32:
                raise RopeError(f"`{name}` is stored as {self.file.tensors[name].ggml_type.name}; it must be F32.")
            lists[field] = [_shortest(value) for value in self.file.data(name).view(np.float32).tolist()]
        return lists

    def unsupported(self, feature: str) -> UnsupportedModelArchitecture:
        """Return the error for an unsupported variant of a known architecture."""
        return unsupported(self._prefix, self.file.path, f" with {feature}")


def _shortest(value: float) -> float:
    """Return the shortest decimal that is the same float32: 1e-05 for the file's 9.9999997e-06."""
    try:
        stored = _FLOAT32.pack(value)
    except OverflowError:  # a float64 outside the range of float32
        return math.copysign(math.inf, value)
    decimals = (float(f"{value:.{digits}g}") for digits in range(1, _FLOAT32_DIGITS + 1))
    return next((decimal for decimal in decimals if _packs_to(stored, decimal)), value)


def _packs_to(stored: bytes, decimal: float) -> bool:
    try:
        return _FLOAT32.pack(decimal) == stored
    except OverflowError:  # rounded up beyond the largest float32
        return False
