"""Requests on their way into the scheduler: those with a form or a reasoning budget enter once it is compiled.

Until then they have been checked and are in no queue, and the loop continues. `pagemill_engine.grammar`'s compiler
works on a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from pagemill_engine.grammar.compiler import GrammarCompiler
from pagemill_engine.ipc.messages import TokensOut
from pagemill_engine.loop.refusals import aborts, refusals
from pagemill_engine.scheduler.admission import already_served
from pagemill_engine.scheduler.scheduler import Scheduler
from pagemill_execution.runners.base import RunnerInfo
from pagemill_protocol.errors import PagemillError, internal_error, invalid_field
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

if TYPE_CHECKING:
    from pagemill_api.text.tokenizer import Tokenizer
    from pagemill_engine.grammar.token_state import TokenStates
    from pagemill_protocol.request.answer_format import AnswerFormat

logger = logging.getLogger(__name__)

POLL_S = 0.005
"""Time that an engine without other work waits for a grammar before it reads messages again."""


class GrammarRequests:
    def __init__(self, model: str, scheduler: Scheduler, info: RunnerInfo) -> None:
        limits = scheduler.limits
        self.load_tokenizer: Callable[[], Tokenizer] = partial(_tokenizer_of, model)
        """Loads the tokenizer, on the compiler's thread, for the first request with a form.

        An owner that has loaded the model's tokenizer already replaces it.
        """
        self._scheduler = scheduler
        self._masks_tokens = info.masks_tokens
        self._compiler = GrammarCompiler(lambda: self.load_tokenizer(), limits.eos_token_ids, limits.vocab_size)
        self._compiling: dict[str, tuple[GenerateRequest, Future[TokenStates]]] = {}
        self._ends: list[TokensOut] = []

    @property
    def has_work(self) -> bool:
        return bool(self._compiling or self._ends)

    def add(self, request: GenerateRequest) -> None:
        """Queue a request, now or when its form is compiled. Raises `PagemillError` if it cannot be served here."""
        outputs = request.sampling.structured_outputs
        limited = _with_budget(request)
        if not self._masks_tokens:
            _check_restricts_nothing(request.sampling)
            if limited is not None:
                raise invalid_field("thinking_token_budget", "A simulated device enforces no budget. Remove it.")
        if outputs is None and limited is None:
            self._scheduler.add(request)
            return
        num_forming = sum(each.sampling.num_sequences for each, _ in self._compiling.values())
        self._scheduler.check(request, num_forming)
        if request.request_id in self._compiling:
            raise already_served(request.request_id)
        self._compiling[request.request_id] = (request, self._compiler.submit(outputs, limited))

    def is_compiling(self, request_id: str) -> bool:
        return request_id in self._compiling

    def abort(self, request_id: str) -> None:
        """Abort a request whose form is not compiled yet; other ids are ignored."""
        if request_id in self._compiling:
            request, _ = self._compiling.pop(request_id)
            self._ends += aborts(request)

    def raise_allowance(self, request_id: str, allowance: int) -> None:
        """Let each sequence of a request generate up to `allowance` tokens. Ids of ended requests are ignored."""
        self._scheduler.raise_allowance(request_id, allowance)
        if request_id in self._compiling:
            request, future = self._compiling[request_id]
            if request.token_allowance is not None and request.token_allowance < allowance:
                self._compiling[request_id] = (msgspec.structs.replace(request, token_allowance=allowance), future)

    def queue_compiled(self, *, may_wait: bool) -> None:
        """Queue the requests whose form is compiled, in order of arrival.

        `may_wait`: whether to wait up to `POLL_S` for a form.
        """
        if not self._compiling:
            return
        if may_wait:
            wait([future for _, future in self._compiling.values()], POLL_S, FIRST_COMPLETED)
        for request_id, (request, future) in list(self._compiling.items()):
            if future.done():
                del self._compiling[request_id]
                try:
                    self._scheduler.add(request, _grammar_of(future))
                except PagemillError as error:
                    self._ends += refusals(request, error)

    def take_ends(self) -> list[TokensOut]:
        """Return the outputs, since the last call, of requests that ended before they were queued."""
        ends, self._ends = self._ends, []
        return ends


def _with_budget(request: GenerateRequest) -> AnswerFormat | None:
    """Return the request's answer format if its reasoning has a budget, or None."""
    answer_format = request.answer_format
    has_budget = answer_format is not None and answer_format.reasoning_budget is not None
    return answer_format if has_budget else None


def _check_restricts_nothing(sampling: SamplingParams) -> None:
    for field in ("structured_outputs", "allowed_token_ids", "bad_words"):
        if getattr(sampling, field):
            raise invalid_field(field, f"A simulated device cannot enforce {field}. Remove it.")


def _tokenizer_of(model: str) -> Tokenizer:
    from pagemill_api.text.tokenizer import Tokenizer
    from pagemill_models.sources import resolve_source  # imports libraries that few engines need
    from pagemill_models.tokenizer_files.load_bundle import load_bundle

    return Tokenizer(load_bundle(resolve_source(model, field="model")))


def _grammar_of(future: Future[TokenStates]) -> TokenStates:
    try:
        return future.result()
    except PagemillError:
        raise
    except Exception as error:
        logger.error("a form could not be compiled", exc_info=error)
        raise internal_error() from error
