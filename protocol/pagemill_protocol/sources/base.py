"""What a kind of model source declares, and what a remote one does: list files, and fetch a file from any byte on.

A kind is pure but for `find` and `open`: plans are made with it where neither network nor files are at hand, and its
libraries are imported only when something is fetched. `store` decides where fetched bytes go, and `registry` which
kinds there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import BinaryIO, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from pagemill_protocol.source_errors import SourceError

Where = Literal["machine", "cluster", "network"]
"""Where the files lie: here or in the engine's image, on a claim of a cluster, or behind a network."""


class Credential(NamedTuple):
    """A variable with credentials, as the kind's library reads it, and where a Secret holds it."""

    variable: str
    key: str | None = None
    """Key of the Secret; `None`: the one that the reference names."""
    is_optional: bool = False


class RemoteFile(NamedTuple):
    path: str
    """Below the model's folder."""
    num_bytes: int
    sha256: str | None = None
    """Digest of the content; `None` where none is published."""
    git_sha1: str | None = None
    """Git's digest of the content, for files that are stored in git itself."""
    etag: str | None = None
    """The store's mark of this content."""
    is_archive: bool = False
    """A tar whose members are the files of the model."""
    address: str = ""
    """What the repository asks its server for, where that is not the path."""


class Listing(NamedTuple):
    version: str
    """Of the files all together: parts of two versions are never mixed."""
    files: list[RemoteFile]


class Repository(Protocol):
    """The files behind one remote source. Every error is a `FetchError` that names the remedy."""

    name: str
    """As messages call it."""

    def list_files(self) -> Listing: ...

    def fetch(self, file: RemoteFile, version: str, out: BinaryIO) -> None:
        """Append to `out` what it lacks of the file. May raise with a part appended: the next call goes on there."""
        ...

    def close(self) -> None:
        """Give connections back."""
        ...


@runtime_checkable
class ReadsRanges(Protocol):
    """A repository of which parts of a file are read too: what a model is can be known without its weights."""

    connections: int
    """That one file comes over; more than one may be set to another number."""

    def read_range(self, file: RemoteFile, version: str, start: int, num_bytes: int) -> bytes:
        """The bytes from `start` on, fewer where the file ends. Raises `FetchError`."""
        ...


class SourceKind(ABC):
    """One scheme."""

    scheme: ClassVar[str]
    where: ClassVar[Where]
    form: ClassVar[str]
    """How a source of it is written, for messages and the reference page."""
    about: ClassVar[str]
    """What is read, in a sentence of the reference page."""
    credentials: ClassVar[tuple[Credential, ...]] = ()
    variables: ClassVar[tuple[str, ...]] = ()
    """Variables with the URL of another server than the usual one."""

    @property
    def is_remote(self) -> bool:
        return self.where == "network"

    @abstractmethod
    def fault(self, source: str) -> str | None:
        """What is wrong with how it is written, with the remedy; `None`: nothing. Pure."""

    def check(self, source: str, field: str) -> None:
        """Raises `SourceError`."""
        if fault := self.fault(source):
            raise SourceError(field, fault)

    def path_of(self, source: str) -> str:
        """The source without scheme, revision and tag: its last part names the model."""
        return source.partition("://")[2]

    def file_of(self, source: str) -> str | None:
        """The one file that the source names, relative to the folder that is fetched; `None`: all of the model."""
        return None

    def ports_of(self, source: str) -> frozenset[int]:
        """TCP ports that are reached, where the source itself names a server."""
        return frozenset()

    def find(self, source: str, field: str) -> Path | None:
        """The path on this machine; `None`: it is fetched into the store. Raises `SourceError`."""
        return None

    def open(self, source: str) -> Repository:
        """Raises `FetchError`. Only remote kinds are opened."""
        raise NotImplementedError(f"{self.scheme}:// is not fetched")
