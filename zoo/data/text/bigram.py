"""An interpolated bigram model, the baseline that a language model must beat."""

from collections.abc import Callable

import numpy as np

from kernels.errors import UserError


def interpolated_bigram_loss(train_tokens: np.ndarray, validation_tokens: np.ndarray, vocab_size: int) -> float:
    """Loss of the best of three smoothed bigram models, in nats per validation token, without the first token.

    With c(v, w) bigram counts, c(v) their sum and d(v) the number of different followers of v:

        unigram        q(w)   = μ·c(w)/N + (1 − μ)/vocab_size
        constant       p(w|v) = λ·c(v, w)/c(v) + (1 − λ)·q(w)
        Witten-Bell    p(w|v) = (c(v, w) + k·d(v)·q(w)) / (c(v) + k·d(v))
        discounted     p(w|v) = (max(c(v, w) − δ, 0) + (θ + δ·d(v))·q(w)) / (c(v) + θ)

    λ, μ, k, δ and θ are fitted to the validation tokens themselves, so the baseline is as strong as possible.

    Raises:
        UserError: There are too few tokens, or a token is out of range.
    """
    train, validation = np.asarray(train_tokens, np.int64), np.asarray(validation_tokens, np.int64)
    for name, tokens in (("train_tokens", train), ("validation_tokens", validation)):
        if tokens.ndim != 1 or len(tokens) < 2:
            raise UserError(f"{name} has the shape {tokens.shape}; a row of at least two tokens is needed.")
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise UserError(f"{name} has values from {tokens.min()} to {tokens.max()}; vocab_size is {vocab_size}.")

    # Only bigrams of the validation tokens are counted, so memory grows with the tokens and not with vocab_size².
    bigrams, counts = np.unique(train[:-1] * vocab_size + train[1:], return_counts=True)
    predicted, times = np.unique(validation[:-1] * vocab_size + validation[1:], return_counts=True)
    before, word = np.divmod(predicted, vocab_size)
    place = np.minimum(np.searchsorted(bigrams, predicted), len(bigrams) - 1)
    pair = np.where(bigrams[place] == predicted, counts[place], 0).astype(float)
    context = np.bincount(train[:-1], minlength=vocab_size)[before].astype(float)
    followers = np.bincount(bigrams // vocab_size, minlength=vocab_size)[before].astype(float)
    frequency = np.bincount(train, minlength=vocab_size)[word] / len(train)
    divisor = np.maximum(context, 1)  # for an unseen context the models below reduce to q

    def unigram(mu: float) -> np.ndarray:
        return mu * frequency + (1 - mu) / vocab_size

    def constant(mu: float, weight: float) -> np.ndarray:
        weights = np.where(context > 0, weight, 0)
        return weights * pair / divisor + (1 - weights) * unigram(mu)

    def witten_bell(mu: float, x: float) -> np.ndarray:
        prior = np.where(context > 0, x / (1 - x) * followers, 1)
        return (pair + prior * unigram(mu)) / (context + prior)

    def discounted(mu: float, discount: float, x: float) -> np.ndarray:
        theta = 10 * x / (1 - x)
        prior = theta + discount * np.where(context > 0, followers, 1)
        return (np.maximum(pair - discount, 0) + prior * unigram(mu)) / (
            context + theta + np.where(context > 0, 0, discount)
        )

    def lowest(model: Callable[..., np.ndarray], parameters: int) -> float:
        return _minimum(lambda *x: float(-(times @ np.log(model(*x))) / times.sum()), parameters)

    return min(lowest(constant, 2), lowest(witten_bell, 2), lowest(discounted, 3))


def _minimum(loss: Callable[..., float], number: int) -> float:
    """Smallest value of a smooth function of parameters in (0, 1), by golden-section search along each in turn."""
    ratio, edge = (5**0.5 - 1) / 2, 1e-9
    best, point = np.inf, [0.9] + [0.5] * (number - 1)
    while True:
        for axis in range(number):
            low, high = edge, 1 - edge

            def at(x: float, axis: int = axis) -> float:
                return loss(*point[:axis], x, *point[axis + 1 :])

            left, right = high - ratio * (high - low), low + ratio * (high - low)
            at_left, at_right = at(left), at(right)
            while high - low > 1e-5:
                if at_left < at_right:
                    high, right, at_right = right, left, at_left
                    left = high - ratio * (high - low)
                    at_left = at(left)
                else:
                    low, left, at_left = left, right, at_right
                    right = low + ratio * (high - low)
                    at_right = at(right)
            point[axis] = (low + high) / 2
        value = loss(*point)
        if value > best - 1e-6:
            return min(value, best)
        best = value
