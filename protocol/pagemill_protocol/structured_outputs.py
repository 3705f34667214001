"""What an answer must look like: the form that a request prescribes, as one immutable value.

Clients' dialects and the offline API build it, `SamplingParams` carries it to the engine, which compiles it into a
grammar. Nothing here compiles or reads a schema: `pagemill_engine.grammar` does.
"""

from __future__ import annotations

import msgspec


class StructuredOutputs(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Exactly one of the fields is set."""

    json_schema: str = ""
    """JSON text of a JSON schema that the answer is valid for."""
    json_object: bool = False
    """Any JSON object."""
    regex: str = ""
    """A regular expression that matches the whole answer."""
    choice: tuple[str, ...] = ()
    """The answer is one of these texts."""
    grammar: str = ""
    """A context-free grammar in Lark's syntax or in GBNF."""
    structural_tag: str = ""
    """JSON text: `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`. Free text, in which each tag that
    a trigger begins holds JSON that is valid for the schema of its structure."""
