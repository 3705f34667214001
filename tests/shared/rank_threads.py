"""Runs the ranks of a group in threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def together(groups: list[Any], run: Callable[[Any], Any]) -> list[Any]:
    """Return what `run` returns or raises for each group, in the order of ranks."""
    found: dict[int, Any] = {}

    def work(group: Any) -> None:
        try:
            found[group.rank] = run(group)
        except Exception as error:
            found[group.rank] = error

    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return [found[rank] for rank in range(len(groups))]
