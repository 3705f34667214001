"""Sampling parameters: one immutable value from the HTTP server to the sampler.

The offline API (`LLM.generate`), the dialects and the engine use it; ranges are checked in `validate()` only. Sampling
is done by `pagemill_execution.sampling` and the kernels below it, beam search by `pagemill_engine.scheduler`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from pagemill_protocol.errors import PagemillError, invalid_field, show, show_python
from pagemill_protocol.request.keywords import CheckedKeywords
from pagemill_protocol.request.structured_outputs import StructuredOutputs

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 64 * 1024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 1024
MAX_PROMPT_LOGPROBS = 128 * 1024
"""Limit for all choices of one request together: about 10 MiB of JSON, and a quarter of a second of server time."""
MAX_ANSWER_VALUES = 2_000_000
"""Default limit for the log probabilities and token ids of an answer that is not streamed, of all its choices and
prompts: about 140 MB of JSON."""
MAX_LENGTH_PENALTY = 10.0
MIN_REPETITION_PENALTY = 1e-6
"""Logits are divided by it and must stay finite in float32."""
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
"""Wide enough for clients that send times in seconds; the range of clients and gateways is the same."""
LOW_PRIORITY = 50_000
"""From this priority on, a request is low-priority and yields to all others, as the lines of batches do."""


def is_low_priority(priority: int) -> bool:
    """Whether a request of this priority is low-priority, that is, yields to all more urgent requests."""
    return priority >= LOW_PRIORITY


class Bounds(NamedTuple):
    """Valid values of one numeric parameter: checked here and published in the OpenAPI document."""

    low: float
    high: float
    is_integer: bool = False
    excludes_low: bool = False
    neutral: tuple[float, ...] = ()
    """Values without effect, for parameters that change probabilities or draw from them: beam search allows only
    these."""


INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1
BOUNDS: dict[str, Bounds] = {
    "n": Bounds(1, MAX_CHOICES, is_integer=True),
    "best_of": Bounds(1, MAX_CHOICES, is_integer=True),
    "temperature": Bounds(0, 2, neutral=(0.0, 1.0)),
    "top_k": Bounds(-1, INT32_MAX, is_integer=True, neutral=(0, -1)),
    "top_p": Bounds(0, 1, excludes_low=True, neutral=(1.0,)),
    "min_p": Bounds(0, 1, neutral=(0.0,)),
    "presence_penalty": Bounds(-2, 2, neutral=(0.0,)),
    "frequency_penalty": Bounds(-2, 2, neutral=(0.0,)),
    "repetition_penalty": Bounds(MIN_REPETITION_PENALTY, 10, neutral=(1.0,)),
    "seed": Bounds(-INT64_MAX - 1, INT64_MAX, is_integer=True),
    "logprobs": Bounds(0, MAX_TOP_LOGPROBS, is_integer=True),
    "prompt_logprobs": Bounds(0, MAX_TOP_LOGPROBS, is_integer=True),
    "max_tokens": Bounds(1, INT32_MAX, is_integer=True),
    "min_tokens": Bounds(0, INT32_MAX, is_integer=True),
}
"""Bounds by parameter; `None` is also valid where the parameter's type allows it."""


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{name: bounds.neutral for name, bounds in BOUNDS.items() if bounds.neutral},
    "logit_bias": (None,),
    "allowed_token_ids": (None,),
    "bad_words": ([],),
    "logprob_token_ids": (None,),
    "prompt_logprobs": (None,),
}
"""Parameters that beam search cannot apply, because it ranks by the model's own probabilities, with the values that
have no effect."""


_FLAGS = ("use_beam_search", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize")
_MARKERS = "Log probabilities are dictionaries by token id. Remove it."


class RequestOutputKind(IntEnum):
    """Contents of each output of a stream. Names and values are vLLM's."""

    CUMULATIVE = 0
    """All text so far."""
    DELTA = 1
    """Only what is new since the previous output."""
    FINAL_ONLY = 2
    """A single output at the end."""


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, metaclass=CheckedKeywords):
    """How tokens are chosen and when a choice ends.

    Names and meaning are those of the OpenAI API and of vLLM's `SamplingParams`. Callers of the offline API may change
    their object between calls, since each call copies it; Pagemill's own code never changes one.
    """

    NO_EFFECT: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "extra_args": ((None, {}), "No plugin reads it. Remove it."),
        "flat_logprobs": ((False,), _MARKERS),
        "guided_decoding": ((None,), "Send structured_outputs=StructuredOutputsParams(...)."),
        "logits_processors": (
            (None, []),
            "Python cannot run within a step. Use logit_bias, bad_words, allowed_token_ids or structured_outputs.",
        ),
        "skip_reading_prefix_cache": ((None, False), "Make the LLM with enable_prefix_caching=False."),
        "spaces_between_special_tokens": ((True,), "Text is that of the model's decoder. Remove it."),
    }
    """Parameters of vLLM's class with the values that have no effect; other values are refused with the remedy."""

    n: int = 1
    """Choices per prompt."""
    best_of: int | None = None
    """Choices generated per prompt, of which the `n` with the highest mean log probability are returned; with
    `use_beam_search` the number of beams. `None`: `n`."""
    use_beam_search: bool = False
    """Search for the most likely answers instead of sampling. Temperature and seed have no effect then."""
    length_penalty: float = 1.0
    """Beam search: exponent of the number of tokens by which an answer's log probability is divided. Values above 0
    favour longer answers."""
    early_stopping: bool | Literal["never"] = False
    """Beam search: when to end once as many answers as beams are complete. True: at once. False: when no running beam
    of the current length can beat the worst answer. "never": when no beam of any length can."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy decoding."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probabilities sum to at least this."""
    min_p: float = 0.0
    """Exclude tokens whose probability is below this share of the most likely token's."""
    seed: int | None = None
    """Random seed, 0 to 2**63-1; `None`: the server draws one."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens that occur in prompt or output (CTRL, arXiv
    1909.05858)."""
    logit_bias: dict[int, float] | None = None
    """Values added to the logits, by token id."""
    logprobs: int | None = None
    """Number of most likely tokens whose log probabilities are reported besides the chosen token's; `None`: no
    report."""
    prompt_logprobs: int | None = None
    """The same number for each prompt token but the first."""
    logprob_token_ids: list[int] | None = None
    """Report the log probabilities of the chosen token and of these tokens, in place of the most likely ones."""
    bad_words: list[str] = []
    """Texts that must not occur in the output: a token that would complete one is excluded."""
    bad_word_token_ids: list[list[int]] = []
    """Token ids of `bad_words`, set by code that has a tokenizer (`pagemill_api.text.bad_words`), not by callers."""
    allowed_token_ids: list[int] | None = None
    """The only tokens that may be sampled; `None`: all."""
    stop: list[str] = []
    """Strings that end the choice; not part of the text unless `include_stop_str_in_output`."""
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    """Number of generated tokens before which no end-of-sequence or stop token is sampled."""
    max_tokens: int | None = 16
    """Maximum number of generated tokens; `None`: up to the model's context."""
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    """The form that each choice must have; `None`: any."""
    detokenize: bool = True
    """Offline API: if false, outputs have token ids and no text."""
    truncate_prompt_tokens: int | None = None
    """Offline API: number of the prompt's last tokens to keep; -1: as many as leave `max_tokens` of the context."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """`AsyncLLM`: the contents of each output."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def num_alternatives(self) -> int | None:
        """The number of reported tokens beside the chosen one, or None if no log probabilities are reported."""
        return self.logprobs if self.logprob_token_ids is None else len(self.logprob_token_ids)

    @property
    def num_sequences(self) -> int:
        """Number of sequences that an engine runs in parallel for one prompt."""
        return self.best_of or self.n

    @property
    def num_reported(self) -> int:
        """Number of choices that an engine's scheduler reports: all candidates, or the results of a beam search."""
        return self.n if self.use_beam_search else self.num_sequences

    def truncate_prompt(self, token_ids: list[int], max_model_len: int) -> list[int]:
        """Return the part of a prompt that `truncate_prompt_tokens` keeps: its last tokens.

        -1 keeps the tokens that fit beside `max_tokens`. `max_model_len` 0: not known, nothing is removed.
        """
        cut = self.truncate_prompt_tokens
        if cut == -1:
            cut = max(1, max_model_len - (self.max_tokens or 1)) if max_model_len else None
        return token_ids if cut is None else token_ids[-cut:]

    def validate(self, vocab_size: int | None = None) -> SamplingParams:
        """Return self. Raises `PagemillError` (400) that names the first field of a wrong type or out of range."""
        for name, bounds in BOUNDS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                _check_bounds(name, value, bounds)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise invalid_field(
                "min_tokens", f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})."
            )
        for flag in _FLAGS:
            if not isinstance(getattr(self, flag), bool):
                raise invalid_field(flag, f"{flag} must be True or False, got {show_python(getattr(self, flag))}.")
        if self.stop and not self.detokenize:
            raise invalid_field("stop", "stop needs the text. Send detokenize=True, or use stop_token_ids.")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens != -1:
            check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, INT32_MAX)
        self._validate_structured_outputs()
        self._validate_stops(vocab_size)
        self._validate_logit_bias(vocab_size)
        self._validate_token_lists(vocab_size)
        _check_choice(self, vocab_size)
        return self

    def _validate_structured_outputs(self) -> None:
        """Check type and size of the form; `pagemill_api.grammars.check` checks that it can be compiled."""
        if self.structured_outputs is None:
            return
        if not isinstance(self.structured_outputs, StructuredOutputs):
            raise invalid_field(
                "structured_outputs",
                f"structured_outputs must be StructuredOutputs, got {show_python(self.structured_outputs)}.",
            )
        self.structured_outputs.validate()
        if self.use_beam_search:
            raise invalid_field(
                "structured_outputs",
                "structured_outputs does not go with use_beam_search. Remove one of them; `n` gives several answers.",
            )

    def _validate_stops(self, vocab_size: int | None) -> None:
        _check_list("stop", self.stop, "strings")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise invalid_field("stop", f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed.")
        for text in self.stop:
            if not isinstance(text, str):
                raise invalid_field("stop", f"stop must be a list of strings, but it holds {show_python(text)}.")
            if not text or len(text) > MAX_STOP_STRING_CHARS:
                raise invalid_field(
                    "stop", f"Each stop string must have 1 to {MAX_STOP_STRING_CHARS} characters, got {len(text)}."
                )
        _check_list("stop_token_ids", self.stop_token_ids, "token ids")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise invalid_field("stop_token_ids", f"At most {MAX_STOP_TOKEN_IDS} stop token ids are allowed.")
        for token_id in self.stop_token_ids:
            _check_token_id("stop_token_ids", token_id, vocab_size)

    def _validate_token_lists(self, vocab_size: int | None) -> None:
        _check_token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS, vocab_size)
        _check_token_ids("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS, vocab_size)
        _check_list("bad_words", self.bad_words, "strings")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise invalid_field(
                "bad_words", f"bad_words has {len(self.bad_words)} strings; at most {MAX_BAD_WORDS} are allowed."
            )
        for word in self.bad_words:
            if not isinstance(word, str) or not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
                raise invalid_field(
                    "bad_words",
                    f"bad_words must be a list of strings of 1 to {MAX_BAD_WORD_CHARS} characters that are not all "
                    f"white space, but it holds {show_python(word)}.",
                )

        _check_list("bad_word_token_ids", self.bad_word_token_ids, "lists of token ids")
        for token_ids in self.bad_word_token_ids:
            _check_list("bad_word_token_ids", token_ids or None, "lists of token ids that are not empty")
            for token_id in token_ids:
                _check_token_id("bad_word_token_ids", token_id, vocab_size)

    def _validate_logit_bias(self, vocab_size: int | None) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, dict):
            raise invalid_field(
                "logit_bias", f"logit_bias must be a dictionary by token id, got {show_python(self.logit_bias)}."
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise invalid_field(
                "logit_bias", f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are allowed."
            )
        for token_id, bias in self.logit_bias.items():
            _check_token_id("logit_bias", token_id, vocab_size)
            _check_number("logit_bias", bias, -100.0, 100.0)


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, metaclass=CheckedKeywords):
    """The parameters of one beam search of the offline API: those of vLLM's `BeamSearchParams`, and
    `early_stopping`."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Only 0 and 1 are allowed and have the same effect: scores are the model's own log probabilities."""
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | Literal["never"] = False
    stop_token_ids: list[int] = []


def stream_conflict(*, use_beam_search: bool, num_sequences: int, n: int) -> str | None:
    """Return why an answer whose choices are selected at its end cannot be streamed, or None."""
    if use_beam_search:
        return "`stream: true` does not go with `use_beam_search`: beams are chosen at their end. Send `stream: false`."
    if num_sequences > n:
        return (
            f"`stream: true` does not go with `best_of` ({num_sequences}) above `n` ({n}): the choice is made at the "
            "end. Send `stream: false`, or `best_of` equal to `n`."
        )
    return None


def _check_choice(sampling: SamplingParams, vocab_size: int | None) -> None:
    """Raise `PagemillError` (400) when `best_of` or beam search contradicts the other parameters."""
    width = sampling.best_of if sampling.best_of is not None else sampling.n
    if width < sampling.n:
        raise invalid_field(
            "best_of", f"best_of ({width}) must be at least n ({sampling.n}). Raise best_of or lower n."
        )
    if sampling.use_beam_search:
        _check_search(sampling, vocab_size)
        return
    if sampling.length_penalty != 1.0 or isinstance(sampling.length_penalty, bool):
        raise _only_with_beams("length_penalty", sampling.length_penalty)
    if sampling.early_stopping is not False:
        raise _only_with_beams("early_stopping", sampling.early_stopping)
    if sampling.greedy and width > sampling.n:
        raise invalid_field(
            "best_of", f"best_of ({width}) with temperature 0 would choose among equal answers. Raise temperature."
        )


def _check_search(sampling: SamplingParams, vocab_size: int | None) -> None:
    for name, neutral in _NEUTRAL.items():
        value = getattr(sampling, name)
        if value not in neutral:
            allowed = " or ".join(f"{each:g}" for each in neutral if isinstance(each, int | float))
            raise invalid_field(
                name,
                f"{name} ({show(value)}) does not go with use_beam_search, which ranks by the model's own "
                f"probabilities. Remove {name}{f' (or send {allowed})' if allowed else ''}, or use_beam_search.",
            )
    if sampling.stop:
        raise invalid_field(
            "stop",
            f"stop ({len(sampling.stop)} strings) does not go with use_beam_search. Use stop_token_ids, or remove it.",
        )
    penalty = sampling.length_penalty
    is_number = isinstance(penalty, int | float) and not isinstance(penalty, bool)
    if not is_number or not abs(penalty) <= MAX_LENGTH_PENALTY:
        bound = f"{MAX_LENGTH_PENALTY:g}"
        raise invalid_field(
            "length_penalty",
            f"length_penalty must be a finite number from -{bound} to {bound}, got {show_python(penalty)}.",
        )
    if not isinstance(sampling.early_stopping, bool) and sampling.early_stopping != "never":
        raise invalid_field(
            "early_stopping",
            f'early_stopping must be false, true or "never", got {show_python(sampling.early_stopping)}.',
        )
    if vocab_size is not None and sampling.num_sequences > vocab_size:
        raise invalid_field(
            "best_of",
            f"{sampling.num_sequences} beams are more than the model has tokens ({vocab_size}). Ask for fewer.",
        )


def _only_with_beams(name: str, value: Any) -> PagemillError:
    return invalid_field(
        name, f"{name} ({show(value)}) is only for beam search. Send use_beam_search true, or remove {name}."
    )


_OPTIONAL = {"best_of", "seed", "logprobs", "prompt_logprobs", "max_tokens"}


def _check_bounds(param: str, value: Any, bounds: Bounds) -> None:
    if bounds.is_integer:
        check_int(param, value, int(bounds.low), int(bounds.high))
    else:
        _check_number(param, value, bounds.low, bounds.high, exclusive_low=bounds.excludes_low)


def check_int(param: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise invalid_field(param, f"{param} must be an integer from {low} to {high}, got {show_python(value)}.")


def _check_number(param: str, value: Any, low: float, high: float, *, exclusive_low: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (exclusive_low and value == low):
        bound = "above" if exclusive_low else "from"
        raise invalid_field(
            param, f"{param} must be a finite number {bound} {low:g} to {high:g}, got {show_python(value)}."
        )


def _check_list(param: str, value: Any, of_what: str) -> None:
    if not isinstance(value, list):
        raise invalid_field(param, f"{param} must be a list of {of_what}, got {show_python(value)}.")


def _check_token_ids(param: str, token_ids: Any, most: int, vocab_size: int | None) -> None:
    if token_ids is None:
        return
    _check_list(param, token_ids, "token ids")
    if not 0 < len(token_ids) <= most:
        raise invalid_field(
            param, f"{param} must have 1 to {most} token ids, got {len(token_ids)}. Remove it to set none."
        )
    if set(map(type, token_ids)) != {int} or min(token_ids) < 0 or max(token_ids) >= (vocab_size or 2**31):
        for token_id in token_ids:
            _check_token_id(param, token_id, vocab_size)
    if len(set(token_ids)) < len(token_ids):
        raise invalid_field(param, f"{param} names a token twice. Send each token id once.")


def _check_token_id(param: str, token_id: Any, vocab_size: int | None) -> None:
    high = vocab_size if vocab_size is not None else 2**31
    if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < high:
        raise invalid_field(param, f"{param} names token {show_python(token_id)}; token ids go from 0 to {high - 1}.")
