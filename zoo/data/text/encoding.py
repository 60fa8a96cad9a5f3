"""Encoding documents to token ids in several processes, in order and in bounded memory."""

import multiprocessing
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np

from kernels import UserError
from zoo.data.text.documents import Document, Tokens
from zoo.data.text.split import Split
from zoo.data.text.tokenizer import Tokenizer
from zoo.data.workers import end_with

# Encoded in one piece by a process (at some 100 bytes per character); longer documents are cut where no token changes.
PIECE_CHARACTERS = 250_000


@dataclass(frozen=True)
class Piece:
    """Text to encode in one piece: a document, or a part of a long one. Tokens stay as they are."""

    split: Split
    text: Document
    first: bool  # whether it is the first of its document
    last: bool


def pieces(split: Split, text: Document, tokenizer: Tokenizer) -> Iterator[Piece]:
    """Divide a document among processes: cut text after lines, where that does not change its tokens."""
    if not isinstance(text, str):
        yield Piece(split, text, True, True)
        return
    start = 0
    while len(text) - start > 2 * PIECE_CHARACTERS:
        end = _safe_cut(text, start + PIECE_CHARACTERS, tokenizer)
        if end is None:
            break
        yield Piece(split, text[start:end], start == 0, False)
        start = end
    yield Piece(split, text[start:], start == 0, True)


def _safe_cut(text: str, start: int, tokenizer: Tokenizer) -> int | None:
    """A position from `start` on at which a cut does not change the tokens; None if there is none."""
    for attempt, line_end in enumerate(re.compile(r"\S\n(?=\S)").finditer(text, start, start + PIECE_CHARACTERS)):
        cut = line_end.end()
        before, after = text[max(cut - 200, 0) : cut], text[cut : cut + 200]
        whole, head, tail = tokenizer.encode_batch([before + after, before, after])
        if whole == head + tail:
            return cut
        if attempt == 9:  # the tokenizer marks the start of a text, so any cut changes tokens
            return None
    return None


def bundles(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces into bundles with about as many characters as one long piece."""
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


Encoded = tuple[list[Piece], list[Tokens]]


def encode_all(bundles: Iterator[list[Piece]], tokenizer: Tokenizer, workers: int) -> Iterator[Encoded]:
    """Yield each bundle, in order, with the tokens of its pieces; few are in memory at a time."""
    # On other systems a new process would import everything again, and the tokenizer's threads are nearly as fast.
    if workers == 1 or sys.platform != "linux":
        for bundle in bundles:
            yield bundle, _encoded([piece.text for piece in bundle], tokenizer)
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
    except BrokenProcessPool:
        raise UserError(
            f"data.preprocessing_workers: one of the {workers} processes that turn text into tokens was killed, "
            "usually because the machine ran out of memory; set fewer of them, and the same command continues the work."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_worker_tokenizer: Tokenizer | None = None


def _start_worker(tokenizer: Tokenizer, parent: int) -> None:
    global _worker_tokenizer
    end_with(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive the fork
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and stops this process
    _worker_tokenizer = tokenizer


def _encode(texts: list[Document]) -> list[Tokens]:
    assert _worker_tokenizer is not None
    return _encoded(texts, _worker_tokenizer)


def _encoded(texts: list[Document], tokenizer: Tokenizer) -> list[Tokens]:
    encoded = iter(tokenizer.encode_batch([text for text in texts if isinstance(text, str)]))
    return [text if isinstance(text, Tokens) else Tokens(np.array(next(encoded), np.uint32)) for text in texts]
