"""Explain which GPU kernels an op runs, without running them.

    python -m kernels explain linear_recurrence --gate channel --B 8 --T 4096 --H 8 --K 128 --device H100
    python -m kernels explain delta_rule --B 8 --T 4096 --H 8 --K 128 --dtype bf16 --device A100

The call is made as usual, on tensors without data; launches are listed instead of started. So the list is what would
run, with the grid and the named constants of each launch. PyTorch's operations are not listed.
"""

import argparse
import sys
from collections import Counter

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import kernels

from .core.recurrence import check
from .delta_rule import op_of
from .errors import UserError

try:
    from .gpu.device import GPUS, assumed
    from .gpu.launch import LaunchSpec
    from .gpu.paths import Record, dry_run
    from .gpu.plan import of_rows
except ModuleNotFoundError as error:
    sys.exit(f"python -m kernels explains kernels in Triton, which cannot be imported: {error}")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GATES = {name: ("none", "constant", "head", "channel") for name in ("linear_recurrence", "delta_rule")}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m kernels", description="Look into the kernels.")
    command = top.add_subparsers(dest="command", required=True).add_parser(
        "explain", help="list the GPU kernels of a call, and why they run", description=__doc__.splitlines()[0]
    )
    command.add_argument("op", choices=[*GATES])
    for letter, default, meaning in (
        ("B", 8, "rows of the batch"),
        ("T", 4096, "tokens per row"),
        ("H", 8, "value heads"),
        ("E", 1, "subheads per head"),
        ("K", 128, "channels of a key"),
        ("V", None, "channels of a value; as K by default"),
    ):
        command.add_argument(
            f"--{letter}", type=positive, default=default, help=meaning + (f" (default: {default})" if default else "")
        )
    command.add_argument("--gate", help="form of the log decay: none, constant, head, channel (default: head)")
    command.add_argument("--no-beta", action="store_true", help="no input gates (linear recurrence)")
    command.add_argument("--fixed-gates", action="store_true", help="gates need no gradient")
    command.add_argument("--inference", action="store_true", help="no gradients at all")
    command.add_argument("--constants", action="store_true", help="list the constants that kernels are compiled for")
    command.add_argument("--dtype", choices=[*DTYPES], default="bf16")
    command.add_argument("--device", choices=[*GPUS], default="H100")
    return top


def positive(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return int(text)


def arguments(args: argparse.Namespace) -> dict[str, Tensor]:
    """The tensors of the call, without data."""
    B, T, heads, K, V = args.B, args.T, args.H * args.E, args.K, args.V or args.K
    dtype, gate = DTYPES[args.dtype], args.gate or "head"

    def empty(*shape: int, dtype: torch.dtype = torch.float32, learned: bool = True) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=learned and not args.inference)

    tensors = {name: empty(B, T, heads, K, dtype=dtype) for name in "qk"}
    tensors["v"] = empty(B, T, args.H, V, dtype=dtype)
    shapes = {"constant": (heads,), "head": (B, T, heads), "channel": (B, T, heads, K)}
    if gate != "none":
        learned = not args.fixed_gates and gate != "constant"
        decay_dtype = dtype if gate == "channel" and dtype == torch.bfloat16 else torch.float32
        tensors["log_decay"] = empty(*shapes[gate], dtype=decay_dtype, learned=learned)
    if args.op == "delta_rule" or not args.no_beta:
        tensors["beta"] = empty(B, T, heads, learned=not args.fixed_gates)
    return tensors


def explain(args: argparse.Namespace) -> list[Record]:
    """The dry runs of the forward and the backward pass."""
    tensors = arguments(args)
    call = check(
        *(tensors["q"], tensors["k"], tensors["v"], tensors.get("log_decay"), tensors.get("beta")),
        subheads=args.E,
        scale=None,
        initial_state=None,
        cu_seqlens=None,
    )
    op = op_of(call) if args.op == "delta_rule" else sys.modules[kernels.linear_recurrence.__module__].OP
    if op.limits is not None and (reason := op.limits(call)) is not None:
        raise UserError(f"{args.op} would run in PyTorch, not on 'triton', {reason}")
    of_rows.cache_clear()  # plans depend on the assumed GPU
    try:
        with assumed(GPUS[args.device]), dry_run() as forward:
            o, _ = op.load("triton")(call)
            with dry_run() as backward:
                if o.requires_grad:
                    o.sum().backward()
    finally:
        of_rows.cache_clear()
    return [forward, backward]


def table(title: str, launches: list[LaunchSpec], constants: bool) -> Table:
    """The launches of one pass; equal ones, such as those for groups of rows, are one line."""
    columns = ["kernel", "programs", "warps", "stages", "registers", *["constants"] * constants]
    result = Table(*columns, title=title, title_justify="left")
    lines: Counter[tuple[str, ...]] = Counter()
    for spec in launches:
        numbers = (spec.programs, spec.warps, spec.stages, spec.registers)
        line = [spec.name, *("default" if number is None else f"{number:,}" for number in numbers)]
        lines[*line, *[", ".join(f"{key}={value}" for key, value in spec.constants.items())] * constants] += 1
    for (name, programs, *rest), times in lines.items():
        result.add_row(name, programs if times == 1 else f"{times} × {programs}", *rest)
    return result


def main(words: list[str] | None = None) -> None:
    """Run the command line."""
    args = parser().parse_args(words)
    if args.gate not in (None, *GATES[args.op]):
        parser().error(f"--gate: {args.gate!r} is not one of {', '.join(GATES[args.op])}")
    if args.no_beta and args.op == "delta_rule":
        parser().error("--no-beta: the delta rule has input gates")
    try:
        passes = explain(args)
    except (UserError, ValueError) as error:
        sys.exit(str(error))
    console = Console(highlight=False)
    for title, record in zip(("forward", "backward"), passes, strict=True):
        if record.launches:
            console.print(table(title, record.launches, args.constants))
            for path in record.paths:
                console.print(f"[bold]{path.name}[/bold]: {path.why}")


if __name__ == "__main__":
    main()
