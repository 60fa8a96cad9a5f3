"""CUDA graphs for tests without a GPU."""

import pytest
import torch
from torch.utils._pytree import tree_map

from zoo.generation import decoder, graphs


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Pretend that every device has CUDA graphs; returns the device of each capture.

    As in a graph, a replay runs the step on the tensors of the capture, and overwrites the result of the last one.
    """
    made: list[torch.device] = []

    def capture(rehearse, step, device):
        rehearse()
        made.append(device)
        result = None

        def replay():
            nonlocal result
            new = step()
            result = new if result is None else tree_map(torch.Tensor.copy_, result, new)
            return result

        return replay

    monkeypatch.setattr(graphs, "capture", capture)
    for module in (graphs, decoder):
        monkeypatch.setattr(module, "no_graphs", lambda device: None)
    return made
