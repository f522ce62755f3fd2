"""What models write besides text: tool calls and reasoning, each in the way of its model."""
