"""Bodies of the routes for vectors and scores. Alternative shapes are normalized here, as in `openai.fields`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema, model_validator

from pagemill_api.openai.fields import (
    MAX_PROMPTS,
    Name,
    Prompts,
    RequestId,
    RequestModel,
    Text,
    prompts_of,
    refusal,
)
from pagemill_api.openai.schemas import Priority
from pagemill_api.openai.unsupported import NO_USERS, TEXT_ONLY, Unsupported
from pagemill_protocol.errors import show

_TEXTS_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}


def _texts(value: Any, name: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise refusal("", f"`{name}` must be a string or a list of strings, got {show(value)}.")
    return [str(text) for text in prompts_of(texts, name)]


def _document(value: Any) -> Any:
    """Return the text of a document; Cohere's and Jina's clients may send it in an object."""
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        return value["text"]
    if not isinstance(value, str):
        raise refusal("", f'A document must be a string or an object with "text", got {show(value)}.')
    return value


Inputs = Annotated[
    list[str | list[int]],
    PlainValidator(partial(prompts_of, name="input")),
    *[each for each in Prompts.__metadata__ if isinstance(each, WithJsonSchema)],
]
FirstTexts = Annotated[list[str], PlainValidator(partial(_texts, name="text_1")), WithJsonSchema(_TEXTS_SCHEMA)]
SecondTexts = Annotated[list[str], PlainValidator(partial(_texts, name="text_2")), WithJsonSchema(_TEXTS_SCHEMA)]
Document = Annotated[
    Text,
    Field(min_length=1),
    BeforeValidator(_document),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "object", "properties": {"text": {"type": "string", "minLength": 1}}, "required": ["text"]},
            ]
        }
    ),
]


_TO_CUT = "Send `truncate_prompt_tokens` to cut texts."
_BY_PROMPT = "Send `prompt_name` to /v1/embeddings for a model with prompts; rankings use them themselves."
_BY_FILES = "The model's files say whether its scores are scaled; remove it."
UNSUPPORTED: Mapping[str, Unsupported] = {
    "messages": Unsupported("Send the text itself."),
    "stream": Unsupported("Vectors and scores are not streamed; remove it.", (False,)),
    "normalize": Unsupported("The model's files say whether its vectors are normalized; remove it."),
    "embedding_types": Unsupported("Send `encoding_format`.", (["float"],)),
    "output_dtype": Unsupported("Vectors are float32; remove it.", ("float",)),
    "rank_fields": Unsupported("Send each document as one text.", ([],)),
    "max_chunks_per_doc": Unsupported("Documents are not split; send `truncate_prompt_tokens` to cut them."),
    "max_tokens_per_doc": Unsupported(_TO_CUT),
    "truncate": Unsupported(_TO_CUT, (False, "NONE")),
    "truncation": Unsupported(_TO_CUT, (False,)),
    "truncation_side": Unsupported("Texts are cut at their end; remove it.", ("right",)),
    "input_type": Unsupported(_BY_PROMPT),
    "task": Unsupported(_BY_PROMPT),
    "embedding_type": Unsupported("Send `encoding_format`.", ("float",)),
    "output_dimension": Unsupported("Send `dimensions`."),
    "embed_dtype": Unsupported("Vectors are float32; remove it.", ("float32",)),
    "endianness": Unsupported("Vectors are little-endian; remove it.", ("native", "little")),
    "late_chunking": Unsupported("Each text has a vector of its own; remove it.", (False,)),
    "return_multivector": Unsupported("Each text has one vector; remove it.", (False,)),
    "return_embeddings": Unsupported("Send the texts to /v1/embeddings.", (False,)),
    "relevant_spans": Unsupported("Documents are scored as a whole; remove it."),
    "add_special_tokens": Unsupported("The model's files say which special tokens it reads; remove it.", (True,)),
    "activation": Unsupported(_BY_FILES),
    "use_activation": Unsupported(_BY_FILES),
    "chat_template": Unsupported("Texts are not rendered; send them as the model shall read them."),
    "chat_template_kwargs": Unsupported("Texts are not rendered; send them as the model shall read them.", ({},)),
    "mm_processor_kwargs": Unsupported(TEXT_ONLY, ({},)),
}
"""Fields of embedding APIs that are not supported: refused by name, as in `openai.unsupported`."""


class VectorRequest(RequestModel):
    """The fields of all three routes."""

    UNSUPPORTED: ClassVar = UNSUPPORTED
    IGNORED: ClassVar = {"user": NO_USERS}

    model: Name
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=2**31 - 1)
    """Maximum tokens of a text, special tokens included; longer texts are truncated. -1: the model's limit."""
    priority: Priority = 0
    request_id: RequestId | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None

    @model_validator(mode="after")
    def _check_truncation(self) -> VectorRequest:
        if self.truncate_prompt_tokens == 0:
            raise refusal("truncate_prompt_tokens", "`truncate_prompt_tokens` must be -1 or at least 1, got 0.")
        return self


class EmbeddingRequest(VectorRequest):
    """Body of `POST /v1/embeddings`."""

    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, le=2**20)
    prompt_name: Name | None = None
    """Name of the model's prompt that is prepended to each text (sentence-transformers); `None`: the model's
    default."""


class RerankRequest(VectorRequest):
    """Body of `POST /v1/rerank`, as clients of Jina and Cohere send it."""

    query: Annotated[Text, Field(min_length=1)]
    documents: list[Document] = Field(min_length=1, max_length=MAX_PROMPTS)
    top_n: int | None = Field(None, ge=1, le=2**31 - 1)
    return_documents: bool = True


class ScoreRequest(VectorRequest):
    """Body of `POST /v1/score`, as clients of vLLM send it: one text with each of several, or pair by pair."""

    text_1: FirstTexts
    text_2: SecondTexts

    @model_validator(mode="after")
    def _pair_up(self) -> ScoreRequest:
        firsts, seconds = len(self.text_1), len(self.text_2)
        if firsts not in (1, seconds):
            raise refusal(
                "text_2",
                f"`text_1` has {firsts} texts and `text_2` {seconds}. Send one `text_1`, or as many as `text_2`.",
            )
        return self
