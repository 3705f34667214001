"""`file://`: files of the machine, or of the engine's pod."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from pagemill_models.sources.base import SourceKind


class LocalFile(SourceKind):
    scheme = "file"
    where = "machine"
    form = "file:///PATH"
    about = "A folder or a `.gguf` file of this machine; in a cluster, of the engine's image or of a volume it mounts."

    def fault(self, source: str) -> str | None:
        host = urlsplit(source).netloc
        return (
            None if host in ("", "localhost") else f"`{source}` names the host `{host}`. Write `file:///absolute/path`."
        )

    def find(self, source: str, field: str) -> Path:
        self.check(source, field)
        return Path(unquote(urlsplit(source).path))
