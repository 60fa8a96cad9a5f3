"""A model to be benchmarked: built from configs, checked against slow fp32."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import kernels
from kernels import UserError
from mixers import GatedRMSNorm, RMSNorm, did_you_mean
from zoo import config as configs
from zoo.benchmarks.gate import Gate
from zoo.lm.model import LanguageModel
from zoo.train.metrics import total_loss

PRECISIONS = {"32-true": None, "bf16-true": torch.bfloat16, "bf16-mixed": torch.bfloat16, "16-true": torch.float16}
SLICE = 97  # tokens that are compared: one whole chunk and a part
FP32 = {"cpu": 1e-4, "cuda": 1e-3}  # cuDNN convolves in TF32
BF16, WORST = 1e-2, 0.5
Run = Callable[[LanguageModel], dict[str, Tensor]]


def read(config: Sequence[str]) -> Any:
    """The parsed config of a model whose vocabulary is known.

    Raises:
        UserError: There is none, or it is wrong.
    """
    if not config:
        raise UserError("config: there is none; give a model, such as --config gated_deltanet.yaml")
    found = configs.read(*config)
    found.model.vocab_size = configs.vocabulary(found)
    return found


def check_precision(name: str) -> None:
    """Raise a UserError for an unknown precision."""
    if name not in PRECISIONS:
        raise UserError(f"precision: {name!r} is not one of {', '.join(PRECISIONS)}{did_you_mean(name, [*PRECISIONS])}")


def check_sizes(**sizes: int) -> None:
    """Raise a UserError for a number below one."""
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"{name}: {size} must be at least 1")


def build(config: Any, precision: str, device: torch.device) -> LanguageModel:
    """The model in the given precision."""
    model = configs.from_config(config, device)
    return model.to(PRECISIONS[precision]) if precision.endswith("-true") else model


@contextmanager
def running(precision: str, device: torch.device, backend: str = "auto") -> Iterator[None]:
    """Mixed precision where it is asked for, and the backend of the kernels."""
    mixed = precision.endswith("-mixed")
    with torch.autocast(device.type, PRECISIONS[precision], enabled=mixed), kernels.backend(backend):
        yield


def mean_loss(model: LanguageModel, tokens: Tensor) -> Tensor:
    """Mean loss of the next token, as training computes it; tokens [B,T+1]."""
    return total_loss(model, tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()


def conditioned(model: LanguageModel) -> LanguageModel:
    """The model with so large an eps in the norms of its mixers that rounding is not magnified beyond all measure.

    At the start the output for a first token, (q·k) v, may be nearly 0 by chance. A norm over it divides by next to
    nothing, and a few tokens make most of the gradient in any precision, whatever the kernels do. With the mean square
    of its inputs for eps no norm divides by less than their size.
    """

    def widen(norm: RMSNorm | GatedRMSNorm, inputs: tuple[Tensor, ...]) -> None:
        norm.eps = max(norm.eps, float(inputs[0].double().square().mean()))

    norms = [part for mixer in model.mixers for part in mixer.modules() if isinstance(part, RMSNorm | GatedRMSNorm)]
    hooks = [norm.register_forward_pre_hook(widen) for norm in norms]
    with torch.no_grad(), kernels.backend("torch"):
        model(_tokens(model, 1))
    for hook in hooks:
        hook.remove()
    return model


def compared(model: LanguageModel, precision: str, backend: str, run: Run, slow: Run | None = None) -> Gate:
    """Compare what `run` makes of the model with what it, or `slow`, makes of an fp32 copy on loops.

    In low precision, an error twice as large as that of chunkwise PyTorch in the same precision is allowed: rounding
    adds up over the layers.
    """
    device = next(model.parameters()).device
    with running("32-true", device, "reference"):
        wanted = (slow or run)(copy.deepcopy(model).float())
    with running(precision, device, backend):
        found = run(copy.deepcopy(model))
    limits = dict.fromkeys(wanted, FP32.get(device.type, 1e-3))
    if precision != "32-true":
        with running(precision, device, "torch"):
            usual = Gate()
            for name, x in run(copy.deepcopy(model)).items():
                usual.check(name, x, wanted[name], BF16)
        limits = {name: min(max(2 * error, BF16), WORST) for name, error in usual.errors.items()}
    gate = Gate()
    for name, y in wanted.items():
        gate.check(name, found[name], y, limits[name])
    return gate


def learning(model: LanguageModel) -> dict[str, Tensor]:
    """Loss and gradients on a few tokens."""
    loss = mean_loss(model, _tokens(model, 1, SLICE + 1))
    loss.backward()
    gradients = [p.grad.flatten().float().cpu() for p in model.parameters() if p.grad is not None]  # there is room
    return {"loss": loss.detach(), "gradients": torch.cat(gradients)}


def continuing(model: LanguageModel) -> dict[str, Tensor]:
    """The logits after three tokens, one by one, that follow some that were read together."""
    tokens, logits = _tokens(model, 2), []
    with torch.no_grad():
        _, state = model(tokens[:, :-3], model.init_state(2))
        for t in range(SLICE - 3, SLICE):
            step, state = model(tokens[:, t : t + 1], state)
            logits.append(step)
    return {"logits": torch.cat(logits, 1).float()}


def at_once(model: LanguageModel) -> dict[str, Tensor]:
    """The same logits from all tokens together, without a state."""
    with torch.no_grad():
        return {"logits": model(_tokens(model, 2))[0][:, -3:].float()}


def _tokens(model: LanguageModel, rows: int, length: int = SLICE) -> Tensor:
    tokens = torch.randint(model.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    return tokens.to(next(model.parameters()).device)
