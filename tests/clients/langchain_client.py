"""A chat, a stream and an error with langchain-openai; prints what came as JSON.

python langchain_client.py BASE_URL MODEL
"""

import json
import sys

import openai
from langchain_openai import ChatOpenAI

base_url, model = sys.argv[1:]
question = "I want to book a table for two in San Jose."
options = {"base_url": base_url, "api_key": "none", "temperature": 0, "max_tokens": 24}
chat = ChatOpenAI(model=model, stream_usage=True, **options)
whole = chat.invoke(question)
pieces = list(chat.stream(question))
try:
    ChatOpenAI(model="no-such-model", max_retries=0, **options).invoke(question)
    raise SystemExit("the unknown model was answered")
except openai.NotFoundError as error:
    refusal = {"status": error.status_code, "code": error.code, "message": error.message}
usage = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
print(
    json.dumps(
        {
            "chat": whole.content,
            "chat_tokens": whole.usage_metadata["output_tokens"],
            "stream": "".join(piece.content for piece in pieces),
            "stream_tokens": sum(item["output_tokens"] for item in usage),
            "num_pieces": len(pieces),
            "error": refusal,
        }
    )
)
