"""The work of one step as rows, and how code inside the model gets at it."""
