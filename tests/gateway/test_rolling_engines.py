"""Real engine processes start and stop like pods under load of the real client: no request fails.

The test acts as Deployment controller and kubelet: endpoints appear before their engine listens, become ready with its
probe, are marked as terminating before or after the preStop program, and vanish after SIGTERM. The device is simulated.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from light_model import light_model
from waiting import START_LIMIT_S, WAIT_LIMIT_S

from pagemill_gateway.config import GatewayConfig, KeysSecret, KubernetesConfig
from pagemill_gateway.processes.server import listening, open_gateway
from pagemill_operator.backends.local.ports import free_port
from pagemill_servers.process.listening import bind, url_of

pytestmark = pytest.mark.slow

NAME = "tiny"


class Pod:
    """One engine process with its entry in the EndpointSlices."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.name = f"pod-{number}"
        self.port, self.control_port = free_port(), free_port()
        self.process: asyncio.subprocess.Process | None = None
        self._cluster = cluster
        self._settings = cluster.folder / f"{self.name}.json"
        self._settings.write_text(
            json.dumps(
                {
                    "engine": {
                        "model": light_model(),
                        "null_runner": True,
                        "num_kv_blocks": 512,
                        "max_model_len": 1024,
                        "step_time": {"knots_tokens": [1, 512], "knot_ms": [5.0, 10.0]},
                    },
                    "server": {
                        "port": self.port,
                        "control_port": self.control_port,
                        "internal_tokens_file": str(cluster.tokens),
                        "drain_timeout_s": 20,
                    },
                }
            )
        )

    async def start(self) -> None:
        """Start the engine; return once the kubelet's probe passes and the slice says so."""
        await self._show(ready=False)
        await self.run()
        await self.wait_ready()

    async def run(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pagemill_engine.server", "--settings", str(self._settings), stdout=self._cluster.log
        )

    async def wait_ready(self) -> None:
        url = f"http://127.0.0.1:{self.control_port}/readyz"
        async with asyncio.timeout(START_LIMIT_S), aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(url) as response:
                        if response.status == 200:
                            break
                await asyncio.sleep(0.1)
        await self._show(ready=True)

    async def call_control_port(self, call: str) -> str:
        """Put the engine to sleep or wake it up, as the operator does; return its state."""
        headers = {"Authorization": f"Bearer {self._cluster.fake.TOKEN}"}
        url = f"http://127.0.0.1:{self.control_port}/{call}"
        async with aiohttp.ClientSession() as session, session.post(url, headers=headers) as response:
            return str((await response.json())["state"])

    async def delete(self) -> None:
        """Delete the pod; like a kubelet, do not wait until gateways have noticed."""
        spread = asyncio.create_task(self._spread_the_news())
        prestop = [sys.executable, "-m", "pagemill_engine.drain", "--settings", str(self._settings)]
        assert await (await asyncio.create_subprocess_exec(*prestop, stderr=self._cluster.log)).wait() == 0
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(self.process.wait(), WAIT_LIMIT_S) == 0
        await spread
        await self._cluster.api.delete(self._cluster.fake.SLICES, self.name)

    async def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        await self.process.wait()

    async def _spread_the_news(self) -> None:
        await asyncio.sleep(random.choice([0.0, 0.0, 0.3, 1.0]))
        await self._show(ready=False, terminating=True)

    async def _show(self, *, ready: bool, terminating: bool = False) -> None:
        conditions = {"ready": ready, "serving": ready, "terminating": terminating}
        endpoint = {"addresses": ["127.0.0.1"], "conditions": conditions}
        await self._cluster.api.apply(
            self._cluster.fake.SLICES,
            self.name,
            metadata={"labels": {"pagemill.dev/deployment": NAME}},
            addressType="IPv4",
            endpoints=[{**endpoint, "targetRef": {"kind": "Pod", "uid": f"uid-{self.name}"}}],
            ports=[{"name": "data", "port": self.port}, {"name": "control", "port": self.control_port}],
        )


class Cluster:
    def __init__(self, api: Any, fake: Any, folder: Path) -> None:
        self.api, self.fake, self.folder = api, fake, folder
        self.tokens = folder / "tokens"
        self.tokens.write_text(f"{fake.TOKEN}\n")
        self.log = (folder / "log").open("w")
        self.pods: list[Pod] = []
        self._num_pods = 0

    def new_pod(self) -> Pod:
        self._num_pods += 1
        pod = Pod(self, self._num_pods)
        self.pods.append(pod)
        return pod

    async def replace(self, old: Pod) -> None:
        """Start a new pod and then delete an old one, as with maxSurge 1 and maxUnavailable 0."""
        await self.new_pod().start()
        await old.delete()
        self.pods.remove(old)

    async def close(self) -> None:
        for pod in self.pods:
            if pod.process is not None and pod.process.returncode is None:
                await pod.kill()
        self.log.close()


class Load:
    """Workers that request whole and streamed answers alternately and never retry."""

    NUM_WORKERS = 6

    def __init__(self, url: str, *, stream_tokens: int = 60) -> None:
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []
        self._stream_tokens = stream_tokens
        self._num_streaming = 0
        self._changed = asyncio.Condition()
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        self._stopping = False
        self._workers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Load:
        self._workers = [asyncio.create_task(self._work(number)) for number in range(self.NUM_WORKERS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        await asyncio.gather(*self._workers)
        await self._client.close()

    async def _work(self, turn: int) -> None:
        while not self._stopping:
            stream = turn % 2 == 0
            turn += 1
            kind = "stream" if stream else "whole"
            try:
                complete = await (self._streamed() if stream else self._whole())
                self.outcomes[f"{kind} {'complete' if complete else 'cut'}"] += 1
                async with self._changed:
                    self._changed.notify_all()
            except openai.APIStatusError as error:
                self._fault(f"{kind} {error.status_code}", error)
            except openai.APIConnectionError as error:
                self._fault(f"{kind} unreachable", error)
            except openai.APIError as error:
                self._fault(f"{kind} reported", error)

    def _fault(self, outcome: str, error: Exception) -> None:
        self.outcomes[outcome] += 1
        self.faults.append(f"{outcome}: {error}")

    async def _whole(self) -> bool:
        answer = await self._client.completions.create(model=NAME, prompt="hi", max_tokens=20, extra_body=IGNORE_EOS)
        return answer.choices[0].finish_reason == "length"

    async def _streamed(self) -> bool:
        reason = None
        stream = await self._client.completions.create(
            model=NAME, prompt="hi", max_tokens=self._stream_tokens, stream=True, extra_body=IGNORE_EOS
        )
        await anext(stream)
        await self._count_streaming(1)
        try:
            async for chunk in stream:
                reason = chunk.choices[0].finish_reason or reason
        finally:
            await self._count_streaming(-1)
        return reason == "length"

    async def until_streaming(self, at_least: int) -> None:
        """Wait until this number of streams has begun and not ended."""
        async with asyncio.timeout(START_LIMIT_S), self._changed:
            await self._changed.wait_for(lambda: self._num_streaming >= at_least)

    async def until_complete(self, at_least: int) -> None:
        """Wait until this number of answers of each kind is complete."""
        kinds = ("whole complete", "stream complete")
        async with asyncio.timeout(START_LIMIT_S), self._changed:
            await self._changed.wait_for(lambda: min(self.outcomes[kind] for kind in kinds) >= at_least)

    async def _count_streaming(self, change: int) -> None:
        async with self._changed:
            self._num_streaming += change
            self._changed.notify_all()


IGNORE_EOS = {"ignore_eos": True}


@pytest.fixture
async def cluster(api, fake, tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(api, fake, tmp_path)
    yield cluster
    await cluster.close()


@pytest.fixture
async def gateway_url(api, fake, cluster: Cluster, tmp_path: Path) -> AsyncIterator[str]:
    await fake.give_keys(api, current=fake.KEY)
    await fake.give_model(api, NAME)
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        json.dumps(
            {
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
                "clusters": [{"name": "k", "cluster": {"server": api.url}}],
                "users": [{"name": "u"}],
            }
        )
    )
    config = KubernetesConfig(
        kubeconfig=str(kubeconfig),
        keys_secret=KeysSecret(namespace="pagemill"),
        last_known_file=str(tmp_path / "catalog.json"),
    )
    gateway = await open_gateway(GatewayConfig(discovery="kubernetes", kubernetes=config).checked())
    data_socket, control_socket = bind("127.0.0.1", 0, "port"), bind("127.0.0.1", 0, "control_port")
    async with listening(gateway, data_socket, control_socket):
        await fake.until(lambda: gateway.control.ready)
        yield url_of(data_socket)
    await gateway.close()


@pytest.mark.sample("2")
@pytest.mark.model
@pytest.mark.parametrize("num_replicas", [1, 2])
async def test_replacing_every_engine_fails_no_request_and_cuts_no_stream(
    cluster: Cluster, gateway_url: str, num_replicas: int
) -> None:
    await asyncio.gather(*(cluster.new_pod().start() for _ in range(num_replicas)))
    async with Load(gateway_url) as load:
        for old in list(cluster.pods):
            await cluster.replace(old)
        await load.until_complete(20)
    assert load.faults == []
    assert set(load.outcomes) == {"whole complete", "stream complete"}


@pytest.mark.model
async def test_an_engine_that_is_killed_fails_no_answer_and_cuts_no_stream(cluster: Cluster, gateway_url: str) -> None:
    """Other engines continue the answers."""
    await asyncio.gather(*(cluster.new_pod().start() for _ in range(2)))
    async with Load(gateway_url, stream_tokens=200) as load:
        for pod in cluster.pods:
            await load.until_streaming(4)  # some of 6 requests on two pods are on this one
            await pod.kill()
            await pod.run()  # the kubelet restarts the container in its pod
            await pod.wait_ready()
        await load.until_complete(5)
    assert set(load.outcomes) == {"whole complete", "stream complete"}, load.faults


@pytest.mark.model
async def test_killing_the_only_engine_fails_no_answer(cluster: Cluster, gateway_url: str) -> None:
    """Requests wait for the restart of the container, where streams continue."""
    pod = cluster.new_pod()
    await pod.start()
    async with Load(gateway_url, stream_tokens=200) as load:
        await load.until_streaming(4)
        await pod.kill()
        await pod.run()
        await pod.wait_ready()
        await load.until_streaming(4)
    assert set(load.outcomes) == {"whole complete", "stream complete"}, load.faults


@pytest.mark.model
async def test_engines_that_sleep_and_wake_under_load_fail_no_request(cluster: Cluster, gateway_url: str) -> None:
    """Both engines sleep in turn while they have requests, which they finish first."""
    await asyncio.gather(*(cluster.new_pod().start() for _ in range(2)))
    async with Load(gateway_url) as load:
        for pod in cluster.pods:
            await load.until_streaming(2)
            assert await pod.call_control_port("sleep") == "asleep"
            await load.until_streaming(2)
            assert await pod.call_control_port("wake_up") == "awake"
    assert load.faults == []
    assert set(load.outcomes) == {"whole complete", "stream complete"}
