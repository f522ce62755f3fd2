"""Linear layers for few rows."""
