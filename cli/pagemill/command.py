"""The base class of commands with many options: their fields are the options. `main` makes and runs them.

Commands with few options are functions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True)
class CommandWithOptions(ABC):
    @staticmethod
    def rewritten_arguments(words: list[str]) -> list[str]:
        """Return the arguments, as a person wrote them, in this command's words."""
        return words

    @abstractmethod
    def run(self) -> None: ...
