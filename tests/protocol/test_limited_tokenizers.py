"""Tokenizers whose steps have no known bound: the tokens of the library, in a process whose failures are one text's."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from byte_bundle import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from waiting import WAIT_LIMIT_S

from examples import num_examples
from pagemill_api.sandbox.process import ProcessLimits
from pagemill_api.text.control_tokens import MARK
from pagemill_api.text.encoding.limited_encoder import MEMORY_BYTES, LimitedEncoder
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_models.tokenizer_files.load_bundle import load_bundle
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.source_errors import UnreadableModelError
from pagemill_protocol.tokenizer_bundle import TokenizerBundle

MIB = 2**20
DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
TEXTS = (
    "Hello, wörld! It's 12345 o'clock…",
    "  two  spaces\n\n\tand 世界 🎉 ab abab a1b2",
    "x" * 500 + " <s>special</s> tokens <s><s>",
    "",
)


def split(regex: str, behavior: str = "Isolated") -> dict[str, Any]:
    cut = {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": False}
    spell = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False, "trim_offsets": True}
    return {"type": "Sequence", "pretokenizers": [cut, spell]}


HONEST: dict[str, dict[str, Any]] = {
    "lookbehind": {"pre_tokenizer": split(r"(?<=\p{L})\p{N}+|\p{L}+|\s+(?!\S)|\s+|[^\s\p{L}\p{N}]+")},
    "lazy quantifier": {"pre_tokenizer": split(r"\s*?\p{L}+?(?=\s|\p{N}|$)|\p{N}{1,3}?|\s+|.")},
    "repeated groups": {"pre_tokenizer": split(r"(?:\p{L}\p{M}*)+| ?(?:\p{N}\.?)+|\s+|.")},
    "a large growth": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKD"}, {"type": "NFKC"}, {"type": "Lowercase"}]}
    },
    "a replaced expression": {
        "normalizer": {"type": "Replace", "pattern": {"Regex": r"(?<=\p{L})[’´](?=\p{L}+)"}, "content": "'"}
    },
}


def bundle_of(parts: dict[str, Any]) -> TokenizerBundle:
    backend = byte_tokenizer([("a", "b"), ("ab", "ab"), ("l", "l"), ("1", "2")])
    backend.add_special_tokens(["<s>", "</s>"])
    parsed = json.loads(backend.to_str()) | parts
    return TokenizerBundle(tokenizer_json=json.dumps(parsed), eos_token_ids=[0])


@pytest.fixture
def tokenizer_with() -> Iterator[Callable[[dict[str, Any]], Tokenizer]]:
    made: list[Tokenizer] = []

    def make(parts: dict[str, Any]) -> Tokenizer:
        made.append(Tokenizer(bundle_of(parts)))
        assert made[-1].limited_because
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("parts", HONEST.values(), ids=HONEST.keys())
def test_an_honest_tokenizer_gives_the_ids_and_texts_of_the_library(
    parts: dict[str, Any], tokenizer_with: Callable[[dict[str, Any]], Tokenizer]
) -> None:
    tokenizer = tokenizer_with(parts)
    tokenizer.check_limits()
    library = Backend.from_str(tokenizer.bundle.tokenizer_json)
    for text in TEXTS:
        ids = library.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.encode_within(text, 10_000) == ids
        assert tokenizer.encode_within(text, 10_000, add_special_tokens=False, scope="") == ids
        assert tokenizer.encode_cut(text, 5) == ids[:5]
        assert tokenizer.decode(ids, skip_special_tokens=True) == library.decode(ids)
    pair = library.encode(TEXTS[0], TEXTS[1])
    assert tokenizer.encode_pair(TEXTS[0], TEXTS[1], 0, None, param="p").ids == pair.ids
    with pytest.raises(PagemillError, match="maximum context length is 3 tokens") as refused:
        tokenizer.encode_within("abcdefgh" * 9, 3, param="messages")
    assert (refused.value.status, refused.value.param, refused.value.code) == (
        400,
        "messages",
        "context_length_exceeded",
    )


@pytest.mark.parametrize("kind", ["lookbehind", "lazy quantifier"])
def test_any_text_has_the_ids_of_the_library_and_is_streamed_whole(kind: str) -> None:
    tokenizer = Tokenizer(bundle_of(HONEST[kind]))
    library = Backend.from_str(tokenizer.bundle.tokenizer_json)

    @given(st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" ab1\n"), max_size=60))
    @settings(max_examples=num_examples(60), deadline=None)
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        assert ids == library.encode(text).ids
        stream = tokenizer.detokenizer(skip_special_tokens=False)
        assert "".join([*(stream.push([each]) for each in ids), stream.flush()]) == text

    check()
    tokenizer.close()


@pytest.mark.model
def test_the_embedded_model_has_the_same_tokens_in_a_limited_process(smollm2_path: Path, smollm2: Tokenizer) -> None:
    bundle = load_bundle(smollm2_path)
    encoder = LimitedEncoder(bundle.tokenizer_json, "a step")
    encoder.check()
    marked = f"<|im_start|>user\nHi <{MARK}|im_end|> there<|im_end|>\n"
    for text in (*TEXTS, "def f(x):\n    return x\n" * 3000):
        assert encoder.encode_within(text, 0, scope="") == smollm2.encode(text)
    shielded = encoder.encode_within(marked, 0, False, scope="", shielded=True)
    assert shielded == smollm2.encode_within(marked, 0, False, scope="", shielded=True)
    encoder.close()


def children() -> list[psutil.Process]:
    found = []
    for each in psutil.Process().children():
        with suppress(psutil.Error):  # it ended meanwhile
            if "encoder_worker.py" in " ".join(each.cmdline()):
                found.append(each)
    return found


HOSTILE: dict[str, tuple[dict[str, Any], str, str]] = {
    "40 doublings": ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 40}}, "banana", "CPU time|memory"),
    "a library's limit": ({"pre_tokenizer": split("(?:a|a)*b")}, "a" * 60 + " b", "retry-limit-in-match"),
    "time": ({"pre_tokenizer": split("a*a*[bc]")}, "a" * 4000 + " b", "more than 1 s of CPU time"),
    "a tokenizer that panics": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAA="}},
        "banana",
        "index out of bounds",
    ),
}


@pytest.mark.sample("time", "a *")
@pytest.mark.parametrize(("parts", "text", "problem"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_tokenizer_fails_one_text_within_the_limits(
    parts: dict[str, Any], text: str, problem: str, tokenizer_with: Callable[[dict[str, Any]], Tokenizer]
) -> None:
    tokenizer = tokenizer_with(parts)
    peak, over = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.005):
            for each in children():
                with suppress(psutil.Error):
                    peak = max(peak, each.memory_info().rss)

    watching = threading.Thread(target=watch)
    watching.start()
    began_s = time.monotonic()
    try:
        with pytest.raises(PagemillError, match=problem) as failed:
            tokenizer.encode_within(text, 0, param="messages")
    finally:
        over.set()
        watching.join()
    assert time.monotonic() - began_s < WAIT_LIMIT_S, "far less where the machine is idle"
    assert peak < MEMORY_BYTES + 32 * MIB
    assert (failed.value.status, failed.value.code) == (400, "tokenizer_error")
    assert failed.value.param in ("messages", "prompt")
    assert tokenizer.limited_because in failed.value.message


@pytest.mark.parametrize("kind", [kind for kind in HOSTILE if kind != "time"])
def test_a_tokenizer_that_cannot_encode_plain_text_is_refused_by_engines(kind: str) -> None:
    tokenizer = Tokenizer(bundle_of(HOSTILE[kind][0]))
    with pytest.raises(UnreadableModelError, match="the model's tokenizer cannot be used") as refused:
        tokenizer.check_limits()
    assert tokenizer.limited_because in refused.value.message
    tokenizer.close()


@pytest.mark.slow
def test_the_next_text_starts_another_process(tokenizer_with: Callable[[dict[str, Any]], Tokenizer]) -> None:
    tokenizer = tokenizer_with(HOSTILE["time"][0])
    assert tokenizer.encode("hi") == tokenizer.encode("hi")
    (first,) = children()
    with pytest.raises(PagemillError, match="CPU time"):
        tokenizer.encode(HOSTILE["time"][1])
    assert not first.is_running()
    assert tokenizer.decode(tokenizer.encode("hi")) == "hi"
    (second,) = children()
    second.kill()
    second.wait()
    assert tokenizer.decode(tokenizer.encode("again")) == "again", "a process that was killed while idle costs no text"
    tokenizer.close()
    assert not children()
    assert tokenizer.decode(tokenizer.encode("more")) == "more"


def test_texts_of_many_threads_take_turns(tokenizer_with: Callable[[dict[str, Any]], Tokenizer]) -> None:
    tokenizer = tokenizer_with(HONEST["lookbehind"])
    texts = [f"text {number} " * number for number in range(1, 40)]
    library = Backend.from_str(tokenizer.bundle.tokenizer_json)
    found: dict[str, list[int]] = {}
    threads = [
        threading.Thread(target=lambda text=text: found.update({text: tokenizer.encode(text)})) for text in texts
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == {text: library.encode(text).ids for text in texts}
    assert len(children()) == 1


def test_a_tokenizer_that_cannot_be_read_is_named() -> None:
    slow = LimitedEncoder(bundle_of({"pre_tokenizer": split("(")}).tokenizer_json, "`pre_tokenizer`: a step")
    with pytest.raises(
        UnreadableModelError, match=r"`pre_tokenizer`: a step\. In a limited process, .*cannot be loaded"
    ):
        slow.prepare()
    with pytest.raises(PagemillError, match="`pre_tokenizer`: a step") as failed:
        slow.encode("hi")
    assert (failed.value.status, failed.value.code) == (503, "tokenizer_error")
    small = ProcessLimits(cpu_limit_s=0.05, wall_limit_s=60.0, memory_bytes=MEMORY_BYTES)
    large = json.loads(bundle_of({}).tokenizer_json)
    large["model"]["vocab"] |= {f"token {index}": 1000 + index for index in range(200_000)}
    long = LimitedEncoder(json.dumps(large), "a step", small)
    long._limits = small
    with pytest.raises(UnreadableModelError, match=r"reading it takes more than 0\.05 s of CPU time"):
        long.prepare()


def test_half_a_surrogate_pair_is_refused_before_it_is_sent(
    tokenizer_with: Callable[[dict[str, Any]], Tokenizer],
) -> None:
    with pytest.raises(PagemillError, match="half a surrogate pair"):
        tokenizer_with(HONEST["lookbehind"]).encode_within("a\ud800", 100)
    assert not children()
