"""Speed and memory over the length, for a fixed number of tokens, as in Figure 3 of Gated Delta Networks.

The task `reproductions.throughput.Throughput` of `evaluate`.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from kernels import UserError
from zoo.evaluation.loaded import LoadedModel
from zoo.evaluation.task import Cell, Row, Task
from zoo.generation.decoder import Decoder
from zoo.generation.read import read
from zoo.performance.timing import synchronize

LENGTHS = {"cpu": (256, 512, 1024), "cuda": (2048, 4096, 8192, 16_384)}
BUDGET = {"cpu": 2048, "cuda": 131_072}  # tokens in a batch
DECODED = 32  # tokens after the prompts
SECONDS = 1.0  # at least, of repetitions


class Throughput(Task):
    """Tokens per second in training, prefill and decoding, and peak memory, at the same number of tokens per batch.

    A batch has `budget // length` random sequences of each length. `training` is a forward and backward pass;
    `prefill` reads the sequences into states; `decode` then reads one token of each at a time. Memory is measured on
    GPUs only.
    """

    name = "throughput"
    measures = "tokens per second in training, prefill and decoding over the length, and memory on a GPU"

    def cells(self, subject: LoadedModel) -> list[Cell]:
        """One for each length."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        budget = BUDGET[device] if subject.batch_tokens is None else subject.batch_tokens
        lengths = self.options.lengths or LENGTHS[device]
        if max(lengths) > budget:
            raise UserError(f"lengths: {max(lengths)} is more than the {budget} tokens of a batch; raise batch_tokens")
        return [{"length": length, "batch_size": budget // length} for length in lengths]

    def run(self, subject: LoadedModel, cell: Cell) -> list[Row]:
        """Time a batch of one length."""
        model, device = subject.model, subject.device
        size = cell["batch_size"], cell["length"]
        generator = torch.Generator().manual_seed(self.options.seed)
        tokens = torch.randint(model.vocab_size, size, generator=generator).to(device)

        def training() -> None:
            with torch.enable_grad(), torch.autocast(device.type, torch.bfloat16, enabled=subject.bf16):
                loss = model.loss(tokens, tokens)
            loss.backward()
            model.zero_grad(set_to_none=True)

        def prefill() -> Any:
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=subject.bf16):
                return read(model, list(tokens))[1]

        rows = _measured(cell, "training", training, tokens.numel(), device)
        rows += _measured(cell, "prefill", prefill, tokens.numel(), device)
        state = prefill()
        with torch.autocast(device.type, torch.bfloat16, enabled=subject.bf16):

            def decode() -> None:
                # each call starts at the same length, so that a state that grows is captured only once
                decoder = Decoder(model, tree_map(torch.clone, state), subject.graphs, room=DECODED)
                for _ in range(DECODED):
                    decoder(tokens[:, 0])
                decoder.close()

            return rows + _measured(cell, "decode", decode, DECODED * len(tokens), device)


def _measured(cell: Cell, name: str, call: Callable[[], object], tokens: int, device: torch.device) -> list[Row]:
    """Rows with the speed and the peak memory of a call that processes `tokens` tokens."""
    call()  # compiles kernels
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    synchronize(device)
    start, calls = time.perf_counter(), 0
    while not calls or time.perf_counter() - start < SECONDS:
        call()
        synchronize(device)
        calls += 1
    speed = calls * tokens / (time.perf_counter() - start)
    rows = [{**cell, "metric": f"{name}_tokens_per_second", "value": speed, "count": calls}]
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 2**30
        rows.append({**cell, "metric": f"{name}_peak_gib", "value": peak, "count": calls})
    return rows
