"""Field types that sections of the resource share: bounded strings, quantities, durations.

Each type checks in pydantic and states the same limits in the JSON schema, so that the API server and `pagemill up`
accept and refuse the same documents. Messages name the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import core_schema

from pagemill_protocol.resource import quantities


@dataclass(frozen=True)
class Text:
    """A string with a pattern and a length; its error says how to write it."""

    max_length: int
    pattern: str | None = None
    remedy: str = ""
    min_length: int = 1
    parse: Callable[[str], object] | None = None
    """Raises `ValueError` for texts that the pattern alone would accept or explain badly."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        limits: dict[str, Any] = {"maxLength": self.max_length}
        if self.min_length:
            limits["minLength"] = self.min_length
        if self.pattern:
            limits["pattern"] = self.pattern
        return {**handler(schema), **limits}

    def check(self, text: str) -> str:
        if len(text) < self.min_length:
            raise ValueError(f"must not be empty{self._hint()}")
        if len(text) > self.max_length:
            raise ValueError(f"has {len(text)} characters; at most {self.max_length} are allowed")
        if self.parse:
            self.parse(text)
        # Python's `$` also matches before a final line break; that of the API server does not.
        if self.pattern and not re.search(self.pattern.removesuffix("$") + r"\Z", text):
            raise ValueError(self.remedy or f"must match {self.pattern}")
        return text

    def _hint(self) -> str:
        return f"; {self.remedy}" if self.remedy else ""


@dataclass(frozen=True)
class IntOrText:
    """Kubernetes' int-or-string: an integer, or a string with a pattern."""

    pattern: str
    parse: Callable[[Any], object]
    max_length: int = 32

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.check, serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value)
        )

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "pattern": self.pattern,
            "minimum": 0,
            "maxLength": self.max_length,
        }

    def check(self, value: Any) -> int | str:
        if isinstance(value, float):
            raise ValueError(f'{value} must be an integer or a string; put it in quotes: "{value}"')
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError("must be an integer or a string")
        if isinstance(value, str) and len(value) > self.max_length:
            raise ValueError(f"has {len(value)} characters; at most {self.max_length} are allowed")
        self.parse(value)
        return value


def _share(value: int | str) -> None:
    if isinstance(value, int):
        quantities.cpu_cores(value)
    elif not re.fullmatch(PERCENT_PATTERN, value):
        raise ValueError(f'{value!r} is neither a count nor a share; write it like 1 or "25%"')


PERCENT_PATTERN = r"^([0-9]{1,2}|100)%$"

Memory = Annotated[int | str, IntOrText(quantities.MEMORY_PATTERN, quantities.memory_bytes)]
Cpu = Annotated[int | str, IntOrText(quantities.CPU_PATTERN, quantities.cpu_cores)]
CountOrPercent = Annotated[int | str, IntOrText(PERCENT_PATTERN, _share, max_length=4)]
Duration = Annotated[str, Text(32, quantities.DURATION_PATTERN, parse=quantities.duration_seconds)]

ObjectName = Annotated[
    str,
    Text(63, r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "must be lower-case letters, digits and '-', as Kubernetes names are"),
]
DottedName = Annotated[
    str,
    Text(
        253,
        r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
        "must be lower-case letters, digits, '-' and '.', as Kubernetes names are",
    ),
]
"""Names of objects that are made elsewhere: Secrets, ConfigMaps, claims and classes may have dots."""
ModelName = Annotated[
    str,
    Text(
        128,
        r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$",
        "must start with a letter or digit and contain only letters, digits and . _ / : -",
    ),
]
Line = Annotated[str, Text(1024, r"^[^\r\n]*$", "must be one line")]


def merged_by(key: str, max_length: int) -> Any:
    """Return the limits of a list whose items are identified by a field: writers of several items merge theirs.

    Source: Kubernetes, https://kubernetes.io/docs/reference/using-api/server-side-apply/#merge-strategy
    """
    markers: dict[str, Any] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    return Field(max_length=max_length, json_schema_extra=markers)
