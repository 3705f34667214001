"""`oci://`: an artifact or an image of an OCI registry, by tag or digest.

Supported are artifacts whose layers are files (ORAS, ModelPack, Docker's models) and images whose layers have the model
below `/models`. `registry_client` implements the protocol; the digest of the manifest identifies all content.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from pagemill_models.adapters.limits import ADAPTER_CONFIG
from pagemill_models.sources.base import Credential, Listing, RemoteFile, Repository, SourceKind
from pagemill_models.sources.schemes.registry_client import RegistryClient, registry_url
from pagemill_models.sources.settings import DOCKER_CONFIG_CONTENT
from pagemill_protocol.source_errors import FetchError

LAYERS = ".layers"
"""Folder of archives beside the files that are unpacked from them."""
_REFERENCE = re.compile(
    r"(?P<host>[A-Za-z0-9.-]+(?::\d{1,5})?)/(?P<repository>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>[\w][\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_CONFIGS = ("config.json", ADAPTER_CONFIG)
_TITLES = ("org.opencontainers.image.title", "org.cncf.model.filepath")
_UNPACK = "io.deis.oras.content.unpack"
_GGUF_LAYERS = ("application/vnd.docker.ai.gguf.v3", "application/vnd.ollama.image.model")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class Reference(NamedTuple):
    host: str
    repository: str
    tag: str
    digest: str | None

    @property
    def wanted(self) -> str:
        return self.digest or self.tag


class OCIRegistry(SourceKind):
    scheme = "oci"
    where = "network"
    form = "oci://HOST/REPOSITORY[:TAG][@sha256:DIGEST]"
    about = (
        "An artifact whose layers are the model's files (ORAS, ModelPack), or an image with the model in `/models`. "
        "With `cache.imageVolume` the kubelet pulls the image itself."
    )
    credentials = (Credential(DOCKER_CONFIG_CONTENT, ".dockerconfigjson"),)

    def fault(self, source: str) -> str | None:
        return None if parse_reference(source) else f"`{source}` is not of the form `{self.form}`."

    def path_of(self, source: str) -> str:
        reference = parse_reference(source)
        return reference.repository if reference else source.partition("://")[2]

    def ports_of(self, source: str) -> frozenset[int]:
        reference = parse_reference(source)
        _, separator, port = reference.host.partition(":") if reference else ("", "", "")
        return frozenset({int(port)}) if separator else frozenset()

    def server_of(self, source: str) -> str:
        reference = parse_reference(source)
        return registry_url(reference.host) if reference else ""

    def open(self, source: str) -> Repository:
        self.check(source, "model.source")
        reference = parse_reference(source)
        assert reference is not None
        return OCIRepository(reference, source)


def parse_reference(source: str) -> Reference | None:
    match = _REFERENCE.fullmatch(source.partition("://")[2])
    if match is None:
        return None
    return Reference(match["host"], match["repository"], match["tag"] or "latest", match["digest"])


class OCIRepository:
    connections = 1

    def __init__(self, reference: Reference, source: str) -> None:
        self.name = f"`{source}`"
        self._reference = reference
        self._client = RegistryClient(reference.host, reference.repository, self.name)

    def list_files(self) -> Listing:
        manifest, digest = self._client.manifest(self._reference.wanted)
        if "manifests" in manifest:
            manifest, digest = self._client.manifest(self._for_this_machine(manifest["manifests"]))
        layers = manifest.get("layers")
        files = list(_files(layers if isinstance(layers, list) else []))
        if not files:
            raise FetchError("ModelUnreadable", f"{self.name} has no layer with files of a model.")
        return Listing(digest, _without_common_folder(files))

    def fetch(self, file: RemoteFile, version: str, out: BinaryIO) -> None:
        self._client.fetch(file, out)

    def read_range(self, file: RemoteFile, version: str, start: int, num_bytes: int) -> bytes:
        end = min(start + num_bytes, file.num_bytes)
        return self._client.read_range(file, start, end) if end > start else b""

    def close(self) -> None:
        self._client.close()

    def _for_this_machine(self, manifests: Any) -> str:
        """Return the digest of an index's manifest for this machine; an entry without a platform fits every machine."""
        entries = [entry for entry in manifests if isinstance(entry, dict)] if isinstance(manifests, list) else []
        here = _ARCHITECTURES.get(platform.machine(), platform.machine())
        for entry in entries:
            target, notes = entry.get("platform"), entry.get("annotations")
            architecture = target.get("architecture", here) if isinstance(target, dict) else here
            is_described = isinstance(notes, dict) and "vnd.docker.reference.type" in notes
            if architecture in (here, "", "unknown") and not is_described:
                return str(entry.get("digest"))
        raise FetchError("ModelNotFound", f"{self.name} has no manifest for {here}. Push one for this architecture.")


def _files(layers: list[Any]) -> Iterator[RemoteFile]:
    for layer in layers:
        _check_layer(layer)
        kind, digest = str(layer.get("mediaType", "")), str(layer.get("digest", ""))
        notes: Mapping[str, str] = layer.get("annotations") or {}
        title = next((notes[name] for name in _TITLES if notes.get(name)), None)
        algorithm, _, sha256 = digest.partition(":")
        if algorithm != "sha256":
            raise FetchError("SourceUnsupported", f"a layer has the digest `{digest[:80]}`; only sha256 is read.")
        is_archive = _is_archive(kind, title, notes)
        if is_archive and kind.endswith("zstd"):
            raise FetchError(
                "SourceUnsupported", f"a layer is of the type `{kind}`. Push it uncompressed or with gzip."
            )
        path = f"{LAYERS}/{sha256}" if is_archive else title
        if path is None and kind in _GGUF_LAYERS:
            path = "model.gguf"
        if path is not None:
            yield RemoteFile(path, layer.get("size", 0), sha256, is_archive=is_archive, address=digest)


def _check_layer(layer: Any) -> None:
    """Raise `FetchError` for an entry of `layers` of another form than the specification of images demands."""
    fields = layer if isinstance(layer, dict) else {"size": None}
    size, notes = fields.get("size", 0), fields.get("annotations") or {}
    if type(size) is not int or not 0 <= size < 1 << 60:
        raise FetchError("ModelUnreadable", "an entry of `layers` of the manifest is no object with a `size`.")
    if not isinstance(notes, dict) or not all(isinstance(each, str) for each in notes.values()):
        raise FetchError("ModelUnreadable", "the `annotations` of a layer are no object of texts.")


def _is_archive(kind: str, title: str | None, notes: Mapping[str, str]) -> bool:
    if title is None:
        return ".tar" in kind
    # ORAS gives any file the type of a tar; archives that it packed itself have an annotation.
    return notes.get(_UNPACK) == "true" or ("vnd.cncf.model" in kind and ".tar" in kind)


def _without_common_folder(files: list[RemoteFile]) -> list[RemoteFile]:
    """Return the files without folders before their titles: the model's folder is that of its configuration."""
    found = [file.path.rpartition("/") for file in files if PurePosixPath(file.path).name in _CONFIGS]
    tops = {top + slash for top, slash, _ in found}
    if len(tops) != 1 or "" in tops:
        return files
    [top] = tops
    return [file if file.is_archive else file._replace(path=file.path.removeprefix(top)) for file in files]
