"""Other engines on the same shapes and lengths, if they are importable: transformers' `generate` and vLLM."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import Device
from workloads import Job, output_tokens

from pagemill_models.spec.model_spec import ModelSpec

STATIC_BATCH = 64
LIMIT_S = 240.0
"""Seconds after which no further static batch is started."""


class AbsentError(RuntimeError):
    """Raised if the peer cannot be imported."""


def hugging_face(device: Device, spec: ModelSpec, jobs: list[Job]) -> tuple[float, int]:
    """Return the seconds and the requested tokens generated in them. A batch runs as long as its longest answer."""
    _require("transformers")
    import torch
    import transformers

    with torch.device(device.device):
        build: Any = transformers.AutoModelForCausalLM.from_config
        # The keyword for the type depends on the version.
        model = build(_config(spec)).to(device.dtype).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    _static_batch(model, device, [Job(job.prompt_token_ids[:32], 4) for job in jobs[:STATIC_BATCH]])
    device.synchronize()
    num_tokens, begin_s = 0, time.perf_counter()
    for at in range(0, len(jobs), STATIC_BATCH):
        if time.perf_counter() - begin_s > LIMIT_S:
            break
        batch = jobs[at : at + STATIC_BATCH]
        _static_batch(model, device, batch)
        num_tokens += output_tokens(batch)
    return time.perf_counter() - begin_s, num_tokens


def vllm(spec: ModelSpec, jobs: list[Job], max_model_len: int) -> tuple[float, int]:
    """Return seconds and tokens of vLLM with its defaults and random weights."""
    _require("vllm")
    import vllm as engine

    with tempfile.TemporaryDirectory() as folder:
        config = _config(spec)
        config.architectures = [spec.architecture]
        config.save_pretrained(Path(folder))
        llm = engine.LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=max_model_len
        )
    prompts = [{"prompt_token_ids": job.prompt_token_ids} for job in jobs]
    params = [
        engine.SamplingParams(temperature=0.6, max_tokens=job.num_output_tokens, ignore_eos=True, detokenize=False)
        for job in jobs
    ]
    # Other prompts than the measured ones: vLLM caches their prefixes.
    others = [{"prompt_token_ids": [each + 1 for each in job.prompt_token_ids]} for job in jobs[:8]]
    llm.generate(others, params[:8], use_tqdm=False)
    begin_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin_s, sum(len(output.outputs[0].token_ids) for output in outputs)


def _static_batch(model: Any, device: Device, jobs: list[Job]) -> None:
    import torch

    width = max(len(job.prompt_token_ids) for job in jobs)
    padding = [width - len(job.prompt_token_ids) for job in jobs]
    rows = [[0] * pad + job.prompt_token_ids for pad, job in zip(padding, jobs, strict=True)]
    masks = [[0] * pad + [1] * (width - pad) for pad in padding]
    ids, mask = (torch.tensor(each, device=device.device) for each in (rows, masks))
    longest = max(job.num_output_tokens for job in jobs)
    with torch.inference_mode():
        model.generate(ids, attention_mask=mask, do_sample=False, min_new_tokens=longest, max_new_tokens=longest)
    device.synchronize()


def _config(spec: ModelSpec) -> Any:
    import transformers

    kind = transformers.Qwen3Config if spec.architecture == "Qwen3ForCausalLM" else transformers.LlamaConfig
    return kind(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.max_position_embeddings,
        rms_norm_eps=spec.decoder.norm.eps if spec.decoder.norm else 1e-6,
        tie_word_embeddings=spec.tie_word_embeddings,
    )


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise AbsentError(f"{package} is not importable")
