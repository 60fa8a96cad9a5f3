"""Training speed of the models of 400M parameters next to other libraries' models, for a table in docs/which_mixer.md.

    python reproductions/peers_400m.py
    python reproductions/peers_400m.py --models=[gla,kda] --lengths=[2048] --seconds=300

Each model runs captured and eager, in turns with flash-linear-attention's model of the same mixers and sizes, or else
with that of transformers if it has fast kernels. First, the loss and the gradients of its lowest layers are compared
with those of the fp32 loops. Each row is written when it is measured, and a model whose speed the file has is not
measured again, so a run that was stopped continues. FLA tunes its kernels for minutes.
"""

import gc
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kernels import UserError
from reproductions import beside, peers, script, write_csv
from reproductions.mixers_400m import SETTINGS, SPEED, overlays
from zoo.arguments import check_names
from zoo.config.serialise import to_dict
from zoo.lm.model import LanguageModel
from zoo.performance.bench_report import Report, complaint
from zoo.performance.model import build, check_options, mean_loss, read
from zoo.performance.training import DOES_NOT_FIT, Other, TimedLearner, bench_training, warmed
from zoo.train.devices import pick_device
from zoo.train.optim import Optimisation

MEASURED = Path(__file__).parent / "measured" / "peers_400m.csv"
# configs that FLA has no model for without flash-attn, and models of transformers with fast kernels
OF_TRANSFORMERS = {
    "transformer": "LlamaForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
}
WITHOUT_MLPS = {"mamba3 without MLPs": ["mamba3.yaml", "size/mamba-400m.yaml"]}  # FLA's Mamba-3 has none
WITH_MAMBA_SSM = ("mamba2", "mamba3")  # without its kernels, FLA's models run PyTorch's operations
COLUMNS = ("model", "length", "how", "batch_size", *SPEED, *SETTINGS, "note")
Row = dict[str, Any]


def eager(
    ours: LanguageModel, about: dict[str, Any], optim: Optimisation, tokens: Tensor, bar: Any
) -> tuple[Row, TimedLearner | None]:
    """Return the row of our model without graphs, and its learner after the first steps or None if it does not fit."""
    row: Row = {"model": "eager"}
    before = torch.cuda.memory_allocated(tokens.device) if tokens.is_cuda else 0
    learner = TimedLearner(ours, optim, about["precision"], "auto", lambda: mean_loss(ours, tokens))
    return row, learner if warmed(row, learner, bar, before) else None


def peer_of(config: list[str], device: torch.device) -> peers.PeerModel | None:
    """Return the model of another library to compare with; None if none runs on this device."""
    if device.type != "cuda":
        return None
    parsed = read(config)
    ours, sizes = build(parsed, "32-true", torch.device("meta")), to_dict(parsed)["model"]
    name = Path(config[0]).stem
    if name in OF_TRANSFORMERS:
        return peers.model_of_transformers(OF_TRANSFORMERS[name], ours, device)
    if name in WITH_MAMBA_SSM and find_spec("mamba_ssm") is None:
        return None
    with suppress(ImportError):  # FLA's attention requires flash-attn
        without_weights = peers.same_model(ours, sizes, torch.device("meta"))
        if without_weights is not None:
            without_weights.build()
            peer = peers.same_model(ours, sizes, device)
            return _unfused_convolution(peer) if peer and name == "mamba2" else peer
    return None


def _unfused_convolution(peer: peers.PeerModel) -> peers.PeerModel:
    """Without causal-conv1d, FLA's Mamba2 runs on a GPU only as in evaluation, with FLA's kernel of the convolution."""
    if find_spec("causal_conv1d") is not None:
        return peer

    def build() -> nn.Module:
        model = peer.build()
        for module in model.modules():
            if type(module).__name__ == "Mamba2":
                module.training = False  # of the mixer alone: it has no dropout
        return model

    return peers.PeerModel(f"{peer.name}, unfused convolution", build)


def speeds_of(config: list[str], batch_size: int, length: int, steps: int, device: torch.device) -> list[Row]:
    """Return the rows of a model, with half as many sequences where a captured step or one of the peer does not fit."""
    peer, captured = peer_of(config, device), device.type == "cuda"
    others: list[Other] = [] if peer is None else [beside.learner_of(peer)]
    folder = f"runs/peers_400m/{Path(config[0]).stem}"
    rows, about = [Row(model="", note=DOES_NOT_FIT)], dict[str, Any]()
    try:
        report: Report = bench_training(
            config, batch_size, length, steps, device=device.type, cuda_graph=captured, folder=folder,
            others=[*others, eager] if captured else others,
        )  # fmt: skip
        rows, about = report.rows, report.about
        fits = all(row.get("note") != DOES_NOT_FIT for row in rows if row["model"] != "eager")
        refused = rows[0].get("not_captured") or ""
        fits = fits and "out of memory" not in refused
    except torch.OutOfMemoryError:
        fits = False
    gc.collect()  # graphs and optimisers refer to each other
    if captured:
        torch.cuda.empty_cache()
    if not fits and batch_size > 1:
        return speeds_of(config, batch_size // 2, length, steps, device)
    settings = {key: about.get(key) for key in SETTINGS} | {"batch_size": batch_size, "length": length}
    ours = "captured" if captured else "eager"
    return [
        settings
        | {key: row.get(key) for key in SPEED}
        | {"how": row["model"] if at else ours, "note": row.get("note") or row.get("not_captured")}
        for at, row in enumerate(rows)
    ]


def peers_400m(
    models: list[str] | None = None,
    lengths: list[int] | None = None,
    batch_size: int = 8,
    steps: int = 8,
    device: str | None = None,
    seconds: float | None = None,
    file: str = str(MEASURED),
) -> None:
    """Write the speed in training of models of 400M parameters and of other libraries' models.

    Args:
        models: Names of configs, such as kda, or `mamba3 without MLPs`; null for all that have an overlay of 400M.
        lengths: Tokens in a sequence; null for 4096 and 2048.
        batch_size: Sequences in a step; half as many where they do not fit.
        steps: Number of steps to time, after a few others; on a GPU after four seconds of them, or 100.
        device: cpu or cuda; null for the GPU if available. Other libraries' models require a GPU.
        seconds: Time after which no further model is measured; null for no limit.
        file: The CSV to update.

    Raises:
        UserError: An argument is invalid; or some models could not be measured, after the others were.
    """
    start, target, where = time.monotonic(), Path(file), pick_device(device)
    available = {name: [f"{name}.yaml", overlay] for name, overlay in overlays().items()} | WITHOUT_MLPS
    check_names("models", models or [], available)
    check_options("bf16-mixed", batch_size=batch_size, lengths=min(lengths or [1]), steps=steps)
    if where.type == "cuda":
        peers.require(where)
    rows = {_key(row): dict[str, Any](row) for row in write_csv.read(target, COLUMNS)}
    failed = dict[str, str]()
    for length in lengths or [4096, 2048]:
        for name in models or available:
            done = any(key[:2] == (name, length) and row["tokens_per_second"] for key, row in rows.items())
            if done or (seconds is not None and time.monotonic() - start > seconds):
                continue
            try:
                measured = speeds_of(available[name], batch_size, length, steps, where)
            except Exception as error:  # the other models can be measured
                failed[f"{name}, {length}"] = complaint(error)
                continue
            for row in measured:
                row |= {"model": name}
                rows[_key(row)] = row
                speed = row["tokens_per_second"]
                sys.stdout.write(
                    f"{name}, {row['how']}: {row['batch_size']} × {length}, {speed} tokens/s, {row['note']}\n"
                )
            if not measured[0]["tokens_per_second"]:
                failed[f"{name}, {length}"] = measured[0]["note"]
            sys.stdout.flush()
            write_csv.write([rows[key] for key in sorted(rows)], target, COLUMNS)
    sys.stdout.write(f"rows: {target}\n")
    if failed:
        raise UserError("; ".join(f"{label}: {reason}" for label, reason in failed.items()))


def _key(row: Row) -> tuple[str, int, str]:
    return row["model"], int(row["length"]), row["how"]


if __name__ == "__main__":
    script.run(peers_400m)
