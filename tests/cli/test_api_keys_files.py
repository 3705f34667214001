"""`--api-keys-file` of serve, gateway and up: one format, and a plain key is refused without being shown."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from typer.testing import CliRunner

from pagemill.commands import serve
from pagemill.main import app
from pagemill.up import session
from pagemill_engine.server.routes.keys import open_keys
from pagemill_engine.server.settings import Settings
from pagemill_gateway import __main__ as gateway_main
from pagemill_gateway.config import GatewayConfig, load_config, open_keys_file
from pagemill_operator.backends.local import LocalSettings
from pagemill_operator.backends.local.gateway import LocalGateway
from pagemill_operator.backends.local.state_dir import StateDir
from pagemill_protocol.errors import PagemillError
from pagemill_servers.auth import hash_key
from pagemill_servers.keys.caller import Caller, Limits
from pagemill_servers.keys.ring import KeyRing

EXAMPLE = Path(__file__).parents[2] / "examples" / "llmdeployment.yaml"
KEY = "sk-a-key-of-this-test"
GATEWAY = ["gateway", "--engine", "http://127.0.0.1:8000", "--model", "tiny"]
COMMANDS = {"serve": ["serve"], "gateway": GATEWAY, "up": ["up", "-f", str(EXAMPLE)]}


class Started:
    """Records the keys with which the commands would start servers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.rings: list[KeyRing] = []

    def engine(self, settings: Settings, console: object) -> None:
        self.rings.append(open_keys(settings.server))

    def gateway(self, config: GatewayConfig) -> None:
        self.rings.append(KeyRing(config.api_keys, open_keys_file(config.api_keys_file)))

    async def up(self, request: session.UpRequest, loaded: object, screen: object) -> int:
        self.gateway(await _settings_of_gateway(request.settings, self._folder))
        return 0


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    servers = Started(tmp_path)
    monkeypatch.delenv("PAGEMILL_API_KEYS_FILE", raising=False)
    monkeypatch.setattr(serve, "_run", servers.engine)
    monkeypatch.setattr(gateway_main, "run", servers.gateway)
    monkeypatch.setattr(session, "run_up", servers.up)
    return servers


async def _settings_of_gateway(settings: LocalSettings, folder: Path) -> GatewayConfig:
    state_dir = StateDir(folder)
    async with aiohttp.ClientSession() as http:
        gateway = LocalGateway(
            1,
            settings=settings,
            state_dir=state_dir,
            session=http,
            on_change=lambda: None,
            on_event=lambda _: None,
        )
        config = load_config(Path(gateway._prepare().command[-1]))
        await gateway.end(0)
        state_dir.remove()
        return config


def caller_of(ring: KeyRing, key: str) -> Caller | None:
    try:
        return ring.authenticate({"type": "http", "headers": [(b"authorization", f"Bearer {key}".encode())]})
    except PagemillError:
        return None


@pytest.mark.parametrize("command", COMMANDS)
def test_a_line_is_the_hash_of_a_key_and_comments_are_ignored(command: str, started: Started, tmp_path: Path) -> None:
    line = f"{hash_key(KEY)} tenant=team-a"
    (path := tmp_path / "keys").write_text(f"# team keys\n\n{line}\n")
    result = CliRunner().invoke(app, [*COMMANDS[command], "--api-keys-file", str(path)])
    assert result.exit_code == 0, result.output
    (ring,) = started.rings
    caller = caller_of(ring, KEY)
    assert caller is not None
    assert caller.tenant == "team-a"
    for no_key in (line, hash_key(KEY), "# team keys"):
        assert caller_of(ring, no_key) is None


@pytest.mark.parametrize("command", ["gateway", "up"])
def test_limits_of_the_file_apply_if_a_gateway_serves(command: str, started: Started, tmp_path: Path) -> None:
    (path := tmp_path / "keys").write_text(f"{hash_key(KEY)} requests_per_minute=60 tokens_per_minute=1000\n")
    result = CliRunner().invoke(app, [*COMMANDS[command], "--api-keys-file", str(path)])
    assert result.exit_code == 0, result.output
    caller = caller_of(started.rings[0], KEY)
    assert caller is not None
    assert caller.limits == Limits(requests_per_minute=60, tokens_per_minute=1000)


def test_limits_without_a_gateway_are_refused(started: Started, tmp_path: Path) -> None:
    for field in ("tokens_per_minute=1000", "models=llama", "priority=high"):
        (path := tmp_path / "keys").write_text(f"{hash_key(KEY)} tenant=team-a {field}\n")
        result = CliRunner().invoke(app, ["serve", "--api-keys-file", str(path)])
        assert result.exit_code == 1
        assert f"line 1 of {path} has `{field.partition('=')[0]}`" in result.output
        assert "pagemill gateway" in result.output
    assert not started.rings


@pytest.mark.parametrize("command", COMMANDS)
def test_a_plain_key_is_refused_by_line_number_and_never_shown(command: str, started: Started, tmp_path: Path) -> None:
    (path := tmp_path / "keys").write_text(f"# team keys\n{hash_key(KEY)}\n{KEY}\n")
    result = CliRunner().invoke(app, [*COMMANDS[command], "--api-keys-file", str(path)])
    assert result.exit_code in (1, 2)
    assert f"line 3 of {path}" in result.output
    assert "printf %s KEY | sha256sum" in result.output
    assert KEY not in result.output
    assert not started.rings


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("content", ["", "# no key yet\n", None])
def test_a_file_without_a_key_is_refused(command: str, content: str | None, started: Started, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    result = CliRunner().invoke(app, [*COMMANDS[command], "--api-keys-file", str(path)])
    assert result.exit_code in (1, 2)
    assert str(path) in result.output
    assert not started.rings


def test_the_environment_may_name_the_file(started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "keys").write_text(f"{hash_key(KEY)}\n")
    monkeypatch.setenv("PAGEMILL_API_KEYS_FILE", str(path))
    for arguments in COMMANDS.values():
        assert CliRunner().invoke(app, arguments).exit_code == 0
    assert all(caller_of(ring, KEY) for ring in started.rings)
    assert len(started.rings) == 3
