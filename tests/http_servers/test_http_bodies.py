"""Both HTTP servers serve any body or refuse it by name, never with a 5xx, and at low cost.

Bodies are written as bytes, because a JSON library writes only well-formed ones: repeated keys, numbers of 5,000
digits, surrogate halves, broken UTF-8.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_processes import (
    GOOD,
    MAX_MODEL_LEN,
    MIB,
    MODEL,
    HttpServer,
    costing_little,
    examples,
    growing_little,
    without_a_hang,
)

from pagemill_api.openai.schemas import ChatCompletionRequest, CompletionRequest, TokenizeRequest
from pagemill_api.openai.unsupported import CHAT, COMPLETIONS

PATHS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
FIELDS = sorted(
    {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields, *TokenizeRequest.model_fields}
    | {*CHAT, *COMPLETIONS, "tools", "tokens", "unheard_of"}
)
HOSTILE = [
    *(b"0 -0 -1 1 2 128 129 1e9 1000000000 2147483648 9223372036854775808 18446744073709551616 -9223372036854775809")
    .split(),
    *b"1.0 1e308 1e999 -1e999 0.1e-400 NaN Infinity -Infinity true false null".split(),
    b"1" * 5000,
    b"1." + b"9" * 5000,
    b'""', b'"\\u0000"', b'"\\ud800"', b'"\\udc00\\ud800"', b'"\xff\xfe"', b'"\xed\xa0\x80"', b'"\x00"',
    b'"\\ufeff\\u202e\\u0000"', b'"' + b"x" * 100_000 + b'"', b'"' + "𝕏é\u0301".encode() * 5000 + b'"',
    b"[]", b"{}", b"[[]]", b'[""]', b"[null]", b"[1,2,3]", b"[-1]", b"[1e9]", b'["a","b"]', b'{"1":1}', b'{"-1":1}',
    b'{"\\u0000":1}', b'{"a":1,"a":2}', b'[{"role":"user","content":"x"}]', b'[{"role":"tool","content":"x"}]',
    b'[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://127.0.0.1:1/x"}}]}]',
    b'[{"role":"user","content":[{"type":"text","text":"\\u0000"}]}]', b'[{"role":"assistant"}]', b'[{"content":null}]',
    b"[" * 500 + b"]" * 500, b"[" * 5000 + b"]" * 5000, b'{"a":' * 900 + b"1" + b"}" * 900, b'{"a":' * 3000,
    b"[" + b",".join([b'"a"'] * 3000) + b"]", b"[" + b",".join([b"7"] * 3000) + b"]",
    b"[" + b",".join([b"[]"] * 3000) + b"]", b"{" + b",".join(b'"%d":1' % n for n in range(3000)) + b"}",
    b"[[1,2],[3]]", b'[[1],"a"]', b"[true]", b"[1.5]", b"[49152]", b"[2147483647]", b'"never"',
    b'{"type":"json_schema","json_schema":{"schema":{"pattern":"(a+)+$"}}}',
    b'{"enable_thinking":true}', b'{"tokenize":true}', b'{"include_usage":true}',
]  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=10), children, max_size=4),
    max_leaves=12,
)
VALUE = st.one_of(
    st.sampled_from(HOSTILE), st.sampled_from(HOSTILE), JSON.map(lambda value: json.dumps(value).encode())
)
START = {
    "/v1/chat/completions": b'"model":"tiny","messages":[{"role":"user","content":"hi"}],"max_tokens":3',
    "/v1/completions": b'"model":"tiny","prompt":"hi","max_tokens":3',
    "/tokenize": b'"model":"tiny"',
    "/detokenize": b'"model":"tiny"',
}


@st.composite
def bodies(draw: st.DrawFn, path: str) -> bytes:
    """Draw a valid body with up to four more fields, which override earlier ones of the same name."""
    fields = draw(st.lists(st.tuples(st.sampled_from(FIELDS), VALUE), min_size=1, max_size=4))
    raw = b"{" + b",".join([START[path], *(b'"%b":%b' % (name.encode(), value) for name, value in fields)]) + b"}"
    if draw(st.integers(0, 9)) == 0:
        cut = draw(st.integers(0, len(raw)))
        raw = raw[:cut] + draw(st.binary(max_size=4)) + raw[cut + draw(st.integers(0, 3)) :]
    return raw


@pytest.mark.parametrize("path", PATHS)
def test_any_body_is_served_or_refused_in_the_error_format(http_servers: list[HttpServer], path: str) -> None:
    @examples(50)
    @given(bodies(path))
    def every(raw: bytes) -> None:
        for http_server in http_servers:
            answer = without_a_hang(partial(http_server.post, raw, path)).check()
            assert answer.headers["x-request-id"]

    every()
    for http_server in http_servers:
        http_server.serves()


@examples(30)
@given(st.one_of(st.binary(max_size=200), JSON.map(lambda value: json.dumps(value).encode())), st.sampled_from(PATHS))
def test_any_bytes_are_refused_in_the_error_format(http_servers: list[HttpServer], raw: bytes, path: str) -> None:
    for http_server in http_servers:
        answer = without_a_hang(partial(http_server.post, raw, path)).check()
        assert answer.status in (400, 404), answer


def chat(content: Any, **fields: Any) -> bytes:
    message = {"role": "user", "content": content}
    return json.dumps({"model": MODEL, "messages": [message], "max_tokens": 2, **fields}).encode()


HEAVY = {
    "7 MB of text": lambda: chat("a b " * (7 * MIB // 4)),
    "7 MB without a blank": lambda: chat("a" * 7 * MIB),
    "7 MB of emoji": lambda: (
        b'{"model":"tiny","messages":[{"role":"user","content":"' + "🧨".encode() * (7 * MIB // 4) + b'"}]}'
    ),
    "a million levels": lambda: b'{"model":"tiny","prompt":' + b"[" * MIB + b"]" * MIB + b"}",
    "a million objects in one another": lambda: b'{"model":' * (7 * MIB // 9),
    "half a million fields": lambda: b"{" + b",".join(b'"f%d":1' % n for n in range(500_000)) + b"}",
    "a number of 7 million digits": lambda: b'{"model":"tiny","seed":' + b"9" * 7 * MIB + b"}",
    "7 MB of escapes": lambda: b'{"model":"tiny","prompt":"' + b"\\u0000" * (7 * MIB // 6) + b'"}',
    "7 MB of half surrogates": lambda: b'{"model":"tiny","prompt":"' + b"\\ud800" * (7 * MIB // 6) + b'"}',
    "a field of 7 MB": lambda: b'{"' + b"k" * 7 * MIB + b'":1}',
    "two million token ids": lambda: b'{"model":"tiny","prompt":[' + b",".join([b"1"] * 2_000_000) + b"]}",
    "a million prompts": lambda: b'{"model":"tiny","prompt":[' + b",".join([b'"a"'] * 1_000_000) + b"]}",
    "a hundred thousand messages": lambda: json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": "x"}] * 100_000}
    ).encode(),
    "7 MB of stop strings": lambda: chat("x", stop=["s" * 1000] * 7000),
    "600,000 biases": lambda: chat("x", logit_bias={str(n): 1 for n in range(600_000)}),
    "7 MB of spaces": lambda: b" " * (7 * MIB) + b"{}",
}


@pytest.mark.slow_for("*half a million fields", "*600,000 biases")
@pytest.mark.parametrize("make", HEAVY.values(), ids=HEAVY.keys())
def test_the_heaviest_bodies_are_refused_at_low_cost(http_server: HttpServer, make: Callable[[], bytes]) -> None:
    raw = make()
    assert len(raw) < 8 * MIB
    path = "/v1/chat/completions" if b'"messages"' in raw[:100] else "/v1/completions"
    with costing_little(http_server):
        answer = http_server.post(raw, path).check()
    assert answer.status == 400
    assert len(answer.body) < 4096, "a refusal must not contain the body"
    http_server.serves()


LONG_TEXTS = {
    "digits": b"0" * 7_900_000,
    "spaces": b" " * 7_900_000,
    "letters": b"a" * 7_900_000,
    "emoji": "🧨".encode() * 1_900_000,
    "Chinese": "中".encode() * 2_600_000,
    "code": b"if x == 1:\\n        return None\\n" * 200_000,
    "special tokens": b"<|im_start|>" * 600_000,
    "as much as the longest tokens would hold": b" " * 81 * MAX_MODEL_LEN,
}


@pytest.mark.slow_for("*-special tokens-/v1/chat/completions")
@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("text", LONG_TEXTS.values(), ids=LONG_TEXTS.keys())
def test_a_text_beyond_the_context_is_refused_before_it_is_tokenized(
    http_server: HttpServer, path: str, text: bytes
) -> None:
    said = b'"messages":[{"role":"user","content":"%b"}]' if "chat" in path else b'"prompt":"%b"'
    with costing_little(http_server), growing_little(http_server):
        answer = http_server.post(b'{"model":"tiny",' + said % text + b"}", path).check()
    assert (answer.status, answer.error()["code"]) == (400, "context_length_exceeded")
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in answer.error()["message"]
    http_server.serves()


def test_more_token_ids_than_a_context_holds_are_refused_by_detokenize(http_server: HttpServer) -> None:
    with costing_little(http_server), growing_little(http_server):
        answer = http_server.post(
            b'{"model":"tiny","tokens":[' + b",".join([b"49000"] * 1_300_000) + b"]}", "/detokenize"
        )
    assert (answer.status, answer.error()["code"]) == (400, "context_length_exceeded")


@pytest.mark.slow_for("engine")
def test_memory_does_not_grow_under_hundreds_of_bad_requests(http_server: HttpServer) -> None:
    raws = [b'{"model":"tiny","prompt":"x","%b":%b}' % (n.encode(), v) for n in FIELDS for v in HOSTILE if len(v) < 99]
    bad = [raw for index, raw in enumerate(raws) if index % 16 == 0]
    unknown = [f"/v1/{number}" for number in range(250)]

    def storm() -> None:
        for raw in bad:
            http_server.post(raw, "/tokenize", {"X-Request-Id": "x"})
        for path in unknown:
            http_server.get(path, {"Authorization": "Bearer " + path})

    storm()
    before = http_server.rss_bytes()
    storm()
    assert len(bad) + len(unknown) > 500
    assert http_server.rss_bytes() - before < 24 * MIB
    http_server.serves()


def test_valid_requests_are_served_together_with_bad_ones(http_server: HttpServer) -> None:
    """Both use one connection."""
    for raw in HOSTILE[::5]:
        http_server.post(b'{"model":"tiny","prompt":' + raw + b"}").check()
        assert http_server.post(GOOD).status == 200
