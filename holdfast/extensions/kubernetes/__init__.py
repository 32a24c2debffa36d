"""Kubernetes: an attempt whose pod is disrupted was preempted, and the error that followed doesn't count."""

from holdfast.extending import Extension

extension = Extension("kubernetes", disruption="holdfast.extensions.kubernetes.pod:describe_disruption")
