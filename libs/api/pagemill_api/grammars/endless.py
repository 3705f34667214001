"""Detect JSON schemas whose every value would contain another value of the schema, without end.

A schema is finite if everything it requires is finite: the least fixed point over its references. Only keywords that
require something are examined; an endless schema of other keywords is not found, and its answers end by their length.
"""

from __future__ import annotations

from typing import Any

from pagemill_api.grammars.schemas.reading import resolved

_MAX_STEPS = 20_000


def is_endless(schema: Any) -> bool:
    """Whether no finite value is valid. Raises `ValueError` where too many schemas require each other in a row."""
    try:
        return not _Search(schema).ends(schema, frozenset())
    except RecursionError:
        raise ValueError("hundreds of its schemas require the next one each; let one of them end") from None


class _Search:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0
        self._known: set[str] = set()
        """References to finite schemas."""

    def ends(self, schema: Any, within: frozenset[str]) -> bool:
        """Whether the schema has a finite value. `within`: references that are being followed."""
        self._steps += 1
        if not isinstance(schema, dict) or self._steps > _MAX_STEPS or "enum" in schema or "const" in schema:
            return True
        parts = schema.get("allOf")
        needed = [*(parts if isinstance(parts, list) else []), *self._required(schema)]
        if not all(self.ends(each, within) for each in needed):
            return False
        for key in ("anyOf", "oneOf"):
            options = schema.get(key)
            if isinstance(options, list) and options and not any(self.ends(each, within) for each in options):
                return False
        reference = schema.get("$ref")
        return not isinstance(reference, str) or self._reference_ends(reference, within)

    def _reference_ends(self, reference: str, within: frozenset[str]) -> bool:
        if reference in self._known:
            return True
        if reference in within:
            return False
        target = self._resolve(reference)
        if not self.ends(target, within | {reference}):
            return False
        self._known.add(reference)
        return True

    def _required(self, schema: dict[str, Any]) -> list[Any]:
        """Return the schemas of values that a value must contain, if the schema allows only one type."""
        kind, properties = schema.get("type"), schema.get("properties")
        if kind == "object" and isinstance(properties, dict):
            required = schema.get("required")
            names = required if isinstance(required, list) else []
            return [properties.get(name) for name in names if isinstance(name, str)]
        least = schema.get("minItems")
        if kind == "array" and isinstance(least, int) and least > 0:
            prefix = schema.get("prefixItems")
            prefix = prefix[:least] if isinstance(prefix, list) else []
            return [*prefix, schema.get("items")] if least > len(prefix) else prefix
        return []

    def _resolve(self, reference: str) -> Any:
        """Return the schema of a reference within the document; True for all other references, which are refused
        elsewhere."""
        found = resolved(self._root, reference)
        return True if found is None else found
