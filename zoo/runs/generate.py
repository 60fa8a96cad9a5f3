"""Text generation from a saved model, or one in memory."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kernels.errors import UserError
from zoo.generation.documents import Written, check_documents, write_documents
from zoo.generation.generate import check_prompt, write
from zoo.generation.graphs import DecodingGraphs
from zoo.lm.classifier import check_predicts_tokens
from zoo.lm.model import LanguageModel
from zoo.saved.model import SavedModel
from zoo.train.devices import check_device, pick_device

if TYPE_CHECKING:
    Model: TypeAlias = str | Path | LanguageModel
    Prompts: TypeAlias = str | Sequence[str]
else:  # the command line reads the types, and has one prompt and no models
    Model, Prompts = str | Path, str


def generate(
    checkpoint: Model,
    prompt: Prompts = "",
    max_new_tokens: int = 256,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = 0.95,
    seed: int | None = None,
    stop: list[str] | None = None,
    special_tokens: bool = False,
    cuda_graph: bool = True,
    device: str | None = None,
    trust: bool = False,
    count: int | None = None,
    batch_size: int = 64,
    output: str | Path | None = None,
    stream: Callable[[str], object] | None = None,
) -> str | list[str] | Written:
    """Continue a prompt, or write a file of documents.

    ``zoo.generate("runs/first", ["def ", "class "], max_new_tokens=20)``
    ``zoo.generate("runs/teacher", count=10000, output="teacher.jsonl", temperature=1.0, top_p=None)``

    Args:
        checkpoint: A run's folder, a .ckpt file, an exported folder, or a public one that `convert` reads, or one
            of them on the Hub, hf://owner/name[@revision]. In Python also a model of `zoo.load` or `zoo.fit`, which
            stays on its device.
        prompt: The text to continue; an empty prompt starts a new document. In Python also a list of texts, of which
            number i is continued with `seed` + i.
        max_new_tokens: Largest number of tokens to generate; the document may end earlier.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Sample only from the k likeliest tokens.
        top_p: Sample only from the fewest likeliest tokens whose probabilities add up to this.
        seed: Seed of the sampling, for repeatable text.
        stop: Strings that end the text before them, besides the tokens that the tokenizer and configs name; on the
            command line --stop=A --stop=B, or a JSON list.
        special_tokens: Whether what spells a special token in the prompt, such as "<eos>", is that token.
        cuda_graph: Whether to capture decoding steps as CUDA graphs, on a GPU.
        device: Where to run: cpu, cuda, mps; null for the GPU if available.
        trust: Whether to import and call what the model's config names, even if someone else wrote it.
        count: Number of documents to write to `output`, each of which continues the prompt; batch number i is drawn
            with `seed` + i.
        batch_size: How many of them are written at a time.
        output: Their .jsonl file, with a line {"text": …} for each document, as `data.path` reads it.
        stream: Called with the prompt, and then with each piece of text once it is generated.

    Returns:
        The prompt and its continuation; a list of them for a list of prompts; with `output`, how many documents were
        written, and how fast.

    Raises:
        UserError: The model or device does not exist, the model is a classifier, an argument is out of range, or
            the model's logits are not finite.
    """
    settings: dict[str, Any]
    sampling: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
    }
    if device is not None:
        check_device(device, meta=False)
    if (count is None) != (output is None):
        raise UserError("count, output: documents need both, their number and a .jsonl file; give both or neither")
    if count is not None and output is not None:
        if isinstance(checkpoint, LanguageModel) or not isinstance(prompt, str):
            raise UserError("output: documents are written by a saved model, after one prompt")
        check_documents(Path(output), count, batch_size)
        check_prompt(prompt)
    if isinstance(checkpoint, LanguageModel):
        continued = checkpoint.generate
    else:
        saved = SavedModel.open(checkpoint, trust)
        model = saved.load(device or pick_device(None))
        check_predicts_tokens(model, "generate")  # otherwise the complaint would be about a missing tokenizer
        tokenizer = saved.required_tokenizer
        continued = partial(write, model, tokenizer)
        del saved  # which holds a second copy of the weights
        if count is not None and output is not None:
            sampling["graphs"] = DecodingGraphs(cuda_graph)
            settings = {"batch_size": batch_size, "seed": seed, "stop": stop, "special_tokens": special_tokens}
            return write_documents(model, tokenizer, Path(output), count, str(prompt), **settings, **sampling)
    settings = {"stop": stop, "special_tokens": special_tokens, "cuda_graph": cuda_graph}
    return continued(prompt, seed=seed, stream=stream, **settings, **sampling)
