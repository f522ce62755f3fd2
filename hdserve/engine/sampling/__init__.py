"""From logits to tokens, and whether these are the drafted ones."""
