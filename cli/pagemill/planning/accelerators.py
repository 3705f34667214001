"""The registry of accelerators with figures from their makers' data sheets, and the memory that programs can use.

`replica` derives step times from them, and `placement` checks what fits on a device.
"""

from __future__ import annotations

from typing import NamedTuple

GIB = 1024**3
_TERA = 1e12


DEVICES_PER_NODE = 8


class Link(NamedTuple):
    """A connection of a device; what is sent passes it once."""

    name: str
    bytes_per_s: float
    """In each direction: data sheets give both together, for networks each."""


NVLINK_3 = Link("NVLink of 600 GB/s", 0.3 * _TERA)
NVLINK_4 = Link("NVLink of 900 GB/s", 0.45 * _TERA)
NVLINK_5 = Link("NVLink of 1,800 GB/s", 0.9 * _TERA)
INFINITY_FABRIC = Link("Infinity Fabric of 896 GB/s", 0.448 * _TERA)
PCIE_4 = Link("PCIe of 64 GB/s", 0.032 * _TERA)
NETWORK_100 = Link("a network of 100 Gbit/s", 0.0125 * _TERA)
NETWORK_400 = Link("a network of 400 Gbit/s", 0.05 * _TERA)


class Accelerator(NamedTuple):
    name: str
    products: tuple[str, ...]
    """Its values in the node label `nvidia.com/gpu.product` and in `resources.gpuProduct`."""
    memory_bytes: int
    """The device's total memory as CUDA reports it to programs: the least of published outputs, rounded down to a tenth
    of a GiB. Error correction and the driver keep up to 8 % of the data sheet's."""
    bytes_per_s: float
    operations_per_s: float
    """Dense operations in bfloat16."""
    operations8_per_s: float
    """Dense operations on 8-bit integers, and on 8-bit floats if `has_fp8`."""
    capability: tuple[int, int] | None
    """NVIDIA's compute capability; `None` for a device of another maker, for which the engine has no kernels."""
    has_fp8: bool
    link: Link
    """To the other devices of its node."""
    network: Link
    """To devices of other nodes, as each device has in the makers' systems."""
    source: str


ACCELERATORS = (
    Accelerator(
        "a100-40gb",
        ("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB"),
        int(39.3 * GIB),
        1.555 * _TERA,
        312 * _TERA,
        624 * _TERA,
        (8, 0),
        False,
        NVLINK_3,
        NETWORK_100,
        "NVIDIA A100 Tensor Core GPU data sheet, A100 40GB: 1,555 GB/s, 312 TFLOPS bfloat16, 624 TOPS int8",
    ),
    Accelerator(
        "a100-80gb",
        ("NVIDIA-A100-SXM4-80GB",),
        int(79.1 * GIB),
        2.039 * _TERA,
        312 * _TERA,
        624 * _TERA,
        (8, 0),
        False,
        NVLINK_3,
        NETWORK_100,
        "NVIDIA A100 Tensor Core GPU data sheet, A100 80GB SXM: 2,039 GB/s, 312 TFLOPS bfloat16, 624 TOPS int8",
    ),
    Accelerator(
        "b200",
        ("NVIDIA-B200",),
        int(178.3 * GIB),
        8 * _TERA,
        2250 * _TERA,
        4500 * _TERA,
        (10, 0),
        True,
        NVLINK_5,
        NETWORK_400,
        "NVIDIA DGX B200 data sheet, an eighth of the system: 180 GB, 8 TB/s, 9 PFLOPS fp8 with sparsity, half of it "
        "without, half of that in bfloat16",
    ),
    Accelerator(
        "h100-80gb",
        ("NVIDIA-H100-80GB-HBM3",),
        int(79.1 * GIB),
        3.35 * _TERA,
        989.5 * _TERA,
        1979 * _TERA,
        (9, 0),
        True,
        NVLINK_4,
        NETWORK_400,
        "NVIDIA H100 Tensor Core GPU data sheet, H100 SXM: 3.35 TB/s, 1,979 TFLOPS bfloat16 and 3,958 TFLOPS fp8 with "
        "sparsity, half of it without",
    ),
    Accelerator(
        "h200",
        ("NVIDIA-H200",),
        int(139.7 * GIB),
        4.8 * _TERA,
        989.5 * _TERA,
        1979 * _TERA,
        (9, 0),
        True,
        NVLINK_4,
        NETWORK_400,
        "NVIDIA H200 Tensor Core GPU data sheet, H200 SXM: 141 GB, 4.8 TB/s, 1,979 TFLOPS bfloat16 and 3,958 TFLOPS "
        "fp8 with sparsity, half of it without",
    ),
    Accelerator(
        "l4",
        ("NVIDIA-L4",),
        int(22.0 * GIB),
        0.3 * _TERA,
        121 * _TERA,
        242.5 * _TERA,
        (8, 9),
        True,
        PCIE_4,
        NETWORK_100,
        "NVIDIA L4 Tensor Core GPU data sheet: 24 GB, 300 GB/s, 242 TFLOPS bfloat16 and 485 TFLOPS fp8 with sparsity, "
        "half without",
    ),
    Accelerator(
        "l40s",
        ("NVIDIA-L40S",),
        int(44.3 * GIB),
        0.864 * _TERA,
        362 * _TERA,
        733 * _TERA,
        (8, 9),
        True,
        PCIE_4,
        NETWORK_100,
        "NVIDIA L40S GPU data sheet: 48 GB, 864 GB/s, 362 TFLOPS bfloat16 and 733 TFLOPS fp8 without sparsity",
    ),
    Accelerator(
        "mi300x",
        (),
        int(191.6 * GIB),
        5.3 * _TERA,
        1307.4 * _TERA,
        2614.9 * _TERA,
        None,
        True,
        INFINITY_FABRIC,
        NETWORK_400,
        "AMD Instinct MI300X data sheet: 192 GB, 5.3 TB/s, 1,307.4 TFLOPS bfloat16, 2,614.9 TFLOPS fp8",
    ),
)
NAMES = ", ".join(each.name for each in ACCELERATORS)


def find_accelerator(name: str) -> Accelerator | None:
    """Return the accelerator with this name or product label; `None` if there is none, or several.

    Names may be written in capitals, and without the memory if only one size is known: `H100`.
    """
    lower = name.lower()
    exact = [each for each in ACCELERATORS if lower == each.name or name in each.products]
    found = exact or [each for each in ACCELERATORS if each.name.startswith(f"{lower}-")]
    return found[0] if len(found) == 1 else None
