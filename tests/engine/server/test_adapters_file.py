"""Adapters by name, with a scripted engine process: the file, what readiness waits for, and new tries."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_LIMIT_S

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.messages import AdapterRead, AdapterUse, ForgetAdapter, LoadAdapter, ToEngine
from pagemill_engine.server import adapters as module
from pagemill_engine.server import followed_file
from pagemill_engine.server.adapter_loads import AdapterLoads
from pagemill_engine.server.adapters import ServedAdapters
from pagemill_engine.server.metrics import ServerMetrics
from pagemill_engine.server.phases.state_stream import StatePublisher
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.report.adapters import AdapterSlots, AdapterStatus, WantedAdapter


class ScriptedEngine:
    """Served adapters whose engine answers with the last part of a path as digest, or refuses `bad`."""

    def __init__(self, tmp_path: Path, *modules: WantedAdapter) -> None:
        self.file = tmp_path / "adapters.json"
        config = EngineConfig(
            model="m", enable_lora=True, max_loras=2, adapters_file=str(self.file), lora_modules=list(modules)
        )
        self.metrics = ServerMetrics("m", config)
        self.publisher = StatePublisher(["m"])
        self.served = ServedAdapters(config, ["m"], self.publisher, self.metrics)
        self.loads = AdapterLoads(self._send)
        self.held: set[str] = set()
        """Paths whose answers are held back."""
        self.bad = {"/bad"}
        self.read: list[str] = []
        self.forgotten: list[str] = []
        self.awaited: list[str] = []
        self._waiting: list[LoadAdapter] = []

    def list(self, **sources: str) -> None:
        pinned = {name.removeprefix("pinned_"): name for name in sources if name.startswith("pinned_")}
        self.file.write_text(
            json.dumps(
                {
                    "adapters": [
                        {"name": name.removeprefix("pinned_"), "source": source, "pinned": name in pinned.values()}
                        for name, source in sources.items()
                    ]
                }
            )
        )

    def start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.served.start(self.loads, self.awaited.append))

    def release(self, path: str) -> None:
        self.held.discard(path)
        for asked in [each for each in self._waiting if each.path == path]:
            self._waiting.remove(asked)
            self._answer(asked)

    @property
    def known(self) -> dict[str, AdapterStatus]:
        return {each.name: each for each in self.publisher._next.adapters.known}

    def _send(self, message: ToEngine) -> None:
        if isinstance(message, ForgetAdapter):
            self.forgotten.append(message.digest)
            return
        assert isinstance(message, LoadAdapter)
        self.read.append(message.path)
        if message.path in self.held:
            self._waiting.append(message)
        else:
            self._answer(message)

    def _answer(self, asked: LoadAdapter) -> None:
        if asked.path in self.bad:
            answer = AdapterRead(number=asked.number, reason="AdapterTooLarge", message="has rank 64")
        else:
            answer = AdapterRead(number=asked.number, digest=f"digest of {Path(asked.path).name}")
        asyncio.get_running_loop().call_soon(self.loads.answered, answer)


@pytest.fixture
async def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(followed_file, "CHECK_S", 0.005)
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.005)
    made: list[ScriptedEngine] = []

    def one(*modules: WantedAdapter) -> ScriptedEngine:
        made.append(ScriptedEngine(tmp_path, *modules))
        return made[-1]

    yield one
    for each in made:
        each.served.close()


async def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.002)


async def test_readiness_waits_for_pinned_adapters_and_no_others(make: Callable[..., ScriptedEngine]) -> None:
    world = make()
    world.list(pinned_a="/a", b="/b", pinned_c="/bad")
    world.held = {"/a", "/b"}
    starting = world.start()
    await until(lambda: "c" in world.known and world.known["c"].state == "refused")
    assert not starting.done()
    assert world.awaited[0] in ("a, c", "a")
    world.release("/a")
    await starting
    assert world.known["a"].digest == "digest of a"
    assert world.known["b"].state == "fetching"
    with pytest.raises(PagemillError, match="is being loaded") as caught:
        world.served.digest_of("b")
    assert (caught.value.status, caught.value.code) == (503, "adapter_loading")
    world.release("/b")
    await until(lambda: "b" in world.served.names)


async def test_a_pinned_adapter_that_is_no_longer_wanted_delays_nothing(make: Callable[..., ScriptedEngine]) -> None:
    world = make()
    world.list(pinned_a="/a")
    world.held = {"/a"}
    starting = world.start()
    await until(lambda: world.read == ["/a"])
    world.list()
    await starting
    world.release("/a")
    await until(lambda: world.forgotten == ["digest of a"])


async def test_a_refused_adapter_of_the_settings_ends_the_start(make: Callable[..., ScriptedEngine]) -> None:
    world = make(WantedAdapter(name="x", source="/bad"))
    with pytest.raises(PagemillError, match="x: has rank 64"):
        await world.start()
    world = make(WantedAdapter(name="m", source="/a"))
    with pytest.raises(PagemillError, match="`m` is the name of the model"):
        await world.start()


async def test_a_refused_adapter_of_the_file_is_tried_again(make: Callable[..., ScriptedEngine]) -> None:
    world = make()
    world.list(a="/bad", b="/b")
    await world.start()
    await until(lambda: world.read.count("/bad") >= 3)
    assert world.served.names == ["b"]
    with pytest.raises(PagemillError, match="has rank 64") as caught:
        world.served.digest_of("a")
    assert caught.value.code == "adapter_refused"
    world.bad.clear()
    await until(lambda: world.served.names == ["a", "b"])
    num_reads = len(world.read)
    await asyncio.sleep(0.05)
    assert len(world.read) == num_reads


async def test_a_name_keeps_its_content_until_the_new_one_is_known(make: Callable[..., ScriptedEngine]) -> None:
    world = make()
    world.list(a="/a", other="/a")
    await world.start()
    await until(lambda: world.served.names == ["a", "other"])
    world.held = {"/new"}
    world.list(a="/new", other="/a")
    await until(lambda: "/new" in world.read)
    assert (world.known["a"].state, world.served.digest_of("a")) == ("fetching", "digest of a")
    world.release("/new")
    await until(lambda: world.served.digest_of("a") == "digest of new")
    assert world.forgotten == []
    world.list(a="/bad")
    await until(lambda: world.known["a"].state == "refused")
    assert world.served.digest_of("a") == "digest of new"
    await until(lambda: world.forgotten == ["digest of a"])


async def test_a_file_that_cannot_be_read_changes_nothing(
    make: Callable[..., ScriptedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    world = make()
    world.list(a="/a")
    await world.start()
    await until(lambda: world.served.names == ["a"])
    for content in ('{"adapters": [{"name": "b"', '{"adapters": [{"name": 1, "source": "x"}]}'):
        caplog.clear()
        world.file.write_text(content)
        await until(lambda: "what it said before stays" in caplog.text)
        assert world.served.names == ["a"]
    world.file.unlink()
    await until(lambda: world.served.names == [])
    assert world.forgotten == ["digest of a"]


async def test_names_that_are_taken_are_refused_by_file_and_route(
    make: Callable[..., ScriptedEngine],
) -> None:
    world = make(WantedAdapter(name="x", source="/x"))
    world.list(x="/a", m="/a", free="/a")
    await world.start()
    conflicts = [each for each in world.publisher._next.adapters.known if each.reason == "NameConflict"]
    assert [each.name for each in conflicts] == ["x", "m"]
    assert world.served.digest_of("x") == "digest of x"
    with pytest.raises(PagemillError, match="There is an adapter `x` already") as caught:
        await world.served.load(WantedAdapter(name="x", source="/a"))
    assert caught.value.param == "lora_name"
    with pytest.raises(PagemillError, match="There is an adapter `free` already"):
        await world.served.load(WantedAdapter(name="free", source="/b"), in_place=True)  # the file would undo it
    with pytest.raises(PagemillError, match="pvc://"):
        await world.served.load(WantedAdapter(name="y", source="pvc://claim/y"))
    assert "y" not in world.known


async def test_metrics_name_adapters_with_requests(make: Callable[..., ScriptedEngine]) -> None:
    world = make()
    world.list(a="/a", b="/b", c="/bad")
    await world.start()
    await until(lambda: world.served.names == ["a", "b"] and world.known["c"].state == "refused")

    def lines(name: str) -> list[str]:
        text = world.metrics.scrape("").body.decode()
        return [line for line in text.splitlines() if line.startswith(name)]

    slots = AdapterSlots(num_slots=2, resident=["digest of a"], loading=["digest of b"], load_ms=20.0)
    use = AdapterUse(slots=slots, running=["digest of a"], waiting=["digest of b"], num_loads=3, num_evictions=1)
    world.served.used(use)
    (line,) = lines("vllm:lora_requests_info")
    assert 'max_lora="2"' in line
    assert 'running_lora_adapters="a",waiting_lora_adapters="b"' in line
    assert 'pagemill_engine_adapters{model_name="m",state="refused"} 1.0' in lines("pagemill_engine_adapters{")
    assert lines("pagemill_engine_adapter_loads_total") == ['pagemill_engine_adapter_loads_total{model_name="m"} 3.0']
    assert world.publisher._next.adapters.resident == ["digest of a"]
    world.served.used(AdapterUse(slots=slots, num_loads=3, num_evictions=1))
    (line,) = lines("vllm:lora_requests_info")
    assert 'running_lora_adapters="",waiting_lora_adapters=""' in line
    assert lines("pagemill_engine_adapter_loads_total") == ['pagemill_engine_adapter_loads_total{model_name="m"} 3.0']
