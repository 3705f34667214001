"""Collects the fields of a body that no schema reads while the body is parsed, so that an answer can name them.

`fields.RequestModel` and the readers of content without a schema report what they leave; `dialects.base.parsed`
collects.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

MAX_NAMED = 32


class UnknownFields:
    """The fields that were left during one parse: by schema, and those with a known place."""

    def __init__(self) -> None:
        self.by_schema: dict[tuple[type, str], None] = {}
        self.placed: dict[str, None] = {}
        self.prefixes: Mapping[type, str] = {}
        """The path before the fields of each schema."""

    def names(self) -> list[str]:
        """Return the paths, without indices."""
        found = {f"{self.prefixes.get(schema, '')}{name}": None for schema, name in self.by_schema}
        return list({**found, **self.placed})[:MAX_NAMED]


COLLECTED: ContextVar[UnknownFields | None] = ContextVar("unknown_fields", default=None)
"""Where fields are collected; None: nowhere."""


@contextmanager
def collecting_none() -> Iterator[None]:
    token = COLLECTED.set(None)
    try:
        yield
    finally:
        COLLECTED.reset(token)


def left_by(schema: type, names: Iterable[str]) -> None:
    """Report fields of an object that its schema does not have."""
    found = COLLECTED.get()
    if found is not None and len(found.by_schema) < MAX_NAMED:
        found.by_schema.update(dict.fromkeys((schema, name) for name in names))


def left_at(place: str, given: Mapping[str, object], known: Collection[str]) -> None:
    """Report the keys of an object without a schema that are not read; null is no value."""
    found = COLLECTED.get()
    if found is None or len(found.placed) >= MAX_NAMED:
        return
    names = (name for name, value in given.items() if name not in known and value is not None)
    found.placed.update(dict.fromkeys(f"{place}.{name}" for name in names))
