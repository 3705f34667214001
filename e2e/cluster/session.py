"""Runs one command on a new one-node cluster: builds what is missing, starts the cluster, and removes it afterwards.

It prints the seconds of every phase at the end, so that a slow run shows where its time went.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType

import binaries
import images
import one_node
from layout import KUBECONFIG

END_TIMEOUT_S = 60.0


def run(command: Sequence[str]) -> int:
    """Run the command and return its exit code. The cluster ends with the command, also on SIGTERM and Ctrl-C."""
    signal.signal(signal.SIGTERM, _exit)
    durations: dict[str, float] = {}
    tag = images.tag_of_sources()
    try:
        with phase(durations, "programs and images"):
            durations |= prepare(tag)
        with phase(durations, "start"):
            one_node.up()
        try:
            with phase(durations, "load"):
                durations |= images.load_all(tag)
                for problem in images.forget_others(tag):
                    print(f"e2e: warning: {problem}", file=sys.stderr, flush=True)
            with phase(durations, "command"):
                return _run(command, _environment(tag))
        finally:
            with phase(durations, "end"):
                one_node.down()
    finally:
        for name, seconds in durations.items():
            print(f"e2e: {name}: {seconds:.0f} s", flush=True)


def prepare(tag: str, components: Iterable[str] = images.COMPONENTS) -> dict[str, float]:
    """Build what is missing, without a cluster; return the seconds of each phase.

    Compiling programs uses the processors, and building images the network and the disk, so both run concurrently.
    """
    with ThreadPoolExecutor(max_workers=2) as pool:
        built = pool.submit(images.build_all, tag, components)
        durations = {f"build {name}": seconds for name, seconds in binaries.build(binaries.USUAL).items()}
        return durations | built.result()


def _run(command: Sequence[str], env: dict[str, str]) -> int:
    process = subprocess.Popen(command, env=env)
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(END_TIMEOUT_S)


def _environment(tag: str) -> dict[str, str]:
    path = f"{binaries.bin_dir()}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "KUBECONFIG": str(KUBECONFIG), "PATH": path, "PAGEMILL_TAG": tag}


def _exit(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


@contextmanager
def phase(durations: dict[str, float], name: str) -> Iterator[None]:
    """Print the phase's name when it begins, and add its seconds when it ends."""
    print(f"e2e: {name} ...", flush=True)
    start = time.monotonic()
    try:
        yield
    finally:
        durations[name] = time.monotonic() - start
