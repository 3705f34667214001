"""Builds the configured runner: resolves the model, loads its weights, sizes the KV cache.

Model files, model definitions and devices meet only here. Imports torch only where torch computes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pagemill_execution.config import ExecutionConfig
from pagemill_execution.runners.base import Runner
from pagemill_execution.starting.opened_model import open_model
from pagemill_execution.weights.early_digest import EarlyDigest
from pagemill_execution.weights.errors import LoadError
from pagemill_models.declaration.quantization_settings import check_quantization
from pagemill_models.files.partial_download import wait_for_all
from pagemill_models.sources import SourceError, resolve_source
from pagemill_models.spec.model_files import load_model_spec

if TYPE_CHECKING:
    from pagemill_models.spec.model_spec import ModelSpec

__all__ = ["LoadError", "create_runner"]

Progress = Callable[[str, str], None]


def create_runner(config: ExecutionConfig, progress: Progress, early_digest: EarlyDigest | None = None) -> Runner:
    """Return the runner for `config`, ready to step. Raises `LoadError`.

    `progress(phase, detail)` is called as the start proceeds.
    """
    if config.null_runner:
        _check_one_process(config)
        from pagemill_execution.runners.null import NullRunner

        return NullRunner.from_config(config)
    try:
        path = find_model(config)
        spec = load_model_spec(path)
        return _load(config, path, spec, progress, early_digest)
    except SourceError as error:
        raise _by_its_source(config, LoadError(error.reason, str(error))) from error
    except LoadError as error:
        raise _by_its_source(config, error) from error


def _check_one_process(config: ExecutionConfig) -> None:
    for name, value in (
        ("tensorParallel", config.tensor_parallel_size),
        ("pipelineParallel", config.pipeline_parallel_size),
    ):
        if value > 1:
            raise LoadError(
                "SettingsUnsupported",
                f"{name} is {value}, but a simulated device runs one process. Set {name} to 1.",
            )


def _by_its_source(config: ExecutionConfig, error: LoadError) -> LoadError:
    """The folder in which a model arrives is no name that its user knows."""
    if config.model_folder is None:
        return error
    return LoadError(error.reason, error.message.replace(config.model_folder, config.model))


def find_model(config: ExecutionConfig) -> Path:
    """Return the model's file or folder, into which weights may still be fetched. Raises `SourceError`."""
    if config.model_folder:
        return Path(config.model_folder)
    return resolve_source(config.model, field="model") if config.nodes is None else open_model(config).whole()


def _load(
    config: ExecutionConfig, path: Path, spec: ModelSpec, progress: Progress, early_digest: EarlyDigest | None
) -> Runner:
    if spec.weights_format == "safetensors":
        try:
            check_quantization(spec.quantization, f"`{path}`")
        except SourceError as error:
            raise LoadError(error.reason, error.message) from error
    if spec.decoder.by_transformers:
        wait_for_all(path)  # transformers opens the files itself
    from pagemill_execution.sizing.compute import choose_compute
    from pagemill_execution.starting.preparing import ModelFiles

    files, compute = ModelFiles(config, path, spec, progress, early_digest), choose_compute(config, spec)
    if config.enable_lora:
        from pagemill_execution.adapters.starting import check_serves

        check_serves(config, spec)
    if config.nodes is not None:
        from pagemill_execution.starting.nodes import load_on_nodes

        return load_on_nodes(files, compute)
    if config.num_ranks > 1:
        from pagemill_execution.starting.load_ranks import load_on_ranks

        return load_on_ranks(files, compute)
    if compute.backend == "triton":
        from pagemill_execution.starting.load_device import load_on_device

        return load_on_device(files, compute)
    from pagemill_execution.starting.load_cpu import load_on_cpu

    return load_on_cpu(files, compute)
