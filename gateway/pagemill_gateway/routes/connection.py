"""Work for a client lasts no longer than its connection."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from starlette.types import Receive


async def while_connected(work: Coroutine[None, None, None], receive: Receive) -> bool:
    """Run `work` until it ends, or cancel it at once when the client leaves; whether it ended by itself."""
    task = asyncio.ensure_future(work)
    departure = asyncio.ensure_future(_departure(receive))
    try:
        await asyncio.wait({task, departure}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        for each in (task, departure):
            each.cancel()
        await asyncio.gather(task, departure, return_exceptions=True)


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
