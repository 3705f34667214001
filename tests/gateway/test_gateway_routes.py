"""Responses to clients when engines work: every route, and every refusal before routing."""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path

import msgspec
import openai
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from waiting import eventually

from pagemill_protocol.catalog import Catalog
from pagemill_protocol.metrics import GATEWAY_METRICS
from pagemill_protocol.resource.served import QueueLimits
from pagemill_protocol.versions import protocol_headers
from pagemill_servers.auth import hash_key
from pagemill_simulator.workloads.traces import read_trace


@pytest.mark.layouts
async def test_a_chat_is_answered_as_a_body_and_as_a_stream(engines, gateways) -> None:
    gateway = await gateways(*engines)
    reply = await gateway.chat()
    assert (reply.status, reply.text) == (200, "hello world")
    streamed = await gateway.chat(stream=True, stream_options={"include_usage": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.streamed_text == "hello world"
    assert streamed.events[-1] == "[DONE]"
    assert streamed.events[-2]["usage"]["completion_tokens"] == 2
    assert streamed.events[0]["id"].startswith("chatcmpl-")


async def test_the_engine_gets_rendered_tokens_an_id_a_deadline_and_a_seed(engines, gateways) -> None:
    gateway = await gateways(engines[0])
    reply = await gateway.chat(temperature=0.5, max_tokens=7)
    request = engines[0].requests[0]
    assert len(request.prompt_token_ids) == len("<user>hi<assistant>")
    assert request.request_id == reply.json["id"]
    assert request.created_unix_s > 1_700_000_000
    assert request.sampling.seed is not None
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.5, 7)


async def test_requests_spread_over_all_engines(engines, gateways, fake) -> None:
    gateway = await gateways(*engines)
    gate = asyncio.Event()
    for engine in engines:
        engine.behaviour = fake.says("a", "b", gate=gate)
    running = [asyncio.create_task(gateway.chat(stream=True)) for _ in range(30)]
    await fake.until(lambda: sum(len(engine.requests) for engine in engines) == 30)
    assert [len(engine.requests) for engine in engines] == [10, 10, 10]
    gate.set()
    assert {reply.streamed_text for reply in await asyncio.gather(*running)} == {"ab"}


async def test_several_prompts_are_answered_in_one_body(engines, gateways) -> None:
    gateway = await gateways(*engines)
    reply = await gateway.complete(prompt=["a", "bb", [1, 2, 3]], n=2)
    assert [choice["index"] for choice in reply.json["choices"]] == [0, 1, 2, 3, 4, 5]
    assert reply.json["usage"]["prompt_tokens"] == 6
    assert {len(engine.requests) for engine in engines} == {1}
    seeds = {engine.requests[0].sampling.seed for engine in engines}
    assert len(seeds) == 3, "equal prompts must not get equal answers"


async def test_several_prompts_are_answered_in_one_stream_with_one_end(engines, gateways) -> None:
    gateway = await gateways(*engines)
    reply = await gateway.complete(prompt=["a", "b", "c"], stream=True, stream_options={"include_usage": True})
    events = reply.events
    assert events.count("[DONE]") == 1
    assert events[-1] == "[DONE]"
    assert events[-2]["usage"]["prompt_tokens"] == 3
    assert events[-2]["choices"] == []
    texts = dict.fromkeys(range(3), "")
    for event in events[:-2]:
        assert event["usage"] is None
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert set(texts.values()) == {"hello world"}
    assert len({event["id"] for event in events[:-1]}) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.layouts
async def test_continuous_usage_passes_through_in_every_chunk(engines, gateways, path) -> None:
    gateway = await gateways(*engines)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": ["a", "b"]}
    reply = await gateway.post(path, {"model": "tiny", **body, "n": 2, "stream": True, "stream_options": options})
    *chunks, last, done = reply.events
    counts: dict[int, list[int]] = {}
    for chunk in chunks:
        counts.setdefault(chunk["choices"][0]["index"], []).append(chunk["usage"]["completion_tokens"])
    assert set(map(tuple, counts.values())) == {(1, 2)}
    assert (last["usage"]["completion_tokens"], done) == (2 * len(counts), "[DONE]")


async def test_prompts_beyond_the_concurrency_limit_all_get_answers(engines, gateways) -> None:
    gateway = await gateways(*engines)
    reply = await gateway.complete(prompt=["x"] * 200, max_tokens=2)
    assert [choice["index"] for choice in reply.json["choices"]] == list(range(200))


@pytest.mark.layouts
async def test_models_and_aliases_are_listed_once(engines, gateways, fake) -> None:
    catalog = fake.catalog_of(engines[0], aliases=["org/tiny-model"])
    gateway = await gateways(engines[0], catalog=catalog)
    listing = (await gateway.get("/v1/models")).json
    assert [model["id"] for model in listing["data"]] == ["tiny", "org/tiny-model"]
    assert listing["data"][0]["max_model_len"] == fake.MAX_MODEL_LEN
    assert (await gateway.get("/v1/models/org/tiny-model")).json["id"] == "org/tiny-model"
    assert (await gateway.get("/v1/models/nope")).status == 404
    assert (await gateway.chat(model="org/tiny-model")).json["model"] == "org/tiny-model"


@pytest.mark.layouts
async def test_tokenize_and_detokenize_are_inverse(engines, gateways) -> None:
    gateway = await gateways(*engines)
    tokens = (await gateway.post("/tokenize", {"prompt": "héllo", "return_token_strs": True})).json
    assert tokens["count"] == 6
    text = (await gateway.post("/detokenize", {"model": "tiny", "tokens": tokens["tokens"]})).json
    assert text["prompt"] == "héllo"
    chat = (await gateway.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]})).json
    assert chat["count"] == len("<user>hi<assistant>")


async def test_tokenizing_a_long_prompt_does_not_block_the_event_loop(engines, gateways) -> None:
    for engine in engines:
        engine.max_model_len = 1_000_000
    gateway = await gateways(*engines)
    loop = asyncio.get_running_loop()

    async def blocked_share() -> float:
        """Return the longest time in which the loop ran nothing else, as a share of the request's."""
        slowest_s = 0.0

        async def watch() -> None:
            nonlocal slowest_s
            while True:
                before = loop.time()
                await asyncio.sleep(0.001)
                slowest_s = max(slowest_s, loop.time() - before)

        watcher = asyncio.create_task(watch())
        started_at = loop.time()
        reply = await gateway.post("/tokenize", {"prompt": "word " * 150_000})
        watcher.cancel()
        assert reply.json["count"] == 750_000
        return slowest_s / (loop.time() - started_at)

    shares: list[float] = []
    while len(shares) < 5 and min(shares, default=1.0) >= 0.5:  # a busy machine may stop this process at any of them
        shares.append(await blocked_share())
    assert min(shares) < 0.5


@pytest.mark.layouts
async def test_probes_and_version_answer_on_both_ports(engines, gateways) -> None:
    gateway = await gateways(*engines)
    for path in ("/livez", "/readyz", "/version"):
        for control in (False, True):
            assert (await gateway.get(path, control=control)).status == 200
    assert (await gateway.get("/health")).status == 200


@pytest.mark.layouts
async def test_metrics_are_not_served_on_the_data_port(engines, gateways) -> None:
    gateway = await gateways(*engines)
    await gateway.chat()
    refused, unheard_of = await gateway.get("/metrics"), await gateway.get("/unheard-of")
    assert (refused.status, refused.error["code"]) == (404, "not_found")
    assert refused.error["message"].replace("/metrics", "/unheard-of") == unheard_of.error["message"]
    text = (await gateway.get("/metrics", control=True)).raw.decode()
    answered = (
        'model="tiny",outcome="completed",route="/v1/chat/completions",status="200",stream="false",variant="default/d"'
    )
    assert f"pagemill_gateway_requests_total{{{answered}}} 1.0" in text
    assert 'pagemill_gateway_endpoints{model="tiny",phase="ready",variant="default/d"} 3.0' in text
    assert 'pagemill_gateway_tokens_total{kind="completion",model="tiny",variant="default/d"} 2.0' in text


async def test_a_scraper_that_accepts_openmetrics_gets_it(engines, gateways) -> None:
    gateway = await gateways(*engines)
    await gateway.chat()
    answer = await gateway.get("/metrics", control=True, accept="application/openmetrics-text;version=1.0.0")
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert answer.raw.endswith(b"# EOF\n")
    families = {family.name for family in text_string_to_metric_families(answer.raw.decode())}
    assert {spec.name for spec in GATEWAY_METRICS} <= families


async def test_without_a_redis_setting_no_metric_reports_its_absence(engines, gateways) -> None:
    gateway = await gateways(*engines)
    text = (await gateway.get("/metrics", control=True)).raw.decode()
    assert [line for line in text.splitlines() if line.startswith("pagemill_gateway_redis_up")] == []


async def test_status_shows_each_endpoint(engines, gateways) -> None:
    gateway = await gateways(*engines)
    status = (await gateway.get("/status", control=True)).json
    model = status["models"][0]
    assert (model["name"], status["ready"], status["num_requests"]) == ("tiny", True, 0)
    assert [endpoint["phase"] for endpoint in model["endpoints"]] == ["ready"] * 3
    assert all(0 <= endpoint["state_age_s"] < 5 for endpoint in model["endpoints"])


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "nope"}, 404, "model"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"temperature": 9}, 400, "temperature"),
        ({"messages": []}, 400, "messages"),
        ({"max_tokens": 10_000}, 400, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "messages"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ],
)
async def test_invalid_fields_are_named(engines, gateways, fields, status, param) -> None:
    gateway = await gateways(engines[0])
    reply = await gateway.chat(**fields)
    assert (reply.status, reply.error["param"]) == (status, param)
    assert not engines[0].requests


BAD_SAMPLING = [
    ({"temperature": 9}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop": [""]}, "stop"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"logit_bias": {"1000000": 1}}, "logit_bias"),
]


@pytest.mark.parametrize("padding", [0, 10_000])
@pytest.mark.parametrize(("fields", "param"), BAD_SAMPLING)
async def test_an_invalid_sampling_value_is_refused_before_the_template_is_rendered(
    engines, gateways, fake, fields, param, padding
) -> None:
    """The test covers short and long chats; a valid one reaches the template, which refuses all."""
    template = "{{ raise_exception('rendered') }}"
    gateway = await gateways(engines[0], catalog=fake.catalog_of(engines[0], chat_template=template))
    reply = await gateway.chat(**fields, padding="x" * padding)
    assert (reply.status, reply.error["param"]) == (400, param)
    good = await gateway.chat(padding="x" * padding)
    assert good.status == 400
    assert "rendered" in good.error["message"]


@pytest.mark.parametrize(("fields", "param"), BAD_SAMPLING[:3])
async def test_an_invalid_sampling_value_neither_wakes_nor_waits_for_an_engine(gateways, fake, fields, param) -> None:
    queue = QueueLimits(max_requests=10, max_bytes=10**6, timeout_s=60.0)
    gateway = await gateways(catalog=fake.catalog_of(wakes=True, queue=queue))
    queues = gateway.gateway.control.brain.queues
    for reply in (await gateway.chat(**fields), await gateway.complete(**fields)):
        assert (reply.status, reply.error["param"]) == (400, param)
    assert not queues.outcomes
    waiting = asyncio.create_task(gateway.chat())
    await fake.until(lambda: not queues.is_empty("default/d"))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_invalid_bodies_routes_and_methods_are_refused_in_openais_format(engines, gateways) -> None:
    gateway = await gateways(engines[0], max_body_bytes=10_000)
    url = gateway.url + "/v1/chat/completions"

    async def post(data: bytes, **headers: str) -> int:
        headers = {"content-type": "application/json", **{name.replace("_", "-"): headers[name] for name in headers}}
        async with gateway.session.post(url, data=data, headers=headers) as response:
            assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
            return response.status

    assert await post(b"{") == 400
    assert await post(b'{"model": "\xff"}') == 400
    assert await post(b'{"temperature": NaN}') == 400
    assert await post(b"x" * 20_000) == 413
    assert await post(b"{}", content_type="text/plain") == 415
    assert await post(b"{}", x_request_timeout_s="soon") == 400
    assert (await gateway.get("/v1/chat/completions")).status == 405
    assert (await gateway.get("/nope")).error["code"] == "not_found"
    assert (await gateway.chat()).status == 200


async def test_a_prompt_longer_than_the_models_context_is_refused_by_the_gateway(engines, gateways, fake) -> None:
    gateway = await gateways(*engines)
    reply = await gateway.complete(prompt=[1] * (fake.MAX_MODEL_LEN + 1))
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert str(fake.MAX_MODEL_LEN) in reply.error["message"]
    assert [len(engine.requests) for engine in engines] == [0, 0, 0]
    assert (await gateway.complete()).status == 200


async def test_the_request_id_is_sent_to_the_engine_and_returned(engines, gateways) -> None:
    gateway = await gateways(*engines)
    reply = await gateway.chat(headers={"x-request-id": "abc-1"})
    assert reply.headers["x-request-id"] == "abc-1"
    assert [name for engine in engines for name in engine.request_ids] == ["abc-1"], "engines must log the id too"
    assert (await gateway.chat(headers={"x-request-id": "bad id\u00e9"})).headers["x-request-id"] != "bad id\u00e9"


async def test_only_known_keys_are_accepted(engines, gateways) -> None:
    keys = [hashlib.sha256(key.encode()).hexdigest() for key in ("sk-one", "sk-two")]
    gateway = await gateways(engines[0], api_keys=keys)
    assert (await gateway.chat()).status == 401
    in_anthropics_shape = (await gateway.post("/v1/messages", {"model": "m"})).json
    assert (in_anthropics_shape["type"], in_anthropics_shape["error"]["type"]) == ("error", "authentication_error")
    assert (await gateway.chat(headers={"Authorization": "Bearer sk-three"})).error["code"] == "invalid_api_key"
    assert (await gateway.chat(headers={"Authorization": f"Bearer {keys[0]}"})).status == 401
    assert (await gateway.get("/v1/models")).status == 401
    assert (await gateway.post("/tokenize", {"prompt": "a"})).status == 401
    for key in ("sk-one", "sk-two"):
        assert (await gateway.chat(headers={"Authorization": f"Bearer {key}"})).status == 200
    assert (await gateway.get("/readyz")).status == 200


async def test_keys_share_cached_prompts_only_if_the_deployment_allows_it(engines, gateways, fake) -> None:
    keys = [hashlib.sha256(key.encode()).hexdigest() for key in ("sk-one", "sk-two")]
    shared, apart = engines[0], engines[1]
    models = [
        msgspec.structs.replace(fake.catalog_of(shared).models[0], name="shared", prefix_scope="deployment"),
        msgspec.structs.replace(fake.catalog_of(apart).models[0], deployment="e", name="apart", prefix_scope="key"),
    ]
    gateway = await gateways(shared, apart, api_keys=keys, catalog=Catalog(models=models))
    for model in ("shared", "apart"):
        for key in ("sk-one", "sk-one", "sk-two"):
            await gateway.chat(model=model, headers={"Authorization": f"Bearer {key}"})
    assert [request.cache_salt for request in shared.requests] == ["", "", ""]
    first, again, other = (request.cache_salt for request in apart.requests)
    assert first == again != other
    assert first
    assert not any(secret in salt for salt in (first, other) for secret in keys)


@pytest.mark.layouts
async def test_the_catalogue_is_replaced_while_requests_run(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0])
    gate = asyncio.Event()
    engines[0].behaviour = fake.says("a", "b", gate=gate)
    running = asyncio.create_task(gateway.chat(stream=True))
    await fake.until(lambda: len(engines[0].requests) == 1)
    body = msgspec.json.encode(fake.catalog_of(engines[1]))
    assert (await gateway.put_catalog(body)).status == 200
    await gateway.know(engines[1])
    assert (await gateway.chat()).text == "hello world"
    assert len(engines[1].requests) == 1
    gate.set()
    assert (await running).streamed_text == "ab"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"[]", None),
        (b'{"models": [{"deployment": "d", "name": ""}]}', "models[0].name"),
        (b'{"models": [{"deployment": "d", "name": "m"}, {"deployment": "d", "name": "m"}]}', "models[1]"),
        (
            b'{"models": [{"deployment": "d", "name": "m", "endpoints": '
            b'[{"id": "e", "data_url": "ftp://x", "control_url": "http://x:1"}]}]}',
            "models[0].endpoints[0].data_url",
        ),
    ],
)
async def test_an_invalid_catalogue_changes_nothing(engines, gateways, body, param) -> None:
    gateway = await gateways(engines[0])
    reply = await gateway.put_catalog(body)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert (await gateway.chat()).status == 200


async def test_changing_the_catalogue_requires_the_control_token(engines, gateways) -> None:
    gateway = await gateways(engines[0], control_token="t0ken")
    url = gateway.control_url + "/catalog"
    for token, status in (({}, 401), ({"Authorization": "Bearer no"}, 401), ({"Authorization": "Bearer t0ken"}, 200)):
        headers = {**token, **protocol_headers()}
        async with gateway.session.put(url, data=b'{"models": []}', headers=headers) as response:
            assert response.status == status


async def test_the_openai_client_reads_answers_streams_and_errors(engines, gateways) -> None:
    gateway = await gateways(*engines)
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client:
        message = [{"role": "user", "content": "hi"}]
        chat = await client.chat.completions.create(model="tiny", messages=message, n=4)
        assert [choice.message.content for choice in chat.choices] == ["hello world"] * 4
        stream = await client.chat.completions.create(model="tiny", messages=message, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hello world"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nope", messages=message)
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="tiny", messages=message, temperature=7)


async def test_the_access_log_contains_everything_but_the_text(engines, gateways, caplog) -> None:
    gateway = await gateways(*engines)
    with caplog.at_level("INFO", logger="pagemill.gateway.access"):
        await gateway.chat(messages=[{"role": "user", "content": "very secret words"}])
        await gateway.chat(model="nope")
        await gateway.get("/readyz")
        await eventually(lambda: caplog.text.count('"status":') >= 2)
    lines = [msgspec.json.decode(record.message) for record in caplog.records if record.name.endswith("access")]
    assert [line["status"] for line in lines] == [200, 404]
    served, refused = lines
    assert (served["model"], served["prompt_tokens"], served["completion_tokens"]) == ("tiny", 34, 2)
    assert len(served["endpoints"]) == 1
    assert refused["error"] == "model_not_found"
    assert "secret" not in caplog.text


async def test_simulations_can_replay_the_access_log(engines, gateways, fake, caplog, tmp_path) -> None:
    gateway = await gateways(*engines)
    began_s = time.time()
    with caplog.at_level("INFO", logger="pagemill.gateway.access"):
        await gateway.chat(messages=[{"role": "user", "content": "hello"}])
        await gateway.chat(model="nope")
        await gateway.chat(messages=[{"role": "user", "content": "hello again"}])
        await fake.until(lambda: caplog.text.count('"arrived_at"') == 3)
    lines = [record.message for record in caplog.records if record.name.endswith("access")]
    reported = [msgspec.json.decode(line) for line in lines]
    assert all(began_s - 1 <= line["arrived_at"] <= time.time() + 1 for line in reported)
    recording = tmp_path / "gateway.jsonl"
    recording.write_text("\n".join(lines))
    workload = read_trace(recording)
    assert [request[1:3] for request in workload.requests] == [
        (line["prompt_tokens"], line["completion_tokens"]) for line in reported if line["status"] == 200
    ]
    assert len(workload.requests) == 2
    assert "1 without an answer left out" in workload.source


async def test_every_alerts_page_is_served_without_a_key(engines, gateways) -> None:
    gateway = await gateways(engines[0], api_keys=[hash_key("sk-one")])
    pages = sorted((Path(__file__).parents[2] / "docs" / "runbooks").glob("*.md"))
    assert pages
    for page in pages:
        for name in (page.name, page.stem):
            async with gateway.session.get(f"{gateway.url}/runbooks/{name}") as response:
                assert (response.status, await response.text()) == (200, page.read_text("utf-8"))
    async with gateway.session.get(f"{gateway.url}/runbooks/..%2fapp.py") as response:
        assert response.status == 404
