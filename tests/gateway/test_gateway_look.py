"""`python -m pagemill_gateway.query` shows a gateway's control routes from its container without curl or a token."""

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


async def test_look_prints_the_answer_of_the_control_port(engines, gateways, tmp_path, capsys) -> None:
    gateway = await gateways(engines[0])
    assert (await gateway.chat()).status == 200
    settings = settings_of(tmp_path, gateway, control_token="t0ken")
    assert await query("--settings", settings, "/debug/decisions?limit=1") == 0
    (decision,) = json.loads(capsys.readouterr().out)["decisions"]
    assert decision["candidates"]


async def test_look_uses_the_clusters_token_that_the_gateway_stores(engines, gateways, tmp_path, capsys) -> None:
    token = derive_token(b"k" * 32, *GATEWAY_CONTROL)
    known = tmp_path / "catalog.json"
    known.write_text(json.dumps({"catalog": {"models": []}, "control_tokens": [token], "version": 1}))
    gateway = await gateways(engines[0], control_token=token)
    kubernetes = {"last_known_file": str(known)}
    settings = settings_of(tmp_path, gateway, discovery="kubernetes", kubernetes=kubernetes)
    assert await query("--settings", settings, "/status") == 0
    assert json.loads(capsys.readouterr().out)["ready"]


async def test_look_prints_a_refusal_and_a_failure(engines, gateways, tmp_path, capsys) -> None:
    gateway = await gateways(engines[0])
    settings = settings_of(tmp_path, gateway, control_token="wrong")
    assert await query("--settings", settings, "/status") == 1
    assert "needs the control token" in capsys.readouterr().out


async def test_look_reports_an_unreachable_gateway_in_one_line(tmp_path, capsys) -> None:
    path = tmp_path / "gateway.json"
    path.write_text('{"control_port": 9}')
    assert await query("--settings", str(path), "/status") == 1
    assert await query("--settings", str(tmp_path / "none"), "/status") == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert "refused" in errors[0]
    assert "none" in errors[1]


@pytest.mark.parametrize("path", ["/metrics", "/version"])
async def test_look_prints_routes_without_authentication(engines, gateways, tmp_path, path) -> None:
    gateway = await gateways(engines[0])
    assert await query("--settings", settings_of(tmp_path, gateway), path) == 0
