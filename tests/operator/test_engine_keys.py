"""The keys of engine tokens: created once, rotated in time, and never lost between two leaders."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pagemill_kube.errors import ApiError
from pagemill_operator.controller.leading.keys import ClusterKeys, new_keys, read_keys

START = datetime(2026, 1, 1, tzinfo=UTC)
DAY_S = 86_400.0


class FakeSecrets:
    """The requests of the key ring, on one Secret."""

    def __init__(self) -> None:
        self.secret: dict[str, Any] | None = None
        self.writes: list[str] = []
        self._version = 0

    def _next(self) -> str:
        self._version += 1
        return str(self._version)

    async def find(self, kind: Any, namespace: str, name: str) -> dict[str, Any] | None:
        return copy.deepcopy(self.secret)

    async def create(self, kind: Any, manifest: dict[str, Any]) -> dict[str, Any]:
        if self.secret is not None:
            raise ApiError(409, "AlreadyExists", "it exists")
        self.writes.append("create")
        self.secret = copy.deepcopy(manifest)
        self.secret["metadata"]["resourceVersion"] = self._next()
        return self.secret

    async def merge(self, kind: Any, namespace: str, name: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        assert self.secret is not None
        if patch["metadata"]["resourceVersion"] != self.secret["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "it has changed")
        self.writes.append("merge")
        self.secret = copy.deepcopy(dict(patch))
        self.secret["metadata"]["resourceVersion"] = self._next()
        return self.secret


class World:
    def __init__(self) -> None:
        self.secrets = FakeSecrets()
        self.now = START
        self.changes = 0

    def ring(self) -> ClusterKeys:
        def changed() -> None:
            self.changes += 1

        client: Any = self.secrets
        return ClusterKeys(client, "system", "pagemill-keys", DAY_S, on_change=changed, now=lambda: self.now)


@pytest.fixture
def world() -> World:
    return World()


async def test_missing_keys_are_created(world: World) -> None:
    ring = world.ring()
    assert await ring.rotate() == DAY_S
    assert world.secrets.writes == ["create"]
    assert world.secrets.secret is not None
    assert read_keys(world.secrets.secret) == ring.keys


async def test_recent_keys_are_not_rotated(world: World) -> None:
    await world.ring().rotate()
    world.now += timedelta(hours=6)
    again = world.ring()
    assert await again.rotate() == DAY_S - 6 * 3600
    assert world.secrets.writes == ["create"]


async def test_a_rotation_never_causes_a_used_token_to_be_refused(world: World) -> None:
    ring = world.ring()
    await ring.rotate()
    for _ in range(4):
        before = ring.keys
        assert before is not None
        world.now += timedelta(seconds=DAY_S)
        await ring.rotate()
        after = ring.keys
        assert after is not None
        assert after.keys.current == before.keys.next, "the current token must have been accepted for a whole period"
        assert after.keys.previous == before.keys.current, "the previous token must still be accepted"
        assert before.keys.sent("ns", "chat") in after.keys.accepted("ns", "chat")
        assert after.keys.sent("ns", "chat") in before.keys.accepted("ns", "chat")
    assert world.secrets.writes == ["create", *["merge"] * 4]


async def test_damaged_or_deleted_keys_are_restored(world: World) -> None:
    ring = world.ring()
    await ring.rotate()
    before = ring.keys
    assert world.secrets.secret is not None
    world.secrets.secret["data"]["next"] = "not base64!"
    ring.observe("MODIFIED", world.secrets.secret)
    assert ring.missing.is_set()
    await ring.rotate()
    assert read_keys(world.secrets.secret) == ring.keys == before
    assert not ring.missing.is_set()
    gone, world.secrets.secret = world.secrets.secret, None
    ring.observe("DELETED", gone)
    assert ring.missing.is_set()
    await ring.rotate()
    assert world.secrets.secret is not None
    assert read_keys(world.secrets.secret) == before


async def test_unknown_keys_are_created_again(world: World) -> None:
    await world.ring().rotate()
    assert world.secrets.secret is not None
    world.secrets.secret["data"]["next"] = "not base64!"
    another = world.ring()
    await another.rotate()
    assert read_keys(world.secrets.secret) == another.keys


async def test_a_late_watch_event_does_not_undo_a_rotation(world: World) -> None:
    ring = world.ring()
    await ring.rotate()
    late = copy.deepcopy(world.secrets.secret)
    assert late is not None
    world.now += timedelta(seconds=DAY_S)
    await ring.rotate()
    turned = ring.keys
    ring.observe("MODIFIED", late)
    assert ring.keys == turned


async def test_a_rotation_by_another_leader_is_not_repeated(world: World) -> None:
    ring = world.ring()
    await ring.rotate()
    world.now += timedelta(seconds=DAY_S)
    stale = copy.deepcopy(world.secrets.secret)
    await world.ring().rotate()

    async def find_stale(*_: Any) -> dict[str, Any] | None:
        return stale

    world.secrets.find = find_stale  # type: ignore[method-assign]
    with pytest.raises(ApiError, match="Conflict"):
        await ring.rotate()


async def test_a_watched_secret_reports_only_changes(world: World) -> None:
    ring, standby = world.ring(), world.ring()
    await ring.rotate()
    assert world.changes == 1
    secret = world.secrets.secret
    assert secret is not None
    standby.observe("MODIFIED", secret)
    standby.observe("MODIFIED", secret)
    assert standby.keys == ring.keys
    assert world.changes == 2
    standby.observe("MODIFIED", {**secret, "metadata": {**secret["metadata"], "name": "another"}, "data": {}})
    assert world.changes == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda secret: secret["data"].pop("current"),
        lambda secret: secret["data"].update(current="c2hvcnQ="),
        lambda secret: secret["metadata"].pop("annotations"),
        lambda secret: secret["metadata"]["annotations"].update({"pagemill.dev/rotated-at": "yesterday"}),
        lambda secret: secret["metadata"]["annotations"].update({"pagemill.dev/rotated-at": "2026-01-01T00:00:00"}),
        lambda secret: secret.pop("data"),
    ],
)
async def test_a_damaged_secret_has_no_keys(world: World, spoil: Callable[[dict[str, Any]], Any]) -> None:
    await world.ring().rotate()
    assert world.secrets.secret is not None
    spoil(world.secrets.secret)
    assert read_keys(world.secrets.secret) is None


def test_every_key_is_random() -> None:
    first, second = new_keys(START).keys, new_keys(START).keys
    assert len({first.current, first.next, second.current, second.next}) == 4
