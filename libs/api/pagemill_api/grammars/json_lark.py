"""Rewrite a grammar in Lark's syntax so that it describes the same text as it stands inside a JSON string.

Models write the input of a custom tool as a JSON string, so a line break is the two characters `\\n` there. Characters
that JSON escapes become their escapes, and sets of characters offer the escapes of those they contain. The compiler's
lexer looks one byte ahead, and all escapes begin with the same one: regular expressions and terminals become rules,
whose terminals are single escapes and runs of other characters. Pure; `lark` reads clients' grammars, `source` compiles
them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

from pagemill_protocol.errors import show

ESCAPED = '"\\' + "".join(map(chr, range(0x20)))
"""The characters that JSON writes as escapes."""
_NOT_ESCAPED = r'[^"\\\x00-\x1F]'
_COMMON = {
    "LF": r"/\n/",
    "CR": r"/\r/",
    "NEWLINE": r"/(\r?\n)+/",
    "WS": r"/[ \t\f\r\n]+/",
    "WS_INLINE": r"/[ \t]+/",
    "DIGIT": "/[0-9]/",
    "HEXDIGIT": "/[a-fA-F0-9]/",
    "INT": "/[0-9]+/",
    "SIGNED_INT": "/[+-]?[0-9]+/",
    "DECIMAL": r"/[0-9]+\.[0-9]*|\.[0-9]+/",
    "NUMBER": r"/([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?/",
    "SIGNED_NUMBER": r"/[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?/",
    "LCASE_LETTER": "/[a-z]/",
    "UCASE_LETTER": "/[A-Z]/",
    "LETTER": "/[A-Za-z]/",
    "WORD": "/[A-Za-z]+/",
    "CNAME": "/[A-Za-z_][A-Za-z_0-9]*/",
    "ESCAPED_STRING": r'/"([^"\\\n]|\\.)*"/',
}
"""The terminals of Lark's library `common`."""
_TEXT = r'"(?:[^"\\\n]|\\.)*"'
_TOKEN = re.compile(
    rf"(?P<comment>//[^\n]*)|(?P<range>{_TEXT}\s*\.\.\s*{_TEXT})|(?P<text>{_TEXT})(?P<flag>i?)"
    r"|/(?P<regex>(?:[^/\\\n]|\\.)+)/(?P<flags>[a-z]*)|%import[ \t]+(?P<import>[^\n]*)|(?P<directive>%\w+)"
    r"|(?P<other>[^\"/%<]+)",
)
_ATOM = re.compile(
    r"\[(?P<set>\^?\]?(?:[^\]\\]|\\.)*)\]|\\x(?P<hex>[0-9A-Fa-f]{2})|\\u(?P<wide>[0-9A-Fa-f]{4})"
    r"|(?P<plain>\\[dw]|\\p\{(?:L|Lu|Ll|N|Nd)\})|(?P<category>\\[sSDW])|\\(?P<control>[nrtfv0])|\\(?P<quoted>[^A-Za-z0-9])"
    r"|(?P<syntax>\((?:\?:|(?!\?))|[)|*+?]|\{\d*,?\d*\})|(?P<dot>\.)|(?P<char>[^\\\[\](){}^$*+?|.])",
    re.DOTALL,
)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_TERMINAL = re.compile(r"\b(_?[A-Z][A-Z0-9_]*)\b(?:\.\d+(?=\s*:))?")
"""The name of a terminal, perhaps with its priority."""
_IMPORTED = re.compile(r"common\s*(?:\.\s*(\w+)|\(([\w\s,]+)\))\s*(->.*)?")


def inside_json(grammar: str) -> str:
    """Return the grammar of the text as JSON writes it. Raises `ValueError` for what cannot be rewritten."""
    names: list[str] = []
    pieces = [_rewritten(found, names) for found in _tokens(_TOKEN, grammar)]
    defined = (f"{_rule(name)}: {_expression(_COMMON[name][1:-1])}" for name in dict.fromkeys(names))
    return "\n".join(["".join(pieces), *defined]) + "\n"


def _tokens(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    at = 0
    while at < len(text):
        found = pattern.match(text, at)
        if found is None or found.end() == at:
            raise ValueError(
                f"it has {show(text[at : at + 10])} at character {at}, which cannot be written inside JSON"
            )
        yield found
        at = found.end()


def _rewritten(found: re.Match[str], imported: list[str]) -> str:
    if (text := found["text"]) is not None:
        value = json.loads(text)
        escaped = _escaped(value)
        if found["flag"] and escaped != value:
            raise ValueError(f"{text}i has characters that JSON escapes, whose case cannot be ignored")
        return json.dumps(escaped, ensure_ascii=False) + found["flag"]
    if found["range"] is not None:
        first, last = (json.loads(each) for each in re.findall(_TEXT, found["range"]))
        return _set(f"[{re.escape(first)}-{re.escape(last)}]")
    if (regex := found["regex"]) is not None:
        if found["flags"].strip("s"):
            raise ValueError(f"the flags of /{regex[:40]}/{found['flags']} are not supported inside JSON")
        return _expression(regex, dot_all="s" in found["flags"])
    if found["import"] is not None:
        imported += _imports(found["import"])
        return ""
    if found["directive"] is not None:
        raise ValueError(f"{found['directive']} is not supported inside JSON")
    if found["comment"] is not None:
        return ""
    return _TERMINAL.sub(lambda name: _rule(name[1]), found[0])


def _rule(terminal: str) -> str:
    """Return the name of the rule that stands for a terminal."""
    return f"terminal_{terminal.lower()}"


def _imports(text: str) -> list[str]:
    found = _IMPORTED.fullmatch(text.partition("//")[0].strip())
    names = re.findall(r"\w+", found[1] or found[2]) if found is not None and not found[3] else [""]
    for name in names:
        if name not in _COMMON:
            raise ValueError(f"`%import {text[:40]}` is not supported inside JSON")
    return names


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _expression(pattern: str, *, dot_all: bool = False) -> str:
    """Return a regular expression as an expression of rules."""
    written: list[str] = []
    atoms = list(_tokens(_ATOM, pattern))
    for found, following in zip(atoms, [*atoms[1:], None], strict=True):
        runs = following is not None and following[0] in ("*", "+")
        is_lazy = found[0] == "?" and bool(written) and written[-1] in ("*", "+", "?")
        if not is_lazy:  # a lazy quantifier matches the same texts
            written.append(_atom(found, dot_all, runs))
    return f"({' '.join(written)})".replace(" *", "*").replace(" +", "+").replace(" ?", "?").replace(" {", "{")


def _atom(found: re.Match[str], dot_all: bool, runs: bool) -> str:
    """Return one part. `runs`: it is repeated without a limit."""
    if found["set"] is not None:
        return _set(found[0], runs)
    if found["plain"] is not None or found["category"] is not None:
        return _set(f"[{found[0]}]", runs)
    if found["dot"] is not None:
        return _set(r"[\s\S]" if dot_all else r"[^\n]", runs)
    for name, character in _CHARACTERS.items():
        if found[name] is not None:
            return json.dumps(_escaped(character(found[name])), ensure_ascii=False)
    return "(" if found[0] == "(?:" else found[0]


_CHARACTERS: dict[str, Callable[[str], str]] = {
    "hex": lambda digits: chr(int(digits, 16)),
    "wide": lambda digits: chr(int(digits, 16)),
    "control": _CONTROLS.__getitem__,
    "quoted": str,
    "char": str,
}
"""The parts of `_ATOM` that stand for one character."""


def _set(source: str, runs: bool = False) -> str:
    """Return a set of characters as an expression of what JSON writes for one of them, or for some if it `runs`."""
    if source.startswith(r"[\p"):
        return f"/{source}{'+' * runs}/"
    if "&&" in source or "[" in source[1:-1].replace(r"\[", ""):
        raise ValueError(f"the set of characters {source[:40]} is not supported inside JSON")
    try:
        contains = re.compile(source, re.ASCII).fullmatch
    except re.error:
        raise ValueError(f"the set of characters {source[:40]} is not supported inside JSON") from None
    escapes = "|".join(re.escape(_escaped(char)) for char in ESCAPED if contains(char))
    has_others = any(contains(chr(code)) for code in range(0x20, 0x3000) if chr(code) not in ESCAPED)
    options = [f"/[{source}&&{_NOT_ESCAPED}]{'+' * runs}/"] * has_others + [f"/{escapes}/"] * bool(escapes)
    return f"({' | '.join(options)})"
