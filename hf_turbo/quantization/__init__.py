"""Weights of a few bits a value: what is in the files, and the layers that hold them."""
