"""One simulated pod: its streams, its prefix cache, and its reports to gateways. It contains no HTTP.

Prefills take no time, so that a client's TTFT is the router's. Then every stream of the pod gets a token in each step.
State frames are sent as by an engine: on changes, at most 20 and at least one per second.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import NamedTuple

from pagemill_protocol.frames import encode_state
from pagemill_protocol.hashes import HASH_VERSION, block_hashes, prefix_chunk_blocks, root_hash
from pagemill_protocol.report.state import Digests, EngineLoad, StateFrame, StepTimeParams
from pagemill_protocol.request.generate import GenerateRequest
from routers.answers import Answer

BLOCK_SIZE = 16
WEIGHTS = "simulated"
KV_DTYPE = "null"
MAX_MODEL_LEN = 8192
STEP_TIME = StepTimeParams(knots_tokens=[1, 64, 512], knot_ms=[8.0, 10.0, 24.0], num_steps_observed=1000)
FRAME_INTERVAL_S = 0.05
HEARTBEAT_S = 1.0
MAX_UNREAD_BYTES = 1 << 20
"""Unread bytes of a state stream beyond which frames are dropped; the gateway notices the gap and reconnects."""


class Kind(NamedTuple):
    """The common settings of all pods of one run."""

    model: str
    step_s: float
    num_blocks: int
    bundle_digest: str

    @property
    def prefix_chunk_blocks(self) -> int:
        return prefix_chunk_blocks(BLOCK_SIZE, self.num_blocks)


class Stream:
    """One streamed answer."""

    __slots__ = ("answer", "cached_tokens", "number", "request", "write")

    def __init__(self, write: Callable[[bytes, bool], None], answer: Answer, request: GenerateRequest | None) -> None:
        """Begin an answer. `write` receives data and whether it is the last."""
        self.write = write
        self.answer = answer
        self.request = request
        """The request of a stream of frames; `None` for an OpenAI stream."""
        self.number = 0
        self.cached_tokens = 0

    def step(self) -> bool:
        """Write the next token. Return whether it was the last one."""
        number, answer, request = self.number, self.answer, self.request
        self.number += 1
        done = self.number == answer.num_tokens
        data = answer.stream[number] if request is None else answer.frame(number, request)
        if done:
            data += answer.stream_end if request is None else answer.frame_end(request, self.cached_tokens)
        self.write(data, done)
        return done


class Pod:
    def __init__(self, kind: Kind, loop: asyncio.AbstractEventLoop) -> None:
        self._kind = kind
        self._loop = loop
        self._streams: dict[Stream, None] = {}
        self._num_tokens = 0
        """Tokens of prompts and answers of running requests."""
        self._prefix_chunks: dict[bytes, None] = {}
        """The prefix cache, least recently used first."""
        self._num_played = 0
        """Reported requests without a client."""
        self._step_time = STEP_TIME
        self._added: list[bytes] = []
        self._removed: list[bytes] = []
        self._sequence = 0
        self._readers: dict[asyncio.Transport, Callable[[bytes], None]] = {}
        self.num_frames = 0
        """Frames sent to gateways."""
        self._publishing: asyncio.TimerHandle | None = None
        self._published_at = -HEARTBEAT_S
        self._ticking = False
        # Pods begin at random times, because heartbeats of real pods are not synchronized.
        self._loop.call_later(HEARTBEAT_S * random.random(), self._beat)

    def begin(self, stream: Stream) -> None:
        """Send the first token at once and the others in steps."""
        if stream.request is not None:
            stream.cached_tokens = self._remember(stream.request)
            self._num_tokens += len(stream.request.prompt_token_ids)
        if not stream.step():
            self._streams[stream] = None
            if not self._ticking:
                self._ticking = True
                self._loop.call_later(self._kind.step_s, self._tick)
        self._touch()

    def drop(self, stream: Stream) -> None:
        """Drop a stream whose reader has disconnected."""
        if self._streams.pop(stream, False) is None:
            self._ended(stream)

    def play(self, num_requests: int, num_tokens: int, step_time: StepTimeParams) -> None:
        """Report this many additional requests and tokens, and the current step times."""
        self._num_tokens += num_tokens
        self._num_played += num_requests
        self._step_time = step_time
        self._touch()

    def exchange(self, added: list[bytes], removed: list[bytes]) -> None:
        """Add and evict prefix chunks without a request."""
        self._prefix_chunks.update(dict.fromkeys(added))
        self._added += added
        for prefix_chunk in removed:
            self._prefix_chunks.pop(prefix_chunk, None)
        self._removed += removed
        self._touch()

    def snapshot(self) -> StateFrame:
        return self._frame(snapshot=True, added=list(self._prefix_chunks))

    def subscribe(self, transport: asyncio.Transport, write: Callable[[bytes], None]) -> None:
        """Send the complete state to a gateway now, and every change afterwards."""
        write(encode_state(self.snapshot()))
        self._readers[transport] = write

    def unsubscribe(self, transport: asyncio.Transport) -> None:
        self._readers.pop(transport, None)

    @property
    def num_running(self) -> int:
        return len(self._streams) + self._num_played

    @property
    def kv_usage(self) -> float:
        return min(1.0, self._num_active_blocks() / self._kind.num_blocks)

    def _tick(self) -> None:
        self._num_tokens += len(self._streams)
        for stream in list(self._streams):
            if stream.step():
                del self._streams[stream]
                self._ended(stream)
        self._touch()
        self._ticking = bool(self._streams)
        if self._ticking:
            self._loop.call_later(self._kind.step_s, self._tick)

    def _ended(self, stream: Stream) -> None:
        prompt = len(stream.request.prompt_token_ids) if stream.request is not None else 0
        self._num_tokens = max(0, self._num_tokens - prompt - stream.number + 1)
        self._touch()

    def _remember(self, request: GenerateRequest) -> int:
        """Add the prompt's prefix chunks to the cache. Return how many of its tokens were cached."""
        root = root_hash(weights_digest=WEIGHTS, kv_dtype=KV_DTYPE, block_size=BLOCK_SIZE, salt=request.cache_salt)
        step = self._kind.prefix_chunk_blocks
        prefix_chunks = block_hashes(root, request.prompt_token_ids, BLOCK_SIZE)[step - 1 :: step]
        unknown = (n for n, each in enumerate(prefix_chunks) if each not in self._prefix_chunks)
        num_known = next(unknown, len(prefix_chunks))
        for prefix_chunk in prefix_chunks:
            if prefix_chunk in self._prefix_chunks:
                del self._prefix_chunks[prefix_chunk]
            else:
                self._added.append(prefix_chunk)
            self._prefix_chunks[prefix_chunk] = None
        while len(self._prefix_chunks) * step > self._kind.num_blocks:
            oldest = next(iter(self._prefix_chunks))
            del self._prefix_chunks[oldest]
            self._removed.append(oldest)
        return num_known * step * BLOCK_SIZE

    def _touch(self) -> None:
        """Send a change at once, or when the latest frame is old enough."""
        if self._publishing is None:
            due_at = max(self._loop.time(), self._published_at + FRAME_INTERVAL_S)
            self._publishing = self._loop.call_at(due_at, self._publish)

    def _beat(self) -> None:
        if self._loop.time() - self._published_at >= HEARTBEAT_S:
            self._publish()
        self._loop.call_at(self._published_at + HEARTBEAT_S, self._beat)

    def _publish(self) -> None:
        if self._publishing is not None:
            self._publishing.cancel()
            self._publishing = None
        self._published_at = self._loop.time()
        added, removed = self._added, self._removed
        self._added, self._removed = [], []
        self._sequence += 1
        if not self._readers:
            return
        present = [prefix_chunk for prefix_chunk in dict.fromkeys(added) if prefix_chunk in self._prefix_chunks]
        data = encode_state(
            self._frame(added=present, removed=[each for each in removed if each not in self._prefix_chunks])
        )
        for transport, write in self._readers.items():
            if transport.get_write_buffer_size() < MAX_UNREAD_BYTES:
                write(data)
                self.num_frames += 1

    def _frame(
        self, *, snapshot: bool = False, added: list[bytes] | None = None, removed: list[bytes] | None = None
    ) -> StateFrame:
        kind = self._kind
        return StateFrame(
            sequence=self._sequence,
            snapshot=snapshot,
            load=self._load(),
            step_time=self._step_time,
            digests=Digests(
                weights=WEIGHTS, tokenizer_bundle=kind.bundle_digest, hash_version=HASH_VERSION, kv_dtype=KV_DTYPE
            ),
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=512,
            max_num_seqs=kind.num_blocks,
            prefix_chunk_blocks=kind.prefix_chunk_blocks,
            models=[kind.model],
            prefixes_added=added or [],
            prefixes_removed=removed or [],
        )

    def _load(self) -> EngineLoad:
        total, active = self._kind.num_blocks, self._num_active_blocks()
        evictable = min(total - active, len(self._prefix_chunks) * self._kind.prefix_chunk_blocks)
        return EngineLoad(
            num_kv_bytes_total=total,
            num_kv_bytes_evictable=evictable,
            num_kv_bytes_active=active,
            num_requests_running=self.num_running,
            num_tokens_running=self._num_tokens,
            step_ms=self._kind.step_s * 1000,
        )

    def _num_active_blocks(self) -> int:
        return min(self._kind.num_blocks, self._num_tokens // BLOCK_SIZE + self.num_running)
