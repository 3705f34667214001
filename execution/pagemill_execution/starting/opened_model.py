"""Opens an engine's model: whole in the machine's cache, or in parts where several nodes compute it.

The kinds of sources are those of `pagemill_models.sources`; what is read of the files, `weights` decides.
"""

from __future__ import annotations

from pagemill_execution.config import ExecutionConfig
from pagemill_models.sources import Opened, open_by_parts, open_source


def open_model(config: ExecutionConfig) -> Opened:
    """Open the model; its weights may still be being fetched. Raises `SourceError`.

    On several nodes each process reads only its parts from a network. Models of which every process reads all bytes for
    the digest are fetched whole.
    """
    if config.nodes is None:
        return open_source(config.model, field="model")
    from pagemill_execution.weights.digest import (
        WHOLE_MODEL_BYTES,  # imports numpy, which the server has no other use for
    )

    return open_by_parts(config.model, field="model", least_bytes=WHOLE_MODEL_BYTES + 1)
