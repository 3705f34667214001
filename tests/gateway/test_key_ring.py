"""API keys from the settings, a file and a shared store, which the gateway knows by their hashes only."""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Any

import pytest
from hand_clock import Clock

from pagemill_protocol.errors import PagemillError
from pagemill_servers.auth import hash_key
from pagemill_servers.keys import ring as key_ring
from pagemill_servers.keys.caller import ANONYMOUS
from pagemill_servers.keys.entries import EntryError, fault_of, parse_entry
from pagemill_servers.keys.ring import KeyRing
from pagemill_servers.secrets.secret_file import CHECK_INTERVAL_S, SecretFile


def scope_with(authorization: str | None = None) -> dict[str, Any]:
    headers = [] if authorization is None else [(b"authorization", authorization.encode())]
    return {"type": "http", "headers": headers}


def refusal_of(ring: KeyRing, authorization: str | None) -> PagemillError:
    with pytest.raises(PagemillError) as caught:
        ring.authenticate(scope_with(authorization))
    return caught.value


def test_api_keys_are_recognized_by_their_hash() -> None:
    ring = KeyRing([hash_key("one"), hash_key("two").upper()])
    assert ring.authenticate(scope_with("Bearer one")).key_hash == hash_key("one")
    assert ring.authenticate(scope_with("bearer two")).key_hash == hash_key("two")
    for wrong in (None, "", "Bearer", "Bearer ", "Basic one", "Bearer three", "one", f"Bearer {'x' * 600}"):
        error = refusal_of(ring, wrong)
        assert (error.status, error.code) == (401, "invalid_api_key")


def test_clients_of_anthropics_api_send_the_key_in_their_own_header() -> None:
    ring = KeyRing([hash_key("one")])
    scope = {"type": "http", "headers": [(b"x-api-key", b"one")]}
    assert ring.authenticate(scope).key_hash == hash_key("one")
    for wrong in (b"", b"two", b"x" * 600):
        with pytest.raises(PagemillError):
            ring.authenticate({"type": "http", "headers": [(b"x-api-key", wrong)]})
    both = [(b"authorization", b"Bearer two"), (b"x-api-key", b"one")]
    with pytest.raises(PagemillError):
        ring.authenticate({"type": "http", "headers": both})


def test_a_hash_is_not_accepted_as_a_key() -> None:
    assert refusal_of(KeyRing([hash_key("one")]), f"Bearer {hash_key('one')}").status == 401


def test_without_keys_the_gateway_is_open() -> None:
    assert KeyRing([]).authenticate(scope_with()) is ANONYMOUS


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    compare_digest = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return compare_digest(one, other)

    monkeypatch.setattr(key_ring.hmac, "compare_digest", compare)
    ring = KeyRing([hash_key(f"key-{number}") for number in range(100)])
    ring.authenticate(scope_with("Bearer key-99"))
    refusal_of(ring, "Bearer stranger")
    assert len(compared) == 2, "one comparison for each key, whatever the number of keys"
    assert all(len(one) == len(other) == 32 for one, other in compared)


def test_an_invalid_entry_in_the_settings_is_refused() -> None:
    with pytest.raises(EntryError, match="concurrency"):
        KeyRing([f"{hash_key('one')} concurrency=many"])


def test_with_invalid_lines_in_the_file_at_the_start_no_client_is_accepted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path := tmp_path / "keys").write_text(f"# team a\n{hash_key('one')} tenant=a\n{hash_key('two')} tenant=?\n")
    ring = KeyRing([hash_key("fixed")], SecretFile(path, fault_of=fault_of, clock=Clock()))
    assert ring.authenticate(scope_with("Bearer one")).tenant == "a"
    assert refusal_of(ring, "Bearer two").status == 401, "an unreadable limit must not become no limit"
    assert "line 3 is ignored: it has tenant='?'" in caplog.text


def test_a_file_can_add_change_and_revoke_keys(tmp_path: Path) -> None:
    clock = Clock()
    (path := tmp_path / "keys").write_text(f"{hash_key('one')} tenant=a\n{hash_key('two')} concurrency=1\n")
    ring = KeyRing([hash_key("fixed")], SecretFile(path, fault_of=fault_of, clock=clock))
    path.write_text(f"{hash_key('two')} tenant=b concurrency=2\n{hash_key('new')}\n")
    clock.now += CHECK_INTERVAL_S
    assert ring.authenticate(scope_with("Bearer two")).limits.concurrency == 2
    assert ring.authenticate(scope_with("Bearer new")).limits.none
    assert refusal_of(ring, "Bearer one").status == 401
    assert ring.authenticate(scope_with("Bearer fixed")).limits.none


def test_a_file_that_becomes_invalid_keeps_the_previous_keys(tmp_path: Path) -> None:
    clock = Clock()
    (path := tmp_path / "keys").write_text(f"{hash_key('one')} tenant=a concurrency=2\n")
    ring = KeyRing([], SecretFile(path, fault_of=fault_of, clock=clock))
    path.write_text(f"{hash_key('two')}\n{hash_key('one')} tenant=a concurrency=\n")
    clock.now += CHECK_INTERVAL_S
    assert ring.authenticate(scope_with("Bearer one")).limits.concurrency == 2
    assert refusal_of(ring, "Bearer two").status == 401
    path.write_text("")
    clock.now += CHECK_INTERVAL_S
    assert refusal_of(ring, "Bearer one").status == 401, "with an empty file, no client is accepted"


def test_unknown_keys_are_asked_to_retry_until_the_shared_keys_are_known() -> None:
    ring = KeyRing([hash_key("fixed")], shared=True)
    assert not ring.open
    assert ring.authenticate(scope_with("Bearer fixed"))
    error = refusal_of(ring, "Bearer shared")
    assert (error.status, error.code, error.retry_after_s) == (503, "keys_not_loaded", 1)
    assert refusal_of(ring, None).status == 401
    ring.replace_shared([parse_entry(f"{hash_key('shared')} tenant=a")])
    assert ring.authenticate(scope_with("Bearer shared")).tenant == "a"
    ring.replace_shared([])
    assert refusal_of(ring, "Bearer shared").status == 401
    assert not ring.open, "without keys in the store, no client is accepted"


def test_no_plain_key_is_kept_in_memory() -> None:
    ring = KeyRing([hash_key("sk-very-secret")])
    ring.authenticate(scope_with("Bearer sk-very-secret"))
    assert "sk-very-secret" not in repr(vars(ring))


def test_the_same_key_in_both_headers_is_accepted_and_two_different_ones_are_refused_by_name() -> None:
    ring = KeyRing([hash_key("one"), hash_key("two")])
    scope = scope_with("Bearer one")
    scope["headers"].append((b"x-api-key", b"one"))
    assert ring.authenticate(scope).key_hash == hash_key("one")
    scope["headers"][1] = (b"x-api-key", b"two")
    with pytest.raises(PagemillError) as caught:
        ring.authenticate(scope)
    assert caught.value.status == 401
    assert "`Authorization`" in caught.value.message
    assert "`x-api-key`" in caught.value.message


def test_a_refused_key_is_answered_with_the_scheme_that_is_expected() -> None:
    ring = KeyRing([hash_key("one")])
    for given in (None, "Bearer two", "Basic b25l"):
        assert refusal_of(ring, given).headers() == {"WWW-Authenticate": 'Bearer realm="pagemill"'}
