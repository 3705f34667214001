"""What a node other than node 0 does: its processes compute (`pagemill_execution.starting.nodes`), without a server."""

from __future__ import annotations

from pagemill_engine.config import EngineConfig
from pagemill_engine.failure import StartupError
from pagemill_protocol.source_errors import SourceError


def compute_only(config: EngineConfig) -> None:
    """Return when node 0 has ended all, or at a signal. Raises `StartupError` if something failed."""
    from pagemill_execution.starting.factory import find_model  # imports the kernels
    from pagemill_execution.starting.nodes import run_node
    from pagemill_execution.weights.errors import LoadError

    try:
        run_node(config, find_model(config))
    except (LoadError, SourceError) as error:
        raise StartupError(error.reason, error.message) from error
