"""Decide whether a regular expression of a tokenizer splits every text in linear time. Pure; nothing is compiled.

The libraries that run these expressions backtrack: `(?:a|a)*b` takes years for 60 letters. Accepted are alternatives
of sets of characters with quantifiers, as published tokenizers have them, of which each either

- consumes a run of characters after which nothing can fail, or
- may fail after such a run, and a later alternative consumes the same run: `\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+`.

`tokenizer_rules` applies this to the steps of a tokenizer; `words` runs accepted expressions as Python's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MAX_CHARS = 2048
MAX_WORK = 256
"""Maximum steps of all alternatives at one position of a text, without those in runs of unlimited length."""
MAX_ALTERNATIVES = 128
_MAX_DEPTH = 8
_SET = re.compile(
    r"\\[pP]\{\^?[A-Za-z_ -]{1,40}\}|\\x\{[0-9A-Fa-f]{1,6}\}|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}"
    r"|\\[sSdDwWhHrntfve]|\\[^A-Za-z0-9]|[^\\\[\](){}?*+|^$]",
    re.DOTALL,
)
_IN_CLASS = re.compile(r"\\[pP]\{[^{}]{1,40}\}|\\x\{[0-9A-Fa-f]{1,6}\}|\\.|[^\[\]\\]", re.DOTALL)
_POSIX = re.compile(r"\[:\^?[a-z]+:\]")
_QUANTIFIER = re.compile(r"([?*+])(\+?)|\{(\d{1,4})(?:(,)(\d{1,4})?)?\}|\{(,)(\d{1,4})\}")
_OPENING = re.compile(r"\((\?(?:[im]+)?:|\?>|\?=|\?!|(?!\?))")


class NotLinear(ValueError):
    """The time is not known to be linear in the length of a text; the message says why."""


class _Item(NamedTuple):
    """A set of characters, a group or a lookahead, with its quantifier."""

    source: str
    minimum: int
    """Minimum characters."""
    work: int
    """Most steps to match it, if it is bounded."""
    is_unbounded: bool = False
    is_lookahead: bool = False

    @property
    def can_fail(self) -> bool:
        return self.is_lookahead or self.minimum > 0


_Branch = tuple[_Item, ...]


def least_chars(pattern: str) -> int:
    """Return the least number of characters of a match. Raises `NotLinear` where the time is not known to be linear."""
    if len(pattern) > MAX_CHARS:
        raise NotLinear(f"it has {len(pattern)} characters, more than {MAX_CHARS}")
    parser = _Parser(pattern)
    branches = parser.alternatives(0)
    if parser.at < len(pattern):
        raise NotLinear(f"a `)` without a group at character {parser.at}")
    if sum(map(_work, branches)) > MAX_WORK:
        raise NotLinear(f"it takes more than {MAX_WORK} steps at one position")
    for index in range(len(branches)):
        _check_branch(branches, index)
    return min(sum(item.minimum for item in branch) for branch in branches)


def _check_branch(branches: Sequence[_Branch], index: int) -> None:
    """Raise `NotLinear` for an alternative that may fail after a run of characters which nothing consumes then."""
    begun = _until_run(branches[index])
    if begun is None or not _can_fail_after(branches[index], len(begun)):
        return
    for later in branches[index + 1 :]:
        if _until_run(later) != begun:
            break
        if not _can_fail_after(later, len(begun)):
            return
    run = begun[-1]
    raise NotLinear(f"an alternative may fail after a run of `{run[:40]}`, and none after it consumes that run")


def _until_run(branch: _Branch) -> list[str] | None:
    """Return the sources of the items up to the first run of unlimited length, or None without one."""
    for index, item in enumerate(branch):
        if item.is_unbounded:
            return [each.source for each in branch[: index + 1]]
    return None


def _can_fail_after(branch: _Branch, begun: int) -> bool:
    """Whether something after the first run can fail. Raises `NotLinear` where a second run may be repeated then."""
    rest = branch[begun:]
    second = next((index for index, item in enumerate(rest) if item.is_unbounded), len(rest))
    if any(item.can_fail for item in rest[second + 1 :]):
        raise NotLinear("an alternative may fail after two runs of unlimited length")
    return any(item.can_fail for item in rest)


def _work(branch: _Branch) -> int:
    work = 1
    for item in branch:
        work = min(MAX_WORK + 1, work * item.work)
    return work


class _Parser:
    """Parses alternatives. Groups that contain runs are replaced by one alternative for each of theirs."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.at = 0

    def alternatives(self, depth: int) -> list[_Branch]:
        """Parse up to the end of the group or the pattern."""
        if depth > _MAX_DEPTH:
            raise NotLinear(f"its groups are nested more than {_MAX_DEPTH} deep")
        found: list[_Branch] = []
        branches: list[_Branch] = [()]
        while self.at < len(self._pattern) and self._pattern[self.at] != ")":
            if self._pattern[self.at] == "|":
                self.at += 1
                found += branches
                branches = [()]
            else:
                branches = [(*branch, *more) for branch in branches for more in self._next(depth)]
            if len(found) + len(branches) > MAX_ALTERNATIVES:
                raise NotLinear(f"it has more than {MAX_ALTERNATIVES} alternatives")
        return found + branches

    def _next(self, depth: int) -> list[_Branch]:
        """Return the ways to match the next item."""
        start = self.at
        opening = _OPENING.match(self._pattern, start)
        if opening is None:
            source = self._set()
            return [(self._quantified(source, 1, 1),)]
        self.at = opening.end()
        inner = self.alternatives(depth + 1)
        if not self._pattern.startswith(")", self.at):
            raise NotLinear(f"the group at character {start} has no end")
        self.at += 1
        source = self._pattern[start : self.at]
        if opening[1] in ("?=", "?!"):
            return [(_lookahead(inner, source),)]
        if any(item.is_unbounded or item.is_lookahead for branch in inner for item in branch):
            if _QUANTIFIER.match(self._pattern, self.at):
                raise NotLinear(f"the group `{source[:40]}` repeats runs of unlimited length, or lookaheads")
            return [tuple(_marked(branch, opening[1])) for branch in inner]
        minimum = min(sum(item.minimum for item in branch) for branch in inner)
        return [(self._quantified(source, minimum, sum(map(_work, inner))),)]

    def _set(self) -> str:
        """Parse a set of characters: one character, an escape or a class in brackets."""
        if self._pattern[self.at] == "[":
            return self._class()
        match = _SET.match(self._pattern, self.at)
        if match is None:
            raise NotLinear(f"`{self._pattern[self.at : self.at + 10]}` at character {self.at} is not known")
        self.at = match.end()
        return match[0]

    def _class(self) -> str:
        start, depth, pattern = self.at, 0, self._pattern
        while self.at < len(pattern):
            posix = _POSIX.match(pattern, self.at) if depth else None
            if posix is not None:
                self.at = posix.end()
                continue
            if pattern[self.at] == "[":
                depth += 1
                self.at += 1 + pattern.startswith("^", self.at + 1)
                if pattern.startswith("]", self.at):
                    raise NotLinear(f"the class at character {start} begins with `]`, which libraries read differently")
                continue
            if pattern[self.at] == "]":
                depth -= 1
                self.at += 1
                if not depth:
                    return pattern[start : self.at]
                continue
            member = _IN_CLASS.match(pattern, self.at)
            if member is None:
                break
            self.at = member.end()
        raise NotLinear(f"the class at character {start} has no end")

    def _quantified(self, source: str, chars: int, work: int) -> _Item:
        """Return an item with the quantifier that follows it. `work`: ways to match the item once."""
        match = _QUANTIFIER.match(self._pattern, self.at)
        if match is None:
            return _Item(source, chars, work)
        self.at = match.end()
        if self.at < len(self._pattern) and self._pattern[self.at] in "?+*{":
            raise NotLinear(f"the quantifier at character {self.at} follows another one")
        least, most = _range(match)
        if most is None:
            if chars != 1 or work != 1:
                raise NotLinear(f"the group `{source[:40]}` is repeated without limit")
            return _Item(source, least, 1, is_unbounded=True)
        if most < least or most > MAX_WORK:
            raise NotLinear(f"the quantifier `{match[0]}` is not from 0 to {MAX_WORK}")
        ways = sum(min(work**times, MAX_WORK + 1) for times in range(least, most + 1))
        return _Item(source, chars * least, max(ways, most))


def _range(match: re.Match[str]) -> tuple[int, int | None]:
    sign, _, least, comma, most, _, only_most = match.groups()
    if sign:
        return (1 if sign == "+" else 0), (1 if sign == "?" else None)
    if only_most:
        return 0, int(only_most)
    if most is not None:
        return int(least), int(most)
    return int(least), None if comma else int(least)


def _lookahead(inner: list[_Branch], source: str) -> _Item:
    if any(len(branch) != 1 or branch[0].is_unbounded or branch[0].work != 1 for branch in inner):
        raise NotLinear(f"the lookahead `{source[:40]}` is of more than one character")
    return _Item(source, 0, 1, is_lookahead=True)


def _marked(branch: _Branch, opening: str) -> Iterator[_Item]:
    """Yield the items of a group's alternative, whose sources mean something else under the group's options."""
    for item in branch:
        yield item if opening in ("", "?:") else item._replace(source=f"({opening}{item.source})")
