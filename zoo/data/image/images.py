"""Images to classify, as sequences of patches, and as the data of a run; by default the digits of scikit-learn, which
downloads nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from xxhash import xxh3_128

from kernels.errors import UserError
from zoo.data.batch import Batch
from zoo.data.loader import ValidationLoader
from zoo.data.order import random_bits, shuffled
from zoo.data.resumable import ResumableData, check_minimum


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


_SPLIT = 0x1A6E5  # of the hash that divides images, for all seeds the same
_SAMPLED = 16  # images that stand for all of them in the identity of the data


@dataclass(eq=False, repr=False)
class Images(ResumableData):
    """Images of any torchvision-style data set as sequences of patches, row by row, to be classified.

    The model needs `inputs` such as Patches, of the same size of patches and number of channels, and a head that
    classifies sequences. A data set that has to be downloaded is best downloaded before a run on several devices.

    Args:
        dataset: The data set, a class with `len` and (image, label) by index, such as torchvision.datasets.CIFAR10 with
            `init_args: {root: data, download: true}`, or a function that is annotated to return a Dataset. By default
            the digits of scikit-learn.
        test_dataset: The data set for `test`, such as the same with `train: false`; null: the validation images.
        patch_size: Height and width of a patch in pixels; it must divide those of the images.
        validation_fraction: Expected fraction of the images kept for validation, chosen by a hash of their indices.
        batch_size: Images in a batch, over all devices; a multiple of the number of devices.
        num_workers: Worker processes per device that prefetch batches; 0: none.
        seed: Seed of the order of the training images.

    Raises:
        UserError: An argument is out of range, the data set cannot be used, or a checkpoint is of other data.
    """

    overfit_hint = "name a small data set as data.dataset"
    vocab_size = None  # patches are no tokens

    dataset: Callable[[], Dataset] = Digits
    test_dataset: Callable[[], Dataset] | None = None
    patch_size: int = 2
    validation_fraction: float = 0.2
    batch_size: int = 32
    num_workers: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__init__(self.batch_size, self.num_workers, self.seed)
        check_minimum(patch_size=(self.patch_size, 1))
        if not 0 < self.validation_fraction < 1:
            raise UserError(f"data.validation_fraction is {self.validation_fraction}; it must be between 0 and 1.")
        self._images = cast(Any, self.dataset())
        self._name = type(self._images).__name__
        self._shape = self._checked_shape()
        self.sequence_length = self._shape[1] * self._shape[2] // self.patch_size**2
        share = random_bits(np.arange(len(self._images)), 1, _SPLIT)[:, 0] / 2.0**64
        self._is_validation = share < self.validation_fraction
        if self._is_validation.all() or not self._is_validation.any():
            raise UserError(
                f"data.validation_fraction is {self.validation_fraction}; it leaves none of the {len(self._images)} "
                "images to train on, or none to validate."
            )

    def _checked_shape(self) -> tuple[int, int, int]:
        if not (hasattr(self._images, "__len__") and hasattr(self._images, "__getitem__") and len(self._images)):
            raise UserError(f"data.dataset: {self._name} has no images by index; it needs `len` and (image, label).")
        shape = tuple(as_tensor(self._images[0][0]).shape)
        if len(shape) != 3:
            raise UserError(f"data.dataset: {self._name} has images of shape {shape}; height and width are needed.")
        if shape[1] % self.patch_size or shape[2] % self.patch_size:
            raise UserError(
                f"data.patch_size is {self.patch_size}; it must divide both sides of the images, "
                f"{shape[1]} and {shape[2]} pixels."
            )
        return shape

    @cached_property
    def num_classes(self) -> int:
        """Return the length of the data set's `classes`, or else the largest label plus one."""
        classes = getattr(self._images, "classes", None)
        if classes is not None:
            return len(classes)
        return 1 + max(int(self._images[index][1]) for index in range(len(self._images)))

    @property
    def train(self) -> PatchedImages:
        """The training images, in order."""
        return self._some(self._images, np.flatnonzero(~self._is_validation))

    def val_dataloader(self) -> ValidationLoader:
        """The images kept for validation."""
        return self.evaluation_loader(self._some(self._images, np.flatnonzero(self._is_validation)))

    def test_dataloader(self) -> ValidationLoader:
        """The images of `test_dataset`, or else those of validation."""
        if self.test_dataset is None:
            return self.val_dataloader()
        images: Any = self.test_dataset()
        return self.evaluation_loader(self._some(images, np.arange(len(images))))

    def _some(self, images: Any, indices: np.ndarray) -> PatchedImages:
        return PatchedImages(images, indices, self.patch_size, self._shape)

    def identity(self) -> dict[str, Any]:
        """All that determines which sample is at a position; some images stand for all of the data set."""
        names = ("seed", "patch_size", "validation_fraction")
        return {"dataset": self._described, **{name: getattr(self, name) for name in names}}

    @cached_property
    def _described(self) -> str:
        number, digest = len(self._images), xxh3_128()
        for index in np.linspace(0, number - 1, _SAMPLED).astype(int).tolist():
            image, label = self._images[index]
            digest.update(as_tensor(image).contiguous().numpy().tobytes() + str(int(label)).encode())
        return f"{self._name} of {number} images (hash {digest.hexdigest()[:8]})"
