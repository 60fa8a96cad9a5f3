"""The top-level keys of a config. A table, since the classes behind some of them require Lightning to be imported."""

# key → its first sentence in the help of a verb: that of the class behind it (zoo/config/classes.py), if it has one
PURPOSES = {
    "seed_everything": "Seed of all random numbers",
    "backend": "Backend of the kernels in training",
    "deterministic_kernels": "Whether a sequence has the same results in every batch",
    "compile": "Whether to compile the blocks for the training steps",
    "cuda_graph": "Whether to capture the training steps as CUDA graphs",
    "activation_checkpointing": "Recompute every N-th block in the backward pass, to save memory",
    "rows_per_device": "Rows that a device computes at a time; gradients of the others are accumulated",
    "context_parallel": "Number of neighbouring processes that share each sequence",
    "sequence_parts": "Number of parts into which deterministic mode divides each sequence",
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
