"""From the logits of a student and its teacher to divergences and the student's gradient, row by row and in place."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

# Logits of each model that one program holds in registers. As in `linear_cross_entropy`, a program reads its rows
# twice, the second time from L2 if few programs run at a time.
BLOCK, WARPS = 8192, 16


@triton.jit
def load_logits(at, inside, scale, cap):
    """Load logits, apply their soft cap and multiply by `scale`; they are -inf where not `inside`."""
    z = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if cap is not None:
        e = tl.exp(-2.0 * tl.abs(z) / cap)
        z = tl.where(z < 0, -cap, cap) * ((1 - e) / (1 + e))
    return tl.where(inside, z * scale, -float("inf"))


@triton.jit(do_not_specialize=["ignore_index"], do_not_specialize_on_alignment=["labels", "sums"])
def divergence(
    student, teacher, labels, sums, ignore_index, stride, V, scale, cap, teacher_cap,
    BLOCK: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    student += row * stride
    teacher += row * stride
    c = tl.arange(0, BLOCK)
    if tl.load(labels + row) == ignore_index:
        tl.store(sums + row, 0.0)
        if GRADIENT:
            for first in tl.range(0, V, BLOCK):
                tl.store(student + first + c, tl.zeros([BLOCK], student.dtype.element_ty), mask=first + c < V)
    else:
        s_max, t_max = -float("inf"), -float("inf")
        s_sum, t_sum, gaps = 0.0, 0.0, 0.0  # `gaps` is the sum of exp(t - t_max) (t - s)
        for first in tl.range(0, V, BLOCK):
            inside = first + c < V
            s = load_logits(student + first + c, inside, scale, cap)
            t = load_logits(teacher + first + c, inside, scale, teacher_cap)
            s_new, t_new = tl.maximum(s_max, tl.max(s, 0)), tl.maximum(t_max, tl.max(t, 0))
            s_sum = s_sum * tl.exp(s_max - s_new) + tl.sum(tl.exp(s - s_new), 0)
            weights, shrunk = tl.exp(t - t_new), tl.exp(t_max - t_new)
            t_sum = t_sum * shrunk + tl.sum(weights, 0)
            gaps = gaps * shrunk + tl.sum(tl.where(inside, weights * (t - s), 0.0), 0)
            s_max, t_max = s_new, t_new
        # the differences of the maxima and of the logarithms are exactly 0 for equal logits
        tl.store(sums + row, gaps / t_sum + (s_max - t_max) + (tl.log(s_sum) - tl.log(t_sum)))
        if GRADIENT:
            tl.debug_barrier()  # no warp overwrites what another still has to read
            s_log, t_log = s_max + tl.log(s_sum), t_max + tl.log(t_sum)
            for first in tl.range(0, V, BLOCK):
                inside = first + c < V
                s = load_logits(student + first + c, inside, scale, cap)
                t = load_logits(teacher + first + c, inside, scale, teacher_cap)
                gradient = (tl.exp(s - s_log) - tl.exp(t - t_log)) * scale
                if cap is not None:
                    ratio = s / (scale * cap)
                    gradient *= 1 - ratio * ratio
                tl.store(student + first + c, gradient.to(student.dtype.element_ty), mask=inside)
