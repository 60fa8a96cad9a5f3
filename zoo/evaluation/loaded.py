"""A saved model under evaluation."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import UserError
from zoo.data.batch import NO_LOSS, Batch
from zoo.data.text.tokenizer import Tokenizer
from zoo.generation.generate import Drawing, generate_tokens, stop_ids
from zoo.generation.graphs import DecodingGraphs
from zoo.generation.read import at_once
from zoo.lm.classifier import check_predicts_tokens
from zoo.lm.model import LanguageModel
from zoo.saved.model import SavedModel

# tokens in a batch of sequences
BATCH_TOKENS = {"cpu": 16_384, "cuda": 262_144}


class Scored(NamedTuple):
    """A continuation's log-likelihood in nats, and whether greedy decoding would have produced it."""

    log_likelihood: float
    greedy: bool


class TokenScores(NamedTuple):
    """Negative log-likelihood of each label in nats, [B,T] fp32, and whether it is the likeliest token, [B,T].

    Without a label they are 0 and false.
    """

    losses: Tensor
    correct: Tensor


@dataclass
class LoadedModel:
    """A language model under evaluation, in evaluation mode.

    Prompts are sorted by length and read in batches; long ones in pieces with the state carried on, so that memory does
    not grow with the length, except for the state itself.

    Args:
        tokenizer: None if it was trained without text.
        context_length: None if the length of training sequences is unknown.
        batch_tokens: Tokens in a batch of sequences; None for 16,384 on a CPU and 262,144 on a GPU.
        bf16: Whether to compute under autocast to bf16.
        identity: What tells this model from others: hashes of checkpoint and config, sizes.
        saw_no_needles: Whether it was certainly trained on nothing but text without needles.
        graphs: The owner of the CUDA graphs of its decoding steps.
    """

    name: str
    model: LanguageModel
    tokenizer: Tokenizer | None = None
    context_length: int | None = None
    batch_tokens: int | None = None
    bf16: bool = False
    identity: dict[str, Any] = field(default_factory=dict)
    saw_no_needles: bool = False
    graphs: DecodingGraphs = field(default_factory=DecodingGraphs)

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self.model.vocab_size

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    def state_size(self, length: int) -> float:
        """Elements of the state after `length` tokens of one sequence."""
        return self.model.state_size(length)

    def to(self, device: torch.device | str) -> None:
        """Move the model, which drops its graphs."""
        if torch.device(device) != self.device:
            self.graphs.clear()
        self.model.to(device)

    def continuations(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """The likeliest next tokens after each prompt, up to the end of the document."""
        stops = () if self.tokenizer is None else stop_ids(self.tokenizer)
        results: list[list[int]] = [[] for _ in prompts]
        for rows in self._batches([len(prompt) + max_new_tokens for prompt in prompts]):
            ids = [torch.tensor(prompts[row], device=self.device) for row in rows]
            with self._computing():
                options: Drawing = {"max_new_tokens": max_new_tokens, "temperature": 0, "graphs": self.graphs}
                options["eos_id"] = stops
                drawn = generate_tokens(self.model, ids, **options)
                steps = torch.stack(list(drawn), 1).tolist()
            for row, tokens in zip(rows, steps, strict=True):
                results[row] = list(itertools.takewhile(lambda token: token not in stops, tokens))
        return results

    def log_likelihoods(self, requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Scored]:
        """Return the log likelihood of each continuation, given its context of at least one token."""
        results: list[Scored | None] = [None] * len(requests)
        for rows in self._batches([len(context) + len(continuation) - 1 for context, continuation in requests]):
            batch = _padded([requests[row] for row in rows])
            losses, correct = self.label_scores(batch)
            counts, right = (batch.labels != NO_LOSS).sum(1).tolist(), correct.sum(1).tolist()
            for row, loss, count, hits in zip(rows, losses.double().sum(1).tolist(), counts, right, strict=True):
                results[row] = Scored(-loss, hits == count)
        return [result for result in results if result is not None]

    def label_scores(self, batch: Batch) -> TokenScores:
        """The loss of each label of a batch; sequences longer than memory likes are read in pieces."""
        tokens, labels = (x.to(self.device) for x in (batch.tokens, batch.labels))
        # weights converted to bf16 are not kept: converting them again takes far less than reading a piece does
        with self._computing(keep_converted=False), torch.no_grad():
            if batch.cu_seqlens is not None:
                scored = self.model.token_losses(tokens, labels, cu_seqlens=batch.cu_seqlens.to(self.device))
                return TokenScores(scored.losses.cpu(), scored.correct.cpu())
            state, scores = self.model.init_state(len(tokens)), []
            size = max(1, at_once(self.device) // len(tokens))
            for piece, of_piece in zip(tokens.split(size, dim=1), labels.split(size, dim=1), strict=True):
                scored = self.model.token_losses(piece, of_piece, state)
                assert scored.state is not None
                state = scored.state
                scores.append((scored.losses.cpu(), scored.correct.cpu()))
        losses, correct = (torch.cat(parts, dim=1) for parts in zip(*scores, strict=True))
        return TokenScores(losses, correct)

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Numbers of sequences in batches of similar lengths; the longest first: what is too long fails early."""
        most = self.batch_tokens or BATCH_TOKENS.get(self.device.type, BATCH_TOKENS["cpu"])
        rows: list[int] = []
        for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
            if rows and (len(rows) + 1) * lengths[rows[0]] > most:
                yield rows
                rows = []
            rows.append(row)
        if rows:
            yield rows

    @contextmanager
    def _computing(self, keep_converted: bool = True) -> Iterator[None]:
        try:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=keep_converted):
                yield
        except torch.OutOfMemoryError:
            raise UserError(
                f"batch_tokens: a batch does not fit into the memory of {self.device}; set it to less than "
                f"{self.batch_tokens or BATCH_TOKENS.get(self.device.type)}"
            ) from None


def _padded(requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Batch:
    """Contexts and continuations as a batch with labels at the continuations, padded at the end."""
    longest = max(len(context) + len(continuation) for context, continuation in requests) - 1
    tokens = torch.zeros(len(requests), longest, dtype=torch.int64)
    labels = torch.full((len(requests), longest), NO_LOSS)
    for row, (context, continuation) in enumerate(requests):
        ids = torch.tensor([*context, *continuation])
        tokens[row, : len(ids) - 1] = ids[:-1]
        labels[row, len(context) - 1 : len(ids) - 1] = ids[len(context) :]
    return Batch(tokens, labels)


def load_subject(
    path: str | Path,
    name: str,
    bf16: bool,
    batch_tokens: int | None = None,
    trust: bool = False,
    cuda_graph: bool = True,
) -> LoadedModel:
    """Load a saved model for evaluation, on the CPU for now; paths, trust and errors as for `zoo.load`.

    A UserError if the model is a classifier.
    """
    saved = SavedModel.open(path, trust)
    model = saved.load()
    check_predicts_tokens(model, "evaluate")
    arguments = (saved.config.get("data") or {}).get("init_args") or {}
    identity = {
        "checkpoint": str(path),
        "checkpoint_xxh3_128": saved.identity,
        "parameters": model.num_parameters(),
        "model": saved.config["model"],
    }
    length = arguments.get("sequence_length")
    no_needles, graphs = is_of_embedded_text(saved.config), DecodingGraphs(cuda_graph)
    return LoadedModel(name, model, saved.tokenizer, length, batch_tokens, bf16, identity, no_needles, graphs)


def is_of_embedded_text(config: Mapping[str, Any]) -> bool:
    """Return whether a run's data is the embedded corpus alone, and its weights started fresh."""
    data = config.get("data") or {}
    kind, arguments = str(data.get("class_path")).rpartition(".")[2], data.get("init_args") or {}
    if kind not in ("TextData", "MixedText") or (config.get("optim") or {}).get("initial_weights"):
        return False
    sources = [arguments] if kind == "TextData" else (arguments.get("sources") or {}).values()
    paths = [source.get("path") if isinstance(source, Mapping) else source for source in sources]
    return all(path is None or str(path).startswith("embedded") for path in paths)
