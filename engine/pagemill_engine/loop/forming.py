"""Requests that prescribe a form, from their arrival until it is compiled: the loop goes on meanwhile.

They have been checked and are in no queue yet. The compiler is `pagemill_engine.grammar`'s, and works on a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import NamedTuple

import msgspec

from pagemill_engine.grammar.compiler import Grammar, GrammarCompiler
from pagemill_protocol.errors import PagemillError, internal_error
from pagemill_protocol.generate import GenerateRequest

logger = logging.getLogger(__name__)

POLL_S = 0.005
"""How long an engine with nothing else to do waits for a grammar before it looks for messages."""


class Formed(NamedTuple):
    request: GenerateRequest
    grammar: Grammar | PagemillError
    """Or why it cannot be compiled."""


class FormingRequests:
    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._forming: dict[str, tuple[GenerateRequest, Future[Grammar]]] = {}

    def __len__(self) -> int:
        return len(self._forming)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._forming

    @property
    def num_sequences(self) -> int:
        return sum(request.sampling.num_sequences for request, _ in self._forming.values())

    def add(self, request: GenerateRequest) -> None:
        assert request.sampling.structured_outputs is not None
        self._forming[request.request_id] = (request, self._compiler.submit(request.sampling.structured_outputs))

    def drop(self, request_id: str) -> GenerateRequest | None:
        request, _ = self._forming.pop(request_id, (None, None))
        return request

    def raise_allowance(self, request_id: str, allowance: int) -> None:
        known = self._forming.get(request_id)
        if known is not None and (known[0].token_allowance or allowance) < allowance:
            request = msgspec.structs.replace(known[0], token_allowance=allowance)
            self._forming[request_id] = (request, known[1])

    def take_formed(self, *, may_wait: bool) -> Iterator[Formed]:
        """Those whose form is compiled, in order of arrival. `may_wait`: a moment for one, where there is none."""
        if may_wait:
            wait([future for _, future in self._forming.values()], POLL_S, FIRST_COMPLETED)
        for request_id, (request, future) in list(self._forming.items()):
            if future.done():
                del self._forming[request_id]
                yield Formed(request, _result(future))


def _result(future: Future[Grammar]) -> Grammar | PagemillError:
    try:
        return future.result()
    except PagemillError as error:
        return error
    except Exception as error:
        logger.error("a form could not be compiled", exc_info=error)
        return internal_error()
