"""The GPUs of this machine: which of them a run takes, and whether they are healthy. Importing it imports no torch."""
