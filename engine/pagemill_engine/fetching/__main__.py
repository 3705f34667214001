"""`python -m pagemill_engine.fetching --source S --target FOLDER`: the process of the loader Job. A second pair is what
drafts for the model.

It reports its progress as JSON lines on stdout, and a failure as the termination message, the last line on stderr.

A failure is reported by the container's end. One that an earlier run has reported is tried again inside the container,
because the kubelet's pauses before it starts a container again grow to five minutes, and what was missing may come at
any time.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from pagemill_engine.failure import KUBERNETES_LOG, Termination, write_termination
from pagemill_engine.fetching.settings import LoaderSettings, reported_failure, trying_since_s, tune_library
from pagemill_protocol.source_errors import FetchError

MODULE = "pagemill_engine.fetching"
FIELDS = ("spec.model.source", "spec.engine.speculative.source")
"""The fields of the sources, in the order of the arguments."""
PAUSE_S = 5.0
PATIENCE_S = 300.0
"""Seconds after which a container ends all the same: the longest pause of a kubelet."""
MENDED_BY_ENVIRONMENT = frozenset({"Unauthorized"})
"""Reasons that only a new container can lose: environment variables are read when one starts."""
SIGTERM_EXIT_CODE = 128 + signal.SIGTERM


def main(argv: Sequence[str] | None = None) -> int:
    """Run the loader and return its exit code.

    0: the model is loaded. 1: failed, with a termination message. 2: wrong command line.
    """
    # A container's first process ignores SIGTERM otherwise. The next run continues from the part files.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(SIGTERM_EXIT_CODE))
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Load a model.")
    parser.add_argument(
        "--source", action="append", required=True, help="hf://, s3://, gs://, oci:// or another scheme"
    )
    parser.add_argument("--target", action="append", type=Path, required=True, help="folder for a source's model")
    parser.add_argument("--kernels", type=Path, help="folder for compiled kernels, created if it is missing")
    parser.add_argument("--size-limit-bytes", type=int, help="size limit of all models in the target's parent folder")
    parser.add_argument("--evict", action="store_true", help="remove unused models if space is needed")
    parser.add_argument(
        "--termination-log",
        type=Path,
        default=KUBERNETES_LOG,
        help="written if it exists",
    )
    given = sys.argv[1:] if argv is None else argv
    arguments = parser.parse_args(given)
    if len(arguments.source) != len(arguments.target) or len(arguments.source) > len(FIELDS):
        parser.error("give --source and --target of the model, and perhaps those of what drafts for it")
    tune_library()
    from pagemill_engine.fetching.load import load

    for field, source, target in zip(FIELDS, arguments.source, arguments.target, strict=False):
        settings = LoaderSettings(
            source,
            target,
            arguments.termination_log,
            arguments.kernels,
            size_limit_bytes=arguments.size_limit_bytes,
            evicts=arguments.evict,
        )

        def exit_immediately(error: FetchError, field: str = field) -> None:
            """Exit without waiting for the downloads of other files; the next run continues from their part files."""
            _explain(error, field, arguments.termination_log)
            _try_again(error.reason, given)
            os._exit(1)

        try:
            load(settings, _report, exit_immediately)
        except FetchError as error:
            _explain(error, field, arguments.termination_log)
            _try_again(error.reason, given)
            return 1
    return 0


def _explain(error: FetchError, field: str, log: Path) -> None:
    termination = Termination(error.reason, error.message, field)
    sys.stderr.write(write_termination(termination, str(log) if log.exists() else None) + "\n")
    sys.stderr.flush()


def _try_again(reason: str, argv: Sequence[str]) -> None:
    """Run this program again after a pause, in this process; return if the container must end instead.

    Other threads, such as downloads, end with the pause.
    """
    reported = reported_failure()
    if reported is None:
        return
    waited_s = time.monotonic() - trying_since_s()
    is_reported = reported.exists() and reported.read_text() == reason
    if not is_reported or reason in MENDED_BY_ENVIRONMENT or waited_s > PATIENCE_S:
        reported.write_text(reason)
        return
    time.sleep(PAUSE_S)
    os.execv(sys.executable, [sys.executable, "-m", MODULE, *argv])


def _report(**fields: Any) -> None:
    sys.stdout.write(orjson.dumps(fields).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
