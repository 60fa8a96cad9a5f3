"""Documents to token ids, by several processes, in order and with little of them in memory at a time."""

import multiprocessing
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from zoo.data.text.split import Split
from zoo.data.text.tokenizer import Tokenizer
from zoo.data.workers import end_with

# What a process encodes at once (some 100 bytes a character); longer documents are cut where that changes no token.
PIECE_CHARACTERS = 250_000


@dataclass(frozen=True)
class Piece:
    """Text that is encoded at once: a document, or a part of a long one."""

    split: Split
    text: str
    first: bool  # of its document
    last: bool


def pieces(split: Split, text: str, tokenizer: Tokenizer) -> Iterator[Piece]:
    """Pieces of a document, cut after a line where the pieces' tokens are the whole's, so that it can be shared out."""
    start = 0
    while len(text) - start > 2 * PIECE_CHARACTERS:
        end = _harmless_cut(text, start + PIECE_CHARACTERS, tokenizer)
        if end is None:
            break
        yield Piece(split, text[start:end], start == 0, False)
        start = end
    yield Piece(split, text[start:], start == 0, True)


def _harmless_cut(text: str, start: int, tokenizer: Tokenizer) -> int | None:
    for attempt, line_end in enumerate(re.compile(r"\S\n(?=\S)").finditer(text, start, start + PIECE_CHARACTERS)):
        cut = line_end.end()
        before, after = text[max(cut - 200, 0) : cut], text[cut : cut + 200]
        whole, head, tail = tokenizer.encode_batch([before + after, before, after])
        if whole == head + tail:
            return cut
        if attempt == 9:  # this tokenizer marks the start of a text, so no cut is harmless
            return None
    return None


def bundles(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Groups of pieces with about as many characters as one long piece."""
    bundle: list[Piece] = []
    characters = 0
    for piece in pieces:
        bundle.append(piece)
        characters += len(piece.text)
        if characters >= PIECE_CHARACTERS:
            yield bundle
            bundle, characters = [], 0
    if bundle:
        yield bundle


Encoded = tuple[list[Piece], list[np.ndarray]]


def encode_all(bundles: Iterator[list[Piece]], tokenizer: Tokenizer, workers: int) -> Iterator[Encoded]:
    """Bundles with their token ids `[n]` uint32, in order, and few of them in memory at a time."""
    # Elsewhere a new process would import everything again, and the tokenizer's own threads are nearly as good.
    if workers == 1 or sys.platform != "linux":
        for bundle in bundles:
            yield bundle, [np.array(ids, np.uint32) for ids in tokenizer.encode_batch([p.text for p in bundle])]
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _start_worker, (tokenizer, os.getpid()))
    try:
        pending: deque[tuple[list[Piece], Future]] = deque()
        for bundle in bundles:
            pending.append((bundle, pool.submit(_encode, [piece.text for piece in bundle])))
            if len(pending) > 3 * workers:
                done, future = pending.popleft()
                yield done, future.result()
        for done, future in pending:
            yield done, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


_worker_tokenizer: Tokenizer | None = None


def _start_worker(tokenizer: Tokenizer, parent: int) -> None:
    global _worker_tokenizer
    end_with(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads did not survive the fork
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and stops us
    _worker_tokenizer = tokenizer


def _encode(texts: list[str]) -> list[np.ndarray]:
    assert _worker_tokenizer is not None
    return [np.array(ids, np.uint32) for ids in _worker_tokenizer.encode_batch(texts)]
