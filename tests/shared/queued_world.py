"""A brain with a clock that the test controls, engines of a few slots, and clients that wait."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import msgspec
from hand_clock import Clock

from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.report.state import Digests, EngineLoad, StateFrame
from pagemill_protocol.resource.served import QueueLimits
from pagemill_routing.brain.brain import LocalBrain
from pagemill_routing.brain.interface import DEFAULT_TICKET, Assignment, CompletedRequest, RetryContext, RoutingRequest
from pagemill_routing.config import RoutingConfig

BLOCK = 16


class Pod:
    """An engine as the brain sees it, with its real contents."""

    def __init__(self, name: str, *, slots: int, blocks: int, weights: str = "w") -> None:
        self.name, self.slots, self.blocks, self.weights = name, slots, blocks, weights
        self.inside: dict[int, int] = {}
        """The number of tokens of each decision."""
        self.sequence = 0

    def frame(self, *, snapshot: bool = False, **fields: Any) -> StateFrame:
        self.sequence += 1
        active = min(self.blocks, sum(-(-tokens // BLOCK) for tokens in self.inside.values()))
        load = EngineLoad(
            num_kv_bytes_total=self.blocks,
            num_kv_bytes_active=active,
            num_requests_running=len(self.inside),
            num_tokens_running=sum(self.inside.values()),
        )
        known: dict[str, Any] = {
            "sequence": self.sequence,
            "snapshot": snapshot or self.sequence == 1,
            "load": load,
            "block_size": BLOCK,
            "max_model_len": 4096,
            "max_num_seqs": self.slots,
            "digests": Digests(tokenizer_bundle="t", weights=self.weights),
        }
        return StateFrame(**known | fields)


class World:
    """A brain in front of pods, and clients that wait."""

    def __init__(self, *pods: Pod, queue: QueueLimits | None = None, **settings: Any) -> None:
        self.clock = Clock()
        self.pods = {pod.name: pod for pod in pods}
        self.brain = LocalBrain(RoutingConfig(**settings), clock=self.clock, rng=random.Random(1))
        self.endpoints = [Endpoint(id=each, data_url=f"http://{each}:1", control_url=f"http://{each}:2")
                          for each in self.pods]  # fmt: skip
        self.model = CatalogModel(deployment="d", name="m", endpoints=self.endpoints, queue=queue)
        self.brain.observer.apply_catalog(Catalog(models=[self.model]))
        for pod in pods:
            self.brain.observer.observe(pod.name, pod.frame())
        self.target = self.brain.resolve("m")

    @property
    def num_waiting(self) -> int:
        return self.brain.queues.state("default/d").num_requests

    def ask(self, prompt: int = 100, **fields: Any) -> asyncio.Task[Assignment]:
        ticket = msgspec.structs.replace(DEFAULT_TICKET, **{"arrived_at": self.clock.now, "max_tokens": 20} | fields)
        return spawn(self.brain.choose(self.target, frozenset(), RoutingRequest(prompt), ticket=ticket))

    def arrive(self, choice: Assignment, tokens: int) -> None:
        """Let the request arrive at its engine, which begins to answer."""
        self.pods[choice.endpoint_id].inside[choice.decision] = tokens
        self.brain.accepted(choice)
        self.brain.started(choice)

    def leave(self, choice: Assignment, num_tokens: int | None = 20) -> None:
        self.pods[choice.endpoint_id].inside.pop(choice.decision, None)
        self.brain.finished(choice, CompletedRequest(num_tokens) if num_tokens is not None else None)

    def kill(self, choice: Assignment, num_tokens: int) -> RetryContext:
        """End the engine during an answer; return the retry context with which the relay asks for another engine."""
        self.pods[choice.endpoint_id].inside.clear()
        self.brain.failed(choice, "lost")
        self.brain.observer.unreachable(choice.endpoint_id)
        return RetryContext(
            choice.decision, choice.endpoint_id, "lost", self.pods[choice.endpoint_id].weights, num_tokens
        )

    def ask_again(self, retry: RetryContext, prompt: int = 100, **fields: Any) -> asyncio.Task[Assignment]:
        ticket = msgspec.structs.replace(DEFAULT_TICKET, **{"max_tokens": 20, "paid": True} | fields)
        return spawn(
            self.brain.choose(
                self.target, frozenset({retry.endpoint_id}), RoutingRequest(prompt), ticket=ticket, retry=retry
            )
        )

    def report(self) -> None:
        for pod in self.pods.values():
            self.brain.observer.observe(pod.name, pod.frame())

    async def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.brain.queues.tick()
        await settle()


def spawn(work: Coroutine[Any, Any, Assignment]) -> asyncio.Task[Assignment]:
    return asyncio.ensure_future(work)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def served(tasks: list[asyncio.Task[Assignment]]) -> list[Assignment]:
    return [task.result() for task in tasks if task.done() and not task.cancelled() and task.exception() is None]


def limits(max_requests: int = 1000, max_bytes: int = 10**9, timeout_s: float = 60.0) -> QueueLimits:
    return QueueLimits(max_requests=max_requests, max_bytes=max_bytes, timeout_s=timeout_s)
