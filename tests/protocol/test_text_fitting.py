"""Texts that cannot fit into a context are refused without tokenizing them, and no text that fits is refused."""

from __future__ import annotations

import json
import random
import sys
import unicodedata
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from examples import num_examples
from pagemill_api.text import fitting
from pagemill_api.text.coverage import NFC_SHRINKS_BY, Coverage, coverage_of, longest_entry_bytes
from pagemill_api.text.encoding.local_encoder import LocalEncoder
from pagemill_api.text.rules.tokenizer_rules import check_rules
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_models.tokenizer_files.pre_tokenizers import PRE_TOKENIZERS
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.tokenizer_bundle import TokenizerBundle

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("l", "l"), ("e", "ll"), ("h", "ell"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("ĠĠĠĠ", "ĠĠĠĠ"), ("í", "Ķ")]
TEXTS = st.text(st.sampled_from("hello 0\n  é한ᄒ́　▁") | st.characters(exclude_categories=["Cs"]), max_size=60)


def byte_level(alphabet: list[str] = ALPHABET, **fields: Any) -> dict[str, Any]:
    vocabulary = [*alphabet, *("".join(pair) for pair in MERGES)]
    backend = Backend(models.BPE(vocab={entry: index for index, entry in enumerate(vocabulary)}, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return {**json.loads(backend.to_str()), **fields}


def sentencepiece(*, byte_fallback: bool = True) -> dict[str, Any]:
    entries = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "▁▁▁▁", "h", "e"]
    merges = [("▁", "▁"), ("▁▁", "▁▁")]
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback)
    backend = Backend(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    found: dict[str, Any] = json.loads(backend.to_str())
    return found


def tokenizer_of(tokenizer_json: dict[str, Any]) -> Tokenizer:
    return Tokenizer(TokenizerBundle(tokenizer_json=json.dumps(tokenizer_json)))


BOUNDED = {
    "byte-level": byte_level(),
    "byte-level without some bytes": byte_level(ALPHABET[10:]),
    "byte-level with NFC": byte_level(normalizer={"type": "NFC"}),
    "byte-level as in Qwen": byte_level(normalizer={"type": "NFC"}, pre_tokenizer=PRE_TOKENIZERS["qwen2"].to_json()),
    "SentencePiece": sentencepiece(),
}


def bounds_of(tokenizer_json: dict[str, Any]) -> Coverage | None:
    longest_chars = check_rules(tokenizer_json).longest_entry_chars
    return coverage_of(tokenizer_json, longest_entry_bytes(tokenizer_json, longest_chars))


@pytest.mark.parametrize("tokenizer_json", BOUNDED.values(), ids=BOUNDED.keys())
def test_no_token_covers_more_bytes_than_the_bound(tokenizer_json: dict[str, Any]) -> None:
    coverage, tokenizer = bounds_of(tokenizer_json), tokenizer_of(tokenizer_json)
    assert coverage is not None

    @settings(max_examples=num_examples(300), deadline=None)
    @given(TEXTS)
    def every(text: str) -> None:
        assert coverage.num_bytes(text.encode()) <= coverage.bytes_per_token * len(tokenizer.encode(text))

    every()


@pytest.mark.slow
def test_nfc_shortens_no_text_beyond_the_bound() -> None:
    characters = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    spelled: dict[str, int] = {}
    for char in characters:
        decomposed = unicodedata.normalize("NFD", char)
        if len(decomposed) == 1:
            spelled[decomposed] = max(spelled.get(decomposed, 0), len(char.encode()))
    for char in filter(partial(unicodedata.is_normalized, "NFC"), characters):
        if char not in spelled or spelled[char] > NFC_SHRINKS_BY * len(char.encode()):
            longest = sum(spelled.get(part, len(part.encode())) for part in unicodedata.normalize("NFD", char))
            assert longest <= NFC_SHRINKS_BY * len(char.encode()), hex(ord(char))


def added(**options: bool) -> list[dict[str, Any]]:
    backend = Backend(models.BPE())
    backend.add_special_tokens([AddedToken("<mask>", **options)])
    return list(json.loads(backend.to_str())["added_tokens"])


UNBOUNDED = {
    "a token that takes the spaces before it": byte_level(added_tokens=added(lstrip=True)),
    "a token that takes the spaces after it": byte_level(added_tokens=added(rstrip=True)),
    "a normalizer that strips": byte_level(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
    "a normalizer that replaces by less": byte_level(
        normalizer={"type": "Replace", "pattern": {"String": "  "}, "content": " "}
    ),
    "a normalizer that replaces matches": byte_level(
        normalizer={"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}
    ),
    "NFC without some bytes": byte_level(ALPHABET[10:], normalizer={"type": "NFC"}),
    "words without the spaces between them": byte_level(
        pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, {"type": "ByteLevel"}]}
    ),
    "unknown characters in one token": sentencepiece(byte_fallback=False),
}


@pytest.mark.parametrize("tokenizer_json", UNBOUNDED.values(), ids=UNBOUNDED.keys())
def test_a_tokenizer_that_may_drop_or_join_any_number_of_characters_has_no_bound(
    tokenizer_json: dict[str, Any],
) -> None:
    assert bounds_of(tokenizer_json) is None


@pytest.mark.model
def test_bytes_without_a_token_do_not_count(smollm2: Tokenizer) -> None:
    """The vocabulary lacks some control characters."""
    text = "\x04" * 10_000 + "a"
    assert smollm2.encode_within(text, 2) == smollm2.encode("a")
    with pytest.raises(PagemillError, match="10000 bytes of text and at most 162 are taken"):
        smollm2.encode_within("a" * 10_000, 2)


TEXTS_OF_ONE_KIND = {
    "digits": "0",
    "spaces": " ",
    "letters": "a",
    "words": "hello world ",
    "code": "if x == 1:\n        return None\n",
    "emoji": "🧨👨‍👩‍👧",
    "Chinese": "中文没有空格",
    "special tokens": "<|im_start|>user\nhi<|im_end|>\n",
    "rules": "#" * 80 + "\n",
    "line breaks": "\r\n\n",
}


def word_piece() -> dict[str, Any]:
    letters = "helowrd"
    entries = ["[UNK]", *letters, *(f"##{letter}" for letter in letters), "hello", "##rld"]
    model = models.WordPiece(vocab={entry: index for index, entry in enumerate(entries)}, unk_token="[UNK]")
    backend = Backend(model)
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    found: dict[str, Any] = json.loads(backend.to_str())
    return found


UNREADABLE = "words without the spaces between them"
CUT = {**BOUNDED, **{name: each for name, each in UNBOUNDED.items() if name != UNREADABLE}, "words": word_piece()}


@pytest.mark.parametrize("tokenizer_json", CUT.values(), ids=CUT.keys())
def test_a_truncated_text_has_the_first_tokens_of_the_whole(tokenizer_json: dict[str, Any]) -> None:
    tokenizer, rng = tokenizer_of(tokenizer_json), random.Random(5)
    units = [*TEXTS_OF_ONE_KIND.values(), "\u0301", "h" * 99, "h" * 300, " " * 50, "é한ᄒ́　▁"]
    for few in (1, 2, len(units)):
        some = rng.sample(units, few)
        text = "".join(rng.choice(some) for _ in range(60_000 // max(map(len, some))))
        ids = tokenizer.encode(text)
        for num_tokens in (1, 100, 5000, len(ids), len(ids) + 1):
            assert tokenizer.encode_cut(text, num_tokens) == ids[:num_tokens], (some, num_tokens)


@pytest.mark.parametrize(
    ("unit", "is_refused"), [("word ", False), ("中", False), (" ", True), ("h", True), ("\u0301", True)]
)
def test_truncating_a_text_costs_in_proportion_to_the_kept_part(
    unit: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No number of spaces, or of characters in words that are too long, gives many tokens."""
    tokenizer, seen = tokenizer_of(word_piece()), 0
    encode = LocalEncoder._encode

    def counted(self: Tokenizer, text: str, add_special_tokens: bool) -> Any:
        nonlocal seen
        seen += len(text)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(LocalEncoder, "_encode", counted)
    text = unit * (2_000_000 // len(unit))
    if is_refused:
        with pytest.raises(PagemillError, match="`input` has 2000000 characters, of which the first 116508 are"):
            tokenizer.encode_cut(text, 128, param="input")
        assert seen < 200_000
        return
    assert len(tokenizer.encode_cut(text, 128)) == 128
    assert seen < 20_000


@pytest.mark.slow_for("digits", "code")
@pytest.mark.model
@pytest.mark.parametrize("unit", TEXTS_OF_ONE_KIND.values(), ids=TEXTS_OF_ONE_KIND.keys())
def test_a_large_text_that_just_fits_keeps_its_tokens_and_a_larger_one_is_refused(
    smollm2: Tokenizer, unit: str
) -> None:
    text = unit * (200_000 // len(unit.encode()))
    ids = smollm2.encode(text)
    assert smollm2.encode_within(text, len(ids)) == ids
    with pytest.raises(PagemillError, match=f"maximum context length is {len(ids) - 1} tokens") as caught:
        smollm2.encode_within(text, len(ids) - 1, param="messages")
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.sample("5")
@pytest.mark.parametrize("seed", [5, 6, 7])
def test_a_large_text_of_any_kind_that_just_fits_keeps_its_tokens(smollm2: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    units = rng.choices(list(TEXTS_OF_ONE_KIND.values()), k=400)
    text = "".join(unit * rng.randint(1, 4000 // len(unit)) for unit in units)
    ids = smollm2.encode(text)
    assert smollm2.encode_within(text, len(ids)) == ids


@pytest.mark.model
@pytest.mark.parametrize("unit", ["0", "a", "a1", "🧨", "hello "])
def test_of_a_text_that_cannot_fit_only_about_the_context_is_tokenized(
    smollm2: Tokenizer, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = unit * (600_000 // len(unit.encode()))
    counted: list[int] = []
    encoder = smollm2._encoder
    assert isinstance(encoder, LocalEncoder)
    count = encoder._count
    monkeypatch.setattr(encoder, "_count", lambda piece: counted.append(len(piece)) or count(piece))
    monkeypatch.setattr(encoder, "encode", lambda *_: pytest.fail("the whole text was tokenized"))
    with pytest.raises(PagemillError, match=r"maximum context length is 8192 tokens.*has at least \d+ tokens"):
        smollm2.encode_within(text, 8192)
    assert max(counted) <= fitting.PIECE_CHARS
    assert len(counted) * fitting.PIECE_CHARS <= 80_000


@pytest.mark.model
def test_a_context_of_any_length_accepts_texts_of_bounded_size(smollm2: Tokenizer) -> None:
    with pytest.raises(PagemillError, match="4194305 bytes of text and at most 4194304 are taken") as caught:
        smollm2.encode_within(" " * (fitting.MAX_TEXT_BYTES + 1), 10_000_000)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.model
def test_half_a_surrogate_pair_is_refused_at_any_size(smollm2: Tokenizer) -> None:
    for text in ("a\ud800", "a " * 50_000 + "\ud800"):
        with pytest.raises(PagemillError, match="half a surrogate pair"):
            smollm2.encode_within(text, 100_000)
