"""The folder that travels to a bare machine: what is packed, blanked, and assembled there; and the table of rows."""

from __future__ import annotations

import gzip
import io
import json
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from distributions import installed_beside, normalized, required_by

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "bench" / "gpu"


@pytest.fixture(scope="module", autouse=True)
def modules() -> Any:
    """Make the command's modules importable, as for the command itself."""
    before, known = list(sys.path), set(sys.modules)
    sys.path[:0] = [str(GPU)]
    yield
    sys.path[:] = before
    for name in set(sys.modules) - known:
        if str(GPU) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


# -- machine code of other devices ---------------------------------------------------------------------------------

CODE, PTX = 2, 1


def entry(kind: int, architecture: int, size: int) -> bytes:
    head = struct.pack("<HHIQ12xI", kind, 0x101, 64, size, architecture)
    return head + bytes(64 - len(head)) + b"\xaa" * size


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def left(library: bytes | bytearray) -> list[list[tuple[int, int]]]:
    """Return kind and architecture of the entries of each container whose code is still there."""
    import fatbins

    return [
        [(each.kind, each.architecture) for each in entries if any(library[each.begin : each.end])]
        for entries in fatbins.containers(library)
    ]


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([(CODE, 80), (CODE, 90), (CODE, 120), (PTX, 80)], [(CODE, 90)]),
        ([(CODE, 75), (CODE, 80), (PTX, 80), (CODE, 120)], [(PTX, 80)]),
        ([(PTX, 80), (PTX, 89), (PTX, 120)], [(PTX, 89)]),
        ([(CODE, 100), (CODE, 120)], []),
    ],
    ids=["its own code", "compiled from PTX", "the newest PTX that is not newer", "nothing for it"],
)
def test_only_the_code_that_a_device_loads_is_left(
    entries: list[tuple[int, int]], expected: list[tuple[int, int]]
) -> None:
    import fatbins

    library = bytearray(b"head" + container(*(entry(kind, arch, 40) for kind, arch in entries)) + b"tail")
    size = len(library)
    blanked = fatbins.blank_others(library, 90)
    assert left(library) == [expected]
    assert blanked == 40 * (len(entries) - len(expected))
    assert len(library) == size
    assert library.startswith(b"head")
    assert library.endswith(b"tail")


def test_bytes_that_only_look_like_a_container_stay() -> None:
    import fatbins

    fake = struct.pack("<IHHQ", 0xBA55ED50, 7, 16, 40) + b"\xaa" * 40
    cut = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 1 << 40)
    library = bytearray(fake + container(entry(CODE, 90, 8), entry(CODE, 80, 8)) + cut)
    assert fatbins.blank_others(library, 90) == 8
    assert library.startswith(fake)
    assert library.endswith(cut)


# -- parts ---------------------------------------------------------------------------------------------------------


def test_parts_are_unpacked_to_the_path_and_the_sources(tmp_path: Path) -> None:
    part = tmp_path / "engine.tar.gz"
    library = "kernels/pagemill_kernels/cpu/lib/level.so"
    with gzip.open(part, "wb") as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for name in ("site/found/__init__.py", library):
            about = tarfile.TarInfo(name)
            about.size, about.mode = 5, 0o755
            archive.addfile(about, io.BytesIO(b"a = 1"))
    places = ["--into", str(tmp_path / "here"), "--sources", str(tmp_path / "sources")]
    argv = [sys.executable, "-I", "-S", str(GPU / "unpacking.py"), *places, str(part)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("engine.tar.gz: 0.0 MB, 0.0 MB unpacked, ")
    assert (tmp_path / "here" / "site" / "found" / "__init__.py").read_text() == "a = 1"
    assert (tmp_path / "sources" / library).read_bytes() == b"a = 1"


def test_the_travelling_distributions_are_pinned_and_in_groups() -> None:
    import packing

    groups = packing.groups()
    there = groups.pop("there")
    assert list(groups) == ["zstandard", "engine", "vllm"]
    assert all(
        name and version for each in groups.values() for name, _, version in (one.partition("==") for one in each)
    )
    assert not any("=" in name for name in there)
    assert {"msgspec", "pyzmq", "uvicorn", "pytest-asyncio"} <= {one.partition("==")[0] for one in groups["engine"]}


BARE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Absent())
import {modules}
"""


def test_what_travels_and_what_is_there_are_all_that_the_server_and_the_tests_import() -> None:
    import packing

    groups = packing.groups()
    travelling = {normalized(one.partition("==")[0]) for one in groups["engine"]}
    absent = installed_beside(travelling | required_by(tuple(groups["there"])))
    assert {"kopf", "kubernetes", "redis"} <= absent
    code = BARE.format(absent=absent, modules=packing.MODULES[0])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_every_file_with_tests_for_a_device_is_run_there() -> None:
    import own_tests

    files = [*own_tests.KERNEL_FILES, *own_tests.ENGINE_FILES]
    kernels = {f"tests/kernels/{path.name}" for path in (ROOT / "tests" / "kernels").glob("test_triton_*.py")}
    for_no_device = {"tests/kernels/test_triton_compiled.py", "tests/kernels/test_triton_offsets.py"}
    assert kernels - set(files) == for_no_device
    with_a_mark = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "\n@pytest.mark.gpu" in path.read_text()
    }
    assert with_a_mark <= set(files)


def test_our_own_packages_travel_with_their_versions() -> None:
    import packing

    names = {name for name, _ in packing.own_metadata()}
    assert {f"site/{name}-0.1.0.dist-info/METADATA" for name in ("pagemill", "pagemill_engine")} <= names


# -- rows and their table ------------------------------------------------------------------------------------------


def row(**values: Any) -> Any:
    import rows

    about = {"commit": "bbb", "date": "2026-11-28", "card": "H100", "driver": "580", "software": "torch", "code": "c"}
    return rows.Row(**{**about, "section": "kernels", "shape": "x", "unit": "us", "ours": 2.0, **values})


def test_a_ratio_above_one_means_that_ours_is_faster() -> None:
    assert row(peer_name="torch", peer=3.0).ratio == 1.5
    assert row(unit="tokens/s", peer_name="vLLM", peer=3.0).ratio == pytest.approx(2 / 3)
    assert row(limit=1.0).share == 0.5
    assert row(unit="tokens/s", limit=4.0).share == 0.5
    assert row(ours=None, peer_name="torch", peer=3.0).ratio is None


def test_rows_of_other_commits_stay_and_are_marked_by_age(tmp_path: Path) -> None:
    import table

    file = tmp_path / "rows.json"
    table.record(file, [row(commit="aaa", date="2026-11-25", shape="old"), row(commit="aaa", date="2026-11-25")])
    import rows

    table.record(file, [*rows.read([file]), row(ours=1.0)])
    kept = json.loads(file.read_text())
    assert [(each["commit"], each["shape"]) for each in kept] == [("aaa", "old"), ("aaa", "x"), ("bbb", "x")]
    text = "\n".join(table.document(rows.read([file])))
    assert "| old | us | 2 |  |  |  |  |  | aaa, 3 days older |" in text
    assert "| x | us | 1 |  |  |  |  |  | bbb |" in text


def test_our_figure_alone_is_replaced_by_the_one_beside_a_peer() -> None:
    import rows

    beside = row(peer_name="torch", peer=3.0)
    assert rows.newest([row(), beside]) == [beside]
    failed = row(ours=None, error="no")
    assert rows.newest([failed, row(shape="y")]) == [failed, row(shape="y")]


def test_a_line_that_was_cut_short_costs_only_itself(tmp_path: Path) -> None:
    import rows

    rows.append(tmp_path, row())
    with (tmp_path / rows.ALL).open("a") as file:
        file.write('{"commit": "bb')
    assert rows.read([tmp_path / rows.ALL, tmp_path / "absent.jsonl"]) == [row()]


def test_the_page_has_the_rows_that_are_recorded() -> None:
    import rows
    import table

    text = table.PAGE.read_text()
    assert table.page(text, rows.read([table.RECORDED])) == text, "run make bench-gpu-table"
    with pytest.raises(SystemExit, match="has no lines"):
        table.page("nothing", [])
