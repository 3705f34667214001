"""`pagemill up` prints each field that has no effect on this machine, and why a model cannot be asked a question."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from light_model import light_model

from pagemill.up.answer import AnswerError, NoChatError, ask
from pagemill.up.loading import load_files
from pagemill.up.session import notes_of

DOCUMENT = """apiVersion: pagemill.dev/v1beta1
kind: LLMDeployment
metadata: {{name: chat}}
spec:
  model: {{source: "file://{model}"}}
  resources: {{memory: 2Gi}}
  template: {{spec: {{nodeSelector: {{disk: fast}}, tolerations: []}}}}
"""


def test_fields_of_a_cluster_are_noted_with_value_and_remedy(tmp_path: Path) -> None:
    file = tmp_path / "chat.yaml"
    file.write_text(DOCUMENT.format(model=light_model()))
    (memory, template) = notes_of(load_files([file]).loaded)
    assert memory.startswith(f"note: {file}: chat: spec.resources.memory '2Gi' has no effect: ")
    assert "remove it, or keep it for a cluster" in memory
    assert "spec.template.spec 'nodeSelector, tolerations' has no effect" in template


def test_a_model_that_cannot_chat_is_no_failure(answers: Any) -> None:
    path = "/v1/chat/completions"
    answers.by_path[path] = {"error": {"message": "This model computes embeddings."}}
    for status, kind in ((400, NoChatError), (500, AnswerError)):
        answers.statuses[path] = status
        with pytest.raises(kind, match="computes embeddings"):
            asyncio.run(ask(f"http://{answers.address}", "m", lambda text: None))
