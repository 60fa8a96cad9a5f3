"""The loss of a bigram model of the same data, which a trained model should beat."""

import functools

import lightning as L


def bigram_loss(trainer: L.Trainer) -> float | None:
    """The data module's bigram baseline in nats per token; None without one."""
    return _bigram_loss(trainer.datamodule)


@functools.lru_cache(maxsize=1)  # computing it counts all training tokens
def _bigram_loss(datamodule: L.LightningDataModule | None) -> float | None:
    measure = getattr(datamodule, "bigram_loss", None)
    return None if measure is None else float(measure())
