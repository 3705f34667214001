"""The names and LoRA adapters that a running engine is asked to serve, and what became of each adapter.

The operator, or the local backend, writes `adapters_file` and `names_file` as JSON, `WantedAdapters` and `ModelNames`;
the engine watches them. `report.state` sends the answer, `AdapterSlots`, to gateways.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class WantedAdapter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    """Name that clients send."""
    source: str
    """Where its folder is: a URI of any kind that models have, or a path."""
    pinned: bool = False
    """Loaded before the engine is ready, and kept in its memory."""


class WantedAdapters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All adapters that are wanted; others are removed once their requests have ended."""

    adapters: list[WantedAdapter] = []


NAMES_FILE = "names.json"
"""The usual name of `names_file`."""


class ModelNames(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    names: list[str] = []
    """Names of the model that clients may use, its own first; none: those of the engine's settings."""


class AdapterStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine did with one adapter that it was asked to serve."""

    name: str
    """Name that clients send."""
    source: str
    state: Literal["fetching", "known", "refused"]
    """`fetching`: its files are being fetched, or read for the first time. `known`: requests for it are accepted."""
    digest: str = ""
    """Digest of the content that requests for the name get; empty: none. A name whose source changed keeps the old
    content until the new one is known."""
    reason: str = ""
    """Of a refused adapter: a word for conditions, such as `AdapterTooLarge`."""
    message: str = ""
    """Why it is refused and what remedies that, or a warning about a known one."""
    pinned: bool = False


class AdapterSlots(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The LoRA adapters of an engine; those in its memory by digest."""

    num_slots: int = 0
    """Adapters that may be resident at once; 0: no adapters are served."""
    resident: list[str] = []
    """Loaded adapters: requests for them need not wait for a load. Those that were used longest ago come first."""
    num_kept: int = 0
    """Adapters that may be loaded at once, with and without a slot; 0: not reported."""
    loading: list[str] = []
    """Adapters that are being loaded or queued for it, in this order."""
    load_ms: float = 0.0
    """Time to load one adapter: measured, or as configured before the first load; 0: not reported."""
    known: list[AdapterStatus] = []
    """All adapters that the engine was asked to serve. Gateways learn from it which digest a name stands for."""
