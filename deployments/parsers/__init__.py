"""What models write besides text: tool calls and reasoning, each in its model's format."""
