"""What the server counts of itself, and the ways in which others read it."""
