"""The token counts of a chat's prompt behind which other prompts are likely to go on differently.

These are the end of system text and tools, which other conversations share, and the end of the messages, before what
asks for the answer: the next turn has the answer there instead. Engines of models with recurrent layers keep a state
behind them; others resume behind any block. They are hints: a wrong one costs a state. `openai.prepare` calls this,
`segments` finds the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagemill_api.text.tokenizer import Tokenizer


def reuse_points(
    tokenizer: Tokenizer, text: str, messages: Sequence[Mapping[str, Any]], token_ids: Sequence[int]
) -> list[int]:
    """Return rising token counts of the prompt `text`, which are behind special tokens of it."""
    if not (marks := tokenizer.marks(text, token_ids)):
        return []
    found = set()
    num_leading = next((place for place, each in enumerate(messages) if not _is_system(each)), 0)
    leading_end = _end_of(text, messages[:num_leading], 0)
    first = text.find(_text_of(messages[num_leading]), leading_end) if num_leading < len(messages) else -1
    if first > 0:
        found |= {max((count for end, count in marks if end <= first), default=0)}
    end = _end_of(text, messages[-1:], text.rfind(_text_of(messages[-1])))
    if end > 0:
        found |= {min((count for mark, count in marks if mark > end), default=0)}
    return sorted(count for count in found if 0 < count < len(token_ids))


def points_of_plain(tokenizer: Tokenizer, num_tokens: int) -> list[int]:
    """Return the point of a prompt that is no chat: its end, where an equal prompt computes only its last tokens."""
    return [num_tokens - 1] if tokenizer.bundle.has_states and num_tokens > 1 else []


def _is_system(message: Mapping[str, Any]) -> bool:
    return message["role"] in ("system", "developer")


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content.strip() if isinstance(content, str) else ""


def _end_of(text: str, messages: Sequence[Mapping[str, Any]], start: int) -> int:
    """Return where the last of the messages ends in the prompt, looking from `start` on; 0: it is not there."""
    written = _text_of(messages[-1]) if messages else ""
    place = text.find(written, max(0, start)) if written else -1
    return place + len(written) if place >= 0 else 0
