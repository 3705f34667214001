"""Secrets in a file that is swapped as kubelets swap mounted Secrets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hand_clock import Clock

from pagemill_gateway.limits.redis.shared_keys import READ_INTERVAL_S
from pagemill_protocol import secret_file
from pagemill_protocol.secret_file import CHECK_INTERVAL_S, SecretFile


def test_lines_without_comments_and_blanks(tmp_path: Path) -> None:
    (path := tmp_path / "tokens").write_text("# newest first\n  one \n\ntwo\n")
    assert SecretFile(path).lines() == ("one", "two")


def test_a_swapped_folder_is_seen_within_the_interval(tmp_path: Path) -> None:
    """`tokens` -> `..data/tokens`, `..data` -> a dated folder: a kubelet renames the middle link."""
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
    assert file.lines() == ("old",), "looked at too often"
    clock.now += CHECK_INTERVAL_S
    assert file.lines() == ("new",)


def test_a_revoked_secret_counts_no_more_within_a_second(tmp_path: Path) -> None:
    clock = Clock()
    (path := tmp_path / "keys").write_text("one\ntwo")
    file = SecretFile(path, clock=clock)
    assert "one" in file.lines()
    path.write_text("two")
    clock.now += 0.99
    assert file.lines() == ("two",)
    assert READ_INTERVAL_S < 1, "the same of keys in Redis"


def test_a_file_written_in_place_is_seen(tmp_path: Path) -> None:
    clock = Clock()
    (path := tmp_path / "tokens").write_text("one")
    file = SecretFile(path, clock=clock)
    path.write_text("one\ntwo")
    clock.now += CHECK_INTERVAL_S
    assert file.lines() == ("one", "two")


def test_a_file_that_vanishes_leaves_what_was_known(tmp_path: Path) -> None:
    clock = Clock()
    (path := tmp_path / "tokens").write_text("one")
    file = SecretFile(path, clock=clock)
    path.unlink()
    clock.now += CHECK_INTERVAL_S
    assert file.lines() == ("one",)
    path.write_text("two!")
    clock.now += CHECK_INTERVAL_S
    assert file.lines() == ("two!",)


def test_a_file_that_is_not_there_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SecretFile(tmp_path / "tokens")


def test_content_counts_and_not_size_or_modification_time(tmp_path: Path) -> None:
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


def test_at_the_start_wrong_lines_are_left_out_and_named_by_number_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path := tmp_path / "tokens").write_text("# comment\ngood\nsk-plain\n")
    file = SecretFile(path, fault_of=_fault_of, clock=Clock())
    assert file.lines() == ("good",)
    assert file.faults == ((3, "is not good"),)
    assert file.problem == "line 3 is not good"
    assert "line 3 is ignored: it is not good" in caplog.text
    assert "sk-plain" not in caplog.text


def test_a_change_with_a_wrong_line_leaves_all_lines_of_before_until_it_is_corrected(
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


def test_a_problem_ends_with_the_content_of_before(tmp_path: Path) -> None:
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


def test_a_file_that_grew_too_large_is_not_used_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_file, "MAX_FILE_BYTES", 20)
    clock = Clock()
    (path := tmp_path / "tokens").write_text("one\ntwo\n")
    file = SecretFile(path, clock=clock)
    path.write_text("three\n" * 4)
    clock.now += CHECK_INTERVAL_S
    assert file.lines() == ("one", "two")
    assert "more than" in file.problem


def test_a_quiet_reader_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    (path := tmp_path / "tokens").write_text("wrong\n")
    file = SecretFile(path, fault_of=_fault_of, clock=clock, quiet=True)
    path.write_text("wrong too\n")
    clock.now += CHECK_INTERVAL_S
    file.lines()
    assert file.problem
    assert not caplog.records
