"""Servers whose model several processes compute: answers of one process, and an end that names the lost rank."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
from hung_processes import hang
from light_model import light_model
from waiting import SOON_S, WAIT_LIMIT_S, wait_until

from pagemill_kernels.cpu import library

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")
MODEL = "SmolLM2-135M-Instruct"
StartServer = Callable[..., Any]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "size": {"type": "integer", "minimum": 0}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
LONG = "You are a careful assistant who answers in one sentence. " * 6
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"{LONG}Name a city."}]},
    {"messages": [{"role": "user", "content": f"{LONG}Name a river."}]},
    {
        "messages": [{"role": "user", "content": "A city and its size as JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}},
    },
    {
        "messages": [{"role": "user", "content": "Repeat: one two three four five six seven."}],
        "prediction": {"type": "content", "content": "one two three four five six seven."},
    },
]
"""The second one finds the beginning of the first in the prefix cache."""


def answers(server: Any) -> list[Any]:
    found: list[Any] = []
    for chat in CHATS:
        body = {"model": MODEL, "temperature": 0, "max_tokens": 24, **chat}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=WAIT_LIMIT_S).json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        found.append((answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"], cached))
    return found


def ranks_of(server: Any) -> list[psutil.Process]:
    """Return the engine process, rank 0, and those that follow it."""
    (engine,) = [
        child
        for child in psutil.Process(server.process.pid).children()
        if "pagemill_engine.loop.process" in child.cmdline()
    ]
    return [engine, *engine.children()]


def shared_memory() -> set[str]:
    """Return the names of shared memory that no process uses; other tests create and use some meanwhile."""
    names = set(os.listdir("/dev/shm"))
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            names -= set(re.findall(r"/dev/shm/(\S+)$", maps.read_text(), re.MULTILINE))
    return names


def named_by(processes: list[psutil.Process]) -> set[str]:
    """Return the names of shared memory that these processes use, and that are still there."""
    maps = "".join(Path(f"/proc/{each.pid}/maps").read_text() for each in processes)
    return set(re.findall(r"/dev/shm/(\S+)$", maps, re.MULTILINE))


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
@pytest.mark.model
def test_two_ranks_answer_as_one_process(ranked_server: Any, model_server: Any) -> None:
    found = answers(ranked_server)
    # The other server has answered other tests, and has cached more.
    assert [each[:2] for each in found] == [each[:2] for each in answers(model_server)]
    assert found[1][2] >= 64  # cached tokens
    assert json.loads(found[2][0]).keys() == {"city", "size"}
    wait_until(lambda: seconds_of_ranks(ranked_server).keys() == {"0", "1"})
    assert all(seconds > 0 for seconds in seconds_of_ranks(ranked_server).values())
    assert seconds_of_ranks(model_server) == {}


def seconds_of_ranks(server: Any) -> dict[str, float]:
    text = httpx.get(f"{server.control_url}/metrics", timeout=WAIT_LIMIT_S).text
    found = re.findall(r'^pagemill_engine_rank_compute_seconds_total\{.*rank="(\d)"\} (\S+)$', text, re.MULTILINE)
    return {rank: float(seconds) for rank, seconds in found}


def end_of_stream(server: Any, disturb: Callable[[], None]) -> tuple[str, float]:
    """Disturb the server during an answer. Returns the message that ends it, and how many seconds later."""
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 900, "stream": True, "ignore_eos": True}
    disturbed = 0.0
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=WAIT_LIMIT_S) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return event["error"]["message"], time.monotonic() - disturbed
            if not disturbed:
                disturbed = time.monotonic()
                disturb()
    raise AssertionError("the answer was not disturbed")


def check_end(server: Any, message: str, named: str, before: set[str], ranks: list[psutil.Process]) -> None:
    assert named in message
    assert server.process.wait(WAIT_LIMIT_S) == 1
    last = json.loads(server.stderr().strip().splitlines()[-1])
    assert last["reason"] == "RankLost"
    assert named in last["message"]
    wait_until(lambda: all(map(is_gone, ranks)))
    wait_until(lambda: shared_memory() <= before)


@pytest.mark.model
def test_a_rank_that_ends_ends_answers_and_the_server_with_its_name(ranked_server: Any) -> None:
    before, ranks = shared_memory(), ranks_of(ranked_server)
    assert len(ranks) == 2
    message, took = end_of_stream(ranked_server, lambda: os.kill(ranks[1].pid, signal.SIGKILL))
    assert took < SOON_S, "not after the 60 s in which a rank counts as stuck"
    named = f"rank 1 (process {ranks[1].pid}) ended with the signal SIGKILL; it was last at "
    check_end(ranked_server, message, named, before, ranks)


@pytest.mark.full
@pytest.mark.model
def test_a_rank_that_is_stuck_ends_answers_and_the_server_with_its_name(start_server: StartServer) -> None:
    engine = {
        "null_runner": False,
        "max_model_len": 1024,
        "num_kv_blocks": 512,
        "num_threads": 2,
        "pipeline_parallel_size": 2,
    }
    server = start_server(engine=engine)
    server.wait_for("ready")
    before, ranks = shared_memory(), ranks_of(server)
    message, took = end_of_stream(server, lambda: hang(ranks[1].pid))
    assert took < 10 + SOON_S
    check_end(server, message, "rank 1 has not reached hidden states from rank 1 to 0 of step ", before, ranks)


@pytest.mark.parametrize("killed", ["the server", pytest.param("all processes", marks=pytest.mark.full)])
def test_nothing_is_left_when_processes_are_killed(killed: str, start_server: StartServer) -> None:
    before = shared_memory()
    light = {"null_runner": False, "model": light_model(), "num_kv_blocks": 64, "max_model_len": 512}
    server = start_server(engine={**light, "num_threads": 2, "tensor_parallel_size": 2})
    server.wait_for("ready")
    ranks, everything = ranks_of(server), psutil.Process(server.process.pid).children(recursive=True)
    wait_until(lambda: named_by(ranks) == set())  # what ranks share has no name
    for each in everything if killed == "all processes" else []:
        each.kill()
    os.kill(server.process.pid, signal.SIGKILL)
    wait_until(lambda: all(map(is_gone, {*ranks, *everything})))
    wait_until(lambda: shared_memory() <= before)
