"""A follower's process that differs from rank 0 in what its environment names: the model's folder, or a version."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from pagemill_execution.runners.ranks import identity
from pagemill_execution.starting import rank_process

VARIABLE = "DIFFERENT_RANK"
OTHER_VERSION = "0.0.1"


def main() -> None:
    folder, settings_from = os.environ[VARIABLE], rank_process.settings_from
    if folder == OTHER_VERSION:
        identity.version = lambda name: OTHER_VERSION  # type: ignore[attr-defined]
    else:

        def moved(data: bytes) -> Any:
            return msgspec.structs.replace(settings_from(data), path=folder)

        rank_process.settings_from = moved  # type: ignore[attr-defined]
    rank_process.main()


if __name__ == "__main__":
    main()
