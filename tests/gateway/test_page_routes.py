"""The routes of the page `/ui`: who may look, what the files may do in a browser, and what the event stream says."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from waiting import eventually

from pagemill_gateway import ui
from pagemill_gateway.routes.page import viewers as viewers_module
from pagemill_gateway.routes.page.files_and_state import read_files
from pagemill_gateway.ui.history import LoadHistory, describe_load
from pagemill_protocol.report.load import DeploymentLoad, EnginesLoad, PodCounts
from pagemill_protocol.report.state import EngineLoad, StepTimeParams
from pagemill_servers.auth import hash_key
from pagemill_servers.keys.entries import EntryError, parse_entry

FOLDER = Path(ui.__file__).parent / "static"
ADMIN, USER = "admin-key", "user-key"
KEYS = [f"{hash_key(ADMIN)} role=admin", f"{hash_key(USER)} tenant=acme models=tiny tokens_per_minute=500"]
DATA = ("/ui/events", "/ui/decisions", "/ui/scaling", "/ui/what-if?deployment=default/d", "/ui/keys")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


class Events:
    """Reads the event stream of the page."""

    def __init__(self, response: Any) -> None:
        self._response = response

    async def next(self, name: str) -> Any:
        """Return the data of the next event with that name."""
        async with asyncio.timeout(60):
            while True:
                line = await self._response.content.readline()
                assert line, "the stream has ended"
                if line == f"event: {name}\n".encode():
                    return json.loads((await self._response.content.readline()).removeprefix(b"data: "))

    async def until(self, holds: Any) -> Any:
        """Return the first state of the fleet for which `holds`."""
        async with asyncio.timeout(60):
            while not holds(fleet := await self.next("fleet")):
                pass
            return fleet


@asynccontextmanager
async def events_of(gateway: Any, **headers: str) -> AsyncIterator[Events]:
    async with gateway.session.get(gateway.url + "/ui/events", headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.headers["content-type"] == "text/event-stream"
        yield Events(response)


def engine_of(fleet: Any, name: str) -> Any:
    (model,) = fleet["models"]
    return next(each for each in model["engines"] if each["id"] == name)


async def test_the_page_runs_nothing_but_its_own_files(gateways) -> None:
    gateway = await gateways(wait=False)
    page = await gateway.get("/ui")
    assert page.status == 200
    policy = dict(
        part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";") if " " in part.strip()
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    html = page.raw.decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|https?:", html)
    for path in re.findall(r'(?:src|href)="(/ui/[^"]+)"', html):
        assert (await gateway.get(path)).status == 200, path


def test_the_scripts_make_no_html_of_text_and_load_nothing_from_elsewhere() -> None:
    files = list(FOLDER.glob("*.js"))
    assert files
    for path in files:
        text = path.read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|https?://", text
        ), path
        for imported in re.findall(r'from "([^"]+)"', text):
            assert (FOLDER / imported).is_file(), f"{path.name} imports {imported}"


def test_the_page_of_our_own_stays_small_and_vendored_code_has_its_licence() -> None:
    pages = (FOLDER, FOLDER.parent, Path(viewers_module.__file__).parent)
    own = [path for folder in pages for path in folder.iterdir() if path.is_file()]
    assert sum(len(path.read_text().splitlines()) for path in own) <= 2500
    for vendored in (FOLDER / "vendor").iterdir():
        assert "Copyright" in (vendored / "LICENSE").read_text()
    assert "LICENSE" not in " ".join(read_files())


async def test_a_file_that_the_page_has_not_is_not_found(gateways) -> None:
    gateway = await gateways(wait=False)
    for path in ("/ui/none.js", "/ui/../config.py", "/ui/%2e%2e/routes.py", "/ui/vendor/uplot/LICENSE"):
        assert (await gateway.get(path)).status == 404, path


async def test_an_unchanged_file_is_not_sent_again(gateways) -> None:
    gateway = await gateways(wait=False)
    tag = (await gateway.get("/ui/app.js")).headers["etag"]
    async with gateway.session.get(gateway.url + "/ui/app.js", headers={"If-None-Match": tag}) as response:
        assert response.status == 304


@pytest.mark.parametrize("path", DATA)
async def test_with_keys_only_an_admin_sees_the_platform(gateways, path) -> None:
    gateway = await gateways(wait=False, api_keys=KEYS)
    for headers, status in (({}, 401), (bearer("other"), 401), (bearer(USER), 403), (bearer(ADMIN), 200)):
        async with gateway.session.get(gateway.url + path, headers=headers) as response:
            assert response.status == status
            if status == 403:
                assert "role=admin" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("path", DATA)
@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"X-Forwarded-For": "192.0.2.1"}, "not_on_this_machine"),
        ({"Forwarded": "for=192.0.2.1"}, "not_on_this_machine"),
        ({"Host": "attacker.example"}, "foreign_host"),
        ({"Origin": "https://attacker.example"}, "foreign_origin"),
    ],
)
async def test_without_keys_proxies_and_foreign_pages_see_nothing(gateways, path, headers, code) -> None:
    gateway = await gateways(wait=False)
    async with gateway.session.get(gateway.url + path, headers=headers) as response:
        assert response.status == 403
        assert (await response.json())["error"]["code"] == code


@pytest.mark.layouts
async def test_the_stream_shows_every_engine_and_what_changes(engines, gateways) -> None:
    gateway = await gateways(*engines)
    load = EngineLoad(
        num_kv_bytes_total=100,
        num_kv_bytes_active=30,
        num_kv_bytes_evictable=20,
        num_requests_running=4,
        num_requests_waiting=2,
        step_ms=20.0,
    )
    async with events_of(gateway) as events:
        fleet = await events.next("fleet")
        assert fleet["ready"]
        assert [each["id"] for each in fleet["models"][0]["engines"]] == [each.name for each in engines]
        await engines[1].push_state(load=load)
        fleet = await events.until(lambda fleet: engine_of(fleet, engines[1].name).get("running") == 4)
        engine = engine_of(fleet, engines[1].name)
        assert engine["kv"] == {"unit": "blocks", "active": 30, "cached": 20, "free": 50}
        assert engine["waiting"] == 2
        assert engine["tokens_per_s"] == 200.0  # four requests, and 50 steps a second
        assert engine["phase"] == "ready"


@pytest.mark.layouts
async def test_the_stream_shows_an_engine_that_dies(engines, gateways) -> None:
    gateway = await gateways(*engines)
    async with events_of(gateway) as events:
        await events.until(lambda fleet: engine_of(fleet, engines[0].name)["phase"] == "ready")
        await engines[0].kill()
        fleet = await events.until(lambda fleet: engine_of(fleet, engines[0].name)["phase"] == "unreachable")
        assert engine_of(fleet, engines[1].name)["phase"] == "ready"


@pytest.mark.layouts
async def test_the_stream_has_samples_of_the_load_for_the_plots(engines, gateways) -> None:
    gateway = await gateways(*engines)
    async with events_of(gateway) as first, events_of(gateway) as second:
        for events in (first, second):
            sample = await events.next("sample")
            assert sample["unix_s"] > 0
            assert set(sample["loads"]["default/d"]) == set(
                describe_load(DeploymentLoad(namespace="default", name="d"))
            )


@pytest.mark.layouts
async def test_decisions_say_why_a_request_went_where_it_went(engines, gateways) -> None:
    gateway = await gateways(*engines)
    assert (await gateway.chat()).status == 200
    (decision,) = (await gateway.get("/ui/decisions?limit=5")).json["decisions"]
    assert decision["choice"] in {each.name for each in engines}
    assert decision["num_candidates"] == 3
    for limit in ("0", "101", "x", "-1", "5.5", "٣"):
        async with gateway.session.get(gateway.url + "/ui/decisions", params={"limit": limit}) as response:
            assert response.status == 400
            assert "limit" in (await response.json())["error"]["message"]


async def test_keys_are_shown_with_their_limits_and_without_their_hashes(gateways) -> None:
    gateway = await gateways(wait=False, api_keys=KEYS)
    async with gateway.session.get(gateway.url + "/ui/keys", headers=bearer(ADMIN)) as response:
        text = await response.text()
    keys = {each["account"]: each for each in json.loads(text)["keys"]}
    assert keys["acme"]["limits"] == [{"name": "tokens_per_minute", "model": "", "value": 500, "used": 0}]
    assert keys["acme"]["models"] == ["tiny"]
    assert not keys["acme"]["is_admin"]
    assert keys[f"key {hash_key(ADMIN)[:8]}"]["is_admin"]
    assert hash_key(ADMIN) not in text
    assert hash_key(USER) not in text


async def test_the_stream_ends_when_the_key_loses_its_role(gateways, tmp_path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{KEYS[0]}\n")
    gateway = await gateways(wait=False, api_keys_file=str(path))
    async with gateway.session.get(gateway.url + "/ui/events", headers=bearer(ADMIN)) as response:
        assert response.status == 200
        path.write_text(f"{hash_key(ADMIN)}\n{KEYS[1]}\n")
        async with asyncio.timeout(60):
            while await response.content.readline():
                pass


async def test_the_stream_ends_when_the_gateway_drains(gateways) -> None:
    gateway = await gateways(wait=False)
    async with gateway.session.get(gateway.url + "/ui/events") as response:
        gateway.gateway.worker.draining = True
        async with asyncio.timeout(60):
            while await response.content.readline():
                pass


async def test_more_viewers_than_allowed_are_refused_and_a_place_is_free_again(gateways, monkeypatch) -> None:
    monkeypatch.setattr(viewers_module, "MAX_VIEWERS", 1)
    gateway = await gateways(wait=False)
    async with events_of(gateway):
        refused = await gateway.get("/ui/events")
        assert refused.status == 503
        assert "Close one" in refused.error["message"]

    async def is_free() -> bool:
        async with gateway.session.get(gateway.url + "/ui/events") as response:
            return bool(response.status == 200)

    await eventually(is_free, every_s=0.05)


async def test_without_viewers_nothing_is_asked(engines, gateways, monkeypatch) -> None:
    gateway = await gateways(*engines)
    num_asked = 0
    fleet = gateway.gateway.control.fleet

    async def counted() -> bytes:
        nonlocal num_asked
        num_asked += 1
        return bytes(await fleet())

    monkeypatch.setattr(gateway.gateway.control, "fleet", counted)
    async with events_of(gateway) as events:
        await events.next("fleet")
    assert num_asked
    await eventually(lambda: not any("Viewers._ask" in repr(each) for each in asyncio.all_tasks()))


def test_samples_are_kept_for_a_quarter_of_an_hour() -> None:
    class Loads:
        def load(self) -> list[DeploymentLoad]:
            return [DeploymentLoad(namespace="ns", name="d", pods=PodCounts(ready=2))]

    now = iter(range(1000, 10_000, 5))
    history = LoadHistory(Loads(), lambda: next(now))  # type: ignore[arg-type]
    for _ in range(200):
        history.take()
    samples = history.after(0)
    assert samples[-1].unix_s - samples[0].unix_s == 15 * 60 - 5
    assert [each.number for each in history.after(198)] == [199, 200]
    assert json.loads(samples[-1].loads)["ns/d"]["ready"] == 2


@pytest.mark.parametrize(
    ("engines_load", "headroom"),
    [
        ({"num_requests_running": 6, "num_requests_waiting": 2, "max_num_seqs": 8}, 0.5),
        ({"num_requests_running": 1, "max_num_seqs": 8, "num_kv_bytes_total": 10, "num_kv_bytes_active": 9}, 0.1),
        ({"num_requests_running": 40, "max_num_seqs": 8}, 0.0),
        ({"truth": "stale"}, None),
        ({"num_reporting": 0}, None),
    ],
)
def test_headroom_is_the_smaller_share_of_free_slots_and_blocks(engines_load, headroom) -> None:
    load = EnginesLoad(**{"truth": "value", "num_reporting": 2, **engines_load})
    assert describe_load(DeploymentLoad(namespace="ns", name="d", engines=load))["headroom"] == headroom


def test_a_role_other_than_admin_is_refused_with_the_remedy() -> None:
    assert parse_entry(f"{hash_key(ADMIN)} role=admin").is_admin
    assert not parse_entry(hash_key(ADMIN)).is_admin
    with pytest.raises(EntryError, match=r"role='root'.*admin"):
        parse_entry(f"{hash_key(ADMIN)} role=root")


async def test_proposed_tokens_count_in_the_rate_of_an_engine(engines, gateways) -> None:
    gateway = await gateways(engines[0])
    record = gateway.record(engines[0])
    load = EngineLoad(num_requests_running=2, step_ms=10.0)
    state = record.reports.latest
    record.reports.latest = msgspec.structs.replace(state, load=load, step_time=StepTimeParams(tokens_per_decode=1.5))
    fleet = json.loads(await gateway.gateway.control.fleet())
    assert engine_of(fleet, engines[0].name)["tokens_per_s"] == 300.0
