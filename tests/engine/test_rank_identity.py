"""Ranks compare versions without packages that images of engines lack."""

from __future__ import annotations

import pytest

from pagemill_execution.runners.ranks import identity
from pagemill_execution.runners.ranks.identity import RankIdentity


def test_ranks_compare_the_version_of_the_engines_own_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of engines have no package `pagemill`, which is the command's."""
    monkeypatch.setattr(identity, "version", {"pagemill-engine": "9"}.__getitem__)
    assert RankIdentity.own().version == "9"
