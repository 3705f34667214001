"""Compares answers of GGUF files with llama.cpp's: tiny random models, whose files the tests write as converters do.

Tests that write and read a layout could share a mistake about it; llama.cpp does not. Its
library comes as a wheel (`xllamacpp`), in an environment of its own. A row says how many greedy tokens of each prompt
are equal, or why llama.cpp refuses the file: some shapes of the tests it does not know. Exits with 1 if answers differ.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers.install import interpreter
from peers.llama_cpp import WHEEL, install_wheel, with_vocabulary
from report import ROOT, emit, progress

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.starting.factory import create_runner
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

sys.path.insert(0, str(ROOT / "tests" / "shared"))
of_families, of_hybrids, files, gguf_of_families = map(
    importlib.import_module, ("family_models", "hybrid_models", "gguf_files", "family_gguf")
)
FILES, HYBRID_FILES, PROMPTS = files.FILES, files.HYBRID_FILES, files.PROMPTS
NUM_TOKENS, TIMEOUT_S = 12, 60.0
WIDTHS = {"linear_key_head_dim": 12, "linear_value_head_dim": 12}
SQUARE = {
    f"{name}, values as wide as keys": (architecture, (model, {**values, **WIDTHS}))
    for name in ("qwen35", "qwen35moe", "qwen3next")
    for architecture, (model, values) in [HYBRID_FILES[name]]
}
"""llama.cpp knows no other heads of these families; the tests have others."""
PROGRAM = f"""
import json, sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup, params.n_gpu_layers = sys.argv[1], 512, 1, False, 0
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(params)
for prompt in json.loads(sys.argv[2]):
    asked = dict(prompt=prompt, n_predict={NUM_TOKENS}, temperature=0, ignore_eos=True, cache_prompt=False, n_probs=2)
    answer = server.handle_completions(asked)
    print("ANSWER", json.dumps([each["id"] for each in answer["choices"][0]["logprobs"]["content"]]), flush=True)
"""


class LlamaRefuses(Exception):
    pass


def llamas(file: Path) -> list[list[int]]:
    """Return llama.cpp's tokens. Raises `LlamaRefuses` with its error for a file that it does not read."""
    argv = [interpreter(WHEEL), "-c", PROGRAM, str(file), json.dumps(PROMPTS)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S)
    lines = (done.stdout + done.stderr).splitlines()
    answers = [json.loads(line.split(" ", 1)[1]) for line in lines if line.startswith("ANSWER")]
    if len(answers) < len(PROMPTS):
        raise LlamaRefuses(next((line for line in lines if "error" in line or "ASSERT" in line), lines[-1])[-160:])
    return answers


def ours(file: Path) -> list[list[int]]:
    config = EngineConfig(model=str(file), num_kv_blocks=256, max_model_len=256, dtype="float32")
    core = EngineCore(config, create_runner(config, lambda phase, detail: None))
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    answers: dict[str, list[int]] = {str(number): [] for number in range(len(PROMPTS))}
    for name, prompt in zip(answers, PROMPTS, strict=True):
        core.add(GenerateRequest(request_id=name, model="m", prompt_token_ids=prompt, sampling=sampling))
    while core.has_work:
        for output in core.step().outputs:
            answers[output.request_id] += output.token_ids
    core.runner.close()
    return [*answers.values()]


def compare(name: str, architecture: str, model: tuple[str, dict[str, Any]], folder: Path) -> tuple[str, str]:
    """Return how many tokens are equal by prompt, or why nothing was compared."""
    write = of_hybrids.write_hybrid if name in HYBRID_FILES | SQUARE else of_families.write_model
    write(*model, folder)
    gguf_of_families.write_family_gguf(folder / "model.gguf", folder, architecture)
    with_vocabulary(folder / "model.gguf", folder / "with-tokens.gguf")
    try:
        expected = llamas(folder / "with-tokens.gguf")
    except LlamaRefuses as failure:
        return "", str(failure)
    pairs = zip(ours(folder / "model.gguf"), expected, strict=True)
    equal = [next((at for at in range(NUM_TOKENS) if one[at] != two[at]), NUM_TOKENS) for one, two in pairs]
    return " ".join(map(str, equal)), ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="files by name; default: all that the tests write")
    parser.add_argument("--uv", type=Path, default=ROOT / ".uv" / "bin" / "uv")
    args = parser.parse_args()
    install_wheel(args.uv)
    cases = FILES | HYBRID_FILES | SQUARE
    rows = []
    for name in args.names or cases:
        with tempfile.TemporaryDirectory() as folder:
            architecture, model = cases[name]
            equal, cause = compare(name, architecture, model, Path(folder))
        progress(f"{name}: {equal or cause}")
        rows.append([name, cases[name][0], equal, cause])
    whole = " ".join([str(NUM_TOKENS)] * len(PROMPTS))
    different = [row[0] for row in rows if row[2] not in ("", whole)]
    emit(
        "gguf_beside_llama",
        ["file", "architecture", f"equal of {NUM_TOKENS}", "refused"],
        rows,
        {"different": different},
    )
    if different:
        raise SystemExit(f"other answers than llama.cpp's: {', '.join(different)}")


if __name__ == "__main__":
    main()
