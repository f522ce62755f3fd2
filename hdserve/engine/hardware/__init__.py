"""What the machine offers: cores, memory, devices, threads, and the faster of two kernels."""
