"""Kubernetes: an attempt whose pod is disrupted was preempted, whatever error that caused."""

from holdfast.extending import Extension

extension = Extension("kubernetes", disruption="holdfast.extensions.kubernetes.pod:describe_disruption")
