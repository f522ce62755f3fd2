"""The OpenAI API as data: what its requests may say, and what its answers look like."""
