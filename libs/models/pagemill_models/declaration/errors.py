"""The error for models that cannot be computed, shared by all readers of the registry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pagemill_protocol.source_errors import SourceError, UnreadableModelError


class UnsupportedModelArchitecture(SourceError):
    """The files are valid, but no model family fits them."""

    def __init__(self, message: str) -> None:
        super().__init__("model.source", message, reason="UnsupportedArchitecture")


_BARE = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class Contradiction(ValueError):
    """Two values of a model's settings that do not fit together; the message names both."""


@contextmanager
def contradictions(path: Path) -> Iterator[None]:
    """Raise `UnreadableModelError` for settings of `path` that a family cannot declare a model from.

    Families check the values that they read. What none of them has thought of, and what families of other packages do
    not check, still is an error about the model and not about this program.
    """
    try:
        yield
    except Contradiction as error:
        raise UnreadableModelError(f"`{path}`: {error}. Correct its settings.") from None
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        AssertionError,
        RecursionError,
    ) as error:
        raise UnreadableModelError(
            f"`{path}`: its settings contradict each other or have values of another kind ({type(error).__name__}: "
            f"{str(error)[:120]}). Fetch the model again."
        ) from error
