"""Write the elements of a structural tag as a grammar in Lark's syntax, as llguidance reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from llguidance import regex_to_lark

from pagemill_api.grammars.lark import as_lark
from pagemill_api.grammars.schemas.rewriting import writable
from pagemill_api.structural_tags import (
    AnyText,
    ConstString,
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
)
from pagemill_protocol.errors import show

WHITESPACE = r"( |\n[ \t]{0,24})?"
"""White space between the tokens of JSON: a space, or a line break and indentation. Without the limit, small models
generate white space for long."""
JSON_OPTIONS: Any = {"whitespace_pattern": WHITESPACE}
_HEAD = "%llguidance {}\nTEXT: /(.|\\n)*/\n"


def structure_text(form: Format, special_tokens: Mapping[str, int]) -> str:
    """Return the grammar of a structural tag. Raises `ValueError`.

    `special_tokens`: ids by text of the special tokens that fixed text may contain.
    """
    writer = _Writer(special_tokens)
    start = writer.expression(form)
    return f"{_HEAD}start: {start}\n" + "".join(f"{rule}\n" for rule in writer.rules)


class _Writer:
    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self._special_tokens = special_tokens
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if special_tokens else None

    def expression(self, form: Format) -> str:
        match form:
            case ConstString(value=value):
                return _joined(self._literal(value))
            case JsonSchema(json_schema=schema):
                return f"%json {json.dumps(_with_whitespace(writable(schema)))}"
            case Regex(pattern=pattern):
                return f"/{regex_to_lark(pattern, 'd')}/"
            case Grammar(grammar=grammar):
                return self._rule(f"%lark {{\n{as_lark(grammar)}\n}}")
            case AnyText():
                return "TEXT"
            case SequenceFormat(elements=elements):
                if any(isinstance(each, AnyText) for each in elements[:-1]):
                    raise ValueError("any_text must be the last element of its sequence, or in a tag with an end")
                return _joined(map(self._group, elements))
            case Or(elements=elements):
                return self._either(elements)
            case Optional(content=content):
                return f"({self.expression(content)})?"
            case Tag(begin=begin, content=content, end=end):
                return _joined([*self._literal(begin), self._until(content, end)])
            case TriggeredTags():
                return self._triggered(form)
            case TagsWithSeparator(tags=tags, separator=separator, stop_after_first=stops):
                one = self._rule(self._either(tags))
                return one if stops else f"{one} ({_joined([*self._literal(separator), one])})*"

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def _group(self, form: Format) -> str:
        return f"({self.expression(form)})" if isinstance(form, Or | TriggeredTags) else self.expression(form)

    def _either(self, forms: Iterable[Format]) -> str:
        options = [self.expression(each) for each in forms]
        if not options:
            raise ValueError("it offers a choice among nothing; give at least one element or tag")
        return " | ".join(options)

    def _until(self, content: Format, end: str) -> str:
        if isinstance(content, AnyText) and end:
            return self._text_until(end)
        return _joined([self._group(content), *self._literal(end)])

    def _text_until(self, marker: str) -> str:
        """Return an expression of free text up to and including the first `marker`."""
        first, *others = self._literal(marker)
        if first.startswith('"'):
            return _joined([self._rule(f"TEXT {first}", "[lazy]"), *others])
        return _joined(["TEXT", first, *others])

    def _triggered(self, form: TriggeredTags) -> str:
        rests: dict[str, list[Format]] = {trigger: [] for trigger in form.triggers if trigger}
        for tag in form.tags:
            trigger = next((each for each in rests if tag.begin.startswith(each)), None)
            if trigger is None:
                raise ValueError(f"begin {show(tag.begin)} of a structure starts with none of the triggers")
            rests[trigger].append(Tag(begin=tag.begin[len(trigger) :], content=tag.content, end=tag.end))
        options = [f"{self._text_until(trigger)} ({self._either(tags)})" for trigger, tags in rests.items() if tags]
        if not options:
            raise ValueError("it has no tags and triggers; give at least one of both")
        tags = " | ".join(options)
        return f"{tags} | TEXT" if form.stop_after_first else f"({tags})* TEXT"

    def _literal(self, text: str) -> list[str]:
        """Return the expressions of a fixed text, with its special tokens as token ids."""
        pieces = self._special.split(text) if self._special is not None else [text]
        special = self._special_tokens
        return [f"<[{special[each]}]>" if each in special else json.dumps(each) for each in pieces if each]


def _joined(expressions: Iterable[str]) -> str:
    return " ".join(each for each in expressions if each) or '""'


def _with_whitespace(schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
    if schema is True:
        schema = {}
    return {**schema, "x-guidance": JSON_OPTIONS} if isinstance(schema, dict) else schema
