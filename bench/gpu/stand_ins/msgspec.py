"""The part of msgspec that the engine's messages and settings need, for machines without it: structs with defaults.

Only `bench/gpu` puts this on the path, behind everything installed. It neither encodes nor validates.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from functools import partial
from types import SimpleNamespace
from typing import Any

StructMeta = type


class Struct:
    def __init_subclass__(cls, kw_only: bool = False, **encoding: Any) -> None:
        for name, annotation in inspect.get_annotations(cls).items():
            default = cls.__dict__.get(name)
            if isinstance(default, list | dict | set) and not str(annotation).startswith("ClassVar"):
                setattr(cls, name, dataclasses.field(default_factory=partial(copy.copy, default)))
        # A default that is itself a struct must have a hash; it is never used.
        dataclasses.dataclass(kw_only=kw_only, unsafe_hash=True)(cls)


def field(default: Any, name: str) -> Any:
    """Return the default; the encoded name is not needed."""
    return default


class Decoder:
    """Accepts the type that modules name at import; it decodes nothing."""

    def __init__(self, type: Any) -> None:
        self.type = type


class Encoder:
    """Encodes nothing; modules make one at import."""


structs = SimpleNamespace(replace=dataclasses.replace)
json = msgpack = SimpleNamespace(Decoder=Decoder, Encoder=Encoder)
