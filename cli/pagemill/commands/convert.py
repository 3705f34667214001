"""`pagemill convert`: writes an LLMDeployment from what another platform reads.

`pagemill.converting` has a file for each platform.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagemill.printable import printable

if TYPE_CHECKING:
    from pagemill.converting.deployment import Draft


def convert(
    what: Annotated[
        str,
        typer.Argument(
            help="A file with KServe's LLMInferenceService or KubeAI's Model, a command such as 'vllm serve MODEL "
            "--max-model-len 8192' as one argument, or - to read either from standard input."
        ),
    ],
) -> None:
    """Write an LLMDeployment from vLLM's command line or another platform's resource.

    The document goes to standard output. What has no equal is listed in its comments and on standard error.
    """
    from pagemill.converting.deployment import ConvertError

    try:
        drafts = _drafts(what)
        documents = [_text(draft) for draft in drafts]
    except ConvertError as error:
        typer.echo(printable(f"error: {error}"), err=True)
        raise typer.Exit(2) from None
    typer.echo("---\n".join(documents), nl=False)
    for draft in drafts:
        for note in draft.notes:
            typer.echo(printable(f"{draft.metadata['name']}: {note.what}: {note.meaning}"), err=True)


def _drafts(what: str) -> list[Draft]:
    from pagemill.converting.deployment import ConvertError
    from pagemill.converting.vllm import from_command

    if what == "-":
        text = sys.stdin.read()
    elif "\n" in what or " " in what.strip() or "=" in what:
        text = what
    else:
        try:
            text = Path(what).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConvertError(
                f"{what}: cannot be read ({error}). Give a file, or a whole command in quotes: 'vllm serve MODEL'."
            ) from None
    return _resources(text) if "apiVersion:" in text or '"apiVersion"' in text else [from_command(text)]


def _resources(text: str) -> list[Draft]:
    import yaml

    from pagemill.converting import kserve, kubeai
    from pagemill.converting.deployment import ConvertError

    try:
        documents = [each for each in yaml.safe_load_all(text) if each]
    except yaml.YAMLError as error:
        raise ConvertError(f"The file is not YAML: {error}") from None
    drafts = []
    for document in documents:
        version, kind = (
            (str(document.get(key)) for key in ("apiVersion", "kind")) if isinstance(document, dict) else ("", "")
        )
        if kind == kserve.KIND:
            drafts.append(kserve.from_service(document))
        elif kind == kubeai.KIND and version.startswith(f"{kubeai.GROUP}/"):
            drafts.append(kubeai.from_model(document))
        else:
            raise ConvertError(
                f"kind {kind} of {version} cannot be converted; LLMInferenceService of serving.kserve.io and Model of "
                "kubeai.org can. Remove other documents from the file."
            )
    return drafts


def _text(draft: Draft) -> str:
    """Return the document after comments with the notes; what the operator would refuse in it is noted as well."""
    import yaml

    text = yaml.safe_dump(draft.document(), sort_keys=False, allow_unicode=True)
    for field, message in _problems(text):
        draft.note(field, f"{message} (The operator refuses the result until then.)")
    return "".join(f"# {note.what}: {note.meaning}\n" for note in draft.notes) + text


def _problems(text: str) -> list[tuple[str, str]]:
    from pagemill.up.loading import load_files

    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        return [(error.field, error.message) for error in load_files([Path(file.name)], backend="kubernetes").findings]
