"""Measures one replica on this machine: runs an engine process with requests of the planned length.

The first round has one request, and each round has twice as many as the last, until the time is up or the replica is
full. The engine's step-time model learns from these steps as in production, and is the result.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import NamedTuple

from pagemill.planning.errors import PlanError
from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.channels import EngineChannel, EngineDied
from pagemill_engine.ipc.messages import AddRequest, Fatal, FromEngine, LoadProgress, Ready, StepOutputs
from pagemill_engine.ipc.process import EngineProcess
from pagemill_protocol.report.cache_kinds import blocks_at
from pagemill_protocol.report.state import StepTimeParams
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

OUTPUT_TOKENS = 32
"""Maximum answer tokens of a measured request: enough steps for the step-time model."""
TIMEOUT_FACTOR = 10.0
"""A round fails after this multiple of the requested time."""


class SingleRequestLatency(NamedTuple):
    """Latencies of a request that runs alone."""

    ttft_ms: float
    tpot_ms: float | None
    """`None` if the answer had one token."""


class MeasuredReplica(NamedTuple):
    ready: Ready
    step_time: StepTimeParams
    alone: SingleRequestLatency
    most_at_once: int
    """The number of requests in the largest round."""


async def measure(
    config: EngineConfig, input_tokens: int, output_tokens: int, limit_s: float, show_progress: Callable[[str], None]
) -> MeasuredReplica:
    """Measure the replica; `show_progress` is called with lines of progress. Raises `PlanError`."""
    with EngineProcess.launch(config) as process:
        channel = EngineChannel(config, process)
        await channel.start()
        ready = None
        try:
            ready = await _until_ready(channel, show_progress)
            show_progress(f"measuring requests of {input_tokens} + {min(output_tokens, OUTPUT_TOKENS)} tokens")
            return await _Rounds(channel, ready, input_tokens, output_tokens).run(limit_s)
        except EngineDied as error:
            raise PlanError(f"the engine process exited during the measurement: {error}") from None
        finally:
            if ready is None:
                channel.terminate()
            await channel.close()


async def _until_ready(channel: EngineChannel, show_progress: Callable[[str], None]) -> Ready:
    while True:
        message = await _next(channel)
        if isinstance(message, LoadProgress):
            show_progress(f"{message.phase}: {message.detail}")
        if isinstance(message, Ready):
            return message


async def _next(channel: EngineChannel) -> FromEngine:
    message = await channel.recv()
    if isinstance(message, Fatal):
        raise PlanError(f"the engine cannot serve this: {message.reason}: {message.message}")
    return message


class _Rounds:
    def __init__(self, channel: EngineChannel, ready: Ready, input_tokens: int, output_tokens: int) -> None:
        self._channel = channel
        self._ready = ready
        self._input_tokens = input_tokens
        self._output_tokens = min(output_tokens, OUTPUT_TOKENS)
        self._draw = random.Random(0)
        self._num_requests = 0
        self._step_time = StepTimeParams()

    async def run(self, limit_s: float) -> MeasuredReplica:
        began_s = time.monotonic()
        alone = await self._round(1, limit_s)
        at_once, took_s = 1, time.monotonic() - began_s
        while 2 * at_once <= self._most and time.monotonic() - began_s + 2 * took_s < limit_s:
            round_began_s = time.monotonic()
            at_once *= 2
            await self._round(at_once, limit_s)
            took_s = time.monotonic() - round_began_s
        # The engine reports its step-time model twice a second, so that short rounds may end before the first report.
        while not self._step_time.num_steps_observed and time.monotonic() - began_s < TIMEOUT_FACTOR * limit_s:
            await self._round(at_once, limit_s)
        return MeasuredReplica(self._ready, self._step_time, alone, at_once)

    @property
    def _most(self) -> int:
        """The number of requests that fit in the KV cache and in a step, at least 1."""
        limits = self._ready.limits
        length = self._input_tokens + self._output_tokens
        num_blocks = blocks_at(limits.kinds, limits.blocks_of_kinds, length, limits.block_size)
        in_cache = num_blocks * limits.block_size // length
        return max(1, min(limits.max_num_seqs, in_cache))

    async def _round(self, at_once: int, limit_s: float) -> SingleRequestLatency:
        """Run `at_once` requests at the same time to their ends. Return the latencies of the first one."""
        sent_s = time.monotonic()
        names = [self._send() for _ in range(at_once)]
        running, first_s, last_s = set(names), 0.0, 0.0
        try:
            async with asyncio.timeout(TIMEOUT_FACTOR * limit_s):
                while running:
                    step = await _next(self._channel)
                    if not isinstance(step, StepOutputs):
                        continue
                    self._step_time = step.step_time or self._step_time
                    for output in step.outputs:
                        if output.error is not None:
                            raise PlanError(f"the engine refused a measured request: {output.error}")
                        if output.request_id == names[0]:
                            last_s = time.monotonic()
                            first_s = first_s or last_s
                        if output.finish_reason is not None:
                            running.discard(output.request_id)
        except TimeoutError:
            raise PlanError(
                f"--measure-s {limit_s:g}: {at_once} requests of {self._input_tokens} + {self._output_tokens} tokens "
                f"took more than {TIMEOUT_FACTOR:g} times that; raise it, lower --input, or give step times with --fit"
            ) from None
        gaps = self._output_tokens - 1
        return SingleRequestLatency((first_s - sent_s) * 1000, (last_s - first_s) * 1000 / gaps if gaps else None)

    def _send(self) -> str:
        self._num_requests += 1
        name = f"plan-{self._num_requests}"
        vocab_size = self._ready.limits.vocab_size
        request = GenerateRequest(
            request_id=name,
            model="",
            # Random tokens, so that the prefix cache has no hits.
            prompt_token_ids=[self._draw.randrange(vocab_size) for _ in range(self._input_tokens)],
            sampling=SamplingParams(temperature=0.0, max_tokens=self._output_tokens, ignore_eos=True),
        )
        self._channel.send(AddRequest(request))
        return name
