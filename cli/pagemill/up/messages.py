"""Words validation errors: the field, its value and the remedy; for an unknown field, the most similar name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import cache
from typing import Any

from pydantic_core import ErrorDetails

from pagemill.up.documents import Document, DocumentError, FieldPath, path_text
from pagemill_crds import GROUP, KIND, SERVED_VERSIONS
from pagemill_crds.explain import Field, UnknownField, find, root, walk

_NAMED: dict[FieldPath, list[str]] = {
    ("kind",): [KIND],
    ("apiVersion",): [f"{GROUP}/{version}" for version in SERVED_VERSIONS],
}
_TYPES = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping of fields",
    "model_type": "a mapping of fields",
    "model_attributes_type": "a mapping of fields",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "must be at least"),
    "greater_than": ("gt", "must be more than"),
    "less_than_equal": ("le", "must be at most"),
    "less_than": ("lt", "must be less than"),
}


def findings_of(document: Document, errors: Iterable[ErrorDetails]) -> Iterator[DocumentError]:
    """Yield one finding for each error of a field."""
    for error in errors:
        path: FieldPath = tuple(error["loc"])
        yield finding_at(document, path, _words(path, error))


def finding_at(document: Document, path: FieldPath, message: str) -> DocumentError:
    """Return a finding with the line of the field."""
    return DocumentError(document.file, document.line_of(path), path_text(path), message)


def _words(path: FieldPath, error: ErrorDetails) -> str:
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown field{_nearest_field(path)}"
    if kind == "missing":
        return _missing(path)
    if kind == "literal_error":
        return _not_a_choice(path, value)
    if kind in _TYPES:
        return _wrong_type(_TYPES[kind], value)
    if kind in _BOUNDS:
        limit, words = _BOUNDS[kind]
        return f"{words} {context[limit]}, not {show(value)}"
    if kind == "value_error":
        return (
            f"{context['error']}, not {show(value)}"
            if _names_no_value(str(context["error"]))
            else str(context["error"])
        )
    if kind == "too_long":
        return f"has {context['actual_length']} entries; at most {context['max_length']} are allowed"
    return f"{error['msg']}, got {show(value)}"


def show(value: Any) -> str:
    """Return a value for an error message, of 80 characters at most."""
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _names_no_value(message: str) -> bool:
    return message.startswith("must ") and not message.startswith("must not be empty")


def _missing(path: FieldPath) -> str:
    description = _describe(path)
    where = ".".join(str(part) for part in path if not isinstance(part, int))
    return f"required field is missing{f' ({description})' if description else ''}; see `pagemill explain {where}`"


def _wrong_type(wanted: str, value: Any) -> str:
    message = f"must be {wanted}, not {show(value)}"
    if isinstance(value, str) and wanted in ("an integer", "a number", "true or false"):
        return f"{message}; remove the quotes" if _is_quoted(value, wanted) else f"{message}, which is text"
    if wanted == "a string" and isinstance(value, int | float):
        return f"{message}; put it in quotes"
    return message


def _is_quoted(text: str, wanted: str) -> bool:
    """Whether the text without quotes would have the wanted type."""
    if wanted == "true or false":
        return text in ("true", "false")
    try:
        return int(text) is not None if wanted == "an integer" else float(text) is not None
    except ValueError:
        return False


def _not_a_choice(path: FieldPath, value: Any) -> str:
    field = _field(path)
    choices = [str(choice) for choice in field.schema.get("enum", [])] if field else []
    if path in _NAMED:
        choices = _NAMED[path]
    near = _nearest(str(value), choices)
    return f"{show(value)} is not one of {', '.join(choices)}{f'; did you mean {near}?' if near else ''}"


def _nearest_field(path: FieldPath) -> str:
    name, parent = str(path[-1]), _field(path[:-1])
    known = [child.name for child in parent.children] if parent else []
    if near := _nearest(name, known):
        return f"; did you mean {near}?"
    if place := _elsewhere(name):
        return f"; it belongs to {place}"
    return f"; known here: {', '.join(known)}" if known else "; remove it"


def _elsewhere(name: str) -> str | None:
    """Return the parent of the only field with exactly this name; `None` if there is no such field or several."""
    places = [field.path for field in _all_fields() if field.name == name and ".status" not in field.path]
    return places[0].removeprefix("llmdeployment.").rsplit(".", 1)[0] if len(places) == 1 else None


@cache
def _all_fields() -> tuple[Field, ...]:
    return tuple(walk(root()))


def _nearest(name: str, known: list[str]) -> str | None:
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = get_close_matches(name.lower().replace("_", ""), by_lower, n=1, cutoff=0.7)
    return by_lower[near[0]] if near else None


def _describe(path: FieldPath) -> str:
    field = _field(path)
    return field.description.split(". ")[0].removesuffix(".") if field else ""


def _field(path: FieldPath) -> Field | None:
    try:
        return find(".".join(str(part) for part in path if not isinstance(part, int)))
    except UnknownField:
        return None
