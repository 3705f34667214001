"""The caller of a request and its limits, as plain values: the contents of an API key's entry.

`entries` reads entries, `keys` finds the caller of a request, the stores count usage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple, get_args

PriorityClass = Literal["high", "normal", "low"]
PRIORITY_CLASSES: tuple[PriorityClass, ...] = get_args(PriorityClass)
_CLASS_OFFSET: dict[PriorityClass, int] = {"high": -10_000, "normal": 0, "low": 10_000}
_BATCH_OFFSET = 100_000
MAX_OWN_PRIORITY = 999
"""Range in which a client's own `priority` moves its request within the priority class of its key."""


class Limits(NamedTuple):
    """Usage limits; `None`: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None
    """Sequences generated at once: each of the prompts of a request counts with its `n`, `best_of` or beams."""
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    """Limits per calendar day and month in UTC."""

    @property
    def none(self) -> bool:
        return self == NO_LIMITS


NO_LIMITS = Limits()


class Charge(NamedTuple):
    """An account to which a request is charged, and the limits of the account."""

    account: str
    limits: Limits
    model: str = ""
    """The model or adapter whose requests alone count; empty: all of the key's."""


class Caller(NamedTuple):
    """The sender of one request, as its key's entry describes it."""

    key_hash: str = ""
    """Never shown or logged; empty: the gateway requires no key."""
    tenant: str = ""
    """Empty: the key belongs to no tenant."""
    models: frozenset[str] | None = None
    """Model names, as clients send them, that this key may use; `None`: all."""
    limits: Limits = NO_LIMITS
    model_limits: tuple[tuple[str, Limits], ...] = ()
    """Further limits for the requests of one model, alias or adapter, by its name."""
    priority_class: PriorityClass = "normal"
    objective: float | None = None
    """Percentage of the tenant's requests that must be answered; `None`: none is declared."""
    is_admin: bool = False
    """Whether the key may see the whole platform, and so what all tenants do (`role=admin`)."""
    is_batch: bool = False
    """The request is a line of a batch: it is low-priority and yields to all live requests."""

    @property
    def account(self) -> str:
        """The account to which usage is charged: that of the tenant, else that of the key."""
        if self.tenant:
            return f"tenant:{self.tenant}"
        return f"key:{self.key_hash[:32]}" if self.key_hash else ""

    def declared_limits(self) -> Iterator[tuple[str, str]]:
        """Yield the model and the name of each limit; the model is empty for those of the key."""
        for model, limits in (("", self.limits), *self.model_limits):
            yield from ((model, name) for name, value in limits._asdict().items() if value is not None)

    def charges(self, names: Collection[str]) -> Iterator[Charge]:
        """Yield what a request for these names is charged to, without accounts that have no limit."""
        if not self.limits.none:
            yield Charge(self.account, self.limits)
        for name, limits in self.model_limits:
            if name in names:
                yield Charge(f"{self.account}/model:{name}", limits, name)

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models

    def priority(self, asked: int) -> int:
        """Return the priority of a request whose client sent `asked`; smaller is served first."""
        if not self.key_hash and not self.is_batch:
            return asked
        if self.is_batch:
            return _BATCH_OFFSET + _CLASS_OFFSET[self.priority_class]
        return _CLASS_OFFSET[self.priority_class] + max(-MAX_OWN_PRIORITY, min(asked, MAX_OWN_PRIORITY))


ANONYMOUS = Caller()
