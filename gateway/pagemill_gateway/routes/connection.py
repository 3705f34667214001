"""Ends the work for a client when its connection ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from starlette.types import Receive

from pagemill_servers.direct import DirectResponse


async def run_while_connected(work: Awaitable[None], receive: Receive, direct: DirectResponse | None = None) -> bool:
    """Wait for `work`, and cancel it when the client disconnects. Return whether it ended by itself.

    `direct` reports the disconnection; without it, a task waits for the ASGI message.
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
        departing = asyncio.ensure_future(wait_until_disconnected(receive))
        departing.add_done_callback(leave)
    else:
        direct.on_disconnect = leave
        if direct.is_disconnected:
            leave()
    try:
        await work
    except asyncio.CancelledError:
        # As in `asyncio.timeout`, a cancellation by another task is propagated.
        if left and task.uncancel() <= num_cancels:
            return False
        raise
    finally:
        over = True
        if departing is not None:
            departing.cancel()
    if left:  # the work ended in spite of the cancellation
        task.uncancel()
    return True


async def wait_until_disconnected(receive: Receive) -> None:
    """Return when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
