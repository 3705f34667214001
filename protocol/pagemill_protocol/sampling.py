"""Sampling parameters: one immutable value from the HTTP door to the sampler.

Used by the offline API (`LLM.generate`), the dialects and the engine alike; `validate()` is the only place where their
ranges are checked. It does not sample: `pagemill_engine.sampling` and the kernels below it do.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pagemill_protocol import choosing
from pagemill_protocol.errors import invalid_field, show
from pagemill_protocol.keywords import CheckedKeywords

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MIN_REPETITION_PENALTY = 1e-6
"""Logits are divided by it, and have to stay finite in float32."""
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
"""Of a request among others: wide enough for who sends times in seconds, the same for clients and gateways."""


_FLAGS = ("use_beam_search", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, metaclass=CheckedKeywords):
    """How tokens are chosen and when a choice ends.

    Names and meaning are those of the OpenAI API and of vLLM's `SamplingParams`.
    """

    n: int = 1
    """Choices per prompt."""
    best_of: int | None = None
    """Choices generated per prompt, of which the `n` with the highest mean log probability are returned; with
    `use_beam_search` the number of beams. `None`: `n`."""
    use_beam_search: bool = False
    """Search for the most likely answers instead of drawing tokens. Temperature and seed mean nothing then."""
    length_penalty: float = 1.0
    """Beam search: an answer scores its log probability divided by its number of tokens to this power; above 0 longer
    answers win more often."""
    early_stopping: bool | Literal["never"] = False
    """Beam search ends when as many answers as there are beams are complete and: true, at once; false, no running beam
    of the length reached beats the worst of them; "never", none of any length can."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities sum to at least this."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one."""
    seed: int | None = None
    """Random seed, 0 to 2**63-1; `None` lets the server draw one."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output (CTRL, arXiv 1909.05858)."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits, by token id."""
    logprobs: int | None = None
    """`None`: none. k: log probability of each chosen token and of the k most likely ones."""
    stop: list[str] = []
    """Strings that end the choice; not part of the text unless `include_stop_str_in_output`."""
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    """No end-of-sequence or stop token before this many generated tokens."""
    max_tokens: int | None = 16
    """Tokens to generate at most; `None`: up to the model's context."""
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def num_sequences(self) -> int:
        """Sequences that an engine runs side by side for one prompt."""
        return self.best_of or self.n

    @property
    def num_reported(self) -> int:
        """Choices that an engine's scheduler reports: all that may be chosen from, or what a search found."""
        return self.n if self.use_beam_search else self.num_sequences

    def validate(self, vocab_size: int | None = None) -> SamplingParams:
        """Return self, or raise `PagemillError` (400) that names the first field of a wrong type or out of range."""
        check_int("n", self.n, 1, MAX_CHOICES)
        if self.best_of is not None:
            check_int("best_of", self.best_of, 1, MAX_CHOICES)
        _check_number("temperature", self.temperature, 0.0, 2.0)
        check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_number("top_p", self.top_p, 0.0, 1.0, exclusive_low=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 10.0)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise invalid_field(
                "min_tokens", f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})."
            )
        for flag in _FLAGS:
            if not isinstance(getattr(self, flag), bool):
                raise invalid_field(flag, f"{flag} must be True or False, got {show(getattr(self, flag))}.")
        self._validate_stops(vocab_size)
        self._validate_logit_bias(vocab_size)
        choosing.check(self, vocab_size)
        return self

    def _validate_stops(self, vocab_size: int | None) -> None:
        _check_list("stop", self.stop, "strings")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise invalid_field("stop", f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed.")
        for text in self.stop:
            if not isinstance(text, str):
                raise invalid_field("stop", f"stop must be a list of strings, but it holds {show(text)}.")
            if not text or len(text) > MAX_STOP_STRING_CHARS:
                raise invalid_field(
                    "stop", f"Each stop string must have 1 to {MAX_STOP_STRING_CHARS} characters, got {len(text)}."
                )
        _check_list("stop_token_ids", self.stop_token_ids, "token ids")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise invalid_field("stop_token_ids", f"At most {MAX_STOP_TOKEN_IDS} stop token ids are allowed.")
        for token_id in self.stop_token_ids:
            _check_token_id("stop_token_ids", token_id, vocab_size)

    def _validate_logit_bias(self, vocab_size: int | None) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, dict):
            raise invalid_field(
                "logit_bias", f"logit_bias must be a dictionary by token id, got {show(self.logit_bias)}."
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise invalid_field(
                "logit_bias", f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are allowed."
            )
        for token_id, bias in self.logit_bias.items():
            _check_token_id("logit_bias", token_id, vocab_size)
            _check_number("logit_bias", bias, -100.0, 100.0)


def check_int(param: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise invalid_field(param, f"{param} must be an integer from {low} to {high}, got {show(value)}.")


def _check_number(param: str, value: Any, low: float, high: float, *, exclusive_low: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (exclusive_low and value == low):
        bound = "above" if exclusive_low else "from"
        raise invalid_field(param, f"{param} must be a finite number {bound} {low:g} to {high:g}, got {show(value)}.")


def _check_list(param: str, value: Any, of_what: str) -> None:
    if not isinstance(value, list):
        raise invalid_field(param, f"{param} must be a list of {of_what}, got {show(value)}.")


def _check_token_id(param: str, token_id: Any, vocab_size: int | None) -> None:
    high = vocab_size if vocab_size is not None else 2**31
    if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < high:
        raise invalid_field(param, f"{param} names token {show(token_id)}; token ids go from 0 to {high - 1}.")
