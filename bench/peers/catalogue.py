"""Every peer that the comparison knows, by name, each with the precision of its weights.

A peer is compared with ours of the same precision: `float` (16 or 32 bits, whatever the engine does best on this CPU),
`int8` (Q8_0) and `4-bit` (Q4_1). All weights are one file's, see `weights`.
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
    """How an engine starts in a process of its own, asked by JSON lines."""

    argv: list[str]
    environment: Mapping[str, str] = {}


class Server(NamedTuple):
    """How it starts as an HTTP server."""

    argv: list[str]
    environment: Mapping[str, str]
    url: str
    ready_url: str
    model: str
    """The name to ask for."""
    must_say: str = ""
    """What its output has to contain once it is ready; else it does not run what it is measured for."""


class Peer(NamedTuple):
    name: str
    precision: Precision
    weights: str
    """Key of `weights.Weights`."""
    how: str
    """The engine and its settings, for the table's legend."""
    install: Callable[[Path], None]
    """Into the given folder, with uv at the given path; raises `InstallFailed`."""
    worker: Callable[[Path], Worker] | None
    """From the path of the weights."""
    server: Callable[[Path], Server] | None


def peers() -> dict[str, Peer]:
    from peers import hugging_face, llama_cpp, openvino_genai, pagemill, vllm_cpu

    modules = (pagemill, vllm_cpu, openvino_genai, llama_cpp, hugging_face)
    return {peer.name: peer for module in modules for peer in module.PEERS}
