"""`context_management` of Anthropic's API: edits that shorten a conversation before the model reads it.

Edits of types `clear_thinking_*` and `clear_tool_uses_*` change the translated messages; the answer names those that
were applied, and what they saved. Summaries (`compact_*`) are refused: a client has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from pagemill_api.openai.fields import Name, RequestModel, refusal
from pagemill_api.openai.schemas import ChatMessage
from pagemill_api.openai.unsupported import Unsupported
from pagemill_protocol.errors import show

CLEAR_THINKING, CLEAR_TOOL_USES = "clear_thinking_20251015", "clear_tool_uses_20250919"
CLEARED = "[The result of this tool was removed to shorten the conversation.]"
DEFAULT_KEPT_TURNS, DEFAULT_KEPT_USES = 1, 3
DEFAULT_TRIGGER_TOKENS = 100_000
MAX_EDITS = 16
Messages = Sequence[ChatMessage]
CountTokens = Callable[[Messages], int]
"""Returns the number of tokens of the prompt with these messages."""


class Amount(RequestModel):
    type: Literal["input_tokens", "tool_uses", "thinking_turns", "all"]
    value: int | None = Field(None, ge=0)


class Edit(RequestModel):
    type: str
    keep: Amount | Literal["all"] | None = None
    trigger: Amount | None = None
    clear_at_least: Amount | None = None
    exclude_tools: list[Name] = Field([], max_length=1024)
    clear_tool_inputs: bool | list[Name] = False

    def check(self, field: str) -> None:
        """Raise `PydanticCustomError` for an edit that is not done here, or amounts that do not belong to it."""
        if self.type not in (CLEAR_THINKING, CLEAR_TOOL_USES):
            raise refusal(
                f"{field}.type",
                f"Edits of type {show(self.type)} are not done here. Send {CLEAR_TOOL_USES} or {CLEAR_THINKING}, or "
                "shorten the messages before sending them.",
                "unsupported_parameter",
            )
        thinks = self.type == CLEAR_THINKING
        kept = self.keep if isinstance(self.keep, Amount) else None
        _check(kept, ("thinking_turns", "all") if thinks else ("tool_uses",), f"{field}.keep")
        if self.keep == "all" and not thinks:
            raise refusal(f"{field}.keep", 'Only thinking can be kept with "all". Send a number of tool uses.')
        _check(self.trigger, () if thinks else ("input_tokens", "tool_uses"), f"{field}.trigger")
        _check(self.clear_at_least, () if thinks else ("input_tokens",), f"{field}.clear_at_least")

    @property
    def needs_count(self) -> bool:
        """Whether the number of the prompt's tokens decides about it."""
        if self.type == CLEAR_THINKING:
            return False
        return self.clear_at_least is not None or self.trigger is None or self.trigger.type == "input_tokens"

    def cleared(self, messages: Messages, count: CountTokens) -> Applied | None:
        """Return the result of the edit, or None where it changes nothing."""
        if self.type == CLEAR_THINKING:
            return self._without_thinking(messages)
        return self._without_results(messages) if self._is_triggered(messages, count) else None

    def _is_triggered(self, messages: Messages, count: CountTokens) -> bool:
        trigger = self.trigger or Amount(type="input_tokens", value=DEFAULT_TRIGGER_TOKENS)
        if trigger.type == "tool_uses":
            return sum(message.role == "tool" for message in messages) > (trigger.value or 0)
        return count(messages) > (trigger.value or 0)

    def _without_thinking(self, messages: Messages) -> Applied | None:
        if self.keep == "all" or (isinstance(self.keep, Amount) and self.keep.type == "all"):
            return None
        kept = DEFAULT_KEPT_TURNS if self.keep is None or self.keep.value is None else self.keep.value
        turns = [*_turns(messages)]
        thinking = sorted({turn for turn, message in zip(turns, messages, strict=True) if message.reasoning_content})
        removed = {*thinking[: max(0, len(thinking) - kept)]}
        if not removed:
            return None
        edited = [
            message.model_copy(update={"reasoning_content": None}) if turn in removed else message
            for turn, message in zip(turns, messages, strict=True)
        ]
        return Applied(edited, self.type, "cleared_thinking_turns", len(removed))

    def _without_results(self, messages: Messages) -> Applied | None:
        kept = self.keep.value if isinstance(self.keep, Amount) else None
        names = {call["id"]: call["function"]["name"] for message in messages for call in message.tool_calls}
        results = [message.tool_call_id for message in messages if message.role == "tool"]
        before = results[: max(0, len(results) - (DEFAULT_KEPT_USES if kept is None else kept))]
        ids = {each for each in before if names.get(each) not in self.exclude_tools}
        edited = [self._without(message, ids) for message in messages]
        num_changed = sum(new is not old for new, old in zip(edited, messages, strict=True) if old.role == "tool")
        return Applied(edited, self.type, "cleared_tool_uses", num_changed) if num_changed else None

    def _without(self, message: ChatMessage, ids: set[str | None]) -> ChatMessage:
        if message.role == "tool" and message.tool_call_id in ids and message.content != CLEARED:
            return message.model_copy(update={"content": CLEARED})
        if not any(call["id"] in ids and self._clears_input(call) for call in message.tool_calls):
            return message
        calls = [
            {**call, "function": {**call["function"], "arguments": "{}"}}
            if call["id"] in ids and self._clears_input(call)
            else call
            for call in message.tool_calls
        ]
        return message.model_copy(update={"tool_calls": calls})

    def _clears_input(self, call: dict[str, Any]) -> bool:
        names = self.clear_tool_inputs
        return names if isinstance(names, bool) else call["function"]["name"] in names


class ContextManagement(RequestModel):
    UNSUPPORTED: ClassVar = {"compaction": Unsupported("Shorten the messages before sending them.")}

    edits: list[Edit] = Field([], max_length=MAX_EDITS)

    def check(self, field: str) -> None:
        for index, edit in enumerate(self.edits):
            edit.check(f"{field}.edits[{index}]")


class Applied(NamedTuple):
    """An edit that changed messages."""

    messages: Messages
    type: str
    counter: str
    """The name of `num` in the answer."""
    num: int


def apply(edits: Sequence[Edit], messages: Messages, count: CountTokens) -> tuple[Messages, list[dict[str, Any]]]:
    """Return the edited messages, and the applied edits as the answer names them."""
    reports = []
    for edit in edits:
        applied = edit.cleared(messages, count)
        if applied is None:
            continue
        saved = count(messages) - count(applied.messages)
        if edit.clear_at_least is not None and saved < (edit.clear_at_least.value or 0):
            continue
        messages = applied.messages
        reports.append({"type": applied.type, applied.counter: applied.num, "cleared_input_tokens": saved})
    return messages, reports


def _check(amount: Amount | None, kinds: Sequence[str], field: str) -> None:
    if amount is None or (amount.type in kinds and (amount.value is not None or amount.type == "all")):
        return
    if not kinds:
        raise refusal(field, f"This edit has no such amount, got {amount.type}. Remove it.")
    raise refusal(field, f"It must have a type of {' or '.join(kinds)} and a `value`, got {amount.type}.")


def _turns(messages: Messages) -> Iterator[int]:
    """Yield the number of the assistant's turn for each message: calls, their results, and texts beside these results
    are one turn."""
    turn, before = 0, ""
    for message in messages:
        if message.role == "user" and before not in ("tool", "user"):
            turn += 1
        yield turn
        before = message.role if message.role != "system" else before
