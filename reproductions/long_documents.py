"""Write the long documents that runs on `data/mixed.yaml` hold out, each cut to the same number of tokens.

    PYTHONPATH=. python reproductions/long_documents.py corpora/mixed

writes corpora/mixed/long-prose.jsonl.xz and long-code.jsonl.xz, from the 5 % of the training documents that
`data.validation_fraction=0.05` leaves out. With `evaluate --tasks=perplexity --held_out=1 --haystack=FILE`, each window
of the full length is one document, so each position has that much context of its document. (The validation and test
sets have no code of this length.)
"""

import argparse
import json
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path

from zoo.data.text.corpus import Corpus
from zoo.data.text.split import SplitByContent
from zoo.data.text.tokenizer import Tokenizer
from zoo.files.atomic import atomic_write

KINDS = ("prose", "code")


def excerpt(text: str, tokenizer: Tokenizer, length: int) -> str | None:
    """The first part of a text that has this number of tokens with its end token; None if the text is too short.

    Characters are removed from its beginning, at most a tenth, until a cut at its end leaves the exact number.
    """
    for start in range(len(text) // 10):
        low, high = 0, len(text) - start
        while low < high:  # the longest piece with at most so many tokens, if tokens only grow in number
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if _tokens(text[start : start + middle], tokenizer) <= length else (low, middle - 1)
            )
        piece = text[start : start + low]
        if _tokens(piece, tokenizer) == length:
            return piece
        if start + low == len(text):
            return None
    return None


def _tokens(text: str, tokenizer: Tokenizer) -> int:
    return len(tokenizer.encode(text)) + (tokenizer.bos_id is not None) + 1


def held_out(folder: Path, fraction: float) -> Iterator[tuple[str, str]]:
    """The documents of the training files that runs with this `validation_fraction` hold out, with their kind."""
    files = {kind: str(folder / f"train-{kind}.jsonl.xz") for kind in KINDS}
    split = SplitByContent(Corpus([*files.values()]), fraction)
    for kind, file in files.items():
        for text in Corpus(file).texts():
            yield from ((kind, part) for name, part in split(text) if name == "validation")


def main() -> None:
    """Write the files, and print how many documents each has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the corpus, with its tokenizer.json")
    parser.add_argument("--tokens", type=int, default=20_480, help="of each document")
    parser.add_argument("--fraction", type=float, default=0.05, help="`data.validation_fraction` of the runs")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(args.folder / "tokenizer.json")
    pieces: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for kind, text in held_out(args.folder, args.fraction):
        if len(text) >= args.tokens and (piece := excerpt(text, tokenizer, args.tokens)):
            pieces[kind].append(piece)
    for kind, texts in pieces.items():
        file = args.folder / f"long-{kind}.jsonl.xz"
        lines = "".join(json.dumps({"text": text}) + "\n" for text in [*texts, "\n"])  # a label for the last token
        with atomic_write(file) as stream:
            stream.write(lzma.compress(lines.encode()))
        sys.stdout.write(f"{file}: {len(texts)} documents of {args.tokens} tokens\n")


if __name__ == "__main__":
    main()
