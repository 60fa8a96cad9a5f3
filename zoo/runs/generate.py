"""Text from a saved model."""

import itertools
from collections.abc import Callable
from pathlib import Path

from zoo.generation.generate import generate as pieces_of
from zoo.loading.load import load, load_tokenizer


def generate(
    checkpoint: str | Path,
    prompt: str = "",
    max_new_tokens: int = 256,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = 0.95,
    seed: int | None = None,
    device: str = "cpu",
    trust: bool = False,
    stream: Callable[[str], object] | None = None,
) -> str:
    """Continue a prompt.

    Args:
        checkpoint: A run's folder, a .ckpt file, or an exported folder.
        prompt: Where to start; nothing starts a new document.
        max_new_tokens: Where to stop, unless the document ends earlier.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Draw from the k likeliest tokens only.
        top_p: Draw from the fewest likeliest tokens that together have this probability only.
        seed: Makes the draws repeatable.
        device: Where to run: cpu, cuda, mps.
        trust: Whether to import and call what its config names, if it is not your own.
        stream: Called with the prompt, and then with each piece of text as soon as it is known.

    Returns:
        The prompt and its continuation.

    Raises:
        UserError: There is no such model or device, or an argument is out of its range.
    """
    model, tokenizer = load(checkpoint, device=device, trust=trust), load_tokenizer(checkpoint)
    pieces = pieces_of(
        model,
        tokenizer,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    text = ""
    for piece in itertools.chain([prompt], pieces):
        text += piece
        if stream is not None:
            stream(piece)
    return text
