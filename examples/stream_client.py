"""Stream a chat from a running server and show what drafting did for it."""

from openai import OpenAI

client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
stream = client.chat.completions.create(
    model="hdserve-tiny",
    messages=[{"role": "user", "content": "I want to book a table for two in San Jose."}],
    temperature=0,
    max_tokens=60,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    else:
        print()
        print((chunk.model_extra or {})["metrics"]["speculative_decoding"])
