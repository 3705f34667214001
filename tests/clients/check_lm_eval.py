# /// script
# dependencies = ["lm-eval[api]==0.4.13", "transformers==5.20.0"]
# ///
"""EleutherAI's evaluation harness, with its model `local-completions`, a task over local JSON, and the
model's tokenizer from a folder."""

from __future__ import annotations

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
FOLDER = Path(tempfile.mkdtemp())
COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}"}


def task(name: str, **fields: Any) -> dict[str, Any]:
    """A task over 50 sums, which needs nothing from a hub."""
    rows = [{"question": f"{n} + 1 =", "choices": [f" {n}", f" {n + 1}"], "answer": 1} for n in range(NUM_ITEMS)]
    data = FOLDER / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"task": name, **COMMON, "dataset_kwargs": {"data_files": {"test": str(data)}}, **fields}


def results(config: dict[str, Any]) -> dict[str, Any]:
    arguments = {
        "model": MODEL,
        "base_url": f"{base_url()}/completions",
        "tokenizer": os.environ["PAGEMILL_TOKENIZER"],
        "tokenizer_backend": "huggingface",
        "num_concurrent": 4,
        "max_length": 512,
    }
    made = simple_evaluate(
        "local-completions", model_args=arguments, tasks=[config], task_manager=TaskManager(), bootstrap_iters=0
    )
    assert made is not None
    assert len(made["samples"][config["task"]]) == NUM_ITEMS
    found: dict[str, Any] = made["results"][config["task"]]
    return found


@check("log-likelihood of choices, 50 items")
def loglikelihood() -> None:
    metrics = [{"metric": "acc"}]
    config = task(
        "sums", output_type="multiple_choice", doc_to_choice="choices", doc_to_target="answer", metric_list=metrics
    )
    assert 0.0 <= results(config)["acc,none"] <= 1.0


@check("generation until a stop string, 50 items")
def generation() -> None:
    config = task(
        "sums_text",
        output_type="generate_until",
        doc_to_target="{{choices[answer]}}",
        generation_kwargs={"until": ["\n"], "max_gen_toks": 8},
        metric_list=[{"metric": "exact_match"}],
    )
    assert 0.0 <= results(config)["exact_match,none"] <= 1.0


if __name__ == "__main__":
    report_all()
