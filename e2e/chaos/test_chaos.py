"""A thousand requests of two tenants and a batch, through every fault in turn and several at once.

make e2e-measure CASES=e2e/chaos

Every answer must equal the undisturbed one. Only a killed gateway may end what its own clients were reading, and refuse
connections until its Service knows. The figures by fault are measures (`docs/benchmarks.md`, "On the cluster").
"""

from __future__ import annotations

import io
import json
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import openai
import pytest
from support.chaos import FAULTS, Fault, World
from support.clusters import OneNode, program
from support.deployments import deploy
from support.kubectl import Kubectl
from support.load import PROMPTS, Load, Service, running_load
from support.measures import Measures
from support.objects import llmdeployment, secret
from support.outcomes import Record, Report
from support.release import SHARED_NAME, SHARED_NAMESPACE, Release, Releases
from support.waiting import until

from pagemill_servers.auth import hash_key

pytestmark = [pytest.mark.measure, pytest.mark.timeout(3600)]

NUM_REQUESTS = 1000
REPLICAS, TOKENS, WORKERS = 2, 16, 4
BATCH_LINES = 40
REDIS_IMAGE, REDIS_PASSWORD = "docker.io/library/redis:e2e", "redis-password"
KEYS = {tenant: f"sk-{secrets.token_hex(16)}" for tenant in ("red", "blue", "night")}
"""The last one runs batches."""
LOST_S = 8.0
"""Seconds in which a killed gateway's address may still be given to new connections."""
BATCHES_END_S = 300.0


@pytest.fixture
def crowded(releases: Releases, one_node: OneNode) -> Iterator[Release]:
    """Install gateways of two workers with keys of three tenants, a Redis, and batches in it."""
    program("redis", REDIS_IMAGE)
    repository, tag = REDIS_IMAGE.removeprefix("docker.io/").split(":")
    lines = [f"{hash_key(key)} tenant={tenant}" for tenant, key in KEYS.items()]
    with releases.absent():
        release = releases.new(SHARED_NAME, SHARED_NAMESPACE)
        try:
            release.prepare()
            one_node.kubectl.within(SHARED_NAMESPACE).apply(
                secret("tenants", keys="\n".join(lines)), secret(REDIS_PASSWORD, password=secrets.token_hex(16))
            )
            values = {
                "image": {"redis": {"repository": repository, "tag": tag}},
                "gateway": {"workers": 2, "apiKeys": {"existingSecret": "tenants"}, "settings": {"batches": {}}},
                "redis": {"bundled": {"enabled": True, "passwordSecret": REDIS_PASSWORD}},
            }
            release.install(values=values)
            yield release
        finally:
            release.remove()


@dataclass
class Batches:
    """Batches one after another, of which every line's answer is compared."""

    service: Service
    golden: Mapping[str, str]
    stopping: threading.Event = field(default_factory=threading.Event)
    num_right: int = 0
    wrong: list[str] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run batches while the block runs; the last one has ended when the block ends without an error."""
        thread = threading.Thread(target=self._run, name="batches", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.stopping.set()
        thread.join(BATCHES_END_S)
        assert not thread.is_alive(), "a batch never ended"

    def _run(self) -> None:
        # The client of a batch asks again, since a gateway that is killed ends its connections too.
        address = self.service
        with openai.OpenAI(base_url=address.base_url, api_key=address.api_key, max_retries=8, timeout=60) as client:
            while not self.stopping.is_set():
                self._run_one(client)

    def _run_one(self, client: openai.OpenAI) -> None:
        prompts = {f"{number}": PROMPTS[number % len(PROMPTS)] for number in range(BATCH_LINES)}
        lines = "\n".join(json.dumps(self._line(number, prompt)) for number, prompt in prompts.items())
        file = client.files.create(file=("lines.jsonl", io.BytesIO(lines.encode())), purpose="batch")
        endpoint = "/v1/chat/completions"
        batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
        # A batch takes as long as its lines need; there is nothing else to wait for.
        while batch.status in ("validating", "in_progress", "finalizing"):
            time.sleep(1)
            batch = client.batches.retrieve(batch.id)
        if batch.output_file_id is None or batch.status != "completed":
            self.wrong.append(str(batch))
            return
        for line in client.files.content(batch.output_file_id).text.splitlines():
            found = json.loads(line)
            choices = ((found["response"] or {}).get("body") or {}).get("choices") or [{"message": {"content": None}}]
            if choices[0]["message"]["content"] == self.golden[prompts.pop(found["custom_id"])]:
                self.num_right += 1
            else:
                self.wrong.append(line)
        self.wrong += [f"no answer to line {number}" for number in prompts]

    def _line(self, number: str, prompt: str) -> dict[str, object]:
        messages = [{"role": "user", "content": prompt}]
        body = {"model": self.service.model, "messages": messages, "max_tokens": TOKENS, "temperature": 0}
        return {"custom_id": number, "method": "POST", "url": "/v1/chat/completions", "body": body}


@dataclass(frozen=True)
class Struck:
    fault: Fault
    started_s: float
    over_s: float
    """When it was over and everything was ready again."""

    def report(self, records: list[Record]) -> Report:
        """Return the requests that were in flight or began while the fault or its consequences lasted."""
        met = [each for each in records if each.started_s < self.over_s and _ended_s(each) > self.started_s]
        return Report(met, self.over_s - self.started_s)

    def excuses(self, record: Record) -> bool:
        """Whether this fault ended the client's own connection, or its address was still given to new ones."""
        if not self.fault.ends_connections or record.outcome not in ("cut", "unreachable"):
            return False
        return self.started_s <= _ended_s(record) <= self.started_s + LOST_S


def test_no_request_of_a_thousand_is_lost_through_every_fault(
    one_node: OneNode, crowded: Release, space: Kubectl, measures: Measures
) -> None:
    chat = deploy(space, llmdeployment("chat", replicas=REPLICAS))
    chat.wait_ready(REPLICAS)
    world = World(one_node, crowded, chat, REPLICAS)
    address = crowded.service("chat").base_url
    services = {tenant: Service(address, key, "chat") for tenant, key in KEYS.items()}
    with running_load(services["red"], workers=WORKERS, max_tokens=TOKENS) as red:
        batches = Batches(services["night"], red.golden)
        with (
            batches.running(),
            running_load(services["blue"], workers=WORKERS, max_tokens=TOKENS, golden=red.golden) as blue,
        ):
            struck = [_strike(world, fault) for fault in FAULTS]
            until("all requests ended", lambda: _num_ended([red, blue]) >= NUM_REQUESTS, timeout_s=1200, interval_s=1)
    _record(measures, struck, [red, blue], batches)
    lost = [each for load in (red, blue) for each in load.report().failed]
    unexcused = [each for each in lost if not any(one.excuses(each) for one in struck)]
    assert unexcused == [], "\n".join(map(str, unexcused[:5]))
    assert batches.wrong == []
    assert batches.num_right >= BATCH_LINES


def _strike(world: World, fault: Fault) -> Struck:
    started_s = time.monotonic()
    fault.strike(world)
    world.recovered()
    struck = Struck(fault, started_s, time.monotonic())
    print(f"{fault.name}: over after {struck.over_s - started_s:.1f} s", flush=True)
    return struck


def _record(measures: Measures, struck: list[Struck], loads: list[Load], batches: Batches) -> None:
    records = [each for load in loads for each in load.records]
    for one in struck:
        report = one.report(records)
        lost = len(report.failed)
        slowest_s = max((each.seconds for each in report.records), default=0.0)
        measures.record(
            f"chaos, {one.fault.name}",
            over_s=report.seconds,
            requests=len(report.records),
            lost=lost,
            slowest_s=slowest_s,
        )
    complete = sum(load.report().complete for load in loads)
    measures.record(
        "chaos, all faults",
        requests=len(records),
        identical=complete,
        batch_lines=batches.num_right + len(batches.wrong),
        lines_identical=batches.num_right,
    )


def _num_ended(loads: list[Load]) -> int:
    return sum(len(load.records) for load in loads)


def _ended_s(record: Record) -> float:
    return record.started_s + record.seconds
