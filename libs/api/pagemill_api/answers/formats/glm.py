"""GLM-4.5's format: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagemill_api.answers.formats.tagged import TaggedParser, Tags, syntax_of

KEY = "<arg_key>"
_TAGS = Tags(
    "<tool_call>", "</tool_call>", function="", name_end="", function_end="", parameter=KEY, key_end="</arg_key>",
    value="<arg_value>", value_end="</arg_value>", around="",
)  # fmt: skip
SYNTAX = syntax_of(_TAGS)


class GlmParser(TaggedParser):
    def __init__(self, string_parameters: Mapping[str, Sequence[str]]) -> None:
        super().__init__(_TAGS, string_parameters)

    def _opening(self) -> bool:
        """Read the name, which ends with its line, or where the first key or the call's end begins."""
        if not self._held:
            self._buffer = self._buffer.lstrip()
        text, marker = self._take("\n", KEY, self._tags.call_end, releases=False)
        self._held += text
        if not marker:
            return False
        name, self._held = self._held, ""
        if not name.strip() or any(char.isspace() or char in "{<" for char in name.strip()):
            self._content(self._tags.call + name)
            self._buffer = marker + self._buffer
            self._state = self._text
            return True
        self._buffer = marker + self._buffer
        self._named(name)
        return True
