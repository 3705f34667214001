"""Grammars of custom tools inside JSON: they match exactly the JSON of what the grammar itself matches."""

from __future__ import annotations

import json
import re

import pytest
from grammar_matches import matches
from hypothesis import given
from hypothesis import strategies as st

from pagemill_api.grammars.json_lark import ESCAPED, inside_json

PATCH = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | update_hunk // what changes
add_hunk: "*** Add File: " filename LF add_line+
update_hunk: "*** Update File: " filename LF change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: (change_context | change_line)+
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF

%import common.LF
"""
GOOD = '*** Begin Patch\n*** Add File: a "b".txt\n+x\\n = "\t\u00fc \U0001f600"\n+\n*** End Patch'


def written(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


@pytest.mark.parametrize(
    ("text", "is_good"),
    [
        (GOOD, True),
        (GOOD.replace("Add", "Update").replace("+x", "@@\n-x"), True),
        (GOOD.replace("*** End Patch", ""), False),
        (GOOD.replace("+x", "x"), False),
        (GOOD + "more", False),
    ],
)
def test_the_grammar_of_patches_matches_inside_json_what_it_matches_alone(text: str, is_good: bool) -> None:
    assert matches(PATCH, text) == matches(inside_json(PATCH), written(text)) == is_good


def test_text_as_it_is_is_not_text_inside_json() -> None:
    assert not matches(inside_json(PATCH), GOOD)
    assert not matches(inside_json("start: /.*/"), 'a "b"')


REGEXES = (
    *(
        r'[^"]',
        r"[\n\t]",
        r"\s",
        r"\S",
        r"\D",
        r"\W",
        r"\w",
        ".",
        r"[^\n]",
        r"[a-z\\]",
        r"[\x00-\x1f]",
        r"\x22",
        r"\\",
        r"\/",
    ),
    *(r"\\", r"\/", "[ -~]", r"(?:a|\n)", r'[^\\"]', r"\u0041", r"\0", r"[^a\r\n]", r"[\s]", "[]a]", "[^]a]"),
)


@given(st.sampled_from(REGEXES), st.sampled_from(["", "*", "+", "{1,3}"]), st.text(ESCAPED + "aA]/é 😀", max_size=4))
def test_regular_expressions_match_the_json_of_what_they_match(regex: str, quantifier: str, text: str) -> None:
    pattern = re.sub(r"\\/", "/", regex).replace(r"\d", "[0-9]") + quantifier
    expected = re.fullmatch(pattern.replace("\\0", "\\x00"), text, re.ASCII) is not None
    if re.search(r"\\[swSW]", regex) and not text.isascii():
        return  # Python's and llguidance's sets of letters differ beyond ASCII
    assert matches(inside_json(f"start: /{regex}{quantifier}/"), written(text)) == expected


@given(st.text(ESCAPED + "ab'/é😀", min_size=1, max_size=5))
def test_a_text_matches_its_json_only(text: str) -> None:
    grammar = inside_json(f"start: {json.dumps(text)}")
    assert matches(grammar, written(text))
    assert not matches(grammar, written(text + "x"))


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a\\n"i',
        "start: /a\\n/i",
        "start: A\nA: /a/\n%ignore A",
        "start: /(?=a)b/",
        "start: /(?i)a/",
        "start: /^a$/",
        r"start: /\bword/",
        r"start: /\p{P}/",
        "start: X\n%import python.X",
        "start: X\n%import common.X",
        "start: %json {}",
        "start: <|end|>",
        "%llguidance {}\nstart: /a/",
    ],
)
def test_what_cannot_be_rewritten_is_an_error(grammar: str) -> None:
    with pytest.raises(ValueError, match=r"inside JSON|JSON escapes"):
        inside_json(grammar)
