"""Refuse a keyword that a constructor does not have, by its name and with the nearest known one.

For parameters that people write themselves (`SamplingParams`, `LLM`). Values are checked where they are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import msgspec

from pagemill_protocol.errors import show_python


class CheckedKeywords(msgspec.StructMeta):
    """Metaclass of structs whose constructor names an unknown keyword and the one that was probably meant."""

    NO_EFFECT: Mapping[str, tuple[tuple[Any, ...], str]] = {}
    """Keywords without effect: the values that are accepted, and the remedy for others. Structs may have their own."""

    if not TYPE_CHECKING:  # type checkers still see the fields

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().__call__(*args, **kwargs)
            except TypeError:
                known = _without(cls.__name__, kwargs, cls.NO_EFFECT)
                check_keywords(cls.__name__, known, cls.__struct_fields__)
                if len(known) == len(kwargs):
                    raise
                return super().__call__(*args, **known)


def _without(
    owner: str, given: Mapping[str, Any], no_effect: Mapping[str, tuple[tuple[Any, ...], str]]
) -> dict[str, Any]:
    """Return `given` without the keywords that have no effect. Raises `TypeError` for values of these that would have
    one."""
    for name in given.keys() & no_effect.keys():
        allowed, remedy = no_effect[name]
        if not any(type(given[name]) is type(value) and given[name] == value for value in allowed):
            raise TypeError(f"{owner} does not support {name}={show_python(given[name])}. {remedy}")
    return {name: value for name, value in given.items() if name not in no_effect}


def check_keywords(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise `TypeError` for the first keyword that `owner` does not have."""
    names = sorted(known)
    for name in given:
        if name not in names:
            near = get_close_matches(name, names, n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{owner} has no parameter {name!r}.{meant} Its parameters: {', '.join(names)}.")
