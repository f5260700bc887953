"""In-situ memory analysis: device patches count what GPU kernels do to memory, and only the sums leave the device.

Nothing here needs OpenTelemetry or torch: it runs inside the program that is analysed.
"""
