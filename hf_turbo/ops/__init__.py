"""Kernels and their torch oracles. Imports no transformers."""
