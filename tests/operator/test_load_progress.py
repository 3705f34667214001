"""The progress of a loader, from its log to the condition."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from observed_world import CACHED, World, running

from pagemill_crds.models import LLMDeployment
from pagemill_kube.errors import Unreachable
from pagemill_operator.controller.watching.load_progress import PERIOD_S, LoaderProgress

GIB = 2**30


class Logs:
    """The API server's answers to requests for logs."""

    def __init__(self) -> None:
        self.content = b""
        self.asked: list[str] = []
        self.down = False

    async def read(self, path: str, *, query: Any, timeout_s: float) -> bytes:
        self.asked.append(f"{path}?container={query['container']}")
        if self.down:
            raise Unreachable("GET")
        return self.content


def pod(container: str = "loader", kind: str = "containerStatuses", restarts: int = 0, **state: Any) -> dict[str, Any]:
    status = {kind: [{"name": container, "state": state or {"running": {}}, "restartCount": restarts}]}
    return {"metadata": {"namespace": "team", "name": "chat-load-1"}, "status": status}


def line(done: int, total: int) -> bytes:
    return json.dumps({"event": "progress", "done_bytes": done, "total_bytes": total}).encode() + b"\n"


async def text_of(log: bytes) -> str:
    logs = Logs()
    logs.content = log
    progress = LoaderProgress(logs)  # type: ignore[arg-type]
    await progress.look("team/chat", [pod()])
    return progress.text("team/chat")


async def test_the_last_line_with_bytes_is_used() -> None:
    log = b"no json\n" + line(GIB, 4 * GIB) + line(2 * GIB, 4 * GIB) + b'{"event":"file","path":"a"}\n{"cut'
    assert await text_of(log) == "2.0 of 4.0 GiB"
    assert await text_of(line(2**20, 3 * 2**20)) == "1.0 of 3.0 MiB"


@pytest.mark.parametrize("log", [b"", b"[]\n", b"5\n", b'{"done_bytes": 5, "total_bytes": 1}', b'{"done_bytes": "a"}'])
async def test_a_log_without_bytes_gives_no_progress(log: bytes) -> None:
    assert await text_of(log) == ""


async def test_a_loader_that_runs_again_has_progress_once_more_bytes_arrive() -> None:
    logs, now = Logs(), [0.0]
    progress = LoaderProgress(logs, clock=lambda: now[0])  # type: ignore[arg-type]

    async def look(restarts: int, *lines: bytes) -> str:
        now[0] += PERIOD_S
        logs.content = b"".join(lines)
        await progress.look("team/chat", [pod(restarts=restarts)])
        return progress.text("team/chat")

    assert await look(0, line(GIB, 4 * GIB)) == "1.0 of 4.0 GiB"
    assert await look(1) == "", "nothing is known of the second run, and its log may not be the first one's"
    assert await look(1, line(GIB, 4 * GIB)) == "", "the first run has left these bytes"
    assert await look(1, line(GIB, 4 * GIB), line(GIB, 4 * GIB)) == ""
    assert await look(1, line(2 * GIB, 4 * GIB)) == "2.0 of 4.0 GiB"
    assert await look(1) == "2.0 of 4.0 GiB"
    assert await look(2, line(2 * GIB, 4 * GIB), line(3 * GIB, 4 * GIB)) == "3.0 of 4.0 GiB"


async def test_only_a_running_loader_causes_requests_and_few_of_them() -> None:
    logs, now = Logs(), [0.0]
    progress = LoaderProgress(logs, clock=lambda: now[0])  # type: ignore[arg-type]
    await progress.look("team/chat", [pod("engine"), pod(terminated={"exitCode": 0})])
    assert logs.asked == []
    logs.content = line(GIB, 4 * GIB)
    await progress.look("team/chat", [pod(kind="initContainerStatuses")])
    await progress.look("team/chat", [pod(kind="initContainerStatuses")])
    assert logs.asked == ["/api/v1/namespaces/team/pods/chat-load-1/log?container=loader"]
    assert progress.text("team/chat") == "1.0 of 4.0 GiB"
    now[0] += PERIOD_S
    logs.down = True
    await progress.look("team/chat", [pod()])
    assert progress.text("team/chat") == "1.0 of 4.0 GiB"
    await progress.look("team/chat", [])
    assert progress.text("team/chat") == ""


def test_the_condition_contains_the_bytes_and_is_updated(deployment: Callable[..., LLMDeployment]) -> None:
    world = World(deployment(**CACHED)).apply().pod(running(started=True), component="loader")
    world.progress = "1.2 of 4.0 GiB"
    seen, found = world.at(60.0)
    assert found["ModelLoaded"].reason == "Downloading"
    assert found["ModelLoaded"].message == "the loader fills the model's volume: 1.2 of 4.0 GiB"
    assert seen.requeue_after_s is not None
