"""Handwritten digits that ship with scikit-learn, so that a run on images downloads nothing."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from kernels.errors import UserError


class Digits(Dataset):
    """1797 handwritten digits of 8 × 8 pixels, one channel from −1 to 1 (UCI ML, by way of scikit-learn).

    Raises:
        UserError: scikit-learn is not installed.
    """

    classes = tuple("0123456789")

    def __init__(self) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise UserError('data.dataset: Digits needs scikit-learn: pip install "token-mixer-zoo[images]".') from None
        pixels, self._labels = load_digits(return_X_y=True)  # pixels are 0 to 16
        self._images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 8 - 1

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._images[index], int(self._labels[index])
