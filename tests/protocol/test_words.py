"""Encoding ASCII text by words gives the library's tokens for every pre-tokenizer, with a bounded cache of words."""

from __future__ import annotations

import json
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from examples import num_examples
from pagemill_api.text import words
from pagemill_api.text.words import MAX_LEARNED, MAX_TEXT_CHARS, UNKNOWN_SHARE, WordEncoder, ascii_pattern
from pagemill_models.tokenizer_files.pre_tokenizers import PRE_TOKENIZERS

MERGES = [("h", "e"), ("l", "l"), ("Ġ", "w"), ("Ġ", "Ġ"), ("Ċ", "Ċ"), ("1", "2"), ("'", "s"), ("Ġ", "(")]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
PARTS = [
    "hello",
    " world",
    "The",
    "the ",
    "\n",
    "\r\n",
    "  ",
    "\t",
    "1234",
    "'s",
    "'LL",
    "don't",
    "camelCase",
    "X9",
    "++",
]
TEXTS = st.lists(st.sampled_from(PARTS) | st.text(st.characters(max_codepoint=127), max_size=6), max_size=40).map(
    "".join
)
Json = dict[str, Any]


def split(pattern: str, **fields: Any) -> Json:
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False, **fields}
    return {"type": "Sequence", "pretokenizers": [step, BYTES]}


def backend(pre_tokenizer: Json, **fields: Any) -> tuple[Backend, Json]:
    entries = [*ALPHABET, *dict.fromkeys("".join(pair) for pair in MERGES)]
    made = Backend(models.BPE({entry: number for number, entry in enumerate(entries)}, MERGES))
    parsed = {**json.loads(made.to_str()), "pre_tokenizer": pre_tokenizer, **fields}
    return Backend.from_str(json.dumps(parsed)), parsed


OF_THE_LIBRARY = {"kimi-k2"}
"""Their patterns have intersections of classes, which Python's `re` lacks."""
KINDS = {
    **{json.dumps(each.to_json()): name for name, each in PRE_TOKENIZERS.items() if name not in OF_THE_LIBRARY},
    json.dumps({**BYTES, "use_regex": True}): "GPT-2 as one step",
    json.dumps(
        {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, {**BYTES, "use_regex": True}],
        }
    ): "digits first",
}


@pytest.fixture(scope="module", params=KINDS, ids=KINDS.values())
def known(request: pytest.FixtureRequest) -> tuple[Backend, WordEncoder]:
    made, parsed = backend(json.loads(request.param))
    encoder = WordEncoder.of(made, parsed)
    assert encoder is not None, "every other pre-tokenizer of the project is of this kind"
    return made, encoder


@given(text=TEXTS)
@settings(max_examples=num_examples(150))
def test_words_give_the_tokens_of_the_whole_text(known: tuple[Backend, WordEncoder], text: str) -> None:
    made, encoder = known
    for _ in range(2):
        assert encoder.encode(text) == made.encode(text, add_special_tokens=False).ids


class Counted:
    """A tokenizer with one token for each character that records the encoded texts."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, texts: list[str]) -> list[list[int]]:
        self.texts += texts
        return [list(map(ord, text)) for text in texts]


@pytest.fixture
def by() -> Counted:
    return Counted()


@pytest.fixture
def encoder(by: Counted) -> WordEncoder:
    return WordEncoder([lambda text: text.replace(" ", "| ").split("|")], by)


def numbered(count: int, start: int = 0) -> str:
    return " ".join(f"w{number}" for number in range(start, start + count))


def test_a_text_of_mostly_unknown_words_is_encoded_whole_and_some_are_cached(encoder: WordEncoder, by: Counted) -> None:
    text = numbered(100)
    assert encoder.encode(text) == list(map(ord, text))
    assert by.texts == [text, *encoder.words_of(text)[:MAX_LEARNED]]


def test_known_words_are_not_encoded_again_and_a_few_unknown_ones_individually(
    encoder: WordEncoder, by: Counted
) -> None:
    known = numbered(MAX_LEARNED)
    encoder.encode(known)
    by.texts.clear()
    text = known + " new"
    assert MAX_LEARNED + 1 >= UNKNOWN_SHARE
    for _ in range(2):
        assert encoder.encode(text) == list(map(ord, text))
    assert by.texts == [" new"]


def test_the_cache_is_bounded(encoder: WordEncoder, by: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "MAX_WORDS", 2 * MAX_LEARNED)
    for start in range(0, 10 * MAX_LEARNED, MAX_LEARNED):
        encoder.encode(numbered(MAX_LEARNED, start))
        assert encoder.num_words <= 2 * MAX_LEARNED
    num_words = encoder.num_words
    encoder.encode("x" * 10_000)
    assert encoder.num_words == num_words, "a long word is unlikely to occur again"


@pytest.mark.parametrize("text", ["é", "a" * (MAX_TEXT_CHARS + 1)])
def test_texts_of_other_characters_and_very_long_ones_are_left_to_the_library(encoder: WordEncoder, text: str) -> None:
    assert not encoder.takes(text)
    assert encoder.takes("a" * MAX_TEXT_CHARS)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"normalizer": {"type": "Lowercase"}}, id="ASCII is changed"),
        pytest.param(
            {"added_tokens": [{"id": 1, "content": "a", "normalized": True, "special": False}]},
            id="a token across words",
        ),
        pytest.param({"pre_tokenizer": {"type": "Whitespace"}}, id="no bytes"),
        pytest.param({"pre_tokenizer": {**BYTES, "add_prefix_space": True}}, id="a space before the text"),
        pytest.param({"pre_tokenizer": split(r"[\p{M}]+")}, id="a class without ASCII characters"),
        pytest.param({"pre_tokenizer": split(r"\s+", behavior="Removed")}, id="something is removed"),
    ],
)
def test_tokenizers_of_another_kind_are_left_to_the_library(fields: Json) -> None:
    _, parsed = backend({**BYTES, "use_regex": True})
    made = Backend.from_str(json.dumps(parsed))
    assert WordEncoder.of(made, parsed) is not None
    assert WordEncoder.of(made, {**parsed, **fields}) is None


def test_words_that_the_library_splits_differently_are_left_to_it() -> None:
    made, parsed = backend({**BYTES, "use_regex": True})
    assert WordEncoder.of(made, {**parsed, "pre_tokenizer": split(r"\S+|\s+")}) is None


@pytest.mark.parametrize(
    "pattern",
    [r"(a|b)c", r"(?<name>a)", r"[a-z&&[^b]]", r"[[:alpha:]]", r"a{1,3}+", r"^a", r"a$", r"\p{Han}", r"\h", r"\Ra"],
)
def test_patterns_that_may_differ_in_python_are_not_translated(pattern: str) -> None:
    assert ascii_pattern(pattern) is None


def test_a_category_is_translated_to_its_ascii_characters() -> None:
    letters = ascii_pattern(r"\p{Lu}")
    assert letters is not None
    assert eval(f'"{letters[1:-1]}"') == string.ascii_uppercase
