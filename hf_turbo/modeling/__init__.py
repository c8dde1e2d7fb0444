"""What a patched model computes with."""
