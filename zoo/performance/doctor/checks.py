"""Checks of ops and mixers on a device: which implementation runs, and whether it computes what the fp32 loop does."""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import kernels
import mixers
from mixers import Site, TokenMixer
from mixers.contract import BF16_TOLERANCE
from zoo.performance.accuracy import Gate, relative_error
from zoo.performance.doctor.workers import side_by_side
from zoo.performance.op_calls import LENGTH, OpCall, Tensors, cases, op_of, ops

Status = Literal["passed", "noted", "failed"]


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        subject: What was examined: `packages`, `GPU`, an op, a mixer …
        check: What about it: `versions`, `fp32`, `packed` …
        status: `noted` is worth knowing, and no failure.
        says: The result in words.
        numbers: The result in numbers, for JSON.
    """

    subject: str
    check: str
    status: Status
    says: str
    numbers: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.subject}, {self.check}: {self.says}"


def as_finding(subject: str, check: str, passed: bool, says: str, **numbers: Any) -> Finding:
    """A finding that passed or failed; numbers that are not finite are null, for JSON."""
    finite = {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in numbers.items()}
    return Finding(subject, check, "passed" if passed else "failed", says, finite)


# relative to the fp32 loop, as docs/numerics.md has them: outputs, and gradients
LIMITS = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (5e-3, 1e-2)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES = {"cpu": (32,), "cuda": (64, 128)}  # of heads; those of models on GPUs, where kernels differ by size
REPEATS = 5
DOCUMENTS = (0, 41, 97, LENGTH)  # one with neighbours on both sides


def examine(
    device: torch.device, seen: Callable[[str], None] = lambda name: None
) -> tuple[list[Finding], list[Finding]]:
    """Examine all ops and all registered mixers on a device.

    On a GPU several processes share the work, which is the compiler's on a new machine, and elsewhere mostly that of
    launching the fp32 loops. A process that dies, or a kernel that hangs, is a failed check.

    Args:
        device: cpu or cuda.
        seen: Called with what is examined next, or how much has been.

    Returns:
        Findings about ops, and findings about mixers.
    """
    calls, names = known_cases(device), mixers.names()
    # first what PyTorch compiles, which takes longest
    in_order = sorted(range(len(calls)), key=lambda number: "triton" in op_of(calls[number].op).implementations)
    subjects: list[int | str] = [*in_order, *names]
    results: dict[int | str, list[Finding]] = {}
    if device.type == "cuda":
        for done in side_by_side(partial(examined, device), subjects, processes(), LIMIT_S):
            subject = done.job if isinstance(done.job, str) else calls[done.job].name
            problem = [] if done.problem is None else [Finding(subject, "process", "failed", done.problem, {})]
            results[done.job] = [*done.results, *problem]
            seen(f"examined {len(results)} of {len(subjects)}")
    else:
        for each in subjects:
            seen(each if isinstance(each, str) else calls[each].name)
            results[each] = [*examined(device, each)]
    of_ops = [finding for number in range(len(calls)) for finding in results[number]]
    for op in sorted({*ops()} - {case.op for case in calls}):
        of_ops.append(Finding(op, "path", "noted", "the doctor does not know how to call it", {}))
    return of_ops, [finding for name in names for finding in results[name]]


def known_cases(device: torch.device) -> list[OpCall]:
    """The calls that are made on a device."""
    return [case for size in SIZES[device.type] for case in cases(size)]


def examine_case(case: OpCall, device: torch.device) -> Iterator[Finding]:
    """Findings about one call."""
    checks: dict[str, Callable[[], Finding]] = {"path": partial(path, case, device)}
    checks |= {name: partial(accuracy, case, device, name) for name in DTYPES}
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


def path(case: OpCall, device: torch.device) -> Finding:
    """Report the implementation that runs by default."""
    tensor = next(iter(case.on(device, torch.float32).inputs.values()))
    op = op_of(case.op)
    name = op.backend(tensor)
    # an op without Triton kernels may use those of PyTorch
    expected = "triton" if device.type == "cuda" and "triton" in op.implementations else "torch"
    return Finding(case.name, "path", "passed" if name == expected else "noted", name, {"implementation": name})


def accuracy(case: OpCall, device: torch.device, check: str) -> Finding:
    """Outputs and gradients in a dtype against the fp32 loop, of the same rounded inputs."""
    dtype = DTYPES[check]
    here = case.on(device, dtype)
    expected = here.exact().results("reference")
    actual, gate = here.results(), Gate()
    for name, y in expected.items():
        gate.check(name, actual[name], y, LIMITS[dtype]["gradient" in name])
    worst = max(gate.errors.values())
    says = f"{worst:.0e}" if gate.passed else gate.says
    return as_finding(case.name, check, gate.passed, says, errors=gate.record()["errors"], limits=gate.limits)


def repeats(case: OpCall, device: torch.device) -> Finding:
    """Check that outputs and gradients are the same bits each time, in the dtype that models are trained in.

    Gradients of PyTorch's own kernels are only noted if deterministic mode repeats them.
    """
    here = case.on(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    changed = _changing(here)
    says = "same" if not changed else f"{', '.join(changed)} changed from one call to the next"
    finding = as_finding(case.name, "repeats", not changed, says, times=REPEATS, changed=changed)
    only_gradients = all("gradient" in name for name in changed)
    if changed and only_gradients and op_of(case.op).backend(next(iter(here.inputs.values()))) == "torch":
        with kernels.deterministic():
            if not _changing(here):
                return finding._replace(status="noted", says=f"{says}, but not in deterministic mode")
    return finding


def _changing(case: OpCall) -> list[str]:
    """The names of results that differ between calls."""
    first, changed = case.results(), set[str]()
    for _ in range(REPEATS - 1):
        repeated = case.results()
        changed |= {name for name, y in first.items() if not torch.equal(y, repeated[name])}
    return sorted(changed)


def isolation(case: OpCall, device: torch.device) -> Finding:
    """Check that a packed document is left alone by its neighbours, in each dtype that may run other kernels."""
    dtypes = [*DTYPES.values()] if device.type == "cuda" else [torch.float32]
    change, leaks, wrong = 0.0, 0.0, []
    for dtype in dtypes:
        limit = LIMITS[dtype][0]
        changed, leaked = _influence(case.on(device, dtype).inputs, case)
        change, leaks = max(change, changed), max(leaks, leaked)
        wrong += [f"outputs change by {changed:.1e} with the neighbours"] if not changed <= limit else []
        wrong += [f"{leaked:.1e} of a gradient goes to the neighbours"] if not leaked <= limit else []
    says = ", and ".join(wrong) or ("alone" if change == leaks == 0 else f"alone but for {max(change, leaks):.0e}")
    return as_finding(case.name, "packed", not wrong, says, change=change, leaks=leaks)


def _influence(inputs: Tensors, case: OpCall) -> tuple[float, float]:
    """Return the change of a document's outputs with its neighbours' inputs, and the part of its gradient that reaches
    them.
    """
    along = [name for name, x in inputs.items() if x.dim() > 2 and x.shape[1] == LENGTH]
    boundaries = torch.tensor(DOCUMENTS, dtype=torch.int32, device=inputs[along[0]].device)
    start, stop = DOCUMENTS[1:3]

    def packed(outside: int) -> OpCall:
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


SITE = Site(hidden_size=64, num_heads=2, layer=1, num_layers=3)
CHANGE = 1e-4  # relative: norms magnify what sums of another order round


def examine_layer(name: str, device: torch.device) -> Iterator[Finding]:
    """Findings about one mixer."""
    for check, run in {"packed": layer_isolation, "bf16": in_bf16}.items():
        yield attempted(name, check, partial(run, name, device))


def registered(name: str, site: Site) -> TokenMixer:
    """A small mixer of the registry; matrices that start at zero are drawn, as they would hide what is before them."""
    entry = mixers.entry(name)
    with torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(0)
        mixer = entry.mixer(site, **entry.tiny)
        for parameter in mixer.parameters():
            if parameter.dim() > 1 and not parameter.any():
                parameter.normal_(std=0.1)
    return mixer


@torch.no_grad()
def layer_isolation(name: str, device: torch.device) -> Finding:
    """Check that a packed document's output does not depend on its neighbours."""
    mixer, generator = registered(name, SITE).to(device), torch.Generator().manual_seed(0)
    x, others = torch.randn(2, 1, LENGTH, SITE.hidden_size, generator=generator).to(device)
    start, stop = DOCUMENTS[1:3]
    others[:, start:stop] = x[:, start:stop]
    cu_seqlens = torch.tensor(DOCUMENTS, dtype=torch.int32, device=device)
    one, other = (mixer(batch, cu_seqlens=cu_seqlens)[0][:, start:stop] for batch in (x, others))
    change = relative_error(other, one)
    says = "alone" if change <= CHANGE else f"outputs of a document change by {change:.1e} with its neighbours"
    return as_finding(name, "packed", change <= CHANGE, says, change=change, limit=CHANGE)


@torch.no_grad()
def in_bf16(name: str, device: torch.device) -> Finding:
    """Check that the layer in bf16 is close to that in fp32; its gates and decays stay in fp32."""
    mixer, generator = registered(name, SITE).to(device), torch.Generator().manual_seed(0)
    x = torch.randn(2, LENGTH, SITE.hidden_size, generator=generator).to(device)
    exact, _ = mixer(x)
    rounded, _ = mixer.bfloat16()(x.bfloat16())
    error = relative_error(rounded, exact)
    passed = error <= BF16_TOLERANCE
    says = f"{error:.0e}" if passed else f"off by {error:.1e}, allowed {BF16_TOLERANCE:.0e}"
    return as_finding(name, "bf16", passed, says, error=error, limit=BF16_TOLERANCE)


MOST = 16  # processes; each needs half a GiB of the GPU's memory
LIMIT_S = 300  # of one op or mixer; a kernel that hangs takes no longer


def processes() -> int:
    """The number of processes that share the work on a GPU."""
    return max(1, min(MOST, os.cpu_count() or 1))


def examined(device: torch.device, subject: int | str) -> Iterator[Finding]:
    """The findings about a case by its number, or about a mixer by its name."""
    if isinstance(subject, str):
        return examine_layer(subject, device)
    return examine_case(known_cases(device)[subject], device)
