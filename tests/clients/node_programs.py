"""Runs small programs of JavaScript with the script's npm package, against this server.

Shared code of the scripts in this folder, like `checks`.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from checks import CITY_SCHEMA, KEY, MAX_TOKENS, MODEL, QUESTION, base_url

LIMIT_S = 60
VALUES = {"model": MODEL, "question": QUESTION, "schema": CITY_SCHEMA, "key": KEY, "maxTokens": MAX_TOKENS}
"""What programs have as `given`, with the server's URL."""


def run(program: str) -> Any:
    """Run a program (an ES module); return what it writes as JSON."""
    given = json.dumps({**VALUES, "url": base_url()})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "node_modules").symlink_to(os.environ["PAGEMILL_NPM"])
        script = Path(folder) / "program.mjs"
        script.write_text(f"const given = {given};\n{program}")
        done = subprocess.run(["node", script.name], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)
