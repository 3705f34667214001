"""The items of an answer while they are written: their fields, their events, and how text becomes a field.

`render` opens an item, pushes text and closes it. Calls arrive as JSON text of arguments; those of a custom tool become
its plain input, those of the local shell and of a search an object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, ClassVar

from pagemill_api.dialects.openai_responses.opaque import sealed
from pagemill_api.dialects.openai_responses.tools import INPUT, ClientTool
from pagemill_api.openai.call_parts import arguments_object, partial_object
from pagemill_protocol.json_pieces import JsonPieces, JsonRows, array_pieces, joined_array

Fields = dict[str, Any]
Part = tuple[str, Fields]
"""The type of an event without `response.`, and its fields."""


class AnswerItem:
    """One item. `fields` is what clients see of it, and changes until it is closed."""

    prefix: ClassVar[str]
    """Of its id."""
    delta: ClassVar[str] = ""
    """Type of the events with its text; empty: there are none."""
    place: ClassVar[Fields] = {}
    """Fields of each event with text, besides those of all events of items."""
    is_call: ClassVar[bool] = False

    def __init__(self, **fields: Any) -> None:
        self.fields: Fields = fields
        self._text: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._text)

    def opening(self) -> Iterator[Part]:
        """Yield the events after the one that adds the item."""
        return iter(())

    def push(self, text: str) -> str:
        """Take the next text of the answer; return what clients see of it now."""
        self._text.append(text)
        return text

    def close(self) -> Iterator[Part]:
        """Set the last fields; yield the events before the one that ends the item."""
        return iter(())

    def cut(self) -> None:
        """Set the last fields of a call that is not complete."""


class _PartItem(AnswerItem):
    """An item with one part of content."""

    place: ClassVar[Fields] = {"content_index": 0}

    def part(self, text: str) -> Fields:
        raise NotImplementedError

    def done(self, text: str) -> Part:
        raise NotImplementedError

    def opening(self) -> Iterator[Part]:
        yield "content_part.added", {**self.place, "part": self.part("")}

    def close(self) -> Iterator[Part]:
        part = self.part(self.text)
        self.fields["content"] = [part]
        yield self.done(self.text)
        yield "content_part.done", {**self.place, "part": part}


class MessageItem(_PartItem):
    prefix = "msg"
    delta = "output_text.delta"

    def __init__(self, *, logprobs: JsonRows, json: JsonPieces | None) -> None:
        """`logprobs`: those of its text so far. `json`: writes the body, if the answer is not streamed."""
        super().__init__(type="message", role="assistant", content=[])
        self.logprobs = logprobs
        self._json = json

    def part(self, text: str) -> Fields:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._all_logprobs()}

    def done(self, text: str) -> Part:
        return "output_text.done", {**self.place, "text": text, "logprobs": self._all_logprobs()}

    def _all_logprobs(self) -> Any:
        if not self.logprobs.num_bytes:
            return []
        return joined_array(self.logprobs) if self._json is None else self._json.part(array_pieces(self.logprobs))


class ReasoningItem(_PartItem):
    prefix = "rs"
    delta = "reasoning_text.delta"

    def __init__(self, *, is_sealed: bool) -> None:
        """`is_sealed`: the client asked for the reasoning in the form in which it sends it back."""
        super().__init__(type="reasoning", summary=[], content=[])
        self._is_sealed = is_sealed

    def part(self, text: str) -> Fields:
        return {"type": "reasoning_text", "text": text}

    def done(self, text: str) -> Part:
        if self._is_sealed:
            self.fields["encrypted_content"] = sealed(text)
        return "reasoning_text.done", {**self.place, "text": text}


class FunctionCallItem(AnswerItem):
    prefix = "fc"
    delta = "function_call_arguments.delta"
    is_call = True

    def __init__(self, tool: ClientTool, call_id: str) -> None:
        super().__init__(type="function_call", call_id=call_id, name=tool.name, **_namespace(tool), arguments="")

    def close(self) -> Iterator[Part]:
        self.cut()
        yield "function_call_arguments.done", {"arguments": self.text, "name": self.fields["name"]}

    def cut(self) -> None:
        self.fields["arguments"] = self.text


class CustomCallItem(AnswerItem):
    prefix = "ctc"
    delta = "custom_tool_call_input.delta"
    is_call = True

    def __init__(self, tool: ClientTool, call_id: str) -> None:
        super().__init__(type="custom_tool_call", call_id=call_id, name=tool.name, **_namespace(tool), input="")
        self._input = InputText()

    def push(self, text: str) -> str:
        shown = self._input.push(text)
        self._text.append(shown)
        return shown

    def close(self) -> Iterator[Part]:
        if rest := self._input.rest():
            self._text.append(rest)
            yield self.delta, {"delta": rest}
        self.cut()
        yield "custom_tool_call_input.done", {INPUT: self.text}

    def cut(self) -> None:
        self.fields[INPUT] = self.text


class ShellCallItem(AnswerItem):
    prefix = "lsh"
    is_call = True

    def __init__(self, tool: ClientTool, call_id: str) -> None:
        action = {"type": "exec", "command": [], "env": {}}
        super().__init__(type="local_shell_call", call_id=call_id, action=action)

    def close(self) -> Iterator[Part]:
        self._act(arguments_object(self.text))
        return iter(())

    def cut(self) -> None:
        self._act(partial_object(self.text))

    def _act(self, given: Fields) -> None:
        command = given.get("command")
        words = command if isinstance(command, list) else ["bash", "-lc", command] if isinstance(command, str) else []
        self.fields["action"] = {"type": "exec", "env": {}, **given, "command": [str(word) for word in words]}


class SearchCallItem(AnswerItem):
    prefix = "tsc"
    is_call = True

    def __init__(self, tool: ClientTool, call_id: str) -> None:
        super().__init__(type="tool_search_call", execution="client", call_id=call_id, arguments={})

    def close(self) -> Iterator[Part]:
        self.fields["arguments"] = arguments_object(self.text)
        return iter(())

    def cut(self) -> None:
        self.fields["arguments"] = partial_object(self.text)


CALLS = {
    "function": FunctionCallItem,
    "custom": CustomCallItem,
    "local_shell": ShellCallItem,
    "tool_search": SearchCallItem,
}
"""The items of calls, by the kind of their tool."""


class InputText:
    """The text of the one argument of a custom tool, read from the JSON text of its arguments as it comes."""

    _BEGIN = re.compile(r'\s*\{\s*"' + INPUT + r'"\s*:\s*"')
    _WHOLE = re.compile(r'(?:[^"\\]|\\[^u]|\\u[0-9a-fA-F]{4})*')
    _HIGH = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")
    """The first half of a character, of which the second half follows."""

    def __init__(self) -> None:
        self._all = ""
        """All text, until the input has begun."""
        self._held = ""
        """The beginning of a character within the input."""
        self._is_within = self._has_begun = False

    def push(self, text: str) -> str:
        """Return the next text of the input."""
        if not self._has_begun:
            self._all += text
            begin = self._BEGIN.match(self._all)
            if begin is None:
                return ""
            self._has_begun = self._is_within = True
            text, self._all = self._all[begin.end() :], ""
        if not self._is_within:
            return ""
        self._held += text
        whole = self._WHOLE.match(self._held)
        assert whole is not None  # it matches the empty text
        end = whole.end()
        self._is_within = self._held[end : end + 1] != '"'
        if self._is_within and (high := self._HIGH.search(self._held, 0, end)):
            end = high.start()
        shown, self._held = self._held[:end], self._held[end:]
        return _decoded(shown)

    def rest(self) -> str:
        """Return what a complete call has beyond what `push` returned: the input of a call in another form."""
        if self._has_begun:
            return ""
        found = arguments_object(self._all)
        texts = [value for value in found.values() if isinstance(value, str)]
        given = found.get(INPUT)
        if isinstance(given, str):
            return given
        return texts[0] if len(found) == len(texts) == 1 else self._all


def _decoded(text: str) -> str:
    """Return the text that the inside of a JSON string encodes, without lone surrogates."""
    try:
        found: str = json.loads(f'"{text}"', strict=False)
    except ValueError:  # an escape that JSON does not have
        return text
    return found if found.isascii() else found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _namespace(tool: ClientTool) -> Fields:
    return {"namespace": tool.namespace} if tool.namespace else {}
