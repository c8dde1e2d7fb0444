"""Without a GPU the Triton kernels of these tests run in Triton's interpreter."""

import os

import torch

# Triton decides when a kernel is defined, so this comes before any import of a kernel.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
