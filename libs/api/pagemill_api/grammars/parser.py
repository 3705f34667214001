"""The limits of llguidance on one grammar, and its errors in words: for checks and for compilation."""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits

MAX_GRAMMAR_SYMBOLS = 50_000
MAX_LEXER_STATES = 50_000
"""Each state takes one or two kilobytes."""
MAX_MESSAGE_CHARS = 500


def parser_limits() -> LLParserLimits:
    """Return the limits of llguidance on one grammar."""
    return LLParserLimits(max_grammar_size=MAX_GRAMMAR_SYMBOLS, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def fault_of(matcher: LLMatcher) -> str:
    """Return the error of a new grammar, or an empty text."""
    if not matcher.is_error() and not matcher.is_stopped():
        return ""
    error = " ".join(matcher.get_error().split("<backtrace>")[0].removesuffix("<non-verbose/>").split())
    if not error or error.startswith("NoExtension"):
        return "nothing fits it"
    if error.startswith("oneOf constraints"):
        return "options of oneOf may overlap; send anyOf, or give each option a required constant"
    return error[:MAX_MESSAGE_CHARS]
