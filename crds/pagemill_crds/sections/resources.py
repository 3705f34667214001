"""`spec.resources`: resources of one pod."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from pagemill_crds.base import Section, SectionRule
from pagemill_crds.fields import Cpu, Memory, Text


class ResourcesSection(Section):
    """Resources of each pod of a replica."""

    gpus: Annotated[int, Field(ge=0, le=16)] = 0
    """Number of GPUs per pod; 0 selects the CPU engine."""
    gpu_product: (
        Annotated[str, Text(63, r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", "must be a label value")] | None
    ) = None
    """GPU model to schedule on, as in the node label `nvidia.com/gpu.product`, such as `NVIDIA-H100-80GB-HBM3`."""
    cpu: Cpu | None = None
    """CPU cores, such as `2`, `"1.5"` or `500m`. A CPU engine computes with as many threads."""
    memory: Memory | None = None
    """Memory, such as `8Gi`."""

    rules: ClassVar[tuple[SectionRule, ...]] = (
        SectionRule(
            "gpuProduct",
            "gpuProduct needs GPUs: set gpus to 1 or more, or remove gpuProduct",
            "!has(self.gpuProduct) || self.gpus > 0",
            lambda r: r.gpu_product is None or r.gpus > 0,
        ),
    )
