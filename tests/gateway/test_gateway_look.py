"""`python -m pagemill_gateway.query`: who looks into a gateway's container needs neither curl nor a token."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pagemill_gateway.query import main
from pagemill_protocol.engine_token import GATEWAY_CONTROL, derive_token


def settings_of(folder: Path, gateway: Any, **settings: object) -> str:
    path = folder / "gateway.json"
    port = int(gateway.control_url.rpartition(":")[2])
    path.write_text(json.dumps({"control_port": port, **settings}))
    return str(path)


async def query(*words: str) -> int:
    return await asyncio.to_thread(main, list(words))


async def test_it_shows_what_the_control_port_answers(engines, gateways, tmp_path, capsys) -> None:
    gateway = await gateways(engines[0])
    assert (await gateway.chat()).status == 200
    settings = settings_of(tmp_path, gateway, control_token="t0ken")
    assert await query("--settings", settings, "/debug/decisions?limit=1") == 0
    (decision,) = json.loads(capsys.readouterr().out)["decisions"]
    assert decision["candidates"]


async def test_it_takes_the_token_of_the_clusters_keys_from_what_the_gateway_keeps(
    engines, gateways, tmp_path, capsys
) -> None:
    token = derive_token(b"k" * 32, *GATEWAY_CONTROL)
    known = tmp_path / "catalog.json"
    known.write_text(json.dumps({"catalog": {"models": []}, "control_tokens": [token], "version": 1}))
    gateway = await gateways(engines[0], control_token=token)
    kubernetes = {"last_known_file": str(known)}
    settings = settings_of(tmp_path, gateway, discovery="kubernetes", kubernetes=kubernetes)
    assert await query("--settings", settings, "/status") == 0
    assert json.loads(capsys.readouterr().out)["ready"]


async def test_a_refusal_is_shown_and_a_failure(engines, gateways, tmp_path, capsys) -> None:
    gateway = await gateways(engines[0])
    settings = settings_of(tmp_path, gateway, control_token="wrong")
    assert await query("--settings", settings, "/status") == 1
    assert "needs the control token" in capsys.readouterr().out


async def test_what_it_cannot_reach_is_said_in_one_line(tmp_path, capsys) -> None:
    path = tmp_path / "gateway.json"
    path.write_text('{"control_port": 9}')
    assert await query("--settings", str(path), "/status") == 1
    assert await query("--settings", str(tmp_path / "none"), "/status") == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert "refused" in errors[0]
    assert "none" in errors[1]


@pytest.mark.parametrize("path", ["/metrics", "/version"])
async def test_open_routes_are_shown_as_well(engines, gateways, tmp_path, path) -> None:
    gateway = await gateways(engines[0])
    assert await query("--settings", settings_of(tmp_path, gateway), path) == 0
