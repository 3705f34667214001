"""Reads all engines again and again, and shows what came in between: once, or until it is interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from pagemill.top.reading import Reading, Row, row_of
from pagemill.top.sources import find_source
from pagemill.top.table import as_table


async def intervals(
    runtime_folder: Path, context: str | None, kubeconfig: Path | None, namespace: str | None, interval_s: float
) -> AsyncGenerator[tuple[str, list[Row]], None]:
    """Where the rows are from and the rows, sorted, every `interval_s`. Raises `TopError`."""
    source = await find_source(runtime_folder, context, kubeconfig, namespace)
    try:
        before = _by_pod(await source.read())
        while True:
            await asyncio.sleep(interval_s)
            now = _by_pod(await source.read())
            yield source.where, [row_of(before.get(key), reading) for key, reading in sorted(now.items())]
            before = now
    finally:
        await source.close()


async def read_interval(
    runtime_folder: Path, context: str | None, kubeconfig: Path | None, namespace: str | None, interval_s: float
) -> tuple[str, list[Row]]:
    """The first one."""
    async with aclosing(intervals(runtime_folder, context, kubeconfig, namespace, interval_s)) as found:
        return await anext(found)


async def follow(
    runtime_folder: Path, context: str | None, kubeconfig: Path | None, namespace: str | None, interval_s: float
) -> None:
    """Until it is cancelled, on a terminal."""
    found = intervals(runtime_folder, context, kubeconfig, namespace, interval_s)
    with Live(console=Console(highlight=False, emoji=False), screen=True, auto_refresh=False) as live:
        async with aclosing(found):
            async for where, rows in found:
                live.update(Text(as_table(where, rows), no_wrap=True, overflow="ellipsis"), refresh=True)


def _by_pod(readings: list[Reading]) -> dict[tuple[str, str], Reading]:
    return {(reading.deployment, reading.pod): reading for reading in readings}
