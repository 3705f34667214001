"""The errors and headers about limits, in the form that OpenAI's clients understand."""

from __future__ import annotations

import math

from pagemill_gateway.limits.store import Level, Reason, ReservationAnswer
from pagemill_protocol.errors import PagemillError
from pagemill_servers.keys.caller import Caller, Charge

Headers = dict[str, str]
_NAMES: dict[Reason, str] = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "concurrency": "sequences at once",
    "budget_day": "tokens per day",
    "budget_month": "tokens per month",
}


class Limited(PagemillError):
    """Status 429, with the remaining amount of every limit and whether a retry makes sense."""

    def __init__(
        self,
        message: str,
        *,
        type: str,
        code: str = "rate_limit_exceeded",
        retry_after_s: float | None = None,
        should_retry: bool = True,
        levels: Headers | None = None,
    ) -> None:
        super().__init__(message, status=429, type=type, code=code, retry_after_s=retry_after_s)
        self._should_retry = should_retry
        self._levels = levels or {}

    def headers(self) -> dict[str, str]:
        headers = dict(self._levels)
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
            headers["retry-after-ms"] = str(max(1, math.ceil(self.retry_after_s * 1000)))
        if not self._should_retry:
            headers["x-should-retry"] = "false"
        return headers


def refusal(charge: Charge, answer: ReservationAnswer, num_tokens: int, num_sequences: int = 1) -> Limited:
    """Return the error for a store's refusal of a request with these tokens and sequences."""
    limits, of_model = charge.limits, _of_model(charge)
    reason = answer.refused
    assert reason is not None
    levels = level_headers(answer)
    wait = f"Try again in {duration(answer.retry_after_s)}."
    if reason in ("budget_day", "budget_month"):
        limit = limits.tokens_per_day if reason == "budget_day" else limits.tokens_per_month
        return Limited(
            f"You exceeded your quota of {limit} {_NAMES[reason]}{of_model}; this request needs about {num_tokens}. "
            f"{wait}",
            type="insufficient_quota",
            code="insufficient_quota",
            retry_after_s=answer.retry_after_s,
            should_retry=False,
            levels=levels,
        )
    if reason == "tokens":
        used = f"Limit {limits.tokens_per_minute}, remaining {_remaining(answer.tokens)}, requested about {num_tokens}."
        kind = "tokens"
    elif reason == "requests":
        used, kind = f"Limit {limits.requests_per_minute}.", "requests"
    else:
        used, kind = f"Limit {limits.concurrency}, requested {num_sequences}.", "requests"
    return Limited(
        f"Rate limit reached on {_NAMES[reason]}{of_model}. {used} {wait}",
        type=kind,
        retry_after_s=answer.retry_after_s,
        levels=levels,
    )


def too_large(charge: Charge, num_prompt_tokens: int, num_sequences: int) -> tuple[Reason, Limited] | None:
    """Return limit and error of a request that the limits can never admit; `None` if they can."""
    limits, of_model = charge.limits, _of_model(charge)
    if limits.concurrency is not None and num_sequences > limits.concurrency:
        return "concurrency", Limited(
            f"Request too large on {_NAMES['concurrency']}{of_model}. Limit {limits.concurrency}, this request runs "
            f"{num_sequences} (its prompts times `n`, `best_of` or beams). Ask for fewer in one request.",
            type="requests",
            should_retry=False,
        )
    bounds: tuple[tuple[Reason, int | None], ...] = (
        ("tokens", limits.tokens_per_minute),
        ("budget_day", limits.tokens_per_day),
        ("budget_month", limits.tokens_per_month),
    )
    for reason, limit in bounds:
        if limit is not None and num_prompt_tokens + num_sequences > limit:
            return reason, Limited(
                f"Request too large on {_NAMES[reason]}{of_model}. Limit {limit}, the prompt alone has "
                f"{num_prompt_tokens} and the answer at least {num_sequences}. Shorten it.",
                type="tokens",
                should_retry=False,
            )
    return None


def _of_model(charge: Charge) -> str:
    return f" for `{charge.model[:200]}`" if charge.model else ""


def check_model(caller: Caller, model: str) -> None:
    """Raise `PagemillError` 404 for a model that the caller may not use, as if it did not exist."""
    if not caller.may_use(model):
        raise no_such_model(model)


def no_such_model(model: str) -> PagemillError:
    return PagemillError(
        f"The model `{model[:200]}` does not exist or you do not have access to it.",
        status=404,
        param="model",
        code="model_not_found",
    )


def visible_to(caller: Caller, error: PagemillError, model: str) -> PagemillError:
    """Return the error without the list of models, if the caller may not use all of them."""
    hidden = caller.models is not None and error.code == "model_not_found"
    return no_such_model(model) if hidden else error


def level_headers(answer: ReservationAnswer) -> Headers:
    return {**_level("requests", answer.requests), **_level("tokens", answer.tokens)}


def _level(kind: str, level: Level | None) -> Headers:
    if level is None:
        return {}
    return {
        f"x-ratelimit-limit-{kind}": str(level.limit),
        f"x-ratelimit-remaining-{kind}": str(level.remaining),
        f"x-ratelimit-reset-{kind}": duration(level.reset_s),
    }


def _remaining(level: Level | None) -> int:
    return level.remaining if level is not None else 0


def duration(seconds: float) -> str:
    """Return a duration in OpenAI's form: `20ms`, `1.5s`, `6m0s`, `3h2m1s`."""
    ms = max(0, math.ceil(seconds * 1000))
    if ms < 1000:
        return f"{ms}ms" if ms else "0s"
    if ms < 60_000:
        return f"{ms / 1000:g}s"
    minutes, rest = divmod(math.ceil(ms / 1000), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"
