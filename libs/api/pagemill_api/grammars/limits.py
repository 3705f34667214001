"""Bounds on a form that need no compilation: nesting, sizes, regular expressions, and endless schemas.

The process of `check` bounds everything that only the compiler can find.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from pagemill_api.grammars.endless import is_endless
from pagemill_api.structural_tags import (
    Format,
    Grammar,
    JsonSchema,
    Optional,
    Or,
    Regex,
    SequenceFormat,
    Tag,
    TagsWithSeparator,
    TriggeredTags,
    read_tag,
)
from pagemill_protocol.errors import show
from pagemill_protocol.request.structured_outputs import StructuredOutputs

MAX_DEPTH = 64
MAX_VALUES = 100_000
"""Maximum number of values in a schema, keys not counted."""
MAX_LITERAL_CHARS = 8192
"""Maximum length of one text in a schema: a literal of a grammar is tokenized in one step."""
MAX_EXPANDED = 10_000
"""Maximum characters of a regular expression with its repetitions written out."""
MAX_ELEMENTS = 4096
MAX_REMAINDERS = 10_000
"""Maximum number of remainders modulo a `multipleOf`: more take the compiler longer than a tenth of a second."""
_COUNT = re.compile(r"\{(\d*)(?:,(\d*))?\}|~ ?(\d+)(?:\.\.(\d+))?")


def check_limits(outputs: StructuredOutputs) -> None:
    """Raise `ValueError` that names what is too large or invalid, and the remedy."""
    if outputs.json_schema:
        _check_schema(_parsed(outputs.json_schema))
    if outputs.regex:
        _check_regex(outputs.regex)
    if outputs.grammar:
        _check_grammar(outputs.grammar)
    if outputs.structural_tag:
        _check_tag(read_tag(_parsed(outputs.structural_tag)))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep; use fewer levels, or $ref") from None


def _check_schema(schema: Any) -> None:
    if not isinstance(schema, dict | bool):
        raise ValueError("a schema must be an object or a boolean")
    for num_values, (key, value, depth) in enumerate(_values("", schema, 0), start=1):
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep; use fewer levels, or $ref")
        if num_values > MAX_VALUES:
            raise ValueError(f"it has more than {MAX_VALUES} values; send a smaller one")
        if isinstance(value, str) and len(value) > MAX_LITERAL_CHARS and key not in ("description", "title"):
            raise ValueError(
                f"a text below `{key[:80]}` has {len(value)} characters; at most {MAX_LITERAL_CHARS} are allowed"
            )
        if key == "pattern" and isinstance(value, str):
            _check_regex(value)
        if key == "multipleOf" and isinstance(value, int | float):
            _check_divisor(value)
    if is_endless(schema):
        raise ValueError("no value is valid for it: every one would contain another without end; allow a value to end")


def _values(key: str, value: Any, depth: int) -> Iterator[tuple[str, Any, int]]:
    """Yield every value below this one, depth first, with its nearest key and its depth, up to just beyond the
    limit."""
    yield key, value, depth
    if depth > MAX_DEPTH:
        return
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _values(name, each, depth + 1)
    elif isinstance(value, list):
        for each in value:
            yield from _values(key, each, depth + 1)


def _check_divisor(divisor: float) -> None:
    """Refuse divisors with too many remainders, each of which is a state of the automaton.

    Trailing zeros are digits that must be zero and add no states.
    """
    remainders = int(str(int(divisor)).rstrip("0") or 0) if divisor == divisor and abs(divisor) < float("inf") else 0
    if remainders > MAX_REMAINDERS:
        raise ValueError(
            f"multipleOf {divisor} has {remainders} remainders; at most {MAX_REMAINDERS} are allowed: send a "
            "smaller one"
        )


def _check_regex(pattern: str) -> None:
    size = expanded_size(pattern)
    if size > MAX_EXPANDED:
        raise ValueError(
            f"the regular expression {show(pattern)} has {size} characters when its repetitions are written out; at "
            f"most {MAX_EXPANDED} are allowed: lower the counts in braces"
        )


def _check_grammar(grammar: str) -> None:
    """Refuse grammars whose repetition counts multiply to too much: rules may repeat each other."""
    product = 1
    for line in grammar.splitlines():
        product *= max([1, *(_most(match) for match in _COUNT.finditer(line))])
    if product > MAX_EXPANDED * 10:
        raise ValueError(
            f"its repetitions multiply to {product}; at most {MAX_EXPANDED * 10} are allowed: lower the counts"
        )


def _check_tag(form: Format) -> None:
    for num_elements, (element, depth) in enumerate(_elements(form, 0), start=1):
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep; use fewer levels")
        if num_elements > MAX_ELEMENTS:
            raise ValueError(f"it has more than {MAX_ELEMENTS} elements; send fewer")
        match element:
            case JsonSchema(json_schema=schema):
                _check_schema(schema)
            case Regex(pattern=pattern):
                _check_regex(pattern)
            case Grammar(grammar=grammar):
                _check_grammar(grammar)
            case TriggeredTags(triggers=triggers) if not all(triggers):
                raise ValueError("`triggers` must be a list of strings that are not empty")


def _elements(form: Format, depth: int) -> Iterator[tuple[Format, int]]:
    """Yield this element and all elements in it with their depths, up to just beyond the limit."""
    yield form, depth
    if depth > MAX_DEPTH:
        return
    match form:
        case SequenceFormat(elements=elements) | Or(elements=elements):
            within: Iterable[Format] = elements
        case TriggeredTags(tags=tags) | TagsWithSeparator(tags=tags):
            within = tags
        case Optional(content=content) | Tag(content=content):
            within = [content]
        case _:
            return
    for each in within:
        yield from _elements(each, depth + 1)


def expanded_size(pattern: str) -> int:
    """Return the characters of a regular expression with every counted repetition written out."""
    sizes, last = [0], 0
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at, last = at + 2, 1
        elif char == "[":
            at, last = _after_class(pattern, at), 1
        elif char == "(":
            sizes.append(0)
            at, last = at + 1, 0
            continue
        elif char == ")" and len(sizes) > 1:
            at, last = at + 1, sizes.pop()
        elif char == "{" and (match := _COUNT.match(pattern, at)):
            at, last = match.end(), last * max(0, _most(match) - 1)
        else:
            at, last = at + 1, 1
        sizes[-1] += last
        # A count right after an element repeats what was just added.
        if at < len(pattern) and pattern[at] == "{" and (match := _COUNT.match(pattern, at)):
            sizes[-1] += last * max(0, _most(match) - 1)
            last *= _most(match)
            at = match.end()
    return sum(sizes)


def _after_class(pattern: str, at: int) -> int:
    at += 2 if pattern[at + 1 : at + 2] in ("]", "^") else 1
    while at < len(pattern) and pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at + 1


def _most(match: re.Match[str]) -> int:
    """Return the larger number of a counted repetition."""
    return max([int(number[:12]) for number in match.groups() if number] or [1])
