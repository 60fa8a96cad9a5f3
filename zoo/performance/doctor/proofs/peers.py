"""Ops of other libraries that are examined likewise: those of flash-linear-attention (FLA)."""

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo.performance.doctor.proofs.ops import DTYPES, Subject
from zoo.performance.op_calls import OpCall, cases


class PeerOp(NamedTuple):
    """A function of another library that computes what an op here does."""

    package: str
    module: str
    function: str
    device: str  # where it runs
    size: int  # of heads
    op: str  # the name here, and the variant of the call
    variant: str
    gate: str | None  # its name of log_decay

    def load(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """The function, with the arguments that the op has here."""
        function, gate = getattr(import_module(self.module), self.function), self.gate

        def call(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            log_decay: Tensor | None = None,
            beta: Tensor | None = None,
            initial_state: Tensor | None = None,
            cu_seqlens: Tensor | None = None,
            return_state: bool = False,
        ) -> tuple[Tensor, Tensor]:
            options: dict[str, Any] = {} if gate is None else {gate: log_decay}
            options |= {} if beta is None else {"beta": beta}
            options |= {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens.long()}
            options |= {"initial_state": initial_state, "output_final_state": True}
            o, state = function(q, k, v, **options, **({"scale": 1.0} if self.package == "fla" else {}))
            return o, state

        return call


HEAD, CHANNEL = "decay per head", "decay per channel"
FLA = ("linear_recurrence", "delta_rule")
PEERS = (
    PeerOp("fla", "fla.ops.simple_gla", "chunk_simple_gla", "cuda", 128, FLA[0], HEAD, "g"),
    PeerOp("fla", "fla.ops.gla", "chunk_gla", "cuda", 128, FLA[0], CHANNEL, "g"),
    PeerOp("fla", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule", "cuda", 128, FLA[1], HEAD, "g"),
    PeerOp("fla", "fla.ops.delta_rule", "chunk_delta_rule", "cuda", 128, FLA[1], "no decay", None),
)


def installed(module: str) -> bool:
    """Return whether a module can be imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not there
        return False


def subjects(device: torch.device) -> Iterator[Subject]:
    """The calls of all peers that are installed and run on the device."""
    for peer in PEERS:
        if peer.device == device.type and installed(peer.module):
            call = peer.load()
            for case in cases(peer.size):
                if (case.op, case.variant) == (peer.op, peer.variant):
                    for dtype, kind in DTYPES.items():
                        here = OpCall(case.op, peer.variant, case.size, case.inputs, {}, case.kept, call)
                        yield Subject(here.on(device, kind), f"{peer.package} {peer.function}", dtype)
