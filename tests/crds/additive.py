"""The additive rule: a schema may only grow, so that every object that was accepted stays accepted and means the same.

Pure functions: they compare two structural schemas and name each change that breaks the rule, with the field and the
remedy. Tests compare the current schema with that of the last release. `pagemill_crds.schema` makes the schemas; the
package's constants name the served versions of the resource.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any, NamedTuple

Schema = dict[str, Any]


class Break(NamedTuple):
    """One change by which objects of the earlier schema are refused or mean something else."""

    path: str
    """Dotted path of the field, with `[]` after lists and `{}` after maps."""
    keyword: str
    """Keyword of the schema that changed; `properties` for a field that was removed."""
    message: str
    """What changed and what to do."""

    def __str__(self) -> str:
        return f"{self.path or 'the object'}: {self.message}"


def breaks(before: Schema, after: Schema, path: str = "") -> Iterator[Break]:
    """Yield every break of the additive rule between two schemas. Descriptions and messages may change freely."""
    for keyword in (*_FIXED, "pattern", "format"):
        if keyword in _FIXED or keyword in after:
            yield from _same(keyword, before, after, path)
    for keyword, is_narrower in _BOUNDS.items():
        if keyword in after and (keyword not in before or is_narrower(after[keyword], before[keyword])):
            yield Break(path, keyword, _changed(keyword, before, after, "a bound may only be widened or dropped"))
        elif after.get(_exclusive(keyword)) and not before.get(_exclusive(keyword)):
            yield Break(path, keyword, f"{keyword} {after[keyword]} became exclusive; a bound may only be widened")
    yield from _choices(before, after, path)
    yield from _rules(before, after, path)
    yield from _fields(before, after, path)
    for keyword, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if keyword in before and keyword in after:
            yield from breaks(before[keyword], after[keyword], f"{path}{mark}")


_FIXED = (
    "type",
    "default",
    "x-kubernetes-int-or-string",
    "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
)
"""Keywords that may neither change, appear nor vanish: each change refuses objects or gives them another meaning."""
_BOUNDS: dict[str, Callable[[float, float], bool]] = {
    "minimum": lambda after, before: after > before,
    "minLength": lambda after, before: after > before,
    "maximum": lambda after, before: after < before,
    "maxLength": lambda after, before: after < before,
    "maxItems": lambda after, before: after < before,
    "maxProperties": lambda after, before: after < before,
}
_REMEDY = {
    "default": "objects that leave the field out would mean something else; keep the default, or add a new field",
    "pattern": "it cannot be compared by a program; keep it, or list the change as reviewed with the reason",
    "format": "it may refuse what was accepted; keep it as it was",
}
_GUARD = re.compile(r"!has\(self\.(\w+)\) \|\| ")


def _exclusive(bound: str) -> str:
    return f"exclusive{bound[0].upper()}{bound[1:]}"


def _same(keyword: str, before: Schema, after: Schema, path: str) -> Iterator[Break]:
    if before.get(keyword) != after.get(keyword):
        remedy = _REMEDY.get(keyword, "keep it; another shape is a new field, or a new version with a conversion")
        yield Break(path, keyword, _changed(keyword, before, after, remedy))


def _changed(keyword: str, before: Schema, after: Schema, remedy: str) -> str:
    def shown(schema: Schema) -> str:
        return repr(schema[keyword]) if keyword in schema else "none"

    return f"{keyword} changed from {shown(before)} to {shown(after)}; {remedy}"


def _choices(before: Schema, after: Schema, path: str) -> Iterator[Break]:
    if "enum" not in after:
        return
    if "enum" not in before:
        yield Break(path, "enum", f"only {after['enum']} are accepted now; a field stays as free as it was")
    elif gone := [value for value in before["enum"] if value not in after["enum"]]:
        yield Break(
            path, "enum", f"{gone} are no longer accepted; keep them, the plan may say that they have no effect"
        )


def _rules(before: Schema, after: Schema, path: str) -> Iterator[Break]:
    """Yield rules that may refuse objects of the earlier schema.

    A rule that begins by testing for a new field is allowed: no earlier object has that field.
    """
    known = {rule["rule"] for rule in before.get("x-kubernetes-validations", [])}
    for rule in after.get("x-kubernetes-validations", []):
        guard = _GUARD.match(rule["rule"])
        is_new_fields = guard is not None and guard[1] not in before.get("properties", {})
        if rule["rule"] not in known and not is_new_fields:
            yield Break(
                path,
                "x-kubernetes-validations",
                f"the rule `{rule['rule']}` may refuse what was accepted; begin it with `!has(self.NEW_FIELD) || `, or "
                "let the plan report the problem",
            )


def _fields(before: Schema, after: Schema, path: str) -> Iterator[Break]:
    old, new = before.get("properties", {}), after.get("properties", {})
    added = [name for name in new if name not in old]
    for name, child in old.items():
        field = f"{path}.{name}" if path else name
        if name in new:
            yield from breaks(child, new[name], field)
            continue
        near = get_close_matches(name, added, n=1, cutoff=0.5)
        hint = f"renamed to {near[0]}? Keep both, and read the old one where the new one is absent" if near else ""
        yield Break(field, "properties", f"the field is gone; {hint or 'keep it, the plan may say it has no effect'}")
    for name in after.get("required", []):
        if name not in before.get("required", []):
            field = f"{path}.{name}" if path else name
            yield Break(field, "required", "the field is required now; make it optional, or give it a default")
