"""Names of the weights that make queries, keys, values and outputs, so that one mixer can start from another's."""

from typing import NamedTuple

from torch import Tensor

import kernels

from .norm import SimpleRMSNorm


class HeadMap(NamedTuple):
    """A linear map from x to heads, or from heads to the output of the layer.

    Attributes:
        weight: Name of its weight in the state dict of the mixer; the bias, if any, is next to it.
        heads: Number of heads.
        size: Size of a head.
        steps: How many such maps follow each other in the weight.
        norm: A norm of the heads, or of all of them together; its factors belong to the map where what follows reads
            only the direction of a head.
    """

    weight: str
    heads: int
    size: int
    steps: int = 1
    norm: SimpleRMSNorm | None = None

    @property
    def bias(self) -> str:
        return f"{self.weight.removesuffix('weight')}bias"

    @property
    def shape(self) -> str:
        """Its heads, for messages."""
        return f"{self.heads} heads of {self.size}"


def attention_maps(
    num_heads: int, num_kv_heads: int, head_dim: int, q_norm: SimpleRMSNorm | None, k_norm: SimpleRMSNorm | None
) -> dict[str, HeadMap]:
    """The maps of attention whose projections are `in_proj` and `o_proj`."""
    return {
        "q": HeadMap("in_proj.q.weight", num_heads, head_dim, norm=q_norm),
        "k": HeadMap("in_proj.k.weight", num_kv_heads, head_dim, norm=k_norm),
        "v": HeadMap("in_proj.v.weight", num_kv_heads, head_dim),
        "o": HeadMap("o_proj.weight", num_heads, head_dim),
    }


def converted(weight: Tensor, old: HeadMap, new: HeadMap, axis: int = 0) -> Tensor:
    """The weight or bias of `old`, whose heads follow each other along an axis, as `new` has it.

    Each head is repeated for the heads that share it, and all of them for each step.
    """
    if old.norm is not None and old.norm.scale is not None:
        scale = old.norm.scale
        rows = scale.repeat(old.heads * old.size // len(scale))
        weight = weight * rows.view(-1, *[1] * (weight.dim() - 1))
    heads = weight.unflatten(axis, (old.heads, old.size)).repeat_interleave(new.heads // old.heads, axis)
    heads = heads.flatten(axis, axis + 1)
    return heads.repeat(*[new.steps if i == axis else 1 for i in range(heads.dim())])


def check_heads(kind: str, old: HeadMap, new: HeadMap, layer: str) -> None:
    """Raise a UserError unless the heads of `new` can start from those of `old`."""
    repeats = kind != "o" and new.heads % old.heads == 0
    if new.size != old.size or not (new.heads == old.heads or repeats):
        names = {"q": "queries", "k": "keys", "v": "values", "o": "outputs"}
        raise kernels.UserError(
            f"mixer: its {names[kind]} have {new.shape}, but those of {layer} have {old.shape}, which cannot be "
            "carried over; give the mixer heads of this number and size"
        )
