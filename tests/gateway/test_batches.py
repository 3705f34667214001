"""Files and batches over HTTP: results and errors of each line, ownership, cancelling, restarts and limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from batch_client import CHAT, Client, client_of, kept_in, line, until
from redis_server import RedisServer, redis_server
from server_processes import start_http_server

from pagemill_gateway.batches.redis import RedisBatchStore
from pagemill_gateway.batches.store import LeaseLost
from pagemill_gateway.config import BatchesConfig, GatewayConfig, RedisConfig, SettingsError
from pagemill_gateway.limits.redis import link
from pagemill_protocol.report.state import EngineLoad
from pagemill_servers.auth import hash_key

pytestmark = pytest.mark.usefixtures("reporting_engines", "quick_batches")

ONE, OTHER = ({"Authorization": f"Bearer sk-{name}"} for name in ("one", "other"))
TENANTS = [f"{hash_key('sk-one')} tenant=a", f"{hash_key('sk-other')} tenant=b"]


@pytest.mark.layouts
async def test_every_line_gets_its_result(engines, gateways, tmp_path) -> None:
    gateway = await gateways(*engines, **kept_in(tmp_path))
    client = client_of(gateway)
    batch = await client.ended(await client.create([line(number, f"q{number}") for number in range(20)]))
    assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 20, "completed": 20, "failed": 0})
    assert batch["error_file_id"] is None
    assert None not in [batch[f"{name}_at"] for name in ("created", "in_progress", "finalizing", "completed")]
    results = await client.results(batch["output_file_id"])
    assert sorted(each["custom_id"] for each in results) == sorted(f"c{number}" for number in range(20))
    assert {each["response"]["status_code"] for each in results} == {200}
    assert {each["response"]["body"]["choices"][0]["message"]["content"] for each in results} == {"hello world"}
    assert len({each["id"] for each in results}) == 20
    assert sum(len(engine.requests) for engine in engines) == 20
    _, file = await client.ask("GET", f"/v1/files/{batch['output_file_id']}")
    assert (file["purpose"], file["status"]) == ("batch_output", "processed")


async def test_batches_accept_completions_and_responses(engines, gateways, tmp_path) -> None:
    gateway = await gateways(*engines, **kept_in(tmp_path))
    client = client_of(gateway)
    lines = [{"custom_id": "a", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "x"}}]
    batch = await client.ended(await client.create(lines, "/v1/completions"))
    (result,) = await client.results(batch["output_file_id"])
    assert result["response"]["body"]["choices"][0]["text"] == "hello world"
    status, refused = await client.ask(
        "POST",
        "/v1/batches",
        json={"input_file_id": batch["input_file_id"], "endpoint": "/v1/rerank", "completion_window": "24h"},
    )
    assert (status, refused["error"]["param"]) == (400, "endpoint")


async def test_a_broken_line_is_an_error_with_its_line_number(engines, gateways, tmp_path) -> None:
    gateway = await gateways(*engines, **kept_in(tmp_path))
    client = client_of(gateway)
    lines = [
        line(1),
        b"{broken",
        b"",
        b"[]",
        {**line(5), "custom_id": 5},
        line(1),
        line(7, url="/v1/completions"),
        {**line(8), "body": "x"},
        line(9, stream=True),
        line(10, model="unknown"),
        line(11, temperature=99),
        b"\xff\xfe",
        line(13),
    ]
    batch = await client.ended(await client.create(lines))
    assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 12, "completed": 2, "failed": 10})
    results = await client.results(batch["error_file_id"])
    faults = {each["error"]["line"]: each["error"]["code"] for each in results if each["error"]}
    assert faults == {
        2: "invalid_json_line",
        4: "invalid_json_line",
        5: "invalid_custom_id",
        6: "duplicate_custom_id",
        7: "invalid_url",
        8: "invalid_body",
        9: "invalid_body",
        12: "invalid_json_line",
    }
    answered = {each["custom_id"]: each["response"] for each in results if each["response"]}
    assert {name: each["status_code"] for name, each in answered.items()} == {"c10": 404, "c11": 400}
    assert answered["c10"]["body"]["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("lines", "code"), [([], "empty_file"), ([b"{", b"["], "invalid_json_line"), ([line(1)] * 3, "too_many_lines")]
)
async def test_a_file_without_a_valid_line_fails_its_batch(engines, gateways, tmp_path, lines, code) -> None:
    gateway = await gateways(*engines, **kept_in(tmp_path, max_lines=2))
    client = client_of(gateway)
    batch = await client.ended(await client.create(lines))
    assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", code)
    assert (batch["output_file_id"], batch["error_file_id"]) == (None, None)


async def test_files_and_batches_of_another_tenant_do_not_exist(engines, gateways, tmp_path) -> None:
    gateway = await gateways(*engines, api_keys=TENANTS, **kept_in(tmp_path))
    own, other = client_of(gateway, ONE), client_of(gateway, OTHER)
    batch = await own.ended(await own.create([line(1)]))
    file_id, output_id = batch["input_file_id"], batch["output_file_id"]
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    asked = [
        *(("GET", f"/v1/files/{each}{end}", {}) for each in (file_id, output_id) for end in ("", "/content")),
        ("DELETE", f"/v1/files/{file_id}", {}),
        ("GET", f"/v1/batches/{batch['id']}", {}),
        ("POST", f"/v1/batches/{batch['id']}/cancel", {}),
        ("POST", "/v1/batches", {"json": body}),
    ]
    for method, path, fields in asked:
        status, refused = await other.ask(method, path, **fields)
        assert (status, refused["error"]["code"].endswith("_not_found")) == (404, True), path
        assert (await Client(gateway.url, gateway.session).ask(method, path, **fields))[0] == 401
    for path in ("/v1/files", "/v1/batches"):
        assert (await other.ask("GET", path))[1]["data"] == []
        assert len((await own.ask("GET", path))[1]["data"]) == (2 if "files" in path else 1)


async def test_a_cancelled_batch_keeps_its_results(engines, gateways, fake, tmp_path) -> None:
    engine = engines[0]
    gateway = await gateways(engine, **kept_in(tmp_path))
    client = client_of(gateway)
    engine.behaviours.extend([fake.says("done")] * 2)
    engine.behaviour = fake.hangs
    batch = await client.create([line(number) for number in range(30)])
    await until(lambda: client.batch(batch), lambda found: found["request_counts"]["completed"] == 2)
    await fake.until(lambda: engine.num_inside > 0)
    assert (await client.ask("POST", f"/v1/batches/{batch['id']}/cancel"))[1]["status"] in ("cancelling", "cancelled")
    batch = await client.ended(batch)
    assert (batch["status"], batch["request_counts"]) == ("cancelled", {"total": 30, "completed": 2, "failed": 28})
    assert len(await client.results(batch["output_file_id"])) == 2
    assert {each["error"]["code"] for each in await client.results(batch["error_file_id"])} == {"batch_cancelled"}
    await fake.until(lambda: engine.num_inside == 0)
    status, refused = await client.ask("POST", f"/v1/batches/{batch['id']}/cancel")
    assert (status, refused["error"]["code"]) == (409, "batch_is_over")


@pytest.mark.slow
async def test_an_expired_batch_reports_each_remaining_line(engines, gateways, fake, tmp_path) -> None:
    gateway = await gateways(engines[0], **kept_in(tmp_path))
    client = client_of(gateway)
    engines[0].behaviours.append(fake.says("done"))
    engines[0].behaviour = fake.hangs
    batch = await client.ended(await client.create([line(number) for number in range(9)], window="6s"))
    assert (batch["status"], batch["request_counts"]) == ("expired", {"total": 9, "completed": 1, "failed": 8})
    assert {each["error"]["code"] for each in await client.results(batch["error_file_id"])} == {"batch_expired"}


async def test_lines_start_only_while_no_request_waits_and_the_load_is_low(engines, gateways, fake, tmp_path) -> None:
    engine = engines[0]
    engine.max_num_seqs = 8
    engine.load = EngineLoad(num_requests_running=4)
    gateway = await gateways(engine, **kept_in(tmp_path))
    client = client_of(gateway)
    brain = gateway.gateway.worker.brain
    await fake.until(lambda: gateway.record(engine).reports.latest is not None)
    assert await brain.idle_capacity("tiny", 0.5) == 0
    batch = await client.create([line(number) for number in range(3)])
    await until(lambda: client.batch(batch), lambda found: found["status"] == "in_progress")
    assert (await gateway.chat()).status == 200, "an interactive request"
    assert len(engine.requests) == 1
    engine.load = EngineLoad(num_requests_running=1)
    assert (await client.ended(batch))["status"] == "completed"
    assert {each.priority for each in engine.requests[1:]} == {100_000}
    assert engine.requests[0].priority == 0
    engine.load = EngineLoad(num_requests_waiting=1)
    await until(lambda: brain.idle_capacity("tiny", 0.5), lambda found: found == 0)
    assert await brain.idle_capacity("unknown", 0.5) == 1, "a refusal needs no engine"


async def test_lines_count_against_the_limits_of_their_key(engines, gateways, fake, tmp_path) -> None:
    key = f"{hash_key('sk-one')} tenant=a requests_per_minute=2"
    gateway = await gateways(*engines, api_keys=[key], **kept_in(tmp_path))
    client = client_of(gateway, ONE)
    batch = await client.create([line(number) for number in range(3)])
    await fake.until(lambda: sum(len(engine.requests) for engine in engines) == 2)
    assert (await gateway.chat(headers=ONE)).status == 429
    found = await until(lambda: client.batch(batch), lambda found: found["request_counts"]["completed"] == 2)
    assert (found["status"], found["request_counts"]["failed"]) == ("in_progress", 0), (
        "the third line must wait for the next minute"
    )


async def test_lines_that_wait_for_a_limit_occupy_no_slot(engines, gateways, tmp_path) -> None:
    keys = [f"{TENANTS[0]} requests_per_minute=1", TENANTS[1]]
    gateway = await gateways(*engines, api_keys=keys, **kept_in(tmp_path, max_concurrency=2))
    limited, other = client_of(gateway, ONE), client_of(gateway, OTHER)
    waiting = await limited.create([line(number) for number in range(5)])
    await until(lambda: limited.batch(waiting), lambda found: found["request_counts"]["completed"] == 1)
    batch = await other.ended(await other.create([line(number) for number in range(5)]))
    assert batch["request_counts"]["completed"] == 5
    assert (await limited.batch(waiting))["request_counts"]["completed"] == 1


async def test_a_file_may_be_larger_than_other_bodies(engines, gateways, tmp_path) -> None:
    gateway = await gateways(*engines, max_body_bytes=100_000, **kept_in(tmp_path))
    client = client_of(gateway)
    status, file = await client.upload(b"x" * 1_000_000)
    assert (status, file["bytes"]) == (200, 1_000_000)
    batch = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    found = await client.ended((await client.ask("POST", "/v1/batches", json=batch))[1])
    assert (found["status"], found["errors"]["data"][0]["code"]) == ("failed", "line_too_long")


async def test_a_line_that_fails_on_an_engine_is_retried(engines, gateways, fake, tmp_path) -> None:
    gateway = await gateways(engines[0], max_attempts=1, **kept_in(tmp_path))
    client = client_of(gateway)
    engines[0].behaviours.append(fake.refuses(500))
    batch = await client.ended(await client.create([line(1)]))
    assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


async def test_the_batches_of_a_revoked_key_stop(engines, gateways, tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\n".join(TENANTS))
    engines[0].max_num_seqs = 8
    engines[0].load = EngineLoad(num_requests_running=8)
    gateway = await gateways(engines[0], api_keys_file=str(keys), **kept_in(tmp_path))
    own = client_of(gateway, ONE)
    batch = await own.create([line(1)])
    keys.write_text(f"{TENANTS[1]}\n{hash_key('sk-new')} tenant=a")
    new = Client(gateway.url, gateway.session, {"Authorization": "Bearer sk-new"})
    await until(lambda: new.ask("GET", f"/v1/batches/{batch['id']}"), lambda found: found[0] == 200)
    engines[0].load = EngineLoad()
    batch = await new.ended(batch)
    (result,) = await new.results(batch["error_file_id"])
    assert result["response"]["status_code"] == 401
    assert not engines[0].requests


async def test_lists_are_paged_newest_first(engines, gateways, tmp_path) -> None:
    gateway = await gateways(*engines, **kept_in(tmp_path))
    client = client_of(gateway)
    made = [(await client.create([line(1)]))["id"] for _ in range(3)]
    _, page = await client.ask("GET", "/v1/batches?limit=2")
    assert ([each["id"] for each in page["data"]], page["has_more"]) == ([made[2], made[1]], True)
    _, rest = await client.ask("GET", f"/v1/batches?limit=2&after={page['last_id']}")
    assert ([each["id"] for each in rest["data"]], rest["has_more"]) == ([made[0]], False)
    for query in ("limit=0", "limit=x", "after=nope"):
        assert (await client.ask("GET", f"/v1/batches?{query}"))[0] == 400
    for each in made:
        await client.ended({"id": each})


async def test_uploads_are_limited_in_bytes_and_number(engines, gateways, tmp_path) -> None:
    bounds = {"max_file_bytes": 100_000, "max_files": 3, "max_tenant_bytes": 150_000}
    gateway = await gateways(*engines, **kept_in(tmp_path, **bounds))
    client = client_of(gateway)
    assert (await client.upload(b"x" * 100_001))[0] == 413
    assert (await client.upload(b"x" * 400_000))[0] == 413
    kept = [await client.upload(b"x" * 100_000), await client.upload(b"x"), await client.upload(b"")]
    assert [(status, file["bytes"]) for status, file in kept] == [(200, 100_000), (200, 1), (200, 0)]
    status, refused = await client.upload(b"x")
    assert (status, refused["error"]["code"]) == (400, "too_many_files")
    assert "batches.max_files" in refused["error"]["message"]
    assert (await client.ask("DELETE", f"/v1/files/{kept[2][1]['id']}"))[1]["deleted"] is True
    status, refused = await client.upload(b"x" * 60_000)
    assert (status, refused["error"]["code"]) == (413, "too_many_file_bytes")
    content = list((tmp_path / "batches" / "content").iterdir())
    assert len(content) == 2, "a refused file must not be stored"


@pytest.mark.slow
async def test_ten_thousand_files_are_listed_and_one_more_is_refused(engines, gateways, tmp_path) -> None:
    gateway = await gateways(*engines, **kept_in(tmp_path))
    client = client_of(gateway)
    _, first = await client.upload(b"x")
    (folder,) = (tmp_path / "batches" / "files").iterdir()
    for number in range(9_999):
        kept = {**first, "id": f"file-{number:032x}"}
        (folder / kept["id"]).write_bytes(json.dumps(kept).encode())
    _, page = await client.ask("GET", "/v1/files?limit=3000&order=asc")
    assert (len(page["data"]), page["has_more"]) == (3000, True)
    _, rest = await client.ask("GET", f"/v1/files?order=asc&after={page['last_id']}")
    assert (len(rest["data"]), rest["has_more"], rest["last_id"]) == (7000, False, first["id"])
    status, refused = await client.upload(b"x")
    assert (status, refused["error"]["code"]) == (400, "too_many_files")
    assert (await client.ask("DELETE", f"/v1/files/{page['first_id']}"))[1]["deleted"] is True
    assert (await client.upload(b"x"))[0] == 200


async def test_batches_beyond_the_limit_of_waiting_batches_are_refused(engines, gateways, fake, tmp_path) -> None:
    engines[0].behaviour = fake.hangs
    gateway = await gateways(engines[0], **kept_in(tmp_path, max_batches=1))
    client = client_of(gateway)
    batch = await client.create([line(1)])
    body = {"input_file_id": batch["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
    status, refused = await client.ask("POST", "/v1/batches", json=body)
    assert (status, refused["error"]["code"]) == (429, "too_many_batches")


async def test_a_malformed_form_is_refused_by_name(engines, gateways, tmp_path) -> None:
    gateway = await gateways(*engines, **kept_in(tmp_path))
    client = client_of(gateway)
    assert (await client.upload(b"x", purpose="fine-tune"))[1]["error"]["param"] == "purpose"
    form = aiohttp.FormData({"purpose": "batch"}, default_to_multipart=True)
    for fields, status, param in (
        ({"data": form}, 400, "file"),
        ({"json": {}}, 415, "content-type"),
        ({"data": b"junk", "headers": {"Content-Type": "multipart/form-data; boundary=x"}}, 400, "body"),
    ):
        async with gateway.session.post(f"{gateway.url}/v1/files", **fields) as reply:
            assert (reply.status, (await reply.json())["error"]["param"]) == (status, param)


async def test_ids_are_not_interpreted_as_paths(engines, gateways, tmp_path) -> None:
    gateway = await gateways(*engines, **kept_in(tmp_path))
    (tmp_path / "secret").write_text("{}")
    for given in ("..%2F..%2F..%2Fsecret", "file-" + "0" * 31 + "%2F", "file-" + "g" * 32):
        status = (await client_of(gateway).ask("GET", f"/v1/files/{given}"))[0]
        assert status == 404, given


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/files"), ("GET", "/v1/files"), ("GET", "/v1/batches/b")])
async def test_without_the_setting_the_error_names_it(engines, gateways, method, path) -> None:
    status, refused = await client_of(await gateways(*engines)).ask(method, path)
    assert (status, refused["error"]["code"]) == (404, "batches_not_configured")
    assert "`batches`" in refused["error"]["message"]


def test_batches_require_a_folder() -> None:
    with pytest.raises(SettingsError, match=r"Set batches\.directory, or redis"):
        GatewayConfig(batches=BatchesConfig()).checked()
    with pytest.raises(SettingsError, match=r"batches\.max_load: 2 is not a share"):
        GatewayConfig(batches=BatchesConfig(directory="x", max_load=2)).checked()


# -- several gateways, and gateways that end ---------------------------------------------------------------------------


async def test_a_restarted_gateway_continues_a_batch_and_repeats_no_finished_line(
    engines, fake, tmp_path: Path
) -> None:
    engine = engines[0]
    values = {
        "port": 0,
        "control_port": 0,
        "control_token": "t",
        "catalog": {"models": [{"deployment": "d", "name": "tiny", "engine_token": fake.TOKEN}]},
        "batches": {"directory": str(tmp_path / "batches")},
    }
    endpoint = {"id": "engine-0", "data_url": engine.url, "control_url": engine.url}
    values["catalog"]["models"][0]["endpoints"] = [endpoint]  # type: ignore[index]

    async def start(name: str) -> Any:
        return await asyncio.to_thread(start_http_server, name, "pagemill_gateway", tmp_path / name, values)

    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    async with aiohttp.ClientSession() as session:
        first = await start("first")
        engine.behaviours.extend([fake.says("one")] * 5)
        engine.behaviour = fake.hangs
        client = Client(first.url, session)
        batch = await client.create([line(number, f"q{number}") for number in range(12)])
        await until(lambda: client.batch(batch), lambda found: found["request_counts"]["completed"] == 5)
        first.process.kill()
        await asyncio.to_thread(first.stop)
        await fake.until(lambda: engine.num_inside == 0)
        output = next(
            each for each in (tmp_path / "batches" / "content").iterdir() if b'"response"' in each.read_bytes()
        )
        with output.open("ab") as torn:
            torn.write(b'{"id": "batch_req_')
        finished = {json.loads(each)["custom_id"] for each in output.read_bytes().splitlines()[:-1]}
        engine.behaviour = fake.says("two")
        num_before = len(engine.requests)
        second = await start("second")
        client = Client(second.url, session)
        batch = await client.ended(batch)
        assert batch["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
        results = await client.results(batch["output_file_id"])
        second.stop()
    said = {each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"] for each in results}
    assert len(results) == len(said) == 12
    assert {name for name, text in said.items() if text == "one"} == finished
    assert len(engine.requests) - num_before == 7 + 1, "one request checked that the second gateway is up"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


async def test_one_of_two_gateways_with_one_redis_runs_a_batch_and_the_other_takes_over(
    engines, gateways, fake, server
) -> None:
    engine = engines[0]
    engine.behaviours.extend([fake.says("one")] * 3)
    engine.behaviour = fake.hangs
    settings = {"redis": RedisConfig(url=server.url, prefix="several"), "batches": BatchesConfig()}
    pair = [await gateways(engine, **settings) for _ in range(2)]
    client = client_of(pair[0])
    batch = await client.create([line(number) for number in range(10)])
    runners = [each.gateway.worker.batch_runner for each in pair]
    await until(lambda: client.batch(batch), lambda found: found["request_counts"]["completed"] == 3)
    running = [runner for runner in runners if runner._running]
    assert len(running) == 1
    engine.behaviour = fake.says("two")
    await running[0].close()
    client = client_of(pair[1 - runners.index(running[0])])
    batch = await client.ended(batch)
    results = await client.results(batch["output_file_id"])
    assert sorted(each["custom_id"] for each in results) == sorted(f"c{number}" for number in range(10))
    said = [each["response"]["body"]["choices"][0]["message"]["content"] for each in results]
    assert said.count("one") == 3


async def test_a_gateway_without_its_lease_writes_nothing(server, monkeypatch) -> None:
    monkeypatch.setattr("pagemill_gateway.batches.redis.LEASE_MS", 2000)
    store = RedisBatchStore(RedisConfig(url=server.url, prefix="leases"))
    lost = await store.lease("batch_1")
    assert lost is not None
    assert await store.lease("batch_1") is None
    await store.append("file-1", b"a", lost)
    taken = await until(lambda: store.lease("batch_1"), lambda found: found is not None)
    with pytest.raises(LeaseLost):
        await store.append("file-1", b"b", lost)
    await lost.release()
    with pytest.raises(LeaseLost):
        await lost.renew()
    monkeypatch.setattr("pagemill_gateway.batches.redis.LEASE_MS", 100_000)
    await taken.renew()
    await store.append("file-1", b"c", taken)
    await store.put("batches", "a", "batch_1", b"{}", taken)
    assert await store.read("file-1", 0, 10) == b"ac"
    assert await store.read("file-1", 1, 1) == b"c"
    await taken.release()
    assert await store.lease("batch_1") is not None
    await store.close()


async def test_without_redis_the_routes_return_an_error(engines, gateways, monkeypatch) -> None:
    monkeypatch.setattr(link, "CONNECT_TIMEOUT_S", 0.2)
    gateway = await gateways(*engines, redis=RedisConfig(url="redis://127.0.0.1:1"), batches=BatchesConfig())
    status, refused = await client_of(gateway).ask("GET", "/v1/files")
    assert (status, refused["error"]["code"]) == (503, "store_unavailable")
