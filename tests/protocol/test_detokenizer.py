"""Incremental detokenization: any cut gives the text of decoding at once, and never half a character."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from examples import num_examples
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_models.tokenizer_files.sentencepiece import decoder_json, model_json, normalizer_json
from pagemill_protocol.tokenizer_bundle import TokenizerBundle

PIECES = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "the", "▁▁", "é", "你", "fox"]
BYTES_FROM = 2


def metaspace_json() -> dict[str, object]:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}


def make_sentencepiece(decoder: dict[str, object]) -> Tokenizer:
    ids = {piece: index for index, piece in enumerate(PIECES)}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 1, "content": "<s>", **special}],
        "normalizer": normalizer_json(add_space_prefix=True),
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": decoder,
        "model": model_json(ids, [], "<unk>"),
    }
    return Tokenizer(TokenizerBundle(tokenizer_json=json.dumps(tokenizer)))


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    return make_sentencepiece(decoder_json(add_space_prefix=True))


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def tokenizer(request, byte_tokenizer, sentencepiece) -> Tokenizer:
    return byte_tokenizer if request.param == "byte-level" else sentencepiece


def pieces(tokenizer: Tokenizer, ids: list[int], cuts: list[int], prompt: tuple[int, ...] = ()) -> list[str]:
    """Return the pieces of a stream whose `ids` arrive cut at `cuts`; the last entry is the flush."""
    detokenizer = tokenizer.detokenizer(prompt)
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    shown = [detokenizer.push(ids[start:end]) for start, end in itertools.pairwise(edges)]
    return [*shown, detokenizer.flush()]


@settings(max_examples=num_examples(400), deadline=None)
@given(ids=st.lists(st.integers(0, 270), max_size=40), cuts=st.lists(st.integers(0, 100), max_size=20))
def test_any_cut_of_any_ids_gives_the_text_of_decoding_at_once(tokenizer, ids, cuts):
    assert "".join(pieces(tokenizer, ids, cuts)) == tokenizer.decode(ids)


@settings(max_examples=num_examples(300), deadline=None)
@given(text=st.text(max_size=30), cuts=st.lists(st.integers(0, 200), max_size=60))
def test_valid_text_never_shows_a_replacement_character(tokenizer, text, cuts):
    text = text.replace("\ufffd", "").replace("▁", "")
    ids = tokenizer.encode(text, add_special_tokens=False)
    shown = pieces(tokenizer, ids, cuts)
    assert "".join(shown) == text
    assert not any("\ufffd" in piece for piece in shown)
    assert shown[-1] == ""


@pytest.mark.model
@settings(max_examples=num_examples(100), deadline=None)
@given(ids=st.lists(st.integers(0, 49_151), max_size=60), cuts=st.lists(st.integers(0, 100), max_size=20))
def test_a_stream_of_the_embedded_model_equals_its_decoding(smollm2, ids, cuts):
    assert "".join(pieces(smollm2, ids, cuts)) == smollm2.decode(ids)


def test_a_character_appears_with_its_last_byte(byte_tokenizer):
    ids = byte_tokenizer.encode("a😀b")
    assert [byte_tokenizer.detokenizer().push(ids[:1])] == ["a"]
    detokenizer = byte_tokenizer.detokenizer()
    assert [detokenizer.push([token_id]) for token_id in ids] == ["a", "", "", "", "😀", "b"]


def test_an_unfinished_character_is_flushed_as_one_replacement_character(byte_tokenizer):
    detokenizer = byte_tokenizer.detokenizer()
    assert detokenizer.push(byte_tokenizer.encode("a😀")[:-1]) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
    assert detokenizer.push(byte_tokenizer.encode("b")) == "b"


def test_the_artificial_space_is_removed_only_at_the_start_of_a_text(sentencepiece):
    the = PIECES.index("▁the")
    assert sentencepiece.decode([the, the]) == "the the"
    assert sentencepiece.decode([1, the, the]) == "the the"
    assert sentencepiece.decode([1, the], skip_special_tokens=False) == "<s> the"
    assert sentencepiece.decode([PIECES.index("▁▁"), the]) == "  the"


def test_text_that_continues_a_prompt_keeps_its_space(sentencepiece):
    the = PIECES.index("▁the")
    assert sentencepiece.detokenizer([the]).push([the]) == " the"
    assert sentencepiece.detokenizer([1]).push([the]) == "the"
    assert sentencepiece.detokenizer([]).push([the]) == "the"


def test_a_character_begun_in_the_prompt_is_completed(tokenizer):
    ids = tokenizer.encode("a😀", add_special_tokens=False)
    detokenizer = tokenizer.detokenizer(ids[:-2])
    assert [detokenizer.push([token_id]) for token_id in ids[-2:]] == ["", "😀"]


def test_garbage_at_the_end_of_the_prompt_does_not_leak_into_the_text(byte_tokenizer):
    ids = byte_tokenizer.encode("x")
    broken = byte_tokenizer.encode("é")[1:]
    assert byte_tokenizer.detokenizer(broken * 5).push(ids) == "x"


def test_a_prompt_that_ends_inside_a_character_adds_nothing_to_an_empty_text(byte_tokenizer):
    assert byte_tokenizer.detokenizer(byte_tokenizer.encode("é")[:1]).flush() == ""


def test_special_tokens_are_hidden_by_default(sentencepiece):
    fox = PIECES.index("fox")
    assert sentencepiece.decode([fox, 1, fox]) == "foxfox"
    assert sentencepiece.decode([fox, 1, fox], skip_special_tokens=False) == "fox<s>fox"


def test_byte_tokens_are_joined_into_characters_across_a_hidden_token(sentencepiece):
    ids = [BYTES_FROM + byte for byte in "é".encode()]
    assert sentencepiece.decode([ids[0], 1, ids[1]]) == "é"


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**40])
def test_ids_outside_the_vocabulary_have_no_text(tokenizer, token_id):
    assert tokenizer.decode([token_id]) == ""
    assert tokenizer.token_text(token_id) == ""


def test_sentencepiece_text_is_decoded_like_the_tokenizers_library(sentencepiece):
    reference = Backend(models.BPE(vocab={piece: index for index, piece in enumerate(PIECES)}, merges=[]))
    reference.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    for text in ["the fox", "  the", "你好 é 😀", "x\n\ny"]:
        ids = sentencepiece.encode(text, add_special_tokens=False)
        assert sentencepiece.decode(ids) == reference.decode(ids) == text


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("content", ["<x>", "▁▁▁"])
def test_added_tokens_are_decoded_like_the_tokenizers_library(content, normalized):
    """A normalized token has the space that the normalizer puts before a text; runs of `▁` are spaces (Gemma)."""
    parsed = json.loads(make_sentencepiece(decoder_json(add_space_prefix=True)).bundle.tokenizer_json)
    added = {**parsed["added_tokens"][0], "id": len(PIECES), "content": content}
    parsed["added_tokens"].append({**added, "normalized": normalized, "special": False})
    text = json.dumps(parsed)
    reference, ours = Backend.from_str(text), Tokenizer(TokenizerBundle(tokenizer_json=text))
    for prompt in (f"the {content}fox", f"{content} the", f"the{content} {content}"):
        ids = reference.encode(prompt).ids
        assert len(PIECES) in ids
        assert ours.decode(ids) == reference.decode(ids)
    assert ours.decode([len(PIECES) - 1, len(PIECES)]) == reference.decode([len(PIECES) - 1, len(PIECES)])


def test_metaspace_decoders_are_supported():
    tokenizer = make_sentencepiece({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, metaspace_json()]})
    ids = tokenizer.encode("the 😀", add_special_tokens=False)
    assert tokenizer.decode(ids) == "the 😀"


def test_cost_is_linear_in_the_tokens(byte_tokenizer):
    def seconds(num_tokens: int) -> float:
        ids = byte_tokenizer.encode("ab 😀") * (num_tokens // 7)
        started = time.thread_time()
        detokenizer = byte_tokenizer.detokenizer()
        for token_id in ids:
            detokenizer.push([token_id])
        return time.thread_time() - started

    seconds(7_000)
    short, long = min(seconds(7_000) for _ in range(3)), min(seconds(70_000) for _ in range(3))
    assert long < short * 40
