"""The delta rule on FlashQLA's kernels, an optional package (https://github.com/QwenLM/FlashQLA).

They know value heads that share keys, but no subheads; one decay per step and head; documents with tokens. Other calls
are put in these terms by PyTorch, which also differentiates that. FlashQLA compiles for a minute or two at first.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ...core.deterministic import is_deterministic
from ...core.documents import Documents
from ...core.recompute import remake
from ...core.recurrence import Recurrences, at_least_fp32
from ...core.resets import LEAST
from ...errors import UserError

SIZE = 128  # of keys and values
DTYPES = (torch.bfloat16, torch.float16)
OLDEST = (9, 0)  # compute capability: Hopper


def refusal(a: Recurrences) -> str | None:
    """Why FlashQLA cannot serve a call, as a relative clause; None if it can."""
    if is_deterministic():
        return "which has no deterministic mode"
    K, V = a.q.shape[3], a.v.shape[3]
    if (K, V) != (SIZE, SIZE):
        return f"which takes keys and values of {SIZE} channels, with {K} and {V}"
    if a.q.dtype not in DTYPES:
        return f"which computes in bfloat16 or float16, with tensors in {str(a.q.dtype).removeprefix('torch.')}"
    if not a.q.is_cuda:
        return f"which needs a GPU, with tensors on {a.q.device.type}"
    if torch.cuda.get_device_capability(a.q.device) < OLDEST:
        return f"which needs a Hopper GPU or a newer one, on {torch.cuda.get_device_name(a.q.device)}"
    return None if find_spec("flash_qla") else "which is not installed (pip install flash-qla)"


def filled(documents: Documents) -> tuple[Tensor, Tensor]:
    """Return the indices of the documents that have tokens, and the boundaries of these."""
    full = [i for i, (start, stop) in enumerate(documents.spans) if stop > start]
    bounds = [0, *(documents.bounds[i + 1] for i in full)]
    return torch.tensor(full, device=documents.device), torch.tensor(bounds, dtype=torch.int32, device=documents.device)


def repeated(x: Tensor, groups: int, times: int) -> Tensor:
    """Each of the groups of heads of x [B,T,groups·n,D] `times` times in a row."""
    return x.unflatten(2, (groups, 1, -1)).expand(-1, -1, -1, times, -1, -1).flatten(2, 4)


def spread(x: Tensor, groups: int, times: int) -> Tensor:
    """Like `repeated`, but do not save an expanded tensor for the backward pass: recompute it there."""
    return x if times == 1 else remake(repeated(x, groups, times), repeated, x, groups, times)


def decays(a: Recurrences) -> Tensor:
    """The log decay of every step [B,T,H·E], in fp32."""
    assert a.beta is not None
    if a.log_decay is None:
        return a.beta.new_zeros(a.beta.shape, dtype=torch.float32)
    # its kernels would make differences of −inf
    return a.log_decay.float().clamp(min=LEAST[torch.float32]).expand(a.beta.shape)


@torch.compiler.disable  # as FlashQLA is
def forward(a: Recurrences) -> tuple[Tensor, Tensor]:
    """o [B,T,H,V] and the final states [N,H·E,K,V].

    Raises:
        UserError: FlashQLA cannot serve the call.
    """
    assert a.beta is not None
    if (reason := refusal(a)) is not None:
        raise UserError(
            f"backend: delta_rule cannot run on 'flashqla', {reason}; choose one of triton, torch, reference or auto"
        )
    q, k, v = a.q, a.k, a.v
    if a.subheads > 1:
        q, k = (spread(x, a.groups, a.repeats) for x in (q, k))
        v = spread(v, v.shape[2], a.subheads)
    first = None if a.initial_state is None else at_least_fp32(a.initial_state)
    rows, bounds = (None, None) if a.documents is None else a.documents.once(filled)
    if first is not None and rows is not None:
        first = first.index_select(0, rows)
    options: dict[str, Any] = {"scale": a.scale, "initial_state": first, "cu_seqlens": bounds}
    rule = import_module("flash_qla").chunk_gated_delta_rule
    o, final = rule(q, k, v, decays(a), a.beta.float(), output_final_state=True, **options)
    if rows is not None:
        final = a.first_state().index_copy(0, rows, final)
    if a.subheads > 1:
        o = o.unflatten(2, (-1, a.subheads)).sum(3, dtype=o.dtype)
    return o, final
