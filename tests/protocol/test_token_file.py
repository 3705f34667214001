"""Control tokens that servers create for themselves: permissions, lookup, and removal."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from pagemill_servers.process.settings import runtime_folder
from pagemill_servers.secrets.token_file import (
    GeneratedTokens,
    TokenFileError,
    generated_token_file,
    read_generated_token,
)

URL = "http://127.0.0.1:8001"


def test_only_the_servers_user_can_read_the_file(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with generated_token_file("127.0.0.1", 8001, tmp_path) as path:
            assert path.stat().st_mode & 0o777 == 0o600
            assert path.parent.stat().st_mode & 0o777 == 0o700
            assert len(path.read_text().strip()) >= 32
    finally:
        os.umask(before)


def test_the_token_is_found_by_the_servers_url_and_removed_when_the_server_ends(tmp_path: Path) -> None:
    with generated_token_file("127.0.0.1", 8001, tmp_path) as path:
        token = path.read_text().strip()
        assert read_generated_token(URL, tmp_path) == read_generated_token("http://localhost:8001/x", tmp_path) == token
        assert [each.name for each in path.parent.iterdir()] == ["control-127.0.0.1-8001.token"]
    assert list(tmp_path.iterdir()) == []
    assert read_generated_token(URL, tmp_path) == ""


def test_the_token_is_removed_when_the_server_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), generated_token_file("127.0.0.1", 8001, tmp_path) as path:
        raise RuntimeError
    assert not path.exists()


def test_servers_at_other_ports_and_addresses_have_their_own_files(tmp_path: Path) -> None:
    places = [("127.0.0.1", 8001), ("127.0.0.1", 8003), ("127.0.0.2", 8001), ("::1", 8001)]
    urls = ["http://127.0.0.1:8001", "http://127.0.0.1:8003", "http://127.0.0.2:8001", "http://[::1]:8001"]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(generated_token_file(*place, tmp_path)) for place in places]
        tokens = [file.read_text().strip() for file in files]
        assert len(set(tokens)) == len(places)
        assert [read_generated_token(url, tmp_path) for url in urls] == tokens


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_a_server_on_all_addresses_is_found_by_those_of_this_machine(tmp_path: Path, address: str) -> None:
    with generated_token_file(address, 8001, tmp_path) as path:
        for url in (URL, "http://localhost:8001", "http://[::1]:8001"):
            assert read_generated_token(url, tmp_path) == path.read_text().strip()
        assert read_generated_token("http://10.0.0.1:8001", tmp_path) == "", "the address may belong to another machine"


@pytest.mark.parametrize(
    "url", ["", "http://127.0.0.1", "http://[::1", "http://x:99999", "http://gpu1.example.com:8001"]
)
def test_urls_that_name_no_local_server_have_no_token(tmp_path: Path, url: str) -> None:
    with generated_token_file("127.0.0.1", 8001, tmp_path):
        assert read_generated_token(url, tmp_path) == ""


def test_the_file_of_a_killed_server_is_replaced_by_the_next_one(tmp_path: Path) -> None:
    killed = generated_token_file("127.0.0.1", 8001, tmp_path)
    left = killed.__enter__().read_text()
    with generated_token_file("127.0.0.1", 8001, tmp_path) as path:
        assert path.read_text() != left
        killed.__exit__(None, None, None)
        assert path.exists(), "the file of another server must remain"
    assert not path.exists()


def test_a_file_left_by_a_killed_server_at_another_address_of_the_port_is_ignored(tmp_path: Path) -> None:
    killed = generated_token_file("127.0.0.1", 8001, tmp_path)
    left = killed.__enter__()
    os.utime(left, ns=(0, 0))
    with generated_token_file("0.0.0.0", 8001, tmp_path) as path:
        assert read_generated_token(URL, tmp_path) == path.read_text().strip()
        os.utime(path, ns=(-1, -1))
        assert read_generated_token(URL, tmp_path) == left.read_text().strip()


def test_a_folder_that_others_can_enter_or_that_is_a_link_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / f"pagemill-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(TokenFileError, match=r"not private.*XDG_RUNTIME_DIR"), generated_token_file("::1", 1, tmp_path):
        pass
    folder.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    with pytest.raises(TokenFileError, match="not private"), generated_token_file("::1", 1, tmp_path):
        pass
    assert list(elsewhere.iterdir()) == []


def test_a_missing_folder_is_reported_with_the_remedy(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    with pytest.raises(TokenFileError, match=rf"{missing}.*XDG_RUNTIME_DIR"), generated_token_file("::1", 1, missing):
        pass


def test_a_restarted_servers_token_is_found_within_a_second(tmp_path: Path) -> None:
    now = [0.0]
    tokens = GeneratedTokens(tmp_path, clock=lambda: now[0])
    assert tokens.find(URL) == ""
    with generated_token_file("127.0.0.1", 8001, tmp_path) as path:
        first = path.read_text().strip()
        now[0] = 1.0
        assert tokens.find(URL) == first
    now[0] = 2.0
    assert tokens.find(URL) == first, "a request that the old server still answers needs its token"
    with generated_token_file("0.0.0.0", 8001, tmp_path) as path:
        now[0] = 2.5
        assert tokens.find(URL) == first
        now[0] = 3.0
        assert tokens.find(URL) == path.read_text().strip()


def test_without_a_usable_temporary_folder_an_error_is_reported_and_no_token_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", none)
    with pytest.raises(TokenFileError, match="No usable temporary directory"), generated_token_file("::1", 1):
        pass
    assert read_generated_token(URL) == ""


def test_the_users_own_runtime_folder_is_used_if_it_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_folder() == tmp_path
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    assert runtime_folder() != tmp_path / "none"
