"""Where a Triton kernel runs: on a device, or without one in the interpreter."""

import pytest
import torch

PLACES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")),
]
