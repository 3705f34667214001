"""Compiles forms into grammars, on a thread of its own, and keeps the last used ones.

The HTTP process has checked that a form compiles in time (`pagemill_api.grammars.check`). The compiler's effort is
limited here again; a form that cannot be compiled gets a 400.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

from pagemill_api.answers.registry import MARKERS, REASONING_ENDS, reasoning_parser
from pagemill_engine.grammar.reasoning import LimitedReasoning, ReasoningLimit
from pagemill_protocol.errors import invalid_field
from pagemill_protocol.request.answer_format import AnswerFormat
from pagemill_protocol.request.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from pagemill_api.text.tokenizer import Tokenizer
    from pagemill_engine.grammar.token_state import TokenState, TokenStates

MAX_GRAMMARS = 64
MAX_CACHED_TEXTS = 1024


class CompiledGrammar:
    """A compiled form. Every sequence has a state of its own."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size

    def state(self, token_ids: Sequence[int], *, forbids_end: bool) -> TokenState:
        from pagemill_engine.grammar.state import (
            GrammarState,
        )  # imports llguidance, which only forms need

        return _advanced(
            GrammarState(self._matcher.deep_copy(), self._eos_token_ids, self._vocab_size, forbids_end), token_ids
        )


class LimitedForm(NamedTuple):
    """An answer with a reasoning budget and an optional form."""

    limit: ReasoningLimit
    grammar: TokenStates | None

    def state(self, token_ids: Sequence[int], *, forbids_end: bool) -> TokenState:
        form = None if self.grammar is None else self.grammar.state((), forbids_end=forbids_end)
        return _advanced(LimitedReasoning(self.limit, form), token_ids)


def _advanced(state: TokenState, token_ids: Sequence[int]) -> TokenState:
    for token_id in token_ids:
        if fault := state.advance(token_id):
            raise invalid_field("resume", f"The answer cannot be continued: {fault}. Send the request anew.")
    return state


class GrammarCompiler:
    """Compiles forms on one thread; thread-safe. The first form loads the tokenizer and prepares its vocabulary."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], eos_token_ids: Sequence[int], vocab_size: int) -> None:
        self._load_tokenizer = load_tokenizer
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._loaded: Tokenizer | None = None
        self._compile: Callable[[StructuredOutputs], LLMatcher] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._grammars: OrderedDict[StructuredOutputs, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def submit(self, outputs: StructuredOutputs | None, reasoning: AnswerFormat | None = None) -> Future[TokenStates]:
        """Return a future of the compiled form and reasoning budget.

        It raises `PagemillError` 400 with the reason if the form cannot be compiled.
        """
        with self._lock:
            known = self._grammars.get(outputs) if outputs is not None and reasoning is None else None
            if outputs is not None and known is not None:
                self._grammars.move_to_end(outputs)
                done: Future[TokenStates] = Future()
                done.set_result(known)
                return done
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
            return self._thread.submit(self._compile_request, outputs, reasoning)

    def _compile_request(self, outputs: StructuredOutputs | None, reasoning: AnswerFormat | None) -> TokenStates:
        grammar = self._make(outputs) if outputs is not None else None
        if reasoning is None or reasoning.reasoning_budget is None:
            assert grammar is not None  # requests without form and budget are not compiled
            return grammar
        begin, end = REASONING_ENDS[reasoning.reasoning]
        tokenizer = self._tokenizer()
        limit = ReasoningLimit(
            reasoning.reasoning_budget,
            begin.encode(),
            end.encode(),
            tokenizer.encode(end, add_special_tokens=False),
            reasoning.starts_in_reasoning,
            tokenizer.token_bytes,
            self._vocab_size,
            partial(reasoning_parser, reasoning) if reasoning.tools and reasoning.reasoning in MARKERS else None,
        )
        return LimitedForm(limit, grammar)

    def _tokenizer(self) -> Tokenizer:
        """Return the tokenizer, loading it at the first call. Only for the compiler's thread."""
        if self._loaded is None:
            self._loaded = self._load_tokenizer()
        return self._loaded

    def _make(self, outputs: StructuredOutputs) -> CompiledGrammar:
        with self._lock:
            if outputs in self._grammars:  # compiled for a request just before this one
                return self._grammars[outputs]
        if self._compile is None:
            self._compile = self._prepare()
        try:
            grammar = CompiledGrammar(self._compile(outputs), self._eos_token_ids, self._vocab_size)
            if grammar.state((), forbids_end=False).ended:
                raise ValueError("nothing but an empty answer fits it")
        except ValueError as error:
            raise invalid_field(
                "structured_outputs", f"The {outputs.kind} cannot be used: {str(error).rstrip('.')}."
            ) from None
        with self._lock:
            self._grammars[outputs] = grammar
            while len(self._grammars) > MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        return grammar

    def _prepare(self) -> Callable[[StructuredOutputs], LLMatcher]:
        from llguidance import LLMatcher

        from pagemill_api.grammars.parser import fault_of, parser_limits
        from pagemill_api.grammars.source import grammar_text

        tokenizer = self._tokenizer()
        try:
            vocabulary = llguidance_tokenizer(tokenizer, self._eos_token_ids, self._vocab_size)
        except ValueError as error:
            raise invalid_field("structured_outputs", f"This model's answers cannot have a form: {error}.") from None
        special = {tokenizer.token_text(token_id): token_id for token_id in tokenizer.special_ids}

        def compile(outputs: StructuredOutputs) -> LLMatcher:
            matcher = LLMatcher(vocabulary, grammar_text(outputs, special), log_level=0, limits=parser_limits())
            if fault := fault_of(matcher):
                raise ValueError(fault)
            return matcher

        return compile


class _Tokens:
    """The tokenizer interface of llguidance: the bytes of all tokens, and the tokenization of forced text."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._tokenize = lru_cache(MAX_CACHED_TEXTS)(self._tokenize_uncached)
        self.tokenize_greedily: Callable[[str], list[int]] = lambda text: []
        self.eos_token_id = eos_token_id
        # Rows of the logits beyond the tokenizer's vocabulary have no bytes, and are never allowed.
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(
            token_id for token_id in {*tokenizer.special_ids, eos_token_id} if token_id < vocab_size
        )

    def __call__(self, text: str) -> list[int]:
        """Tokenize text; cached, because every answer of a grammar asks for the same forced text."""
        return list(self._tokenize(text))

    def _tokenize_uncached(self, text: str) -> list[int]:
        """Tokenize as in the model's training, or by longest tokens if the tokenizer changes the text."""
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if all(token_id < len(self.tokens) for token_id in token_ids):
            spelled = b"".join(self.tokens[token_id] for token_id in token_ids)
            if spelled == text.encode() and self._tokenizer.special_ids.isdisjoint(token_ids):
                return token_ids
        return self.tokenize_greedily(text)


def llguidance_tokenizer(tokenizer: Tokenizer, eos_token_ids: Sequence[int], vocab_size: int) -> LLTokenizer:
    """Return llguidance's tokenizer. Raises `ValueError` for a vocabulary that llguidance cannot use."""
    from llguidance import LLTokenizer, TokenizerWrapper

    if not eos_token_ids:
        raise ValueError("the model has no end-of-sequence token")
    tokens = _Tokens(tokenizer, eos_token_ids[0], vocab_size)
    found = LLTokenizer(TokenizerWrapper(tokens), eos_token=list(eos_token_ids))
    tokens.tokenize_greedily = found.greedy_tokenize
    return found
