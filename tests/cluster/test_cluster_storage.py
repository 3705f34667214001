"""Volumes of the test cluster: the volume of a claim, and claims of other provisioners."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Module = Callable[[str], ModuleType]


class Api:
    """Records the requests to the API server."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        self.requests.append((method, path))
        return 201, {}


@pytest.fixture
def storage(module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    storage = module("storage")
    monkeypatch.setattr(storage, "VOLUMES", tmp_path)
    return storage


def claim(storage_class: str, volume: str = "") -> dict[str, Any]:
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "2Gi"}},
        "storageClassName": storage_class,
    }
    return {
        "metadata": {"namespace": "models", "name": "cache", "uid": "u-1"},
        "spec": spec | ({"volumeName": volume} if volume else {}),
    }


def test_a_claim_gets_a_bound_volume_of_its_size(storage: ModuleType, tmp_path: Path) -> None:
    volume = storage.volume_for(claim("standard"), tmp_path / "pvc-u-1")
    spec = volume["spec"]
    assert volume["metadata"]["name"] == "pvc-u-1"
    assert spec["capacity"] == {"storage": "2Gi"}
    assert spec["accessModes"] == ["ReadWriteOnce"]
    assert (spec["claimRef"]["namespace"], spec["claimRef"]["name"], spec["claimRef"]["uid"]) == (
        "models",
        "cache",
        "u-1",
    )


def test_any_user_may_write_to_the_folder_of_a_volume(storage: ModuleType, tmp_path: Path) -> None:
    storage._provide(Api(), claim("standard"))
    assert (tmp_path / "pvc-u-1").stat().st_mode & 0o777 == 0o777


@pytest.mark.parametrize("other", [claim("fast-ssd"), claim("standard", volume="bound-already")])
def test_bound_claims_and_those_of_others_are_ignored(
    storage: ModuleType, tmp_path: Path, other: dict[str, Any]
) -> None:
    api = Api()
    storage._provide(api, other)
    assert api.requests == []
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_deleted_with_the_volume(storage: ModuleType, tmp_path: Path) -> None:
    api = Api()
    storage._provide(api, claim("standard"))
    storage._remove(api, "pvc-u-1")
    assert list(tmp_path.iterdir()) == []
    assert api.requests[-1] == ("DELETE", "/api/v1/persistentvolumes/pvc-u-1")
