"""Keys, erase keys and decays in one launch, and the gradients of all arguments in another.

A program works on one recurrence, whose parameters it loads once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import Gradients, register
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...gpu.overlap import MOST_EARLY, wait
from ...gpu.reductions import add_parts
from ...gpu.rows import head_tile_of, load, rows_of, walkers
from ...gpu.tiles import sigmoid
from .. import LEAST as SMALLEST
from .. import Arguments

LEAST: tl.constexpr = tl.constexpr(SMALLEST)
ELEMENTS, WARPS = 1024, 4  # of a tile, and of a program
PROGRAMS = 6  # per multiprocessor in the backward pass; each stores its part of the gradients of the parameters


@triton.jit
def parameter(x, m, c, K: tl.constexpr):
    return load(x + m * K, c, c < K)[None, :]


@triton.jit
def erase_key(k, k_k):
    """κ, 1 / |k ⊙ k_k| [ROWS,1], and whether the length is that of the key."""
    z = k * k_k
    square = tl.sum(z * z, 1)[:, None]
    r = tl.rsqrt(tl.maximum(square, LEAST))
    return z * r, r, square >= LEAST


@triton.jit(do_not_specialize=["rows"])
def erase_gates_forward(
    k,
    decay,
    rate,
    decay_bias,
    rate_bias,
    k_k,
    k_a,
    keys,
    erase,
    write,
    log_decay,
    rows,
    k_row,
    decay_row,
    rate_row,
    largest,
    M: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait(OVERLAP)
    m, first, c = tl.program_id(0) % M, tl.program_id(0) // M * ROWS, tl.arange(0, BLOCK)
    at, inside = head_tile_of(first, rows, k_row, m, c, K, ROWS)
    dense, _ = head_tile_of(first, rows, M * K, m, c, K, ROWS)
    of_decay, _ = head_tile_of(first, rows, decay_row, m, c, K, ROWS)
    of_rate, _ = head_tile_of(first, rows, rate_row, m, c, K, ROWS)
    u = load(k, at, inside)
    a = sigmoid(load(rate, of_rate, inside) + parameter(rate_bias, m, c, K))
    kappa, _, _ = erase_key(u, parameter(k_k, m, c, K))
    tl.store(keys + dense, (u * (1 + (a - 1) * parameter(k_a, m, c, K))).to(keys.dtype.element_ty), mask=inside)
    tl.store(erase + dense, kappa.to(erase.dtype.element_ty), mask=inside)
    tl.store(write + dense, (kappa * a).to(write.dtype.element_ty), mask=inside)
    f = load(decay, of_decay, inside) + parameter(decay_bias, m, c, K)
    tl.store(log_decay + dense, -largest * sigmoid(f), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def erase_gates_backward(
    k,
    decay,
    rate,
    decay_bias,
    rate_bias,
    k_k,
    k_a,
    dkeys,
    derase,
    dwrite,
    dlog_decay,
    dk,
    ddecay,
    drate,
    parts,  # [programs / M,4,M,K]: gradients of decay_bias, rate_bias, k_k and k_a, to be summed
    rows,
    k_row,
    decay_row,
    rate_row,
    largest,
    dkeys_row,
    derase_row,
    dwrite_row,
    M: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    m, walker, c = tl.program_id(0) % M, tl.program_id(0) // M, tl.arange(0, BLOCK)
    bias_of_decay, bias_of_rate = parameter(decay_bias, m, c, K), parameter(rate_bias, m, c, K)
    of_erase, of_key = parameter(k_k, m, c, K), parameter(k_a, m, c, K)
    decays = tl.zeros([ROWS, BLOCK], tl.float32)
    rates, erases, scales = decays, decays, decays
    for first in tl.range(walker * ROWS, rows, tl.num_programs(0) // M * ROWS):
        at, inside = head_tile_of(first, rows, k_row, m, c, K, ROWS)
        dense, _ = head_tile_of(first, rows, M * K, m, c, K, ROWS)
        in_decay, _ = head_tile_of(first, rows, decay_row, m, c, K, ROWS)
        in_rate, _ = head_tile_of(first, rows, rate_row, m, c, K, ROWS)
        u = load(k, at, inside)
        a = sigmoid(load(rate, in_rate, inside) + bias_of_rate)
        kappa, r, longer = erase_key(u, of_erase)
        du, da = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
        dkappa = tl.zeros([ROWS, BLOCK], tl.float32)
        if dkeys is not None:
            g = load(dkeys, head_tile_of(first, rows, dkeys_row, m, c, K, ROWS)[0], inside)
            du, da = g * (1 + (a - 1) * of_key), g * u * of_key
            scales += g * u * (a - 1)
        if dwrite is not None:
            g = load(dwrite, head_tile_of(first, rows, dwrite_row, m, c, K, ROWS)[0], inside)
            da += g * kappa
            dkappa = g * a
        if derase is not None:
            dkappa += load(derase, head_tile_of(first, rows, derase_row, m, c, K, ROWS)[0], inside)
        along = tl.where(longer, tl.sum(dkappa * kappa, 1)[:, None], 0.0)
        dz = r * (dkappa - kappa * along)
        du += dz * of_erase
        erases += dz * u
        da *= a * (1 - a)
        rates += da
        df = tl.zeros([ROWS, BLOCK], tl.float32)
        if dlog_decay is not None:
            s = sigmoid(load(decay, in_decay, inside) + bias_of_decay)
            df = load(dlog_decay, dense, inside) * -largest * s * (1 - s)
        decays += df
        tl.store(dk + dense, du.to(dk.dtype.element_ty), mask=inside)
        tl.store(drate + dense, da.to(drate.dtype.element_ty), mask=inside)
        tl.store(ddecay + dense, df.to(ddecay.dtype.element_ty), mask=inside)
    to, valid = parts + walker * (4 * M * K) + m * K + c, c < K
    tl.store(to, tl.sum(decays, 0), mask=valid)
    tl.store(to + M * K, tl.sum(rates, 0), mask=valid)
    tl.store(to + 2 * M * K, tl.sum(erases, 0), mask=valid)
    tl.store(to + 3 * M * K, tl.sum(scales, 0), mask=valid)


def strided(args: Arguments) -> tuple[tuple[Tensor, ...], int, tuple[Any, ...]]:
    """The tensors that kernels read, the number of tokens, and the other numbers."""
    (k, rows, k_row), (decay, _, decay_row), (rate, _, rate_row) = (
        rows_of(x) for x in (args.k.flatten(-2), args.decay, args.rate)
    )
    parameters = (x.contiguous() for x in args[3:7])
    return (k, decay, rate, *parameters), rows, (rows, k_row, decay_row, rate_row, args.largest)


def constants(k: Tensor) -> dict[str, int]:
    """The constants of both kernels."""
    M, K = k.shape[-2:]
    block = next_power_of_2(K)
    return {"M": M, "K": K, "ROWS": max(1, ELEMENTS // block), "BLOCK": block, "warps": WARPS}


def _empty(args: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return new(args.k), new(args.k), new(args.k), new(args.k, dtype=torch.float32)


def _compute(args: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    results, sizes, (tensors, rows, numbers) = _empty(args), constants(args.k), strided(args)
    programs = sizes["M"] * cdiv(rows, sizes["ROWS"])
    overlap = programs <= MOST_EARLY
    enqueue(erase_gates_forward, programs, *tensors, *results, *numbers, **sizes, overlap=overlap)
    return results


def _differentiate(args: Arguments, needed: Any, *gradients: Tensor | None) -> Gradients:
    sizes, (tensors, rows, numbers) = constants(args.k), strided(args)
    # those of two steps per token are rows of wider tensors
    arriving: list[Any] = [(None, 0, 0) if g is None else rows_of(g.flatten(-2)) for g in gradients[:3]]
    streams, _, strides = zip(*arriving, strict=True)
    of_decay = None if gradients[3] is None else gradients[3].contiguous()
    dk, ddecay, drate = new(args.k), new(args.decay), new(args.rate)
    count = walkers(rows, sizes["ROWS"], dk.device, PROGRAMS, sizes["M"])
    parts = new(dk, count, 1, 4 * args.k_k.numel(), dtype=torch.float32)
    every = (*tensors, *streams, of_decay, dk, ddecay, drate, parts)
    enqueue(erase_gates_backward, count * sizes["M"], *every, *numbers, *strides, **sizes)
    names = Arguments._fields[3:7]
    sums = add_parts(parts, torch.float32).view(4, -1).unbind()
    learned = {name: x.to(getattr(args, name).dtype) for name, x in zip(names, sums, strict=True)}
    return {"k": dk, "decay": ddecay, "rate": drate, **learned}


forward = register("erase_gates", _compute, _differentiate, _empty, results=4)
