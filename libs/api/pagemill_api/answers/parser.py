"""The parser of one answer: reasoning first, then tool calls, without the white space between the parts."""

from __future__ import annotations

from pagemill_api.answers.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Parser,
    Reasoning,
)
from pagemill_api.answers.registry import HARMONY, reasoning_parser, tool_parser
from pagemill_protocol.request.answer_format import AnswerFormat


class AnswerParser:
    """Parses the text of one choice; see `events.Parser`."""

    def __init__(self, answer_format: AnswerFormat) -> None:
        self._format = answer_format
        is_harmony = HARMONY in (answer_format.tools, answer_format.reasoning)
        reasons = answer_format.reasoning and not is_harmony
        self._reasoning: Parser | None = reasoning_parser(answer_format) if reasons else None
        self._tools: Parser | None = None
        if is_harmony or answer_format.tools:
            self._tools = tool_parser(HARMONY if is_harmony else answer_format.tools, answer_format.string_parameters)
        self.num_calls = 0
        self._num_ended = 0
        self._space = ""
        """White space that has been read and may be dropped."""
        self._at_start: type[Event] | None = None
        """The kind of part whose leading white space is dropped."""
        self._last: type[Event] | None = None

    @property
    def in_reasoning(self) -> bool:
        return any(each is not None and each.in_reasoning for each in (self._reasoning, self._tools))

    @property
    def has_complete_calls(self) -> bool:
        """Whether the answer has calls, of which those that the client gets are complete."""
        num_shown = self.num_calls if self._format.parallel else min(1, self.num_calls)
        return 0 < num_shown <= self._num_ended

    def push(self, text: str) -> list[Event]:
        events: list[Event] = [Content(text)] if self._reasoning is None else self._reasoning.push(text)
        return self._cleaned(self._with_calls(events))

    def finish(self) -> list[Event]:
        events = self._with_calls(self._reasoning.finish() if self._reasoning is not None else [])
        events += self._tools.finish() if self._tools is not None else []
        if self._format.forced:
            events = [event for event in events if not isinstance(event, Content)]
        cleaned = self._cleaned(events)
        if self._space and self._last is Content and not self.num_calls:
            cleaned.append(Content(self._space))
        return cleaned

    def _with_calls(self, events: list[Event]) -> list[Event]:
        if self._tools is None:
            return events
        found: list[Event] = []
        for event in events:
            found += self._tools.push(event.text) if isinstance(event, Content) else [event]
        return found

    def _cleaned(self, events: list[Event]) -> list[Event]:
        kept: list[Event] = []
        for event in events:
            if isinstance(event, Content | Reasoning):
                kept += self._trimmed(event)
                continue
            if isinstance(event, CallBegin):
                self.num_calls += 1
                self._space, self._last = "", CallBegin
            self._num_ended += isinstance(event, CallEnd)
            if isinstance(event, CallBegin | CallArguments):
                event = event._replace(call=self.num_calls - 1)
            if self.num_calls == 1 or self._format.parallel:
                kept.append(event)
        return kept

    def _trimmed(self, event: Content | Reasoning) -> list[Event]:
        """Return the event without white space at the ends of a part.

        Text that follows neither calls nor reasoning keeps its leading white space.
        """
        if type(event) is not self._last:
            starts_answer = self._last is None and isinstance(event, Content)
            self._space = self._space if starts_answer else ""
            self._at_start = None if starts_answer else type(event)
            self._last = type(event)
        text = self._space + event.text
        if self._at_start is type(event):
            text = text.lstrip()
        body = text.rstrip()
        self._space = text[len(body) :]
        if not body:
            return []
        self._at_start = None
        if isinstance(event, Reasoning):
            return [Reasoning(body)] if self._format.shows_reasoning else []
        return [Content(body)]
