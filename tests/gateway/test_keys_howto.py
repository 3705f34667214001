"""Gateways accept the keys that the commands of docs/how-to/keys-and-limits.md create."""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from redis_server import RedisServer, redis_cli, redis_server
from typer.testing import CliRunner
from waiting import eventually

from pagemill.main import app
from pagemill_gateway import __main__ as gateway_main
from pagemill_gateway.config import GatewayConfig, RedisConfig, open_keys_file
from pagemill_gateway.limits.redis.link import RedisLink
from pagemill_gateway.limits.redis.shared_keys import SharedKeys
from pagemill_gateway.limits.redis.store import RedisStore
from pagemill_protocol.errors import PagemillError
from pagemill_servers.auth import hash_key
from pagemill_servers.keys.caller import Limits
from pagemill_servers.keys.entries import parse_entry
from pagemill_servers.keys.file import check_keys_file
from pagemill_servers.keys.ring import KeyRing

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "keys-and-limits.md"
KEY = "sk-a-key-of-this-test"


def commands(*starts: str) -> list[str]:
    steps = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    lines = "".join(steps).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith(starts)]


def test_the_pages_file_of_keys_can_be_read(tmp_path: Path) -> None:
    script = "\n".join(["set -euo pipefail", *commands("KEY=", "printf"), 'printf %s "$KEY"'])
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    (line,) = (tmp_path / "keys").read_text().splitlines()
    caller = parse_entry(line)
    assert caller.key_hash == hash_key(done.stdout)
    assert caller.tenant == "team-a"
    assert caller.limits == Limits(requests_per_minute=600)
    check_keys_file(tmp_path / "keys.txt")


def test_the_pages_gateway_requires_the_keys_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[GatewayConfig] = []
    monkeypatch.setattr(gateway_main, "run", started.append)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys.txt").write_text(f"{hash_key(KEY)} tenant=team-a\n")
    (command,) = commands(".venv/bin/pagemill gateway")
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    (config,) = started
    assert _tenant(KeyRing(config.api_keys, open_keys_file(config.api_keys_file))) == "team-a"


@pytest.mark.parametrize("command", commands("redis-cli"))
async def test_the_pages_key_in_redis_is_accepted(command: str, tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        await asyncio.to_thread(_type, command, server)
        link = RedisLink(RedisConfig(url=server.url, timeout_ms=10_000.0))
        store, ring = RedisStore(link), KeyRing([], shared=True)
        shared = SharedKeys(link, ring.replace_shared)
        store.start()
        shared.start()
        try:
            tenant = await eventually(lambda: _tenant(ring))
        finally:
            await shared.close()
            await store.close()
        assert tenant == "team-a"


def _type(command: str, server: RedisServer) -> None:
    begin, shortened, rest = command.partition("5e88489...")
    assert shortened, "the page must not contain a shortened hash"
    typed = f"{begin.replace('redis-cli', f'{redis_cli()} -p {server.port}')}{hash_key(KEY)}{rest}"
    subprocess.run(["bash", "-c", typed], check=True, capture_output=True, timeout=60)


def _tenant(ring: KeyRing) -> str | None:
    """Return the tenant of the page's key, or None while the gateway does not know the key."""
    try:
        caller = ring.authenticate({"type": "http", "headers": [(b"authorization", f"Bearer {KEY}".encode())]})
    except PagemillError:
        return None
    return caller.tenant
