"""This machine and this process: environment, determinism, GPUs, ranks' processes and preemption notices."""
