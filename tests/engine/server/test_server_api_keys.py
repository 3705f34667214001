"""An engine's own API keys (`pagemill serve --api-keys-file`): the routes that require them, and their changes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from waiting import WAIT_LIMIT_S

from pagemill_engine.config import ServerConfig
from pagemill_engine.failure import StartupError
from pagemill_engine.server.routes.keys import open_keys
from pagemill_servers.auth import hash_key

MODEL = "SmolLM2-135M-Instruct"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
GUARDED = [
    ("GET", "/v1/models", None),
    ("GET", f"/v1/models/{MODEL}", None),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2}),
    ("POST", "/tokenize", {"prompt": "a"}),
    ("POST", "/detokenize", {"tokens": [65]}),
]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_openai_routes_require_a_key_and_the_file_may_change_while_the_server_runs(
    start_server: Any, tmp_path: Path
) -> None:
    (path := tmp_path / "keys").write_text(f"# team keys\n{hash_key('one')} tenant=team-a\n")
    server = start_server(server={"api_keys_file": str(path)})
    server.wait_for("ready")
    with httpx.Client(base_url=server.url, timeout=WAIT_LIMIT_S) as client:
        for method, route, body in GUARDED:
            statuses = [
                client.request(method, route, json=body, headers=headers).status_code
                for headers in ({}, bearer(hash_key("one")), bearer("# team keys"), bearer("two"), bearer("one"))
            ]
            assert statuses == [401, 401, 401, 401, 200], route
        assert client.get("/health").status_code == 200
        assert client.get("/metrics").status_code == 200
        path.write_text(f"{hash_key('two')}\n")
        deadline_s = time.monotonic() + WAIT_LIMIT_S
        while client.post("/v1/chat/completions", json=CHAT, headers=bearer("two")).status_code != 200:
            assert time.monotonic() < deadline_s
        assert client.post("/v1/chat/completions", json=CHAT, headers=bearer("one")).status_code == 401, (
            "the key is revoked"
        )


def test_a_tenants_cached_tokens_are_those_of_its_own_prompts(start_server: Any, tmp_path: Path) -> None:
    lines = [f"{hash_key('one')} tenant=a", f"{hash_key('two')} tenant=a", f"{hash_key('three')} tenant=b"]
    (path := tmp_path / "keys").write_text("\n".join(lines))
    server = start_server(server={"api_keys_file": str(path)})
    server.wait_for("ready")
    body = {"model": MODEL, "prompt": list(range(100, 200)), "max_tokens": 1}

    def cached_tokens(key: str) -> int:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=bearer(key), timeout=WAIT_LIMIT_S).json()
        return int((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    assert [cached_tokens(key) for key in ("one", "three", "two", "three")] == [0, 0, 96, 96]


def test_without_a_file_no_key_is_required(null_server: Any) -> None:
    assert httpx.get(f"{null_server.url}/v1/models").status_code == 200


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("sk-plain", "SHA-256"),
        (f"{hash_key('one')} tokens_per_minute=5", "`tokens_per_minute`"),
        (f"{hash_key('one')} models=a", "`models`"),
        (f"{hash_key('one')} priority=low", "`priority`"),
    ],
)
def test_an_entry_that_is_no_hash_or_has_unsupported_fields_is_refused(line: str, named: str, tmp_path: Path) -> None:
    (path := tmp_path / "keys").write_text(f"{line}\n")
    with pytest.raises(StartupError, match=named) as caught:
        open_keys(ServerConfig(api_keys_file=str(path)))
    assert "line 1" in str(caught.value)
    assert "sk-plain" not in str(caught.value)
    assert caught.value.termination.field == "api_keys_file"
