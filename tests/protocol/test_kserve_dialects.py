"""KServe's inference protocol: the completion that tensors and fields are translated to, and the answers."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_api.dialects.base import FinishedChoice, Piece
from pagemill_api.dialects.open_inference.kserve import HEADER_LENGTH, PAGES, KserveGenerateDialect, KserveInferDialect
from pagemill_api.dialects.open_inference.request import InferBody
from pagemill_api.dialects.open_inference.tensors import packed, unpacked
from pagemill_api.dialects.pages import PageRequest
from pagemill_api.dialects.transport import RequestInfo
from pagemill_api.openai.parse import parse_body
from pagemill_api.openai.render import ModelCard
from pagemill_api.openai.schemas import CompletionRequest
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.generate import GenerateRequest, Usage
from pagemill_protocol.request.sampling import SamplingParams

GENERATE, INFER = KserveGenerateDialect(), KserveInferDialect()
TEXT: dict[str, Any] = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["hi"]}


def place(route: str, model: str = "m", header: str | None = None) -> RequestInfo:
    return RequestInfo(f"/v2/models/{model}/{route}", {"model": model}, {HEADER_LENGTH: header}.get)


def generate(route: str = "generate", model: str = "m", **fields: Any) -> CompletionRequest:
    body = GENERATE.parse(json.dumps({"text_input": "hi", **fields}).encode(), place(route, model))
    body.sampling()
    return body.fields


def tensor(name: str, datatype: str, *values: Any, **fields: Any) -> dict[str, Any]:
    return {"name": name, "shape": [len(values)], "datatype": datatype, "data": list(values), **fields}


def infer(*inputs: Any, behind: bytes = b"", **fields: Any) -> CompletionRequest:
    raw = json.dumps({"inputs": [TEXT, *inputs], **fields}).encode()
    body = INFER.parse(raw + behind, place("infer", header=str(len(raw)) if behind else None))
    body.sampling()
    return body.fields


def request(**asked: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="infer-1",
        model="m",
        prompt_token_ids=[1],
        sampling=SamplingParams(),
        client_fields=json.dumps(asked),
    )


def choice(text: str) -> FinishedChoice:
    return FinishedChoice(0, text, "stop", None)


def test_fields_and_parameters_are_translated_to_completion_fields() -> None:
    fields = generate(max_tokens=9, parameters={"temperature": 0.5, "random_seed": 3, "stop_words": ["", "END"]})
    assert (fields.model, fields.prompt, fields.max_tokens, fields.stream) == ("m", ["hi"], 9, False)
    assert (fields.temperature, fields.seed, fields.stop) == (0.5, 3, ["END"])
    assert generate("generate_stream").stream


def test_version_1_in_the_path_is_ignored_and_another_one_is_part_of_the_name() -> None:
    assert generate(model="org/m/versions/1").model == "org/m"
    assert generate(model="m/versions/2").model == "m/versions/2"


def test_tensors_in_json_are_settings() -> None:
    fields = infer(
        tensor("max_tokens", "INT32", 9),
        tensor("temperature", "FP32", 0.5),
        {**tensor("stop", "BYTES"), "shape": [2, 1], "data": [["a"], ["b"]]},
        parameters={"top_k": 4},
    )
    assert (fields.max_tokens, fields.temperature, fields.stop, fields.top_k) == (9, 0.5, ["a", "b"], 4)


def test_tensors_after_the_json_are_settings() -> None:
    seed, stop = struct.pack("<q", 7), packed("é") + packed("END")
    fields = infer(
        {**tensor("seed", "INT64"), "shape": [1], "data": None, "parameters": {"binary_data_size": len(seed)}},
        {**tensor("stop", "BYTES"), "shape": [2], "data": None, "parameters": {"binary_data_size": len(stop)}},
        behind=seed + stop,
    )
    assert (fields.seed, fields.stop) == (7, ["é", "END"])


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))
def test_texts_are_restored_from_their_bytes(texts: list[str]) -> None:
    assert unpacked(b"".join(map(packed, texts)), "BYTES", "stop") == texts


def sized(datatype: str, size: int) -> dict[str, Any]:
    return {"name": "stop", "shape": [1], "datatype": datatype, "parameters": {"binary_data_size": size}}


@pytest.mark.parametrize(
    ("inputs", "behind", "named"),
    [
        ([tensor("stream", "BOOL", True)], b"", "/generate_stream"),
        ([tensor("image", "BYTES", "x")], b"", 'no input "image"'),
        ([TEXT], b"", "sent twice"),
        ([tensor("top_k", "INT32", 1, 2)], b"", "`top_k` must have one element, got 2"),
        ([tensor("top_k", "INT32", 1, shape=[2])], b"", "has 1 elements, and its shape says 2"),
        ([tensor("top_k", "INT32", "x")], b"", "`top_k` must be an integer"),
        ([tensor("top_p", "FP32", 7)], b"", "top_p must be"),
        ([tensor("top_p", "BF16", 1)], b"", "`inputs[1].datatype` must be one of"),
        ([{"name": "stop", "shape": [0], "datatype": "BYTES"}], b"", "has no data"),
        ([{**TEXT, "name": "stop", "data": [[[[[[[[[["x"]]]]]]]]]]}], b"", "lists more than 8 deep"),
        ([{**TEXT, "name": "stop", "parameters": {"shared_memory_region": "r"}}], b"", "`shared_memory_region`"),
        ([sized("BYTES", 9)], b"12345", "needs 9 bytes"),
        ([sized("BYTES", 5)], b"\x09\x00\x00\x00x", "ends within an element"),
        ([sized("BYTES", 5)], b"\x01\x00\x00\x00\xff", "not valid UTF-8"),
        ([sized("BYTES", 5)], b"\x01\x00\x00\x00\x00", "U+0000"),
        ([sized("INT32", 5)], b"12345", "multiple of 4"),
        ([], b"x", "belong to no input"),
    ],
)
def test_an_invalid_tensor_is_named(inputs: list[Any], behind: bytes, named: str) -> None:
    with pytest.raises(PagemillError) as caught:
        infer(*inputs, behind=behind)
    assert caught.value.status == 400
    assert named in caught.value.message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"text_input": ""}, "`text_input` must have at least 1 character"),
        ({"beam_width": 2}, "`beam_width` is not supported"),
        ({"parameters": {"n": 2}}, "`n` is not supported"),
        ({"image": "aGk="}, "`image` is not supported. This server reads and writes text only"),
        ({"parameters": {"max_tokens": "x"}}, "`max_tokens` must be an integer"),
        ({"parameters": 7}, "`parameters` must be an object"),
    ],
)
def test_an_invalid_field_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(PagemillError) as caught:
        generate(**fields)
    assert named in caught.value.message


@pytest.mark.parametrize("length", ["x", "-1", "99", "9" * 30, "²"])
def test_a_header_length_beyond_the_body_is_refused(length: str) -> None:
    with pytest.raises(PagemillError, match="Inference-Header-Content-Length must be 0 to 2"):
        INFER.parse(b"{}", place("infer", header=length))


@given(st.text(), st.lists(st.integers(0, 3)))
def test_a_stream_in_any_chunks_has_the_text_of_the_whole_answer(text: str, sizes: list[int]) -> None:
    renderer = GENERATE.renderer(request(), None)
    raw, rest = b"", text
    for at, size in enumerate([*sizes, len(text)]):
        raw += renderer.chunk(Piece(0, rest[:size], at == 0, None, None, None))
        rest = rest[size:]
    raw += renderer.end(Usage(1, 2))
    events = [json.loads(event.removeprefix(b"data: ")) for event in raw.split(b"\n\n")[:-1]]
    whole = json.loads(GENERATE.renderer(request(), None).body([choice(text)], Usage(1, 2)))
    assert "".join(event.pop("text_output") for event in events) == whole.pop("text_output") == text
    assert all(event == whole for event in events)


def test_an_answer_is_a_tensor_in_json() -> None:
    raw = INFER.renderer(request(id="one", shape=[1, 1], before="hi "), None).body([choice("you")], Usage(1, 1))
    output = {"name": "text_output", "datatype": "BYTES", "shape": [1, 1], "data": ["hi you"]}
    assert json.loads(raw) == {"id": "one", "model_name": "m", "model_version": "1", "outputs": [output]}
    assert INFER.transport.body_headers(raw) == {"content-type": "application/json"}


@given(st.text())
def test_a_binary_answer_follows_json_of_the_length_in_the_header(text: str) -> None:
    raw = INFER.renderer(request(binary=True), None).body([choice(text)], Usage(1, 1))
    length = int(INFER.transport.body_headers(raw)[HEADER_LENGTH])
    (output,) = json.loads(raw[:length])["outputs"]
    assert output["parameters"] == {"binary_data_size": len(raw) - length}
    assert unpacked(raw[length:], "INT8", "x") == list(struct.unpack(f"{len(raw) - length}b", packed(text)))


def test_the_requested_outputs_determine_their_form() -> None:
    asked = [{"name": "text_output", "parameters": {"binary_data": False}}]
    for outputs, binary in (([], True), (asked, False)):
        raw = json.dumps({"inputs": [TEXT], "outputs": outputs, "parameters": {"binary_data_output": True}}).encode()
        assert parse_body(raw, InferBody).binary_output is binary


def test_errors_have_tritons_format() -> None:
    error = PagemillError("Wrong.", param="text_input")
    assert json.loads(INFER.error_body(error)) == {"error": "Wrong."}
    assert GENERATE.error_event(error) == b'data: {"error":"Wrong."}\n\n'


def test_metadata_is_served_for_existing_models_and_readiness_for_served_ones() -> None:
    server, ready, config, metadata = (page.body for page in PAGES)
    cards = [ModelCard("m", 1, max_model_len=64), ModelCard("cold", 1)]
    asked = PageRequest(cards, place("", "m/versions/1"), b"", "1.2")
    assert json.loads(server(asked))["version"] == "1.2"
    assert ready(asked) == b"{}"
    assert [each["name"] for each in json.loads(metadata(asked))["inputs"] if each["shape"] == [-1]] == ["stop"]
    assert [each["name"] for each in json.loads(config(asked))["input"] if not each["optional"]] == ["text_input"]
    with pytest.raises(PagemillError) as caught:
        ready(asked._replace(info=place("", "cold")))
    assert caught.value.status == 503
    with pytest.raises(PagemillError, match="does not exist"):
        metadata(asked._replace(info=place("", "x")))
