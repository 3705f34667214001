"""Every peer of the comparison by name, each with the precision of its weights.

A peer is compared with Pagemill at the same precision: `float` (16 or 32 bits, whichever the engine does best on this
CPU), `int8` (Q8_0) and `4-bit` (Q4_1). All weights come from one file, see `weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

Precision = Literal["float", "int8", "4-bit"]
PRECISIONS: tuple[Precision, ...] = ("float", "int8", "4-bit")
THREADS = 2
OURS = "pagemill"


class Worker(NamedTuple):
    """How an engine starts as a worker process, which gets JSON lines."""

    argv: list[str]
    environment: Mapping[str, str] = {}


class Server(NamedTuple):
    """How an engine starts as an HTTP server."""

    argv: list[str]
    environment: Mapping[str, str]
    url: str
    ready_url: str
    model: str
    """The model name in requests."""
    must_say: str = ""
    """Text that its output must contain once it is ready; otherwise it does not run what is to be measured."""


class Peer(NamedTuple):
    name: str
    precision: Precision
    weights: str
    """Key of `weights.Weights`."""
    how: str
    """The engine and its settings, for the table's legend."""
    install: Callable[[Path], None]
    """Installs the peer with the uv at the given path; raises `InstallFailed`."""
    worker: Callable[[Path], Worker] | None
    """Returns the worker for the path of the weights."""
    server: Callable[[Path], Server] | None


def peers() -> dict[str, Peer]:
    from peers import hugging_face, llama_cpp, openvino_genai, pagemill, vllm_cpu

    modules = (pagemill, vllm_cpu, openvino_genai, llama_cpp, hugging_face)
    return {peer.name: peer for module in modules for peer in module.PEERS}
