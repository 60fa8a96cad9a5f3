"""Gates of the delta rule of RWKV-7: decays, and rates per channel at which keys of unit length are erased."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.backend import Op
from ..core.elementwise import rsqrt, sigmoid
from ..core.recurrence import at_least_fp32

LEAST = 1e-24  # squared length below which a key is not made longer


class Arguments(NamedTuple):
    k: Tensor  # […,M,K]
    decay: Tensor  # […,M·K], like rate
    rate: Tensor
    decay_bias: Tensor  # [M·K], like the others
    rate_bias: Tensor
    k_k: Tensor
    k_a: Tensor
    largest: float


def composed(*args: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The formulas in PyTorch, of the fields of `Arguments`."""
    k, decay, rate, decay_bias, rate_bias, k_k, k_a, largest = Arguments(*args)  # type: ignore[arg-type]
    wide = at_least_fp32(k)
    f, a, k_k, k_a = (
        x.unflatten(-1, k.shape[-2:])
        for x in (
            at_least_fp32(decay) + at_least_fp32(decay_bias),
            sigmoid(at_least_fp32(rate) + at_least_fp32(rate_bias)),
            at_least_fp32(k_k),
            at_least_fp32(k_a),
        )
    )
    erase = wide * k_k
    erase = erase * rsqrt(erase.square().sum(-1, keepdim=True).clamp(min=LEAST))
    new, erase, write = (x.to(k.dtype) for x in (wide * (1 + (a - 1) * k_a), erase, erase * a))
    return new, erase, write, -largest * sigmoid(f)


def reference(*args: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The formulas, with σ(x) = (1 + tanh(x/2)) / 2 and a quotient by the length."""
    a = Arguments(*args)  # type: ignore[arg-type]
    k, decay, rate, decay_bias, rate_bias, k_k, k_a = (at_least_fp32(x) for x in a[:7])
    decay, rate = ((1 + torch.tanh(x / 2)) / 2 for x in (decay + decay_bias, rate + rate_bias))
    decay, rate, k_k, k_a = (x.unflatten(-1, k.shape[-2:]) for x in (decay, rate, k_k, k_a))
    erase = k * k_k
    erase = erase / erase.square().sum(-1, keepdim=True).clamp(min=LEAST).sqrt()
    new = k + k * k_a * (rate - 1)
    return new.to(a.k.dtype), erase.to(a.k.dtype), (erase * rate).to(a.k.dtype), -a.largest * decay


OP = Op("erase_gates", reference=reference, torch=composed, gpu="kernels.erase_gates.gpu.op:forward")


def erase_gates(
    k: Tensor,
    decay: Tensor,
    rate: Tensor,
    decay_bias: Tensor,
    rate_bias: Tensor,
    k_k: Tensor,
    k_a: Tensor,
    *,
    largest: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `delta_rule` reads of keys and raw gates in RWKV-7 (arXiv 2503.14456), in one launch.

    With the rate a = σ(rate + rate_bias), keys become k ⊙ (1 + (a − 1) ⊙ k_a), the erase key κ is k ⊙ k_k with length
    one, it writes a ⊙ κ, and log_decay = −largest · σ(decay + decay_bias). Computed in at least fp32. The backward pass
    saves the arguments alone.

    Args:
        k: Keys […,M,K] of M recurrences.
        decay: Inputs of the decays […,M·K].
        rate: Inputs of the rates […,M·K].
        decay_bias: Bias of the inputs of the decays [M·K].
        rate_bias: Bias of the inputs of the rates [M·K].
        k_k: Factor of the erase keys [M·K].
        k_a: How much of a key its rate scales [M·K].
        largest: Bound of the log decays, negated; ≥ 0.

    Returns:
        The keys, erase keys and `erase_write` […,M,K] in the dtype of k, and log_decay […,M,K] in at least fp32.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    channels = k.shape[-2] * k.shape[-1] if k.dim() > 1 else 0
    if not channels:
        raise ValueError(f"k: expected […,M,K], got shape {tuple(k.shape)}")
    if not k.is_floating_point():
        raise ValueError(f"k: expected a floating dtype, got {k.dtype}")
    wide = (*k.shape[:-2], channels)
    for name, x in {"decay": decay, "rate": rate}.items():
        if x.shape != wide:
            raise ValueError(f"{name}: expected {list(wide)}, got shape {tuple(x.shape)}")
    for name, x in {"decay_bias": decay_bias, "rate_bias": rate_bias, "k_k": k_k, "k_a": k_a}.items():
        if x.shape != (channels,):
            raise ValueError(f"{name}: expected [{channels}], got shape {tuple(x.shape)}")
    if not 0 <= largest < math.inf:
        raise ValueError(f"largest: must be a finite number from 0, got {largest}")
    keys, erase, write, log_decay = OP(k, k, decay, rate, decay_bias, rate_bias, k_k, k_a, largest)
    return keys, erase, write, log_decay
