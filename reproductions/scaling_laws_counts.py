"""The conventions of "Scaling laws for linear complexity language models" (arXiv 2406.16690) for parameters and FLOPs.

`LanguageModel.num_parameters()` and `flops()` count what a model has and executes. These functions compute what the
paper's Table 7 prints for it, by the formulas of its Table 1 and Appendix A.1; docs/parity.md lists the differences.
"""

from collections.abc import Callable
from typing import NamedTuple

from kernels import UserError
from mixers import FeatureMap, did_you_mean
from zoo.config.build import build
from zoo.lm.model import LanguageModel

BATCH_SIZE, LENGTH = 480, 8192  # sequences in a training step, and tokens in a sequence


# (b, n, l, d, h) → training FLOPs of a step without embeddings, as in Table 1: b sequences of n tokens, l layers, d
# channels, h heads, GLUs counted with inner size 8d/3, attention over the full n²; keys as in configs/scaling_laws
FLOPS: dict[str, Callable[[int, int, int, int, int], float]] = {
    "llama": lambda b, n, l, d, h: 72 * b * n * l * d**2 * (1 + n / (6 * d) + 5 / (18 * d)),
    "tnl": lambda b, n, l, d, h: 72 * b * n * l * d**2 * (1 + 1 / (2 * h) + 5 / (18 * d)),
    "hgrn2": lambda b, n, l, d, h: 72 * b * n * l * d**2 * (1 + 1 / (3 * h) + 29 / (72 * d)) + 12 * d * l,
    "cosformer2": lambda b, n, l, d, h: (
        72 * b * n * l * d**2 * (1 + 3 / (4 * h) + 23 / (72 * d)) + 12 * b * n * d**2 / h
    ),
}

# Table 7: (architecture, size) → millions of parameters, PFLOPs of a step
PRINTED = {
    ("llama", "70m"): (20.5, 1.6),
    ("llama", "160m"): (85.0, 5.6),
    ("llama", "410m"): (334.1, 18.0),
    ("llama", "1b"): (906.2, 40.4),
    ("llama", "3b"): (2775.8, 99.6),
    ("llama", "7b"): (6476.5, 202.7),
    ("tnl", "70m"): (21.2, 0.5),
    ("tnl", "160m"): (87.3, 2.2),
    ("tnl", "410m-25"): (327.7, 7.9),
    ("tnl", "1b"): (918.6, 22.3),
    ("tnl", "3b"): (2798.4, 66.6),
    ("tnl", "7b"): (6509.6, 154.4),
    ("hgrn2", "70m"): (20.5, 0.5),
    ("hgrn2", "160m"): (84.9, 2.1),
    ("hgrn2", "410m"): (334.0, 8.0),
    ("hgrn2", "1b"): (906.0, 22.0),
    ("hgrn2", "3b"): (2775.5, 66.0),
    ("hgrn2", "7b"): (6476.1, 153.6),
    ("cosformer2", "70m"): (21.3, 0.5),
    ("cosformer2", "160m"): (87.5, 2.3),
    ("cosformer2", "410m-25"): (328.0, 8.1),
    ("cosformer2", "1b"): (919.1, 22.7),
    ("cosformer2", "3b"): (2799.0, 67.4),
    ("cosformer2", "7b"): (6511.0, 155.6),
}


class Row(NamedTuple):
    """A model of Table 7: counted by the paper's convention, printed in the paper, and counted completely."""

    architecture: str
    size: str
    num_layers: int
    hidden_size: int
    num_heads: int
    parameters: int  # counted by the paper's convention
    printed_parameters: float  # millions
    flops: float  # of a step, by the paper's convention
    printed_flops: float  # PFLOPs
    all_parameters: int  # with embeddings, norms and angles
    angles: int  # parameters of position encodings, which the paper does not count
    all_flops: int  # executed FLOPs with the head, as three times the forward pass


def angles(model: LanguageModel) -> int:
    """Parameters of the feature maps, such as the angles of a position encoding."""
    maps = [module for module in model.modules() if isinstance(module, FeatureMap)]
    return sum(p.numel() for p in {p for module in maps for p in module.parameters()})  # shared parameters count once


def parameters(model: LanguageModel) -> int:
    """Number of parameters without embeddings, by the paper's convention.

    It counts all matrices but those of embedding, head and feature maps, and what the norms of the blocks have:
    two vectors each in LLaMA, whose LayerNorms only the printed formula forgets; none in the others.

    Args:
        model: A model, on any device.
    """
    outside = [layer.weight for layer in (model.embeddings, model.lm_head) if layer is not None]
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1) - sum(p.numel() for p in outside)
    # the norms of the blocks; those inside mixers are not counted
    norms = [part for block in model.layers for name, part in block.named_children() if name.endswith("_norm")]
    return matrices - angles(model) + sum(p.numel() for norm in norms for p in norm.parameters())


def flops_per_step(
    model: LanguageModel, architecture: str, batch_size: int = BATCH_SIZE, length: int = LENGTH
) -> float:
    """Training FLOPs of one step without embeddings, by the formulas of Table 1.

    Args:
        model: A model whose mixers all have the same number of heads, on any device.
        architecture: llama, tnl, hgrn2 or cosformer2.
        batch_size: Sequences in a step.
        length: Tokens in a sequence.

    Raises:
        UserError: The architecture is not in the paper, or mixers differ in their number of heads.
    """
    if architecture not in FLOPS:
        hint = did_you_mean(architecture, [*FLOPS])
        raise UserError(f"architecture: {architecture!r} is not one of {', '.join(FLOPS)}{hint}")
    return FLOPS[architecture](batch_size, length, model.num_layers, model.hidden_size, _num_heads(model))


def table() -> list[Row]:
    """The 24 models of Table 7, built on the meta device from configs/scaling_laws."""
    rows = []
    for (architecture, size), (printed_parameters, printed_flops) in PRINTED.items():
        model = build(f"scaling_laws/{architecture}.yaml", f"scaling_laws/{size}.yaml", device="meta")
        rows.append(
            Row(
                architecture,
                size,
                model.num_layers,
                model.hidden_size,
                _num_heads(model),
                parameters(model),
                printed_parameters,
                flops_per_step(model, architecture),
                printed_flops,
                model.num_parameters(),
                angles(model),
                3 * BATCH_SIZE * model.flops(LENGTH),
            )
        )
    return rows


def _num_heads(model: LanguageModel) -> int:
    """The number of heads shared by all mixers of a model."""
    counts = {getattr(mixer, "num_heads", None) for mixer in model.mixers}
    heads = counts.pop()
    if counts or not isinstance(heads, int):
        raise UserError("model: the paper's formulas need mixers that all have the same number of heads")
    return heads
