"""Hybrids on the GPU's runner, on a device or in Triton's interpreter: both loops, recorded steps, hits, proposals,
sleep. Answers are those of the torch reference, and memory that was not written is not a number."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hybrid_models import write_hybrid
from hybrid_requests import KINDS
from oracle_proposer import Oracle
from test_device_runner import ReplayRecorder

from pagemill_engine.config import SpeculationConfig
from pagemill_engine.decoders.on_torch.context import StateTensors
from pagemill_engine.executing.device.graphs import shapes_to_capture
from pagemill_engine.executing.inputs import StateRows
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.proposing.base import Proposals
from pagemill_engine.weights.errors import LoadError
from pagemill_kernels.recurrent.batch import StateBatch
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

pytestmark = pytest.mark.slow
LENGTHS, NUM_TOKENS = (29, 3), 6
SETTINGS = {"num_kv_blocks": 24, "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32}
Answers = dict[str, list[int]]
