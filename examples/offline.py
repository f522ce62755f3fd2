"""Generate text in this process, without Ray and without a server."""

from hdserve import LLM, SamplingParams

llm = LLM("hdserve-tiny")
params = SamplingParams(temperature=0.0, max_tokens=60)
question = [{"role": "user", "content": "I want to book a table for two in San Jose."}]
for attempt in ("first", "again"):
    (answer,) = llm.chat(question, params)
    print(f"{attempt}: {answer.text!r}")
    print(f"  {len(answer.token_ids)} tokens in {answer.counts.num_steps} steps")
