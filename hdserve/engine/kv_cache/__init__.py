"""Keys and values in rows, and prompts that are found in them again."""
