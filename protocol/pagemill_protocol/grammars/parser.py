"""What llguidance may spend on one grammar, and its faults in words: the same where forms are checked and compiled."""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits

MAX_GRAMMAR_SYMBOLS = 50_000
MAX_LEXER_STATES = 50_000
"""Each takes one or two kilobytes."""
MAX_MESSAGE_CHARS = 500


def parser_limits() -> LLParserLimits:
    """What llguidance may spend on one grammar."""
    return LLParserLimits(max_grammar_size=MAX_GRAMMAR_SYMBOLS, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def fault_of(matcher: LLMatcher) -> str:
    """What is wrong with a new grammar; empty if it is not."""
    if not matcher.is_error() and not matcher.is_stopped():
        return ""
    error = " ".join(matcher.get_error().split("<backtrace>")[0].removesuffix("<non-verbose/>").split())
    if not error or error.startswith("NoExtension"):
        return "nothing fits it"
    if error.startswith("oneOf constraints"):
        return "options of oneOf may overlap; send anyOf, or give each option a required constant"
    return error[:MAX_MESSAGE_CHARS]
