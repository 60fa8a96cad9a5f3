"""Images as sequences of patches."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from kernels.errors import UserError
from zoo.data.batch import Batch
from zoo.data.order import shuffled


def as_tensor(image: Any) -> Tensor:
    """An image as float32 [channels,height,width]; bytes 0 … 255 become −1 … 1, other numbers stay as they are.

    Args:
        image: A PIL image or array [height,width] or [height,width,channels], or a tensor [channels,height,width].
    """
    if not isinstance(image, Tensor):
        image = torch.from_numpy(np.array(image))  # a copy, since the array may be read-only
        image = image[None] if image.dim() == 2 else image.movedim(-1, 0)
    return image.float() / 127.5 - 1 if image.dtype == torch.uint8 else image.float()


def patches(image: Tensor, size: int) -> Tensor:
    """[channels,height,width] → [height/size · width/size, channels·size·size], row by row."""
    channels = image.shape[0]
    grid = image.unfold(1, size, size).unfold(2, size, size)  # [channels,rows,columns,size,size]
    return grid.permute(1, 2, 0, 3, 4).reshape(-1, channels * size * size)


class PatchedImages:
    """Some of the images of a data set, all of one shape, as sequences of patches with one label each."""

    def __init__(self, dataset: Dataset, indices: np.ndarray, patch_size: int, shape: tuple[int, ...]) -> None:
        self.dataset, self.indices, self.patch_size, self.shape = dataset, indices, patch_size, shape

    def __len__(self) -> int:
        return len(self.indices)

    def order(self, positions: np.ndarray, seed: int) -> np.ndarray:
        """A new permutation for each pass."""
        return shuffled(positions, len(self), seed)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The images with these numbers, `[B, T, values]`, and their labels `[B, 1]`.

        Raises:
            UserError: An image has another shape than the first one.
        """
        sequences, labels = [], []
        for index in self.indices[list(indices)].tolist():
            image, label = self.dataset[index]
            image = as_tensor(image)
            if image.shape != self.shape:
                raise UserError(
                    f"data.dataset: image {index} has the shape {tuple(image.shape)} and the first one {self.shape}; "
                    "all must have the same."
                )
            sequences.append(patches(image, self.patch_size))
            labels.append([int(label)])
        return Batch(torch.stack(sequences), torch.tensor(labels))
