# /// script
# dependencies = ["tritonclient[http]==2.73.0", "requests", "pydantic"]
# ///
"""NVIDIA's client of the Open Inference Protocol on /v2, and Triton's generate extension beside it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import requests
from checks import MODEL, QUESTION, TEXT_TOKENS, base_url, check, report_all
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

URL = base_url().removesuffix("/v1")
client = InferenceServerClient(URL.removeprefix("http://"), network_timeout=60)


def inputs(*, binary: bool) -> list[InferInput]:
    values = {
        "text_input": ("BYTES", np.array([QUESTION.encode()], dtype=object)),
        "max_tokens": ("INT32", np.array([TEXT_TOKENS], dtype=np.int32)),
        "temperature": ("FP32", np.array([0], dtype=np.float32)),
        "stop": ("BYTES", np.array([b"nothing", "—".encode()], dtype=object)),
    }
    tensors = []
    for name, (datatype, value) in values.items():
        tensors.append(InferInput(name, list(value.shape), datatype))
        tensors[-1].set_data_from_numpy(value, binary_data=binary)
    return tensors


def generate(**fields: Any) -> dict[str, Any]:
    body = {"text_input": QUESTION, "max_tokens": TEXT_TOKENS, "temperature": 0, **fields}
    answer: dict[str, Any] = requests.post(f"{URL}/v2/models/{MODEL}/generate", json=body, timeout=60).json()
    return answer


@check("health and metadata of server and model, `/versions/1` too")
def metadata() -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert not client.is_model_ready("nothing")
    assert client.get_server_metadata()["name"] == "pagemill"
    assert client.get_model_metadata(MODEL, "1")["outputs"][0]["name"] == "text_output"
    assert client.get_model_config(MODEL)["input"][0]["data_type"] == "TYPE_STRING"


@check("`infer` with tensors in JSON and as bytes")
def infer() -> None:
    text = generate()["text_output"]
    for binary in (False, True):
        outputs = [InferRequestedOutput("text_output", binary_data=binary)]
        answer = client.infer(MODEL, inputs(binary=binary), "1", outputs=outputs, request_id="one")
        assert answer.as_numpy("text_output")[0] in (text, text.encode())
        assert answer.get_response()["id"] == "one"
    assert client.infer(MODEL, inputs(binary=True)).as_numpy("text_output")[0] == text.encode()


@check("`infer`, compressed and asynchronous")
def compressed() -> None:
    algorithms = {"request_compression_algorithm": "gzip", "response_compression_algorithm": "gzip"}
    answer = client.infer(MODEL, inputs(binary=True), **algorithms)
    later = client.async_infer(MODEL, inputs(binary=True)).get_result()
    assert later.as_numpy("text_output")[0] == answer.as_numpy("text_output")[0]


@check("`generate` and `generate_stream`")
def generated() -> None:
    whole = generate()["text_output"]
    body = {"text_input": QUESTION, "parameters": {"max_tokens": TEXT_TOKENS, "temperature": 0}}
    stream = requests.post(f"{URL}/v2/models/{MODEL}/generate_stream", json=body, stream=True, timeout=60)
    events = [json.loads(line.removeprefix(b"data: ")) for line in stream.iter_lines() if line.startswith(b"data: ")]
    assert "".join(event["text_output"] for event in events) == whole
    assert generate(exclude_input_in_output=False)["text_output"] == QUESTION + whole


@check("errors raise the client's exceptions")
def errors() -> None:
    message = ""
    try:
        client.infer("nothing", inputs(binary=True))
    except InferenceServerException as error:
        message = error.message()
    assert "nothing" in message


if __name__ == "__main__":
    report_all()
