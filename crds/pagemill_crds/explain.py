"""Find and describe fields by path, such as `llmdeployment.spec.engine.maxModelLen`.

Only the structural schema is read, so the text says exactly what the API server enforces. Neighbours: `generate`
writes the whole tree as a page, `pagemill explain` prints one field.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pagemill_crds import (
    ADAPTER_KIND,
    ADAPTER_PLURAL,
    ADAPTER_SHORT_NAMES,
    ADAPTER_SINGULAR,
    API_VERSION,
    KIND,
    PLURAL,
    SHORT_NAMES,
    SINGULAR,
)
from pagemill_crds.adapters import LoRAAdapter
from pagemill_crds.schema import structural_schema

RESOURCE_NAMES = (SINGULAR, PLURAL, *SHORT_NAMES)
ADAPTER_NAMES = (ADAPTER_SINGULAR, ADAPTER_PLURAL, *ADAPTER_SHORT_NAMES)


class UnknownField(LookupError):
    """The resource has no such field; the message names the nearest one."""


@dataclass(frozen=True)
class Field:
    """One field of the resource."""

    path: str
    """Dotted path, with `[]` after lists."""
    schema: dict[str, Any]
    required: bool

    @property
    def name(self) -> str:
        return self.path.rsplit(".", 1)[-1]

    @property
    def type(self) -> str:
        """The type in words: string, integer, []string, map of string..."""
        return type_name(self.schema)

    @property
    def description(self) -> str:
        return str(self.schema.get("description", ""))

    @property
    def limits(self) -> list[str]:
        """Bounds, choices and default in words."""
        return list(_limits(self.schema))

    @property
    def rules(self) -> list[str]:
        """Messages of the rules between the field's own fields."""
        return [rule["message"] for rule in self.schema.get("x-kubernetes-validations", [])]

    @property
    def children(self) -> list[Field]:
        schema = self.schema.get("items", self.schema)
        prefix = f"{self.path}[]" if "items" in self.schema else self.path
        required = schema.get("required", [])
        return [
            Field(f"{prefix}.{name}", child, name in required) for name, child in schema.get("properties", {}).items()
        ]


def root() -> Field:
    """Return the resource LLMDeployment itself as a field."""
    return Field(SINGULAR, structural_schema(), True)


def adapter_root() -> Field:
    """Return the resource LoRAAdapter itself as a field."""
    return Field(ADAPTER_SINGULAR, structural_schema(LoRAAdapter), True)


def walk(field: Field) -> Iterator[Field]:
    """Yield the field and everything below it, depth first."""
    yield field
    for child in field.children:
        yield from walk(child)


def find(path: str) -> Field:
    """Return the field at a dotted path. `llmd`, `llmdeployments` and a leading `.` are understood too; paths of a
    LoRAAdapter begin with `loraadapter`.

    Raises `UnknownField`.
    """
    names = [name.removesuffix("[]") for name in path.strip(".").split(".") if name]
    field = root()
    if names and names[0].lower() in ADAPTER_NAMES:
        field = adapter_root()
    if names and names[0].lower() in (*RESOURCE_NAMES, *ADAPTER_NAMES):
        names = names[1:]
    for name in names:
        field = _child(field, name)
    return field


def describe(field: Field) -> str:
    """Return the text that `pagemill explain` prints for a field."""
    kind = ADAPTER_KIND if field.path.startswith(ADAPTER_SINGULAR) else KIND
    lines = [f"KIND:     {kind}", f"VERSION:  {API_VERSION}", "", f"FIELD:    {field.path} <{field.type}>", ""]
    lines += ["DESCRIPTION:", f"    {field.description or 'No description.'}"]
    if field.limits:
        lines += ["", "LIMITS:", *(f"    {limit}" for limit in field.limits)]
    if field.rules:
        lines += ["", "RULES:", *(f"    - {rule}" for rule in field.rules)]
    if field.children:
        lines += ["", "FIELDS:"]
    for child in field.children:
        mark = " -required-" if child.required else ""
        lines += [f"    {child.name} <{child.type}>{mark}", f"        {child.description}"]
    return "\n".join(line.rstrip() for line in lines)


def type_name(schema: dict[str, Any]) -> str:
    if schema.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if schema.get("type") == "array":
        return f"[]{type_name(schema['items'])}"
    if "additionalProperties" in schema:
        return f"map of {type_name(schema['additionalProperties'])}"
    return str(schema["type"])


def _child(field: Field, name: str) -> Field:
    children = {child.name: child for child in field.children}
    if name in children:
        return children[name]
    near = get_close_matches(name, children, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(children) or 'none'}"
    raise UnknownField(f"{field.path} has no field {name}; {hint}")


def _limits(schema: dict[str, Any]) -> Iterator[str]:
    if "default" in schema and schema["default"] != {}:
        yield f"default: {_literal(schema['default'])}"
    if "enum" in schema:
        yield f"one of: {', '.join(_literal(value) for value in schema['enum'])}"
    for key, words in _BOUND_WORDS.items():
        if key in schema:
            exclusive = schema.get(key.replace("m", "exclusiveM", 1)) is True
            yield f"{words[1] if exclusive else words[0]}: {schema[key]}"
    if "pattern" in schema:
        yield f"pattern: {schema['pattern']}"


_BOUND_WORDS = {
    "minimum": ("at least", "more than"),
    "maximum": ("at most", "less than"),
    "maxLength": ("characters at most", ""),
    "maxItems": ("items at most", ""),
    "maxProperties": ("entries at most", ""),
}


def _literal(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)
