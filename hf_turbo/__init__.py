"""hf_turbo."""
