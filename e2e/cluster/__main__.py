"""A real Kubernetes API server for tests, without Docker and without root: etcd, kube-apiserver and kubectl.

    python3 e2e/cluster build              compile the programs from their Go modules (minutes, once)
    python3 e2e/cluster up [--state DIR]   start them and print what to export
    python3 e2e/cluster down [--state DIR] stop them and remove their state

The folder is a program, not a package: python3 runs it as it is.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import binaries
import control_plane


def main() -> None:
    parser = argparse.ArgumentParser(prog="e2e/cluster", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("verb", choices=["build", "up", "down"])
    parser.add_argument("--state", type=Path, default=binaries.CACHE / "run", help="folder of the running cluster")
    args = parser.parse_args()
    try:
        {"build": _build, "up": _up, "down": _down}[args.verb](args.state.resolve())
    except (binaries.BuildError, control_plane.ClusterError) as error:
        sys.exit(f"e2e/cluster: {error}")


def _build(_state: Path) -> None:
    for name, seconds in binaries.build().items():
        print(f"built {name} in {seconds:.0f} s", flush=True)
    print(f"programs are in {binaries.bin_dir()}")


def _up(state: Path) -> None:
    if binaries.missing():
        sys.exit("e2e/cluster: build the programs first: python3 e2e/cluster build")
    kubeconfig = control_plane.up(state)
    print(f"export KUBECONFIG={kubeconfig} PATH={binaries.bin_dir()}:$PATH")


def _down(state: Path) -> None:
    control_plane.down(state)


if __name__ == "__main__":
    main()
