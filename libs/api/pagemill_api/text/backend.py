"""The `tokenizers` library as `tokenizer` and `words` use it: its failures become errors of ours.

The library raises plain exceptions, and its bugs are panics: `PanicException` of its binding is no `Exception`, so that
it would end an event loop or a thread that others depend on. One text's failure is an error of one request.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from pagemill_protocol.errors import PagemillError, invalid_field
from pagemill_protocol.source_errors import UnreadableModelError

TOKENIZER_ERROR = "tokenizer_error"
"""Code of errors of one text that the model's tokenizer cannot encode."""
_SHOWN = 160
_PANIC = "PanicException"
"""Name of the class of panics, which the binding does not export."""


def encode_texts(backend: Backend, texts: list[str], *, add_special_tokens: bool) -> list[Encoding]:
    """Encode texts. Raises `PagemillError` 400 where the library fails."""
    try:
        # The batch call releases the interpreter's lock, which `encode` does not, and computes no offsets.
        encodings: list[Encoding] = backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    except BaseException as error:
        raise _failed(error) from None
    return encodings


def post_process(backend: Backend, encoding: Encoding, pair: Encoding | None) -> Encoding:
    """Add special tokens. Raises `PagemillError` 400 where the library fails."""
    try:
        processed: Encoding = backend.post_process(encoding, pair, True)
    except BaseException as error:
        raise _failed(error) from None
    return processed


@contextmanager
def loading() -> Iterator[None]:
    """Raise `UnreadableModelError` for whatever the block raises while it reads a model's tokenizer."""
    try:
        yield
    except UnreadableModelError:
        raise
    except BaseException as error:
        if not _is_failure(error):
            raise
        raise UnreadableModelError(f"the model's tokenizer cannot be loaded: {str(error)[:_SHOWN]}") from None


def _failed(error: BaseException) -> BaseException:
    if isinstance(error, PagemillError) or not _is_failure(error):
        return error
    return invalid_field(
        "prompt", f"The model's tokenizer failed on this text: {str(error)[:_SHOWN]}.", code=TOKENIZER_ERROR
    )


def _is_failure(error: BaseException) -> bool:
    return isinstance(error, Exception) or type(error).__name__ == _PANIC
