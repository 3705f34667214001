"""Writes the archive of `kubectl pagemill` and the manifest with which krew installs it, into dist/.

`python release/krew.py --repository OWNER/NAME`. The manifest format: krew.sigs.k8s.io, developer guide.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import tarfile
from pathlib import Path

import versions

ROOT = Path(__file__).resolve().parents[1]
ARCHIVE = "pagemill-kubectl-plugin.tar.gz"
FILES = {"kubectl-pagemill": (ROOT / "cli" / "kubectl-pagemill", 0o755), "LICENSE": (ROOT / "LICENSE", 0o644)}
MANIFEST = """\
apiVersion: krew.googlecontainertools.github.com/v1alpha2
kind: Plugin
metadata:
  name: pagemill
spec:
  version: v{version}
  homepage: https://github.com/{repository}
  shortDescription: Inspect and use models that Pagemill serves
  description: |
    Shows engines, scaling decisions and faults of LLMDeployments, and talks to their models through a port-forward.
  caveats: |
    The plugin runs the command pagemill: pip install pagemill
  platforms:
    - selector:
        matchExpressions:
          - key: os
            operator: In
            values: [linux, darwin]
      uri: https://github.com/{repository}/releases/download/v{version}/{archive}
      sha256: {digest}
      bin: kubectl-pagemill
"""


def archive() -> bytes:
    """Return the archive; equal files give equal bytes."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0, filename="") as compressed,
        tarfile.open(fileobj=compressed, mode="w") as tar,
    ):
        for name, (path, mode) in FILES.items():
            content = path.read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def manifest(version: str, repository: str, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    return MANIFEST.format(version=version, repository=repository, archive=ARCHIVE, digest=digest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repository", required=True, help="OWNER/NAME of the repository that publishes the release")
    repository = parser.parse_args().repository
    content, folder = archive(), ROOT / "dist"
    folder.mkdir(exist_ok=True)
    (folder / ARCHIVE).write_bytes(content)
    text = manifest(versions.chart_version(versions.agreed()), repository, content)
    (folder / "pagemill-krew.yaml").write_text(text)


if __name__ == "__main__":
    main()
