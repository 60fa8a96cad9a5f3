"""The small calls of ops, which proofs and tests make: every op has one."""

import pytest
import torch

from mixers.counting import counted_flops
from reproductions.proofs.op_calls import cases, ops


def test_every_op_is_known():
    """An op that is new has to have a case."""
    assert {case.op for case in cases(32)} == {*ops()}
    assert {"delta_rule", "linear_recurrence", "window_attention", "linear_cross_entropy"} <= {*ops()}


@pytest.mark.parametrize("op", ops())
def test_flops_of_ops_are_counted_without_their_memory(op: str):
    """So those of a plug-in that calls them need no `flops` of its own."""
    for case in cases(16):
        if case.op == op:
            on_meta = case.on(torch.device("meta"), torch.float32)
            shapes: list[dict[str, torch.Size]] = []
            counted_flops(lambda on_meta=on_meta, shapes=shapes: shapes.append(sizes(on_meta.outputs())))
            assert shapes == [sizes(case.outputs())]


def sizes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: x.shape for name, x in tensors.items()}
