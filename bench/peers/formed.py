"""A worker that answers with and without a JSON schema: vLLM or Pagemill, whose offline APIs have the same names.

It runs under the peer's own interpreter; `structured_peers` uses it. An input line has `batch`, `max_tokens`, `seed`,
`prompt` and `schema` or null; an output line has the seconds and the number of tokens.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

MODULES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vllm": (
        "vllm",
        "vllm.sampling_params",
        {"dtype": "bfloat16", "structured_outputs_config": {"backend": "xgrammar"}},
    ),
    "pagemill": ("pagemill", "pagemill", {"num_threads": 2}),
}


def main() -> None:
    name, weights = sys.argv[1:]
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    module, forms, options = MODULES[name]
    engine, form = importlib.import_module(module), importlib.import_module(forms).StructuredOutputsParams
    llm = engine.LLM(weights, max_model_len=512, max_num_seqs=64, **options)
    _write(answers, {"ready": True})
    for line in sys.stdin:
        _write(answers, _answer(engine, form, llm, json.loads(line)))


def _answer(engine: Any, form: Any, llm: Any, work: dict[str, Any]) -> dict[str, Any]:
    held = {"structured_outputs": form(json=work["schema"])} if work["schema"] is not None else {}
    given = {"temperature": 1.0, "max_tokens": work["max_tokens"], "ignore_eos": True, **held}
    params = [engine.SamplingParams(seed=work["seed"] + row, **given) for row in range(work["batch"])]
    started_s = time.perf_counter()
    found = llm.generate([work["prompt"]] * work["batch"], params, use_tqdm=False)
    seconds = time.perf_counter() - started_s
    return {"seconds": seconds, "num_tokens": sum(len(each.outputs[0].token_ids) for each in found)}


def _write(answers: Any, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
