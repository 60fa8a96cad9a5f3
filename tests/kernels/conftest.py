"""Without a GPU, Triton kernels run under the interpreter. It has to be chosen before Triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
