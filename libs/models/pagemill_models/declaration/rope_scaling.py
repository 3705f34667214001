"""RopeScaling: how a checkpoint scales its rotary embedding, as a validated value with one type per kind.

`rope_settings` finds the fields in a header, the engine computes its tables from the value. Required fields and the
defaults of the others are defined here alone; the result equals what Hugging Face transformers computes from the same
file. The module uses no file format and no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

LEAST, MOST = 1e-6, 1e12
"""No model's settings are near these bounds; beyond them the tables would overflow to NaN."""
POSITIVE = f"a number from {LEAST:g} to {MOST:g}"
SUPPORTED_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
OLD_KINDS = {"su": "longrope"}
_ORIGINAL = "original_max_position_embeddings"


class RopeError(ValueError):
    """A rope setting that cannot be used; the message names the field, its value, and the allowed values."""


class UnsupportedRopeError(RopeError):
    """A valid setting that is not implemented; the message completes "the architecture X with ..."."""


class LinearScaling(msgspec.Struct, frozen=True, kw_only=True, tag_field="rope_type", tag="linear"):
    """All positions are divided by `factor` (position interpolation, arXiv 2306.15595)."""

    factor: float
    original_max_position_embeddings: int | None = None
    """`None`: not in the file, whose context length then is the original one."""


class DynamicScaling(msgspec.Struct, frozen=True, kw_only=True, tag_field="rope_type", tag="dynamic"):
    """The base grows with the context (NTK-aware scaling) where it may exceed the original one.

    An engine takes the base of its longest context for all contexts, as vLLM does, so that cached keys stay valid when
    a context grows. transformers takes the base of each context's length.
    """

    factor: float
    original_max_position_embeddings: int


class Llama3Scaling(msgspec.Struct, frozen=True, kw_only=True, tag_field="rope_type", tag="llama3"):
    """Low frequencies, relative to the original context, are divided by `factor` (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    """Turns over the original context up to which a frequency is divided."""
    high_freq_factor: float
    """Turns over the original context from which a frequency is kept; always above `low_freq_factor`."""
    original_max_position_embeddings: int


class YarnScaling(msgspec.Struct, frozen=True, kw_only=True, tag_field="rope_type", tag="yarn"):
    """YaRN (arXiv 2309.00071)."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    """Factor on cos and sin; where the file has none, it follows from `factor` and the `mscale` fields."""
    beta_fast: float = 32.0
    """Turns over the original context from which a dimension is kept."""
    beta_slow: float = 1.0
    """Turns up to which a dimension is interpolated; never above `beta_fast`."""
    magnitude: float = 1.0
    """Follows from the file's `mscale_all_dim`; DeepSeek multiplies attention's scores by its square."""
    truncate: bool = True
    """Whether both bounds are rounded outwards to whole dimensions."""


class LongRopeScaling(msgspec.Struct, frozen=True, kw_only=True, tag_field="rope_type", tag="longrope"):
    """LongRoPE (arXiv 2402.13753): each frequency has its own divisor.

    An engine whose contexts may exceed the original one uses `long_factor` for all contexts, as vLLM does, so that
    cached keys stay valid when a context grows.
    """

    short_factor: tuple[float, ...]
    """One divisor per frequency."""
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float
    """Factor on cos and sin; where the file has none, it follows from the lengths of both contexts."""


class ProportionalScaling(msgspec.Struct, frozen=True, kw_only=True, tag_field="rope_type", tag="proportional"):
    """The first `share` of the frequencies of a whole head, the highest ones, are divided by `factor`; the rest of the
    head is not rotated (Gemma 4)."""

    share: float
    factor: float


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling | ProportionalScaling


def scaled_context(scaling: RopeScaling | None, context: int) -> int:
    """Return the context length of a model whose file declares `context`.

    Files with YaRN, linear or dynamic scaling may declare the original length, as the published recipes do, which only
    add the scaling to the file. Those of the other kinds declare the scaled one.
    """
    if not isinstance(scaling, LinearScaling | DynamicScaling | YarnScaling):
        return context
    original = scaling.original_max_position_embeddings or context
    return max(context, int(original * scaling.factor))


def make_scaling(
    kind: object, values: Mapping[str, Any], theta: float, max_position_embeddings: int, name_of: Callable[[str], str]
) -> RopeScaling | None:
    """Return the scaling of `kind`, or None for `default`. Raises `RopeError`.

    `values`: the settings by Hugging Face's names. `name_of`: returns a field's name in the file, for messages.
    """
    if not isinstance(kind, str):
        raise RopeError(wrong(name_of("rope_type"), kind, one_of()))
    kind = OLD_KINDS.get(kind, kind)
    if kind not in SUPPORTED_KINDS:
        raise UnsupportedRopeError(f"the rope scaling `{kind[:80]}` (supported are {', '.join(SUPPORTED_KINDS)})")
    if kind == "default":
        return None
    fields = _Fields(values, name_of)
    if kind == "linear":
        known = fields.length(_ORIGINAL, 0) or None
        return LinearScaling(factor=fields.positive("factor"), original_max_position_embeddings=known)
    if kind == "dynamic":
        return DynamicScaling(
            factor=fields.positive("factor"), original_max_position_embeddings=max_position_embeddings
        )
    if kind == "proportional":
        share, factor = fields.optional("partial_rotary_factor"), fields.optional("factor")
        if share is not None and share > 1:
            raise fields.wrong("partial_rotary_factor", share, "a share from 0 to 1")
        return ProportionalScaling(share=1.0 if share is None else share, factor=factor or 1.0)
    original = fields.length(_ORIGINAL, max_position_embeddings)
    if kind == "llama3":
        return _llama3(fields, original)
    if kind == "longrope":
        return _longrope(fields, original, max_position_embeddings)
    if theta <= 1:
        raise RopeError(wrong("rope_theta", theta, "greater than 1 with the rope scaling `yarn`"))
    return _yarn(fields, original)


def _llama3(fields: _Fields, original: int) -> Llama3Scaling:
    low, high = fields.positive("low_freq_factor"), fields.positive("high_freq_factor")
    if high <= low:
        raise fields.wrong("high_freq_factor", high, f"greater than the low_freq_factor {low}")
    return Llama3Scaling(
        factor=fields.positive("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )


def _yarn(fields: _Fields, original: int) -> YarnScaling:
    factor = fields.positive("factor")
    # transformers treats a 0 in these four fields as absent.
    fast, slow = fields.optional("beta_fast") or 32.0, fields.optional("beta_slow") or 1.0
    mscale, mscale_all_dim = fields.optional("mscale"), fields.optional("mscale_all_dim")
    if fast < slow:
        raise fields.wrong("beta_fast", fast, f"at least the beta_slow {slow}")
    if fields.has("attention_factor"):
        attention_factor = fields.positive("attention_factor")
    elif mscale and mscale_all_dim:
        attention_factor = _yarn_magnitude(factor, mscale) / _yarn_magnitude(factor, mscale_all_dim)
    else:
        attention_factor = _yarn_magnitude(factor, 1.0)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention_factor,
        beta_fast=fast,
        beta_slow=slow,
        magnitude=_yarn_magnitude(factor, mscale_all_dim) if mscale_all_dim else 1.0,
        truncate=fields.flag("truncate", True),
    )


def _longrope(fields: _Fields, original: int, max_position_embeddings: int) -> LongRopeScaling:
    factor = fields.optional("factor") or max_position_embeddings / original
    if fields.has("attention_factor"):
        attention_factor = fields.positive("attention_factor")
    elif factor <= 1 or original <= 1:
        attention_factor = 1.0
    else:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = fields.numbers("short_factor"), fields.numbers("long_factor")
    if len(short) != len(long):
        raise fields.wrong("long_factor", list(long), f"a list of {len(short)} numbers, as `short_factor` is")
    return LongRopeScaling(
        short_factor=short,
        long_factor=long,
        original_max_position_embeddings=original,
        attention_factor=attention_factor,
    )


def check_long_rope(scaling: RopeScaling | None, rotary_dim: int, name: str) -> None:
    """Raise `RopeError` for lists of LongRoPE without one number for each frequency: one alone would be broadcast.

    `name`: that of the short list in the file.
    """
    if isinstance(scaling, LongRopeScaling) and len(scaling.short_factor) != rotary_dim // 2:
        raise RopeError(wrong(name, list(scaling.short_factor), f"a list of {rotary_dim // 2} numbers"))


def _yarn_magnitude(factor: float, weight: float) -> float:
    """Return the factor on attention's logits for a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


class _Fields:
    """The settings of one kind; each is checked when it is read."""

    def __init__(self, values: Mapping[str, Any], name_of: Callable[[str], str]) -> None:
        self._values = values
        self._name_of = name_of

    def has(self, name: str) -> bool:
        """Whether the field is present and not `null`: transformers writes an absent optional field as `null`."""
        return self._values.get(name) is not None

    def positive(self, name: str) -> float:
        if name not in self._values:
            raise RopeError(f"`{self._name_of(name)}` is missing; it must be {POSITIVE}.")
        return self._number(name, POSITIVE, lambda value: value > 0)

    def optional(self, name: str) -> float | None:
        if not self.has(name):
            return None
        return self._number(name, f"0 or {POSITIVE}", lambda value: value >= 0)

    def numbers(self, name: str) -> tuple[float, ...]:
        values = self._values.get(name)
        if not isinstance(values, list) or not values or not all(is_number(each) and each > 0 for each in values):
            raise self.wrong(name, values, f"a list with {POSITIVE} for each frequency")
        return tuple(map(float, values))

    def length(self, name: str, default: int) -> int:
        if name not in self._values:
            return default
        wanted = f"a whole number from 1 to {MOST:g}"
        return int(self._number(name, wanted, lambda value: value > 0 and value.is_integer()))

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def wrong(self, name: str, value: object, wanted: str) -> RopeError:
        return RopeError(wrong(self._name_of(name), value, wanted))

    def _number(self, name: str, wanted: str, is_valid: Callable[[float], bool]) -> float:
        value = self._values[name]
        if not is_number(value) or not is_valid(float(value)):
            raise self.wrong(name, value, wanted)
        return float(value)


def is_number(value: object) -> bool:
    """Whether a value is 0 or a finite number that float32 can divide by. JSON has integers of any size, NaN and
    Infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value == 0 or LEAST <= abs(value) <= MOST


def one_of() -> str:
    return f"one of {', '.join(SUPPORTED_KINDS)}"


def wrong(name: str, value: object, wanted: str) -> str:
    shown = "null" if value is None else repr(value)[:80]
    return f"`{name}` is {shown}; it must be {wanted}."
