"""Saved models as lm-eval's model `zoo`: `--model zoo --model_args checkpoint=runs/first`."""

import logging
from pathlib import Path

import torch
from lm_eval.api.registry import register_model

from zoo.evaluation.lm_eval.model import SubjectLM
from zoo.evaluation.loaded import load_subject
from zoo.train.devices import pick_device

log = logging.getLogger(__name__)


@register_model("zoo")
class CheckpointLM(SubjectLM):
    """A run, a .ckpt file or an exported folder.

    Args:
        checkpoint: Its path, as for `zoo.load`.
        device: Such as `cpu` or `cuda:1`; None for a GPU if there is one.
        bf16: Whether to compute under autocast to bf16; None for where a GPU does.
        batch_tokens: Tokens in a batch, as for `zoo.evaluate`.
        batch_size, max_batch_size: What lm-eval's command line always passes. They have no effect, as batches are made
            by tokens; the log says so of a size above 1.
        max_length: As for `SubjectLM`.
        trust: As for `zoo.load`.

    Raises:
        UserError: As for `zoo.load` and `SubjectLM`.
    """

    def __init__(
        self,
        checkpoint: str,
        device: str | None = None,
        bf16: bool | None = None,
        batch_tokens: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        trust: bool = False,
    ) -> None:
        if batch_size not in (None, 1, "1", "auto"):
            log.warning("batch_size %s has no effect: batches are made by tokens, batch_tokens=…", batch_size)
        where = pick_device(device and device.partition(":")[0])
        if bf16 is None:
            bf16 = where.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        subject = load_subject(checkpoint, Path(checkpoint).name, bf16, batch_tokens, trust)
        subject.to(device or where)
        super().__init__(subject, max_length)
