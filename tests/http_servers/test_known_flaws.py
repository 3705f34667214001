"""Published flaws of other serving platforms, tested on both HTTP servers. `docs/hostile-input.md` numbers them.

If a flaw was in a feature that does not exist here, the test checks that it still does not exist.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from link_client import generate
from server_processes import GOOD, MIB, MODEL, HttpServer, costing_little, examples, request

from pagemill_engine.config import ServerConfig
from pagemill_gateway.config import GatewayConfig
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.hashes import block_hashes, root_hash
from pagemill_servers.auth import hash_key
from pagemill_servers.keys.caller import Caller
from pagemill_servers.keys.ring import KeyRing
from pagemill_servers.keys.scope import cache_salt

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "hostile-input.md"
SECURITY = ROOT / "docs" / "security.md"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"pattern": "(((((a+)+)+)+)+)$"}}},
    {"type": "string", "pattern": "[" * 5000},
    {"$ref": "#"},
    {"type": 7, "properties": []},
    {"allOf": [{"$ref": "#/allOf/0"}]},
]


def chat(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 2, **fields}


def refused(
    http_server: HttpServer, body: Any, param: str, path: str = "/v1/chat/completions", status: int = 400
) -> dict[str, Any]:
    answer = http_server.post(body, path)
    assert answer.status == status, answer
    error = answer.error()
    assert error["param"] == param, error
    http_server.serves()
    return error


class Canary:
    """An address that no server may contact."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/canary"

    def was_called(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._listener.accept()[0].close()
            return True
        return False


@pytest.fixture
def canary() -> Iterator[Canary]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield Canary(listener)


@pytest.mark.parametrize("n", [129, 16384, 10**9, 2**63, 2**64, 10**400, 1e308, -1, 0, "128", [1], True])
def test_huge_n_is_refused(http_server: HttpServer, n: Any) -> None:
    for name in ("n", "best_of"):
        with costing_little(http_server):
            refused(http_server, chat(**{name: n}), name)
        took_s: list[float] = []
        while len(took_s) < 30 and min(took_s, default=1.0) >= 0.05:  # other processes use the machine
            began_s = time.monotonic()
            http_server.post(chat(**{name: n}), "/v1/chat/completions")
            took_s.append(time.monotonic() - began_s)
        assert min(took_s) < 0.2, "the refusal must be quick"


def test_huge_headers_get_431_and_are_not_stored(http_server: HttpServer) -> None:
    http_server.serves()
    before = http_server.rss_bytes()
    for _ in range(40):
        answer = http_server.exchange(request(headers=[(b"X-Giant", b"a" * 4 * MIB)]))
        assert answer is None or (answer.status, answer.error()["code"]) == (431, "headers_too_large")
        answer = http_server.exchange(request(headers=[(b"X-%d" % number, b"a" * 100) for number in range(700)]))
        assert answer is not None
        assert answer.status == 431
    assert http_server.rss_bytes() - before < 16 * MIB
    http_server.serves()


@pytest.mark.parametrize(
    "name", ["tokenize", "messages", "chat_template", "add_generation_prompt", "padding", "a.b", ""]
)
def test_arguments_of_the_template_cannot_be_overridden(http_server: HttpServer, name: str) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        refused(http_server, chat(chat_template_kwargs={name: True}), "chat_template_kwargs", path)


def test_chat_templates_of_clients_are_refused(http_server: HttpServer) -> None:
    loop = "{% for a in range(10**9) %}{% for b in range(10**9) %}x{% endfor %}{% endfor %}"
    with costing_little(http_server):
        for path in ("/v1/chat/completions", "/tokenize"):
            refused(http_server, chat(chat_template=loop), "chat_template", path)


@pytest.mark.parametrize("parameters", SCHEMAS)
def test_malformed_tool_schemas_are_compiled_only_for_constrained_calls(
    http_server: HttpServer, parameters: Any
) -> None:
    function = {"name": "f", "parameters": parameters}
    with costing_little(http_server):
        answer = http_server.post(chat(tools=[{"type": "function", "function": function}]), "/v1/chat/completions")
        assert answer.status == 200 or answer.error()["code"] == "context_length_exceeded"
    strict = {"type": "function", "function": {**function, "strict": True}}
    param = (
        "structured_outputs" if parameters is SCHEMAS[0] else "tools[0].function.parameters"
    )  # of the engine, which is simulated
    for held in (
        {"tools": [strict]},
        {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
    ):
        answer = http_server.post(chat(**held), "/v1/chat/completions")
        assert answer.status == 400
        assert answer.error()["param"].startswith(param) or answer.error()["code"] == "context_length_exceeded"
    http_server.serves()


@pytest.mark.parametrize(
    "tool", [7, [], {}, {"type": "function"}, {"type": "function", "function": {"name": "f" * 999}}]
)
def test_malformed_tools_are_refused(http_server: HttpServer, tool: Any) -> None:
    answer = http_server.post(chat(tools=[tool]), "/v1/chat/completions")
    assert (answer.status, answer.error()["param"].startswith("tools[0]")) == (400, True)
    http_server.serves()


@pytest.mark.parametrize("schema", SCHEMAS[1:])
def test_malformed_schemas_and_expressions_are_refused(http_server: HttpServer, schema: Any) -> None:
    wrapped = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    refused(http_server, chat(response_format=wrapped), "response_format")
    refused(http_server, chat(guided_json=schema), "guided_json")
    refused(http_server, chat(guided_regex="(?=a)b"), "guided_regex")
    refused(http_server, chat(structured_outputs={"grammar": "root ::="}), "structured_outputs")


def test_expressions_that_cause_backtracking_elsewhere_cost_nothing(http_server: HttpServer) -> None:
    with costing_little(http_server):
        for form in ({"guided_json": SCHEMAS[0]}, {"guided_regex": "(((((a+)+)+)+)+)$"}):
            refused(http_server, chat(**form), "structured_outputs")  # by the engine, which is simulated


def test_hundreds_of_different_schemas_leave_no_files(http_server: HttpServer) -> None:
    before = {file.path for file in psutil.Process(http_server.process.pid).open_files()}
    for number in range(200):
        answer = http_server.post(
            chat(guided_json={"properties": {f"p{number}": {"const": number}}}), "/v1/chat/completions"
        )
        assert (answer.status, answer.error()["param"]) == (400, "structured_outputs")  # the engine is simulated
    assert {file.path for file in psutil.Process(http_server.process.pid).open_files()} <= before


def test_prompt_embeddings_are_refused(http_server: HttpServer) -> None:
    tensor = base64.b64encode(b"PK\x03\x04archive/data.pkl").decode()
    refused(http_server, {**GOOD, "prompt_embeds": tensor}, "prompt_embeds", "/v1/completions")


@pytest.mark.parametrize("kind", ["image_url", "video_url", "input_audio", "image", "file"])
def test_images_and_videos_in_a_body_are_refused_without_decoding(http_server: HttpServer, kind: str) -> None:
    frames = "data:video/jpeg;base64," + ",".join(["A" * 1000] * 5000)
    with costing_little(http_server):
        refused(http_server, chat([{"type": kind, kind: {"url": frames}}]), "messages[0].content[0].type")
    assert http_server.post(chat([{"type": kind, kind: {"url": frames * 2}}]), "/v1/chat/completions").status == 413


def test_a_tiny_image_affects_no_other_request(http_server: HttpServer) -> None:
    url = f"data:image/png;base64,{PIXEL}"
    refused(http_server, chat([{"type": "image_url", "image_url": {"url": url}}]), "messages[0].content[0].type")


PENALTY = st.sampled_from([-2.0, 0.0, 0.5, 2.0])


@pytest.mark.model
def test_no_combination_of_sampling_parameters_harms_the_engine(model_server: HttpServer) -> None:
    """The model is real, because the simulated device does not sample."""

    @examples(20)
    @given(
        st.fixed_dictionaries(
            {"presence_penalty": PENALTY, "frequency_penalty": PENALTY},
            optional={
                "repetition_penalty": st.sampled_from([5e-324, 1e-38, 1e-6, 0.5, 1.0, 10.0]),
                "temperature": st.sampled_from([0, 5e-324, 1e-9, 0.7, 2.0]),
                "top_k": st.sampled_from([-1, 0, 1, 2, 2**31 - 1]),
                "top_p": st.sampled_from([5e-324, 1e-9, 0.5, 1.0]),
                "min_p": st.sampled_from([0.0, 5e-324, 0.5, 1.0]),
                "seed": st.sampled_from([-(2**63), 0, 2**63 - 1]),
                "logit_bias": st.sampled_from([{}, {"0": -100}, {"5": 100}, {str(each): -100 for each in range(1000)}]),
                "logprobs": st.sampled_from([0, 1, 20]),
                "n": st.sampled_from([1, 3]),
                "best_of": st.sampled_from([1, 3, 4]),
                "use_beam_search": st.booleans(),
                "length_penalty": st.sampled_from([-10.0, 0.0, 10.0]),
                "min_tokens": st.sampled_from([0, 1, 4]),
                "ignore_eos": st.booleans(),
                "stop": st.sampled_from([[], ["e"], [" "] * 16]),
                "stop_token_ids": st.sampled_from([[], [0, 1, 2]]),
                "stream": st.booleans(),
                "echo": st.booleans(),
            },
        )
    )
    def every(sampling: dict[str, Any]) -> None:
        answer = model_server.post({"model": MODEL, "prompt": "one two three", "max_tokens": 4, **sampling}).check()
        assert answer.status in (200, 400)

    every()
    for name in ("repetition_penalty", "temperature", "top_p", "min_p"):
        for value in (5e-324, 1e-300, 1e-46, 1e-38, 1e-6):
            body = {"model": MODEL, "prompt": "one two one", "max_tokens": 2, "seed": 1, name: value}
            answer = model_server.post(body).check()
            assert answer.status == 200 or answer.error()["param"] == name
    model_server.serves()


def test_errors_contain_no_address_path_or_traceback(http_servers: list[HttpServer]) -> None:
    """Every refusal consists of parts of the request and of constants."""
    leak = re.compile(rb"0x[0-9a-f]{6,}|object at|Traceback|\.py\b|site-packages|File \"|127\.0\.0\.1|pydantic|orjson")
    bodies = [b"{", b"\xff", b"[]", b'{"model":7}', b'{"model":"tiny","prompt":{"a":[]}}', b'{"tokens":[1e9]}']
    bodies += [b'{"model":"tiny","messages":[%b]}' % each for each in (b"7", b"{}", b'{"role":"tool"}', b"[[]]")]
    for http_server in http_servers:
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/nowhere", "/v1/models"):
            for raw in bodies:
                answer = http_server.post(raw, path)
                assert answer.status >= 400
                assert not leak.search(answer.body), answer.body
        broken = http_server.exchange(b"BROKEN\r\n\r\n")
        assert broken is not None
        assert not leak.search(broken.body)
    reply = generate(http_servers[0].url, b"\x81\xa1a\x00", {"Authorization": "Bearer internal-secret"})
    assert reply.status == 400
    assert not leak.search(reply.body)


@pytest.mark.parametrize("disguise", ["{}", "http://trusted.example\\@{}", "{}#@trusted.example", "data:,{}"])
def test_no_address_in_a_request_is_ever_contacted(http_server: HttpServer, canary: Canary, disguise: str) -> None:
    url = disguise.format(canary.url)
    for kind in ("image_url", "video_url", "audio_url", "input_file"):
        refused(http_server, chat([{"type": kind, kind: {"url": url}}]), "messages[0].content[0].type")
    refused(http_server, chat(documents=[{"url": url}]), "documents")
    assert not canary.was_called()


def test_images_linked_in_text_are_not_downloaded(http_server: HttpServer, canary: Canary) -> None:
    answer = http_server.post(chat(f"![image]({canary.url}) <img src='{canary.url}'>"), "/v1/chat/completions")
    assert answer.status == 200
    assert http_server.post({**GOOD, "prompt": canary.url}).status == 200
    assert not canary.was_called()


@pytest.mark.parametrize(
    "name", ["{canary}", "file:///etc/passwd", "../../etc/passwd", "hf://evil/model", "sha256:../../x", "tiny/../x"]
)
def test_no_model_name_is_a_place_to_load_from(http_server: HttpServer, canary: Canary, name: str) -> None:
    name = name.format(canary=canary.url)
    refused(http_server, {**GOOD, "model": name}, "model", "/v1/completions", 404)
    answer = http_server.exchange(request(b"", method="GET", path=f"/v1/models/{name}"))
    assert answer is not None
    assert answer.status == 404
    assert not canary.was_called()


def test_keys_are_compared_by_digest_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    ring = KeyRing([hash_key("sk-right")])
    for token in ("sk-right", "sk-wrong", "s", "x" * 500):
        with contextlib.suppress(PagemillError):
            ring.authenticate({"headers": [(b"authorization", f"Bearer {token}".encode())]})
    assert [len(one) + len(other) for one, other in compared] == [64] * 4
    assert not any(b"sk-" in one + other for one, other in compared)


def test_no_tenant_uses_the_cached_prompts_of_another() -> None:
    """The deployment can configure this, and no prompt can be constructed with the hash of another."""
    callers = [Caller(key_hash="a" * 64, tenant="red"), Caller(key_hash="b" * 64, tenant="blue")]
    salts = [cache_salt("tenant", "ns/d", caller) for caller in callers]
    assert len(set(salts)) == 2
    prompt = list(range(64))
    hashes = [
        block_hashes(root_hash(weights_digest="w", kv_dtype="kv", block_size=16, salt=salt), prompt, 16)
        for salt in salts
    ]
    assert not set(hashes[0]) & set(hashes[1])
    assert {len(each) for each in hashes[0]} == {16}


@pytest.mark.parametrize("content_type", ["application/json", "application/octet-stream", "application/x-pickle"])
def test_pickled_bodies_are_never_unpickled(http_server: HttpServer, tmp_path: Path, content_type: str) -> None:
    mark = tmp_path / "mark"
    pickled = b"cposix\nsystem\n(Vtouch " + str(mark).encode() + b"\ntR."
    token = {"Authorization": "Bearer internal-secret"}
    for path in ("/v1/completions", "/tokenize"):
        assert http_server.post(pickled, path, {"Content-Type": content_type, **token}).status in (400, 404, 415)
    assert generate(http_server.url, pickled, token).status in (400, 404)
    http_server.serves()
    assert not mark.exists()


def test_only_the_two_ports_listen_and_only_on_this_machine(http_server: HttpServer) -> None:
    """The engine's two processes communicate over a Unix socket."""
    assert (GatewayConfig().host, GatewayConfig().control_host) == ("127.0.0.1", "127.0.0.1")
    assert (ServerConfig().host, ServerConfig().control_host) == ("127.0.0.1", "127.0.0.1")
    process = psutil.Process(http_server.process.pid)
    listening = [
        connection.laddr
        for each in [process, *process.children(recursive=True)]
        for connection in each.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert {address.ip for address in listening} == {"127.0.0.1"}
    assert {address.port for address in listening} == {
        int(url.rpartition(":")[2]) for url in (http_server.url, http_server.control_url)
    }


@given(st.text(st.characters(min_codepoint=33, max_codepoint=255), min_size=1, max_size=80) | st.just("' OR 1=1 --"))
def test_a_key_is_only_ever_looked_up_by_its_hash(token: str) -> None:
    assert re.fullmatch(r"[0-9a-f]{64}", hash_key(token))
    ring = KeyRing([hash_key("sk-right")])
    with pytest.raises(PagemillError) as refusal:
        ring.authenticate({"headers": [(b"authorization", b"Bearer " + token.encode("latin-1"))]})
    assert (refusal.value.status, refusal.value.code) == (401, "invalid_api_key")
    assert (
        token not in refusal.value.message or token in "Send a valid API key in the header `Authorization: Bearer KEY`."
    )


def test_the_documented_list_names_tests_that_exist() -> None:
    named = re.findall(r"`((?:tests|e2e)/\S+?\.py)::(test_\w+)`", TABLE.read_text() + SECURITY.read_text())
    assert len(named) >= 24
    missing = [f"{path}::{name}" for path, name in named if f"def {name}(" not in (ROOT / path).read_text()]
    assert missing == []
    mine = re.findall(r"^def (test_\w+)\(", Path(__file__).read_text(), re.MULTILINE)
    assert set(mine) - {name for _, name in named} == {"test_the_documented_list_names_tests_that_exist"}
