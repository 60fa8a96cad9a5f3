"""Documents that a model writes, in a file that another model can be trained on."""

import itertools
import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Unpack

import torch

from kernels.errors import UserError
from zoo.arguments import check_seed
from zoo.data.text.tokenizer import Tokenizer
from zoo.display import progress_bar
from zoo.files.atomic import atomic_write
from zoo.files.output import make_folder
from zoo.generation.generate import (
    Sampling,
    checked_stops,
    generate_tokens,
    ids_of_prompt,
    stop_ids,
    text_after,
    until,
)
from zoo.lm.model import LanguageModel

log = logging.getLogger(__name__)


class Written(NamedTuple):
    """Documents that a model has written.

    Attributes:
        file: The .jsonl file, with a line `{"text": …}` for each document.
        documents: Their number; those without text after the prompt are left out.
        tokens: Tokens of all documents without the prompt.
        seconds: What they took, the captures of CUDA graphs included.
    """

    file: Path
    documents: int
    tokens: int
    seconds: float

    def report(self) -> str:
        """The file, the numbers, and a key of a config that reads it."""
        speed = self.tokens / max(self.seconds, 1e-9)
        numbers = f"{self.documents:,} documents, {self.tokens:,} tokens, {speed:,.0f} tokens/s"
        return f"{self.file}: {numbers}\nnext: train on it by --data.path={self.file}"


def check_documents(file: Path, count: int, batch_size: int) -> None:
    """Raise a UserError if documents cannot be written to the file, or a number is out of range."""
    for name, number in {"count": count, "batch_size": batch_size}.items():
        if number < 1:
            raise UserError(f"{name} is {number}, but must be 1 or more.")
    if file.suffix != ".jsonl":
        raise UserError(f"output: {file} must end in .jsonl, the format that is written")
    if os.path.lexists(file):
        raise UserError(f"output: {file} exists already; choose another")
    make_folder(file.parent, "output")


def write_documents(
    model: LanguageModel,
    tokenizer: Tokenizer,
    file: Path,
    count: int,
    prompt: str = "",
    *,
    batch_size: int = 64,
    seed: int | None = None,
    stop: str | Sequence[str] | None = None,
    special_tokens: bool = False,
    **sampling: Unpack[Sampling],
) -> Written:
    """Continue a prompt many times, several sequences at a time.

    Args:
        model, tokenizer, prompt, stop, special_tokens, sampling: As in `generate`.
        file: The .jsonl file, which appears when all documents are written; after Ctrl-C it has those so far.
        count: Number of documents.
        batch_size: Sequences at a time. Documents depend on it, as those of a batch are drawn together.
        seed: Batch number i is drawn with `seed` + i; None for other documents each time.

    Raises:
        UserError: As `check_documents` and `generate`.
        KeyboardInterrupt: Ctrl-C.
    """
    check_documents(file, count, batch_size)
    check_seed(seed)
    stops = checked_stops(stop)
    ids, ends = ids_of_prompt(tokenizer, prompt, special_tokens), stop_ids(tokenizer)
    prompts = torch.tensor([ids], device=next(model.parameters()).device).expand(min(batch_size, count), -1)
    documents, tokens, start, stopped = 0, 0, time.monotonic(), False
    with atomic_write(file) as opened, progress_bar(desc="writing", total=count, unit=" documents") as bar:
        try:
            for number, left in enumerate(range(count, 0, -batch_size)):
                own = None if seed is None else seed + number
                drawn = torch.stack([*generate_tokens(model, prompts, seed=own, eos_id=ends, **sampling)], 1)
                for row in drawn[:left].tolist():
                    new = [*itertools.takewhile(lambda token: token not in ends, row)]
                    text = "".join(until([text_after(tokenizer, ids if prompt else [], new)], stops))
                    if text:
                        opened.write(f"{json.dumps({'text': prompt + text}, ensure_ascii=False)}\n".encode())
                        documents += 1
                    tokens += len(new)
                    bar.update()
        except KeyboardInterrupt:
            if not documents:
                raise
            stopped = True
        if not documents:
            raise UserError(
                f"output: all {count} documents ended before their first character, so {file} is not written"
            )
    if stopped:
        log.warning("%s: stopped after %d of %d documents, which it holds", file, documents, count)
        raise KeyboardInterrupt
    return Written(file, documents, tokens, time.monotonic() - start)
