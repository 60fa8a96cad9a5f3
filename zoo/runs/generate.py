"""Text generation from a saved model."""

import itertools
from collections.abc import Callable
from pathlib import Path

from zoo.generation.generate import generate as pieces_of
from zoo.lm.classifier import check_predicts_tokens
from zoo.saved.model import SavedModel
from zoo.train.devices import pick_device


def generate(
    checkpoint: str | Path,
    prompt: str = "",
    max_new_tokens: int = 256,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = 0.95,
    seed: int | None = None,
    stop: list[str] | None = None,
    device: str | None = None,
    trust: bool = False,
    stream: Callable[[str], object] | None = None,
) -> str:
    """Continue a prompt.

    Args:
        checkpoint: A run's folder, a .ckpt file, an exported folder, or a public one that `convert` reads.
        prompt: The text to continue; an empty prompt starts a new document.
        max_new_tokens: Largest number of tokens to generate; the document may end earlier.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Sample only from the k likeliest tokens.
        top_p: Sample only from the fewest likeliest tokens whose probabilities add up to this.
        seed: Seed of the sampling, for repeatable text.
        stop: Strings that end the text before them, besides the tokens that the tokenizer and configs name; on the
            command line --stop=A --stop=B, or a JSON list.
        device: Where to run: cpu, cuda, mps; null for the GPU if available.
        trust: Whether to import and call what the model's config names, even if someone else wrote it.
        stream: Called with the prompt, and then with each piece of text once it is generated.

    Returns:
        The prompt and its continuation.

    Raises:
        UserError: The model or device does not exist, the model is a classifier, an argument is out of range, or
            the model's logits are not finite.
    """
    saved = SavedModel.open(checkpoint, trust)
    model = saved.load(device or pick_device(None))
    check_predicts_tokens(model, "generate")  # otherwise the complaint would be about a missing tokenizer
    tokenizer = saved.required_tokenizer
    del saved  # which holds a second copy of the weights
    pieces = pieces_of(
        model,
        tokenizer,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=[stop] if isinstance(stop, str) else stop or (),
    )
    text = ""
    for piece in itertools.chain([prompt], pieces):
        text += piece
        if stream is not None:
            stream(piece)
    return text
