"""Secrets in a file that is swapped as kubelets swap mounted Secrets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hand_clock import Clock

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


def test_wrong_lines_are_ignored_and_told_by_number_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    (path := tmp_path / "tokens").write_text("# comment\ngood\nsk-plain\n")
    file = SecretFile(path, fault_of=lambda line: None if line.startswith("good") else "is not good", clock=clock)
    assert file.lines() == ("good",)
    assert file.faults == ((3, "is not good"),)
    assert "line 3 is ignored: it is not good" in caplog.text
    caplog.clear()
    path.write_text("sk-plain\n\ngood too\nsk-plain\n")
    clock.now += CHECK_INTERVAL_S
    assert file.lines() == ("good too",)
    assert [number for number, _ in file.faults] == [1, 4]
    assert "line 4 is ignored" in caplog.text
    assert "sk-plain" not in caplog.text
