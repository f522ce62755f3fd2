"""The engine's own computations, compiled for the CPU it runs on."""
