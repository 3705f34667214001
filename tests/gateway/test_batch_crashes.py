"""A batch whose process dies at any moment, any number of times: each line has exactly one result at the end.

A process that dies is a store that stops at one of its writes: before it, within it, or after it. The next job
continues from what is on the disk. `test_batch_processes` kills real processes.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from batch_client import content_of, line
from hypothesis import given
from hypothesis import strategies as st
from server_processes import examples

from pagemill_gateway.batches import job as batch_job
from pagemill_gateway.batches.answer_file import AnswerFile
from pagemill_gateway.batches.directory import DirectoryStore
from pagemill_gateway.batches.line_sender import LineReply
from pagemill_gateway.batches.objects import Batch, BatchFile, new_object_id
from pagemill_gateway.batches.resources import BatchResources
from pagemill_gateway.batches.store import Kind, Lease
from pagemill_gateway.config import BatchesConfig

ACCOUNT = "a"
CHAT = "/v1/chat/completions"
LINES = [line(1), b"{broken", line(3), b"", line(5, "refused"), line(3), line(7, "long")]
"""Two answers, one of them long, a refusal, and two broken lines."""
NUM_LINES = 6
ANSWERED, FAILED = {1, 3, 7}, {2, 5, 6}
LONG_BYTES = 700_000


class Died(Exception):
    """The process has died."""


class MortalStore(DirectoryStore):
    """A store of a process that dies at its `dies_at`-th write."""

    def __init__(self, directory: str, dies_at: int | None, moment: str = "before") -> None:
        super().__init__(directory)
        self.num_writes = 0
        self._dies_at = dies_at
        self._moment = moment

    async def put(self, kind: Kind, account: str, object_id: str, value: bytes, lease: Lease | None = None) -> None:
        await self._write(super().put(kind, account, object_id, value, lease))

    async def remove(self, kind: Kind, account: str, object_id: str) -> bool:
        return bool(await self._write(super().remove(kind, account, object_id)))

    async def append(self, file_id: str, data: bytes, lease: Lease | None = None) -> None:
        half = super().append(file_id, data[: len(data) // 2], lease)
        await self._write(super().append(file_id, data, lease), half)

    async def _write(self, work: Any, half: Any = None) -> Any:
        self.num_writes += 1
        is_alive = self._dies_at is None or self.num_writes < self._dies_at
        is_last = self.num_writes == self._dies_at
        try:
            if is_alive:
                return await work
            if is_last and self._moment == "after":
                await work
            if is_last and self._moment == "within" and half is not None:
                await half
            raise Died
        finally:
            for each in (work, half):
                if each is not None:
                    each.close()


class Sender:
    """Answers lines like the gateway's routes."""

    async def send(self, path: str, body: bytes, key_hash: str, request_id: str, answer: AnswerFile) -> LineReply:
        text = orjson.loads(body)["messages"][0]["content"]
        await answer.write(orjson.dumps({"text": "x" * LONG_BYTES if text == "long" else text}))
        return LineReply(400 if text == "refused" else 200, {"content-type": "application/json"})


class Idle:
    async def wait(self, model: str) -> None:
        """Let every line start at once."""


def batch_in(folder: Path, lines: list[Any]) -> str:
    """Make a batch of these lines, as `Batches.create` does, and return its id."""
    batch = Batch(
        id=new_object_id("batch_"),
        account=ACCOUNT,
        key_hash="k",
        endpoint=CHAT,
        input_file_id=new_object_id("file-"),
        output_file_id=new_object_id("file-"),
        error_file_id=new_object_id("file-"),
        completion_window="24h",
        created_at=0,
        expires_at=2**40,
    )
    content = content_of(lines)
    file = BatchFile(id=batch.input_file_id, bytes=len(content), created_at=0, filename="f", purpose="batch")

    async def write() -> None:
        store = DirectoryStore(str(folder))
        await store.append(file.id, content)
        await store.put("files", ACCOUNT, file.id, msgspec.json.encode(file))
        await store.put("open", "", batch.id, ACCOUNT.encode())
        await store.put("batches", ACCOUNT, batch.id, msgspec.json.encode(batch))

    asyncio.run(write())
    return batch.id


async def run_once(store: MortalStore, batch_id: str, sender: Any) -> bool:
    """Run the batch in one process. Return whether it died."""
    raw = await store.get("batches", ACCOUNT, batch_id)
    lease = await store.lease(batch_id)
    assert raw is not None
    assert lease is not None
    resources = BatchResources(
        BatchesConfig(directory="x", max_concurrency=4),
        store,
        sender,
        Idle(),  # type: ignore[arg-type]
        max_line_bytes=10_000,
        max_in_flight_bytes=16 * 2**20,
    )
    try:
        async with resources.space_of(ACCOUNT) as space:
            await batch_job.BatchJob(msgspec.json.decode(raw, type=Batch), lease, resources, space).run()
    except Died:
        os.close(lease._descriptor)  # type: ignore[attr-defined]
        return True
    except asyncio.CancelledError:
        await lease.release()
        raise
    await lease.release()
    return False


def run_with_deaths(folder: Path, batch_id: str, deaths: list[tuple[int, str]], sender: Any = None) -> int:
    """Run the batch to its end in processes that die so. Return the number of writes of the last one."""

    async def run() -> int:
        for dies_at, moment in deaths:
            await run_once(MortalStore(str(folder), dies_at, moment), batch_id, sender or Sender())
        last = MortalStore(str(folder), None)
        assert not await run_once(last, batch_id, sender or Sender())
        return last.num_writes

    return asyncio.run(run())


def results_in(folder: Path, batch_id: str) -> tuple[Batch, dict[int, Any], dict[int, Any]]:
    """Return the batch, and both files by the number of the line; fail if a line has two results."""

    async def read() -> tuple[Batch, list[dict[int, Any]]]:
        store = DirectoryStore(str(folder))
        raw = await store.get("batches", ACCOUNT, batch_id)
        assert raw is not None
        batch = msgspec.json.decode(raw, type=Batch)
        found: list[dict[int, Any]] = []
        for file_id in (batch.output_file_id, batch.error_file_id):
            results = [orjson.loads(each) for each in (await store.read(file_id, 0, 2**30)).splitlines()]
            found.append({int(each["id"].rpartition("_")[2]): each for each in results})
            assert len(found[-1]) == len(results), "a line has two results in one file"
        assert await store.all("open", "") == {}
        for kind in ("running", "cancels"):
            assert await store.all(kind, ACCOUNT) == {}, kind
        return batch, found

    batch, (output, errors) = asyncio.run(read())
    assert not output.keys() & errors.keys(), "a line has a result in both files"
    assert list((folder / "leases").iterdir()) == []
    assert list((folder / "content").glob(".*")) == []
    return batch, output, errors


def check_whole(folder: Path, batch_id: str, *, fatal: bool = False) -> None:
    """`fatal`: whether lines may have been running in two deaths."""
    batch, output, errors = results_in(folder, batch_id)
    assert batch.status == "completed"
    assert output.keys() | errors.keys() == ANSWERED | FAILED
    died = {number for number, each in errors.items() if each["error"] and each["error"]["code"] == "gateway_died"}
    assert fatal or not died
    assert output.keys() == ANSWERED - died
    assert (batch.num_lines, batch.num_completed, batch.num_failed) == (NUM_LINES, len(output), len(errors))
    for number, each in output.items():
        assert each["custom_id"] == f"c{number}"
        assert each["response"]["body"]["text"] == ("x" * LONG_BYTES if number == 7 else "hi")


@pytest.mark.slow
def test_after_a_death_at_any_write_each_line_has_one_result(tmp_path: Path) -> None:
    folder = tmp_path / "undisturbed"
    num_writes = run_with_deaths(folder, batch_id := batch_in(folder, LINES), [])
    check_whole(folder, batch_id)
    assert num_writes > 12
    for dies_at in range(1, num_writes + 1):
        for moment in ("before", "within", "after"):
            folder = tmp_path / f"{dies_at}-{moment}"
            run_with_deaths(folder, batch_id := batch_in(folder, LINES), [(dies_at, moment)])
            check_whole(folder, batch_id)


@given(deaths=st.lists(st.tuples(st.integers(1, 20), st.sampled_from(["before", "within", "after"])), max_size=5))
@examples(25)
def test_after_any_deaths_each_line_has_one_result(
    tmp_path_factory: pytest.TempPathFactory, deaths: list[tuple[int, str]]
) -> None:
    folder = tmp_path_factory.mktemp("store")
    run_with_deaths(folder, batch_id := batch_in(folder, LINES), deaths)
    check_whole(folder, batch_id, fatal=len(deaths) > 1)


class Poisoned(Sender):
    """Dies with the process at the text `poison`, like an answer that takes all memory."""

    def __init__(self) -> None:
        self.at_once: list[set[int]] = []
        """The lines that ran together in each process that died."""
        self._inside: set[int] = set()

    async def send(self, path: str, body: bytes, key_hash: str, request_id: str, answer: AnswerFile) -> LineReply:
        number = int(request_id.rpartition("_")[2])
        self._inside.add(number)
        try:
            await asyncio.sleep(0)
            if orjson.loads(body)["messages"][0]["content"] == "poison":
                self.at_once.append(set(self._inside))
                raise Died
            await asyncio.sleep(0.02)  # others are still running when the process dies
            return await super().send(path, body, key_hash, request_id, answer)
        finally:
            self._inside.discard(number)


class DeafStore(MortalStore):
    """A store of a process that dies when a line ends it: what it would write afterwards is lost."""

    def __init__(self, directory: str, sender: Poisoned) -> None:
        super().__init__(directory, None)
        self._sender, self._num_deaths = sender, len(sender.at_once)

    async def _write(self, work: Any, half: Any = None) -> Any:
        if len(self._sender.at_once) > self._num_deaths:
            self._dies_at = self.num_writes
        return await super()._write(work, half)


def test_a_line_that_ends_its_process_twice_is_failed_by_name_and_the_others_are_answered(tmp_path: Path) -> None:
    lines = [line(1), line(2), line(3, "poison"), line(4), line(5)]
    batch_id, sender, num_processes = batch_in(tmp_path, lines), Poisoned(), 0

    async def run() -> None:
        nonlocal num_processes
        while await run_once(DeafStore(str(tmp_path), sender), batch_id, sender):
            num_processes += 1

    asyncio.run(run())
    assert num_processes == 2
    assert len(sender.at_once[0]) > 1
    assert sender.at_once[1] == {3}, "what was running in a death runs alone"
    batch, output, errors = results_in(tmp_path, batch_id)
    assert batch.status == "completed"
    assert output.keys() == {1, 2, 4, 5}
    assert {number: each["error"]["code"] for number, each in errors.items()} == {3: "gateway_died"}
    assert "died 2 times while this line was running" in errors[3]["error"]["message"]


def test_a_process_that_is_stopped_counts_as_no_death(tmp_path: Path) -> None:
    batch_id, started = batch_in(tmp_path, [line(1), line(2)]), asyncio.Event()

    class Waiting(Sender):
        async def send(self, *given: Any) -> LineReply:
            started.set()
            await asyncio.Event().wait()
            raise AssertionError

    async def stop_thrice() -> None:
        for _ in range(3):
            started.clear()
            running = asyncio.create_task(run_once(MortalStore(str(tmp_path), None), batch_id, Waiting()))
            await started.wait()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(stop_thrice())
    run_with_deaths(tmp_path, batch_id, [])
    batch, output, _ = results_in(tmp_path, batch_id)
    assert batch.status == "completed"
    assert output.keys() == {1, 2}
