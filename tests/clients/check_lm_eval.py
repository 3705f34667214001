# /// script
# dependencies = ["lm-eval[api]==0.4.13", "transformers==5.20.0", "torch==2.15.0", "gguf", "accelerate"]
# ///
"""EleutherAI's evaluation harness, with its model `local-completions`, tasks over local JSON, and the model's tokenizer
from a folder. Its backend `hf` computes the same weights with transformers; both must agree on every item."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from checks import MODEL, base_url, check, report_all

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

NUM_ITEMS = 50
LOGPROB_TOLERANCE = 1e-3
FOLDER = Path(tempfile.mkdtemp())
WEIGHTS = Path(os.environ["PAGEMILL_WEIGHTS"])
TOKENIZER = os.environ["PAGEMILL_TOKENIZER"]
COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}"}
BACKENDS: dict[str, dict[str, Any]] = {
    "local-completions": {
        "model": MODEL,
        "base_url": f"{base_url()}/completions",
        "tokenizer": TOKENIZER,
        "tokenizer_backend": "huggingface",
        "num_concurrent": 4,
        "max_length": 512,
    },
    "hf": {
        "pretrained": str(WEIGHTS.parent),
        "gguf_file": WEIGHTS.name,
        "tokenizer": TOKENIZER,
        "dtype": "float32",
        "device": "cpu",
        "max_length": 512,
    },
}


def task(name: str, **fields: Any) -> dict[str, Any]:
    """Return a task of 50 sums, which needs nothing from a hub."""
    rows = [{"question": f"{n} + 1 =", "choices": [f" {n}", f" {n + 1}"], "answer": 1} for n in range(NUM_ITEMS)]
    data = FOLDER / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"task": name, **COMMON, "dataset_kwargs": {"data_files": {"test": str(data)}}, **fields}


TASKS = {
    "choices": task(
        "choices",
        output_type="multiple_choice",
        doc_to_choice="choices",
        doc_to_target="answer",
        metric_list=[{"metric": "acc"}],
    ),
    "text": task(
        "text",
        output_type="generate_until",
        doc_to_target="{{choices[answer]}}",
        generation_kwargs={"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        metric_list=[{"metric": "exact_match"}],
    ),
}


@functools.cache
def evaluated(name: str, backend: str) -> tuple[float, list[Any]]:
    """Return the metric, and the model's answer for each item."""
    config = TASKS[name]
    made = simple_evaluate(
        backend, model_args=BACKENDS[backend], tasks=[config], task_manager=TaskManager(), bootstrap_iters=0
    )
    assert made is not None
    samples = sorted(made["samples"][name], key=lambda sample: sample["doc_id"])
    assert len(samples) == NUM_ITEMS
    (metric,) = (each["metric"] for each in config["metric_list"])
    return made["results"][name][f"{metric},none"], [sample["filtered_resps"] for sample in samples]


@check("log-likelihood of choices, 50 items")
def loglikelihood() -> None:
    accuracy, answers = evaluated("choices", "local-completions")
    assert 0.0 <= accuracy <= 1.0
    assert all(len(each) == 2 for each in answers)


@check("log-likelihoods and accuracy as with `hf`")
def loglikelihood_as_transformers() -> None:
    (accuracy, answers), (expected, others) = (evaluated("choices", backend) for backend in BACKENDS)
    assert accuracy == expected
    for ours, theirs in zip(answers, others, strict=True):
        for (logprob, is_greedy), (other, other_is_greedy) in zip(ours, theirs, strict=True):
            assert abs(float(logprob) - float(other)) < LOGPROB_TOLERANCE, (ours, theirs)
            assert str(is_greedy) == str(other_is_greedy), (ours, theirs)


@check("generation until a stop string, 50 items")
def generation() -> None:
    score, answers = evaluated("text", "local-completions")
    assert 0.0 <= score <= 1.0
    assert all("\n" not in text for (text,) in answers)


@check("texts and scores as with `hf`")
def generation_as_transformers() -> None:
    assert evaluated("text", "local-completions") == evaluated("text", "hf")


if __name__ == "__main__":
    report_all()
