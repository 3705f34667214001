"""Secrets in a file that is replaced in the way in which kubelets update mounted Secrets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hand_clock import Clock

from pagemill_gateway.limits.redis.shared_keys import READ_INTERVAL_S
from pagemill_servers.secrets import secret_file
from pagemill_servers.secrets.secret_file import CHECK_INTERVAL_S, SecretFile


def test_comments_and_empty_lines_are_ignored(tmp_path: Path) -> None:
    (path := tmp_path / "tokens").write_text("# newest first\n  one \n\ntwo\n")
    assert SecretFile(path).lines() == ("one", "two")


def test_a_replaced_folder_is_noticed_within_the_interval(tmp_path: Path) -> None:
    """`tokens` links to `..data/tokens`, and `..data` to a dated folder: a kubelet renames the middle link."""
    clock = Clock()
    for folder, text in (("..1", "old"), ("..2", "new")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tokens").write_text(text)
        os.utime(tmp_path / folder / "tokens", (1, 1))
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "tokens").symlink_to("..data/tokens")
    file = SecretFile(tmp_path / "tokens", clock=clock)
    assert file.lines() == ("old",)
    (tmp_path / "..tmp").symlink_to("..2")
    os.replace(tmp_path / "..tmp", tmp_path / "..data")
    assert file.lines() == ("old",), "the file was checked too often"
    clock.now += CHECK_INTERVAL_S
    assert file.lines() == ("new",)


def test_a_revoked_secret_is_refused_within_a_second(tmp_path: Path) -> None:
    clock = Clock()
    (path := tmp_path / "keys").write_text("one\ntwo")
    file = SecretFile(path, clock=clock)
    assert "one" in file.lines()
    path.write_text("two")
    clock.now += 0.99
    assert file.lines() == ("two",)
    assert READ_INTERVAL_S < 1, "keys in Redis have the same limit"


def test_a_file_written_in_place_is_noticed(tmp_path: Path) -> None:
    clock = Clock()
    (path := tmp_path / "tokens").write_text("one")
    file = SecretFile(path, clock=clock)
    path.write_text("one\ntwo")
    clock.now += CHECK_INTERVAL_S
    assert file.lines() == ("one", "two")


def test_a_file_that_disappears_keeps_the_known_secrets(tmp_path: Path) -> None:
    clock = Clock()
    (path := tmp_path / "tokens").write_text("one")
    file = SecretFile(path, clock=clock)
    path.unlink()
    clock.now += CHECK_INTERVAL_S
    assert file.lines() == ("one",)
    path.write_text("two!")
    clock.now += CHECK_INTERVAL_S
    assert file.lines() == ("two!",)


def test_a_missing_file_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SecretFile(tmp_path / "tokens")


def test_a_change_is_detected_by_content_not_by_size_or_modification_time(tmp_path: Path) -> None:
    clock = Clock()
    (path := tmp_path / "tokens").write_text("one")
    os.utime(path, (1, 1))
    file = SecretFile(path, clock=clock)
    with path.open("r+") as same_file:
        same_file.write("two")
    os.utime(path, (1, 1))
    clock.now += CHECK_INTERVAL_S
    assert file.lines() == ("two",)


def _fault_of(line: str) -> str | None:
    return None if line.startswith("good") else "is not good"


def test_at_the_start_invalid_lines_are_skipped_and_named_by_number_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path := tmp_path / "tokens").write_text("# comment\ngood\nsk-plain\n")
    file = SecretFile(path, fault_of=_fault_of, clock=Clock())
    assert file.lines() == ("good",)
    assert file.faults == ((3, "is not good"),)
    assert file.problem == "line 3 is not good"
    assert "line 3 is ignored: it is not good" in caplog.text
    assert "sk-plain" not in caplog.text


def test_a_change_with_an_invalid_line_keeps_all_previous_lines_until_it_is_corrected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    (path := tmp_path / "tokens").write_text("good\ngood too\n")
    file = SecretFile(path, fault_of=_fault_of, clock=clock)
    before = file.lines()
    path.write_text("good new\n\nsk-plain\n")
    for _ in range(3):
        clock.now += CHECK_INTERVAL_S
        assert file.lines() is before
    assert file.problem == "line 3 is not good"
    (record,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert "line 3 is not good. Previous lines that stay in use: 2" in record.getMessage()
    assert "sk-plain" not in caplog.text
    path.write_text("good new\n")
    clock.now += CHECK_INTERVAL_S
    assert (file.lines(), file.problem) == (("good new",), "")


def test_a_problem_ends_when_the_previous_content_returns(tmp_path: Path) -> None:
    clock = Clock()
    (path := tmp_path / "tokens").write_text("good\n")
    file = SecretFile(path, fault_of=_fault_of, clock=clock)
    path.unlink()
    clock.now += CHECK_INTERVAL_S
    assert file.lines() == ("good",)
    assert "cannot be read" in file.problem
    path.write_text("good\n")
    clock.now += CHECK_INTERVAL_S
    assert (file.lines(), file.problem) == (("good",), "")


def test_a_file_that_became_too_large_is_not_used_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_file, "MAX_FILE_BYTES", 20)
    clock = Clock()
    (path := tmp_path / "tokens").write_text("one\ntwo\n")
    file = SecretFile(path, clock=clock)
    path.write_text("three\n" * 4)
    clock.now += CHECK_INTERVAL_S
    assert file.lines() == ("one", "two")
    assert "more than" in file.problem


def test_a_quiet_reader_of_an_invalid_file_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    (path := tmp_path / "tokens").write_text("wrong\n")
    file = SecretFile(path, fault_of=_fault_of, clock=clock, quiet=True)
    path.write_text("wrong too\n")
    clock.now += CHECK_INTERVAL_S
    file.lines()
    assert file.problem
    assert not caplog.records
