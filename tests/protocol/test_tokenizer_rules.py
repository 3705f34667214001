"""What of a tokenizer's file is known to be bounded, what needs a limited process, and what is refused by name."""

from __future__ import annotations

import base64
import copy
import json
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest
from byte_bundle import byte_bundle

from pagemill_api.text.backend import encode_texts, loading
from pagemill_api.text.rules.charsmap import DamagedCharsmap, growth_of
from pagemill_api.text.rules.tokenizer_rules import check_rules
from pagemill_api.text.segments import longest_token_pattern
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_models.tokenizer_files import sentencepiece
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.source_errors import UnreadableModelError
from pagemill_protocol.tokenizer_bundle import TokenizerBundle

Change = Callable[[dict[str, Any]], None]


def replace(old: str, new: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def sequence(*steps: dict[str, Any], inner: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", inner: list(steps)}


def split(pattern: dict[str, str]) -> dict[str, Any]:
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def token(content: str, **more: Any) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": 256, "content": content, **flags, **more}


def word_piece(**values: Any) -> dict[str, Any]:
    affixes = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    return {"type": "WordPiece", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]", **affixes, **values}


def unigram(**values: Any) -> dict[str, Any]:
    return {"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.0]], "unk_id": 0, "byte_fallback": False, **values}


def template(**values: Any) -> dict[str, Any]:
    first = {"Sequence": {"id": "A", "type_id": 0}}
    return {"type": "TemplateProcessing", "single": [first], "pair": [first], "special_tokens": {}, **values}


def deep(num: int) -> dict[str, Any]:
    step = replace("a", "b")
    for _ in range(num):
        step = sequence(step)
    return step


A = {"Sequence": {"id": "A", "type_id": 0}}
LIMITED: dict[str, tuple[str, Any, str]] = {
    "growth": (
        "normalizer",
        sequence(*[replace("a", "aa")] * 30),
        "a text becomes up to 1.07e+09 times as long; 20 is the most",
    ),
    "one growth": ("normalizer", replace("a", "a" * 100), "up to 100 times as long"),
    "steps": ("normalizer", sequence(*[replace("a", "b")] * 40), "`normalizer.normalizers` is a list of 40 entries"),
    "depth": ("normalizer", deep(20), "nested at most 8 deep"),
    "prepended": ("normalizer", {"type": "Prepend", "prepend": "x" * 50}, "`normalizer.prepend`"),
    "empty pattern": ("normalizer", replace("", "x"), "`normalizer.pattern` is an object of 1 entries"),
    "slow pattern": ("normalizer", replace("(a+)+b", "x", "Regex"), "is not known to take linear time"),
    "pattern of nothing": ("normalizer", replace("a*", "x", "Regex"), "matches nothing at all places"),
    "unknown step": ("normalizer", {"type": "Magic"}, "the step `Magic`"),
    "charsmap": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "%"}, "it is not base 64"),
    "no text": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": 5}, "`5`; it must be text in base 64"),
    "list of steps": ("normalizer", [], "`normalizer` is a list of 0 entries; it must be an object"),
    "slow split": ("pre_tokenizer", split({"Regex": "(?:a|a)*b"}), "is repeated without limit"),
    "empty split": ("pre_tokenizer", split({"String": ""}), "`pre_tokenizer.pattern`"),
    "bytes of bytes": (
        "pre_tokenizer",
        sequence(*[{"type": "ByteLevel", "add_prefix_space": False}] * 9, inner="pretokenizers"),
        "times as long",
    ),
    "long replacement": ("pre_tokenizer", {"type": "Metaspace", "replacement": "x" * 9}, "`pre_tokenizer.replacement`"),
    "long words": ("model", word_piece(max_input_chars_per_word=10**9), "`model.max_input_chars_per_word`"),
    "a text twice": ("post_processor", template(single=[A, A]), "a list with each text once"),
    "many pieces": ("post_processor", template(single=[A, *[{}] * 100]), "at most 64 pieces"),
    "many ids": ("post_processor", template(special_tokens={"x": {"ids": [1] * 999}}), "at most 64 ids"),
    "40 doublings": ("normalizer", sequence(*[replace("a", "aa")] * 40), "is a list of 40 entries"),
    "40 doublings in sequences": (
        "normalizer",
        sequence(*[sequence(*[replace("a", "aa")] * 10)] * 4),
        "it has 40 steps; 32 is the most",
    ),
    "a long way to a token": (
        "model",
        unigram(vocab=[["<unk>", 0.0], ["a", -1.0], ["x" * 2000, 0.0]]),
        "a piece has 2000 characters; 128 is the most",
    ),
}
"""Parts that only encoding reads: such a tokenizer is used in a limited process."""
REFUSED: dict[str, tuple[str, Any, str]] = {
    "decoder": ("decoder", sequence(*[replace("n", "n" * 10)] * 9, inner="decoders"), "up to 1e+09 times as long"),
    "empty decoder": ("decoder", replace("", "n"), "`decoder.pattern`"),
    "prefix of words": ("decoder", {"type": "WordPiece", "prefix": "#" * 99}, "`decoder.prefix`"),
    "stripped spaces": ("decoder", {"type": "Strip", "content": " ", "start": 1e30, "stop": 0}, "`decoder.start`"),
    "long token": ("added_tokens", [token("x" * 20_000_000)], "`added_tokens[0].content`"),
    "many tokens": ("added_tokens", [token(f"t{index}") for index in range(70_000)], "it has 70000 entries"),
    "tokens that begin with any character": (
        "added_tokens",
        [token(chr(0x4E00 + index) + "x") for index in range(2000)],
        "more than 1024 alternatives may be tried",
    ),
    "token without id": ("added_tokens", [token("x", id=None)], "`added_tokens[0].id` is missing"),
    "token of another kind": ("added_tokens", ["x"], "`added_tokens[0]` is `x`"),
    "long piece": ("model", unigram(vocab=[["<unk>", 0.0], ["x" * 600_000, 0.0]]), "an entry has 600000 characters"),
    "no unknown piece": ("model", unigram(unk_id=None), "`model.unk_id` is missing"),
    "unknown piece outside": ("model", unigram(unk_id=2), "`model.unk_id` is `2`"),
    "piece of another kind": ("model", unigram(vocab=[["<unk>", 0.0], [1]]), "a list of pieces"),
    "no unknown word": ("model", word_piece(unk_token="[NONE]"), "`model.unk_token` is `[NONE]`"),
    "long prefix": ("model", word_piece(continuing_subword_prefix="#" * 999), "`model.continuing_subword_prefix`"),
    "ids": ("model", word_piece(vocab={"[UNK]": "0"}), "`model.vocab`"),
    "negative ids": ("model", word_piece(vocab={"[UNK]": -1}), "`model.vocab`"),
    "no vocabulary": ("model", word_piece(vocab=5), "`model.vocab` is `5`"),
}
"""Parts that the server reads."""


def with_part(part: str, value: Any) -> TokenizerBundle:
    parsed = json.loads(byte_bundle().tokenizer_json)
    return TokenizerBundle(tokenizer_json=json.dumps(parsed | {part: value}))


@pytest.mark.slow_for("40 doublings*", "growth")
@pytest.mark.parametrize(("part", "value", "message"), LIMITED.values(), ids=LIMITED.keys())
def test_a_step_without_a_bound_runs_in_a_limited_process(part: str, value: Any, message: str) -> None:
    tokenizer = Tokenizer(with_part(part, value))
    assert message in tokenizer.limited_because
    assert f"`{part}" in tokenizer.limited_because
    error: PagemillError | None = None
    try:
        assert tokenizer.encode("banana")
    except PagemillError as failed:
        error = failed
    tokenizer.close()
    assert error is None or (message in error.message and len(error.message) < 800), "an error names the step"
    assert error is None or error.code == "tokenizer_error"


@pytest.mark.parametrize(("part", "value", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_part_that_the_server_reads_and_that_has_no_bound_is_refused_by_name(
    part: str, value: Any, message: str
) -> None:
    with pytest.raises(UnreadableModelError) as refused:
        Tokenizer(with_part(part, value))
    assert message in refused.value.message
    assert "the model's tokenizer cannot be used" in refused.value.message
    assert len(refused.value.message) < 500


def test_the_steps_of_published_tokenizers_lengthen_a_text_by_a_known_factor() -> None:
    plain = json.loads(byte_bundle().tokenizer_json)
    llama = sentencepiece.normalizer_json(add_space_prefix=True)
    assert check_rules(plain).growth == 1.0
    assert check_rules(plain | {"normalizer": llama, "pre_tokenizer": None}).growth == 1.0
    assert check_rules(plain | {"normalizer": {"type": "NFC"}}).growth == 3.0
    assert check_rules(plain | {"normalizer": {"type": "BertNormalizer"}}).growth == 9.0


def test_a_text_that_a_tokenizer_lengthens_is_bounded_by_what_it_becomes() -> None:
    tokenizer = Tokenizer(with_part("normalizer", replace("a", "bbbbbbbbbbbbbbbb")))
    assert len(tokenizer.encode_within("a" * 1000, 100_000)) == 16_000
    with pytest.raises(PagemillError, match="at most 524288 are taken"):
        tokenizer.encode_within("a" * 600_000, 0)


def charsmap(keys: dict[bytes, bytes]) -> bytes:
    """Return SentencePiece's tables for keys of one byte."""
    units, texts = [0] * 1024, b""
    units[0] = 256 << 10
    for index, (key, text) in enumerate(keys.items()):
        place, base = 256 ^ key[0], 512 + index
        units[place] = key[0] | 1 << 8 | (place ^ base) << 10
        units[base] = 1 << 31 | len(texts)
        texts += text + b"\0"
    return struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + texts


def normalized(raw: bytes) -> str:
    bundle = with_part("normalizer", precompiled(raw))
    return Tokenizer(bundle).decode(Tokenizer(bundle).encode("ab"))


def precompiled(raw: bytes) -> dict[str, str]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(raw).decode()}


def test_the_growth_by_precompiled_tables_is_that_of_their_longest_text() -> None:
    raw = charsmap({b"a": b"xyz", b"b": b""})
    assert growth_of(base64.b64encode(raw).decode()) == 3.0
    assert normalized(raw) == "xyz", "the library reads the same tables"
    much = check_rules(
        json.loads(byte_bundle().tokenizer_json) | {"normalizer": precompiled(charsmap({b"a": b"x" * 50_000}))}
    )
    assert "up to 5e+04 times as long" in much.unknown


@pytest.mark.parametrize(
    ("place", "unit", "message"),
    [
        (256 ^ ord("a"), ord("a") | 1 << 8 | 0x1FFF << 10, "points outside of it"),
        (512, 1 << 31 | 900, "where none begins"),
        (0, 0x1FFFFF << 10, "points outside of it"),
    ],
)
def test_damaged_tables_are_refused_since_the_library_would_panic(place: int, unit: int, message: str) -> None:
    raw = bytearray(charsmap({b"a": b"xyz"}))
    raw[4 + 4 * place : 8 + 4 * place] = struct.pack("<I", unit)
    with pytest.raises(DamagedCharsmap, match=message):
        growth_of(base64.b64encode(raw).decode())


def test_tables_whose_entries_form_a_circle_are_read_once() -> None:
    raw = bytearray(charsmap({b"a": b"x"}))
    place = 256 ^ ord("a")
    raw[4 + 4 * place : 8 + 4 * place] = struct.pack("<I", ord("a") | (place ^ 256) << 10)
    assert growth_of(base64.b64encode(raw).decode()) == 1.0


class PanicException(BaseException):
    """As the binding of the library names its panics."""


class Panicking:
    def encode_batch_fast(self, texts: list[str], **_: Any) -> None:
        raise PanicException("index out of bounds: " + "x" * 1000)


def test_a_panic_of_the_library_is_an_error_of_one_request() -> None:
    with pytest.raises(PagemillError, match="tokenizer failed on this text: index out of bounds") as failed:
        encode_texts(Panicking(), ["a"], add_special_tokens=False)  # type: ignore[arg-type]
    assert (failed.value.status, failed.value.code, len(failed.value.message) < 300) == (400, "tokenizer_error", True)
    with pytest.raises(UnreadableModelError, match="cannot be loaded: in Rust"), loading():
        raise PanicException("in Rust")
    with pytest.raises(KeyboardInterrupt), loading():
        raise KeyboardInterrupt


def test_a_failure_of_the_library_is_an_error_of_one_request() -> None:
    parsed = json.loads(byte_bundle().tokenizer_json)
    model = copy.deepcopy(parsed["model"]) | {"unk_token": "<none>"}
    model["vocab"] = {"a": 0}
    tokenizer = Tokenizer(with_part("model", model))
    assert tokenizer.encode("a") == [0]
    with pytest.raises(PagemillError, match="The model's tokenizer failed on this text"):
        tokenizer.encode("b")


def test_the_longest_of_many_tokens_is_found_with_few_attempts_at_each_place() -> None:
    tokens = [*(f"<unused{index}>" for index in range(6400)), "<", "<un", "<pad>", "end"]
    pattern = longest_token_pattern(tokens)
    assert pattern is not None
    text = "<unused12><unused6400><pad>x<<unend"
    assert pattern.findall(text) == ["<unused12>", "<un", "<pad>", "<", "<un", "end"]
    assert longest_token_pattern(chr(code) + "x" for code in range(0x4E00, 0x5E00)) is None
    assert longest_token_pattern("a" * length for length in range(1, 60)) is None


def test_thousands_of_characters_may_be_added_tokens() -> None:
    """As tokenizers have that were extended for another script."""
    chars = [*map(chr, range(0x4E00, 0x5600)), "一丁", "]", "^", "-", "\\", "a", "b"]
    pattern = longest_token_pattern(chars)
    assert pattern is not None
    assert pattern.findall("一丁丁x]^-\\ab一z") == ["一丁", "丁", "]", "^", "-", "\\", "a", "b", "一"]
    began_s = time.thread_time()
    pattern.findall("一x" * 100_000)
    assert time.thread_time() - began_s < 1.0
    added = [token(char, id=256 + index) for index, char in enumerate(chars)]
    tokenizer = Tokenizer(with_part("added_tokens", added))
    assert tokenizer.encode("一丁丁") == [256 + chars.index("一丁"), 256 + chars.index("丁")]
