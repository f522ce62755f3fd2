"""A chat, a stream and an error with litellm; prints what came as JSON.

python litellm_client.py BASE_URL MODEL
"""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network at import

import litellm

base_url, model = sys.argv[1:]
messages = [{"role": "user", "content": "I want to book a table for two in San Jose."}]
options = {"api_base": base_url, "api_key": "none", "messages": messages, "temperature": 0}
options |= {"max_tokens": 24, "num_retries": 0}
whole = litellm.completion(model=f"openai/{model}", **options)
pieces = list(
    litellm.completion(
        model=f"openai/{model}", stream=True, stream_options={"include_usage": True}, **options
    )
)
try:
    litellm.completion(model="openai/no-such-model", **options)
    raise SystemExit("the unknown model was answered")
except litellm.NotFoundError as error:
    refusal = {"status": error.status_code, "code": error.code, "message": error.message}
usage = [piece.usage for piece in pieces if getattr(piece, "usage", None)]
print(
    json.dumps(
        {
            "chat": whole.choices[0].message.content,
            "chat_tokens": whole.usage.completion_tokens,
            "stream": "".join(
                piece.choices[0].delta.content or "" for piece in pieces if piece.choices
            ),
            "stream_tokens": usage[-1].completion_tokens,
            "num_pieces": len(pieces),
            "error": refusal,
        }
    )
)
