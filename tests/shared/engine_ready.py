"""Builds the message of an engine process that is ready, with the parts that a test sets."""

from __future__ import annotations

from typing import Any

from pagemill_engine.ipc.messages import Ready
from pagemill_engine.limits import SchedulerLimits
from pagemill_protocol.report.state import EngineLoad

LIMITS = SchedulerLimits(
    num_blocks=64, block_size=16, max_model_len=1024, vocab_size=256, weights_digest="w", kv_dtype="float32"
)


def engine_ready(**changes: Any) -> Ready:
    return Ready(
        **{
            "limits": LIMITS,
            "weight_bytes": 0,
            "kv_bytes_per_token": 1,
            "compute": "float32, native kernels",
            "device": "cpu",
            "load_s": 0.1,
            "load": EngineLoad(num_kv_bytes_total=64),
            **changes,
        }
    )
