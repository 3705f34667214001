"""The `pagemill` command: a table of subcommands, each imported only when it is called.

Startup must stay fast: `pagemill --help` imports neither torch, a web framework nor a command's module. This module
therefore knows a command by its name and one line of help. In `pagemill.commands.NAME` a command is a function NAME,
whose parameters are its options, or with many options a `CommandWithOptions` named `NameCommand`.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version as distribution_version
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from pagemill.command import CommandWithOptions

COMMANDS: Mapping[str, str] = {
    "up": "Serve LLMDeployment files on this machine.",
    "serve": "Serve one model as an OpenAI-compatible server.",
    "gateway": "Run a gateway in front of engines that already run.",
    "chat": "Talk to a model in the terminal.",
    "plan": "Compute the replicas, latencies and cost of a deployment under a load.",
    "simulate": "Simulate the scaling of a deployment under traffic.",
    "why": "Show the last scaling decisions of a deployment.",
    "top": "Show the load of every engine, live.",
    "doctor": "Check that this machine or a cluster has what serving needs.",
    "explain": "Describe the fields of LLMDeployment.",
    "convert": "Write an LLMDeployment from vLLM's command line, KServe's or KubeAI's resource.",
    "bench": "Measure the latency and throughput of a running server.",
    "version": "Print the versions of pagemill and Python.",
}
"""All commands with their lines in `pagemill --help`, in the order in which they are shown."""


class LazyCommand(TyperCommand):
    """A placeholder that imports the command's module when the command is called and lets it parse the arguments."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        definition = self.definition()
        is_command = isinstance(definition, type) and issubclass(definition, CommandWithOptions)
        words = definition.rewritten_arguments(args) if is_command else args
        return self.load().make_context(info_name, words, parent=parent, **extra)

    def load(self) -> Any:
        """Return the command that typer builds from the definition's signature, with the details of its docstring."""
        definition = self.definition()
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        _, _, details = inspect.cleandoc(definition.__doc__ or "").partition("\n\n")
        app.command(self.name, help=f"{self.help}\n\n{' '.join(details.split())}")(
            _runner(definition) if isinstance(definition, type) else definition
        )
        return typer.main.get_command(app)

    def definition(self) -> Any:
        """Return the command's dataclass, or its function."""
        assert self.name is not None
        members = vars(importlib.import_module(f"pagemill.commands.{self.name}"))
        found: type[CommandWithOptions] | Callable[..., None] = (
            members.get(f"{self.name.capitalize()}Command") or members[self.name]
        )
        return found


def _runner(command: type[CommandWithOptions]) -> Callable[..., None]:
    """Return a function with the dataclass's fields as parameters that creates an object and runs it."""

    def run(**options: Any) -> None:
        command(**options).run()

    run.__signature__ = inspect.signature(command, eval_str=True)  # type: ignore[attr-defined]  # typer reads it
    return run


class LazyGroup(TyperGroup):
    """The group of `COMMANDS`, listed without importing their modules."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS:
            for name in COMMANDS:  # typer suggests only commands that exist as objects
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.commands or cmd_name not in COMMANDS:
            return self.commands.get(cmd_name)
        self.commands[cmd_name] = LazyCommand(cmd_name, help=COMMANDS[cmd_name], callback=_unloaded)
        return self.commands[cmd_name]


def _unloaded() -> None:
    raise AssertionError("LazyCommand.make_context returns the context of the loaded command")


app = typer.Typer(
    cls=LazyGroup,
    help="Serve large language models on this machine or on Kubernetes.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pagemill {distribution_version('pagemill')}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main() -> None:
    """Run the `pagemill` script."""
    try:
        app()
    except OSError as error:
        from pagemill_servers.process.settings import full_disk_message

        message = full_disk_message(error)
        if message is None:
            raise
        sys.exit(f"pagemill: {message}")
