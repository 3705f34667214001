"""Encode texts with a tokenizer in a limited process, because the time and memory of its steps have no known bound.

It has the methods of `local_encoder`, each of which is one exchange with `encoder_worker`. A text that takes too much
time or memory ends the process: its request fails with an error that names the tokenizer's step, and the next text
starts another process. One process at a time, so that a tokenizer takes at most one core and the memory of one.
Decoding needs none: it reads a table of the vocabulary (`token_bytes`).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from pagemill_api.sandbox.process import LimitedProcess, ProcessLimits, TimeLimitReached, WorkerDied
from pagemill_api.text.backend import TOKENIZER_ERROR
from pagemill_api.text.encoding.local_encoder import EncodedPair, as_utf8
from pagemill_protocol.errors import PagemillError, invalid_field, unavailable
from pagemill_protocol.source_errors import UnreadableModelError

CPU_LIMIT_S = 1.0
CPU_S_PER_BYTE = 4e-6
"""Additional time for each byte of a text or of the tokenizer's file: libraries take 1.5 microseconds at most."""
WAIT_S = 10.0
MEMORY_BYTES = 352 * 1024 * 1024
"""Address space of a process with a small tokenizer: 150 MiB for libraries, the rest for texts."""
MEMORY_PER_BYTE = 24
"""Additional memory for each byte of the tokenizer's file, as JSON, as Python's objects and in the library."""
PROBE = " ".join(60 * chr(code) for code in range(33, 127)) + " \n\n  12345 é世界"
"""Each printable character of ASCII 60 times: a tokenizer that cannot split these can serve no request."""
LIMITS = ProcessLimits(cpu_limit_s=CPU_LIMIT_S, wall_limit_s=120.0, memory_bytes=MEMORY_BYTES)
_WORKER_FILE = Path(__file__).with_name("encoder_worker.py")


class LimitedEncoder:
    """Encoder of one tokenizer. Thread-safe; the process starts with the first text."""

    def __init__(self, tokenizer_json: str, unknown: str, limits: ProcessLimits = LIMITS) -> None:
        """Make an encoder. `unknown`: the step without a known bound, and why, for errors."""
        self._tokenizer_json = tokenizer_json
        self.unknown = unknown
        self._limits = msgspec.structs.replace(
            limits,
            cpu_limit_s=limits.cpu_limit_s + CPU_S_PER_BYTE * len(tokenizer_json),
            memory_bytes=limits.memory_bytes + MEMORY_PER_BYTE * len(tokenizer_json),
        )
        self._text_cpu_limit_s = limits.cpu_limit_s
        self._fault = ""
        """Why no process can read the tokenizer; empty: not known."""
        self._turn = threading.Lock()
        self._idle: deque[LimitedProcess] = deque()
        self._finalizer = weakref.finalize(self, _close_all, self._idle)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises `PagemillError` 400."""
        return self._ids("encode", (text, add_special_tokens), {}, "prompt")

    def encode_within(
        self,
        text: str,
        max_tokens: int,
        add_special_tokens: bool = True,
        *,
        param: str = "prompt",
        scope: str | None = None,
        shielded: bool = False,
    ) -> list[int]:
        """Encode a text of any size, as `Tokenizer.encode_within`."""
        named = {"param": param, "scope": scope, "shielded": shielded}
        return self._ids("encode_within", (text, max_tokens, add_special_tokens), named, param)

    def encode_cut(self, text: str, num_tokens: int, *, param: str = "prompt") -> list[int]:
        """Return the first `num_tokens` tokens, as `Tokenizer.encode_cut`."""
        return self._ids("encode_cut", (text, num_tokens), {"param": param}, param)

    def encode_pair(self, first: str, second: str, max_tokens: int, cut: int | None, *, param: str) -> EncodedPair:
        """Encode two texts as one prompt, as `Tokenizer.encode_pair`."""
        reply = self._call("encode_pair", (first, second, max_tokens, cut), {"param": param}, param)
        return EncodedPair(reply["ids"], reply["type_ids"])

    def prepare(self) -> None:
        """Start the process, so that no text waits for it. Raises `UnreadableModelError` if it cannot be read."""
        with self._turn:
            self._idle.append(self._borrow())

    def check(self) -> None:
        """Raise `UnreadableModelError` if the tokenizer cannot be read, or cannot encode plain text in its limits."""
        self.prepare()
        try:
            self.encode(PROBE)
        except PagemillError as error:
            raise UnreadableModelError(f"the model's tokenizer cannot be used: {error.message}") from None

    def close(self) -> None:
        """End the process. A later text starts another one."""
        _close_all(self._idle)

    def _ids(self, method: str, arguments: tuple[Any, ...], named: dict[str, Any], param: str) -> list[int]:
        ids: list[int] = self._call(method, arguments, named, param)["ids"]
        return ids

    def _call(self, method: str, arguments: tuple[Any, ...], named: dict[str, Any], param: str) -> dict[str, Any]:
        """Return the worker's result. Raises `PagemillError`: what the worker raises, or that it was ended."""
        num_bytes = sum(len(as_utf8(each)) for each in arguments if isinstance(each, str))
        limit_s = self._text_cpu_limit_s + CPU_S_PER_BYTE * num_bytes
        request = msgspec.json.encode({"arguments": arguments, "named": named, "cpu_limit_s": limit_s})
        if not self._turn.acquire(timeout=WAIT_S):
            raise unavailable(f"The model's tokenizer was busy with other texts for {WAIT_S:g} s. Retry later.")
        try:
            process = self._borrow()
            reply = process.call(method, request)
            self._idle.append(process)
        except TimeLimitReached:
            raise self._failed(param, f"it takes more than {limit_s:.2g} s of CPU time") from None
        except WorkerDied as death:
            raise self._failed(param, f"it needs too much memory, or its process was ended ({death})") from None
        except UnreadableModelError as error:
            raise unavailable(error.message, code=TOKENIZER_ERROR) from None
        finally:
            self._turn.release()
        if "error" not in reply:
            return reply
        raised = PagemillError(**reply["error"])
        raise self._named(raised) if raised.code == TOKENIZER_ERROR else raised

    def _failed(self, param: str, problem: str) -> PagemillError:
        message = f"The model's tokenizer failed on this text: {problem}. Send a shorter text."
        return self._named(invalid_field(param, message, code=TOKENIZER_ERROR))

    def _named(self, error: PagemillError) -> PagemillError:
        """Return an error about one text, extended by the step that may be its cause."""
        message = f"{error.message} It runs in a limited process: {self.unknown}."
        return PagemillError(message, status=error.status, param=error.param, code=error.code)

    def _borrow(self) -> LimitedProcess:
        """Return the process; starts one where none runs. Raises `UnreadableModelError` if it cannot be read."""
        while self._idle:
            if (process := self._idle.pop()).is_alive:
                return process
            process.close()
        if not self._fault:
            try:
                process = LimitedProcess({"tokenizer": self._tokenizer_json}, self._limits, _WORKER_FILE)
            except TimeLimitReached:
                self._fault = f"reading it takes more than {self._limits.cpu_limit_s:.2g} s of CPU time"
            except WorkerDied as death:  # perhaps for lack of memory on this machine, so it is tried again
                raise self._unreadable(f"its process ended ({death})") from None
            else:
                self._fault = process.errors.get("tokenizer", "")
                if not self._fault:
                    return process
                process.close()
        raise self._unreadable(self._fault)

    def _unreadable(self, problem: str) -> UnreadableModelError:
        return UnreadableModelError(
            f"the model's tokenizer cannot be used: {self.unknown}. In a limited process, {problem}. "
            "Use the tokenizer of the model's training."
        )


def _close_all(processes: deque[LimitedProcess]) -> None:
    while processes:
        processes.pop().close()
