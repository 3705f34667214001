"""Write a form (`StructuredOutputs`) as the grammar that llguidance compiles.

Gateways check grammars (`check`), engines compile them: both call this module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from llguidance import LLMatcher, regex_to_lark

from pagemill_api.grammars.lark import as_lark
from pagemill_api.grammars.schemas.rewriting import writable
from pagemill_api.grammars.structure import JSON_OPTIONS, structure_text
from pagemill_api.structural_tags import read_tag
from pagemill_protocol.request.structured_outputs import StructuredOutputs

_NO_TOKENS: Mapping[str, int] = {}


def grammar_text(outputs: StructuredOutputs, special_tokens: Mapping[str, int] = _NO_TOKENS) -> str:
    """Return the grammar of a form. Raises `ValueError` with the reason for a form that cannot be written.

    `special_tokens`: ids by text of the special tokens that a structural tag may contain.
    """
    match outputs.kind:
        case "json_schema":
            schema = json.dumps(writable(json.loads(outputs.json_schema)))
            return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type":"object"}', overrides=JSON_OPTIONS)
        case "regex":
            return f"start: /{regex_to_lark(outputs.regex, 'd')}/"
        case "choice":
            return "start: " + " | ".join(json.dumps(text) for text in outputs.choice)
        case "grammar":
            return as_lark(outputs.grammar)
        case _:
            return structure_text(read_tag(json.loads(outputs.structural_tag)), special_tokens)
