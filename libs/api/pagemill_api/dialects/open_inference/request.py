"""Bodies of `POST /v2/models/NAME/generate` and `/infer`, and their translation to completions requests.

`generate` is Triton's extension: the inputs of a model as fields of one object, or of its `parameters`. `infer` has the
same inputs as tensors or among its parameters.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, FiniteFloat

from pagemill_api.dialects.open_inference.tensors import MAX_DIMENSIONS, flat, unpacked
from pagemill_api.dialects.translation import SamplingExtensions
from pagemill_api.openai.fields import MAX_TEXT_CHARS, RequestModel, StopList, refusal
from pagemill_api.openai.unsupported import TEXT_ONLY, Unsupported
from pagemill_protocol.errors import show
from pagemill_protocol.request.sampling import MAX_STOP_STRINGS

MAX_TENSORS = 64
_COMPLETIONS = "Send the request to /v1/completions, which has it."
_SEVERAL = "Send the request several times."
_WHOLE = "Stateful sequences are not supported: send the whole prompt in each request."
REPORTS = (
    *("return_context_logits", "return_generation_logits", "return_logprobs", "return_cumulative_logprob"),
    *("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens", "return_token_ids"),
)
"""Further outputs that backends of Triton offer."""


class InferSettings(SamplingExtensions):
    """Inputs other than the text. `random_seed` and `stop_words` are other names of `seed` and `stop`."""

    UNSUPPORTED: ClassVar = {
        "beam_width": Unsupported(_COMPLETIONS, (1,)),
        "return_log_probs": Unsupported(_COMPLETIONS, (False,)),
        "n": Unsupported(_SEVERAL, (1,)),
        "best_of": Unsupported(_SEVERAL, (1,)),
        "sampling_parameters": Unsupported("Send each parameter as an input of its own."),
        "sequence_id": Unsupported(_WHOLE, (0, "")),
        **dict.fromkeys(("sequence_start", "sequence_end"), Unsupported(_WHOLE, (False,))),
        "timeout": Unsupported("Send the header `x-request-timeout-s` to a gateway."),
        "bad_words": Unsupported(_COMPLETIONS, ([], "")),
        "early_stopping": Unsupported(_COMPLETIONS, (False, 0)),
        "length_penalty": Unsupported(_COMPLETIONS, (1, 1.0)),
        "len_penalty": Unsupported(_COMPLETIONS, (1, 1.0)),
        "min_length": Unsupported("Send `min_tokens`.", (0,)),
        "end_id": Unsupported("Send the request to /v1/completions with `stop_token_ids`."),
        **dict.fromkeys(
            REPORTS, Unsupported("The output is text alone. Send the request to /v1/completions.", (False,))
        ),
        **dict.fromkeys(("image", "audio", "video", "multi_modal_data"), Unsupported(TEXT_ONLY)),
    }
    IGNORED: ClassVar = {"pad_id": "batches are not padded"}

    max_tokens: int | None = None
    temperature: FiniteFloat | None = None
    top_p: FiniteFloat | None = None
    top_k: int | None = None
    presence_penalty: FiniteFloat | None = None
    frequency_penalty: FiniteFloat | None = None
    random_seed: int | None = None
    stop: StopList = Field([], max_length=MAX_STOP_STRINGS)
    stop_words: StopList = Field([], max_length=MAX_STOP_STRINGS)
    exclude_input_in_output: bool = True
    stream: bool = False

    def for_completion(self) -> dict[str, Any]:
        names = ("max_tokens", "temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty")
        stop = [each for each in self.stop or self.stop_words if each]  # clients send an empty string for none
        values = {**self.extensions, **{name: getattr(self, name) for name in names}}
        return {**values, "stop": stop, "seed": self.random_seed if self.seed is None else self.seed}


class GenerateBody(InferSettings):
    text_input: Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARS)]
    IGNORED: ClassVar = {**InferSettings.IGNORED, "stream": "the path decides"}

    parameters: dict[str, Any] = Field(default_factory=dict)
    id: str = Field("", max_length=512)

    def merged(self) -> GenerateBody:
        """Return the body with the values of `parameters` as its fields. Raises `ValidationError`."""
        if not self.parameters:
            return self
        given = {name: getattr(self, name) for name in self.model_fields_set - {"parameters"}}
        return GenerateBody.model_validate({**given, **self.parameters})

    def for_completion(self, model: str = "", *, stream: bool = False) -> dict[str, Any]:
        """Return the body of the equivalent completion."""
        body = {"model": model, "prompt": self.text_input, "stream": stream, **super().for_completion()}
        return {name: value for name, value in body.items() if value is not None}


_SHARED_MEMORY = {
    name: Unsupported("Shared memory is not supported. Send the data in the body.")
    for name in ("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size")
}


class TensorParameters(RequestModel):
    UNSUPPORTED: ClassVar = _SHARED_MEMORY

    binary_data_size: int | None = Field(None, ge=0)


class OutputParameters(RequestModel):
    UNSUPPORTED: ClassVar = {
        **_SHARED_MEMORY,
        "classification": Unsupported("The output is text. Remove it.", (0,)),
    }

    binary_data: bool | None = None


class Tensor(RequestModel):
    name: str = Field(min_length=1, max_length=512)
    shape: list[Annotated[int, Field(ge=0)]] = Field(max_length=MAX_DIMENSIONS)
    datatype: Literal[
        "BYTES", "BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "FP32", "FP64"
    ]
    data: list[Any] | None = None
    parameters: TensorParameters = Field(default_factory=lambda: TensorParameters.model_validate({}))


class OutputTensor(RequestModel):
    name: Literal["text_output"]
    parameters: OutputParameters = Field(default_factory=lambda: OutputParameters.model_validate({}))


class InferBody(RequestModel):
    id: str = Field("", max_length=512)
    inputs: list[Tensor] = Field(min_length=1, max_length=MAX_TENSORS)
    outputs: list[OutputTensor] = Field([], max_length=1)
    parameters: dict[str, Any] = Field(default_factory=dict)

    @property
    def binary_output(self) -> bool:
        usual = self.parameters.get("binary_data_output") is True
        asked = self.outputs[0].parameters.binary_data if self.outputs else None
        return usual if asked is None else asked

    @property
    def text_shape(self) -> list[int]:
        return next((each.shape for each in self.inputs if each.name == "text_input"), [1])

    def for_generate(self, binary: bytes) -> GenerateBody:
        """Return the equivalent body of `generate`. Raises `PydanticCustomError` or `ValidationError`.

        `binary`: the bytes after the JSON.
        """
        values: dict[str, Any] = {}
        begin = 0
        for tensor in self.inputs:
            size = tensor.parameters.binary_data_size
            end = begin + (size or 0)
            if end > len(binary):
                raise refusal(tensor.name, f"`{tensor.name}` needs {size} bytes after the JSON; fewer were sent.")
            if tensor.name not in NAMES or tensor.name in values:
                known = ", ".join(sorted(INPUTS))
                raise refusal(
                    "inputs", f"There is no input {show(tensor.name)}, or it was sent twice. Inputs: {known}."
                )
            values[tensor.name] = _value(tensor, None if size is None else binary[begin:end])
            begin = end
        if begin != len(binary):
            raise refusal("inputs", f"{len(binary) - begin} bytes after the JSON belong to no input. Remove them.")
        found = GenerateBody.model_validate({**self.parameters, **values})
        if found.stream:
            raise refusal("stream", "/infer answers as a whole. Send the text to /generate_stream to get a stream.")
        return found


class Input(NamedTuple):
    datatype: str
    config_type: str
    length: int = 1
    """-1: any."""


INPUTS = {
    "text_input": Input("BYTES", "TYPE_STRING"),
    "max_tokens": Input("INT32", "TYPE_INT32"),
    "temperature": Input("FP32", "TYPE_FP32"),
    "top_p": Input("FP32", "TYPE_FP32"),
    "top_k": Input("INT32", "TYPE_INT32"),
    "min_p": Input("FP32", "TYPE_FP32"),
    "repetition_penalty": Input("FP32", "TYPE_FP32"),
    "presence_penalty": Input("FP32", "TYPE_FP32"),
    "frequency_penalty": Input("FP32", "TYPE_FP32"),
    "seed": Input("INT64", "TYPE_INT64"),
    "stop": Input("BYTES", "TYPE_STRING", -1),
    "exclude_input_in_output": Input("BOOL", "TYPE_BOOL"),
}
"""The inputs that metadata lists; other integer and float types are accepted too."""


NAMES = {"text_input", *InferSettings.model_fields}


def _value(tensor: Tensor, raw: bytes | None) -> Any:
    """Return the single value of a tensor, or the list of stop strings."""
    if raw is None and tensor.data is None:
        raise refusal(tensor.name, f"`{tensor.name}` has no data. Send `data`, or bytes after the JSON.")
    values = list(flat(tensor.data or [], tensor.name)) if raw is None else unpacked(raw, tensor.datatype, tensor.name)
    if len(values) != math.prod(tensor.shape):
        raise refusal(
            tensor.name, f"`{tensor.name}` has {len(values)} elements, and its shape says {math.prod(tensor.shape)}."
        )
    if tensor.name in ("stop", "stop_words"):
        return values
    if len(values) != 1:
        raise refusal(tensor.name, f"`{tensor.name}` must have one element, got {len(values)}. {_SEVERAL}")
    return values[0]
