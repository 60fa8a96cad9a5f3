"""Strings that end a text, which may be divided among pieces of it."""

from collections.abc import Iterable, Iterator, Sequence


def until(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """Yield the pieces of a text up to the first of some non-empty strings, and ask for no more of them then.

    The end of a piece that may be the beginning of such a string waits for the next piece.
    """
    waiting = ""
    for piece in pieces:
        waiting += piece
        if starts := [at for stop in stops if (at := waiting.find(stop)) >= 0]:
            waiting = waiting[: min(starts)]
            break
        certain = len(waiting) - max((_begun(waiting, stop) for stop in stops), default=0)
        if certain:
            yield waiting[:certain]
            waiting = waiting[certain:]
    if waiting:
        yield waiting


def _begun(text: str, stop: str) -> int:
    """Return the length of the longest proper beginning of a stop string that the text ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
