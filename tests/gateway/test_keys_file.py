"""The file of API keys at a running gateway: changes take effect; an invalid file is reported and changes nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_LIMIT_S

from pagemill_servers.auth import hash_key
from pagemill_servers.secrets import secret_file

LOGGERS = ("pagemill_servers.secrets.secret_file", "pagemill.gateway.keys")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_file, "CHECK_INTERVAL_S", 0.02)
    monkeypatch.setattr("pagemill_gateway.control_process.CHECK_INTERVAL_S", 0.02)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def status_of(gateway, key: str) -> int:
    return (await gateway.chat(headers=bearer(key))).status


async def becomes(ask: Callable[[], Awaitable[Any]], wanted: Any) -> None:
    async with asyncio.timeout(WAIT_LIMIT_S):
        while await ask() != wanted:  # noqa: ASYNC110 (no event says so)
            await asyncio.sleep(0.01)


async def valid(gateway) -> float:
    lines = (await gateway.get("/metrics", control=True)).raw.decode().splitlines()
    (line,) = [each for each in lines if each.startswith("pagemill_gateway_api_keys_file_valid ")]
    return float(line.rsplit(" ", 1)[1])


async def detail(gateway) -> str:
    return (await gateway.get("/readyz")).json["detail"]


@pytest.mark.layouts
async def test_keys_are_added_limited_and_revoked_without_a_restart(engines, gateways, fake, tmp_path: Path) -> None:
    (path := tmp_path / "keys").write_text(f"{hash_key('one')}\n{hash_key('two')} tenant=b\n")
    gateway = await gateways(engines[0], api_keys_file=str(path))
    assert [await status_of(gateway, key) for key in ("one", "two", "new")] == [200, 200, 401]
    path.write_text(f"{hash_key('one')} requests_per_minute=1\n{hash_key('new')}\n")
    await becomes(lambda: status_of(gateway, "new"), 200)
    assert await status_of(gateway, "two") == 401, "the key is revoked"
    assert [await status_of(gateway, "one") for _ in range(2)] == [200, 429], "the key is limited from now on"


async def test_an_update_of_a_mounted_secret_is_noticed(engines, gateways, tmp_path: Path) -> None:
    for folder, key in (("..1", "one"), ("..2", "two")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "keys").write_text(f"{hash_key(key)}\n")
        os.utime(tmp_path / folder / "keys", (1, 1))
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "keys").symlink_to("..data/keys")
    gateway = await gateways(engines[0], api_keys_file=str(tmp_path / "keys"))
    assert await status_of(gateway, "one") == 200
    (tmp_path / "..tmp").symlink_to("..2")
    os.replace(tmp_path / "..tmp", tmp_path / "..data")
    await becomes(lambda: status_of(gateway, "two"), 200)
    assert await status_of(gateway, "one") == 401


@pytest.mark.layouts
async def test_an_invalid_file_keeps_the_previous_keys_and_is_reported_once(
    engines, gateways, fake, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path := tmp_path / "keys").write_text(f"{hash_key('one')}\n")
    gateway = await gateways(engines[0], api_keys_file=str(path))
    assert (await valid(gateway), await detail(gateway)) == (1.0, "")
    path.write_text(f"{hash_key('two')}\nsk-plain\n")
    await becomes(lambda: valid(gateway), 0.0)
    ready = await gateway.get("/readyz")
    assert ready.status == 200
    assert "api_keys_file cannot be used" in ready.json["detail"]
    assert "sk-plain" not in ready.json["detail"]
    assert str(path) not in ready.json["detail"]
    assert [await status_of(gateway, key) for key in ("one", "two")] == [200, 401]
    (error,) = [each for each in caplog.records if each.name in LOGGERS and each.levelname == "ERROR"]
    assert "line 2 does not begin with a SHA-256" in error.getMessage()
    assert "sk-plain" not in caplog.text
    path.write_text(f"{hash_key('two')}\n")
    await becomes(lambda: valid(gateway), 1.0)
    assert await detail(gateway) == ""
    await becomes(lambda: status_of(gateway, "two"), 200)
    assert await status_of(gateway, "one") == 401


async def test_without_a_file_no_file_is_reported_as_invalid(engines, gateways) -> None:
    assert await valid(await gateways(engines[0])) == 1.0
