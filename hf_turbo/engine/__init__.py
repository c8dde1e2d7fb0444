"""Many requests at once: continuous batching."""
