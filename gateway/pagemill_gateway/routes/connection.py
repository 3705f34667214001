"""Ends the work for a client with its connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from starlette.types import Receive

from pagemill_protocol.http.direct import DirectResponse


async def while_connected(work: Awaitable[None], receive: Receive, direct: DirectResponse | None = None) -> bool:
    """Wait for `work`, or cancel it at once when the client leaves; returns whether it ended by itself.

    `direct` says when the client leaves; without one a task waits for the message.
    """
    task = asyncio.current_task()
    assert task is not None
    num_cancels, left, over = task.cancelling(), False, False

    def leave(_: asyncio.Task[None] | None = None) -> None:
        nonlocal left
        if not over and not left:
            left = True
            task.cancel()

    departing: asyncio.Task[None] | None = None
    if direct is None:
        departing = asyncio.ensure_future(departure(receive))
        departing.add_done_callback(leave)
    else:
        direct.on_leave = leave
        if direct.has_left:
            leave()
    try:
        await work
    except asyncio.CancelledError:
        # As `asyncio.timeout` does: a cancellation by another task goes on.
        if left and task.uncancel() <= num_cancels:
            return False
        raise
    finally:
        over = True
        if departing is not None:
            departing.cancel()
    if left:  # the work ended all the same
        task.uncancel()
    return True


async def departure(receive: Receive) -> None:
    """Return when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
