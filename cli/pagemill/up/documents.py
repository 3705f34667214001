"""Reads YAML files into documents that know the line of each field.

It refuses duplicate keys, keys that are not text, and aliases that contain themselves or expand without bound. It does
not depend on LLMDeployment.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

MAX_FILE_BYTES = 1024 * 1024
MAX_NODES = 50_000
MAX_CONTROL_CHARACTERS = 100
MAX_SYNTAX_ERRORS = 10
"""Reading a file stops after this many."""
NOT_IN_YAML = yaml.reader.Reader.NON_PRINTABLE
DOCUMENT_START = re.compile(r"---(\s|$)")
LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
FieldPath = tuple[str | int, ...]


@dataclass(frozen=True)
class DocumentError:
    """One error with its place and its remedy."""

    file: str
    line: int | None
    field: str
    """The dotted path; empty for an error of the file or the whole document."""
    message: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.field}: {self.message}" if self.field else f"{place}: {self.message}"


@dataclass
class Document:
    """One YAML document as plain values."""

    file: str
    line: int
    value: Any = None
    lines: dict[FieldPath, int] = field(default_factory=dict)
    """The line of every field; in mappings, the line of its key."""

    def line_of(self, path: FieldPath) -> int:
        """Return the line of the field, or of the innermost known field that contains it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, self.line)


class _Loader(yaml.SafeLoader):
    """The safe loader, but text that looks like a date stays text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (the library's own form)
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def read_documents(path: Path) -> tuple[list[Document], list[DocumentError]]:
    """Return the documents of a file that are not empty, and the errors of its YAML."""
    file = str(path)
    try:
        text = _read_text(path)
    except ValueError as error:
        return [], [DocumentError(file, None, "", str(error))]
    documents: list[Document] = []
    findings = list(_control_characters(file, text))
    # The text without these characters can be read, so that its other errors are reported as well.
    text = NOT_IN_YAML.sub("", text)
    rest = text
    for _ in range(MAX_SYNTAX_ERRORS):
        if not (rest := _read_until_error(file, rest, documents, findings)):
            break
    if not documents and not findings:
        message = "contains no document; describe an LLMDeployment in it, as examples/llmdeployment.yaml does"
        findings.append(DocumentError(file, None, "", message))
    return documents, findings


def _read_until_error(file: str, text: str, documents: list[Document], findings: list[DocumentError]) -> str:
    """Append the documents before the first syntax error, and the errors; return the text of the documents after it."""
    try:
        for node in _compose_all(text):
            document = Document(file, node.start_mark.line + 1)
            document.value = _Reader(document, findings).read(node, ())
            if document.value is not None:
                documents.append(document)
    except yaml.MarkedYAMLError as error:
        findings.append(_syntax_finding(file, text, error))
        mark = error.problem_mark or error.context_mark
        return _next_document(text, mark.line if mark else 0)
    except (yaml.YAMLError, RecursionError) as error:
        findings.append(DocumentError(file, None, "", f"is not YAML: {str(error).splitlines()[0]}"))
    return ""


def _next_document(text: str, line: int) -> str:
    """Return the text from the first document marker at or after `line` (from 0); empty if there is none.

    Empty lines replace the text before the marker, so that line numbers stay. The marker may be on `line` itself,
    because the parser reports some errors at the marker after the document.
    """
    starts = [0, *(match.end() for match in LINE_BREAK.finditer(text))]
    num_blank = len(text) - len(text.lstrip("\n"))
    for number in range(max(line, num_blank + 1), len(starts)):
        if DOCUMENT_START.match(text, starts[number]):
            return "\n" * number + text[starts[number] :]
    return ""


def path_text(path: FieldPath) -> str:
    """Return a path as text: `("spec", "env", 0, "name")` becomes `spec.env[0].name`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _read_text(path: Path) -> str:
    try:
        if path.is_dir():
            raise ValueError("is a folder; name a YAML file")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"is larger than {MAX_FILE_BYTES} bytes; an LLMDeployment is a short text")
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ValueError("does not exist; check the path after -f") from None
    except PermissionError:
        raise ValueError("cannot be read by this user; change its permissions") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None


def _compose_all(text: str) -> Iterator[yaml.Node]:
    loader = _Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            if node is not None:
                yield node
    finally:
        loader.dispose()


def _control_characters(file: str, text: str) -> Iterator[DocumentError]:
    """Yield an error for the first character of each line that YAML 1.1 (section 4.1.1) does not allow."""
    line, counted, last_line = 1, 0, 0
    for match in itertools.islice(NOT_IN_YAML.finditer(text), MAX_CONTROL_CHARACTERS):
        line += len(LINE_BREAK.findall(text, counted, match.start()))
        counted = match.start()
        if line != last_line:
            name = f"U+{ord(match.group()):04X}"
            yield DocumentError(file, line, "", f"is not YAML: the character {name} is not allowed; remove it")
        last_line = line


def _syntax_finding(file: str, text: str, error: yaml.MarkedYAMLError) -> DocumentError:
    mark = error.problem_mark or error.context_mark
    problem = error.problem or "syntax error"
    line = mark.line + 1 if mark else None
    lines = text.splitlines()
    if line and line <= len(lines) and "\t" in lines[line - 1][: len(lines[line - 1]) - len(lines[line - 1].lstrip())]:
        problem = "the line is indented with a tab; YAML allows only spaces"
    return DocumentError(file, line, "", f"is not YAML: {problem}")


class _Reader:
    """Builds plain values from YAML nodes, and records their lines in the document and errors in `findings`."""

    def __init__(self, document: Document, findings: list[DocumentError]) -> None:
        self._document = document
        self._findings = findings
        self._open: set[int] = set()
        self._num_nodes = 0

    def read(self, node: yaml.Node, path: FieldPath) -> Any:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise yaml.YAMLError(f"it expands to more than {MAX_NODES} values")
        self._document.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if id(node) in self._open:
            self._find(node, path, "contains itself through an alias; remove the alias")
            return None
        self._open.add(id(node))
        value = self._mapping(node, path) if isinstance(node, yaml.MappingNode) else self._sequence(node, path)
        self._open.discard(id(node))
        return value

    def _scalar(self, node: yaml.ScalarNode, path: FieldPath) -> Any:
        constructor = yaml.constructor.SafeConstructor()
        try:
            return constructor.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            problem = getattr(error, "problem", None) or str(error)
            self._find(node, path, f"cannot be read: {problem}; put the value in quotes")
            return None

    def _sequence(self, node: yaml.Node, path: FieldPath) -> list[Any]:
        return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]

    def _mapping(self, node: yaml.MappingNode, path: FieldPath) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode):
                self._find(key_node, path, "a field name must be text")
                continue
            if key_node.tag == "tag:yaml.org,2002:merge":
                self._find(key_node, path, "merge keys (<<) are not supported; write the fields out")
                continue
            where = (*path, key)
            if key in value:
                first = self._document.lines[where]
                self._find(key_node, where, f"appears twice (first on line {first}); keep one")
                continue
            self._document.lines[where] = key_node.start_mark.line + 1
            value[key] = self.read(value_node, where)
        return value

    def _find(self, node: yaml.Node, path: FieldPath, message: str) -> None:
        line = node.start_mark.line + 1
        self._findings.append(DocumentError(self._document.file, line, path_text(path), message))
