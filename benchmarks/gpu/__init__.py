"""Benchmarks that need an NVIDIA GPU: ``python -m benchmarks.gpu`` (make bench-gpu)."""
