"""Body of TGI's `POST /generate`, and its translation to a completions request.

Shape and names: text-generation-inference 3. `model` is an addition, for servers with several models.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, FiniteFloat

from pagemill_api.openai.fields import MAX_TEXT_CHARS, RequestModel, StopList, refusal
from pagemill_api.openai.unsupported import Unsupported
from pagemill_protocol.request.sampling import MAX_STOP_STRINGS, MAX_TOP_LOGPROBS

DEFAULT_NEW_TOKENS = 100
_REMOVE = "Remove it."
_FORMS = {"json": "guided_json", "json_schema": "guided_json", "regex": "guided_regex"}


class TgiGrammar(RequestModel):
    type: Literal["json", "json_schema", "regex"]
    value: dict[str, Any] | str


class TgiParameters(RequestModel):
    UNSUPPORTED: ClassVar = {
        "typical_p": Unsupported("Use `top_p` or `min_p`.", (1, 1.0)),
        "watermark": Unsupported(_REMOVE, (False,)),
        "best_of": Unsupported("Send the request several times.", (1,)),
        "adapter_id": Unsupported("Send the adapter's name as `model`."),
    }

    max_new_tokens: int = DEFAULT_NEW_TOKENS
    do_sample: bool = False
    temperature: FiniteFloat | None = None
    top_k: int | None = None
    top_p: FiniteFloat | None = None
    min_p: FiniteFloat | None = None
    repetition_penalty: FiniteFloat | None = None
    frequency_penalty: FiniteFloat | None = None
    seed: int | None = None
    stop: StopList = Field([], max_length=MAX_STOP_STRINGS)
    truncate: int | None = Field(None, ge=1)
    """Number of the prompt's last tokens to keep."""
    return_full_text: bool = False
    details: bool = False
    decoder_input_details: bool = False
    top_n_tokens: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    grammar: TgiGrammar | None = None

    @property
    def samples(self) -> bool:
        """Whether the answer is sampled: as in TGI, any value that only sampling uses enables it."""
        asking = (self.temperature, self.top_k, self.top_p, self.min_p)
        return self.do_sample or any(each is not None for each in asking)

    def for_completion(self) -> dict[str, Any]:
        names = ("top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "seed", "stop")
        usual_temperature = 1.0 if self.samples else 0.0
        return {
            **{name: getattr(self, name) for name in names},
            "max_tokens": self.max_new_tokens,
            "truncate_prompt_tokens": self.truncate,
            "temperature": usual_temperature if self.temperature is None else self.temperature,
            "include_stop_str_in_output": True,
            **({} if self.grammar is None else {_FORMS[self.grammar.type]: self.grammar.value}),
        }


class TgiRequest(RequestModel):
    inputs: Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARS)]
    parameters: TgiParameters = Field(default_factory=lambda: TgiParameters.model_validate({}))
    stream: bool = False
    model: str = Field("", max_length=512)

    @property
    def has_details(self) -> bool:
        return self.parameters.details or self.parameters.decoder_input_details

    def for_completion(self, only_model: str, *, stream: bool) -> dict[str, Any]:
        """Return the body of the equivalent completion. Raises `PydanticCustomError` for refused content."""
        model = self.model or only_model
        if not model:
            raise refusal("model", "Not exactly one model is served here. Name one in the field `model`.")
        if stream and self.parameters.decoder_input_details:
            raise refusal(
                "parameters.decoder_input_details",
                "`decoder_input_details` does not go with a stream. Remove it, or send the request to /generate.",
            )
        body = {
            "model": model,
            "prompt": self.inputs,
            "stream": stream,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True} if stream else None,
            "logprobs": self.parameters.top_n_tokens if stream or self.has_details else None,
            "echo": self.parameters.decoder_input_details,
            **self.parameters.for_completion(),
        }
        return {name: value for name, value in body.items() if value is not None}
