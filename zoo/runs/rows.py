"""Rows of a step: divided among devices and micro-batches, and counted in tokens."""

import torch
from jsonargparse import Namespace

from kernels import UserError, is_deterministic


def device_count(trainer: Namespace) -> int:
    """Return the number of devices that `trainer` chooses, on all machines; 1 for a value that Lightning refuses."""
    devices = str(trainer.devices)
    if devices in ("auto", "-1"):
        here = 1 if trainer.accelerator == "cpu" else torch.cuda.device_count()
    elif "," in devices or "[" in devices:
        here = len([part for part in devices.strip("[]").split(",") if part.strip()])
    else:
        here = int(devices) if devices.isdecimal() else 1
    return max(here, 1) * int(trainer.num_nodes or 1)


def check_rows(config: Namespace, devices: int) -> None:
    """Refuse a `data.batch_size` or `context_parallel` that these devices cannot share equally.

    Raises:
        UserError: One of them is not a multiple.
    """
    shared, rows = config.context_parallel, config.data.get("init_args", Namespace()).get("batch_size")
    if devices % shared:
        raise UserError(
            f"context_parallel: {shared} needs a multiple of {shared} devices, not {devices}, and DDP or FSDP2"
        )
    if rows is not None and rows % (groups := devices // shared):
        of = f"the number of devices, {groups}" if shared == 1 else f"the {groups} groups of {shared} devices"
        raise UserError(f"data.batch_size: {rows} counts the rows of all devices, so it must be a multiple of {of}")


def divide_step(config: Namespace, devices: int) -> None:
    """Replace `rows_per_device` by `data.batch_size` and `trainer.accumulate_grad_batches` for these devices.

    `trainer.val_check_interval` counts steps before and micro-batches after it.

    Raises:
        UserError: It is below 1, the data has no `batch_size`, gradients are accumulated already, or, in deterministic
            mode, the rows of a device are not a multiple of it.
    """
    if (limit := config.rows_per_device) is None:
        return
    data, trainer = config.data.get("init_args", Namespace()), config.trainer
    rows = data.get("batch_size")
    if limit < 1 or rows is None:
        raise UserError(f"rows_per_device: {limit} must be 1 or more, or null, for data with a batch_size")
    if (trainer.accumulate_grad_batches or 1) > 1:
        raise UserError(
            f"rows_per_device: {limit} chooses the number of micro-batches, and trainer.accumulate_grad_batches is "
            f"{trainer.accumulate_grad_batches}; set one of them to null"
        )
    config.rows_per_device = None
    groups = max(devices // config.context_parallel, 1)
    share, rest = divmod(rows, groups)
    if rest or not share:
        return
    mode = config.deterministic_kernels
    if (is_deterministic() if mode is None else mode) and share % limit:
        raise UserError(
            f"rows_per_device: {limit} must divide the {share} rows of a device in deterministic mode, so that "
            "micro-batches are the same for every number of devices"
        )
    parts = next(number for number in range(1, share + 1) if share % number == 0 and share // number <= limit)
    data.batch_size, trainer.accumulate_grad_batches = rows // parts, parts
    if isinstance(trainer.val_check_interval, int):
        trainer.val_check_interval *= parts


def tokens_per_step(config: Namespace) -> int | None:
    """Return the tokens of an optimiser step; None if the data has no rows of a fixed length."""
    data = config.data.get("init_args", Namespace())
    rows, length = data.get("batch_size"), data.get("sequence_length")
    return None if rows is None or length is None else rows * length * (config.trainer.accumulate_grad_batches or 1)
