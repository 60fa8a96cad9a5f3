"""The top-level keys of a config. A table, since the classes behind some of them require Lightning to be imported."""

import re
from typing import Any, Literal

from kernels import BACKENDS

# key → its type, its default and its help; every other key is the class behind it (zoo/config/classes.py)
SCALARS: dict[str, tuple[Any, Any, str]] = {
    "seed_everything": (bool | int, 0, "Seed of all random numbers: true draws a seed, false sets none."),
    "backend": (Literal[BACKENDS] | None, None, "Backend of the kernels in training; null for ZOO_BACKEND, or auto."),
    "deterministic_kernels": (
        bool | None,
        None,
        "Whether a sequence has the same results in every batch, and a step in 1, 2, 4 … processes; null for "
        "ZOO_DETERMINISTIC, or false.",
    ),
    "compile": (bool, False, "Compile the blocks for the training steps; requires a C++ compiler."),
    "cuda_graph": (
        bool | None,
        None,
        "Capture the training steps as CUDA graphs. Null: on a GPU, unless compile is true, context_parallel is above "
        "1, or a hook from outside this project is called within a step.",
    ),
    "activation_checkpointing": (
        int | None,
        None,
        "Recompute every N-th block in the backward pass, to save memory; 1: all.",
    ),
    "rows_per_device": (
        int | None,
        None,
        "Rows of data.batch_size that a device computes at a time, at most; gradients of further rows are accumulated, "
        "and trainer.val_check_interval counts steps.",
    ),
    "context_parallel": (
        int,
        1,
        "Number of neighbouring processes that share each sequence; requires trainer.strategy=ddp.",
    ),
    "sequence_parts": (
        int | None,
        None,
        "Parts into which deterministic mode divides each sequence, so that results are the same for every "
        "context_parallel that divides it; null: one for each process.",
    ),
}
# key → its first sentence in the help of a verb: that of the class behind it (zoo/config/classes.py), if it has one
PURPOSES = {
    **{key: re.split("[.:;] ", text)[0] for key, (_, _, text) in SCALARS.items()},
    "data": "The data module: TextData, or another class",
    "model": "A causal language model: embedding, blocks of a token mixer and an MLP, norm, head",
    "optim": ("The optimiser, AdamW unless another is named, with a warm-up and a schedule counted in optimiser steps"),
    "teacher": "A trained model whose outputs are the target of the training, in place of the next token",
    "trainer": "Lightning's Trainer",
    "guard": "Skips steps, in all processes, whose loss or gradients are not finite or far too high",
    "checkpoints": "Writes `last.ckpt` and `best.ckpt`, and saves when the run is stopped by a signal",
    "samples": (
        "Samples text from the model at each validation, to the terminal and to `samples.txt` in the run's folder"
    ),
    "loss_curve": "Plots the training and validation loss over tokens in `loss.png`, at each validation and at the end",
}
KEYS = (*PURPOSES,)
GROUPS = KEYS[KEYS.index("data") :]  # those that hold further keys
OF_LIGHTNING = tuple(
    key for key in GROUPS if key not in ("model", "optim", "teacher")
)  # groups of classes that derive from its
