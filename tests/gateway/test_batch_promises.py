"""What a batch promises: its input stays, its end comes at once when asked for, and every line is accounted for."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_client import CHAT, client_of, kept_in, line, until
from hypothesis import given
from hypothesis import strategies as st
from redis_server import RedisServer, redis_server
from server_processes import examples
from waiting import busy_factor, eventually

from pagemill_gateway.batches import runner as batch_runner
from pagemill_gateway.batches.directory import DirectoryStore, _locked
from pagemill_gateway.batches.line_memory import LEAST_LINE_BYTES, TIMES_TEXT, LineMemory
from pagemill_gateway.batches.redis import RedisBatchStore
from pagemill_gateway.config import BatchesConfig, RedisConfig
from pagemill_servers.auth import hash_key

pytestmark = [pytest.mark.usefixtures("reporting_engines"), pytest.mark.slow]

CANCELLED_WITHIN_S = 0.1
TRIES = 10


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


def settings_in(place: str, tmp_path: Path, server: RedisServer, **bounds: Any) -> dict[str, Any]:
    if place == "directory":
        return kept_in(tmp_path, **bounds)
    return {"redis": RedisConfig(url=server.url, prefix=tmp_path.name), "batches": BatchesConfig(**bounds)}


# -- the input file ----------------------------------------------------------------------------------------------------


async def test_the_input_file_of_a_running_batch_cannot_be_deleted(engines, gateways, fake, tmp_path) -> None:
    engines[0].behaviour = fake.hangs
    client = client_of(await gateways(engines[0], **kept_in(tmp_path)))
    batch = await client.create([line(1)])
    path = f"/v1/files/{batch['input_file_id']}"
    status, refused = await client.ask("DELETE", path)
    assert (status, refused["error"]["code"]) == (409, "file_in_use")
    assert batch["id"] in refused["error"]["message"]
    await client.ask("POST", f"/v1/batches/{batch['id']}/cancel")
    await client.ended(batch)
    assert (await client.ask("DELETE", path))[1]["deleted"] is True
    body = {"input_file_id": batch["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
    status, refused = await client.ask("POST", "/v1/batches", json=body)
    assert (status, refused["error"]["code"]) == (404, "file_not_found")


@pytest.mark.parametrize("change", ["deleted", "cut", "other words", "other lines"])
async def test_a_batch_whose_input_file_changes_fails_by_name_and_keeps_its_results(
    engines, gateways, fake, tmp_path, change
) -> None:
    engines[0].behaviours.extend([fake.says("done")] * 3)
    engines[0].behaviour = fake.hangs
    client = client_of(await gateways(engines[0], **kept_in(tmp_path, max_concurrency=1)))
    batch = await client.create([line(number) for number in range(9)])
    await until(lambda: client.batch(batch), lambda found: found["request_counts"]["completed"] == 3)
    content = tmp_path / "batches" / "content" / batch["input_file_id"]
    whole = content.read_bytes()
    changed = {
        "deleted": b"",
        "cut": whole[: len(whole) // 2],
        "other words": whole.replace(b'"hi"', b'"ho"'),
        "other lines": whole.replace(b'"c', b'"d'),
    }[change]
    engines[0].behaviour = fake.says("done")
    if change == "deleted":
        content.unlink()
        (record,) = (tmp_path / "batches" / "files").glob(f"*/{batch['input_file_id']}")
        record.unlink()
    else:
        content.write_bytes(changed)
    await fake.until(lambda: engines[0].num_inside == 1)
    await engines[0].kill()  # the line that is running now is sent again
    await engines[0].start()
    batch = await client.ended(batch)
    code = "input_file_not_found" if change == "deleted" else "input_file_changed"
    assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", code)
    counts = batch["request_counts"]
    assert counts["completed"] >= 3
    assert counts["completed"] + counts["failed"] == counts["total"] == 9
    assert len(await client.results(batch["output_file_id"])) == counts["completed"]
    assert f"{counts['failed']} of 9 lines have no result" in batch["errors"]["data"][0]["message"]


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["directory", "redis"])
async def test_the_running_requests_of_a_cancelled_batch_end_within_a_tenth_of_a_second(
    engines, gateways, fake, tmp_path, server, place
) -> None:
    """In the best of some tries: the machine may be busy with other work at any of them."""
    engine = engines[0]
    engine.max_num_seqs, engine.behaviour = 64, fake.hangs
    pair = [await gateways(engine, **settings_in(place, tmp_path, server)) for _ in range(2)]
    for gateway in pair:  # one of them runs the batch, and the other one only gets the cancellation
        took_s: list[float] = []
        while len(took_s) < TRIES and min(took_s, default=math.inf) >= CANCELLED_WITHIN_S:
            batch = await client_of(pair[0]).create([line(number) for number in range(12)])
            await eventually(lambda: engine.num_inside == 12)
            began = time.monotonic()
            await client_of(gateway).ask("POST", f"/v1/batches/{batch['id']}/cancel")
            await eventually(lambda: engine.num_inside == 0, every_s=0.002)
            took_s.append(time.monotonic() - began)
            batch = await client_of(gateway).ended(batch)
            assert (batch["status"], batch["request_counts"]["failed"]) == ("cancelled", 12)
        assert min(took_s) < CANCELLED_WITHIN_S * busy_factor(), took_s


async def test_a_batch_that_waits_for_others_is_cancelled_and_expires_at_once(
    engines, gateways, fake, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(batch_runner, "MAX_RUNNING", 1)
    engines[0].behaviour = fake.hangs
    client = client_of(await gateways(engines[0], **kept_in(tmp_path)))
    running = await client.create([line(1)])
    await until(lambda: client.batch(running), lambda found: found["status"] == "in_progress")
    cancelled, expiring = await client.create([line(1), b"{"]), await client.create([line(1)], window="1s")
    await client.ask("POST", f"/v1/batches/{cancelled['id']}/cancel")
    cancelled, expiring = await client.ended(cancelled), await client.ended(expiring)
    assert (cancelled["status"], cancelled["request_counts"]) == (
        "cancelled",
        {"total": 2, "completed": 0, "failed": 2},
    )
    assert (expiring["status"], expiring["request_counts"]) == ("expired", {"total": 1, "completed": 0, "failed": 1})
    assert (await client.batch(running))["status"] == "in_progress"


async def test_a_batch_that_was_cancelled_while_no_gateway_ran_starts_no_line(
    engines, gateways, fake, tmp_path
) -> None:
    engines[0].behaviour = fake.hangs
    first = await gateways(engines[0], **kept_in(tmp_path))
    batch = await client_of(first).create([line(number) for number in range(4)])
    await eventually(lambda: engines[0].num_inside == 4)
    await first.gateway.worker.batch_runner.close()
    await first.gateway.worker.batches.cancel("", batch["id"])
    engines[0].requests.clear()
    client = client_of(await gateways(engines[0], **kept_in(tmp_path)))
    batch = await client.ended(batch)
    assert (batch["status"], batch["request_counts"]) == ("cancelled", {"total": 4, "completed": 0, "failed": 4})
    assert not engines[0].requests


async def test_a_batch_whose_last_line_was_in_time_does_not_expire(engines, gateways, tmp_path, monkeypatch) -> None:
    store = DirectoryStore(str(tmp_path / "batches"))
    first = await gateways(engines[0], **kept_in(tmp_path))
    batch = await client_of(first).ended(await client_of(first).create([line(1)]))
    await first.gateway.worker.batch_runner.close()
    # As a gateway leaves it that dies before the last write, and another one finds it after the window.
    (record,) = (tmp_path / "batches" / "batches").glob(f"*/{batch['id']}")
    left = {**json.loads(record.read_bytes()), "status": "finalizing", "expires_at": 1}
    record.write_bytes(json.dumps(left).encode())
    await store.put("open", "", batch["id"], b"")
    client = client_of(await gateways(engines[0], **kept_in(tmp_path)))
    batch = await client.ended(batch)
    assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 1, "completed": 1, "failed": 0})


# -- leases ------------------------------------------------------------------------------------------------------------


async def test_no_lock_file_stays_after_a_batch(engines, gateways, tmp_path) -> None:
    client = client_of(await gateways(*engines, **kept_in(tmp_path)))
    for _ in range(3):
        await client.ended(await client.create([line(1)]))
    leases = tmp_path / "batches" / "leases"
    await eventually(lambda: not list(leases.iterdir()))
    (leases / "batch_of_an_earlier_version").touch()
    held = _locked(leases / "batch_that_another_gateway_runs")
    assert held is not None
    DirectoryStore(str(tmp_path / "batches"))
    assert [each.name for each in leases.iterdir()] == ["batch_that_another_gateway_runs"]
    held.remove()


def test_a_lease_has_one_holder_though_its_file_is_removed_at_each_release(tmp_path) -> None:
    inside, most, num_held = [0], [0], [0]
    counting = threading.Lock()

    def hold() -> None:
        for _ in range(300):
            lock = _locked(tmp_path / "batch")
            if lock is None:
                continue
            with counting:
                inside[0] += 1
                num_held[0] += 1
                most[0] = max(most[0], inside[0])
            time.sleep(0)
            with counting:
                inside[0] -= 1
            lock.remove()

    threads = [threading.Thread(target=hold) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert most == [1]
    assert num_held[0] > 10


# -- bytes -------------------------------------------------------------------------------------------------------------


async def test_a_file_of_broken_lines_is_read_to_the_limit_only(engines, gateways, tmp_path, monkeypatch) -> None:
    reads: list[int] = []
    read = DirectoryStore.read

    async def counted(store: DirectoryStore, file_id: str, offset: int, size: int) -> bytes:
        reads.append(offset)
        return await read(store, file_id, offset, size)

    client = client_of(await gateways(*engines, **kept_in(tmp_path, max_lines=1000)))
    _, file = await client.upload(b"{\n" * 1_000_000)
    monkeypatch.setattr(DirectoryStore, "read", counted)
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    batch = await client.ended((await client.ask("POST", "/v1/batches", json=body))[1])
    assert [each["code"] for each in batch["errors"]["data"]] == ["too_many_lines"]
    assert max(reads) == 0, "a million faults would take 200 MB"


async def test_lines_that_wait_for_a_limit_hold_no_memory(engines, gateways, tmp_path) -> None:
    key = f"{hash_key('sk-one')} tenant=a requests_per_minute=1"
    gateway = await gateways(engines[0], api_keys=[key], **kept_in(tmp_path))
    client = client_of(gateway, {"Authorization": "Bearer sk-one"})
    batch = await client.create([line(number, padding="x" * 500_000) for number in range(8)])
    memory = gateway.gateway.worker.batch_runner.resources.memory
    await until(lambda: client.batch(batch), lambda found: found["request_counts"]["completed"] == 1)
    await eventually(lambda: memory.num_bytes == 0)
    assert LEAST_LINE_BYTES + TIMES_TEXT * 500_000 < memory.most_bytes <= memory._max_bytes
    assert (await client.batch(batch))["status"] == "in_progress"


@given(
    sizes=st.lists(st.tuples(st.integers(0, 3_000_000), st.booleans()), min_size=1, max_size=30),
    limit=st.integers(LEAST_LINE_BYTES, 20_000_000),
)
@examples(40)
def test_the_memory_of_lines_is_bounded_and_given_back(sizes: list[tuple[int, bool]], limit: int) -> None:
    async def run() -> LineMemory:
        memory = LineMemory(limit)

        async def hold(size: int) -> None:
            async with memory.hold(size):
                assert memory.num_bytes <= limit
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(hold(size)) for size, _ in sizes]
        await asyncio.sleep(0)
        for task, (_, leaves) in zip(tasks, sizes, strict=True):
            if leaves:
                task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(each) for each in ends} <= {type(None), asyncio.CancelledError}
        return memory

    memory = asyncio.run(run())
    assert (memory.num_bytes, len(memory._waiting)) == (0, 0)
    assert memory.most_bytes <= limit


@pytest.mark.parametrize("place", ["directory", "redis"])
async def test_a_large_answer_is_copied_in_pieces_unchanged(
    engines, gateways, fake, tmp_path, server, place, monkeypatch
) -> None:
    largest = [0]
    store_type: Any = DirectoryStore if place == "directory" else RedisBatchStore
    append = store_type.append

    async def watched(store: Any, file_id: str, data: bytes, lease: Any = None) -> None:
        largest[0] = max(largest[0], len(data))
        await append(store, file_id, data, lease)

    client = client_of(await gateways(engines[0], **settings_in(place, tmp_path, server)))
    text = "a\n\u00e9" * 700_000
    engines[0].behaviour = fake.says(text)
    batch = await client.create([line(number) for number in range(3)])
    monkeypatch.setattr(store_type, "append", watched)
    batch = await client.ended(batch)
    results = await client.results(batch["output_file_id"])
    assert {each["custom_id"] for each in results} == {"c0", "c1", "c2"}
    assert all(each["response"]["body"]["choices"][0]["message"]["content"] == text for each in results)
    assert 0 < largest[0] < 1_000_000


async def test_results_count_against_the_bytes_of_their_tenant(engines, gateways, fake, tmp_path) -> None:
    client = client_of(await gateways(engines[0], **kept_in(tmp_path, max_tenant_bytes=60_000, max_concurrency=1)))
    engines[0].behaviour = fake.says("x" * 20_000)
    batch = await client.ended(await client.create([line(number) for number in range(9)]))
    assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 9, "completed": 2, "failed": 7})
    errors = await client.results(batch["error_file_id"])
    assert {each["error"]["code"] for each in errors} == {"too_many_file_bytes"}
    assert "batches.max_tenant_bytes" in errors[0]["error"]["message"]
    await client.upload(b"x" * 10_000)
    body = {"input_file_id": batch["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
    await until(
        lambda: client.ask("POST", "/v1/batches", json=body),
        lambda found: found[0] == 413 and found[1]["error"]["code"] == "too_many_file_bytes",
    )


async def test_uploads_at_the_same_time_share_the_bytes_of_their_tenant(engines, gateways, tmp_path) -> None:
    client = client_of(await gateways(engines[0], **kept_in(tmp_path, max_tenant_bytes=1_000_000)))
    replies = await asyncio.gather(*(client.upload(b"x" * 400_000) for _ in range(6)))
    assert sum(status == 200 for status, _ in replies) <= 2
    assert {status for status, _ in replies} <= {200, 413}
    content = (tmp_path / "batches" / "content").iterdir()
    assert sum(each.stat().st_size for each in content) <= 1_000_000


async def test_an_unfinished_result_in_redis_is_removed(server) -> None:
    store = RedisBatchStore(RedisConfig(url=server.url, prefix="torn"))
    for whole in (b"", b"a\n", b"a\n" + b"b" * 200_000 + b"\n"):
        for torn in (b"", b"t", b"t" * 150_000):
            await store.remove_content("file-1")
            await store.append("file-1", whole + torn)
            await store.trim("file-1")
            assert await store.read("file-1", 0, 10**6) == whole
    await store.close()
