"""From a file to an answer on Kubernetes: `make up-kubernetes` builds, loads, installs, applies, waits and asks.

    python e2e/up_kubernetes FILE      serve FILE in the current context's kind, k3d or minikube, or in our own cluster
    python e2e/up_kubernetes --down    remove all of it

The cluster of our own is the one of the end-to-end tests (`e2e/cluster`), which keeps running until it is removed.
`targets` decides where, `needs` finds what is missing, `delivering` brings the images, `serving` installs and waits.
The folder is a program, not a package.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))

import binaries
import delivering
import host
import images
import loading
import needs
import one_node
import session
from api_only import ClusterError
from containers import ContainerError
from credentials import CredentialsError
from layout import API_PORT, KEPT, KUBECONFIG, NODE_IP
from serving import SERVICE, Serving
from targets import Target, choose, components

from pagemill.up.answer import AnswerError, NoChatError, ask
from pagemill.up.loading import LoadResult, load_files
from pagemill_crds.models import LLMDeployment

ERRORS = (
    AnswerError,
    ClusterError,
    ContainerError,
    CredentialsError,
    binaries.BuildError,
    delivering.DeliveryError,
    host.HostError,
    images.ImageError,
    loading.LoadError,
)
PATIENCE_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="e2e/up_kubernetes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, nargs="?", help="the LLMDeployments to serve")
    parser.add_argument("--down", action="store_true", help="remove what an earlier call made")
    args = parser.parse_args()
    if args.down == (args.file is not None):
        parser.error("name a FILE, or --down without one")
    try:
        down() if args.down else up(args.file)
    except ERRORS as error:
        sys.exit(f"up-kubernetes: {error}\nAgain continues; `make down-kubernetes` removes what there is.")
    except KeyboardInterrupt:
        sys.exit("up-kubernetes: interrupted; again continues, `make down-kubernetes` removes what there is")


def up(file: Path) -> None:
    start = time.monotonic()
    loaded = load_files([file], backend="kubernetes")
    deployments = [each.deployment for each in loaded.loaded]
    _refuse([str(finding) for finding in loaded.findings] or _nothing_to_serve(file, deployments))
    target, tag = current_target(), images.tag_of_sources()
    wanted = components([(each.spec.resources.gpus, each.spec.engine.image) for each in deployments])
    problem = needs.busy(target)
    gpus = max(each.spec.resources.gpus for each in deployments)
    _refuse([problem] if problem else needs.missing(target, tag, wanted, gpus))
    if target.passed_over:
        print(f"Context {target.passed_over} is of no kind, k3d or minikube cluster and stays untouched.")
    print(f"Serving {file} on {_shown(target)}", flush=True)
    durations = _deliver(target, tag, wanted)
    _serve(target, tag, file, loaded, durations)
    durations["all"] = time.monotonic() - start
    print("\n" + "\n".join(f"  {name:<24} {seconds:6.1f} s" for name, seconds in durations.items()))


def _deliver(target: Target, tag: str, wanted: list[str]) -> dict[str, float]:
    if target.is_one_node:
        return delivering.to_one_node(tag, wanted)
    builder = needs.builder()
    assert builder is not None, "`needs.missing` has checked it"
    return delivering.to_context(target, builder, tag, wanted)


def _serve(target: Target, tag: str, file: Path, loaded: LoadResult, durations: dict[str, float]) -> None:
    serving = serving_of(target)
    deployments = [each.deployment for each in loaded.loaded]
    keys = [(each.metadata.namespace or "default", each.metadata.name) for each in deployments]
    namespaces = sorted({namespace for namespace, _ in keys})
    with session.phase(durations, "install the chart"):
        serving.ensure(namespaces)
        serving.install(tag, namespaces)
    with session.phase(durations, "ready"):
        serving.apply(file)
        serving.wait_ready(keys, lambda reason: print(f"  {reason}", flush=True))
    with session.phase(durations, "first answer"), serving.gateway(target.is_one_node) as url:
        _ask(url, deployments[0].names[0])
        address = url
    _print_what_is_there(target, serving, address)


def _ask(url: str, model: str) -> None:
    def show(text: str) -> None:
        print(text, end="", flush=True)

    try:
        answer = asyncio.run(ask(url, model, show, patience_s=PATIENCE_S))
        print(f"\n  {model}: first token after {answer.ttft_s:.2f} s")
    except NoChatError as error:
        print(f"  {model} serves and cannot chat: {error}")


def _print_what_is_there(target: Target, serving: Serving, url: str) -> None:
    kubectl = " ".join(serving.kubectl)
    if target.is_one_node:
        print(f"\nURL       {url}/v1")
    else:
        forward = f"{kubectl} --namespace {needs.NAMESPACE} port-forward {SERVICE} 8080:80"
        url = "http://127.0.0.1:8080"
        print(f"\nURL       {url}/v1, while this runs: {forward}")
    print(f"talk      .venv/bin/pagemill chat --url {url}")
    print(f"look      {kubectl} get llmd,pods --all-namespaces")
    print("remove    make down-kubernetes")


def down() -> None:
    """Remove the release with its deployments; of a one-node cluster that `up` started, everything."""
    target = current_target()
    if target.is_one_node and (KEPT.exists() or not target.is_current):
        if not KEPT.exists():
            sys.exit("up-kubernetes: nothing to remove: no one-node cluster of this command runs")
        one_node.down()
        print("The one-node cluster is gone; its images and programs stay for the next time.")
        return
    _refuse(needs.not_ours(target))
    serving_of(target).remove()
    print(f"Pagemill is removed from {_shown(target)}.")


def current_target() -> Target:
    if shutil.which("kubectl") is None:
        return choose(None, _one_node_server())
    argv = ["kubectl", "config", "view", "--minify", "-o", "json"]
    done = subprocess.run(argv, capture_output=True, text=True)
    return choose(json.loads(done.stdout) if done.returncode == 0 else None, _one_node_server())


def _one_node_server() -> str:
    return f"https://[{NODE_IP}]:{API_PORT}" if ":" in NODE_IP else f"https://{NODE_IP}:{API_PORT}"


def serving_of(target: Target) -> Serving:
    if target.is_one_node:
        folder = binaries.bin_dir()
        where = f"--kubeconfig={KUBECONFIG}"
        return Serving((str(folder / "kubectl"), where), (str(folder / "helm"), where))
    return Serving(("kubectl", f"--context={target.context}"), ("helm", f"--kube-context={target.context}"))


def _shown(target: Target) -> str:
    if not target.is_one_node:
        return f"{target.kind}'s cluster {target.cluster} (context {target.context})"
    return f"the one-node cluster ({'running' if one_node.is_running() else 'to be started'})"


def _nothing_to_serve(file: Path, deployments: list[LLMDeployment]) -> list[str]:
    return [] if deployments else [f"{file}: has no LLMDeployment; name a file with one: make up-kubernetes FILE=..."]


def _refuse(problems: list[str]) -> None:
    if problems:
        sys.exit("up-kubernetes: nothing was changed:\n" + "\n".join(f"  - {each}" for each in problems))


if __name__ == "__main__":
    main()
