"""Offline inference in this process: `LLM(model).generate(prompts)` or `.embed(texts)`, with vLLM's names.

It drives `EngineCore` directly, without a server or a second process; scheduling, KV cache, sampling and stop strings
(`output.choice`) are those of the server. Importing this module does not import torch; creating an `LLM` does if its
model runs on torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
from tqdm import tqdm

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.offline import (
    Message,
    Prompt,
    check_chat_options,
    config_of,
    priorities_of,
    search_of,
)
from pagemill_engine.offline_adapters import LoRARequest, OfflineAdapters, check_none
from pagemill_engine.offline_pooling import (
    PooledPrompt,
    PromptVector,
    embedding_of,
    pairs_to_score,
    scores_of,
    texts_to_embed,
)
from pagemill_engine.offline_prompts import EncodedPrompt, PromptEncoder
from pagemill_engine.output.collecting import CollectedRequest
from pagemill_engine.output.processor import engine_error
from pagemill_engine.output.results import (
    BeamSearchOutput,
    BeamSearchSequence,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from pagemill_execution.runners.base import Runner
from pagemill_execution.starting.factory import create_runner
from pagemill_execution.weights.errors import LoadError
from pagemill_kernels.huge_pages import collapse_when_idle
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.pooling import PoolingParams
from pagemill_protocol.request.sampling import BeamSearchParams, SamplingParams

_NOT_HERE = {
    **dict.fromkeys(("encode", "classify", "reward"), "use `embed` for vectors and `score` for pairs of texts"),
    **dict.fromkeys(("collective_rpc", "apply_model"), "the model runs in this process and takes no other calls"),
    **dict.fromkeys(("start_profile", "stop_profile"), "use torch.profiler around `generate`"),
    **dict.fromkeys(("sleep", "wake_up"), "close this one and make a new one; a server can sleep"),
    "get_metrics": "an LLM keeps none; a server has /metrics, and each output has `metrics`",
}
"""Methods of vLLM's `LLM` that are not supported, and what to do instead."""


class LLM:
    """One loaded model. Not thread-safe: one `generate` at a time.

    `model`: a source URI, a folder or a `.gguf` file. `settings`: fields of `EngineConfig`, such as `dtype`,
    `max_model_len`, `max_num_seqs`, `max_num_batched_tokens`, `block_size`, `kv_cache_memory_bytes`,
    `enable_prefix_caching`, `num_threads`, `seed`, `generation_config`, or arguments of vLLM's `LLM`
    (`vllm_arguments`). Raises `SourceError`, `LoadError` or `PagemillError` with the remedy when the model cannot be
    used.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        self._encoder = PromptEncoder(config_of(model, settings))
        config = self._encoder.config
        self._core = EngineCore(config, self._load(config))
        collapse_when_idle()
        self._core.grammar_requests.load_tokenizer = lambda: self._encoder.tokenizer
        self._encoder.max_model_len = self._core.runner.info.max_model_len
        self._adapters = OfflineAdapters(config, self._core.adapters)
        self._num_requests = 0
        self._closed = False

    def _load(self, config: EngineConfig) -> Runner:
        """Load weights while the rest is being fetched. Raises the fetch's own error if it fails."""
        opened = self._encoder.opened
        try:
            return create_runner(config, lambda phase, detail: None)
        except LoadError:
            opened.check()
            raise
        finally:
            opened.forget_links()

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_HERE:
            raise AttributeError(f"LLM has no method {name!r}: {_NOT_HERE[name]}.")
        raise AttributeError(f"LLM has no attribute {name!r}.")

    def get_tokenizer(self) -> Any:
        """Return Hugging Face's tokenizer of the model if `transformers` is installed, else Pagemill's own."""
        return self._encoder.hugging_face()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a new object with the model's own values, the default of `generate` and `chat`."""
        return self._encoder.default_sampling()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs are in the order of the prompts.

        `prompts`: one or several, each as text or token ids. `sampling_params`: one for all, or one per prompt, each
        value used exactly as given; by default `get_default_sampling_params()`. `priority`: one per prompt; smaller is
        served first with `policy="priority"`. `lora_request`: a `LoRARequest`, or one or None per prompt. Raises
        `PagemillError` that names a prompt or parameter that cannot be served; then nothing is generated.
        """
        encoded = self._encoder.prompts(prompts, sampling_params)
        return self._run(encoded, use_tqdm, priorities_of(priority, len(encoded)), lora_request)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several: a conversation is a list of `{"role", "content"}`."""
        check_chat_options(
            add_generation_prompt, continue_final_message, tools, chat_template_kwargs, chat_template_content_format
        )
        encoded = self._encoder.chats(
            messages,
            sampling_params,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=chat_template_kwargs,
        )
        return self._run(encoded, use_tqdm, lora_request=lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """Return the `params.beam_width` most likely answers to each prompt, best first. Raises like `generate`."""
        outputs = self._run(self._encoder.prompts(prompts, search_of(params)), use_tqdm, lora_request=lora_request)
        return [self._as_beams(output) for output in outputs]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        truncate_prompt_tokens: int | None = None,
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        lora_request: Any = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the vector of each prompt, in order.

        `truncate_prompt_tokens`: length to which longer prompts are cut; -1: the model's limit. Raises `PagemillError`
        for a prompt that cannot be served; then nothing is computed.
        """
        check_none(lora_request)
        pooled = texts_to_embed(self._encoder, prompts, pooling_params, truncate_prompt_tokens)
        return [embedding_of(vector) for vector in self._pool(pooled, use_tqdm)]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        truncate_prompt_tokens: int | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: Any = None,
    ) -> list[ScoringRequestOutput]:
        """Score how well the texts of each pair match: one of `data_1` with each of `data_2`, or pair by pair.

        The score is that of a cross-encoder, or the similarity of two embeddings. Raises like `embed`.
        """
        check_none(lora_request)
        pooled = pairs_to_score(self._encoder, data_1, data_2, truncate_prompt_tokens)
        num_seconds = 1 if isinstance(data_2, str) else len(data_2)
        model = self._encoder.tokenizer.bundle.pooling
        how = model.similarity if model is not None and model.task == "embed" else None
        return scores_of(self._pool(pooled, use_tqdm), num_seconds, how)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prompts. Returns True: between calls nothing runs that could prevent it."""
        self._core.scheduler.kv.reset_prefix_cache()
        return True

    def close(self) -> None:
        """Free the model's memory. The object cannot be used any more."""
        if self._closed:
            return
        self._closed = True
        self._core.runner.close()
        self._encoder.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _as_beams(self, output: RequestOutput) -> BeamSearchOutput:
        prompt = self._encoder.tokenizer.decode(output.prompt_token_ids) if output.prompt is None else output.prompt
        sequences = []
        for answer in output.outputs:
            if answer.finish_reason == "error":
                raise PagemillError(str(answer.stop_reason), status=500, type="server_error", code="internal_error")
            sequences.append(
                BeamSearchSequence(
                    tokens=[*output.prompt_token_ids, *answer.token_ids],
                    logprobs=answer.logprobs or [],
                    cum_logprob=answer.cumulative_logprob or 0.0,
                    text=prompt + answer.text,
                    finish_reason=answer.finish_reason,
                    stop_reason=answer.stop_reason,
                )
            )
        return BeamSearchOutput(sequences)

    def _run(
        self,
        encoded: Sequence[EncodedPrompt],
        use_tqdm: bool,
        priorities: Sequence[int] | None = None,
        lora_request: Any = None,
    ) -> list[RequestOutput]:
        if self._closed:
            raise RuntimeError("This LLM is closed. Make a new one.")
        digests = self._adapters.digests(lora_request, len(encoded))
        runs: dict[str, CollectedRequest] = {}
        try:
            for prompt, priority, digest in zip(encoded, priorities or [0] * len(encoded), digests, strict=True):
                run = self._submit(prompt, priority, digest)
                runs[run.output.request_id] = run
            with tqdm(total=len(runs), desc="Processed prompts", unit="prompt", disable=not use_tqdm) as bar:
                self._finish(runs, bar)
        finally:
            for run in runs.values():
                if not run.finished:
                    self._core.abort(run.output.request_id)
        return [run.output for run in runs.values()]

    def _pool(self, prompts: Sequence[PooledPrompt], use_tqdm: bool) -> list[PromptVector]:
        if self._closed:
            raise RuntimeError("This LLM is closed. Make a new one.")
        vectors: dict[str, PromptVector | None] = {}
        try:
            waiting: dict[str, PooledPrompt] = {}
            for prompt in prompts:
                name = f"offline-{self._num_requests}"
                self._core.add(prompt.request(name, self._encoder.config.model))
                self._num_requests += 1
                vectors[name], waiting[name] = None, prompt
            with tqdm(total=len(prompts), desc="Processed prompts", unit="prompt", disable=not use_tqdm) as bar:
                while waiting:
                    for out in self._core.step().outputs:
                        if out.request_id not in waiting:
                            continue
                        if out.error is not None:
                            raise engine_error(out)
                        token_ids = waiting.pop(out.request_id).token_ids
                        values = np.frombuffer(out.pooled, dtype="<f4")
                        vectors[out.request_id] = PromptVector(out.request_id, token_ids, values)
                        bar.update()
        finally:
            for name, found in vectors.items():
                if found is None:
                    self._core.abort(name)
        return [found for found in vectors.values() if found is not None]

    def _submit(self, prompt: EncodedPrompt, priority: int, adapter_digest: str) -> CollectedRequest:
        request = self._encoder.request(prompt, f"offline-{self._num_requests}", priority, adapter_digest)
        self._num_requests += 1
        self._core.add(request)
        return CollectedRequest(request, prompt.text, self._encoder.tokenizer)

    def _finish(self, runs: dict[str, CollectedRequest], bar: Any) -> None:
        num_unfinished, num_tokens = len(runs), 0
        while num_unfinished:
            for out in self._core.step().outputs:
                run = runs.get(out.request_id)
                if run is None or run.output.finished:
                    continue
                num_tokens += len(out.token_ids)
                if run.push(out):
                    self._core.abort(out.request_id, out.choice)
                if run.finished:
                    num_unfinished -= 1
                    bar.set_postfix_str(f"{num_tokens / max(bar.format_dict['elapsed'], 1e-3):.1f} tokens/s", False)
                    bar.update()
