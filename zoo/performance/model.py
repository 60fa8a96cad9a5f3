"""The model of a benchmark: building it from configs, and checking it against an fp32 reference."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kernels
from kernels import Option, UserError
from mixers import GatedRMSNorm, Norm
from mixers.arguments import check_sizes
from zoo import config as configs
from zoo.arguments import check_names
from zoo.generation.decoder import Decoder
from zoo.generation.graphs import DecodingGraphs
from zoo.lm.model import LanguageModel
from zoo.performance.accuracy import Gate
from zoo.train.metrics import total_loss

PRECISIONS = {"32-true": None, "bf16-true": torch.bfloat16, "bf16-mixed": torch.bfloat16, "16-true": torch.float16}
SLICE = 97  # number of tokens to compare: one whole chunk and a part
FP32 = {"cpu": 1e-4, "cuda": 1e-3}  # limits of relative errors; cuDNN convolves in TF32
BF16, WORST = 1e-2, 0.5
Measurement = Callable[[LanguageModel], dict[str, Tensor]]


def read(config: Sequence[str]) -> Any:
    """The parsed config of a model, with its vocabulary size set.

    Raises:
        UserError: It is missing or invalid, or no language model.
    """
    if not config:
        raise UserError("config: missing; give a model, such as ", Option("config", "gated_deltanet.yaml"))
    parsed = configs.read(*config)
    if parsed.model.inputs is not None or parsed.model.head is not None:
        raise UserError("config: benchmarks are about language models, whose model.inputs and model.head are null")
    parsed.model.vocab_size = configs.vocabulary(parsed)
    return parsed


def name(config: Sequence[str]) -> str:
    """Return the name of a model: its first config."""
    return Path(str(next((item for item in config if "=" not in item), "model"))).stem


def check_options(precision: str, **sizes: int) -> None:
    """Raise a UserError for an unknown precision, or a size below 1."""
    check_names("precision", [precision], PRECISIONS)
    check_sizes(sizes)


def build(config: Any, precision: str, device: torch.device) -> LanguageModel:
    """The model in the given precision."""
    model = configs.from_config(config, device)
    return model.to(PRECISIONS[precision]) if precision.endswith("-true") else model


@contextmanager
def running(precision: str, device: torch.device, backend: str = "auto") -> Iterator[None]:
    """Run the block with the given backend of the kernels, and with autocast in a mixed precision."""
    mixed = precision.endswith("-mixed")
    with torch.autocast(device.type, PRECISIONS[precision], enabled=mixed), kernels.backend(backend):
        yield


def mean_loss(model: LanguageModel, tokens: Tensor) -> Tensor:
    """Mean loss of the next token, as training computes it; tokens [B,T+1]."""
    return total_loss(model, tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()


def lowest_layers(model: LanguageModel) -> LanguageModel:
    """Remove the layers above the lowest ones of each kind, for a check that takes time in proportion to the layers.

    Layers are of one kind if their modules have equal classes and settings, and parameters of equal shapes, so that
    they run the same kernels. At least two layers remain.
    """
    kinds = [_kind(layer) for layer in model.layers]
    del model.layers[max(2, 1 + max(map(kinds.index, kinds))) :]
    return model


def _kind(layer: nn.Module) -> list[Any]:
    """Classes, settings and shapes of parameters; no fractions, as some layers have decays that depend on the depth."""
    return [
        (
            type(part),
            {name: value for name, value in vars(part).items() if isinstance(value, str | int | None)},
            [parameter.shape for parameter in part.parameters(recurse=False)],
        )
        for part in layer.modules()
    ]


def conditioned(model: LanguageModel) -> LanguageModel:
    """The model with a large eps in the norms of its mixers, which keeps them from magnifying rounding errors.

    At initialisation, the output for a first token, (q·k) v, may be close to 0 by chance. A norm then divides by almost
    nothing, and a few tokens dominate the gradient in any precision, whatever the kernels do. With the mean square of
    its inputs as eps, no norm divides by less than their size.
    """

    def widen(norm: Norm | GatedRMSNorm, inputs: tuple[Tensor, ...]) -> None:
        norm.eps = max(norm.eps, float(inputs[0].double().square().mean()))

    norms = [part for mixer in model.mixers for part in mixer.modules() if isinstance(part, Norm | GatedRMSNorm)]
    hooks = [norm.register_forward_pre_hook(widen) for norm in norms]
    with torch.no_grad(), kernels.backend("torch"):
        model(_tokens(model, 1))
    for hook in hooks:
        hook.remove()
    return model


def compared(
    model: LanguageModel, precision: str, backend: str, measure: Measurement, reference: Measurement | None = None
) -> Gate:
    """Compare the results of `measure` with those of `reference` (by default `measure`) on an fp32 copy with loops.

    In low precision, where rounding errors add up over the layers, twice the error of chunkwise PyTorch in the same
    precision is allowed.
    """
    device = next(model.parameters()).device
    with running("32-true", device, "reference"):
        expected = (reference or measure)(copy.deepcopy(model).float())
    with running(precision, device, backend):
        actual = measure(copy.deepcopy(model))
    limits = dict.fromkeys(expected, FP32.get(device.type, 1e-3))
    if precision != "32-true":
        with running(precision, device, "torch"):
            chunkwise = Gate()
            for name, x in measure(copy.deepcopy(model)).items():
                chunkwise.check(name, x, expected[name], BF16)
        limits = {name: min(max(2 * error, BF16), WORST) for name, error in chunkwise.errors.items()}
    gate = Gate()
    for name, y in expected.items():
        gate.check(name, actual[name], y, limits[name])
    return gate


def learning(model: LanguageModel) -> dict[str, Tensor]:
    """Loss and gradients on a few tokens."""
    loss = mean_loss(model, _tokens(model, 1, SLICE + 1))
    loss.backward()
    # on the host, to save GPU memory
    gradients = [p.grad.flatten().float().cpu() for p in model.parameters() if p.grad is not None]
    return {"loss": loss.detach(), "gradients": torch.cat(gradients)}


def continuing(model: LanguageModel) -> dict[str, Tensor]:
    """The logits of three tokens read one by one after a prefill, as `generate` reads them."""
    tokens = _tokens(model, 2)
    with torch.no_grad():
        _, state = model(tokens[:, :-3], model.init_state(2))
        decoder = Decoder(model, state, DecodingGraphs(False))
        logits = [decoder(tokens[:, t]) for t in range(SLICE - 3, SLICE)]
    return {"logits": torch.stack(logits, 1).float()}


def at_once(model: LanguageModel) -> dict[str, Tensor]:
    """Compute the logits of all tokens in one forward pass, without a state."""
    with torch.no_grad():
        return {"logits": model(_tokens(model, 2))[0][:, -3:].float()}


def _tokens(model: LanguageModel, rows: int, length: int = SLICE) -> Tensor:
    tokens = torch.randint(model.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    return tokens.to(next(model.parameters()).device)
