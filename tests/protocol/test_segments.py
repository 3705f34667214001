"""Encoding by segments gives the tokens of the whole text, tokenizes each segment once, and bounds its cache."""

from __future__ import annotations

import json
import re
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from examples import num_examples
from pagemill_api.text import segments
from pagemill_api.text.encoding.local_encoder import LocalEncoder
from pagemill_api.text.segments import SegmentEncoder
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_models.tokenizer_files.pre_tokenizers import PRE_TOKENIZERS
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.tokenizer_bundle import TokenizerBundle

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|im|>", "<s>"]
WORDS = [
    "hello",
    " world",
    "the ",
    "\n",
    "  ",
    "1234",
    "é",
    "你好",
    "<|im",
    "_start|>",
    "<",
    "s>",
    "▁",
    "user\n",
    "'s",
    "ﬁ",
]
TEXTS = st.lists(
    st.sampled_from([*SPECIAL, *WORDS]) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=30
).map("".join)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTE_MERGES = [("h", "e"), ("l", "l"), ("Ġ", "w"), ("Ġ", "Ġ")]
Json = dict[str, Any]


def completed(backend: Backend, **fields: Any) -> Json:
    backend.decoder = decoders.ByteLevel()  # not used, but a tokenizer requires it
    backend.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in SPECIAL])
    return {**json.loads(backend.to_str()), **fields}


def byte_level(**fields: Any) -> Json:
    vocabulary = [*ALPHABET, *("".join(pair) for pair in BYTE_MERGES)]
    backend = Backend(models.BPE({entry: number for number, entry in enumerate(vocabulary)}, BYTE_MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return completed(backend, **fields)


def sentencepiece() -> Json:
    vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "h", "e", "he"]
    ids = {entry: number for number, entry in enumerate(vocabulary)}
    backend = Backend(models.BPE(ids, [("▁", "▁"), ("h", "e")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return completed(backend)


def unigram(prepend_scheme: str) -> Json:
    scores = [("<unk>", 0.0), *((each, -1.0) for each in "▁helowrdt"), ("▁hello", -2.0), ("▁the", -2.0)]
    backend = Backend(models.Unigram(scores, unk_id=0, byte_fallback=False))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    return completed(backend)


def word_piece() -> Json:
    vocabulary = ["[UNK]", "hello", "world", "the", "##s", "user", "1234", "'", "<", ">", "|", "im"]
    backend = Backend(models.WordPiece({word: number for number, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return completed(backend)


DISTINCT = {json.dumps(each.to_json()): name for name, each in PRE_TOKENIZERS.items()}
"""Tokenizers by their steps, since several models have the same."""
FITTING = {
    "byte-level": byte_level(),
    **{f"byte-level as {name}": byte_level(pre_tokenizer=json.loads(each)) for each, name in DISTINCT.items()},
    "byte-level with NFC": byte_level(normalizer={"type": "NFC"}),
    "SentencePiece": sentencepiece(),
    "Unigram": unigram("always"),
    "WordPiece": word_piece(),
}


def tokenizer_of(tokenizer_json: Json) -> Tokenizer:
    return Tokenizer(TokenizerBundle(tokenizer_json=json.dumps(tokenizer_json)))


@pytest.fixture(scope="module", params=FITTING)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return tokenizer_of(FITTING[request.param])


class Counted:
    """A tokenizer with one token for each character that records the encoded texts."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, text: str) -> list[int]:
        self.texts.append(text)
        return list(map(ord, text))


def encode(encoder: SegmentEncoder, text: str, by: Counted, max_tokens: int = 10_000, scope: str = "") -> list[int]:
    return encoder.encode(text, max_tokens, by, "messages", scope)


@pytest.fixture
def encoder() -> SegmentEncoder:
    return SegmentEncoder({"<s>": 1, "<ss>": 2}, re.compile("<ss>|<s>"), longest_entry_bytes=4)


@given(text=TEXTS)
@settings(max_examples=num_examples(100))
def test_segments_give_the_tokens_of_the_whole_text(tokenizer: Tokenizer, text: str) -> None:
    whole = tokenizer.encode(text, add_special_tokens=False)
    assert isinstance(tokenizer._encoder, LocalEncoder)
    assert tokenizer._encoder.segments is not None
    for _ in range(2):  # the second time from the cache
        assert tokenizer.encode_within(text, 0, add_special_tokens=False, scope="") == whole


@pytest.mark.parametrize(
    "tokenizer_json",
    [
        pytest.param(unigram("first"), id="a space before the first segment only"),
        pytest.param(
            byte_level(added_tokens=[{"id": 300, "content": "<s>", "lstrip": True, "normalized": False}]),
            id="a special token that takes the spaces before it",
        ),
        pytest.param(byte_level(added_tokens=[]), id="nothing to cut at"),
    ],
)
def test_tokenizers_with_context_beyond_a_segment_encode_whole_texts(tokenizer_json: Json) -> None:
    assert SegmentEncoder.of(tokenizer_json, 4) is None


def test_only_the_new_message_of_a_conversation_is_encoded(encoder: SegmentEncoder) -> None:
    by = Counted()
    assert encode(encoder, "system<s>question<ss>", by) == [*map(ord, "system"), 1, *map(ord, "question"), 2]
    encode(encoder, "system<s>question<ss>answer<s>more", by)
    assert by.texts == ["system", "question", "answer", "more"]


def test_scopes_share_no_cache_entries(encoder: SegmentEncoder) -> None:
    by = Counted()
    encode(encoder, "secret<s>", by, scope="one")
    encode(encoder, "secret<s>", by, scope="two")
    assert by.texts == ["secret", "secret"]


def test_a_text_beyond_the_context_is_refused_before_the_rest_is_encoded(encoder: SegmentEncoder) -> None:
    by = Counted()
    with pytest.raises(PagemillError) as refused:
        encode(encoder, "12345<s>678<s>rest", by, max_tokens=8)
    assert refused.value.code == "context_length_exceeded"
    assert by.texts == ["12345", "678"]
    assert len(encode(encoder, "12345<s>67", by, max_tokens=8)) == 8


def test_pieces_of_a_long_segment_are_counted_first(encoder: SegmentEncoder) -> None:
    by, long = Counted(), "x" * (segments.LONG_SEGMENT_CHARS + 1)
    with pytest.raises(PagemillError):
        encode(encoder, f"{long}<s>", by, max_tokens=100)
    assert max(map(len, by.texts)) < len(long)


def test_the_cache_is_bounded_and_evicts_the_least_recently_used_entry(
    encoder: SegmentEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "MAX_KEPT_TOKENS", 10 + 3 * segments.ENTRY_TOKENS)
    monkeypatch.setattr(segments, "MAX_SEGMENT_TOKENS", 4)
    by = Counted()
    for text in ("aaaa", "bbbb", "aaaa", "cc", "d", "eeeee"):
        encode(encoder, text, by)
        assert encoder.num_kept_tokens <= 10 + 3 * segments.ENTRY_TOKENS
    by.texts.clear()
    for text in ("aaaa", "cc", "d", "bbbb", "eeeee"):
        encode(encoder, text, by)
    assert by.texts == ["bbbb", "eeeee"]


def test_many_short_segments_are_bounded_by_their_memory(
    encoder: SegmentEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "MAX_KEPT_TOKENS", 16 * 1024)
    tracemalloc.start()
    try:
        for number in range(5000):
            encode(encoder, f"<s>{number}", Counted())
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 16 * 16 * 1024, "16 bytes a token, as the segments of long texts take"
