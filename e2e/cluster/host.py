"""Prepares this machine for the one-node cluster: a bridge, forwarding, mounts and control groups.

`prepare` creates them, `restore` returns the machine to its earlier state.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from layout import BRIDGE, FAMILIES, RUN

TOOLS = {"runc": "runc", "nft": "nftables", "ip": "iproute2", "openssl": "openssl"}
"""The Debian package of each required program."""
CNI_PLUGIN = Path("/usr/lib/cni/bridge")
PATH = f"/usr/local/sbin:/usr/sbin:/sbin:{os.environ.get('PATH', '/usr/bin:/bin')}"
SYSCTL = Path("/proc/sys/net")
SWITCHES = {SYSCTL / "ipv4" / "ip_forward": "1", SYSCTL / "bridge" / "bridge-nf-call-iptables": "1"}
if any(":" in family.node_ip for family in FAMILIES):
    SWITCHES |= {SYSCTL / "ipv6/conf/all/forwarding": "1", SYSCTL / "bridge/bridge-nf-call-ip6tables": "1"}


class HostError(Exception):
    """Raised if this machine cannot run the cluster; the message names the remedy."""


def check() -> None:
    if os.geteuid() != 0:
        raise HostError(
            "A node needs root: run as root, or point E2E_CONTEXT at a cluster of yours, "
            "or use only an API server (`up --api-only DIR`)."
        )
    absent = [package for program, package in TOOLS.items() if shutil.which(program, path=PATH) is None]
    if not CNI_PLUGIN.exists():
        absent.append("containernetworking-plugins")
    if absent:
        raise HostError(f"missing: {', '.join(absent)}. On Debian: apt-get install {' '.join(absent)}")


def prepare() -> None:
    _run("ip", "link", "add", BRIDGE, "type", "bridge")
    for family in FAMILIES:
        at_once = ["nodad"] if ":" in family.node_ip else []
        _run("ip", "addr", "add", f"{family.node_ip}/{family.pod_range.split('/')[1]}", "dev", BRIDGE, *at_once)
    _run("ip", "link", "set", BRIDGE, "up")
    before = {str(switch): switch.read_text() for switch in SWITCHES if switch.exists()}
    (RUN / "switches.json").write_text(json.dumps(before))
    for switch in before:
        Path(switch).write_text(SWITCHES[Path(switch)])


def restore() -> None:
    """Remove what `prepare`, the kubelet, kube-proxy and containerd left; ignore missing things."""
    _unmount_below(RUN)
    _remove_control_groups()
    for family in ("ip", "ip6"):
        _try("nft", "delete", "table", family, "kube-proxy")
    _try("ip", "link", "del", BRIDGE)
    switches = RUN / "switches.json"
    if switches.exists():
        for switch, value in json.loads(switches.read_text()).items():
            Path(switch).write_text(value)


def _unmount_below(folder: Path) -> None:
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in sorted((each for each in mounts if each.startswith(f"{folder}/")), reverse=True):
        _try("umount", "--lazy", mount)


def _remove_control_groups() -> None:
    """Remove the kubelet's control groups, innermost first: they outlive the kubelet and are empty by then."""
    root = Path("/sys/fs/cgroup")
    for group in [root / "kubepods", *root.glob("*/kubepods")]:
        for folder, _, _ in os.walk(group, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:
                continue


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "PATH": PATH})
    if done.returncode != 0:
        raise HostError(f"`{' '.join(argv)}` failed: {done.stderr.strip()}")


def _try(*argv: str) -> None:
    if shutil.which(argv[0], path=PATH) is not None:
        subprocess.run(argv, capture_output=True, env={**os.environ, "PATH": PATH})
