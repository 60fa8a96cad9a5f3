"""A table of parameters, state size and FLOPs of a model, layer by layer."""

from typing import Any

from rich import box
from rich.table import Table

from mixers import LinearMixer, TokenMixer
from zoo.display import new_table


def mixer_names(model: Any) -> str:
    """The mixers of a language model, each once, from the bottom up: `Mamba2+GLA×4`, where GLA is expanded by 4."""
    return "+".join(dict.fromkeys(map(_name, model.mixers)))


def _name(mixer: TokenMixer) -> str:
    expand = mixer.site.expand if isinstance(mixer, LinearMixer) else None
    return type(mixer).__name__ + ("" if expand is None else f"×{expand.factor}")


def parameters_without_embeddings(model: Any) -> int:
    """Number of parameters of a language model outside of its embedding and the head over its vocabulary."""
    outside = {p for part in (model.embeddings, model.lm_head) if part is not None for p in part.parameters()}
    return model.num_parameters() - sum(p.numel() for p in outside)


def size_table(model: Any, length: int) -> Table:
    """Parameters, state size and forward FLOPs of a language model, one row per distinct layer.

    Args:
        model: The language model.
        length: Tokens in a sequence.
    """
    rows: dict[tuple[str, int, int | float, float], int] = {}
    for mixer in model.mixers:
        parameters = sum(p.numel() for p in mixer.parameters())
        row = (type(mixer).__name__, parameters, mixer.state_size(length), mixer.flops(length) / length)
        rows[row] = rows.get(row, 0) + 1
    caption = f"per layer; FLOPs are forward, per token at length {length}"
    table = new_table(
        ("layers", "mixer", "parameters", "state", "MFLOP"), ["mixer"], box=box.HEAVY_HEAD, caption=caption
    )
    for (name, parameters, state, flops), count in rows.items():
        table.add_row(f"{count} ×", name, f"{parameters:,}", f"{state:,}", f"{flops / 1e6:.2f}")
    total = (
        f"{model.num_parameters():,}",
        f"{model.state_size(length):,}",
        f"{model.flops(length) / length / 1e6:.2f}",
    )
    table.add_section()
    table.add_row(str(len(model.mixers)), "whole model", *total)
    return table
