"""The price of a replica per hour, from `--price-per-hour` or from the GPU price in the deployment's file."""

from __future__ import annotations

from collections.abc import Sequence

from pagemill.planning.accelerators import NAMES, find_accelerator
from pagemill.planning.choosing import Subject
from pagemill.planning.errors import PlanError
from pagemill.planning.forecast import is_positive

Prices = dict[str | None, float]
"""Prices of one replica per hour, by the accelerator's name; the key `None` has the price for all others."""


def prices_of(texts: Sequence[str]) -> Prices:
    """Parse prices such as `2.5` and `l4=0.8`. Raises `PlanError`."""
    prices: Prices = {}
    for text in texts:
        name, separator, number = text.rpartition("=")
        accelerator = find_accelerator(name) if separator else None
        if separator and accelerator is None:
            raise PlanError(f"--price-per-hour {text}: {name} is not a known accelerator; name one of {NAMES}")
        key = None if accelerator is None else accelerator.name
        try:
            price = float(number)
        except ValueError:
            price = 0.0
        if not is_positive(price):
            raise PlanError(f"--price-per-hour {text}: must be a number above 0, or ACCELERATOR=NUMBER such as l4=0.8")
        if key in prices:
            raise PlanError(f"--price-per-hour {text}: is a second price for the same device; give one")
        prices[key] = price
    return prices


def check_prices(subjects: Sequence[Subject], prices: Prices) -> None:
    """Refuse prices of accelerators that nothing is computed for. Raises `PlanError`."""
    names = {_name_of(subject) for subject in subjects}
    for name, price in prices.items():
        if name is not None and name not in names:
            raise PlanError(
                f"--price-per-hour {name}={price:g}: nothing is computed for {name}; add --accelerator {name}, or "
                "remove it"
            )


def _name_of(subject: Subject) -> str | None:
    return None if subject.accelerator is None else subject.accelerator.name


def price_of(subject: Subject, prices: Prices, num_ranks: int = 0) -> float | None:
    """Return the price of one replica per hour; `None` if it is unknown.

    That of a named accelerator is the price of one of the devices, of which several ranks have one each.
    """
    of_device, spec = prices.get(_name_of(subject)), subject.loaded.deployment.spec
    if of_device is not None and subject.accelerator is not None:
        return max(1, num_ranks) * of_device
    price = prices.get(None)
    if price is not None or spec.cost is None:
        return price
    has_devices = subject.accelerator is not None and num_ranks > 0
    return spec.cost.of_replica(num_ranks if has_devices else spec.resources.gpus)
