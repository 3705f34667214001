"""Writes a form (`StructuredOutputs`) as the grammar that llguidance compiles.

Gateways check it (`check`), engines compile it: both call this. Raises `ValueError` with the reason for a form that
cannot be written.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from pagemill_protocol.structured_outputs import StructuredOutputs

WHITESPACE = r"( |\n[ \t]{0,24})?"
"""Between the tokens of JSON: a space, or a line break and indentation. Small models would go on with it for long."""
_JSON: Any = {"whitespace_pattern": WHITESPACE}
_ANY_TEXT = r"/(.|\n)*/"


def grammar_text(outputs: StructuredOutputs, special_tokens: Collection[str] = ()) -> str:
    """`special_tokens`: those that a structural tag's trigger may spell."""
    match outputs.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(outputs.json_schema, overrides=_JSON)
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type":"object"}', overrides=_JSON)
        case "regex":
            return f"start: /{regex_to_lark(outputs.regex, 'd')}/"
        case "choice":
            return "start: " + " | ".join(json.dumps(text) for text in outputs.choice)
        case "grammar":
            return _lark(outputs.grammar)
        case _:
            return _tags(json.loads(outputs.structural_tag), special_tokens)


def _lark(text: str) -> str:
    """Lark as it is; GBNF converted."""
    if "::=" not in text:
        return text
    try:
        return str(any_to_lark(text))
    except Exception as error:  # the converter raises plain `Exception`
        raise ValueError(f"it is not GBNF: {error}") from None


def _tags(tag: dict[str, Any], special_tokens: Collection[str]) -> str:
    structures, triggers = tag["structures"], tag["triggers"]
    rules = []
    for index, structure in enumerate(structures):
        trigger = next((each for each in triggers if structure["begin"].startswith(each)), None)
        if trigger is None:
            raise ValueError(f"begin {structure['begin'][:80]!r} of a structure starts with none of the triggers")
        rest = " ".join(json.dumps(each) for each in (structure["begin"][len(trigger) :],) if each)
        end = json.dumps(structure["end"]) if structure["end"] else ""
        schema = _with_whitespace(structure["schema"])
        body = f"{rest} %json {json.dumps(schema)} {end}"
        if trigger in special_tokens:
            rules.append(f"tag_{index}: TEXT {trigger} {body}")
        else:
            rules.append(f"tag_{index}_begin[lazy]: TEXT {json.dumps(trigger)}\ntag_{index}: tag_{index}_begin {body}")
    options = " | ".join(f"tag_{index}" for index in range(len(structures)))
    return f"%llguidance {{}}\nstart: ({options})* last\nlast: TEXT\nTEXT: {_ANY_TEXT}\n" + "\n".join(rules) + "\n"


def _with_whitespace(schema: Any) -> Any:
    if schema is True:
        schema = {}
    return {**schema, "x-guidance": _JSON} if isinstance(schema, dict) else schema
