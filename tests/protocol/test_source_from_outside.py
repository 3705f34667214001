"""The command line, the plan and error messages know a kind of source that an installed package registers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from packages import install_package

from pagemill_models.sources import SourceError, find_kind, is_fetched, kinds
from pagemill_models.sources.registry import GROUP, forms, registered

CODE = """
from pagemill_models.sources.base import SourceKind

class Shelf(SourceKind):
    scheme = "shelf"
    where = "network"
    form = "shelf://NAME"
    about = "Models of a shelf."

    def fault(self, source):
        return None if source == "shelf://a" else f"`{source}` is not on the shelf."

class Wrong(Shelf):
    scheme = "other"
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    entries = ["shelf = shelf_kind:Shelf", "wrong = shelf_kind:Wrong", "s3 = shelf_kind:Shelf", "gone = nowhere:X"]
    install_package(tmp_path, monkeypatch, "shelf_kind", CODE, GROUP, *entries)
    registered.cache_clear()
    yield
    registered.cache_clear()


def test_a_package_can_add_a_kind_of_source(installed: None) -> None:
    assert find_kind("shelf://a").form == "shelf://NAME"
    assert is_fetched("shelf://a")
    assert "`shelf://NAME`" in forms()
    with pytest.raises(SourceError, match="is not on the shelf"):
        find_kind("shelf://b").check("shelf://b", "model.source")


def test_an_unusable_kind_is_reported_and_affects_no_other(installed: None) -> None:
    with pytest.raises(SourceError, match="its scheme is 'other'; it must be that of its entry point"):
        find_kind("wrong://a")
    with pytest.raises(SourceError, match="No module named 'nowhere'"):
        find_kind("gone://a")
    assert type(find_kind("s3://bucket/a")).__name__ == "S3"
    assert len(kinds()) == 8
