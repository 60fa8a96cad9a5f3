"""Log decays per channel for benchmarks: gentle ones, those at the start of training, bounded and recorded ones."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

RECORDED = Path(__file__).with_name("recorded_decays.json")
# the fractions of all log decays of a layer whose quantiles are recorded; the smallest are the steepest
SHARES = (0.0, 1e-5, 1e-4, 1e-3, 3e-3, 0.01, 0.03, *(n / 20 for n in range(1, 20)), 0.97, 0.99, 1.0)
GENTLE = "gentle"
KINDS = (GENTLE, "initial", "bounded", "recorded")
# op → the model whose recorded decays it gets
MODELS = {"kda": "kda", "gated_deltanet2": "gated_deltanet2", "linear_channel": "gla"}
Draw = Callable[..., Tensor]  # sizes → standard normal numbers


def log_decays(kind: str, model: str, size: tuple[int, int, int, int], draw: Draw) -> Tensor:
    """Return log decays [B,T,H,K] in fp32.

    Args:
        kind: gentle (about 5 % a step), initial (a softplus decay before training, with A from 1 to 16 and time steps
            from 0.001 to 0.1), bounded (−5 times the sigmoid of a normal number) or recorded (the quantiles of the
            layers of a trained model, a layer for each head).
        model: The recorded model.
        size: B, T, H and K.
        draw: Makes normal numbers of a size.
    """
    noise, H, K = draw(*size), size[2], size[3]
    if kind == "initial":
        A = 1 + 15 * _uniform(draw(H, 1))
        step = torch.exp(-6.9 + 4.6 * _uniform(draw(H, K)))
        return -A * F.softplus(noise + step.expm1().log())
    if kind == "bounded":
        return -5 * noise.sigmoid()
    if kind == "recorded":
        layers = torch.tensor(recorded()[model]["quantiles"], device=noise.device)
        places = torch.linspace(0, len(layers) - 1, H).round().long()
        return torch.stack([_interpolated(layers[i], _uniform(noise[:, :, h])) for h, i in enumerate(places)], 2)
    return F.logsigmoid(noise) / 16


@cache
def recorded() -> dict[str, Any]:
    """Return the recorded models: name → steps, validation loss, and of each layer quantiles and steep chunks."""
    models: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return models


def _uniform(normal: Tensor) -> Tensor:
    return torch.special.ndtr(normal)


def _interpolated(quantiles: Tensor, share: Tensor) -> Tensor:
    """The values at `share` of the distribution with the given quantiles at `SHARES`."""
    shares = torch.tensor(SHARES, device=share.device)
    above = torch.searchsorted(shares, share.contiguous()).clamp(1, len(SHARES) - 1)
    weight = (share - shares[above - 1]) / (shares[above] - shares[above - 1])
    return torch.lerp(quantiles[above - 1], quantiles[above], weight)
