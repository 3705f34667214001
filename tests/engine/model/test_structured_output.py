"""Answers have the form that their requests specify, even with random weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
from json_schemas import schemas
from tiny_llama import write_tiny_llama

from pagemill_api.answers.call_syntax import Function, after_reasoning, calls_only
from pagemill_api.answers.formats.hermes import SYNTAX as HERMES
from pagemill_api.grammars.check import FormChecks
from pagemill_api.structural_tags import JsonSchema, write_tag
from pagemill_api.structured_params import StructuredOutputsParams
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.config import EngineConfig
from pagemill_engine.grammar.compiler import GrammarCompiler
from pagemill_engine.grammar.state import begin_masks
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.runners import eager
from pagemill_execution.step import StepResult
from pagemill_models.tokenizer_files.load_bundle import load_bundle
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.answer_format import AnswerFormat
from pagemill_protocol.request.generate import ChoiceResume, GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams
from pagemill_protocol.request.structured_outputs import StructuredOutputs

ENDS = ['"', "}", "]", '",', '"}', "},", "],", ","]
FORMATS = jsonschema.FormatChecker(["date", "email", "ipv4", "uuid"])
"""The formats that the library checks by their standards."""
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Engine:
    """A model of random weights with the embedded model's vocabulary."""

    def __init__(self, runner: Any, tokenizer: Tokenizer) -> None:
        self.runner, self.tokenizer = runner, tokenizer
        self.ends = [tokenizer.encode(text)[0] for text in ENDS]
        self.bias = {**dict.fromkeys(self.ends, 6.0), self.ends[0]: 9.0}
        self.core = self.make_core()
        self.outputs: dict[tuple[str, int], Answer] = {}

    def make_core(self, **settings: Any) -> EngineCore:
        config = EngineConfig(
            model="test", block_size=self.runner.info.block_size, eos_token_ids=self.tokenizer.eos_token_ids, **settings
        )
        core = EngineCore(config, self.runner)
        core.grammar_requests.load_tokenizer = lambda: self.tokenizer
        return core

    def add(
        self,
        name: str,
        form: StructuredOutputs | None,
        *,
        resume: Any = (),
        prompt: Any = (1,),
        answer_format: AnswerFormat | None = None,
        **sampling: Any,
    ) -> None:
        params = {"max_tokens": 400, "seed": 7, "temperature": 1.0, "logit_bias": self.bias, **sampling}
        self.core.add(
            GenerateRequest(
                request_id=name,
                model="test",
                prompt_token_ids=list(prompt),
                sampling=SamplingParams(structured_outputs=form, **params),
                resume=list(resume),
                answer_format=answer_format,
            )
        )

    def steps(self) -> Iterator[None]:
        """Run the engine; yield after each step."""
        while self.core.has_work:
            for out in self.core.step().outputs:
                answer = self.outputs.setdefault((out.request_id, out.choice), Answer())
                answer.token_ids += out.token_ids
                answer.num_logprobs += len(out.logprobs or ())
                answer.finish_reason = out.finish_reason or answer.finish_reason
                answer.error = out.error or answer.error
                answer.num_preemptions = max(answer.num_preemptions, out.num_preemptions)
            yield
        self.core.check_integrity()

    def run(self) -> dict[tuple[str, int], Answer]:
        for _ in self.steps():
            pass
        return self.outputs

    def text(self, name: str, choice: int = 0) -> str:
        token_ids = self.outputs[name, choice].token_ids
        return self.tokenizer.decode(token_ids)

    def use(self, **settings: Any) -> None:
        """Start with an empty scheduler and these settings."""
        self.runner._rows.release(list(self.runner._rows._row_of))
        self.core = self.make_core(**settings)
        self.outputs = {}


class Answer:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.num_logprobs = 0
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.num_preemptions = 0


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Iterator[Tokenizer]:
    found = Tokenizer(load_bundle(smollm2_path))
    yield found
    found.close()


@pytest.fixture(scope="module")
def loaded(tokenizer: Tokenizer, tmp_path_factory: Any, runner_loader: Callable[..., Any]) -> Engine:
    folder = write_tiny_llama(
        tmp_path_factory.mktemp("tiny"), vocab_size=tokenizer.vocab_size, max_position_embeddings=2048
    )
    return Engine(runner_loader(folder, max_model_len=2048, num_kv_blocks=2048, max_num_seqs=64), tokenizer)


@pytest.fixture
def engine(loaded: Engine) -> Engine:
    loaded.use()
    return loaded


def json_form(schema: Any) -> StructuredOutputs:
    return StructuredOutputsParams(json=schema)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.full, id="300"), pytest.param(30, id="10")])
def test_answers_match_their_schemas_at_temperature_1(engine: Engine, every: int) -> None:
    chosen = dict(list(enumerate(schemas(300)))[::every])
    checks = FormChecks()
    for index, schema in chosen.items():
        checks.check(json_form(schema))
        engine.add(str(index), json_form(schema), max_tokens=1000, seed=index)
    answers = engine.run()
    for index, schema in chosen.items():
        assert answers[str(index), 0].finish_reason == "stop", (schema, engine.text(str(index)))
        value = json.loads(engine.text(str(index)))
        jsonschema.validate(value, schema, jsonschema.Draft202012Validator, format_checker=FORMATS)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"regex": r"\d{3}-[a-f]{2}"}, r"[0-9]{3}-[a-f]{2}"),
        ({"regex": "a/b[x/]{2}"}, "a/b[x/]{2}"),
        ({"choice": ["yes", "no", 'may"be', "été"]}, 'yes|no|may"be|été'),
        ({"grammar": 'start: "SELECT " COLUMN\nCOLUMN: /[a-z]{1,3}/'}, "SELECT [a-z]{1,3}"),
        ({"grammar": 'root ::= "yes" | "no" [0-9]'}, "yes|no[0-9]"),
    ],
)
def test_an_answer_matches_its_regex_choice_or_grammar(engine: Engine, form: Any, expected: str) -> None:
    engine.add("r", StructuredOutputsParams(**form), n=4)
    engine.run()
    for choice in range(4):
        assert re.fullmatch(expected, engine.text("r", choice))


def test_json_object_gives_an_object(engine: Engine) -> None:
    engine.add("r", StructuredOutputs(json_object=True), logit_bias={**engine.bias, **dict.fromkeys(engine.ends, 15.0)})
    engine.run()
    assert isinstance(json.loads(engine.text("r")), dict)


def test_a_tag_constrains_its_content_and_text_around_it_is_free(engine: Engine) -> None:
    tag = {
        "structures": [{"begin": "<call=get>", "schema": PERSON, "end": "</call>"}],
        "triggers": ["<call="],
    }
    started = engine.tokenizer.encode("Some text. <call=", add_special_tokens=False)
    engine.add("r", StructuredOutputsParams(structural_tag=tag), resume=[ChoiceResume(0, started, 0)], max_tokens=120)
    engine.run()
    text = engine.text("r")
    assert text.startswith("get>{")
    arguments, _ = text.removeprefix("get>").split("</call>", 1)
    jsonschema.validate(json.loads(arguments), PERSON)


def test_every_choice_has_the_form_and_may_differ(engine: Engine) -> None:
    engine.add("r", json_form(PERSON), n=5)
    engine.run()
    texts = {engine.text("r", choice) for choice in range(5)}
    assert len(texts) == 5
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)


def test_a_form_works_with_penalties_minimum_and_logprobs(engine: Engine) -> None:
    engine.add(
        "r", json_form(PERSON), presence_penalty=2.0, repetition_penalty=1.5, min_tokens=8, logprobs=3, top_p=0.9
    )
    answer = engine.run()["r", 0]
    jsonschema.validate(json.loads(engine.text("r")), PERSON)
    assert answer.num_logprobs == len(answer.token_ids)


def test_min_tokens_requires_no_more_than_the_form_allows(engine: Engine) -> None:
    engine.add("r", StructuredOutputs(choice=("yes", "no")), min_tokens=50)
    answer = engine.run()["r", 0]
    assert answer.finish_reason == "stop"
    assert engine.text("r") in ("yes", "no")


def test_an_ignored_end_of_sequence_is_generated_only_if_nothing_else_fits(engine: Engine) -> None:
    engine.add("r", StructuredOutputs(regex="(ab){1,9}"), ignore_eos=True)
    answer = engine.run()["r", 0]
    assert (engine.text("r"), answer.finish_reason) == ("ab" * 9, "stop")


def test_rows_without_a_form_get_the_answers_that_they_get_alone(engine: Engine) -> None:
    engine.add("free", None, max_tokens=20, ignore_eos=True)
    alone = list(engine.run()["free", 0].token_ids)
    engine.use()
    engine.add("formed", json_form(PERSON))
    engine.add("free", None, max_tokens=20, ignore_eos=True)
    assert engine.run()["free", 0].token_ids == alone


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_num_batched_tokens": 7, "max_num_seqs": 4}, id="chunked prefill"),
        pytest.param({"overlap": True}, id="overlap"),
        pytest.param({"enable_prefix_caching": False}, id="no prefix cache"),
    ],
)
def test_the_answer_does_not_depend_on_how_the_engine_steps(engine: Engine, settings: Any) -> None:
    def answers() -> dict[tuple[str, int], list[int]]:
        for name in "abc":
            engine.add(name, json_form(PERSON), n=2, prompt=range(1, 30), seed=ord(name))
        return {key: answer.token_ids for key, answer in engine.run().items()}

    expected = answers()
    engine.use(**settings)
    assert answers() == expected


CROWD = {"type": "array", "items": PERSON, "minItems": 3, "maxItems": 3}


@pytest.mark.slow_for("preempted, overlap")
@pytest.mark.sample("preempted, overlap")
@pytest.mark.parametrize(
    ("num_blocks", "settings"),
    [
        pytest.param(2048, {}, id="plain"),
        pytest.param(2048, {"overlap": True}, id="overlap"),
        pytest.param(2048, {"max_num_batched_tokens": 3, "max_num_seqs": 2}, id="small steps"),
        pytest.param(6, {"enable_prefix_caching": False}, id="preempted"),
        pytest.param(6, {"enable_prefix_caching": False, "overlap": True}, id="preempted, overlap"),
    ],
)
def test_forced_tokens_are_added_at_once_and_equal_the_sampled_ones(
    engine: Engine, num_blocks: int, settings: Any
) -> None:
    info = engine.runner.info
    counts, answers = [], []
    for jumps_forward in (False, True):
        engine.runner.info = info._replace(jumps_forward=jumps_forward, num_blocks=num_blocks, step=None)
        try:
            engine.use(**settings)
            for name in "abcd":
                engine.add(name, json_form(CROWD), seed=ord(name), prompt=range(1, 12), presence_penalty=0.5)
            engine.add("budget", json_form(PERSON), answer_format=budget(0, is_open=False), prompt=range(1, 12))
            engine.add("limit", json_form(PERSON), max_tokens=9, n=2)
            counts.append(sum(1 for _ in engine.steps()))
        finally:
            engine.runner.info = info
        answers.append({key: (each.token_ids, each.finish_reason) for key, each in engine.outputs.items()})
    assert answers[0] == answers[1]
    assert counts[1] < counts[0]


def test_forced_tokens_are_not_added_to_the_result_of_their_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runner of several ranks sends the result of a step with the next one."""
    results: list[StepResult] = []
    wait = engine.runner.wait

    def noted(handle: Any) -> StepResult:
        results.append(wait(handle))
        return results[-1]

    monkeypatch.setattr(engine.runner, "wait", noted)
    engine.add("r", json_form(PERSON))
    answer = engine.run()["r", 0]
    sampled = [token_ids for result in results for token_ids in result.token_ids.values()]
    assert {len(token_ids) for token_ids in sampled} == {1}
    assert len(answer.token_ids) > len(sampled), "some were forced"


def test_each_token_of_a_constant_is_forced(engine: Engine) -> None:
    grammar = GrammarCompiler(lambda: engine.tokenizer, engine.tokenizer.eos_token_ids, engine.tokenizer.vocab_size)
    state = grammar.submit(json_form({"const": "unité, lorem ipsum " * 20})).result().state((), forbids_end=False)
    forced = list(state.forced)
    assert len(forced) > 100
    for token_id in forced:
        bits = np.flatnonzero(np.unpackbits(state.mask.view(np.uint8), bitorder="little"))
        assert list(bits) == [token_id]
        assert state.advance(token_id) == ""


def test_log_probabilities_of_forced_tokens_are_reported(engine: Engine) -> None:
    engine.add("r", json_form({"const": "lorem ipsum dolor sit amet"}), logprobs=0)
    answer = engine.run()["r", 0]
    assert answer.num_logprobs == len(answer.token_ids) > 5


def test_a_preempted_answer_continues_in_its_form(engine: Engine) -> None:
    crowd = {"type": "array", "items": PERSON, "minItems": 3, "maxItems": 3}
    info = engine.runner.info
    engine.runner.info = info._replace(num_blocks=6, step=None)
    try:
        engine.use(enable_prefix_caching=False)
        for name in "abcd":
            engine.add(name, json_form(crowd), seed=ord(name), prompt=range(1, 12))
        answers = engine.run()
    finally:
        engine.runner.info = info
    assert max(answer.num_preemptions for answer in answers.values()) > 0
    for name in "abcd":
        jsonschema.validate(json.loads(engine.text(name)), crowd)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.full), 4])
def test_another_engine_continues_an_answer_at_any_token(engine: Engine, every: int) -> None:
    engine.add("r", json_form(PERSON))
    whole = list(engine.run()["r", 0].token_ids)
    for cut in range(1, len(whole) + 1, every):
        engine.use()
        engine.add("r", json_form(PERSON), resume=[ChoiceResume(0, whole[:cut], 0)])
        answer = engine.run()["r", 0]
        assert (whole[:cut] + answer.token_ids, answer.finish_reason) == (whole, "stop")


@pytest.mark.parametrize("every", [pytest.param(5, marks=pytest.mark.full), 15])
def test_another_engine_continues_a_forced_call_after_reasoning_at_any_token(engine: Engine, every: int) -> None:
    call = calls_only(HERMES, [Function("get", JsonSchema(json_schema=PERSON))], parallel=False)
    form = after_reasoning("<think>", "</think>", call, is_open=True)
    outputs = StructuredOutputs(structural_tag=write_tag(form))
    thought = engine.tokenizer.encode("I think.</think>", add_special_tokens=False)
    engine.add("r", outputs, resume=[ChoiceResume(0, thought, 0)])
    whole = thought + engine.run()["r", 0].token_ids
    text = engine.tokenizer.decode(whole)
    written = json.loads(text.split("<tool_call>")[1].removesuffix("</tool_call>"))
    assert written["name"] == "get"
    jsonschema.validate(written["arguments"], PERSON)
    for cut in range(len(thought), len(whole) + 1, every):
        engine.use()
        engine.add("r", outputs, resume=[ChoiceResume(0, whole[:cut], 0)])
        answer = engine.run()["r", 0]
        assert (whole[:cut] + answer.token_ids, answer.finish_reason) == (whole, "stop")


def budget(num_tokens: int, *, is_open: bool = True) -> AnswerFormat:
    return AnswerFormat(reasoning="think", starts_in_reasoning=is_open, reasoning_budget=num_tokens)


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_reasoning_ends_at_its_budget_and_the_answer_continues(engine: Engine, num_tokens: int) -> None:
    engine.add("r", None, answer_format=budget(num_tokens), max_tokens=30, ignore_eos=True, logit_bias=None, n=3)
    answers = engine.run()
    end = engine.tokenizer.encode("</think>")
    for choice in range(3):
        token_ids = answers["r", choice].token_ids
        assert token_ids[num_tokens : num_tokens + len(end)] == end
        assert len(token_ids) == 30


def test_reasoning_that_ends_below_its_budget_is_unchanged(engine: Engine) -> None:
    ended = engine.tokenizer.encode("Yes.</think>Paris", add_special_tokens=False)
    resume = [ChoiceResume(0, ended, 0)]
    engine.add("r", None, resume=resume, max_tokens=30, ignore_eos=True)
    expected = list(engine.run()["r", 0].token_ids)
    engine.use()
    engine.add("r", None, resume=resume, answer_format=budget(10), max_tokens=30, ignore_eos=True)
    assert engine.run()["r", 0].token_ids == expected


def test_a_call_that_reasoning_lacks_an_end_before_has_no_budget(engine: Engine) -> None:
    form = msgspec.structs.replace(budget(60), tools="hermes")
    begun = 'Hm. <tool_call>{"name": "f", "arguments": {"a": "'
    end = engine.tokenizer.encode("</think>")
    for text, is_ended in ((begun, True), (begun.replace("{", "[", 1), False)):
        token_ids = engine.tokenizer.encode(text, add_special_tokens=False)
        assert len(token_ids) < 60
        engine.use()
        resume = [ChoiceResume(0, token_ids, 0)]
        engine.add("r", None, resume=resume, answer_format=form, max_tokens=90, ignore_eos=True)
        answer = engine.run()["r", 0].token_ids
        at = 60 - len(token_ids)
        assert (answer[at : at + len(end)] == end) != is_ended


def test_an_answer_that_does_not_start_with_reasoning_has_no_budget(engine: Engine) -> None:
    begun = [ChoiceResume(0, engine.tokenizer.encode("Paris"), 0)]
    engine.add("r", None, resume=begun, answer_format=budget(0, is_open=False), max_tokens=20, ignore_eos=True)
    assert "</think>" not in engine.tokenizer.decode(engine.run()["r", 0].token_ids)
    engine.use()
    begun = [ChoiceResume(0, engine.tokenizer.encode("<think>", add_special_tokens=False), 0)]
    engine.add("r", None, resume=begun, answer_format=budget(0, is_open=False), max_tokens=20, ignore_eos=True)
    assert engine.tokenizer.decode(engine.run()["r", 0].token_ids).startswith("</think>")


@pytest.mark.sample("True")
@pytest.mark.parametrize("overlap", [False, True])
def test_the_form_applies_after_reasoning_that_ended_at_its_budget_on_any_engine(engine: Engine, overlap: bool) -> None:
    form = after_reasoning("<think>", "</think>", JsonSchema(json_schema=PERSON), is_open=True)
    outputs = StructuredOutputs(structural_tag=write_tag(form))
    engine.use(overlap=overlap)
    engine.add("r", outputs, answer_format=budget(12), logit_bias=engine.bias)
    whole = list(engine.run()["r", 0].token_ids)
    thought, answer = engine.tokenizer.decode(whole).split("</think>")
    assert thought
    jsonschema.validate(json.loads(answer), PERSON)
    for cut in range(1, len(whole), 6):
        engine.use()
        engine.add("r", outputs, answer_format=budget(12), resume=[ChoiceResume(0, whole[:cut], 0)])
        assert whole[:cut] + engine.run()["r", 0].token_ids == whole


def test_a_character_is_completed_before_reasoning_is_ended(engine: Engine) -> None:
    pieces = next(ids for letter in "🜚𐍈𒀀🂡" if len(ids := engine.tokenizer.encode(letter, add_special_tokens=False)) > 2)
    outputs = StructuredOutputs(
        structural_tag=write_tag(after_reasoning("<think>", "</think>", JsonSchema(json_schema=PERSON), is_open=True))
    )
    engine.add("r", outputs, answer_format=budget(1), resume=[ChoiceResume(0, pieces, 0)])
    answer = engine.run()["r", 0]
    assert (answer.error, engine.text("r").startswith("</think>")) == (None, True)


def test_tokens_that_do_not_fit_the_form_are_not_continued(engine: Engine) -> None:
    engine.add("r", json_form(PERSON), resume=[ChoiceResume(0, engine.tokenizer.encode("Hello"), 0)])
    answer = engine.run()["r", 0]
    assert answer.finish_reason == "error"
    assert "cannot be continued" in str(answer.error)


def test_a_token_that_violates_the_mask_fails_the_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def everything(*_: Any) -> None:
        return None

    monkeypatch.setattr(eager, "mask_rows", everything)
    engine.add("r", json_form(PERSON))
    engine.add("free", None, max_tokens=5, ignore_eos=True)
    answers = engine.run()
    assert answers["r", 0].finish_reason == "error"
    assert "does not fit its form" in str(answers["r", 0].error)
    assert answers["free", 0].finish_reason == "length"


def test_other_requests_continue_while_a_form_is_compiled(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.add("free", None, max_tokens=30, ignore_eos=True)
    engine.add("r", json_form(PERSON))
    steps = engine.steps()
    next(steps)
    assert ("free", 0) in engine.outputs
    for _ in steps:
        pass
    assert engine.outputs["r", 0].finish_reason == "stop"


def test_an_abort_during_compilation_ends_every_choice(engine: Engine) -> None:
    engine.add("r", json_form(PERSON), n=3)
    engine.core.abort("r")
    answers = engine.run()
    assert [answers["r", choice].finish_reason for choice in range(3)] == ["abort"] * 3


def test_an_allowance_raised_during_compilation_applies(engine: Engine) -> None:
    sampling = SamplingParams(max_tokens=50, structured_outputs=StructuredOutputs(regex="a{40}"))
    engine.core.add(
        GenerateRequest(request_id="r", model="test", prompt_token_ids=[1], sampling=sampling, token_allowance=1)
    )
    engine.core.grammar_requests.raise_allowance("r", 50)
    engine.run()
    assert engine.text("r") == "a" * 40


def test_a_form_that_cannot_be_compiled_fails_only_its_own_request(engine: Engine) -> None:
    engine.add("bad", StructuredOutputs(json_schema='{"type": "nonsense"}'))
    engine.add("good", json_form(PERSON))
    answers = engine.run()
    assert answers["bad", 0].finish_reason == "error"
    assert "nonsense" in str(answers["bad", 0].error)
    assert answers["good", 0].finish_reason == "stop"


def test_beam_search_with_a_form_is_refused_by_name(engine: Engine) -> None:
    with pytest.raises(PagemillError, match="structured_outputs does not go with use_beam_search"):
        engine.add("r", json_form(PERSON), use_beam_search=True, n=2, temperature=0, logit_bias=None)


def test_masks_computed_in_parallel_with_the_step_are_the_same(engine: Engine) -> None:
    compiler = GrammarCompiler(lambda: engine.tokenizer, engine.tokenizer.eos_token_ids, engine.tokenizer.vocab_size)
    forms = [json_form(PERSON), StructuredOutputs(regex="[0-9]+!"), StructuredOutputs(choice=("yes", "no"))]
    texts = ['{"name": "Ada", "age": 36}', "12345!", "yes"]
    beside, alone = ([compiler.submit(form).result().state((), forbids_end=False) for form in forms] for _ in range(2))
    spelled = [engine.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    for position in range(max(map(len, spelled))):
        running = [at for at, token_ids in enumerate(spelled) if position < len(token_ids)]
        begin_masks([due for at in running if (due := beside[at].due) is not None])
        for at in running:
            assert np.array_equal(beside[at].mask, alone[at].mask)
            for state in (beside[at], alone[at]):
                assert state.advance(spelled[at][position]) == ""
    assert all(state.ended for state in (*beside, *alone))


def test_tokens_without_a_bit_in_the_mask_are_forbidden() -> None:
    from pagemill_kernels.sampling import reference
    from pagemill_kernels.sampling.batch import SamplingBatch, TokenMasks

    bits = np.zeros((1, 3), dtype=np.int32)
    bits[0, 1] = 1 << 5
    bits[0, 2] = -(2**31)
    logits = np.tile(np.arange(90, dtype=np.float32), (2, 1))
    drawn = reference.sample_tokens(logits, SamplingBatch(masks=TokenMasks(np.array([1]), bits)))
    assert drawn.token_ids.tolist() == [89, 37]
