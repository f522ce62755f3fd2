"""Running the model: its own modules, compiled, or as CUDA graphs."""
