"""An engine's memory does not grow with the number of requests, on the torch path (blocks of 8 tokens).

The test runs in a process of its own: it measures resident memory, and the caches of libraries are configured before
they are loaded.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_llama import write_tiny_llama

MIB = 1024 * 1024
SOAK = """
import json, random, sys
import psutil
from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.starting.factory import create_runner
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

folder, num_requests, warm = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = EngineConfig(
    model=folder, block_size=8, num_kv_blocks=2048, max_num_seqs=16, max_model_len=1024, max_num_batched_tokens=512
)
runner = create_runner(config, lambda *_: None)
assert runner.info.compute.startswith("torch"), runner.info.compute
core = EngineCore(config, runner)
draw, process = random.Random(1), psutil.Process()
added = finished = 0
memory = {}
while finished < num_requests:
    while added < num_requests and added - finished < 32:
        prompt = [draw.randrange(512) for _ in range(draw.randint(1, 500))]
        sampling = SamplingParams(temperature=0.0, max_tokens=draw.randint(1, 4), ignore_eos=True)
        core.add(GenerateRequest(request_id=str(added), model="m", prompt_token_ids=prompt, sampling=sampling))
        added += 1
    finished += sum(out.finish_reason is not None for out in core.step().outputs)
    for mark in (warm, num_requests):
        if finished >= mark:
            memory.setdefault(mark, process.memory_info().rss)
print(json.dumps([memory[warm], memory[num_requests]]))
"""


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(580)
@pytest.mark.parametrize(
    ("num_requests", "warm"),
    [pytest.param(2000, 500, marks=pytest.mark.full, id="2000"), pytest.param(400, 100, id="400")],
)
def test_memory_does_not_grow_with_requests_of_all_lengths(tmp_path: Path, num_requests: int, warm: int) -> None:
    write_tiny_llama(
        tmp_path,
        hidden_size=192,
        intermediate_size=384,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=24,
        vocab_size=512,
        max_position_embeddings=2048,
        num_hidden_layers=2,
        dtype="float32",
    )
    argv = [sys.executable, "-c", SOAK, str(tmp_path), str(num_requests), str(warm)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout.splitlines()[-1])
    assert after - before < 40 * MIB, f"{(after - before) / MIB:.0f} MiB more after {num_requests} requests than {warm}"
