"""Fill-in-the-middle prompts for text between a beginning and an end: `suffix` of completions.

Models that were trained for it have three special tokens, and read beginning and end before they write the middle. The
vocabulary shows which tokens; models without them would answer with anything, so such requests are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pagemill_protocol.errors import invalid_field

if TYPE_CHECKING:
    from pagemill_api.text.tokenizer import Tokenizer


class Markers(NamedTuple):
    before_prefix: str
    before_suffix: str
    before_middle: str


KNOWN = (
    Markers("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    Markers("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite code
    Markers("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    Markers("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
)


def fill_in_middle(tokenizer: Tokenizer, prefix: str, suffix: str) -> str:
    """Return the text of the prompt. Raises `PagemillError` 400 for a model without the tokens."""
    for markers in KNOWN:
        if all(tokenizer.has_token(each) for each in markers):
            return f"{markers.before_prefix}{prefix}{markers.before_suffix}{suffix}{markers.before_middle}"
    raise invalid_field(
        "suffix",
        "`suffix` asks for the text between `prompt` and it, and this model has no tokens for that "
        f"({', '.join(each.before_middle for each in KNOWN)}). Put all text into `prompt`.",
    )
