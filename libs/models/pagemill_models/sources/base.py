"""The interface of a kind of model source; a remote kind lists files and fetches a file from any byte on.

A kind is pure except for `find` and `open`: plans use it where neither network nor files are available, and its
libraries are imported only when something is fetched. `store` decides where fetched bytes are written, and `registry`
which kinds exist.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import BinaryIO, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from pagemill_protocol.source_errors import SourceError

SourceLocation = Literal["machine", "cluster", "network"]
"""Location of the files: this machine or the engine's image, a claim in a cluster, or a network."""


class Credential(NamedTuple):
    """An environment variable with credentials, as the kind's library reads it, and the key of a Secret that has
    them."""

    variable: str
    key: str | None = None
    """Key of the Secret; `None`: the key that the reference names."""
    is_optional: bool = False


class RemoteFile(NamedTuple):
    path: str
    """Path relative to the model's folder."""
    num_bytes: int
    sha256: str | None = None
    """Digest of the content; `None` where none is published."""
    git_sha1: str | None = None
    """Git's digest of the content, for files that are stored in git itself."""
    etag: str | None = None
    """The store's entity tag of this content."""
    is_archive: bool = False
    """Whether it is a tar archive whose members are the model's files."""
    address: str = ""
    """Name of the file in requests to the server, where it differs from the path."""


class Listing(NamedTuple):
    version: str
    """Version of all files together: files of two versions are never mixed."""
    files: list[RemoteFile]


class Repository(Protocol):
    """The files of one remote source. Every error is a `FetchError` that names the remedy."""

    name: str
    """Name in messages."""

    def list_files(self) -> Listing: ...

    def fetch(self, file: RemoteFile, version: str, out: BinaryIO) -> None:
        """Append the missing part of the file to `out`. It may raise after appending a part; the next call continues
        there."""
        ...

    def close(self) -> None:
        """Release connections."""
        ...


@runtime_checkable
class ReadsRanges(Protocol):
    """A repository that can read parts of files, so that a model's headers can be read without its weights."""

    connections: int
    """Number of connections per file; if it is more than one, another number may be set."""

    def read_range(self, file: RemoteFile, version: str, start: int, num_bytes: int) -> bytes:
        """Return the bytes from `start` on, fewer where the file ends. Raises `FetchError`."""
        ...


class SourceKind(ABC):
    """One kind of source, which is one scheme."""

    scheme: ClassVar[str]
    where: ClassVar[SourceLocation]
    form: ClassVar[str]
    """Syntax of a source, for messages and the reference page."""
    about: ClassVar[str]
    """Description of the source in the reference page, one sentence."""
    credentials: ClassVar[tuple[Credential, ...]] = ()
    variables: ClassVar[tuple[str, ...]] = ()
    """Variables with the URL of a server in place of the default."""

    unreachable: ClassVar[str] = "SourceUnreachable"
    """Reason of a source whose server cannot be reached."""

    @property
    def is_remote(self) -> bool:
        return self.where == "network"

    @abstractmethod
    def fault(self, source: str) -> str | None:
        """Return what is wrong with the source's syntax, with the remedy, or None. Pure."""

    def check(self, source: str, field: str) -> None:
        """Raise `SourceError` for a source with wrong syntax."""
        if fault := self.fault(source):
            raise SourceError(field, fault)

    def path_of(self, source: str) -> str:
        """Return the source without scheme, revision and tag: its last part names the model."""
        return source.partition("://")[2]

    def file_of(self, source: str) -> str | None:
        """Return the single file that the source names, relative to the fetched folder, or None for the whole model."""
        return None

    def ports_of(self, source: str) -> frozenset[int]:
        """Return the TCP ports to connect to, where the source itself names a server."""
        return frozenset()

    def server_of(self, source: str) -> str:
        """Return the URL of the server that requests for the source go to; empty: unknown."""
        return ""

    def find(self, source: str, field: str) -> Path | None:
        """Return the path on this machine, or None: the source is fetched into the store. Raises `SourceError`."""
        return None

    def open(self, source: str) -> Repository:
        """Return the repository of a remote source. Raises `FetchError`."""
        raise NotImplementedError(f"{self.scheme}:// is not fetched")
