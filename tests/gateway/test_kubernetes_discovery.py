"""The gateway follows the objects of a cluster without polling, survives outages, and knows them after a restart.

The API server is a small real HTTP server with lists, watches, bookmarks, and a history that tests can clear.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import stat
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from waiting import WAIT_LIMIT_S

from pagemill_gateway.config import GatewayConfig, KeysSecret, KubernetesConfig, SettingsError
from pagemill_gateway.control_process import ControlProcess
from pagemill_gateway.discovery.kubernetes import discovery as kubernetes_discovery
from pagemill_gateway.discovery.last_known import LastKnown
from pagemill_gateway.processes.server import open_gateway
from pagemill_kube.credentials import from_kubeconfig, in_cluster
from pagemill_kube.errors import CredentialsError
from pagemill_protocol.engine_token import GATEWAY_CONTROL, derive_token


class Started:
    def __init__(self, stack: contextlib.AsyncExitStack, api: Any, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._api = api

    async def gateway(self, **settings: Any) -> ControlProcess:
        kubeconfig = self._folder / "kubeconfig"
        kubeconfig.write_text(
            json.dumps(
                {
                    "current-context": "c",
                    "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
                    "clusters": [{"name": "k", "cluster": {"server": self._api.url}}],
                    "users": [{"name": "u", "user": {"token": "sa-token"}}],
                }
            )
        )
        config = KubernetesConfig(
            kubeconfig=str(kubeconfig),
            last_known_file=str(self._folder / "catalog.json"),
            keys_secret=KeysSecret(namespace="pagemill"),
            **{"backoff_base_s": 0.02, "backoff_max_s": 0.05, **settings},
        )
        settings_ = GatewayConfig(
            discovery="kubernetes", kubernetes=config, outage_wait_s=0.0, handover_timeout_s=0.0
        ).checked()
        gateway = await open_gateway(settings_)
        self._stack.push_async_callback(gateway.close)
        return gateway.control


@pytest.fixture
async def start(api: Any, tmp_path: Path) -> AsyncIterator[Started]:
    async with contextlib.AsyncExitStack() as stack:
        yield Started(stack, api, tmp_path)


def models(gateway: ControlProcess) -> list[str]:
    return gateway.brain.registry.names()


async def test_models_and_pods_are_added_and_removed_without_polling(api, start, engines, fake) -> None:
    await fake.give_keys(api, current=fake.KEY)
    for name in "abcde":
        await fake.give_model(api, name)
    gateway = await start.gateway()
    await fake.until(lambda: gateway.ready and api.num_watches == 3)
    assert models(gateway) == ["a", "b", "c", "d", "e"]
    num_questions = len(api.queries)
    await fake.give_slice(api, "a", engines[0])
    await fake.until(lambda: engines[0].name in gateway.brain.registry.endpoints)
    await fake.give_slice(api, "a", engines[0], terminating=True)
    await fake.until(lambda: gateway.brain.registry.endpoints[engines[0].name].leaving)
    await api.delete(fake.DEPLOYMENTS, "a")
    await fake.until(lambda: models(gateway) == ["b", "c", "d", "e"])
    assert engines[0].name not in gateway.brain.registry.endpoints
    assert len(api.queries) == num_questions
    assert set(api.tokens) == {"Bearer sa-token"}
    selectors = {query.get("labelSelector") or query.get("fieldSelector") for query in api.queries}
    assert selectors == {None, "app.kubernetes.io/name=pagemill-engine", "metadata.name=pagemill-keys"}


async def test_the_gateway_is_ready_once_everything_was_listed_and_the_keys_are_known(api, start, fake) -> None:
    await fake.give_model(api, "a")
    gateway = await start.gateway()
    await fake.until(lambda: "Secret pagemill/pagemill-keys" in gateway.detail)
    assert not gateway.ready
    assert gateway.control_tokens.accepted() == (), "without keys, no client is accepted, not even from this machine"
    await fake.give_keys(api)
    await fake.until(lambda: gateway.ready)
    assert gateway.detail == ""


async def test_an_empty_cluster_is_a_valid_catalogue(api, start, fake) -> None:
    await fake.give_keys(api)
    gateway = await start.gateway()
    await fake.until(lambda: gateway.ready)
    assert models(gateway) == []


async def test_an_outage_of_the_api_server_changes_nothing_and_later_changes_are_noticed(api, start, fake) -> None:
    await fake.give_keys(api)
    await fake.give_model(api, "a")
    gateway = await start.gateway()
    await fake.until(lambda: gateway.ready)
    await api.stop()
    await fake.until(lambda: gateway.detail != "")
    assert gateway.ready
    assert models(gateway) == ["a"]
    await fake.give_model(api, "b")
    await api.delete(fake.DEPLOYMENTS, "a")
    await api.start()
    await fake.until(lambda: models(gateway) == ["b"])
    await fake.until(lambda: gateway.detail == "")


async def test_a_gateway_that_starts_during_an_outage_serves_the_last_catalogue(api, start, fake, tmp_path) -> None:
    await fake.give_keys(api)
    await fake.give_model(api, "a")
    first = await start.gateway()
    await fake.until(lambda: (tmp_path / "catalog.json").exists())
    assert stat.S_IMODE((tmp_path / "catalog.json").stat().st_mode) == 0o600
    await api.stop()
    await first.close()
    second = await start.gateway()
    assert second.ready
    assert models(second) == ["a"]
    assert second.control_tokens.accepted() == first.control_tokens.accepted()
    assert derive_token(b"c" * 32, *GATEWAY_CONTROL) in second.control_tokens.accepted()
    (model,) = (deployment.model for deployment in second.brain.registry.deployments.values())
    assert model.engine_token == derive_token(b"c" * 32, "ns", "a")
    await fake.give_model(api, "b")
    await api.start()
    await fake.until(lambda: models(second) == ["a", "b"])


@pytest.mark.parametrize("content", [b"", b"{", b'{"catalog": {"models": [{"deployment": "d", "name": ""}]}}', b"\xff"])
async def test_a_damaged_file_of_the_last_catalogue_is_ignored(api, start, fake, tmp_path, content) -> None:
    (tmp_path / "catalog.json").write_bytes(content)
    await fake.give_keys(api)
    await fake.give_model(api, "a")
    gateway = await start.gateway()
    assert not gateway.ready
    await fake.until(lambda: models(gateway) == ["a"])


async def test_a_catalogue_file_that_cannot_be_written_affects_only_restarts(api, start, fake, tmp_path) -> None:
    (tmp_path / "catalog.json").mkdir()
    await fake.give_keys(api)
    await fake.give_model(api, "a")
    gateway = await start.gateway()
    await fake.until(lambda: models(gateway) == ["a"])
    await fake.give_model(api, "b")
    await fake.until(lambda: models(gateway) == ["a", "b"])


async def test_a_disk_that_does_not_answer_delays_no_catalogue(api, start, fake, monkeypatch) -> None:
    written, storing = [], threading.Event()

    def write(path: Path, known: LastKnown) -> None:
        assert storing.wait(WAIT_LIMIT_S)
        written.append([model.name for model in known.catalog.models])

    monkeypatch.setattr(kubernetes_discovery, "write_last_known", write)
    await fake.give_keys(api)
    await fake.give_model(api, "a")
    gateway = await start.gateway()
    for name in ("b", "c"):
        await fake.give_model(api, name)
        await fake.until(lambda name=name: name in models(gateway))
    storing.set()
    await fake.until(lambda: written[-1:] == [["a", "b", "c"]])
    assert len(written) == 2  # the one that was being stored and the latest


async def test_a_failed_write_is_repeated_although_the_catalogue_is_unchanged(api, start, fake, tmp_path) -> None:
    (tmp_path / "catalog.json").mkdir()
    await fake.give_keys(api)
    await fake.give_model(api, "a")
    gateway = await start.gateway()
    await fake.until(lambda: gateway.discovery._write_fault == "Is a directory")
    (tmp_path / "catalog.json").rmdir()
    spec = {"model": {"source": "hf://a/b"}}
    await api.apply(fake.DEPLOYMENTS, "a", spec=spec, status={}, metadata={"labels": {"of no": "interest"}})
    await fake.until((tmp_path / "catalog.json").is_file)


async def test_after_a_watch_expired_the_objects_are_listed_again(api, start, fake) -> None:
    await fake.give_keys(api)
    await fake.give_model(api, "a")
    gateway = await start.gateway()
    await fake.until(lambda: gateway.ready and api.num_watches == 3)
    num_lists = api.num_lists
    await fake.give_model(api, "b")
    await api.delete(fake.DEPLOYMENTS, "a")
    await api.forget_history()
    await fake.until(lambda: models(gateway) == ["b"])
    await fake.until(lambda: api.num_lists >= num_lists + 3)
    await fake.give_model(api, "c")
    await fake.until(lambda: models(gateway) == ["b", "c"])


async def test_a_silent_watch_is_reopened(api, start, fake) -> None:
    await fake.give_keys(api)
    gateway = await start.gateway(watch_idle_timeout_s=0.3)
    await fake.until(lambda: gateway.ready and api.num_watches >= 3)
    api.silent = True
    await fake.give_model(api, "a")
    num_watches = api.num_watches
    await fake.until(lambda: api.num_watches >= num_watches + 3)
    assert gateway.ready
    api.silent = False
    await fake.give_model(api, "b")
    await fake.until(lambda: models(gateway) == ["a", "b"])


async def test_rotated_keys_reach_engines_and_the_control_port(api, start, fake) -> None:
    await fake.give_keys(api)
    await fake.give_model(api, "a")
    gateway = await start.gateway()
    await fake.until(lambda: gateway.ready)
    await fake.give_keys(api, current=b"z" * 32)
    new = derive_token(b"z" * 32, "ns", "a")
    await fake.until(lambda: gateway.brain.registry.deployments["ns/a"].model.engine_token == new)
    assert derive_token(b"z" * 32, *GATEWAY_CONTROL) in gateway.control_tokens.accepted()
    tokens = gateway.control_tokens.accepted()
    await api.apply(
        fake.SECRETS, "pagemill-keys", data=fake.secret_data(current=b"short"), metadata={"namespace": "pagemill"}
    )
    await fake.until(lambda: "cannot be used" in gateway.detail)
    await api.delete(fake.SECRETS, "pagemill-keys")
    await fake.until(lambda: "does not exist" in gateway.detail)
    assert gateway.control_tokens.accepted() == tokens
    assert gateway.ready


async def test_irrelevant_changes_of_a_status_cause_no_new_catalogue(api, start, fake) -> None:
    await fake.give_keys(api)
    await fake.give_model(api, "a")
    gateway = await start.gateway()
    await fake.until(lambda: gateway.ready)
    deployment = gateway.brain.registry.deployments["ns/a"]
    for number in range(5):
        spec = {"model": {"source": "hf://a/b"}}
        await api.apply(fake.DEPLOYMENTS, "a", spec=spec, status={"load": {"requestsRunning": number}})
    await fake.give_model(api, "b")
    await fake.until(lambda: models(gateway) == ["a", "b"])
    assert gateway.brain.registry.deployments["ns/a"].model == deployment.model


async def test_an_unreadable_object_does_not_hide_the_others(api, start, fake) -> None:
    await fake.give_keys(api)
    await fake.give_model(api, "a")
    gateway = await start.gateway()
    await fake.until(lambda: gateway.ready)
    await api.apply(fake.DEPLOYMENTS, "a", spec={"model": {"aliases": "not a list"}})
    await fake.give_model(api, "b")
    await fake.until(lambda: models(gateway) == ["a", "b"])
    await api.forget_history()
    await api.delete(fake.DEPLOYMENTS, "b")
    await fake.until(lambda: models(gateway) == ["a"])
    await api.delete(fake.DEPLOYMENTS, "a")
    await fake.until(lambda: models(gateway) == [])


async def test_a_forbidden_request_is_reported(api, start, fake) -> None:
    api.status = 403
    gateway = await start.gateway()
    await fake.until(lambda: "you shall not" in gateway.detail)
    assert not gateway.ready


async def test_namespaces_are_watched_individually(api, start, fake) -> None:
    await fake.give_keys(api)
    for namespace in ("one", "two", "three"):
        await give_model_in(api, fake, namespace)
    gateway = await start.gateway(namespaces=["one", "two"])
    await fake.until(lambda: models(gateway) == ["one", "two"])
    paths = {watch.path for watch in gateway.discovery._watches()}
    assert {"/apis/pagemill.dev/v1beta1/namespaces/one/llmdeployments", fake.SECRETS} < paths
    assert len(paths) == 5


async def test_more_watches_are_possible_than_the_default_size_of_a_connection_pool(api, start, fake) -> None:
    await fake.give_keys(api)
    namespaces = [f"n{number}" for number in range(60)]
    gateway = await start.gateway(namespaces=namespaces)
    await fake.until(lambda: gateway.ready and api.num_watches == 2 * len(namespaces) + 1)


async def test_a_deleted_namespace_does_not_hide_the_others(api, start, fake) -> None:
    await fake.give_keys(api)
    for namespace in ("one", "two"):
        await give_model_in(api, fake, namespace)
    api.closed.add("two")
    gateway = await start.gateway(namespaces=["one", "two"])
    await fake.until(lambda: gateway.ready)
    assert models(gateway) == ["one"]
    assert "namespaces/two/llmdeployments: ApiError: 403" in gateway.detail
    api.closed.clear()
    await fake.until(lambda: models(gateway) == ["one", "two"])
    await fake.until(lambda: gateway.detail == "")
    api.closed.add("two")
    await api.forget_history()
    await fake.until(lambda: "two is closed" in gateway.detail)
    assert models(gateway) == ["one", "two"], "known models stay in use"


async def test_a_forbidden_kind_causes_no_empty_catalogue(api, start, fake) -> None:
    await fake.give_keys(api)
    api.closed.update({"one", "two"})
    gateway = await start.gateway(namespaces=["one", "two"])
    await fake.until(lambda: all(watch.refused or watch.listed for watch in gateway.discovery._watches()))
    assert not gateway.ready


async def test_a_server_that_ends_every_watch_gets_requests_at_growing_intervals(api, start, fake) -> None:
    await fake.give_keys(api)
    await fake.give_model(api, "a")
    api.gone = True
    gateway = await start.gateway(backoff_base_s=0.05, backoff_max_s=2.0)
    await fake.until(lambda: "the watch cannot go on" in gateway.detail)
    await fake.until(lambda: models(gateway) == ["a"])
    num_lists, began_s = api.num_lists, time.monotonic()
    await asyncio.sleep(1.0)
    num_late = math.ceil(time.monotonic() - began_s - 1.0)
    assert api.num_lists - num_lists <= 3 * (7 + num_late), "six doublings of 25 to 50 ms are a second"
    api.gone = False
    await fake.give_model(api, "b")
    await fake.until(lambda: models(gateway) == ["a", "b"])


async def give_model_in(api: Any, fake: Any, namespace: str) -> None:
    spec = {"model": {"source": "hf://a/b"}}
    await api.apply(fake.DEPLOYMENTS, namespace, spec=spec, status={}, metadata={"namespace": namespace})


async def test_a_request_reaches_a_pod_found_in_a_slice(api, start, engines, fake) -> None:
    await fake.give_keys(api, current=fake.KEY)
    await fake.give_model(api, fake.MODEL)
    await fake.give_slice(api, fake.MODEL, engines[0])
    gateway = await start.gateway()
    await fake.until(lambda: gateway.ready and gateway.brain.registry.endpoints[engines[0].name].usable)
    assert gateway.brain.resolve(fake.MODEL).deployment == f"ns/{fake.MODEL}"


async def test_the_gateway_is_ready_only_when_it_knows_the_ready_engines(api, start, engines, fake) -> None:
    engines[0].max_model_len = 0
    await fake.give_keys(api, current=fake.KEY)
    await fake.give_model(api, fake.MODEL)
    await fake.give_slice(api, fake.MODEL, engines[0])
    release = engines[0].hold_state()
    gateway = await start.gateway()
    await fake.until(lambda: gateway.discovery.known)
    assert not gateway.ready
    assert gateway.detail == "connecting to the engines"
    release.set()
    await fake.until(lambda: gateway.ready)
    await fake.give_slice(api, fake.MODEL, engines[1])
    await fake.until(lambda: engines[1].name in gateway.brain.registry.endpoints)
    assert gateway.ready, "later engines do not make the gateway unready"


async def test_an_unreachable_engine_does_not_delay_readiness(api, start, engines, fake) -> None:
    await engines[0].kill()
    await fake.give_keys(api, current=fake.KEY)
    await fake.give_model(api, fake.MODEL)
    await fake.give_slice(api, fake.MODEL, engines[0])
    gateway = await start.gateway()
    await fake.until(lambda: gateway.ready)


# -- credentials -------------------------------------------------------------------------------------------------------


def test_the_service_account_token_is_read_for_each_request(tmp_path: Path) -> None:
    ca = Path(aiohttp.__file__)  # any file that is not a certificate
    (tmp_path / "token").write_text("one\n")
    with pytest.raises(CredentialsError, match="certificate"):
        in_cluster("https://10.0.0.1", _folder_with(tmp_path, ca.read_text()))
    kubeconfig = tmp_path / "config"
    users = [{"name": "u", "user": {"tokenFile": "token"}}]
    kubeconfig.write_text(json.dumps(_kubeconfig(users)))
    credentials = from_kubeconfig(kubeconfig)
    assert asyncio.run(credentials.headers()) == {"Authorization": "Bearer one"}
    (tmp_path / "token").write_text("two\n")
    assert asyncio.run(credentials.headers()) == {"Authorization": "Bearer two"}


@pytest.mark.parametrize("content", ["", "[]", "{}", "a: [", '{"current-context": "x", "contexts": []}'])
def test_an_invalid_kubeconfig_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config").write_text(content)
    with pytest.raises(CredentialsError, match="config"):
        from_kubeconfig(tmp_path / "config")


async def test_without_credentials_the_gateway_does_not_start(tmp_path: Path) -> None:
    config = KubernetesConfig(kubeconfig=str(tmp_path / "none"))
    with pytest.raises(SettingsError, match="none"):
        ControlProcess(GatewayConfig(discovery="kubernetes", kubernetes=config))


def _kubeconfig(users: list[Any]) -> dict[str, Any]:
    return {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": users,
    }


def _folder_with(folder: Path, ca: str) -> Path:
    (folder / "ca.crt").write_text(ca)
    return folder
