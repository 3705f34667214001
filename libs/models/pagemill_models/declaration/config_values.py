"""The values of a Hugging Face `config.json` for a family: each is checked, and errors name the key.

The module knows the keys that all families share (`rope_parameters`, `hidden_act`, `layer_types`); a family names its
own. It accepts the old keys (`rope_theta`, `rope_scaling`) and those of transformers 5 (`rope_parameters`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pagemill_models.declaration.declaration import Activation, QueryGrowth, RopeSpec
from pagemill_models.declaration.errors import UnsupportedModelArchitecture
from pagemill_models.declaration.known import rope_errors, unsupported
from pagemill_models.declaration.limits import Held, check_fraction, check_parts, check_positive, check_size
from pagemill_models.declaration.quantization_settings import quantization_of
from pagemill_models.declaration.rope_scaling import (
    ProportionalScaling,
    RopeError,
    UnsupportedRopeError,
    check_long_rope,
    wrong,
)
from pagemill_models.declaration.rope_settings import DEFAULT_THETA, read_scaling, rope_theta, settings_of
from pagemill_protocol.source_errors import UnreadableModelError

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "relu": "relu",
    "relu2": "relu2",
}


_INFINITE = (math.inf, {"__float__": "Infinity"})
"""As Python's JSON has it, and as transformers 5 writes it."""
CONFIG_FILE = "config.json"
AUTO_GPTQ_FILE = "quantize_config.json"
"""AutoGPTQ's settings of packed weights, which early versions did not also write into `config.json`."""


class ConfigValues:
    """The values of one file. `architecture`: canonical name of the one that `config.json` declares. `held`: what the
    files hold, where their headers are known. `defaults`: values of keys that the file lacks, of the class's own."""

    def __init__(
        self,
        path: Path,
        values: dict[str, Any],
        architecture: str,
        held: Held | None = None,
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.path = path
        self.held = held
        self.architecture = architecture
        self._written = values
        self._defaults = defaults
        self._values = {**defaults, **values}

    def size(self, field: str, *keys: str, default: int | None = None) -> int:
        """Return a positive number under the first of `keys` that is present; `field` selects its limit."""
        return check_size(self.path.parent, field, self.integer(*(keys or (field,)), default=default), self.held)

    def check_parts(self, what: str, num_parts: int) -> None:
        """Raise `UnreadableModelError` for more parts of layers than the files can hold. `what`: their name."""
        check_parts(self.path.parent, what, num_parts, self.size("num_layers", "num_hidden_layers"), self.held)

    def integer(self, *keys: str, default: int | None = None) -> int:
        key, value = self._first(keys, default)
        if isinstance(value, list) and value == value[:1] * len(value) != []:
            value = value[0]  # Hunyuan's files have a number for each layer
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, value, "an integer")
        return value

    def optional_integer(self, key: str, default: int | None) -> int | None:
        """Return None where the key is present and null, whatever the default."""
        absent = self._values.get(key) is None and (key in self._values or default is None)
        return None if absent else self.integer(key, default=default)

    def integers(self, key: str) -> list[int]:
        """Return a list that may be missing."""
        values = self._values.get(key) or []
        if not isinstance(values, list) or any(type(value) is not int for value in values):
            raise self.wrong(key, values, "a list of integers")
        return values

    def numbers(self, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """Return as many numbers as the default has, which may be infinite; null is the default."""
        values = self._values.get(key) or default
        if not isinstance(values, list | tuple) or len(values) != len(default):
            raise self.wrong(key, values, f"a list of {len(default)} numbers")
        return tuple(math.inf if each in _INFINITE else self._number(key, each) for each in values)

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def in_use(self, key: str) -> bool:
        """Whether the value is neither missing nor null nor false."""
        return self._values.get(key) not in (None, False)

    def object(self, key: str) -> dict[str, Any]:
        """Return an object that may be missing."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, value, "an object")
        return value or {}

    def number(self, *keys: str, default: float | None = None) -> float:
        key, value = self._first(keys, default)
        return self._number(key, value)

    def optional_number(self, key: str) -> float | None:
        return None if self._values.get(key) is None else check_positive(self.path.parent, key, self.number(key))

    def epsilon(self, *keys: str, default: float) -> float:
        key, value = self._first(keys, default)
        return check_fraction(self.path.parent, key, self._number(key, value))

    def refuse_later_tokens(self) -> None:
        """Raise an error for attention that is not causal."""
        if self.flag("use_bidirectional_attention", False):
            raise self.unsupported("attention to later tokens (`use_bidirectional_attention`)")

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise self.wrong(key, value, "true or false")

    def activation(self, *keys: str, default: str) -> Activation:
        key, value = self._first(keys, default)
        if not isinstance(value, str):
            raise self.wrong(key, value, "the name of an activation")
        if value not in _ACTIVATIONS:
            raise self.unsupported(f"the activation `{value}`")
        return _ACTIVATIONS[value]

    def choice(self, key: str, options: tuple[str, ...]) -> str:
        """Return one of `options`: the first where the key is missing."""
        value = self._values.get(key) or options[0]
        if value not in options:
            raise self.wrong(key, value, f"one of {', '.join(options)}")
        return str(value)

    def text(self, key: str, default: str) -> str:
        return str(self._values.get(key) or default)

    @property
    def is_classifier(self) -> bool:
        """Whether the files have a classifier in place of a head."""
        names = self._values.get("architectures")
        return isinstance(names, list) and any(str(name).endswith("ForSequenceClassification") for name in names)

    @property
    def num_labels(self) -> int:
        """Number of labels of the classifier."""
        labels = self.object("id2label")
        return len(labels) if labels else self.size("num_labels", default=2)

    def quantization(self) -> str | None:
        """Return the quantization method of the weights, or None."""
        return quantization_of(self._values)

    def layer_types(self, num_layers: int, key: str = "layer_types") -> list[str] | None:
        """Return the kind of each layer, or None where the file lists none."""
        kinds = self._values.get(key)
        if not isinstance(kinds, list):
            return None
        if len(kinds) != num_layers or not all(isinstance(kind, str) for kind in kinds):
            raise self.wrong(key, kinds, f"a list of {num_layers} names")
        return kinds

    def windowed_layers(self, num_layers: int) -> list[int]:
        """Return the layers with a window: those of `layer_types`, or all but every fourth one."""
        kinds = self.layer_types(num_layers)
        if kinds is None:
            period = self.size("period", "sliding_window_pattern", default=4)
            return [layer for layer in range(num_layers) if (layer + 1) % period]
        if unknown := sorted({*kinds} - {"full_attention", "sliding_attention"}):
            raise self.unsupported(f"layers of the kind `{unknown[0][:80]}` (`layer_types`)")
        return [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]

    def query_growth(self) -> QueryGrowth | None:
        with rope_errors(self.architecture, self.path):
            where, values = settings_of(self._values)
        beta, length = values.get("llama_4_scaling_beta"), values.get("original_max_position_embeddings")
        if not beta:
            return None
        if type(length) is not int or length < 1:
            raise self.wrong(f"{where}.original_max_position_embeddings", length, "a positive integer")
        return QueryGrowth(self._number(f"{where}.llama_4_scaling_beta", beta), length)

    def window(self, key: str = "sliding_window", default: int | None = 4096) -> int | None:
        window = self.optional_integer(key, default)
        if window is not None and window < 1:
            raise UnreadableModelError(f"`{self.path.parent}` declares {key} = {window}; it must be positive.")
        return window

    def replaced(self, **values: Any) -> ConfigValues:
        """Return the file's values with others for some keys."""
        return ConfigValues(self.path, {**self._written, **values}, self.architecture, self.held, self._defaults)

    def renamed(self, names: Mapping[str, str]) -> ConfigValues:
        """Return the file's values with those that it has under other keys. `names`: by these keys."""
        found = {name: self._written[other] for other, name in names.items() if self._written.get(other) is not None}
        return self.replaced(**found)

    def names(self, key: str) -> list[str]:
        """Return a list of names, which must be there."""
        values = self._values.get(key)
        if not isinstance(values, list) or not values or not all(isinstance(each, str) for each in values):
            raise self.wrong(key, values, "a list of names")
        return values

    @property
    def is_rotated(self) -> bool:
        """Whether there is a rotary embedding: files say that there is none by a base that is null."""
        with rope_errors(self.architecture, self.path):
            settings = settings_of(self._written)[1]
        return settings.get("rope_theta", self._written.get("rope_theta", DEFAULT_THETA)) is not None

    def rope(
        self, head_dim: int, context: int, *, partial: tuple[str, float] | None = None, kind: str | None = None
    ) -> RopeSpec:
        """Return the rope settings.

        `partial`: key of the share of a head that is rotated, and its default; None: the whole head is rotated. `kind`:
        kind of layer, where `rope_parameters` has entries by kind.
        """
        with rope_errors(self.architecture, self.path):
            where, values = self._rope_settings(kind)
            theta = rope_theta(*self._first(("rope_theta", "rotary_emb_base"), DEFAULT_THETA), where, values)
            share = self._rotary_share(values.get("partial_rotary_factor"), partial)
            scaling = read_scaling(where, self._with_original(values), theta, context)
            # A proportional embedding turns pairs of the whole head, and the share says how many of them.
            rotary_dim = head_dim if isinstance(scaling, ProportionalScaling) else int(head_dim * share)
            check_long_rope(scaling, rotary_dim, f"{where}.short_factor")
        return RopeSpec(theta=theta, rotary_dim=rotary_dim, scaling=scaling)

    def _with_original(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings with the original context length, which Phi-3's files store beside them."""
        name = "original_max_position_embeddings"
        is_beside = self.has(name) and {values.get("rope_type"), values.get("type")} & {"longrope", "su"}
        return {name: self._values[name], **values} if is_beside else values

    def _rope_settings(self, kind: str | None) -> tuple[str, Mapping[str, Any]]:
        """Return the key and the settings under it, for one kind of layer where there are several."""
        where, values = settings_of(self._values)
        nested = [name for name, value in values.items() if isinstance(value, dict) or name.endswith("_attention")]
        if not nested:
            return where, values
        if kind is None:
            raise UnsupportedRopeError(f"rope settings per attention type (`{where}.{nested[0]}`)")
        if not isinstance(values.get(kind), dict):
            raise RopeError(wrong(f"{where}.{kind}", values.get(kind), "an object"))
        return f"{where}.{kind}", values[kind]

    def _rotary_share(self, found: Any, partial: tuple[str, float] | None) -> float:
        if partial is None:
            for name, value in (("partial_rotary_factor", self._values.get("partial_rotary_factor")), ("rope", found)):
                if value not in (None, 1):
                    raise self.unsupported(f"a partial rotary embedding (`{name}`)")
            return 1.0
        key, default = partial
        share = self.number(key, "partial_rotary_factor", default=default) if found is None else found
        share = self._number("rope_parameters.partial_rotary_factor", share)
        if not 0 < share <= 1:
            raise self.wrong(key, share, "a share from 0 to 1")
        return share

    def unsupported(self, feature: str) -> UnsupportedModelArchitecture:
        """Return the error for an unsupported variant of a known architecture."""
        return unsupported(self.architecture, self.path.parent, f" with {feature}")

    def wrong(self, key: str, value: Any, wanted: str) -> UnreadableModelError:
        problem = "is missing" if value is None else f"is {str(value)[:80]!r}"
        return UnreadableModelError(f"`{self.path}`: `{key}` {problem}; it must be {wanted}.")

    def _first(self, keys: tuple[str, ...], default: Any) -> tuple[str, Any]:
        """Return the first present key and its value, or the first key and the default."""
        for values in (self._written, self._defaults):
            for key in keys:
                if values.get(key) is not None:
                    return key, values[key]
        return keys[0], default

    def _number(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= 1e300:
            raise self.wrong(key, value, "a number")
        return float(value)
