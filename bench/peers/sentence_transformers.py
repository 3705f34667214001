"""Runs sentence-transformers with this environment's torch; only its missing packages are installed, separately."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers.install import FOLDER, UV_FLAGS, run

LIBRARY = FOLDER / "sentence_transformers" / "library"
PACKAGES = (
    "sentence-transformers==6.2.0",
    "scikit-learn==1.9.1",
    "scipy==1.17.1",
    "joblib==1.6.0",
    "threadpoolctl==3.8.0",
    "narwhals==2.29.0",
    "cloudpickle==3.1.3",
)


def install_into(uv: Path) -> None:
    """Install into `LIBRARY` unless it exists. Raise `InstallFailed`."""
    if (LIBRARY / "sentence_transformers").exists():
        return
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    flags = ["--quiet", "--no-deps", "--python", sys.executable, "--target", str(LIBRARY)]
    run([str(uv), "pip", "install", *UV_FLAGS, *flags, *PACKAGES])


def load(folder: str, threads: int, dtype: str) -> Callable[[list[str]], Any]:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model: Any = SentenceTransformer(folder, device="cpu", local_files_only=True, model_kwargs={"dtype": dtype})
    return lambda texts: model.encode(texts, batch_size=64, show_progress_bar=False, convert_to_tensor=True).float()
