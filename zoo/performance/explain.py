"""Explain which GPU kernels a model or a mixer runs, without running them.

    python -m zoo explain gla.yaml size/400m.yaml --documents 8 --device H100
    python -m zoo explain GatedDeltaNet --inference --T 1 --state

Tensors have no data, and launches are listed instead of started: those of a training step, without the optimiser, or of
a call without gradients. The model is in bf16 (`trainer.precision=bf16-true`) unless another dtype is chosen. PyTorch's
operations are not listed, but which ops run in PyTorch.
"""

import argparse
import sys
from collections.abc import Callable

import torch
from torch import Tensor

import kernels
import mixers
from kernels import UserError
from kernels.__main__ import DTYPES, packed, positive
from kernels.gpu.device import GPUS
from kernels.gpu.listing import listed, show
from kernels.gpu.paths import Record
from zoo import config as configs
from zoo.train.metrics import total_loss


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m zoo", description="Look into models.")
    command = top.add_subparsers(dest="command", required=True).add_parser(
        "explain", help="list the GPU kernels of a model or a mixer", description=__doc__.splitlines()[0]
    )
    command.add_argument("what", nargs="+", help="configs and overrides, or the name of a mixer")
    command.add_argument("--B", type=positive, default=8, help="rows of the batch (default: 8)")
    command.add_argument("--T", type=positive, default=4096, help="tokens per row (default: 4096)")
    command.add_argument("--hidden_size", type=positive, default=1024, help="of a mixer (default: 1024)")
    command.add_argument("--num_heads", type=positive, default=8, help="of a mixer (default: 8)")
    command.add_argument("--documents", type=positive, help="pack B × T tokens as so many documents into one row")
    command.add_argument("--state", action="store_true", help="continue from states, as in decoding")
    command.add_argument("--inference", action="store_true", help="no gradients")
    command.add_argument("--constants", action="store_true", help="list the constants that kernels are compiled for")
    command.add_argument("--dtype", choices=[*DTYPES], default="bf16")
    command.add_argument("--device", choices=[*GPUS], default="H100")
    return top


def explain(args: argparse.Namespace) -> tuple[list[Record], dict[str, set[str]]]:
    """The dry runs of the forward and the backward pass, and the backends of all ops."""
    call = _of_mixer(args) if len(args.what) == 1 and args.what[0] in mixers.names() else _of_model(args)
    with torch.set_grad_enabled(not args.inference), kernels.implementations() as ran:
        return listed(call, GPUS[args.device]), ran


def _of_mixer(args: argparse.Namespace) -> Callable[[], Tensor]:
    with torch.device("meta"):
        mixer = mixers.get(args.what[0])(mixers.Site(args.hidden_size, args.num_heads)).to(DTYPES[args.dtype])
    rows, tokens, boundaries, sequences = _sizes(args)
    x = torch.empty(rows, tokens, args.hidden_size, dtype=DTYPES[args.dtype], device="meta")
    x.requires_grad_(not args.inference)
    return lambda: mixer(x, mixer.init_state(sequences) if args.state else None, **boundaries)[0]


def _of_model(args: argparse.Namespace) -> Callable[[], Tensor]:
    config = configs.read(*args.what)
    config.model.vocab_size = configs.vocabulary(config)
    model = configs.from_config(config, "meta").to(DTYPES[args.dtype])
    rows, tokens, boundaries, sequences = _sizes(args)
    x = torch.empty(rows, tokens, dtype=torch.int64, device="meta")
    if args.inference or args.state:
        return lambda: model(x, model.init_state(sequences) if args.state else None, **boundaries)[0]
    return lambda: total_loss(model, x, x, boundaries.get("cu_seqlens"))


def _sizes(args: argparse.Namespace) -> tuple[int, int, dict[str, Tensor], int]:
    """Rows, tokens of a row, boundaries of documents, and the number of sequences."""
    if not args.documents:
        return args.B, args.T, {}, args.B
    tokens = args.B * args.T
    return 1, tokens, {"cu_seqlens": packed(tokens, args.documents)}, args.documents


def main(words: list[str] | None = None) -> None:
    """Run the command line."""
    args = parser().parse_args(words)
    try:
        records, ran = explain(args)
    except (UserError, ValueError) as error:
        sys.exit(str(error))
    show(records, GPUS[args.device], args.constants)
    if others := sorted(op for op, backends in ran.items() if "triton" not in backends):
        sys.stdout.write(f"in PyTorch: {', '.join(others)}\n")
