"""The base of all sections of the resource: strictness, camelCase names, rules between fields.

Each rule is written twice, side by side: in CEL for the API server and in Python for `pagemill up`; tests run both on
the same documents. Neighbours: `sections` uses this module, `schema` reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError, core_schema

from pagemill_crds.invalid import INVALID

RULES_ERROR = "rules"
"""Type of the pydantic error of a section with broken rules; `partial.broken_rules` lists the rules."""


@dataclass(frozen=True)
class SectionRule:
    """One condition between fields of a section."""

    field: str
    """Dotted path, relative to the section, of the field that the message is about."""
    message: str
    """What is wrong and what to do."""
    cel: str
    check: Callable[[Any], bool]
    """The same condition on the parsed section: True where the section satisfies it."""

    def schema(self) -> dict[str, Any]:
        return {"rule": self.cel, "message": self.message, "fieldPath": f".{self.field}"}


class Section(BaseModel):
    """A strict object of the resource: it refuses unknown fields, coerces no types and reads `null` as absent."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        alias_generator=to_camel,
        validate_by_alias=True,
        validate_by_name=False,
        serialize_by_alias=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    rules: ClassVar[tuple[SectionRule, ...]] = ()
    immutable: ClassVar[dict[str, str]] = {}
    """Fields that cannot change once they are set: camelCase name to remedy."""

    @model_validator(mode="before")
    @classmethod
    def _prune_nulls(cls, data: Any) -> Any:
        # The API server prunes nulls of fields that are not nullable before it fills in defaults.
        if isinstance(data, dict):
            return {name: value for name, value in data.items() if value is not None}
        return data

    @model_validator(mode="after")
    def _obey_rules(self) -> Self:
        broken = [rule for rule in self.rules if not rule.check(self)]
        if not broken:
            return self
        raise PydanticCustomError(RULES_ERROR, "{summary}", {"summary": broken[0].message})

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        rendered = handler.resolve_ref_schema(handler(schema))
        if cls.rules:
            rendered["x-kubernetes-validations"] = [rule.schema() for rule in cls.rules]
        for name, remedy in cls.immutable.items():
            rendered["properties"][name]["x-kubernetes-validations"] = [
                {"rule": "self == oldSelf", "message": f"{name} cannot change; {remedy}"}
            ]
        return rendered


def forbidden_changes(old: Section, new: Section, path: str = "") -> list[tuple[str, str]]:
    """Return (field path, message) of every immutable field that differs between two versions of a section."""
    found = []
    for name, field in type(old).model_fields.items():
        alias = field.alias or name
        before, after = getattr(old, name), getattr(new, name)
        where = f"{path}.{alias}" if path else alias
        if after is INVALID:
            continue
        if isinstance(before, Section) and isinstance(after, Section):
            found += forbidden_changes(before, after, where)
        elif alias in old.immutable and None not in (before, after) and before != after:
            found.append((where, f"{alias} cannot change; {old.immutable[alias]}"))
    return found
