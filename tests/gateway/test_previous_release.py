"""The previous release's programs work with the current ones, as in upgrades and rollbacks.

The engines have simulated devices but are real processes of their release, which are killed while they answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import openai
import pytest
from previous_release import TODAY, Program, Release, previous_release  # noqa: F401 - a fixture
from prometheus_client.parser import text_string_to_metric_families
from real_cluster import MODEL, TOKEN, Server, endpoint_of, fetch
from waiting import WAIT_LIMIT_S, eventually, wait_until

from pagemill_protocol.catalog import Catalog, CatalogModel
from pagemill_protocol.report.load import LoadFrame
from pagemill_protocol.versions import PROTOCOL_VERSION

pytestmark = pytest.mark.slow

NAME = "smol"
NUM_STREAMS = 6
NUM_TOKENS = 120
STEP_MS = 60.0

PUT_CATALOG = """
import sys, urllib.request, msgspec
from pagemill_protocol.catalog import Catalog
from pagemill_protocol.versions import protocol_headers
print("ready", flush=True)
catalog = msgspec.json.decode(sys.stdin.buffer.read(), type=Catalog)
headers = {"Authorization": f"Bearer {sys.argv[2]}", "Content-Type": "application/json", **protocol_headers()}
body = msgspec.json.encode(catalog)
request = urllib.request.Request(sys.argv[1] + "/catalog", data=body, method="PUT", headers=headers)
sys.stdout.buffer.write(urllib.request.urlopen(request).read())
"""
"""A program that sends a catalogue with the types of the operator's release."""
FOLLOW_LOAD = """
import asyncio, sys, aiohttp, msgspec
from pagemill_operator.load.stream import follow_load

class Seen(Exception): pass

def see(frame):
    if frame.deployments and frame.deployments[0].engines.truth == "value":
        sys.stdout.buffer.write(msgspec.msgpack.encode(frame))
        raise Seen

async def main():
    async with aiohttp.ClientSession() as session:
        await follow_load(session, sys.argv[1], sys.argv[2], see)

try:
    asyncio.run(asyncio.wait_for(main(), 30))
except Seen:
    pass
"""
WRITE_RECORD = """
import sys
from pagemill_operator.autoscaler.policy import ask
from pagemill_operator.autoscaler.records import Record, encode_record
from pagemill_operator.autoscaler.registry import find_policy
from pagemill_operator.autoscaler.settings import ScalingSettings
from pagemill_operator.autoscaler.signals import Fleet, Signals
from pagemill_protocol.report.load import Arrivals, EnginesLoad
settings = ScalingSettings(mode="Active", min_replicas=1, max_replicas=8, kv_cache_usage=0.5, queue_depth=2)
engines = EnginesLoad(truth="value", num_reporting=2, num_requests_waiting=9, block_size=16)
signals = Signals(at_s=1000.0, num_reporting=1, engines=engines, arrivals=Arrivals(truth="value"), fleet=Fleet(2, 2))
policy = find_policy(settings.policy)
memory = policy.memory_type()
decision, _ = ask(policy, settings, signals, memory)
sys.stdout.buffer.write(encode_record(Record("ns/d", "2026-01-01T00:00:00Z", settings, signals, memory, decision)))
"""
READ_RECORD = """
import sys
from pagemill_operator.autoscaler.records import decode_record, replay
record = decode_record(sys.stdin.buffer.read())
replay(record)
print(record.key, record.decision.replicas, record.decision.reason)
"""


class Gateway:
    """A gateway process of one release, which gets its catalogues from an operator of another release."""

    def __init__(self, server: Server, operator: Release) -> None:
        self._server, self._operator = server, operator
        listening = server.event("listening")
        self.url, self.control_url = listening["url"], listening["control_url"]

    def prepare(self) -> Program:
        """Start the program that sends a catalogue, which imports its packages meanwhile."""
        program = self._operator.begin(PUT_CATALOG, self.control_url, TOKEN)
        assert program.process.stdout is not None
        assert program.process.stdout.readline() == b"ready\n"
        return program

    def serve(self, *engines: Server, prepared: Program | None = None) -> None:
        """Wait until the gateway uses all of the engines."""
        endpoints = [endpoint_of(engine) for engine in engines]
        catalog = Catalog(models=[CatalogModel(deployment="d", name=NAME, engine_token=TOKEN, endpoints=endpoints)])
        put = (prepared or self.prepare()).end(msgspec.json.encode(catalog))
        assert json.loads(put) == {"models": 1, "endpoints": len(engines)}
        ready = dict.fromkeys((engine.name for engine in engines), "ready")
        wait_until(lambda: self.phases() == ready, progress=self.phases)

    def phases(self) -> dict[str, str]:
        models = json.loads(fetch(f"{self.control_url}/status", TOKEN))["models"]
        return {each["id"]: each["phase"] for model in models for each in model["endpoints"]}

    def num_migrations(self) -> int:
        families = text_string_to_metric_families(fetch(f"{self.control_url}/metrics"))
        samples = [sample for family in families for sample in family.samples]
        return round(sum(each.value for each in samples if each.name == "pagemill_gateway_migrations_total"))

    def end(self) -> None:
        self._server.process.terminate()

    async def ended(self) -> int:
        return await asyncio.to_thread(self._server.process.wait, WAIT_LIMIT_S)


class Platform(NamedTuple):
    """The processes that run in the middle of an upgrade."""

    old_engine: Server
    new_engine: Server
    late_engine: Server
    """An engine of the previous release that a rollback starts."""
    old_gateway: Gateway
    """A gateway of the previous release with the current operator."""
    new_gateway: Gateway
    """A current gateway with the previous release's operator."""


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory, previous_release: Release) -> Iterator[Platform]:  # noqa: F811
    folder = tmp_path_factory.mktemp("platform")
    step_time = {"knots_tokens": [1, 512], "knot_ms": [STEP_MS, STEP_MS]}
    engine = {"model": MODEL, "served_names": [NAME], "null_runner": True, "num_kv_blocks": 512, "max_model_len": 1024}
    engine_settings = {
        "engine": {**engine, "step_time": step_time},
        "server": {"port": 0, "control_port": 0, "internal_token": TOKEN},
    }
    # So that no engine that waits for a processor counts as silent: each stream migrates once, from the killed engine.
    names = ("silence_timeout_s", "stall_timeout_s", "freeze_timeout_s", "state_stale_after_s")
    patient = dict.fromkeys(names, WAIT_LIMIT_S)
    gateway_settings = {"port": 0, "control_port": 0, "control_token": TOKEN, **patient}
    with contextlib.ExitStack() as stack:

        def start(release: Release, module: str, name: str, settings: dict[str, Any]) -> Server:
            server = Server(module, json.dumps(settings).encode(), folder, name, release.environment)
            stack.callback(server.close)
            return server

        engines = {
            name: start(release, "pagemill_engine.server", name, engine_settings)
            for name, release in (("old", previous_release), ("new", TODAY), ("late", previous_release))
        }
        old = start(previous_release, "pagemill_gateway", "old-gateway", gateway_settings)
        new = start(TODAY, "pagemill_gateway", "new-gateway", gateway_settings)
        gateways = Gateway(old, TODAY), Gateway(new, previous_release)
        for each in engines.values():
            each.event("ready")
        yield Platform(*engines.values(), *gateways)


def version_of(control_url: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(fetch(f"{control_url}/version"))
    return answer


def test_the_programs_have_the_versions_of_their_releases(platform: Platform, previous_release: Release) -> None:  # noqa: F811
    where = "import pagemill_engine, pagemill_gateway as g, pagemill_operator, pagemill_protocol as p; print(g, p)"
    assert previous_release.run(where).decode().count(str(previous_release.paths[-1].parent)) == 2
    assert str(previous_release.paths[-1].parent) not in TODAY.run(where).decode()
    for control_url in (endpoint_of(platform.new_engine).control_url, platform.new_gateway.control_url):
        assert version_of(control_url)["protocol"] == PROTOCOL_VERSION


def test_each_operator_reads_the_load_of_the_other_gateway(platform: Platform, previous_release: Release) -> None:  # noqa: F811
    for gateway, operator in ((platform.old_gateway, TODAY), (platform.new_gateway, previous_release)):
        gateway.serve(platform.old_engine, platform.new_engine)
        frame = msgspec.msgpack.decode(operator.run(FOLLOW_LOAD, gateway.control_url, TOKEN), type=LoadFrame)
        (load,) = frame.deployments
        assert (load.key, load.pods.ready) == ("default/d", 2)
        # The KV cache is reported in bytes now, so each release knows that of its own engines only.
        assert (load.engines.num_reporting, load.engines.block_size) == (2, 16)


def test_each_command_line_reads_the_decisions_of_the_other_releases_operator(previous_release: Release) -> None:  # noqa: F811
    for writer, reader in ((previous_release, TODAY), (TODAY, previous_release)):
        record = writer.run(WRITE_RECORD)
        decision = json.loads(record)["decision"]
        read = reader.run(READ_RECORD, stdin=record).decode().split()
        assert read == ["ns/d", str(decision["replicas"]), decision["reason"]]


@pytest.mark.parametrize("path", ["/internal/link", "/internal/state", "/catalog", "/internal/load"])
def test_a_peer_older_than_the_previous_release_is_refused(platform: Platform, path: str) -> None:
    engine = endpoint_of(platform.new_engine)
    urls = {"/internal/link": engine.data_url, "/internal/state": engine.control_url}
    method = {"/catalog": "PUT"}.get(path, "GET")
    request = urllib.request.Request(
        urls.get(path, platform.new_gateway.control_url) + path,
        data=b"{}" if method != "GET" else None,
        method=method,
        headers={"Authorization": f"Bearer {TOKEN}", "x-pagemill-protocol": "0"},
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=WAIT_LIMIT_S)
    with refused.value as answer:
        assert answer.status == 426
        assert "speaks version 0 of the protocol" in json.loads(answer.read())["error"]["message"]


class Streams:
    """Running answers; each must be complete and equal to that of a single engine."""

    def __init__(self, gateway: Gateway) -> None:
        self._begun = 0
        self._client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60)
        self._tasks = [asyncio.create_task(self._stream(seed)) for seed in range(NUM_STREAMS)]

    async def begun(self) -> Streams:
        await eventually(lambda: self._begun == NUM_STREAMS)
        return self

    async def texts(self) -> list[str]:
        async with self._client:
            return await asyncio.gather(*self._tasks)

    async def _stream(self, seed: int) -> str:
        texts: list[str] = []
        reason = None
        stream = await self._client.completions.create(
            model=NAME,
            prompt=f"stream {seed}",
            max_tokens=NUM_TOKENS,
            seed=seed,
            temperature=1,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            self._begun += not texts
            texts.append(chunk.choices[0].text)
            reason = chunk.choices[0].finish_reason or reason
        assert reason == "length", f"stream {seed} ended by {reason} after {''.join(texts)!r}"
        return "".join(texts)


async def test_a_rolling_upgrade_of_engines_and_gateway_loses_no_stream(platform: Platform) -> None:
    """Engines of each release run behind the other release's gateway, and streams migrate in both directions."""
    old_engine, new_engine, late_engine, old_gateway, new_gateway = platform
    await asyncio.to_thread(old_gateway.serve, old_engine)
    expected = await Streams(old_gateway).texts()
    assert len(set(expected)) == NUM_STREAMS

    prepared = await asyncio.to_thread(old_gateway.prepare)  # so that little time passes while the streams run
    streams = await Streams(old_gateway).begun()
    await asyncio.to_thread(old_gateway.serve, old_engine, new_engine, prepared=prepared)
    old_engine.kill()
    assert await streams.texts() == expected, (
        "a stream must migrate from the old engine to the new one behind the old gateway"
    )
    assert await asyncio.to_thread(old_gateway.num_migrations) == NUM_STREAMS

    await asyncio.to_thread(new_gateway.serve, new_engine)
    leaving, staying = await Streams(old_gateway).begun(), await Streams(new_gateway).begun()
    old_gateway.end()
    assert await leaving.texts() == expected, "the old gateway must finish its streams before it exits"
    assert await old_gateway.ended() == 0
    assert await staying.texts() == expected

    prepared = await asyncio.to_thread(new_gateway.prepare)
    streams = await Streams(new_gateway).begun()
    await asyncio.to_thread(new_gateway.serve, new_engine, late_engine, prepared=prepared)
    new_engine.kill()
    assert await streams.texts() == expected, (
        "a stream must migrate from the new engine to the old one behind the new gateway"
    )
    assert await asyncio.to_thread(new_gateway.num_migrations) == NUM_STREAMS
