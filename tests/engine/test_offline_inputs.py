"""Inputs of the offline API are used exactly as given or refused with an error that names field and value."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from examples import num_examples
from pagemill_engine.offline import check_tokens, config_of, conversations_of, prompts_of, sampling_of, search_of
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.sampling import BeamSearchParams, SamplingParams

VOCAB_SIZE = 1000


def refusal(call: Any, *args: Any) -> PagemillError:
    with pytest.raises(PagemillError) as refused:
        call(*args)
    return refused.value


def outcome(call: Any) -> Any:
    """Return the call's result or its error."""
    try:
        return call()
    except PagemillError as error:
        return error


def checked(params: SamplingParams) -> SamplingParams:
    """Return the parameters as `LLM` uses them for one prompt."""
    (sampling,) = sampling_of(params, 1)
    return sampling.validate(VOCAB_SIZE)


# -- prompts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "read"),
    [
        ("text", ["text"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        (("a", "b"), ["a", "b"]),
        (iter(["a"]), ["a"]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        (range(3), [[0, 1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (np.array([1, 2]), [[1, 2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([np.int64(1), 2], [[1, 2]]),
        ([np.array([1]), "a", (3,)], [[1], "a", [3]]),
        ({"prompt": "a"}, ["a"]),
        ({"prompt": "a", "prompt_token_ids": None, "multi_modal_data": None}, ["a"]),
        ([{"prompt_token_ids": (5, 6)}, {"prompt": "b"}], [[5, 6], "b"]),
        ([], []),
    ],
)
def test_every_form_of_prompts_is_read_unchanged(prompts: Any, read: list[Any]) -> None:
    found = prompts_of(prompts)
    assert found == read
    assert {type(item) for prompt in found if isinstance(prompt, list) for item in prompt} <= {int}


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([1.7], "prompts[0] must be a token id, an integer of at least 0, got 1.7 (float)"),
        ([[1, 1.0]], "prompts[0][1] must be a token id, an integer of at least 0, got 1.0 (float)"),
        ([[3], [2, "4"]], "prompts[1][1] must be a token id, an integer of at least 0, got '4' (str)"),
        ([True, False], "prompts[0] must be a token id, an integer of at least 0, got True (bool)"),
        ([[1, -1]], "prompts[0][1] must be a token id, an integer of at least 0, got -1 (int)"),
        (np.array([1.0, 2.0]), "prompts[0] must be a token id, an integer of at least 0, got 1.0 (float)"),
        (np.array([True]), "prompts[0] must be a token id, an integer of at least 0, got True (bool)"),
        ([1, "a"], "prompts[1] must be a token id, an integer of at least 0, got 'a' (str)"),
        (["a", 1], "prompts[0] must be a token id, an integer of at least 0, got 'a' (str)"),
        ([[]], "prompts[0] has no token ids"),
        ([[1], None], "prompts[1] must be text, token ids, or a dictionary, got None (NoneType)"),
        (b"abc", "prompts must be text, token ids, a dictionary, or a list of these, got b'abc' (bytes)"),
        ([b"abc"], "prompts[0] must be text, token ids, or a dictionary, got b'abc' (bytes)"),
        ({"a", "b"}, "(set)"),
        (None, "prompts must be text, token ids, a dictionary, or a list of these, got None (NoneType)"),
        (5, "got 5 (int)"),
        (np.array(5), "prompts must be text"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "prompts has the key 'multi_modal_data' (str), which no"),
        (["a", {"promt": "a"}], "prompts[1] has the key 'promt' (str), which is not known. Did you mean 'prompt'?"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "both `prompt` and `prompt_token_ids`"),
        ({}, "neither `prompt` nor `prompt_token_ids`"),
        ({"prompt": None}, "neither `prompt` nor `prompt_token_ids`"),
        ({"prompt": [1]}, "prompts.prompt must be a string, got [1] (list)"),
        ({"prompt_token_ids": "12"}, "prompts.prompt_token_ids must be a list of token ids, got '12' (str)"),
        ([{"prompt_token_ids": [1, 2.5]}], "prompts[0].prompt_token_ids[1] must be a token id"),
    ],
)
def test_prompts_that_would_have_to_be_changed_are_refused(prompts: Any, message: str) -> None:
    error = refusal(prompts_of, prompts)
    assert message in error.message
    assert error.param is not None
    assert error.param in error.message


def test_tokens_beyond_the_vocabulary_and_prompts_without_tokens_are_named() -> None:
    check_tokens([0, VOCAB_SIZE - 1], "prompts[2]", VOCAB_SIZE)
    error = refusal(check_tokens, [0, VOCAB_SIZE], "prompts[2]", VOCAB_SIZE)
    assert (
        error.message
        == f"prompts[2][1] is the token id {VOCAB_SIZE} (int); this model's go from 0 to {VOCAB_SIZE - 1}."
    )
    assert "prompts[0] has no tokens" in refusal(check_tokens, [], "prompts[0]", VOCAB_SIZE).message


# -- parameters --------------------------------------------------------------------------------------------------------


def test_a_single_stop_string_is_one_stop_string() -> None:
    assert checked(SamplingParams(stop="Paris")).stop == ["Paris"]  # type: ignore[arg-type]
    assert checked(SamplingParams(stop=("a", "b"))).stop == ["a", "b"]  # type: ignore[arg-type]
    assert checked(SamplingParams(stop=None, stop_token_ids=None)).stop == []  # type: ignore[arg-type]


def test_numbers_of_numpy_equal_pythons_numbers() -> None:
    params = SamplingParams(
        n=np.int32(2),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        stop_token_ids=np.array([3, 4]),  # type: ignore[arg-type]
        logit_bias={np.int64(5): np.float64(1.5)},  # type: ignore[dict-item]
    )
    sampling = checked(params)
    assert (sampling.n, sampling.temperature) == (2, 0.5)
    assert (sampling.stop_token_ids, sampling.logit_bias) == ([3, 4], {5: 1.5})
    assert type(sampling.n) is int
    assert type(sampling.temperature) is float


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("stop", 5, "5"),
        ("stop", {"a"}, "{'a'}"),
        ("stop", ["a", 5], "5"),
        ("stop", "", "0"),
        ("stop", b"a", "b'a'"),
        ("stop_token_ids", 5, "5"),
        ("stop_token_ids", "12", "'12'"),
        ("stop_token_ids", [1.0], "1.0"),
        ("stop_token_ids", [True], "True"),
        ("stop_token_ids", [-1], "-1"),
        ("stop_token_ids", [VOCAB_SIZE], str(VOCAB_SIZE)),
        ("logit_bias", [1], "[1]"),
        ("logit_bias", {"5": 1.0}, "'5'"),
        ("logit_bias", {5: "1"}, "'1'"),
        ("logit_bias", {5: True}, "True"),
        ("n", True, "True"),
        ("n", 1.0, "1.0"),
        ("max_tokens", 8.5, "8.5"),
        ("max_tokens", "8", "'8'"),
        ("temperature", "0", "'0'"),
        ("temperature", True, "True"),
        ("temperature", None, "None"),
        ("seed", 1.0, "1.0"),
        ("ignore_eos", 1, "1"),
        ("skip_special_tokens", "no", "'no'"),
        ("include_stop_str_in_output", None, "None"),
        ("use_beam_search", "yes", "'yes'"),
        ("length_penalty", True, "true"),
        ("early_stopping", 0, "0"),
    ],
)
def test_a_parameter_of_a_wrong_type_is_refused_by_name_and_value(field: str, value: Any, shown: str) -> None:
    error = refusal(checked, SamplingParams(**{field: value}))
    assert error.param == field
    assert field in error.message
    assert shown in error.message


def test_an_integer_with_too_many_digits_for_python_is_refused() -> None:
    for field in ("top_p", "length_penalty", "early_stopping", "n"):
        assert field in refusal(checked, SamplingParams(**{field: 10**5000})).message
    assert "got an integer of 16610 bits" in refusal(checked, SamplingParams(temperature=10**5000)).message


def test_parameters_for_several_prompts_must_be_sampling_params() -> None:
    assert len(sampling_of(None, 3)) == 3
    assert len(sampling_of((SamplingParams(), SamplingParams(n=2)), 2)) == 2
    assert (
        "sampling_params[1] must be a SamplingParams, got None"
        in refusal(sampling_of, [SamplingParams(), None], 2).message
    )
    assert "got {'n': 2} (dict)" in refusal(sampling_of, {"n": 2}, 1).message
    assert "2 prompts came with 1 sampling_params" in refusal(sampling_of, [SamplingParams()], 2).message


def test_a_beam_search_is_validated_with_its_own_field_names() -> None:
    assert search_of(BeamSearchParams(beam_width=np.int64(2), max_tokens=4)).n == 2  # type: ignore[arg-type]
    for width in (True, 2.0, "2", 0):
        error = refusal(search_of, BeamSearchParams(beam_width=width, max_tokens=4))  # type: ignore[arg-type]
        assert (error.param, repr(width) in error.message) == ("beam_width", True)
    assert "params must be a BeamSearchParams" in refusal(search_of, SamplingParams()).message


@pytest.mark.parametrize(
    ("name", "meant"), [("stops", "stop"), ("max_new_tokens", "max_tokens"), ("temprature", "temperature")]
)
def test_the_error_for_an_unknown_parameter_suggests_a_similar_one(name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=rf"SamplingParams has no parameter '{name}'. Did you mean '{meant}'\?"):
        SamplingParams(**{name: 1})
    with pytest.raises(TypeError, match=r"BeamSearchParams has no parameter 'width'. Did you mean 'beam_width'\?"):
        BeamSearchParams(beam_width=2, max_tokens=4, width=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(1)  # type: ignore[misc]
    with pytest.raises(TypeError, match="Missing required argument 'max_tokens'"):
        BeamSearchParams(beam_width=2)  # type: ignore[call-arg]


# -- conversations -----------------------------------------------------------------------------------------------------

HELLO = {"role": "user", "content": "Hello"}


def test_conversations_reach_the_template_unchanged() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert conversations_of([HELLO, called]) == [[HELLO, called]]
    assert conversations_of(([HELLO], (HELLO, HELLO))) == [[HELLO], [HELLO, HELLO]]
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}]
    assert conversations_of([{"role": "user", "content": parts}]) == [[{"role": "user", "content": "Hello\nyou"}]]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hello", "messages must be a conversation (a list of messages) or a list of conversations, got 'Hello' (str)"),
        (["Hello"], "messages[0] must be a list of messages, got 'Hello' (str)"),
        ([[HELLO], HELLO], "messages[0] must be a message such as"),
        ([HELLO, "Hello"], "messages[1] must be a message such as"),
        ([[HELLO], []], "messages[1] has no messages"),
        ([{"content": "Hello"}], "messages[0].role must be a string, got None"),
        ([{"role": "user", "content": 5}], "messages[0].content must be a string or a list of text parts, got 5 (int)"),
        ([[{"role": "user", "content": [{"type": "image_url"}]}]], "messages[0][0].content[0] must be a part such as"),
    ],
)
def test_conversations_that_would_have_to_be_changed_are_refused(messages: Any, message: str) -> None:
    assert message in refusal(conversations_of, messages).message


# -- settings ----------------------------------------------------------------------------------------------------------


def test_settings_are_used_unchanged_or_refused_by_name(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"max_num_seqs": np.int64(3), "eos_token_ids": (1, 2)})
    assert (config.model, config.max_num_seqs, config.eos_token_ids) == (str(tmp_path), 3, [1, 2])
    for wrong in (True, "3", 3.5):
        with pytest.raises(TypeError, match="max_num_seqs"):
            config_of("m", {"max_num_seqs": wrong})
    with pytest.raises(TypeError, match="model must be a string or a path, got 5"):
        config_of(5, {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"LLM has no parameter 'max_modle_len'. Did you mean 'max_model_len'\?"):
        config_of("m", {"max_modle_len": 3})


# -- random inputs -----------------------------------------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, VOCAB_SIZE + 3)
    | st.floats(-2, 8)
    | st.sampled_from(["", "a", "Paris", "7", b"7", np.int64(7), np.float32(0.5), np.True_])
)
arrays = st.lists(st.integers(0, 9) | st.floats(0, 9), max_size=3).map(np.array)
keys = st.sampled_from(["prompt", "prompt_token_ids", "multi_modal_data", "promt", 5, np.int64(5)])
anything = st.recursive(
    scalars | arrays,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=2)
        | st.lists(scalars, max_size=2).map(lambda items: [item for item in items if type(item) is int])
    ),
    max_leaves=6,
)


def plain(value: Any) -> Any:
    """Return the value in Python's own types, whose `repr` distinguishes int, bool and float."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    return value


def one_prompt(value: Any) -> Any:
    if isinstance(value, dict):
        (value,) = (item for item in value.values() if item is not None)
    return value


@settings(max_examples=num_examples(600), deadline=None)
@given(anything)
@example([1.7])
@example({"prompt": "a", "multi_modal_data": {}})
def test_any_prompts_are_used_exactly_as_given_or_refused_by_name(prompts: Any) -> None:
    read = outcome(lambda: prompts_of(prompts))
    if isinstance(read, PagemillError):
        assert str(read.param).startswith("prompts")
        assert str(read.param) in read.message
        return
    value = plain(prompts)
    is_one = isinstance(value, str | dict) or (isinstance(value, list) and any(type(item) is int for item in value))
    expected = [one_prompt(value)] if is_one else [one_prompt(item) for item in value]
    assert repr(read) == repr(expected)


@settings(max_examples=num_examples(1000), deadline=None)
@given(st.dictionaries(st.sampled_from(SamplingParams.__struct_fields__), anything, max_size=2))
@example({"stop": "Paris"})
@example({"stop_token_ids": 5})
@example({"bad_words": None})
@example({"bad_word_token_ids": [[]]})
@example({"bad_word_token_ids": "x"})
def test_any_parameters_are_used_exactly_as_given_or_refused_by_name(fields: dict[str, Any]) -> None:
    sampling = outcome(lambda: checked(SamplingParams(**fields)))
    if isinstance(sampling, PagemillError):
        assert sampling.param in SamplingParams.__struct_fields__
        assert str(sampling.param) in sampling.message
        return
    for name, value in fields.items():
        expected = plain(value)
        if name in ("stop", "stop_token_ids", "bad_words"):
            expected = [expected] if isinstance(expected, str) else expected or []
        assert repr(getattr(sampling, name)) == repr(expected)
