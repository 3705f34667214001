"""Settings that have no effect with a kind of model: of text that it does not generate, of a cache that it lacks.

Engines refuse them, unless the operator starts them: a stored object stays valid, so its engine runs without them, and
reports them in its state stream. `compute` checks settings that a model or a device cannot carry out.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import msgspec

from pagemill_execution.config import ExecutionConfig, SpeculationConfig
from pagemill_execution.sizing.budget import keeps_nothing
from pagemill_models.spec.model_spec import ModelSpec

_CACHING = {"kv_cache_dtype": "auto", "kv_cache_memory_bytes": None}
"""Settings of the KV cache -> the value with which they are not set.
Blocks without memory are counted also for models that have none."""

Settings = TypeVar("Settings", bound=ExecutionConfig)


class UnusedSetting(NamedTuple):
    name: str
    message: str
    """Reason and remedy."""
    usual: Any
    """The value with which it is not set."""


def unused_settings(config: ExecutionConfig, spec: ModelSpec) -> list[UnusedSetting]:
    """Return the settings that are set and have no effect with this model."""
    if spec.pooling is None:
        return []
    rules = [(name, usual, "generates no text") for name, usual in config.OF_TEXT.items()]
    if keeps_nothing(spec):
        rules += [(name, usual, "computes whole texts without a KV cache") for name, usual in _CACHING.items()]
    return [
        UnusedSetting(
            name,
            f"`{name}` has no effect with `{spec.architecture}`, which {reason}. "
            + (
                f"Remove {name}."
                if usual is None or isinstance(usual, SpeculationConfig)
                else f"Set {name} to {usual}."
            ),
            usual,
        )
        for name, usual, reason in rules
        if getattr(config, name) != usual
    ]


def without(config: Settings, unused: list[UnusedSetting]) -> Settings:
    return msgspec.structs.replace(config, **{each.name: each.usual for each in unused})
