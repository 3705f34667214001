"""A real Kubernetes for tests, built from Go modules: without Docker, without downloads of binaries.

    python3 e2e/cluster build              compile the programs (minutes, once; some only where a verb needs them)
    python3 e2e/cluster prepare            the same, and the project's images beside it
    python3 e2e/cluster up                 start the one-node cluster and print what to export (root)
    python3 e2e/cluster images             build the project's images and load them; prints the tag
    python3 e2e/cluster down               end everything; loaded images stay for the next time
    python3 e2e/cluster with COMMAND...    all of that around a command, with KUBECONFIG, PATH and PAGEMILL_TAG set

    ... base                               make the Debian image that the others start from
    ... load IMAGE                         put an image that buildah has into the node
    ... derive IMAGE TARGET                load IMAGE with one tiny layer more under the name TARGET
    ... platform FOLDER TAG                gateway and operator of the checkout in FOLDER, built and loaded under TAG
    ... redis IMAGE                        make an image of Debian's Redis, and put it into the node
    ... metrics IMAGE                      the same of Debian's Prometheus and the adapter that Kubernetes asks
    ... fake-gpus N                        let the node offer N nvidia.com/gpu (accounting only, no device)
    ... hollow N                           N nodes of KWOK with 8 nvidia.com/gpu each; 0 removes them
    ... groups start|stop|install|remove   the controller of LeaderWorkerSets: kill -9, restart; with its webhooks
    ... stop PART | start PART             kill -9 and restart etcd, kube-apiserver, kubelet, ...
    ... container kill|pause|resume ID     signal a pod's container from outside

    ... build --api-only; up --api-only DIR; down --api-only DIR
                                           only an API server, on free ports, as any user, any number side by side

The folder is a program, not a package: python3 runs it as it is.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import api_only
import binaries
import containers
import credentials
import groups
import hollow
import host
import images
import loading
import one_node
import parts
import session
from layout import KUBECONFIG

ERRORS = (
    api_only.ClusterError,
    binaries.BuildError,
    containers.ContainerError,
    credentials.CredentialsError,
    host.HostError,
    images.ImageError,
    loading.LoadError,
    subprocess.CalledProcessError,
)


def main() -> None:
    args = _parser().parse_args()
    try:
        _run(args)
    except ERRORS as error:
        sys.exit(f"e2e/cluster: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="e2e/cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs.add_parser("build").add_argument("--api-only", action="store_true")
    verbs.add_parser("prepare")
    for verb in ("up", "down"):
        verbs.add_parser(verb).add_argument("--api-only", "--state", type=Path, metavar="DIR")
    verbs.add_parser("with").add_argument("command", nargs=argparse.REMAINDER)
    verbs.add_parser("base")
    verbs.add_parser("images").add_argument("components", nargs="*", default=list(images.COMPONENTS))
    verbs.add_parser("load").add_argument("image")
    for verb in ("redis", "metrics"):
        verbs.add_parser(verb).add_argument("image")
    platform = verbs.add_parser("platform")
    platform.add_argument("folder", type=Path)
    platform.add_argument("tag")
    derive = verbs.add_parser("derive")
    derive.add_argument("image")
    derive.add_argument("target")
    for verb in ("fake-gpus", "hollow"):
        verbs.add_parser(verb).add_argument("count", type=int)
    verbs.add_parser("groups").add_argument("action", choices=["install", "start", "stop", "remove"])
    for verb in ("stop", "start"):
        verbs.add_parser(verb).add_argument("part", choices=[*parts.START_ORDER, "kwok"])
    container = verbs.add_parser("container")
    container.add_argument("action", choices=["kill", "pause", "resume"])
    container.add_argument("id")
    return parser


def _run(args: argparse.Namespace) -> None:
    match args.verb:
        case "build":
            _build(args.api_only)
        case "prepare":
            _show(session.prepare(images.tag_of_sources()))
        case "up":
            _up(args.api_only)
        case "down":
            api_only.down(args.api_only.resolve()) if args.api_only else one_node.down()
        case "with":
            sys.exit(session.run(args.command))
        case "base":
            images.make_base()
        case "images":
            _images(args.components)
        case "load":
            loading.load(args.image)
        case "derive":
            images.derive(args.image, args.target)
        case "platform":
            images.make_platform(args.folder.resolve(), args.tag)
        case "redis":
            images.make_redis(args.image)
        case "metrics":
            images.make_metrics(args.image)
        case "fake-gpus":
            one_node.fake_gpus(args.count)
        case "hollow":
            hollow.add_nodes(args.count) if args.count else hollow.remove_nodes()
        case "groups":
            {"install": groups.install, "start": groups.start, "stop": groups.stop, "remove": groups.remove}[
                args.action
            ]()
        case "stop":
            one_node.stop(args.part)
        case "start":
            one_node.start(args.part)
        case "container":
            containers.send(args.id, args.action)


def _build(only_api: bool) -> None:
    names = binaries.API_ONLY if only_api else binaries.USUAL
    for name in names:
        for built, seconds in binaries.build([name]).items():
            print(f"built {built} in {seconds:.0f} s", flush=True)
    print(f"programs are in {binaries.bin_dir()}")


def _up(state: Path | None) -> None:
    if state is not None:
        kubeconfig = api_only.up(state.resolve())
    else:
        one_node.up()
        kubeconfig = KUBECONFIG
    print(f"export KUBECONFIG={kubeconfig} PATH={binaries.bin_dir()}:$PATH")


def _show(durations: dict[str, float]) -> None:
    for phase, seconds in durations.items():
        print(f"{phase}: {seconds:.0f} s", flush=True)


def _images(components: list[str]) -> None:
    tag = images.tag_of_sources()
    durations = images.build_all(tag, components) | images.load_all(tag, components)
    _show(durations)
    for component, size in images.sizes(tag).items():
        print(f"pagemill/{component}: {size}")
    print(f"export PAGEMILL_TAG={tag}")


if __name__ == "__main__":
    main()
