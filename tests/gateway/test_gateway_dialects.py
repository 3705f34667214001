"""Routes of TGI, Ollama and KServe at gateways: refusals in their formats, default models, and lists."""

from __future__ import annotations

import hashlib
from functools import reduce
from typing import Any

import msgspec
import pytest

from pagemill_api.dialects.transport import NDJSON
from pagemill_gateway.relay.sinks import StreamSink
from pagemill_protocol.catalog import Catalog
from pagemill_protocol.frames import encode_frame
from pagemill_protocol.request.generate import FrameMeta, Usage
from pagemill_routing.attempts.attempt_failures import UpstreamFailure

MESSAGES = [{"role": "user", "content": "hi"}]
TENSOR = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["hi"]}
BODIES: dict[str, dict[str, Any]] = {
    "/": {"inputs": "hi", "model": "MODEL"},
    "/generate": {"inputs": "hi", "model": "MODEL"},
    "/generate_stream": {"inputs": "hi", "model": "MODEL"},
    "/api/chat": {"model": "MODEL", "messages": MESSAGES},
    "/api/generate": {"model": "MODEL", "prompt": "hi"},
    "/v2/models/MODEL/generate": {"text_input": "hi"},
    "/v2/models/MODEL/versions/1/generate_stream": {"text_input": "hi"},
    "/v2/models/MODEL/infer": {"inputs": [TENSOR]},
}
KEYS = {"sk-one": "tenant=red models=tiny", "sk-two": "tenant=blue"}
ENTRIES = [f"{hashlib.sha256(key.encode()).hexdigest()} {entry}" for key, entry in KEYS.items()]


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def of(model: str, path: str) -> tuple[str, dict[str, Any]]:
    body = BODIES[path]
    return path.replace("MODEL", model), {**body, **({"model": model} if "model" in body else {})}


def said(reply: Any, path: str) -> str:
    """Return the message of an error in the format of the path's dialect."""
    expected = {"error", "error_type"} if path.startswith(("/generate", "/info")) or path == "/" else {"error"}
    assert set(reply.json) == expected, reply.raw
    message = reply.json["error"]
    assert isinstance(message, str)
    return message


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_names_the_fields_that_the_chat_template_does_not_read(engines, gateways, stream: bool) -> None:
    gateway = await gateways(engines[0])
    named = [{**MESSAGES[0], "name": "ann"}]
    reply = await gateway.chat(stream=stream, verbosity="low", messages=named)
    assert (reply.status, reply.headers["x-pagemill-unread-fields"]) == (200, "messages.name, verbosity")
    assert "x-pagemill-unread-fields" not in (await gateway.chat(stream=stream)).headers


@pytest.mark.parametrize("path", BODIES)
async def test_every_refusal_has_the_format_of_its_dialect(engines, gateways, path: str) -> None:
    gateway = await gateways(engines[0], api_keys=ENTRIES, max_body_bytes=10_000)
    target, body = of("tiny", path)
    other, unknown = of("nothing", path)

    reply = await gateway.post(target, body)
    assert (reply.status, "key" in said(reply, path)) == (401, True)
    reply = await gateway.post(other, unknown, key("sk-two"))
    assert (reply.status, "`nothing` does not exist" in said(reply, path)) == (404, True)
    for raw, content_type, status in (
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b"{}", "application/json", 400),
        (b'{"inputs": NaN}', "application/json", 400),
        (b"x" * 20_000, "application/json", 413),
        (b"{}", "text/plain", 415),
    ):
        headers = {"Content-Type": content_type, **key("sk-two")}
        async with gateway.session.post(gateway.url + target, data=raw, headers=headers) as response:
            assert response.status == status, await response.text()
            found = await response.json()
        assert isinstance(found["error"], str)
    assert not engines[0].requests


async def test_tensors_of_bytes_are_declared_as_bytes(engines, gateways) -> None:
    gateway = await gateways(engines[0])
    for path, status in (("/v2/models/tiny/infer", 400), ("/v2/models/tiny/generate", 415), ("/generate", 415)):
        headers = {"Content-Type": "application/octet-stream"}
        async with gateway.session.post(gateway.url + path, data=b"{}", headers=headers) as response:
            assert response.status == status, path


async def test_a_model_need_not_be_named_if_the_key_has_only_one(engines, gateways, fake) -> None:
    models = [fake.catalog_of(engines[0]).models[0]]
    models.append(msgspec.structs.replace(fake.catalog_of(engines[1]).models[0], deployment="e", name="other"))
    gateway = await gateways(*engines[:2], api_keys=ENTRIES, catalog=Catalog(models=models))
    body = {"inputs": "hi", "parameters": {"max_new_tokens": 2}}
    assert (await gateway.post("/generate", body, key("sk-one"))).status == 200
    assert [request.model for request in engines[0].requests] == ["tiny"]
    reply = await gateway.post("/generate", body, key("sk-two"))
    assert (reply.status, "field `model`" in said(reply, "/generate")) == (400, True)
    assert (await gateway.post("/generate", {**body, "model": "other"}, key("sk-two"))).status == 200
    assert [request.model for request in engines[1].requests] == ["other"]


async def test_an_embedding_model_does_not_count_as_a_second_text_model(engines, gateways, fake) -> None:
    engines[1].pools = True
    models = [fake.catalog_of(engines[0]).models[0]]
    models.append(msgspec.structs.replace(fake.catalog_of(engines[1]).models[0], deployment="e", name="encoder"))
    gateway = await gateways(*engines[:2], catalog=Catalog(models=models))
    reply = await gateway.post("/generate", {"inputs": "hi", "parameters": {"max_new_tokens": 2}})
    assert (reply.status, [request.model for request in engines[0].requests]) == (200, ["tiny"])
    assert (await gateway.get("/info")).json["model_id"] == "tiny"
    shown = (await gateway.post("/api/show", {"model": "encoder"})).json
    assert shown["capabilities"] == ["embedding"]


async def test_lists_and_descriptions_contain_the_models_that_the_key_may_use(engines, gateways, fake) -> None:
    models = [fake.catalog_of(engines[0]).models[0]]
    models.append(msgspec.structs.replace(fake.catalog_of(engines[1]).models[0], deployment="e", name="other"))
    gateway = await gateways(*engines[:2], api_keys=ENTRIES, catalog=Catalog(models=models))

    async def get(path: str, name: str = "sk-one") -> tuple[int, Any]:
        async with gateway.session.get(gateway.url + path, headers=key(name)) as response:
            return response.status, await response.json()

    status, info = await get("/info")
    assert (status, info["model_id"], info["max_total_tokens"]) == (200, "tiny", fake.MAX_MODEL_LEN)
    assert (await get("/info", "sk-two"))[0] == 400
    _, tags = await get("/api/tags")
    assert [each["model"] for each in tags["models"]] == ["tiny:latest"]
    assert [await get(f"/v2/models/{name}/ready") for name in ("tiny", "tiny/versions/1")] == [(200, {})] * 2
    status, hidden = await get("/v2/models/other")
    assert (status, "`other` does not exist" in hidden["error"]) == (404, True)
    shown = await gateway.post("/api/show", {"model": "other"}, key("sk-one"))
    assert (shown.status, "`other` does not exist" in said(shown, "/api/show")) == (404, True)
    assert (await gateway.get("/api/tags")).json == {"error": (await gateway.get("/v2")).json["error"]}
    for path in ("/v2/health/live", "/v2/health/ready"):
        assert (await gateway.get(path)).status == 200, "probes have no key"


async def test_an_unknown_name_with_a_line_break_is_refused_in_the_dialects_format(engines, gateways) -> None:
    gateway = await gateways(engines[0])
    reply = await gateway.post(*of("no%0Asuch", "/v2/models/MODEL/generate"))
    assert (reply.status, "does not exist" in reply.json["error"]) == (404, True)


async def test_lines_of_json_are_streamed_as_the_engine_sent_them(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0])
    last = encode_frame(FrameMeta(last=True, usage=Usage(1, 1)), b'{"done":true}\n')
    first = FrameMeta(token_ids=[1], num_text_chars=1, position=1, finish_reason="stop")
    engines[0].behaviours.append(fake.sends(encode_frame(first, b'{"a":1}\n'), last))
    reply = await gateway.post("/api/chat", of("tiny", "/api/chat")[1])
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert reply.raw == b'{"a":1}\n{"done":true}\n'


async def test_metrics_count_paths_with_a_model_as_one_route(engines, gateways) -> None:
    gateway = await gateways(engines[0])
    await gateway.post("/v2/models/nothing/versions/1/infer", {})
    await gateway.get("/v2/models/nothing/ready")
    metrics = (await gateway.get("/metrics", control=True)).raw.decode()
    assert 'route="/v2/models/{model:text}/infer"' in metrics
    assert 'route="/v2/models/{model:text}/ready"' in metrics
    assert "nothing" not in metrics


async def test_a_stream_of_lines_has_no_comments_and_only_whole_lines() -> None:
    written: list[bytes] = []

    async def write(data: bytes) -> None:
        written.append(data)

    sink = StreamSink(write, NDJSON)
    assert sink.waiting is None
    await sink.take([b"{}\n"], None)
    with pytest.raises(UpstreamFailure):
        await sink.take([b"{}"], None)
    assert written == [b"{}\n"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("levels", [100, 251])
async def test_a_body_nested_too_deeply_reaches_no_engine(engines, gateways, path: str, levels: int) -> None:
    gateway = await gateways(engines[0])
    target, body = of("tiny", path)
    deep = reduce(lambda inner, _: [inner], range(levels), "x")
    reply = await gateway.post(target, {**body, "x": deep})
    assert (reply.status, "more than 100 levels" in said(reply, path)) == (400, True)
    assert not engines[0].requests
