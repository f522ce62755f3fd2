"""What the engine computes by itself, compiled for the CPU it runs on."""
