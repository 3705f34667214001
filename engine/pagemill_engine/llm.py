"""Offline inference in this process: `LLM(model).generate(prompts)`, with the names vLLM users know.

Drives `EngineCore` directly, with no server and no second process; scheduling, KV cache and sampling are exactly those
of the server, and so are stop strings (`output.choice`). Importing this module imports no torch; making an `LLM` does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
from tqdm import tqdm

from pagemill_engine.ipc.messages import LogprobsOut, TokensOut
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.offline import (
    Message,
    Prompt,
    check_chat_options,
    check_tokens,
    config_of,
    conversations_of,
    prompts_of,
    sampling_of,
    search_of,
)
from pagemill_engine.output.best_of import MeanLogprob, best
from pagemill_engine.output.choice import ChoiceOutput
from pagemill_engine.output.results import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    Logprob,
    RequestOutput,
)
from pagemill_engine.runner.factory import create_runner
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.generate import GenerateRequest
from pagemill_protocol.grammars.check import CHECKS
from pagemill_protocol.sampling import BeamSearchParams, SamplingParams
from pagemill_protocol.sources import resolve_source
from pagemill_protocol.text.bad_words import with_bad_words
from pagemill_protocol.text.generation_defaults import with_defaults
from pagemill_protocol.text.load_bundle import load_bundle
from pagemill_protocol.text.tokenizer import Tokenizer


class _Prepared(NamedTuple):
    text: str | None
    token_ids: list[int]


class LLM:
    """One loaded model. Not thread-safe: one `generate` at a time.

    `model`: a source URI, a folder or a `.gguf` file. `settings`: fields of `EngineConfig`, such as `dtype`,
    `max_model_len`, `max_num_seqs`, `max_num_batched_tokens`, `block_size`, `kv_cache_memory_bytes`,
    `enable_prefix_caching`, `num_threads`, `seed`, `generation_config`. Raises `SourceError`, `LoadError` or
    `PagemillError` with the remedy when the model cannot be used.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        config = config_of(model, settings)
        bundle = load_bundle(resolve_source(config.model, field="model"))
        bundle = with_defaults(bundle, config.generation_config, config.generation_defaults)
        self._tokenizer = Tokenizer(bundle, chat_template=config.chat_template)
        config = msgspec.structs.replace(
            config,
            eos_token_ids=config.eos_token_ids or list(bundle.eos_token_ids),
            vocab_size=config.vocab_size or self._tokenizer.vocab_size,
        )
        self._core = EngineCore(config, create_runner(config, lambda phase, detail: None))
        self._core.forming.load_tokenizer = self.get_tokenizer
        self._num_requests = 0
        self._closed = False

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` and `chat` use without `sampling_params`: the model's own values, a new object each time."""
        return SamplingParams(**self._tokenizer.bundle.sampling_defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs are in the order of the prompts.

        `prompts`: one or several, each as text or token ids. `sampling_params`: one for all, or one per prompt, each
        value used exactly as given; without, `get_default_sampling_params()`. Raises `PagemillError` that names a
        prompt or parameter that cannot be served; then nothing is generated.
        """
        prepared = self._prepare(prompts)
        return self._run(
            prepared, sampling_of(sampling_params, len(prepared), self.get_default_sampling_params()), use_tqdm
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several: a conversation is a list of `{"role", "content"}`."""
        check_chat_options(add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
        prepared = []
        for conversation in conversations_of(messages):
            text = self._tokenizer.render_chat(
                conversation,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                tools=tools,
                template_kwargs=chat_template_kwargs,
            )
            prepared.append(_Prepared(text, self._encode(text, "messages", add_special_tokens=False)))
        return self._run(
            prepared, sampling_of(sampling_params, len(prepared), self.get_default_sampling_params()), use_tqdm
        )

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The `params.beam_width` most likely answers to each prompt, best first. Raises as `generate`."""
        prepared = self._prepare(prompts)
        outputs = self._run(prepared, [search_of(params)] * len(prepared), use_tqdm)
        return [self._as_beams(output) for output in outputs]

    def close(self) -> None:
        """Free the model's memory. The object cannot be used any more."""
        if self._closed:
            return
        self._closed = True
        self._core.runner.close()
        self._tokenizer.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _as_beams(self, output: RequestOutput) -> BeamSearchOutput:
        prompt = self._tokenizer.decode(output.prompt_token_ids) if output.prompt is None else output.prompt
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

    def _prepare(self, prompts: Prompt | Sequence[Prompt]) -> list[_Prepared]:
        prepared = []
        for index, prompt in enumerate(prompts_of(prompts)):
            param = f"prompts[{index}]"
            token_ids = self._encode(prompt, param) if isinstance(prompt, str) else prompt
            check_tokens(token_ids, param, self._tokenizer.vocab_size)
            prepared.append(_Prepared(prompt if isinstance(prompt, str) else None, token_ids))
        return prepared

    def _encode(self, text: str, param: str, add_special_tokens: bool = True) -> list[int]:
        max_model_len = self._core.runner.info.max_model_len
        return self._tokenizer.encode_within(text, max_model_len, add_special_tokens, param=param)

    def _run(self, prepared: list[_Prepared], params: list[SamplingParams], use_tqdm: bool) -> list[RequestOutput]:
        if self._closed:
            raise RuntimeError("This LLM is closed. Make a new one.")
        runs: dict[str, _Run] = {}
        try:
            for prompt, sampling in zip(prepared, params, strict=True):
                run = self._submit(prompt, sampling)
                runs[run.output.request_id] = run
            with tqdm(total=len(runs), desc="Processed prompts", unit="prompt", disable=not use_tqdm) as bar:
                self._finish(runs, bar)
        finally:
            for run in runs.values():
                if not run.output.finished:
                    self._core.abort(run.output.request_id)
        return [run.output for run in runs.values()]

    def _submit(self, prompt: _Prepared, sampling: SamplingParams) -> _Run:
        sampling = with_bad_words(sampling.validate(self._tokenizer.vocab_size), self._tokenizer)
        if sampling.structured_outputs is not None:
            CHECKS.check(sampling.structured_outputs)
        request = GenerateRequest(
            request_id=f"offline-{self._num_requests}",
            model=self._core.config.model,
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            dialect="completions",
        )
        self._num_requests += 1
        self._core.add(request)
        return _Run(request, prompt.text, self._tokenizer)

    def _finish(self, runs: dict[str, _Run], bar: Any) -> None:
        num_unfinished, num_tokens = len(runs), 0
        while num_unfinished:
            for out in self._core.step().outputs:
                run = runs.get(out.request_id)
                if run is None or run.finished():
                    continue
                num_tokens += len(out.token_ids)
                if run.push(out):
                    self._core.abort(out.request_id, out.choice)
                if run.finished():
                    num_unfinished -= 1
                    bar.set_postfix_str(f"{num_tokens / max(bar.format_dict['elapsed'], 1e-3):.1f} tokens/s", False)
                    bar.update()


class _Run:
    """One prompt while it is generated."""

    def __init__(self, request: GenerateRequest, text: str | None, tokenizer: Tokenizer) -> None:
        sampling = request.sampling
        self._tokenizer = tokenizer
        self._wants_logprobs = sampling.num_alternatives is not None
        reported = range(sampling.num_reported)
        self._choices = [ChoiceOutput(tokenizer, request.prompt_token_ids, sampling) for _ in reported]
        self._likelihoods = [MeanLogprob() for _ in reported] if len(reported) > sampling.n else []
        self._n = sampling.n
        self.output = RequestOutput(
            request_id=request.request_id,
            prompt=text,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[self._empty(index) for index in reported],
            prompt_logprobs=None if sampling.prompt_logprobs is None else [None],
        )

    def finished(self) -> bool:
        return self.output.finished

    def push(self, out: TokensOut) -> bool:
        """Take one engine output. True when a stop string ended the choice, which the engine cannot know."""
        choice, output = self._choices[out.choice], self.output.outputs[out.choice]
        if output.finished:
            return False
        if out.error is not None:
            output.finish_reason, output.stop_reason = "error", out.error
            return False
        if out.choice == 0:
            self.output.num_cached_tokens = max(self.output.num_cached_tokens, out.num_cached_tokens)
        if self.output.prompt_logprobs is not None:
            self.output.prompt_logprobs += [dict(self._position(entry)) for entry in out.prompt_logprobs]
        delta = choice.push(out.token_ids, out.logprobs, out.finish_reason)
        output.text += delta.text
        output.token_ids += delta.token_ids
        output.finish_reason = delta.finish_reason
        output.stop_reason = choice.stop_reason
        self._add_logprobs(output, delta.logprobs)
        if self._likelihoods:
            self._likelihoods[out.choice].add(delta.logprobs)
            self._choose()
        return choice.stopped_by_text

    def _choose(self) -> None:
        """All candidates are complete: keep the best ones."""
        if not self.output.finished:
            return
        candidates = self.output.outputs
        self.output.outputs = [candidates[at] for at in best(self._likelihoods, self._n)]
        for index, output in enumerate(self.output.outputs):
            output.index = index

    def _add_logprobs(self, output: CompletionOutput, entries: Sequence[LogprobsOut]) -> None:
        if output.logprobs is None or output.cumulative_logprob is None:
            return
        for entry in entries:
            output.cumulative_logprob += entry.logprobs[0]
            output.logprobs.append(dict(self._position(entry)))

    def _position(self, entry: LogprobsOut) -> Iterator[tuple[int, Logprob]]:
        chosen = entry.token_ids[0]
        yield chosen, Logprob(entry.logprobs[0], entry.rank, self._tokenizer.token_text(chosen))
        alternatives = zip(entry.token_ids[1:], entry.logprobs[1:], strict=True)
        for rank, (token_id, logprob) in enumerate(alternatives, start=1):
            if token_id != chosen:
                yield token_id, Logprob(logprob, rank, self._tokenizer.token_text(token_id))

    def _empty(self, index: int) -> CompletionOutput:
        if not self._wants_logprobs:
            return CompletionOutput(index)
        return CompletionOutput(index, cumulative_logprob=0.0, logprobs=[])
