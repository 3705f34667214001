"""Structured outputs: the form that a request prescribes for its answer, as one immutable value.

Clients' dialects and the offline API build it, `SamplingParams` carries it to the engine. `pagemill_api.grammars`
checks it and writes it as a grammar, `pagemill_engine.grammar` constrains answers to it.
"""

from __future__ import annotations

import msgspec

from pagemill_protocol.errors import invalid_field
from pagemill_protocol.request.keywords import CheckedKeywords

DEFAULT_FORM_CHARS = 1024 * 1024
"""Limit on a form as a request sends it, where no setting (`max_form_chars`) says otherwise."""
MAX_SOURCE_CHARS = 2 * 1024 * 1024
"""Limit on a schema, a grammar or a structural tag (with the schemas of all strict tools), whatever the setting."""
MAX_REGEX_CHARS = 8 * 1024
MAX_OPTIONS = 2048
MAX_OPTION_CHARS = 4096


class StructuredOutputs(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, metaclass=CheckedKeywords):
    """The form of an answer. Exactly one of the fields is set."""

    json_schema: str = ""
    """JSON text of a JSON schema for which the answer is valid."""
    json_object: bool = False
    """The answer is a JSON object."""
    regex: str = ""
    """A regular expression that matches the whole answer."""
    choice: tuple[str, ...] = ()
    """The answer is one of these texts."""
    grammar: str = ""
    """A context-free grammar in Lark's syntax or in GBNF."""
    structural_tag: str = ""
    """JSON text: `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`. The answer is free text in which
    each tag that a trigger begins contains JSON that is valid for the schema of its structure."""

    @property
    def kind(self) -> str:
        """Name of the field that is set."""
        return next(name for name in self.__struct_fields__ if getattr(self, name))

    def validate(self, param: str = "structured_outputs") -> None:
        """Raise `PagemillError` (400) unless exactly one form is set and its size allows compiling it."""
        given = [name for name in self.__struct_fields__ if getattr(self, name)]
        if len(given) != 1:
            names = ", ".join(self.__struct_fields__)
            found = " and ".join(given) or "none"
            raise invalid_field(param, f"{param} must have exactly one of {names}, but it has {found}.")
        for name in ("json_schema", "grammar", "structural_tag"):
            _check_size(param, name, getattr(self, name), MAX_SOURCE_CHARS)
        _check_size(param, "regex", self.regex, MAX_REGEX_CHARS)
        self._check_choice(param)

    def _check_choice(self, param: str) -> None:
        if len(self.choice) > MAX_OPTIONS:
            raise invalid_field(
                param, f"{param} offers {len(self.choice)} choices; at most {MAX_OPTIONS} are allowed. Offer fewer."
            )
        for text in self.choice:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_OPTION_CHARS:
                raise invalid_field(
                    param, f"Each choice of {param} must be a string of 1 to {MAX_OPTION_CHARS} characters."
                )


def _check_size(param: str, name: str, text: str, most: int) -> None:
    if not isinstance(text, str):
        raise invalid_field(param, f"{name} of {param} must be a string, got {type(text).__name__}.")
    if len(text) > most:
        raise invalid_field(
            param, f"The {name} of {param} has {len(text)} characters; at most {most} are allowed. Send a smaller one."
        )
