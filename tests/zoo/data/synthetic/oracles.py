"""Solvers of the tasks made of tokens, which read a sequence as its docstring says and know nothing of labels."""

from collections.abc import Callable, Sequence

Oracle = Callable[[Sequence[int], int], dict[int, int]]  # tokens, vocabulary → position → answer


def recall(pairs: int) -> Oracle:
    """`Recall`: pairs at the start, then questions at every other token, among fillers."""

    def answers(tokens: Sequence[int], vocab_size: int) -> dict[int, int]:
        value = dict(zip(tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2], strict=True))
        return {t: value[tokens[t]] for t in range(2 * pairs, len(tokens), 2) if tokens[t] in value}

    return answers


def stacked(rounds: int) -> Oracle:
    """Each round by itself; where pairs end, no value follows."""

    def answers(tokens: Sequence[int], vocab_size: int) -> dict[int, int]:
        length, found = len(tokens) // rounds, {}
        for start in range(0, len(tokens), length):
            value = {}
            for t in range(start, start + length, 2):
                if t + 1 < start + length and tokens[t + 1]:
                    value[tokens[t]] = tokens[t + 1]
                elif tokens[t]:
                    found[t] = value[tokens[t]]
        return found

    return answers


def written(tokens: Sequence[int], vocab_size: int) -> dict[int, int]:
    """Compositional and forgetting: follow the last writing of a key until a value comes."""
    link, found = {}, {}
    for t in range(0, len(tokens) - 1, 2):
        if tokens[t + 1]:
            link[tokens[t]] = tokens[t + 1]
        elif tokens[t]:
            found[t] = tokens[t]
            while found[t] < vocab_size // 2:
                found[t] = link[found[t]]
    return found


def joint(keys: int, values: int) -> Oracle:
    """Pairs decoded from their numbers."""

    def answers(tokens: Sequence[int], vocab_size: int) -> dict[int, int]:
        first = 1 + keys + values
        value = dict(divmod(token - first, values) for token in tokens if token >= first)
        return {t: 1 + keys + value[token - 1] for t, token in enumerate(tokens) if token <= keys}

    return answers


def in_context(noise_tokens: int = 0) -> Oracle:
    """A run of keys and the run of values behind it, each time that they come complete."""

    def answers(tokens: Sequence[int], vocab_size: int) -> dict[int, int]:
        top = vocab_size - noise_tokens
        kind = ["key" if token < top // 2 else "value" if token < top else "noise" for token in tokens]
        known: dict[tuple[int, ...], list[int]] = {}
        found: dict[int, int] = {}
        t = 0
        while t < len(tokens):
            if kind[t] == "noise":
                t += 1
                continue
            start = t
            while t < len(tokens) and kind[t] == "key":
                t += 1
            key, at = tuple(tokens[start:t]), t
            value = known.get(key, [])
            for offset, token in enumerate(value):
                found[at - 1 + offset] = token
            while t < len(tokens) and kind[t] == "value":
                t += 1
            known.setdefault(key, list(tokens[at:t]))
        return {at: token for at, token in found.items() if at < len(tokens)}

    return answers


def copy(tokens: Sequence[int], vocab_size: int) -> dict[int, int]:
    """What is neither blank nor a question, in order, at the questions."""
    content = [token for token in tokens if token > 1]
    return dict(zip([t for t, token in enumerate(tokens) if token == 0], content, strict=True))


def compression(tokens: Sequence[int], vocab_size: int) -> dict[int, int]:
    """Places after the end, which start above 16 tokens of content."""
    end = list(tokens).index(0)
    return {t: tokens[tokens[t] - 17] for t in range(end + 1, len(tokens))}
