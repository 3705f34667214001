"""Parameters that users set by name, for generated workloads and scaling policies; they are checked wherever they come
from.

A class of parameters declares each with its type and bounds, its default and its meaning; the command line and the
reference page read them from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec

Positive = Annotated[float, msgspec.Meta(gt=0, lt=1e12)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Sigma = Annotated[float, msgspec.Meta(ge=0, le=4)]
"""Standard deviation of a logarithm."""
Factor = Annotated[float, msgspec.Meta(ge=1, lt=1e12)]
Count = Annotated[int, msgspec.Meta(ge=1, lt=10**9)]

P = TypeVar("P", bound="Parameters")


class ParameterError(ValueError):
    """An invalid parameter; the message names it, its value and the remedy."""


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(type(self)):
            _convert(field, getattr(self, field.name), strict=True)


def read_parameters(kind: type[P], given: Mapping[str, str], what: str) -> P:
    """Return the parameters from texts; `what` names their owner in errors. Raise `ParameterError`."""
    known = {field.name: field for field in msgspec.structs.fields(kind)}
    for name in given:
        if name not in known:
            raise ParameterError(f"{what}: there is no parameter {name!r}; there are {', '.join(known) or 'none'}")
    try:
        return kind(**{name: _convert(known[name], text, strict=False) for name, text in given.items()})
    except ParameterError as error:
        raise ParameterError(f"{what}: {error}") from None


def split_choice(text: str) -> tuple[str, dict[str, str]]:
    """Split `ramp:from_rate=2,to_rate=10` into the name and the parameters. Raise `ParameterError`."""
    name, _, rest = text.partition(":")
    given: dict[str, str] = {}
    for pair in filter(None, (each.strip() for each in rest.split(","))):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise ParameterError(f"{text}: {pair!r} is no parameter; write NAME:PARAMETER=VALUE,PARAMETER=VALUE")
        given[key.strip()] = value.strip()
    return name.strip(), given


def _convert(field: msgspec.structs.FieldInfo, value: object, *, strict: bool) -> object:
    try:
        return msgspec.convert(value, field.type, strict=strict)
    except msgspec.ValidationError as error:
        raise ParameterError(f"{field.name}: {value!r} will not do: {_lower(str(error))}") from None


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]
