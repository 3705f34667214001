"""Read a resource that has errors as far as it is valid, so that all other errors can be reported as well.

A field that is wrong or missing becomes `INVALID` (see `invalid`). `base` holds the rules; `pagemill up` reports what
the rules and the plan find.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, TypeVar, get_args

from pydantic import BaseModel

from pagemill_crds.base import Section
from pagemill_crds.invalid import INVALID, NotValid

Location = tuple[str | int, ...]
Model = TypeVar("Model", bound=BaseModel)


def read_partially(model: type[Model], value: Any, errors: Iterable[Location]) -> Model:
    """Return `value` as `model`, with `INVALID` at the locations of `errors`.

    `errors`: the locations of pydantic's errors, except those of broken rules.
    """
    read: Model = _read(model, value, list(errors))
    return read


def broken_rules(section: Any, path: Location = ()) -> Iterator[tuple[Location, str]]:
    """Yield (location, message) of each broken rule of a section and its subsections, as far as fields are valid."""
    if isinstance(section, Sequence) and not isinstance(section, str):
        for index, item in enumerate(section):
            yield from broken_rules(item, (*path, index))
    if not isinstance(section, BaseModel):
        return
    for name, field in type(section).model_fields.items():
        yield from broken_rules(getattr(section, name), (*path, field.alias or name))
    for rule in section.rules if isinstance(section, Section) else ():
        with suppress(NotValid):
            if not rule.check(section):
                yield (*path, *rule.field.split(".")), rule.message


def _read(annotation: Any, value: Any, errors: list[Location]) -> Any:
    if () in errors:
        return INVALID
    model = _model_in(annotation)
    if isinstance(value, list):
        return [_read(model, item, _below(errors, index)) for index, item in enumerate(value)]
    if model is not None and isinstance(value, dict):
        return _read_section(model, value, errors)
    return INVALID if errors else value


def _read_section(model: type[BaseModel], value: dict[str, Any], errors: list[Location]) -> BaseModel:
    values: dict[str, Any] = {}
    misspelt = _probably_meant(model, value)
    for name, field in model.model_fields.items():
        alias = field.alias or name
        if value.get(alias) is not None:
            values[alias] = _read(field.annotation, value[alias], _below(errors, alias))
        elif field.is_required() or alias in misspelt:
            values[alias] = INVALID
    return model.model_construct(**values)


def _probably_meant(model: type[BaseModel], value: dict[str, Any]) -> set[str]:
    """Return the fields that unknown names may be misspellings of. Whether such a field is absent is not known."""
    aliases = [field.alias or name for name, field in model.model_fields.items()]
    unknown = [name for name in value if name not in aliases]
    return {near for name in unknown for near in get_close_matches(name, aliases, n=1)}


def _below(errors: list[Location], part: str | int) -> list[Location]:
    return [location[1:] for location in errors if location[0] == part]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model in `Model`, `Model | None` or `list[Model]`, however annotated, or None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_in(part))), None)
