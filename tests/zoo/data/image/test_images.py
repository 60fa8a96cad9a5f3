"""Images as sequences of patches, from data sets of several kinds."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from kernels import UserError
from tests.commands import Command
from tests.zoo.data.contract import some
from zoo.data import Digits, Images


class Pictures(Dataset):
    """Forty colour images of 6 × 4 pixels, as torchvision gives them: PIL images and labels."""

    def __init__(self, count: int = 40, seed: int = 0):
        pixels = np.random.default_rng(seed).integers(0, 256, (count, 6, 4, 3), dtype=np.uint8)
        self.images = [Image.fromarray(image) for image in pixels]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        return self.images[index], index % 3


class Grey(Pictures):
    def __getitem__(self, index: int):
        return self.images[index].convert("L"), index % 3


class Tensors(Pictures):
    def __getitem__(self, index: int):
        return torch.from_numpy(np.array(self.images[index])).permute(2, 0, 1) / 255, torch.tensor(index % 3)


class Ragged(Pictures):
    def __getitem__(self, index: int):
        return self.images[index].resize((4, 6 if index == 0 else 8)), 0


class Endless(Dataset):
    pass


@pytest.mark.parametrize(("dataset", "channels"), [(Pictures, 3), (Grey, 1), (Tensors, 3)])
def test_patches_are_read_row_by_row(dataset: type, channels: int):
    data = Images(dataset, patch_size=2)
    (batch,) = list(Images(dataset, patch_size=2, validation_fraction=0.5, batch_size=40).val_dataloader())
    assert batch.tokens.shape[1:] == (6, 4 * channels)
    assert batch.tokens.dtype == torch.float32
    assert batch.labels.shape == (len(batch.tokens), 1)
    assert (data.sequence_length, data.num_classes, data.get_tokenizer()) == (6, 3, None)
    first = np.array(dataset()[0][0]).reshape(6, 4, channels) if dataset is not Tensors else None
    index = int(np.flatnonzero(data.train.indices == 0)[0]) if 0 in data.train.indices else None
    if first is not None and index is not None:
        patches = data.train.batch([index]).tokens[0].view(3, 2, channels, 2, 2)
        expected = torch.from_numpy(first[2:4, 0:2]).permute(2, 0, 1) / 127.5 - 1
        torch.testing.assert_close(patches[1, 0], expected.float())  # second row, first column


def test_each_image_is_on_one_side_whatever_the_seed():
    one, other = (Images(seed=seed) for seed in (0, 1))
    assert np.array_equal(one.train.indices, other.train.indices)
    validation = sum(int((batch.labels >= 0).sum()) for batch in one.val_dataloader())
    assert validation + len(one.train) == len(Digits()) == 1797
    assert 0.17 < validation / 1797 < 0.23
    assert not torch.equal(some(one, 1)[0].tokens, some(other, 1)[0].tokens)


def test_digits_are_the_default():
    batch = some(Images(batch_size=64), 1)[0]
    assert batch.tokens.shape == (64, 16, 4)
    assert (batch.tokens.min(), batch.tokens.max()) == (-1, 1)
    assert Images().num_classes == 10
    assert len(set(batch.labels.flatten().tolist())) == 10


def test_a_data_set_of_its_own_for_tests():
    data = Images(Pictures, test_dataset=lambda: Pictures(7, seed=1), batch_size=7)
    (batch,) = list(data.test_dataloader())
    assert batch.labels.flatten().tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert torch.equal(next(iter(data.predict_dataloader())).tokens, next(iter(data.val_dataloader())).tokens)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"patch_size": 3}, "^data.patch_size is 3; it must divide both sides of the images, 8 and 8 pixels"),
        ({"patch_size": 0}, "^data.patch_size is 0; it must be at least 1"),
        ({"validation_fraction": 1.0}, "^data.validation_fraction is 1.0; it must be between 0 and 1"),
        ({"validation_fraction": 1e-9}, "^data.validation_fraction is 1e-09; it leaves none of the 1797 images"),
        ({"dataset": Endless}, "^data.dataset: Endless has no images by index"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: dict, message: str):
    with pytest.raises(UserError, match=message):
        Images(**arguments)


def test_images_of_several_sizes_are_refused():
    with pytest.raises(UserError, match=r"^data.dataset: image \d+ has the shape \(3, 8, 4\) and the first"):
        some(Images(Ragged), 1)


TINY = ("--trainer.max_steps=2", "--trainer.accelerator=cpu", "--trainer.limit_val_batches=1", "--model.hidden_size=32")


@pytest.mark.slow
def test_a_run_on_images_from_elsewhere(command: Command, desk: Path):
    (desk / "somewhere.py").write_text(
        "from tests.zoo.data.image.test_images import Pictures\nclass Mine(Pictures):\n    classes = ('a', 'b', 'c')\n"
    )
    mine = ("--data.dataset=somewhere.Mine", "--data.dataset.count=20", "--data.batch_size=4")
    done = command("fit", "--config", "image/digits.yaml", *TINY, *mine, "--model.inputs.channels=3", "--run", "mine")
    assert done.code == 0, done.err
    assert "accuracy" in done.out
    assert command("validate", "--checkpoint", "runs/mine", "--trust").code == 0
    command("predict", "--checkpoint", "runs/mine", "--output", "losses.jsonl", "--trust").ok()
    done = command("generate", "--checkpoint", "runs/mine", "--trust").refused()
    assert done.err == "error: generate: a model with the head Classifier labels sequences and predicts no tokens\n"
    done = command("evaluate", "--checkpoint", "runs/mine", "--tasks=passkey", "--trust").refused()
    assert done.err == "error: evaluate: a model with the head Classifier labels sequences and predicts no tokens\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model.head=null",), "model.head: null predicts tokens, but Images labels whole sequences; use Classifier"),
        (("--model.head.num_classes=9",), "model.head.num_classes: 9 are fewer than the 10 of the data"),
        (
            ("--model.inputs.channels=3",),
            "model.inputs: patches of 2 × 2 pixels with 3 channels have 12 values, but the data has 4 at each position",
        ),
        (("--model.inputs=null", "--model.vocab_size=9"), "inputs: null embeds tokens, but the data has numbers"),
        (("--data=TextData", "--model.inputs=null"), "model.head: Classifier labels whole sequences, but TextData has"),
        (
            ("--data=reproductions.listops.ListOps",),
            "model.inputs: patches of 2 × 2 pixels with 1 channels have 4 values, but the data has torch.int64 of ",
        ),
    ],
)
def test_parts_that_do_not_fit_are_named_in_one_sentence(options: tuple[str, ...], message: str, command: Command):
    assert command("fit", "--config", "image/digits.yaml", *TINY, *options).sentence().startswith(message)
