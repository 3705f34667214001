"""Traces reach a real OTLP receiver: one tree per request with the engine's phases and without any text of it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from otlp_receiver import CLIENT_SPAN, SAMPLED, TRACE_ID, UNSAMPLED, Receiver, receiving
from waiting import WAIT_LIMIT_S

from pagemill_api.openai.render import SSE_DONE
from pagemill_gateway.config import GatewayConfig, SettingsError
from pagemill_protocol.frames import encode_frame
from pagemill_protocol.request.generate import FrameMeta, Usage
from pagemill_servers.tracing.config import TracingConfig


@pytest.fixture
async def receiver(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Receiver]:
    monkeypatch.setattr("pagemill_servers.tracing.exporting.BATCH_DELAY_S", 0.02)
    async with receiving() as found:
        yield found


async def test_a_request_is_one_tree_within_the_clients_trace(engines, gateways, fake, receiver) -> None:
    async def says_that_it_waited(engine: Any, request: Any, response: Any, http: Any) -> None:
        await response.prepare(http)
        for frame in fake.answer_frames(request, ("hello", " world"))[:-1]:
            await response.write(frame)
        await response.write(encode_frame(FrameMeta(last=True, usage=Usage(9, 2), queue_s=0.001), SSE_DONE))
        await response.write_eof()

    engines[0].behaviour = says_that_it_waited
    gateway = await gateways(engines[0], tracing=TracingConfig(endpoint=receiver.url))
    reply = await gateway.chat(stream=True, headers=SAMPLED, max_tokens=7, temperature=0.5, seed=3)
    assert reply.status == 200
    await fake.until(lambda: receiver.named("POST /v1/chat/completions"))
    await fake.until(lambda: receiver.named("decode", "pagemill-engine"))
    (root,) = receiver.named("POST /v1/chat/completions")
    (attempt,) = receiver.named("chat tiny")
    (prepare,) = receiver.named("prepare")
    phases = [receiver.named(name, "pagemill-engine")[0] for name in ("queue", "prefill", "decode")]
    assert {span["trace"] for span in receiver.spans} == {TRACE_ID}
    assert root["parent"] == CLIENT_SPAN
    assert {prepare["parent"], attempt["parent"]} == {root["id"]}
    assert {phase["parent"] for phase in phases} == {attempt["id"]}
    assert root["start"] <= prepare["start"] <= prepare["end"] <= attempt["start"]
    assert attempt["start"] == phases[0]["start"]
    assert [phase["end"] for phase in phases] == [phases[1]["start"], phases[2]["start"], attempt["end"]]
    assert attempt["end"] <= root["end"]
    assert (
        root["attributes"].items()
        >= {
            "http.request.method": "POST",
            "http.route": "/v1/chat/completions",
            "http.response.status_code": 200,
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "tiny",
            "gen_ai.request.max_tokens": 7,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.seed": 3,
            "gen_ai.response.finish_reasons": ["stop"],
            "gen_ai.usage.output_tokens": 2,
        }.items()
    )
    assert attempt["attributes"]["pagemill.endpoint"] == engines[0].name
    assert "hello" not in json.dumps(receiver.spans)


async def test_each_attempt_is_a_span_and_failed_ones_are_marked(engines, gateways, fake, receiver) -> None:
    gateway = await gateways(*engines, tracing=TracingConfig(endpoint=receiver.url))
    for engine in engines:
        engine.behaviours.append(fake.refuses(500))
    reply = await gateway.complete()
    await fake.until(lambda: receiver.named("POST /v1/completions"))
    attempts = sorted(receiver.named("text_completion tiny"), key=lambda span: span["start"])
    assert len(attempts) >= 2
    assert attempts[0]["failed"]
    assert attempts[-1]["failed"] == (reply.status != 200)
    served = {each["id"] for each in attempts if not each["failed"]}
    # The engine's spans are sent apart from the gateway's.
    await fake.until(lambda: served <= {span["parent"] for span in receiver.spans})
    assert {each["id"] for each in attempts} & {span["parent"] for span in receiver.spans} == served


async def test_a_migration_is_a_span_between_those_of_two_engines(engines, gateways, fake, receiver) -> None:
    async def ends_after_a_token(engine: Any, request: Any, response: Any, http: Any) -> None:
        await response.prepare(http)
        await response.write(fake.answer_frames(request, ("a", "b", "c"))[0])
        await asyncio.sleep(0.01)  # makes the engine's part longer than the clock's resolution
        await response.write_eof()

    gateway = await gateways(*engines, tracing=TracingConfig(endpoint=receiver.url))
    for engine in engines:
        engine.behaviour = fake.says("a", "b", "c")
        engine.behaviours.append(ends_after_a_token)
    reply = await gateway.chat(stream=True)
    assert reply.streamed_text == "abc"
    await fake.until(lambda: receiver.named("POST /v1/chat/completions"))
    (root,) = receiver.named("POST /v1/chat/completions")
    attempts = sorted(receiver.named("chat tiny"), key=lambda span: span["start"])
    migrations = sorted(receiver.named("migration"), key=lambda span: span["start"])
    assert len(migrations) == len(attempts) - 1 == root["attributes"]["pagemill.num_migrations"]
    for before, after, migration in zip(attempts, attempts[1:], migrations, strict=False):
        assert migration["parent"] == root["id"]
        assert migration["start"] == before["end"]
        assert after["start"] <= migration["end"] <= after["end"]
        assert migration["attributes"]["pagemill.migration.reason"] == "lost"
        assert migration["attributes"]["pagemill.migration.from"] == before["attributes"]["pagemill.endpoint"]
        assert migration["attributes"]["pagemill.migration.to"] == after["attributes"]["pagemill.endpoint"]
        assert migration["attributes"]["pagemill.migration.num_tokens"] >= 1
    decodes = await fake.until(
        lambda: len(found := receiver.named("decode", "pagemill-engine")) >= len(attempts) - 1 and found
    )
    assert {span["parent"] for span in decodes} == {each["id"] for each in attempts[:-1]}, (
        "the last engine only had to end the answer"
    )


async def test_requests_that_the_client_does_not_sample_are_not_reported(engines, gateways, fake, receiver) -> None:
    gateway = await gateways(engines[0], tracing=TracingConfig(endpoint=receiver.url))
    assert (await gateway.chat(headers=UNSAMPLED)).status == 200
    assert (await gateway.chat()).status == 200
    await fake.until(lambda: receiver.named("POST /v1/chat/completions"))
    assert TRACE_ID not in {span["trace"] for span in receiver.spans}


async def test_of_requests_without_a_trace_the_configured_ratio_is_reported(engines, gateways, fake, receiver) -> None:
    gateway = await gateways(engines[0], tracing=TracingConfig(endpoint=receiver.url, sample_ratio=0.0))
    assert (await gateway.chat()).status == 200
    assert (await gateway.chat(headers=SAMPLED)).status == 200
    await fake.until(lambda: receiver.named("POST /v1/chat/completions"))
    assert {span["trace"] for span in receiver.spans} == {TRACE_ID}


@pytest.mark.parametrize("value", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "a" * 5000])
async def test_an_invalid_trace_header_begins_a_new_trace(value: str, engines, gateways, fake, receiver) -> None:
    gateway = await gateways(engines[0], tracing=TracingConfig(endpoint=receiver.url))
    assert (await gateway.chat(headers={"traceparent": value})).status == 200
    await fake.until(lambda: receiver.named("POST /v1/chat/completions"))
    assert receiver.named("POST /v1/chat/completions")[0]["parent"] == ""


async def test_the_log_line_contains_the_trace_id(engines, gateways, fake, receiver, caplog) -> None:
    gateway = await gateways(engines[0], tracing=TracingConfig(endpoint=receiver.url))
    with caplog.at_level("INFO", logger="pagemill.gateway.access"):
        await gateway.chat(headers=SAMPLED)
        await fake.until(lambda: "trace_id" in caplog.text)
    assert json.loads(caplog.messages[-1])["trace_id"] == TRACE_ID


async def test_a_refused_request_is_reported_with_its_error(engines, gateways, fake, receiver) -> None:
    gateway = await gateways(engines[0], tracing=TracingConfig(endpoint=receiver.url))
    assert (await gateway.chat(max_tokens=-1)).status == 400
    await fake.until(lambda: receiver.named("POST /v1/chat/completions"))
    (root,) = receiver.named("POST /v1/chat/completions")
    assert root["attributes"]["http.response.status_code"] == 400
    assert root["attributes"]["error.type"]


async def test_headers_for_the_receiver_are_read_from_a_file(engines, gateways, fake, receiver, tmp_path: Path) -> None:
    (tmp_path / "headers").write_text("# ours\nx-tenant: team-a\n")
    tracing = TracingConfig(endpoint=receiver.url, headers_file=str(tmp_path / "headers"))
    gateway = await gateways(engines[0], tracing=tracing)
    await gateway.chat()
    await fake.until(lambda: receiver.headers)
    assert receiver.headers == ["team-a"]


async def test_spans_are_sent_again_if_the_receiver_was_busy(engines, gateways, fake, receiver) -> None:
    receiver.statuses = [503]
    gateway = await gateways(engines[0], tracing=TracingConfig(endpoint=receiver.url))
    assert (await gateway.chat(headers=SAMPLED)).status == 200
    await fake.until(lambda: receiver.named("POST /v1/chat/completions"))
    assert [span["trace"] for span in receiver.named("POST /v1/chat/completions")] == [TRACE_ID]


async def test_refused_spans_are_dropped_and_later_ones_arrive(engines, gateways, fake, receiver) -> None:
    receiver.statuses = [400]
    gateway = await gateways(engines[0], tracing=TracingConfig(endpoint=receiver.url))
    assert (await gateway.chat(headers=SAMPLED)).status == 200
    await fake.until(lambda: receiver.headers)
    assert (await gateway.chat()).status == 200
    await fake.until(lambda: receiver.named("POST /v1/chat/completions"))
    assert TRACE_ID not in {span["trace"] for span in receiver.spans}


async def test_without_a_receiver_requests_are_answered_and_the_gateway_exits(engines, gateways) -> None:
    gateway = await gateways(engines[0], tracing=TracingConfig(endpoint="http://127.0.0.1:9/v1/traces"))
    assert (await gateway.chat()).status == 200
    async with asyncio.timeout(WAIT_LIMIT_S):
        await gateway.gateway.worker.tracing.close()


def test_without_a_receiver_setting_opentelemetry_is_not_imported() -> None:
    imported = "any(name.startswith('opentelemetry') for name in sys.modules)"
    look = f"import sys, pagemill_gateway.processes.server; assert not {imported}"
    assert subprocess.run([sys.executable, "-c", look], capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"endpoint": ""}, "tracing.endpoint: '' does not begin with http:// or https://"),
        ({"endpoint": "collector:4317"}, "tracing.endpoint: 'collector:4317' does not begin"),
        ({"endpoint": "http://c/v1/traces", "sample_ratio": 1.5}, "tracing.sample_ratio: 1.5 is not between 0 and 1"),
        ({"endpoint": "http://c/v1/traces", "sample_ratio": float("nan")}, "tracing.sample_ratio: nan"),
    ],
)
def test_unusable_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message.replace("(", r"\(")):
        GatewayConfig(tracing=TracingConfig(**fields)).checked()


def test_an_unreadable_file_of_headers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"tracing\.headers_file: cannot read"):
        TracingConfig(endpoint="http://c/v1/traces", headers_file=str(tmp_path / "none")).headers()
    (tmp_path / "odd").write_text("Authorization\n")
    with pytest.raises(SettingsError, match=r"tracing\.headers_file: line 1 .* NAME: VALUE"):
        TracingConfig(endpoint="http://c/v1/traces", headers_file=str(tmp_path / "odd")).headers()
