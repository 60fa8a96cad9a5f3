"""Features in PyTorch: as a composition of ops, with the history for the next call, and token by token."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.autograd import once, plain
from ..core.deterministic import is_deterministic
from ..core.documents import documents
from ..core.recurrence import at_least_fp32
from .arguments import FeatureStream
from .stages import ACTIVATIONS, NORMS


def forward(stream: FeatureStream) -> tuple[Tensor, Tensor | None]:
    """y [B,T,heads,size], and the history for the next call if it is to be returned."""
    x = stream.x
    if stream.weight is not None:
        x = convolve(stream).unflatten(-1, x.shape[2:])
    y = NORMS[stream.norm](ACTIVATIONS[stream.activation](x))
    # autocast runs norms in fp32
    return y.to(stream.x.dtype), continued(stream) if stream.return_history else None


def convolve(stream: FeatureStream) -> Tensor:
    """y_t = bias + Σ_j weight_j · x_{t−W+1+j} for every channel, [B,T,C]."""
    x, past, W = stream.x.flatten(2), stream.past(), stream.taps
    if stream.cu_seqlens is None:
        return _slide(torch.cat([past, x], 1), stream)
    # all documents in one line, each preceded by its history, so that no tap reaches into another document
    packed = documents(stream.cu_seqlens, x.shape[1], x.shape[0], x.device)
    rows, starts = stream.sequences, stream.cu_seqlens[:-1]
    ahead = torch.arange(rows, device=x.device) * (W - 1)
    taps = torch.arange(W - 1, device=x.device)
    token = torch.arange(x.shape[1], device=x.device) + ahead[packed.owner]
    line = x.new_zeros(x.shape[1] + rows * (W - 1), x.shape[2]).index_copy(0, token + W - 1, x[0])
    line = line.index_copy(0, ((starts + ahead)[:, None] + taps).flatten(), past.flatten(0, 1))
    return _slide(line[None], stream)[:, token]


def _slide(line: Tensor, stream: FeatureStream) -> Tensor:
    """[B,W−1+T,C] → [B,T,C], as an image of one row with channels last: three times faster on CPUs than conv1d."""
    assert stream.weight is not None
    if by_hand := line.is_cpu and plain((line, stream.weight)):
        line = at_least_fp32(line)  # in half precision the gradient takes twice as long
    weight, bias = stream.weight.to(line.dtype), None if stream.bias is None else stream.bias.to(line.dtype)
    if not line.is_cuda and (line.dtype == torch.float64 or is_deterministic()):
        # in fp64 PyTorch opens a parallel region per channel: seconds on a busy machine; its rounding depends on T
        T = line.shape[1] - weight.shape[2] + 1
        y = sum((line[:, j : j + T] * weight[:, 0, j] for j in range(weight.shape[2])), line.new_zeros(()))
    elif by_hand:
        return _Depthwise.apply(line, weight, bias)
    else:
        y = _depthwise(line, weight)
    # added separately: with a bias, the gradient of the convolution takes twice as long on CPUs
    return y if bias is None else y + bias


def _depthwise(line: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.conv2d(line.mT.unsqueeze(2), weight.unsqueeze(2), bias, groups=line.shape[2]).squeeze(2).mT.contiguous()


class _Depthwise(torch.autograd.Function):
    """Depthwise convolution that ignores autocast, with a gradient of the taps written by hand: oneDNN takes twice as
    long.
    """

    @staticmethod
    def forward(ctx: Any, line: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(line, weight)
        with torch.autocast("cpu", enabled=False):
            return _depthwise(line, weight, bias)

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        line, weight = ctx.saved_tensors
        T, C = dy.shape[1:]
        dweight = torch.stack([(dy * line[:, j : j + T]).sum((0, 1)) for j in range(weight.shape[2])], 1).unsqueeze(1)
        dbias = dy.sum((0, 1)) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, dweight, dbias
        pictures = (x.mT.unsqueeze(2) for x in (dy.contiguous(), line))
        one, none, mask = [1, 1], [0, 0], [True, False, False]
        dline = torch.ops.aten.convolution_backward(
            *pictures, weight.unsqueeze(2), None, one, none, one, False, none, C, mask
        )[0]
        return dline.squeeze(2).mT, dweight, dbias


def continued(stream: FeatureStream) -> Tensor:
    """The last W − 1 inputs of every sequence [N,W−1,C], in the dtype of `history`, else of x."""
    x, past, keep = stream.x.flatten(2), stream.past(), stream.taps - 1
    if not keep:
        return past if stream.history is None else stream.history
    if stream.cu_seqlens is None:
        tail = torch.cat([past, x[:, max(x.shape[1] - keep, 0) :]], 1)
        tail = tail[:, tail.shape[1] - keep :]
    else:
        # the places −W+1 … −1 of a document, counted from its end: its tokens, or the history before them
        lengths, places = stream.cu_seqlens.diff()[:, None], torch.arange(keep, device=x.device) - keep
        token = (stream.cu_seqlens[1:, None] + places).clamp(min=0)
        older = (lengths + places + keep).clamp(max=keep - 1)
        rows = torch.arange(stream.sequences, device=x.device)[:, None]
        tail = torch.where((lengths + places >= 0)[..., None], x[0, token], past[rows, older])
    return tail.to(x.dtype if stream.history is None else stream.history.dtype)


def reference(stream: FeatureStream) -> tuple[Tensor, Tensor | None]:
    """Features in at least fp32, in a loop over tokens."""
    x, T = at_least_fp32(stream.x.flatten(2)), stream.x.shape[1]
    packed = None if stream.cu_seqlens is None else documents(stream.cu_seqlens, T, len(x), x.device)
    pasts = at_least_fp32(stream.past() if stream.history is None else stream.history)
    outputs, tails = [], []
    for n, (start, stop) in enumerate([(0, T)] if packed is None else packed.spans):
        past = pasts if packed is None else pasts[n : n + 1]  # [B,W−1,C]
        for t in range(start, stop):
            window = torch.cat([past, x[:, t : t + 1]], 1)
            outputs.append(_one(window, stream))
            past = window[:, 1:]
        tails.append(past)
    y = torch.stack(outputs, 1).to(stream.x.dtype)
    dtype = stream.x.dtype if stream.history is None else stream.history.dtype
    return y, torch.cat(tails).to(dtype) if stream.return_history else None


def _one(window: Tensor, stream: FeatureStream) -> Tensor:
    """The features [B,heads,size] of the last of W inputs [B,W,C]."""
    z = window[:, -1]
    if stream.weight is not None:
        z = (at_least_fp32(stream.weight)[:, 0].T * window).sum(1)
        z = z if stream.bias is None else z + at_least_fp32(stream.bias)
    return NORMS[stream.norm](ACTIVATIONS[stream.activation](z.unflatten(-1, stream.x.shape[2:])))
