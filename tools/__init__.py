"""Programs that maintain the project; they are not installed with it."""
