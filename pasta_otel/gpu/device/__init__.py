"""State of GPUs: sources (NVML, amdsmi, nvidia-smi, third-party pages), a time limit around them, and metrics."""
