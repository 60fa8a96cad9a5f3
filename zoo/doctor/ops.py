"""The ops on a device: which implementation runs, and whether it computes what the fp32 loop does."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import kernels
from zoo.benchmarks.gate import Gate, relative_error
from zoo.doctor.cases import LENGTH, Case, Tensors, cases, ops
from zoo.doctor.finding import Finding, found

# relative to the fp32 loop, as docs/numerics.md has them: outputs, and gradients
LIMITS = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (5e-3, 1e-2)}
CHECKS = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES = {"cpu": (32,), "cuda": (64, 128)}  # of heads; those of models on GPUs, where kernels differ by size
REPEATS = 5
DOCUMENTS = (0, 41, 97, LENGTH)  # one with neighbours on both sides


def examine_ops(device: torch.device, seen: Callable[[str], None] = lambda name: None) -> Iterator[Finding]:
    """Findings about all ops.

    Args:
        device: Where they run.
        seen: Called with the name of each case before it is examined.
    """
    cases = known_cases(device)
    for case in cases:
        seen(case.name)
        yield from examine_case(case, device)
    for op in sorted({*ops()} - {case.op for case in cases}):
        yield Finding(op, "path", "noted", "the doctor does not know how to call it", {})


def known_cases(device: torch.device) -> list[Case]:
    """The calls that are made on a device."""
    return [case for size in SIZES[device.type] for case in cases(size)]


def examine_case(case: Case, device: torch.device) -> Iterator[Finding]:
    """Findings about one call."""
    checks: dict[str, Callable[[], Finding]] = {"path": partial(path, case, device)}
    checks |= {name: partial(accuracy, case, device, name) for name in CHECKS}
    if case.takes_documents:
        checks["packed"] = partial(isolation, case, device)
    checks["repeats"] = partial(repeats, case, device)
    for check, run in checks.items():
        yield attempted(case.name, check, run)


def attempted(subject: str, check: str, run: Callable[[], Finding]) -> Finding:
    """Run a check; an exception is a failed check."""
    try:
        return run()
    except Exception as error:  # of compilers and drivers, of any type
        says = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
        return Finding(subject, check, "failed", says, {})


def path(case: Case, device: torch.device) -> Finding:
    """Report the implementation that runs by default."""
    op = sys.modules[getattr(kernels, case.op).__module__].OP
    tensor = next(iter(case.on(device, torch.float32).inputs.values()))
    name = op.backend(tensor)
    # an op without Triton kernels may use those of PyTorch
    expected = "triton" if device.type == "cuda" and "triton" in op.implementations else "torch"
    return Finding(case.name, "path", "passed" if name == expected else "noted", name, {"implementation": name})


def accuracy(case: Case, device: torch.device, check: str) -> Finding:
    """Outputs and gradients in a dtype against the fp32 loop, of the same rounded inputs."""
    dtype = CHECKS[check]
    here = case.on(device, dtype)
    expected = here.exact().results("reference")
    actual, gate = here.results(), Gate()
    for name, y in expected.items():
        gate.check(name, actual[name], y, LIMITS[dtype]["gradient" in name])
    worst = max(gate.errors.values())
    says = f"{worst:.0e}" if gate.passed else gate.says
    return found(case.name, check, gate.passed, says, errors=gate.record()["errors"], limits=gate.limits)


def repeats(case: Case, device: torch.device) -> Finding:
    """Check that outputs and gradients are the same bits each time, in the dtype that models are trained in."""
    here = case.on(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    first, changed = here.results(), set[str]()
    for _ in range(REPEATS - 1):
        repeated = here.results()
        changed |= {name for name, y in first.items() if not torch.equal(y, repeated[name])}
    says = "same" if not changed else f"{', '.join(sorted(changed))} changed from one call to the next"
    return found(case.name, "repeats", not changed, says, times=REPEATS, changed=sorted(changed))


def isolation(case: Case, device: torch.device) -> Finding:
    """Check that a packed document is left alone by its neighbours, in each dtype that may run other kernels."""
    dtypes = [*CHECKS.values()] if device.type == "cuda" else [torch.float32]
    change, leaks, wrong = 0.0, 0.0, []
    for dtype in dtypes:
        limit = LIMITS[dtype][0]
        changed, leaked = _influence(case.on(device, dtype).inputs, case)
        change, leaks = max(change, changed), max(leaks, leaked)
        wrong += [f"outputs change by {changed:.1e} with the neighbours"] if not changed <= limit else []
        wrong += [f"{leaked:.1e} of a gradient goes to the neighbours"] if not leaked <= limit else []
    says = ", and ".join(wrong) or ("alone" if change == leaks == 0 else f"alone but for {max(change, leaks):.0e}")
    return found(case.name, "packed", not wrong, says, change=change, leaks=leaks)


def _influence(inputs: Tensors, case: Case) -> tuple[float, float]:
    """Return the change of a document's outputs with its neighbours' inputs, and the part of its gradient that reaches
    them.
    """
    along = [name for name, x in inputs.items() if x.dim() > 2 and x.shape[1] == LENGTH]
    boundaries = torch.tensor(DOCUMENTS, dtype=torch.int32, device=inputs[along[0]].device)
    start, stop = DOCUMENTS[1:3]

    def packed(outside: int) -> Case:
        """One row whose middle document is of the first row of the inputs, and whose other documents are of any row."""
        row = {name: x for name, x in inputs.items() if name != "initial_state"}
        for name in along:
            row[name] = inputs[name][outside : outside + 1].clone()
            row[name][:, start:stop] = inputs[name][:1, start:stop]
        return replace(case, inputs=row | {"cu_seqlens": boundaries})

    one, other = (next(iter(packed(row).outputs().values()))[:, start:stop] for row in (0, 1))
    leaves = {name: x.detach().requires_grad_(name in along) for name, x in packed(0).inputs.items()}
    output = next(iter(replace(case, inputs=leaves).outputs().values()))
    arriving = torch.zeros_like(output)
    arriving[:, start:stop] = other
    gradients = torch.autograd.grad(output, [leaves[name] for name in along], arriving)
    return relative_error(other, one), max(_outside(gradient, start, stop) for gradient in gradients)


def _outside(gradient: Tensor, start: int, stop: int) -> float:
    """Return the norm of a gradient [1,T,…] outside of a document, relative to the norm inside."""
    outside = torch.cat([gradient[:, :start], gradient[:, stop:]], 1).double().norm()
    return float(outside / gradient[:, start:stop].double().norm().clamp(min=1e-30))
