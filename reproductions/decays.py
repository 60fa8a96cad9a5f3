"""Decays per channel of trained models: their quantiles, and the speed of training with them and with gentle ones.

    python reproductions/decays.py record --models=[kda,gla,hgrn2,gated_deltanet2]
    python reproductions/decays.py training --models=[kda_hybrid,gla,hgrn2,gated_deltanet2] --sizes=[400m,1.5b]

`record` trains each model of 400M parameters on the text of installed packages, and writes the quantiles of the log
decays of each layer to `reproductions/recorded_decays.json`. `beside.py kernels --decays=recorded` reads that file.
`training` times steps of each model whose layers get recorded log decays, and gentle ones, in place of their own.
"""

import gc
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import zoo
from kernels import UserError
from mixers import LinearMixer
from reproductions import write_csv
from reproductions.decay_kinds import KINDS, RECORDED, SHARES, log_decays
from reproductions.mixers_400m import overlays
from zoo import config as configs
from zoo.arguments import check_names
from zoo.config.command_line import arguments_of
from zoo.data.text.embedded import LIBRARY, embedded_files, embedded_texts
from zoo.files.atomic import atomic_write
from zoo.lm.model import LanguageModel
from zoo.performance import model as models_of
from zoo.performance.device import described
from zoo.performance.training import DOES_NOT_FIT, WARM_UP, TimedLearner, timed, utilisation, warmed
from zoo.train.devices import pick_device

MEASURED = Path(__file__).parent / "measured" / "decays_training_h200.csv"
RECORDS = {"kda": "kda", "kda_hybrid": "kda", "gla": "gla", "hgrn2": "hgrn2", "gated_deltanet2": "gated_deltanet2"}
STEEP, CHUNK = -69.0, 64  # fp32 cannot hold the quotient of two decays that are e^69 apart


def recurrent(model: LanguageModel) -> list[LinearMixer]:
    """Return the mixers of a model that have a decay per channel."""
    return [mixer for mixer in model.mixers if isinstance(mixer, LinearMixer) and mixer.decay_per_channel]


def replace_decays(mixer: LinearMixer, by: Callable[[Tensor], Tensor]) -> None:
    """Let the recurrence of a mixer have log decays [B,T,H,K] that are a function of the mixer's own."""
    recurrence = type(mixer).recurrence

    def run(*streams: Tensor, log_decay: Tensor, **options: Any) -> Any:
        return recurrence(*streams, log_decay=by(log_decay), **options)

    mixer.recurrence = run  # type: ignore[misc]  # of this mixer alone


def steep_chunks(log_decay: Tensor) -> float:
    """Return the fraction of heads and chunks that have a channel which decays by more than e^-69 in half a chunk."""
    halves = log_decay[:, : log_decay.shape[1] // CHUNK * CHUNK].unflatten(1, (-1, 2, CHUNK // 2)).sum(3)
    return (halves < STEEP).any(-1).any(2).double().mean().item()


def quantiles(log_decay: Tensor) -> list[float]:
    """Return the quantiles of log decays at `SHARES`."""
    ordered = log_decay.double().flatten().sort().values.cpu()
    places = torch.tensor(SHARES, dtype=torch.float64) * (len(ordered) - 1)
    return [float(f"{x:.4g}") for x in ordered[places.round().long()].tolist()]


def record(
    models: list[str] | None = None,
    steps: int = 500,
    batch_size: int = 8,
    length: int = 2048,
    learning_rate: float = 1e-3,
    overrides: list[str] | None = None,
    file: str = str(RECORDED),
) -> None:
    """Train models on text, and write the quantiles of their log decays.

    Args:
        models: Names of configs with a size of 400M; null for kda, gla, hgrn2 and gated_deltanet2.
        steps: Optimiser steps.
        batch_size: Sequences in a step.
        length: Tokens in a sequence.
        learning_rate: The highest learning rate.
        overrides: More configs and `key=value` overrides.
        file: The JSON file to update.

    Raises:
        UserError: An argument is invalid.
    """
    names = [*dict.fromkeys(RECORDS.values())] if models is None else models
    check_names("models", names, RECORDS.values())
    device, target, sizes = pick_device(None), Path(file), overlays()
    rows: dict[str, Any] = json.loads(target.read_text(encoding="utf-8")) if target.exists() else {}
    text = "\n".join(text for text, _ in zip(embedded_texts(embedded_files(LIBRARY)), range(40), strict=False))
    for name in names:
        run = zoo.fit(
            f"{name}.yaml",
            sizes[name],
            "data.path=embedded:packages",
            "data.max_characters=30000000",
            "data.vocab_size=16384",
            f"data.sequence_length={length}",
            f"data.batch_size={batch_size}",
            f"optim.learning_rate={learning_rate}",
            "optim.warmup_steps=100",
            f"trainer.max_steps={steps}",
            f"trainer.val_check_interval={steps}",
            "trainer.limit_val_batches=4",
            *(overrides or []),
            run=f"decays-{name}",
            overwrite=True,
        )
        model, seen = run.model.to(device), list[Tensor]()
        for mixer in recurrent(model):
            replace_decays(mixer, lambda log_decay, seen=seen: seen.append(log_decay) or log_decay)
        ids = zoo.load_tokenizer(run.folder).encode(text)
        tokens = torch.tensor(ids[: 2 * length], device=device)
        with torch.no_grad(), models_of.running("bf16-mixed" if device.type == "cuda" else "32-true", device):
            model(tokens.unflatten(0, (-1, length)))
        rows[name] = {
            **described(device),
            "steps": steps,
            "learning_rate": learning_rate,
            "val_loss": round(run.row["val_loss"], 3),
            "steep_chunks": [round(steep_chunks(x), 4) for x in seen],
            "quantiles": [quantiles(x) for x in seen],
        }
        with atomic_write(target) as written:
            written.write((json.dumps(rows) + "\n").encode())
        sys.stdout.write(f"{name}: loss {rows[name]['val_loss']}, steep chunks {rows[name]['steep_chunks']}\n")
        sys.stdout.flush()
        del run, model, seen
        gc.collect()


class Replaced(torch.autograd.Function):
    """Log decays in place of others, to which their gradient goes."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, others: Tensor) -> Tensor:
        """Return `others`."""
        return others.view_as(others)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Pass the gradient on."""
        return gradient, None


def _given(log_decays_of: dict[int, Tensor], layer: int, kind: str, record: str, own: Tensor) -> Tensor:
    """Log decays of a kind in place of a layer's own, drawn on the first call."""
    if layer not in log_decays_of:
        generator = torch.Generator(own.device).manual_seed(layer)
        draw = partial(torch.randn, device=own.device, generator=generator)
        B, T, H, K = own.shape
        log_decays_of[layer] = log_decays(kind, record, (B, T, H, K), draw)
    return Replaced.apply(own, log_decays_of[layer].to(own.dtype))


def speed(config: list[str], kind: str, record: str, shape: tuple[int, int], steps: int, precision: str) -> Any:
    """Return speed and memory of captured training steps with log decays of a kind in all layers."""
    device, parsed = pick_device(None), models_of.read(config)
    model = models_of.build(parsed, precision, device)
    drawn: dict[int, Tensor] = {}
    for layer, mixer in enumerate(recurrent(model)):
        replace_decays(mixer, partial(_given, drawn, layer, kind, record))
    tokens = torch.randint(parsed.model.vocab_size, (shape[0], shape[1] + 1), device=device)
    with torch.no_grad(), models_of.running(precision, device):
        model(tokens[:, :-1])  # draws
    captured = device.type == "cuda"
    loss = partial(models_of.mean_loss, model, tokens)
    learner = TimedLearner(model, configs.instantiate("optim", parsed), precision, "auto", loss, cuda_graph=captured)
    row: dict[str, Any] = {}
    with tqdm(total=1 + WARM_UP + steps, desc=f"{config[0]}, {kind}", unit=" steps") as bar:
        if not warmed(row, learner, bar):
            return {"note": DOES_NOT_FIT}
        timed([(row, learner)], steps, bar)
    row = learner.measured(shape[0] * shape[1])
    refused = learner.captured.refused if learner.captured is not None else None
    mfu = utilisation(model.flops(shape[1]) / shape[1], row["tokens_per_second"], precision, device)
    return row | {"mfu": mfu, "note": refused}


def training(
    models: list[str] | None = None,
    sizes: list[str] | None = None,
    kinds: list[str] | None = None,
    overrides: list[str] | None = None,
    batch_size: int = 4,
    length: int = 4096,
    steps: int = 12,
    precision: str = "bf16-true",
    file: str = str(MEASURED),
) -> None:
    """Time training steps with recorded and with gentle log decays in all layers.

    Args:
        models: Any of kda, kda_hybrid, gla, hgrn2 and gated_deltanet2; null for all but kda.
        sizes: Any of 400m, 1.5b, and own for the config's own size; null for the first two.
        kinds: Kinds of log decays, in order; null for gentle, recorded, and gentle again.
        overrides: More configs and `key=value` overrides.
        batch_size: Sequences in a step.
        length: Tokens in a sequence.
        steps: Number of steps to time, after a few others; on a GPU after four seconds of them, or 100.
        precision: 32-true, bf16-true or bf16-mixed.
        file: The CSV to write.

    Raises:
        UserError: An argument is invalid.
    """
    names = [name for name in RECORDS if name != "kda"] if models is None else models
    check_names("models", names, RECORDS)
    check_names("sizes", sizes or [], ("400m", "1.5b", "own"))
    kinds = ["gentle", "recorded", "gentle"] if kinds is None else kinds
    check_names("kinds", kinds, KINDS)
    models_of.check_options(precision, batch_size=batch_size, length=length, steps=steps)
    rows, available = list[dict[str, Any]](), overlays()
    for size in ["400m", "1.5b"] if sizes is None else sizes:
        for name in names:
            config = [f"{name}.yaml", *([available[name].replace("400m", size)] if size != "own" else [])]
            for kind in kinds:
                row = {"model": name, "size": size, "decays": kind, "batch_size": batch_size, "length": length}
                row |= speed([*config, *(overrides or [])], kind, RECORDS[name], (batch_size, length), steps, precision)
                rows.append(row | described(pick_device(None)) | {"precision": precision})
                write_csv.write(rows, Path(file))
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()


VERBS: dict[str, Callable[..., None]] = {"record": record, "training": training}


def main(arguments: list[str]) -> None:
    """Run the command line."""
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        sys.stdout.write(str(__doc__))
        return
    check_names("decays", [name], VERBS)
    _, options = arguments_of(VERBS[name], rest, name, None)
    VERBS[name](**options)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error.on_command_line}")
