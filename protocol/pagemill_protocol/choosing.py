"""What `best_of` and beam search allow beside them, and the offline API's parameters of a beam search.

Both generate more than they return and choose at the end. Ranges of single sampling values are checked by `sampling`;
how the choice is made is the engine's (`scheduler.beams`, `output.best_of`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from pagemill_protocol.errors import PagemillError, invalid_field, show
from pagemill_protocol.keywords import CheckedKeywords

if TYPE_CHECKING:
    from pagemill_protocol.sampling import SamplingParams

MAX_LENGTH_PENALTY = 10.0
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 1.0),
    "top_k": (0, -1),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": (None,),
}
"""What changes probabilities or draws from them, with the values that do neither."""


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, metaclass=CheckedKeywords):
    """One beam search of the offline API. Names are those of vLLM's `BeamSearchParams`, and `early_stopping`."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Only 0 and 1 are allowed, and they mean the same: scores are the model's own log probabilities."""
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | Literal["never"] = False
    stop_token_ids: list[int] = []


def check(sampling: SamplingParams, vocab_size: int | None) -> None:
    """Raise `PagemillError` (400) when `best_of` or the search contradicts the other parameters."""
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


def stream_conflict(*, use_beam_search: bool, num_sequences: int, n: int) -> str | None:
    """Why an answer that is chosen at its end cannot be streamed; `None`: it can."""
    if use_beam_search:
        return "`stream: true` does not go with `use_beam_search`: beams are chosen at their end. Send `stream: false`."
    if num_sequences > n:
        return (
            f"`stream: true` does not go with `best_of` ({num_sequences}) above `n` ({n}): the choice is made at the "
            "end. Send `stream: false`, or `best_of` equal to `n`."
        )
    return None


def _check_search(sampling: SamplingParams, vocab_size: int | None) -> None:
    for name, neutral in _NEUTRAL.items():
        value = getattr(sampling, name)
        if value not in neutral:
            allowed = " or ".join(f"{each:g}" for each in neutral if each is not None)
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
            f"length_penalty must be a finite number from -{bound} to {bound}, got {show(penalty)}.",
        )
    if not isinstance(sampling.early_stopping, bool) and sampling.early_stopping != "never":
        raise invalid_field(
            "early_stopping",
            f'early_stopping must be false, true or "never", got {show(sampling.early_stopping)}.',
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
