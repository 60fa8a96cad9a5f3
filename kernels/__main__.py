"""Explain which GPU kernels an op runs, without running them.

    python -m kernels explain delta_rule --B 8 --T 4096 --H 8 --K 128 --device H100
    python -m kernels explain linear_recurrence --gate channel --no-beta --H 4 --K 128 --V 256 --documents 8

The first is the call of a layer of Gated DeltaNet, the second that of a layer of GLA with packed documents. All kernels
of a mixer or of a model are listed by `python -m zoo explain gla.yaml size/400m.yaml`.

The call is made as usual, on tensors without data; launches are listed instead of started. So the list is what would
run, with the grid and the named constants of each launch. PyTorch's operations are not listed.
"""

import argparse
import sys

import torch
from torch import Tensor

import kernels

from .core.documents import copied
from .errors import UserError

try:
    from .gpu.device import GPUS
    from .gpu.listing import listed, show
    from .gpu.paths import Record
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
    command.add_argument("op", metavar="OP", help=" or ".join(GATES))
    command.add_argument("more", nargs="*", help=argparse.SUPPRESS)  # of a model, for the sentence that refuses it
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
    command.add_argument("--documents", type=positive, help="pack B × T tokens as so many documents into one row")
    command.add_argument("--initial-state", action="store_true", help="continue from states")
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
    B, T = (1, args.B * args.T) if args.documents else (args.B, args.T)
    heads, K, V = args.H * args.E, args.K, args.V or args.K
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
    if args.initial_state:
        tensors["initial_state"] = empty(args.documents or B, heads, K, V)
    if args.documents:
        tensors["cu_seqlens"] = packed(T, args.documents)
    return tensors


def packed(tokens: int, documents: int) -> Tensor:
    """Boundaries of documents of almost equal lengths in a row of tokens."""
    bounds = torch.linspace(0, tokens, documents + 1).round().to(torch.int32)
    return copied(bounds.to("meta"), bounds)


def explain(args: argparse.Namespace) -> list[Record]:
    """The dry runs of the forward and the backward pass."""
    tensors = arguments(args)
    op = getattr(kernels, args.op)
    with kernels.backend("triton"):
        return listed(lambda: op(**tensors, **{"subheads": args.E} if args.E > 1 else {})[0], GPUS[args.device])


def main(words: list[str] | None = None) -> None:
    """Run the command line."""
    args = parser().parse_args(words)
    if args.op not in GATES or args.more:
        what = " ".join([args.op, *args.more])
        others = f"models and mixers are explained by python -m zoo explain {what}"
        parser().error(f"OP: {what!r} is not one of {', '.join(GATES)}; {others}")
    if args.gate not in (None, *GATES[args.op]):
        parser().error(f"--gate: {args.gate!r} is not one of {', '.join(GATES[args.op])}")
    if args.no_beta and args.op == "delta_rule":
        parser().error("--no-beta: the delta rule has input gates")
    try:
        passes = explain(args)
    except (UserError, ValueError) as error:
        sys.exit(str(error))
    show(passes, GPUS[args.device], args.constants)


if __name__ == "__main__":
    main()
