"""Solvers of the tasks made of tokens, which read a sequence as its docstring says and know nothing of labels."""

from collections.abc import Callable, Sequence
from itertools import combinations, permutations

Oracle = Callable[[Sequence[int], int], dict[int, int]]  # tokens, vocabulary → position → answer


def recall(pairs: int) -> Oracle:
    """`Recall`: pairs at the start, then questions at every other token, among fillers."""

    def answers(tokens: Sequence[int], vocab_size: int) -> dict[int, int]:
        value = dict(zip(tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2], strict=True))
        return {t: value[tokens[t]] for t in range(2 * pairs, len(tokens), 2) if tokens[t] in value}

    return answers


def stacked(tokens: Sequence[int], vocab_size: int) -> dict[int, int]:
    """Pairs decoded from their numbers."""
    keys = int(vocab_size**0.5) - 1
    first = 1 + 2 * keys
    value = dict(divmod(token - first, keys) for token in tokens if token >= first)
    return {t: 1 + keys + value[token - 1] for t, token in enumerate(tokens) if token <= keys}


def compositional(pairs: int) -> Oracle:
    """Triplets at the start, then questions of two tokens at every third, among fillers."""

    def answers(tokens: Sequence[int], vocab_size: int) -> dict[int, int]:
        start = 3 * pairs
        keys = zip(tokens[0:start:3], tokens[1:start:3], strict=True)
        value = dict(zip(keys, tokens[2:start:3], strict=True))
        asked = {t + 1: (tokens[t], tokens[t + 1]) for t in range(start, len(tokens) - 1, 3)}
        return {t: value[key] for t, key in asked.items() if key in value}

    return answers


def forgetting(pairs: int, updates: int) -> Oracle:
    """Writings at the start, of which later ones count, then questions at every other token, among fillers."""
    return recall(pairs + updates)


def in_context(noise_tokens: int = 0) -> Oracle:
    """A run of keys and the run of values behind it, each time that they come complete."""

    def answers(tokens: Sequence[int], vocab_size: int) -> dict[int, int]:
        top = vocab_size - noise_tokens
        kind = ["key" if token < top // 2 else "value" if token < top else "noise" for token in tokens]
        values: dict[tuple[int, ...], list[int]] = {}
        actual: dict[int, int] = {}
        t = 0
        while t < len(tokens):
            if kind[t] == "noise":
                t += 1
                continue
            start = t
            while t < len(tokens) and kind[t] == "key":
                t += 1
            key, at = tuple(tokens[start:t]), t
            value = values.get(key, [])
            for offset, token in enumerate(value):
                actual[at - 1 + offset] = token
            while t < len(tokens) and kind[t] == "value":
                t += 1
            values.setdefault(key, list(tokens[at:t]))
        return {at: token for at, token in actual.items() if at < len(tokens)}

    return answers


def copy(tokens: Sequence[int], vocab_size: int) -> dict[int, int]:
    """What is neither blank nor a question, in order, at the questions."""
    content = [token for token in tokens if token > 1]
    return dict(zip([t for t, token in enumerate(tokens) if token == 0], content, strict=True))


def compression(tokens: Sequence[int], vocab_size: int) -> dict[int, int]:
    """Places after the end, which start above 16 tokens of content."""
    end = list(tokens).index(0)
    return {t: tokens[tokens[t] - 17] for t in range(end + 1, len(tokens))}


def word_problem(group: str) -> Oracle:
    """Moves items about: entry i of an element says where item i goes."""
    items = {"parity": 2, "S3": 3, "A5": 5}[group]
    every = [p for p in permutations(range(items)) if group != "A5" or _even(p)]

    def answers(tokens: Sequence[int], vocab_size: int) -> dict[int, int]:
        places, products = list(range(items)), {}
        for t, token in enumerate(tokens):
            places = [every[token][place] for place in places]
            products[t] = every.index(tuple(places))
        return products

    return answers


def _even(p: tuple[int, ...]) -> bool:
    return sum(p[i] > p[j] for i, j in combinations(range(len(p)), 2)) % 2 == 0
