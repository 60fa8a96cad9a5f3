"""Properties of ops that hold to the bit, or nearly."""

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

import kernels
from kernels.gpu.device import multiprocessors
from reproductions.proofs.findings import as_finding, attempted
from reproductions.proofs.op_calls import LENGTH, ROWS, OpCall, cases
from reproductions.proofs.red_zones import inside_red_zones
from zoo.performance.accuracy import relative_error
from zoo.performance.bench_calls import Tensors, differentiated, op_of
from zoo.performance.doctor import Finding

# relative to the fp32 loop, as docs/numerics.md has them: outputs, and gradients
LIMITS = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (5e-3, 1e-2)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES = {"cpu": (32,), "cuda": (64, 128)}  # of heads; those of models on GPUs, where kernels differ by size
REPEATS = 5
REORDERED = 8 * torch.finfo(torch.float32).eps  # fp32 sums whose terms come in another order
DOCUMENTS = (0, 41, 97, LENGTH)  # one with neighbours on both sides
CUTS = (1, 20, 33, 64, 100)  # first tokens that change: within each half of a chunk, and on its borders
PIECE = 50  # first token of the shortest piece
FEW, LONG = 8, 512  # heads that are compared with a loop; channels of keys whose states stay in memory
GATES = (0.0, -1e-3, -1.0, -10.0, -30.0, -200.0)  # log decays of a step


class Subject(NamedTuple):
    """A call on a device and in a dtype, and the backend that it runs on."""

    case: OpCall
    backend: str
    dtype: str

    @property
    def name(self) -> str:
        """The call, its backend and its dtype."""
        return f"{self.case.name}, {self.backend}, {self.dtype}"

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return next(iter(self.case.inputs.values())).device

    @property
    def parameters(self) -> Collection[str]:
        """The names of the arguments that it takes."""
        return inspect.signature(self.case.call or getattr(kernels, self.case.op)).parameters

    @property
    def along(self) -> list[str]:
        """The inputs with an axis of tokens."""
        return [name for name, x in self.case.inputs.items() if x.shape[:2] == (ROWS, LENGTH)]

    def outputs(self, **inputs: Tensor) -> Tensors:
        """The outputs, with some inputs replaced."""
        with torch.no_grad():
            return replace(self.case, inputs=self.case.inputs | inputs).outputs(self._backend)

    def results(self, arriving: Callable[[Tensors], Sequence[Tensor]], inputs: Tensors) -> Tensors:
        """The outputs and the gradients of all inputs that get one."""

        def call(leaves: Tensors) -> Tensors:
            return replace(self.case, inputs=leaves).outputs(self._backend)

        learned = [name for name, x in inputs.items() if x.is_floating_point()]
        outputs, gradients = differentiated(call, inputs, learned, arriving)
        return outputs | {f"gradient of {name}": gradient for name, gradient in gradients.items()}

    @property
    def _backend(self) -> str | None:
        return self.backend if self.backend in kernels.BACKENDS else None


Proof = Callable[[Subject], Finding]


def subjects(device: torch.device) -> Iterator[Subject]:
    """All calls of ops on a device: with each implementation but the loops, in each dtype."""
    for size in SIZES[device.type]:
        for case in cases(size):
            for backend in op_of(case.op).implementations:
                if backend == "torch" or (backend == "triton" and device.type == "cuda"):
                    for dtype, kind in DTYPES.items():
                        yield Subject(case.on(device, kind), backend, dtype)
    if device.type == "cuda":
        for case in _of_other_kernels(device):
            yield Subject(case.on(device, torch.bfloat16), "triton", "bf16")


def _of_other_kernels(device: torch.device) -> Iterator[OpCall]:
    """Recurrences that run other kernels than small ones in bf16: with enough heads to fill the GPU, and long keys."""
    heads = max(1, multiprocessors(device) * 3 // 4)
    for case in cases(max(SIZES["cuda"])):
        if case.op in ("linear_recurrence", "delta_rule"):
            inputs = {name: _repeated(name, x, heads) for name, x in case.inputs.items()}
            yield replace(case, variant=f"{case.variant}, many heads", inputs=inputs)
    yield from (
        case for case in cases(LONG) if case.op == "delta_rule" and case.variant in ("no decay", "decay per head")
    )


def _repeated(name: str, x: Tensor, heads: int) -> Tensor:
    """An input with more heads, each with other content."""
    axis = 0 if x.dim() == 1 else 1 if name == "initial_state" else 2
    other = 2 if name == "initial_state" else 1  # of a state its keys, of what has tokens the tokens
    copies = [x if x.dim() == 1 else x.roll(i, other) for i in range(-(-heads // x.shape[axis]))]
    return torch.cat(copies, axis).narrow(axis, 0, heads).contiguous()


def subject(device: torch.device, number: int) -> Subject:
    """One of the calls on a device, by its number."""
    return next(islice(subjects(device), number, None))


def prove(subject: Subject, checks: Collection[str] | None = None) -> Iterator[Finding]:
    """The findings about a subject, of all checks or some; what does not apply to it is left out."""
    for check, proof in proofs(subject).items():
        if checks is None or check in checks:
            yield attempted(subject.name, check, partial(proof, subject))


def proofs(subject: Subject) -> dict[str, Proof]:
    """The properties that a subject can have."""
    parameters = subject.parameters
    chosen: dict[str, Proof] = {}
    if subject.along:
        chosen |= {"causal": causal, "rows": rows}
    if subject.along and "cu_seqlens" in parameters:
        chosen["packed"] = packed
    if subject.along and subject._backend is not None:  # other libraries have no such mode
        chosen["invariant"] = invariant
    if "return_state" in parameters and "initial_state" in parameters:
        chosen["pieces"] = pieces
    if "log_decay" in subject.case.inputs and "q" in parameters:
        # attention has no state; a query that sees itself alone has a gradient of 0, whose rounding has no measure
        chosen |= {"gates": extreme_gates} if "initial_state" in parameters else {}
        chosen["one token"] = one_token
    chosen["repeats"] = repeated
    # on a GPU, PyTorch's own kernels are compiled, and cannot be led to other memory
    return chosen if subject.backend == "torch" and subject.device.type == "cuda" else chosen | {"memory": memory}


def causal(subject: Subject) -> Finding:
    """Check that no bit of an output depends on later tokens, for moderate and for strong decays."""
    inputs, changed, total, worst = subject.case.inputs, 0, 0, 0.0
    strengths = (1.0, 20.0) if "log_decay" in subject.along else (1.0,)
    for strength in strengths:
        before = {name: x * strength if name == "log_decay" else x for name, x in inputs.items()}
        expected = subject.outputs(**before)
        for cut in CUTS:
            for after in _later(before, subject.along, cut):
                actual = subject.outputs(**after)
                for name, y in expected.items():
                    if y.shape[:2] == (ROWS, LENGTH):
                        x, y = actual[name][:, :cut], y[:, :cut]
                        changed, total = changed + int((x != y).sum()), total + y.numel()
                        worst = max(worst, relative_error(x, y))
    says = "exact" if not changed else f"{changed / total:.0e} of the outputs change, by {worst:.0e}"
    return as_finding(subject.name, "causal", not changed, says, changed=changed, outputs=total, change=worst)


def _later(inputs: Tensors, along: Sequence[str], cut: int) -> Iterator[Tensors]:
    """The inputs with others from a token on: those of the other row, and strong decays or none."""

    def spliced(x: Tensor, other: Tensor) -> Tensor:
        return torch.cat([x[:, :cut], other[:, cut:]], 1)

    yield inputs | {name: spliced(inputs[name], inputs[name].flip(0)) for name in along}
    if "log_decay" in along:
        for gate in (-30.0, 0.0):
            g = inputs["log_decay"]
            yield inputs | {"log_decay": spliced(g, torch.full_like(g, gate))}


def packed(subject: Subject) -> Finding:
    """Check that a packed document has the results that it has alone: outputs, states, and gradients."""
    start, stop = DOCUMENTS[1:3]
    together, alone = _documents(subject, DOCUMENTS, 0, LENGTH), _documents(subject, (0, stop - start), start, stop)
    generator = torch.Generator().manual_seed(1)

    def arriving(outputs: Tensors) -> list[Tensor]:
        """One gradient of the document's output in both calls; none of other documents, or of states."""
        y = next(iter(outputs.values()))
        of_document = torch.randn(1, stop - start, *y.shape[2:], generator=generator.manual_seed(1)).to(y)
        everywhere = torch.zeros_like(y)
        everywhere[:, start if y.shape[1] == LENGTH else 0 :][:, : stop - start] = of_document
        return [everywhere, *(torch.zeros_like(x) for x in [*outputs.values()][1:])]

    expected, actual = subject.results(arriving, alone), subject.results(arriving, together)
    differing, worst = [], 0.0
    for name, y in expected.items():
        x = actual[name]
        if x.shape[1:2] == (LENGTH,) and y.shape[1:2] == (stop - start,):
            x = x[:, start:stop]
        elif x.shape[:1] == (len(DOCUMENTS) - 1,) and y.shape[:1] == (1,):
            x = x[1:2]
        if not torch.equal(x, y):
            differing.append(name)
            worst = max(worst, relative_error(x, y))
    limit = max(LIMITS[DTYPES[subject.dtype]])
    return nearly(subject.name, "packed", differing, worst, limit)


def _documents(subject: Subject, boundaries: Sequence[int], start: int, stop: int) -> Tensors:
    """The first row's tokens from `start` to `stop`, as packed documents; as rows where none can be packed."""
    inputs = dict(subject.case.inputs)
    if "cu_seqlens" not in subject.parameters:
        length = min(stop - start for start, stop in pairwise(boundaries))
        for name in subject.along:
            inputs[name] = torch.stack([inputs[name][0, i : i + length] for i in boundaries[:-1]])
        return inputs
    for name in subject.along:
        inputs[name] = inputs[name][:1, start:stop]
    if "initial_state" in inputs:
        inputs["initial_state"] = inputs["initial_state"][:1].expand(len(boundaries) - 1, -1, -1, -1)
    return inputs | {"cu_seqlens": torch.tensor(boundaries, dtype=torch.int32, device=subject.device)}


def nearly(name: str, check: str, differing: Sequence[str], change: float, limit: float) -> Finding:
    """A finding about results that should be the same: noted if some differ within a limit, failed if by more."""
    says = f"{change:.0e}" if differing else "exact"
    if not change <= limit:
        says = f"{', '.join(differing)} change by {change:.1e}, allowed {limit:.0e}"
    finding = as_finding(name, check, change <= limit, says, differing=[*differing], change=change, limit=limit)
    return finding._replace(status="noted") if differing and change <= limit else finding


def rows(subject: Subject) -> Finding:
    """Compare a row of a batch, outputs and gradients, with the row alone."""
    names = [name for name, x in subject.case.inputs.items() if name in subject.along or name == "initial_state"]
    limit, worst, differing = max(LIMITS[DTYPES[subject.dtype]]), 0.0, set[str]()

    def arriving(outputs: Tensors) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        return [
            torch.randn(1, *y.shape[1:], generator=generator).to(y).expand_as(y).contiguous() for y in outputs.values()
        ]

    def batch(size: int) -> Tensors:
        return {
            n: x[:1].repeat(size, *[1] * (x.dim() - 1)) if n in names else x for n, x in subject.case.inputs.items()
        }

    expected = subject.results(arriving, batch(1))
    for size in (2, 16):
        actual = subject.results(arriving, batch(size))
        for name, y in expected.items():
            of_row = name.startswith("output") or name.removeprefix("gradient of ") in names
            if of_row and not torch.equal(actual[name][:1], y):
                differing.add(name)
                worst = max(worst, relative_error(actual[name][:1], y))
    return nearly(subject.name, "rows", sorted(differing), worst, limit)


def invariant(subject: Subject) -> Finding:
    """Check that in deterministic mode rows and documents have exactly the results that they have alone.

    Gradients of parameters are sums over all rows.
    """
    with kernels.deterministic():
        findings = [proof(subject) for name, proof in (("rows", rows), ("packed", packed)) if name in proofs(subject)]
    along = {*subject.along, "initial_state"}
    names = {name for each in findings for name in each.numbers["differing"]}
    differing = sorted(name for name in names if name.startswith("output") or name.split()[-1] in along)
    return exactly(subject.name, "invariant", differing)


def exactly(name: str, check: str, differing: Sequence[str]) -> Finding:
    """A finding about results that have to be the same."""
    says = f"{', '.join(differing)} differ" if differing else "exact"
    return as_finding(name, check, not differing, says, differing=[*differing])


def pieces(subject: Subject) -> Finding:
    """Compare a sequence with its pieces, each from the state before.

    One is a single token, or two where keys are so long that kernels take no single token.
    """
    case = replace(subject.case, options=subject.case.options | {"return_state": True})
    part = subject._replace(case=case)
    expected, outputs = [*part.outputs().values()], []
    state: Tensor | None = case.inputs.get("initial_state")
    shortest = 2 if "q" in case.inputs and case.inputs["q"].shape[-1] >= LONG else 1
    for start, stop in pairwise((0, PIECE, PIECE + shortest, LENGTH)):
        inputs = {name: x[:, start:stop] if name in subject.along else x for name, x in case.inputs.items()}
        first = {} if state is None else {"initial_state": state}
        o, state = part._replace(case=replace(case, inputs=inputs)).outputs(**first).values()
        outputs.append(o)
    assert state is not None
    errors = {"o": relative_error(torch.cat(outputs, 1), expected[0]), "state": relative_error(state, expected[1])}
    limit, worst = LIMITS[DTYPES[subject.dtype]][0], max(errors.values())
    return as_finding(
        subject.name, "pieces", worst <= limit, f"{worst:.0e}" if worst else "exact", errors=errors, limit=limit
    )


def extreme_gates(subject: Subject) -> Finding:
    """Gradients against a loop in fp64, for decays from none to resets, packed documents and initial states.

    The error of the decay's gradient is relative to what that is without a decay, or to itself if that is larger: where
    little survives a step, so does little of the gradient.
    """
    boundaries = (0, 1, 2, 41, 97, LENGTH) if "cu_seqlens" in subject.parameters else (0, LENGTH)
    inputs, worst, of_decay, worst_gate = _documents(subject, boundaries, 0, LENGTH), 0.0, 0.0, 0.0
    heads, D = inputs["v"].shape[2], inputs["v"].shape[3]
    generator = torch.Generator().manual_seed(2)
    state = torch.randn(len(boundaries) - 1, heads, inputs["q"].shape[3], D, generator=generator) / D**0.5
    inputs["initial_state"] = state.to(subject.device)
    of_outputs = torch.randn(inputs["v"].shape, generator=generator.manual_seed(1)).to(subject.device)
    loop, scale = subject._replace(backend="reference", case=replace(subject.case, call=None)), 0.0

    def arriving(outputs: Tensors) -> list[Tensor]:
        return [of_outputs.narrow(2, 0, y.shape[2]).to(y) for y in outputs.values()]

    for gate in GATES:
        here = inputs | {"log_decay": torch.full_like(inputs["log_decay"], gate)}
        exact = {name: _few_heads(name, x.double()) if x.is_floating_point() else x for name, x in here.items()}
        expected, actual = loop.results(arriving, exact), subject.results(arriving, here)
        for name, y in expected.items():
            x = _few_heads(name, actual[name])
            if name != "gradient of log_decay":
                worst = max(worst, relative_error(x, y))
            else:
                norm = float(y.norm())
                scale = max(scale, norm)
                error = float((x.double() - y).norm()) / max(scale, norm)
                of_decay, worst_gate = max((of_decay, worst_gate), (error, gate))
    limit = LIMITS[DTYPES[subject.dtype]][1]
    says = f"{worst:.0e} / {of_decay:.0e}"
    numbers = {"error": worst, "error_of_decays": of_decay, "worst_gate": worst_gate, "limit": limit}
    return as_finding(subject.name, "gates", max(worst, of_decay) <= limit, says, **numbers)


def _few_heads(name: str, x: Tensor) -> Tensor:
    """The first heads of an input, an output or a gradient: the loop keeps the states of all tokens."""
    axis = 0 if x.dim() == 1 else 1 if name.endswith("initial_state") else 2
    return x.narrow(axis, 0, min(x.shape[axis], FEW))


def _arriving(device: torch.device, outputs: Tensors) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(y.shape, generator=generator).to(device, y.dtype) for y in outputs.values()]


def one_token(subject: Subject) -> Finding:
    """Check that decays get no gradient, not even a small one, from documents of one token without a state."""
    inputs = _documents(subject, range(LENGTH + 1), 0, LENGTH)
    inputs.pop("initial_state", None)
    only_outputs: Callable[[Tensors], list[Tensor]] = lambda outputs: [  # noqa: E731
        torch.ones_like(y) if i == 0 else torch.zeros_like(y) for i, y in enumerate(outputs.values())
    ]
    gradient = subject.results(only_outputs, inputs).get("gradient of log_decay")
    largest = 0.0 if gradient is None else float(gradient.abs().max())
    return as_finding(
        subject.name, "one token", largest == 0, "exact" if largest == 0 else f"{largest:.0e}", largest=largest
    )


def repeated(subject: Subject) -> Finding:
    """Check that results are the same bits each time.

    PyTorch's own kernels may add the terms of a gradient in another order, if they do not in deterministic mode.
    """
    changes = _changes(subject)
    if not changes:
        return as_finding(subject.name, "repeats", True, "exact", times=REPEATS, changes={})
    largest = max(changes.values())
    says = f"{', '.join(sorted(changes))} changed by {largest:.0e} from one call to the next"
    finding = as_finding(subject.name, "repeats", False, says, times=REPEATS, changes=changes)
    if subject.backend == "torch" and largest <= REORDERED:
        with kernels.deterministic():
            if not _changes(subject):
                return finding._replace(status="noted", says=f"{largest:.0e}")
    return finding


def _changes(subject: Subject) -> dict[str, float]:
    """The results that differ between calls, and by how much of the largest number."""
    arriving, changes = partial(_arriving, subject.device), dict[str, float]()
    first = subject.results(arriving, subject.case.inputs)
    for _ in range(REPEATS - 1):
        for name, x in subject.results(arriving, subject.case.inputs).items():
            if not torch.equal(x, first[name]):
                change = float((x - first[name]).abs().max() / first[name].abs().max())
                changes[name] = max(change, changes.get(name, 0.0))
    return changes


def memory(subject: Subject) -> Finding:
    """Check that nothing outside of the tensors is read or written, forward and backward."""
    arriving = partial(_arriving, subject.device)
    written, wrong = inside_red_zones(partial(subject.results, arriving), subject.case.inputs)
    says = "exact" if not written and not wrong else f"{written} bytes written outside; {', '.join(wrong)} not finite"
    return as_finding(subject.name, "memory", not written and not wrong, says, written=written, wrong=wrong)
