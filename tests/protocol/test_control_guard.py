"""The guard of control ports: requests that pass, requests that are refused, and the refusals' messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagemill_protocol.errors import PagemillError
from pagemill_servers.guard import ControlGuard, ControlTokens, require_control, require_token

TOKENS = ControlTokens("secret", setting="internal_token")
RIGHT = ("authorization", "Bearer secret")
SELF = ("host", "127.0.0.1:8001")
FOREIGN_HOSTS = [
    "evil.example",
    "EVIL.example:8001",
    "evil.example.",
    "127.0.0.1.evil.example",
    "127.0.0.1@evil.example",
    "evil.example#.localhost",
    "svc.evil.example",
    "localhost.evil.example",
    "[::1].evil.example",
    "",
]
OWN_HOSTS = [
    "127.0.0.1:8001",
    "[::1]:8001",
    "10.244.0.7:8081",
    "localhost",
    "LOCALHOST:9",
    "engine-0:8001",
    "chat-engine.ns.svc",
    "chat-engine.ns.svc.cluster.local:8001",
]


def scope_of(*headers: tuple[str, str], method: str = "POST", path: str = "/sleep", peer: str = "10.0.0.1") -> Any:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    return {"type": "http", "method": method, "path": path, "headers": raw, "client": (peer, 1)}


def refusal_of(check: Callable[[], object]) -> PagemillError:
    with pytest.raises(PagemillError) as caught:
        check()
    return caught.value


async def passes(scope: Any) -> bool:
    """Whether the guard passes the request to the app."""
    passed: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope)

    async def never(*_: Any) -> Any:
        raise AssertionError("the guard neither reads nor writes")

    try:
        await ControlGuard(app, TOKENS)(scope, never, never)
    except PagemillError:
        return False
    return passed == [scope]


def test_a_request_with_the_token_passes() -> None:
    require_control(scope_of(SELF, RIGHT), TOKENS)


@pytest.mark.parametrize("header", [None, "Bearer no", "Basic secret", "secret", "Bearer", "Bearer Secret"])
def test_without_the_token_or_with_a_wrong_one_a_request_is_401(header: str | None) -> None:
    headers = [SELF] if header is None else [SELF, ("authorization", header)]
    error = refusal_of(lambda: require_control(scope_of(*headers, peer="127.0.0.1"), TOKENS))
    assert (error.status, error.code) == (401, "invalid_api_key")
    assert "Authorization: Bearer TOKEN" in error.message
    assert "internal_token" in error.message


@pytest.mark.parametrize("origin", ["http://evil.example", "https://127.0.0.1", "null", "file://", "", "http://"])
def test_a_web_page_of_another_origin_is_refused_even_with_the_token(origin: str) -> None:
    error = refusal_of(lambda: require_control(scope_of(SELF, ("origin", origin), RIGHT), TOKENS))
    assert (error.status, error.code) == (403, "foreign_origin")


def test_one_foreign_origin_among_several_is_enough() -> None:
    own, other = ("origin", "http://127.0.0.1:8001"), ("origin", "http://evil.example")
    assert refusal_of(lambda: require_control(scope_of(SELF, own, other, RIGHT), TOKENS)).status == 403
    require_control(scope_of(SELF, own, RIGHT), TOKENS)


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
def test_a_foreign_host_is_refused_even_with_the_token(host: str) -> None:
    error = refusal_of(lambda: require_control(scope_of(("host", host), RIGHT), TOKENS))
    assert (error.status, error.code) == (403, "foreign_host")
    assert "control_allowed_hosts" in error.message


def test_a_page_whose_name_resolves_to_this_machine_is_refused_by_its_host() -> None:
    page = [("host", "evil.example:8001"), ("origin", "http://evil.example:8001")]
    assert refusal_of(lambda: require_control(scope_of(*page, RIGHT), TOKENS)).code == "foreign_host"


def test_one_foreign_host_among_several_is_enough() -> None:
    scope = scope_of(SELF, ("host", "evil.example"), RIGHT)
    assert refusal_of(lambda: require_control(scope, TOKENS)).code == "foreign_host"


@pytest.mark.parametrize("host", OWN_HOSTS)
def test_addresses_and_names_outside_public_dns_are_local(host: str) -> None:
    require_control(scope_of(("host", host), RIGHT), TOKENS)


def test_this_machines_name_and_configured_names_are_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Gpu1.example.com")
    require_control(scope_of(("host", "gpu1.example.com:8001"), RIGHT), TOKENS)
    scope = scope_of(("host", "api.Example.com"), RIGHT)
    assert refusal_of(lambda: require_control(scope, TOKENS)).status == 403
    require_control(scope, TOKENS, ["Api.example.com"])


def test_an_http_1_0_client_may_omit_the_host() -> None:
    require_control(scope_of(RIGHT), TOKENS)


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics", "/version"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_probes_and_scrapes_pass_whatever_they_send(method: str, path: str) -> None:
    page = [("host", "evil.example"), ("origin", "http://evil.example")]
    assert await passes(scope_of(method=method, path=path))
    assert await passes(scope_of(*page, method=method, path=path))


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/livez"), ("GET", "//livez"), ("GET", "/livez/"), ("GET", "/metrics/../sleep"), ("GET", "/"),
     ("GET", "/status"), ("PUT", "/catalog"), ("OPTIONS", "/sleep"), ("POST", "/no-such-route")],
)  # fmt: skip
async def test_all_other_routes_require_the_token(method: str, path: str) -> None:
    assert not await passes(scope_of(SELF, method=method, path=path))
    assert await passes(scope_of(SELF, RIGHT, method=method, path=path))


def test_all_tokens_of_the_file_the_settings_and_the_keys_are_accepted(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# newest first\ntwo\none\n")
    tokens = ControlTokens("fixed", file, setting="control_token", derived=lambda: ("derived",))
    assert tokens.accepted() == ("fixed", "two", "one", "derived")
    for token in tokens.accepted():
        require_token(scope_of(("authorization", f"Bearer {token}")), tokens)


def test_without_any_token_no_request_passes() -> None:
    tokens = ControlTokens(setting="control_token")
    for header in ("Bearer ", "Bearer", "Bearer x"):
        assert refusal_of(lambda h=header: require_token(scope_of(("authorization", h)), tokens)).status == 401


def test_only_clients_on_the_same_machine_are_shown_the_tokens_file(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("secret-of-the-file\n")
    tokens = ControlTokens(file=file, setting="control_token")
    here = refusal_of(lambda: require_token(scope_of(peer="127.0.0.1"), tokens)).message
    elsewhere = refusal_of(lambda: require_token(scope_of(peer="10.0.0.1"), tokens)).message
    assert str(file) in here
    assert str(tmp_path) not in elsewhere
    assert "secret-of-the-file" not in here + elsewhere


def test_for_derived_tokens_the_refusal_names_their_key() -> None:
    tokens = ControlTokens(setting="control_token", derived_from="the Secret pagemill-system/pagemill-keys")
    assert "Secret pagemill-system/pagemill-keys" in refusal_of(lambda: require_token(scope_of(), tokens)).message


def test_a_missing_token_file_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        ControlTokens(file=tmp_path / "none", setting="control_token")
