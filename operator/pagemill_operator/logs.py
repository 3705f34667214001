"""Log lines on standard error, one event a line."""

from __future__ import annotations

import logging


def configure(level: str) -> None:
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    # kopf calls each failed try of each request an error; metrics and the ages of the watches tell it better.
    logging.getLogger("kopf").setLevel(logging.CRITICAL if level != "DEBUG" else logging.DEBUG)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
