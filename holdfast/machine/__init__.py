"""What this machine and this process are: environment, determinism, GPUs, signals and preemption notices."""
