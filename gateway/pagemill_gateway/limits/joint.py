"""Reservations of one request in its accounts: its key's, and those of its model where the key limits that.

All of them are made or none. Each account is a `Store`'s, which knows of one only; `limiter` says which ones they are.
Most requests have one account, which needs no shares (`SingleReservation`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pagemill_gateway.limits.store import ExtensionRequest, Level, ReservationAnswer, ReservationRequest, Store
from pagemill_servers.keys.caller import Charge


class RefusedReservation(NamedTuple):
    charge: Charge
    ask: ReservationRequest
    answer: ReservationAnswer


class SingleReservation:
    def __init__(self, store: Store, charge: Charge, ask: ReservationRequest) -> None:
        self._store = store
        self._charge = charge
        self._ask = ask

    async def reserve(self) -> ReservationAnswer | RefusedReservation:
        answer = await self._store.reserve(self._ask)
        return answer if answer.refused is None else RefusedReservation(self._charge, self._ask, answer)

    async def extend(self, used: int, tokens: int) -> int:
        """Add up to `tokens`, and return how many. `used`: as of `ExtensionRequest`."""
        ask = self._ask
        return await self._store.extend(ExtensionRequest(ask.account, ask.lease, used, tokens, ask.limits))

    def settle(self, tokens: int) -> None:
        self._store.settle(self._ask.lease, tokens)


class _Held:
    def __init__(self, ask: ReservationRequest) -> None:
        self.ask = ask
        self.spare = 0
        """Tokens that this account granted and another one did not."""


class JointReservation:
    def __init__(self, store: Store, charges: Sequence[Charge], asks: Sequence[ReservationRequest]) -> None:
        """`asks`: that of each charge, all for the same tokens, with leases of their own."""
        self._store = store
        self._charges = charges
        self._held = [_Held(ask) for ask in asks]
        self.granted = 0

    async def reserve(self) -> ReservationAnswer | RefusedReservation:
        """Reserve in all accounts. Return the least levels, or the first refusal, after which nothing is reserved."""
        answers: list[ReservationAnswer] = []
        try:
            for charge, each in zip(self._charges, self._held, strict=True):
                answer = await self._store.reserve(each.ask)
                if answer.refused is not None:
                    self._undo(len(answers))
                    return RefusedReservation(charge, each.ask, answer)
                answers.append(answer)
        except BaseException:
            self._undo(len(answers))
            raise
        self.granted = min(answer.granted for answer in answers)
        return ReservationAnswer(
            requests=_least([answer.requests for answer in answers]),
            tokens=_least([answer.tokens for answer in answers]),
            granted=self.granted,
        )

    async def extend(self, used: int, tokens: int) -> int:
        """Add up to `tokens` in all accounts, and return how many. `used`: as of `ExtensionRequest`."""
        granted = tokens
        for at, each in enumerate(self._held):
            own = min(each.spare, granted)
            each.spare -= own
            more, ask = 0, each.ask
            try:
                if own < granted:
                    asked = ExtensionRequest(ask.account, ask.lease, used, granted - own, ask.limits)
                    more = await self._store.extend(asked)
            except BaseException:
                self._return(granted, at)
                each.spare += own
                raise
            self._return(granted - own - more, at)
            granted = own + more
        return granted

    def settle(self, tokens: int) -> None:
        for each in self._held:
            self._store.settle(each.ask.lease, tokens)

    def _undo(self, number: int) -> None:
        for each in self._held[:number]:
            self._store.undo(each.ask.lease)

    def _return(self, tokens: int, number: int) -> None:
        for each in self._held[:number]:
            each.spare += tokens


def _least(levels: Sequence[Level | None]) -> Level | None:
    return min((level for level in levels if level is not None), key=lambda level: level.remaining, default=None)
