"""Clients' requests beyond the basic API: compression, trailing slashes, other origins, and vLLM's routes."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from server_processes import GOOD, MIB, MODEL, HttpServer, costing_little, start_http_server

from pagemill_gateway.config import GatewayConfig, SettingsError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PAGE = "https://app.example.com"
PACKED = {"Content-Encoding": "gzip"}
KEY_HASH = hashlib.sha256(b"secret").hexdigest()


def raw(body: Any) -> bytes:
    return json.dumps(body).encode()


def test_a_trailing_slash_of_a_path_changes_nothing(http_server: HttpServer) -> None:
    assert http_server.post(GOOD, "/v1/completions/").status == 200
    assert http_server.get("/v1/models/").status == 200
    assert http_server.get("/nowhere/").error()["code"] == "not_found"


def test_a_gzip_body_is_read_like_an_uncompressed_one(http_server: HttpServer) -> None:
    assert http_server.post(gzip.compress(raw(GOOD)), headers=PACKED).status == 200


def test_several_gzip_members_are_one_body(http_server: HttpServer) -> None:
    whole = raw(GOOD)
    members = b"".join(gzip.compress(whole[at : at + 20]) for at in range(0, len(whole), 20))
    assert http_server.post(members, headers=PACKED).status == 200
    bomb = gzip.compress(b'{"x": "') + gzip.compress(b"x" * (64 * MIB)) * 4
    assert http_server.post(bomb, headers=PACKED).error()["code"] == "request_too_large"
    many = gzip.compress(b"") * 10_000 + gzip.compress(whole)
    with costing_little(http_server):
        assert http_server.post(many, headers=PACKED).status == 400


def test_a_zstd_body_is_read_in_one_frame_and_in_several(http_server: HttpServer) -> None:
    headers, whole = {"Content-Encoding": "zstd"}, raw(GOOD)
    frames = b"".join(zstd.compress(whole[at : at + 20]) for at in range(0, len(whole), 20))
    for body in (zstd.compress(whole), zstd.compress(whole, 19), frames):
        assert http_server.post(body, headers=headers).status == 200


def test_a_zstd_body_is_bounded_by_its_decompressed_size_its_frames_and_its_window(http_server: HttpServer) -> None:
    headers = {"Content-Encoding": "zstd"}
    bomb = zstd.compress(b'{"x": "' + b"x" * (256 * MIB))
    assert len(bomb) < MIB
    assert http_server.post(bomb, headers=headers).status == 413
    many = zstd.compress(b"") * 10_000 + zstd.compress(raw(GOOD))
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
    wide = compressor.compress(raw(GOOD)) + compressor.flush()
    for body in (many, wide, b"not zstd", zstd.compress(raw(GOOD))[:-2], zstd.compress(raw(GOOD)) + b"more"):
        answer = http_server.post(body, headers=headers)
        assert (answer.status, answer.error()["param"]) == (400, "content-encoding"), body[:20]
    http_server.serves()


def test_a_deflate_body_is_read_with_and_without_its_head(http_server: HttpServer) -> None:
    headers = {"Content-Encoding": "deflate"}
    headless = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    for body in (zlib.compress(raw(GOOD)), headless.compress(raw(GOOD)) + headless.flush()):
        assert http_server.post(body, headers=headers).status == 200
    for body in (raw(GOOD), zlib.compress(raw(GOOD))[:-5], zlib.compress(raw(GOOD)) + b"more"):
        answer = http_server.post(body, headers=headers)
        assert (answer.status, answer.error()["param"]) == (400, "content-encoding")


@pytest.mark.slow
def test_a_body_that_decompresses_beyond_the_limit_gets_413_at_low_cost(http_server: HttpServer) -> None:
    bomb = gzip.compress(b'{"x": "' + b"x" * (256 * MIB))
    before = http_server.rss_bytes()
    with costing_little(http_server):
        assert http_server.post(bomb, headers=PACKED).error()["code"] == "request_too_large"
    assert http_server.rss_bytes() - before < 64 * MIB
    http_server.serves()


@pytest.mark.parametrize(
    "body",
    [b"not gzip", gzip.compress(raw(GOOD))[:-5], gzip.compress(raw(GOOD)) + b"more", zlib.compress(raw(GOOD)), b""],
    ids=["text", "cut off", "followed by more", "zlib", "empty"],
)
def test_a_body_that_is_no_gzip_stream_gets_400(http_server: HttpServer, body: bytes) -> None:
    answer = http_server.post(body, headers=PACKED)
    assert answer.status == 400
    if body:
        assert answer.error()["param"] == "content-encoding"


def test_other_content_encodings_get_415_with_the_remedy(http_server: HttpServer) -> None:
    answer = http_server.post(raw(GOOD), headers={"Content-Encoding": "br"})
    assert answer.status == 415
    assert "Send it as gzip" in answer.error()["message"]
    assert answer.headers["accept-encoding"] == "gzip, deflate, zstd"


def test_a_large_answer_is_compressed_only_for_clients_that_accept_it(http_server: HttpServer) -> None:
    with http_server.client.stream("GET", "/openapi.json", headers={"Accept-Encoding": "br, gzip"}) as packed:
        data = b"".join(packed.iter_raw())
    assert packed.headers["content-encoding"] == "gzip"
    # A gateway sends a large answer in parts, each compressed as it passes, so that its length is not known before.
    length = packed.headers.get("content-length")
    assert packed.headers["transfer-encoding"] == "chunked" if length is None else int(length) == len(data)
    plain = http_server.get("/openapi.json", headers={"Accept-Encoding": "gzip;q=0"})
    assert "content-encoding" not in plain.headers
    assert gzip.decompress(data) == plain.body
    small = http_server.post(GOOD, headers={"Accept-Encoding": "gzip"})
    assert "content-encoding" not in small.headers


def test_a_stream_is_never_compressed(http_server: HttpServer) -> None:
    answer = http_server.post({**GOOD, "stream": True, "max_tokens": 200}, headers={"Accept-Encoding": "gzip"})
    assert len(answer.body) > 4096
    assert "content-encoding" not in answer.headers


def test_answers_state_their_duration(http_server: HttpServer) -> None:
    assert 0 <= int(http_server.post(GOOD).headers["openai-processing-ms"]) < 60_000


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_request_id_in_the_body_is_used_for_the_answer(http_server: HttpServer, path: str) -> None:
    prompt = {"prompt": ["a", "b"]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    body = {"model": MODEL, "max_tokens": 2, "request_id": "my-1", **prompt}
    for _ in range(2):
        answer = json.loads(http_server.post(body, path).body)
        assert answer["id"] == ("cmpl-my-1" if path == "/v1/completions" else "chatcmpl-my-1")
    assert http_server.post({**body, "request_id": "a b"}, path).error()["param"] == "request_id"


def test_vllms_routes_are_served(http_server: HttpServer) -> None:
    assert http_server.get("/ping").status == 200
    assert json.loads(http_server.get("/load").body) == {"server_load": 0}
    info = json.loads(http_server.get("/server_info").body)
    assert info["models"] == [MODEL]
    page = http_server.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert b"POST /v1/chat/completions" in page.body
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert b"<script" not in page.body


def test_without_configured_origins_no_page_is_allowed_anything(http_server: HttpServer) -> None:
    answer = http_server.get("/v1/models", headers={"Origin": PAGE})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert http_server.client.options("/v1/models", headers={"Origin": PAGE}).status_code == 405


@pytest.fixture(scope="module")
def gateway_for_pages(engine_server: HttpServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """Start a gateway with a key and one origin."""
    endpoint = {"id": "engine-0", "data_url": engine_server.url, "control_url": engine_server.control_url}
    model = {"deployment": MODEL, "name": MODEL, "engine_token": engine_server.control_token, "endpoints": [endpoint]}
    values = {"port": 0, "control_port": 0, "control_token": "t", "allowed_origins": [PAGE]}
    values |= {"api_keys": [f"{KEY_HASH} tenant=a"], "catalog": {"models": [model]}}
    folder = tmp_path_factory.mktemp("pages")
    http_server = start_http_server("gateway", "pagemill_gateway", folder, values, {"Authorization": "Bearer secret"})
    yield http_server
    http_server.stop()


def test_only_pages_of_a_configured_origin_are_answered(gateway_for_pages: HttpServer) -> None:
    http_server = gateway_for_pages
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    before = http_server.client.options("/v1/chat/completions", headers={"Origin": PAGE, **asked})
    assert (before.status_code, before.headers["access-control-allow-origin"]) == (204, PAGE)
    assert before.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "access-control-allow-credentials" not in before.headers
    for key, status in (("secret", 200), ("wrong", 401)):
        answer = http_server.get("/v1/models", headers={"Origin": PAGE, "Authorization": f"Bearer {key}"})
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, PAGE)
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    other = http_server.client.options("/v1/chat/completions", headers={"Origin": "https://evil.example", **asked})
    assert other.status_code == 405
    assert "access-control-allow-origin" not in other.headers


def test_no_key_can_read_the_load_of_a_gateway(gateway_for_pages: HttpServer) -> None:
    answer = gateway_for_pages.get("/load")
    assert (answer.status, answer.error()["code"]) == (403, "load_not_shown")


@pytest.mark.parametrize("origin", ["app.example.com", "https://app.example.com/path", "ftp://x", ""])
def test_an_invalid_origin_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(SettingsError, match="allowed_origins"):
        GatewayConfig(allowed_origins=[origin]).checked()


SHAPED = {
    "/v1/chat/completions": ("error", "message"),
    "/v1/messages": ("error", "message"),
    "/v1/messages/count_tokens": ("error", "message"),
    "/generate": ("error",),
    "/api/chat": ("error",),
    f"/v2/models/{MODEL}/infer": ("error",),
}
"""The path of the error's text, by route."""


@pytest.mark.parametrize("path", SHAPED)
def test_errors_outside_of_routes_have_the_format_of_their_path(http_server: HttpServer, path: str) -> None:
    refused = [
        (413, http_server.post(b"x" * (9 * MIB), path)),
        (415, http_server.post(b"x", path, {"Content-Encoding": "br"})),
        (
            405,
            http_server.get(path) if "/v2/" not in path else http_server.post(b"{}", path.replace("/infer", "/config")),
        ),
        (404, http_server.post(b"{}", f"{path}/nowhere" if "/v2/" not in path else "/v2/nowhere")),
    ]
    for status, answer in refused:
        answer.error()
        shown: Any = json.loads(answer.body)
        assert (answer.status, shown.get("type")) == (status, "error" if "/messages" in path else None), answer
        assert ("error_type" in shown) == (path == "/generate"), answer
        for name in SHAPED[path]:
            shown = shown[name]
        assert isinstance(shown, str), answer


def _parts(kind: str, text: str = "text") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": text, "text": "a"}, {"type": kind}]}]


MEDIA: list[tuple[str, dict[str, Any], str]] = [
    *(
        ("/v1/chat/completions", {"messages": _parts(kind)}, f"{kind} messages[0].content[1].type")
        for kind in ("image_url", "input_audio", "audio_url", "video_url", "file")
    ),
    *(
        ("/v1/responses", {"input": _parts(kind, "input_text")}, f"{kind} input[0].content[1].type")
        for kind in ("input_image", "input_audio", "input_video", "input_file")
    ),
    *(
        ("/v1/messages", {"messages": _parts(kind), "max_tokens": 1}, f"{kind} messages[0].content[1].type")
        for kind in ("image", "audio", "video", "document")
    ),
    ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["aa"]}]}, "image messages[0].images[0]"),
    ("/api/generate", {"prompt": "a", "images": ["aa"]}, "image images[0]"),
    (f"/v2/models/{MODEL}/generate", {"text_input": "a", "image": "aa"}, "image"),
    ("/v1/embeddings", {"messages": _parts("image_url")}, "messages"),
]
"""Path, body, and text that the answer must contain."""


@pytest.mark.parametrize(("path", "body", "words"), MEDIA, ids=lambda value: value if isinstance(value, str) else "")
def test_images_audio_and_video_are_refused_by_name_and_path(
    http_server: HttpServer, path: str, body: dict[str, Any], words: str
) -> None:
    answer = http_server.post({"model": MODEL, **body}, path)
    assert answer.status == 400, answer
    assert not [word for word in words.split() if word not in answer.body.decode()], answer
