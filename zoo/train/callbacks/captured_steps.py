"""`cuda_graph`: training steps are captured as CUDA graphs and replayed."""

import gc
import logging
import os
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from kernels import is_deterministic
from mixers import ContextParallel
from zoo.data.batch import Batch
from zoo.generation.cuda_graph import Recorder, hooked_module, no_graphs
from zoo.lm.classifier import Classifier
from zoo.train.adamw import AdamW
from zoo.train.callbacks.activation_checkpointing import CheckpointedBlocks
from zoo.train.captured_memory import GradientAverage
from zoo.train.captured_passes import CapturedForward
from zoo.train.captured_step import CapturedStep
from zoo.train.lightning_internals import is_plain_ddp
from zoo.train.metrics import label_scores
from zoo.train.muon import Muon

log = logging.getLogger(__name__)

HOOKS = (  # of callbacks and modules, within a step
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
)


class CapturedSteps(Callback):
    """Captures the parts of a training step as CUDA graphs at the first step, and replays them from then on.

    Losses and parameters are the same to the bit, and so are checkpoints: a run may be continued with or without. Hooks
    of callbacks run as usual, between the replays. Where a run cannot be captured it runs eagerly, and the log says why
    in one line.

    Args:
        recorder: Captures the parts, on any device; None for CUDA graphs.
        automatic: Whether a run without a GPU is silently eager, and a run with other hooks within a step is eager.
    """

    order = 97  # after callbacks that replace the forward functions of blocks, and those that compile kernels

    def __init__(self, recorder: Recorder | None = None, *, automatic: bool = False) -> None:
        self._recorder, self._automatic = recorder, automatic

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Set up the capture, unless this run cannot be captured."""
        reason = no_graphs(pl_module.device) if self._recorder is None else None
        if reason is not None and self._automatic:
            return
        unless_requested = only_on_request(trainer) if self._automatic else None
        reason = reason or obstacle(trainer, pl_module.model) or unless_requested
        # a process that replays and one that does not would wait for different messages
        if trainer.world_size > 1 and dist.is_initialized():
            reason = ContextParallel().first_reason(reason)
        if reason is not None:
            log.warning("cuda_graph: the training step runs eagerly: %s", reason)
            return
        recomputes = any(isinstance(callback, CheckpointedBlocks) for callback in trainer.callbacks)

        def losses(tokens: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, ...]:
            with trainer.precision_plugin.train_step_context():
                return pl_module.losses(tokens, labels, cu_seqlens)

        def scores(tokens: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, ...]:
            with trainer.precision_plugin.val_step_context():
                return label_scores(pl_module.model, tokens, labels, cu_seqlens, every_token=True)

        recorder = Recorder(pl_module.device) if self._recorder is None else self._recorder
        parameters = list(pl_module.model.parameters())
        average = None
        if trainer.world_size > 1:
            # without DDP, whose buckets need memory, and whose nodes of autograd are on a stream of their own
            trainer.strategy.model = pl_module
            gc.collect()  # DDP is part of a reference cycle
            average = GradientAverage()
        captured = CapturedStep(losses, parameters, recorder, average, pl_module.sharing, may_draw=not recomputes)
        pl_module.captured, (optimizer,) = captured, trainer.optimizers
        if pl_module.sharing is None:
            pl_module.captured_scores = CapturedForward(scores, parameters, recorder, captured.forget)
        if isinstance(optimizer, AdamW | Muon):
            optimizer.replay = partial(captured.update, optimizer)
        else:
            name = type(optimizer).__name__
            log.warning("cuda_graph: the update of %s runs eagerly; forward and backward passes are captured", name)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Batch, batch_idx: int) -> None:
        """Capture the passes if that is not done; give up if each of the packed sequences has one label."""
        if pl_module.captured is None:
            return
        if batch.cu_seqlens is not None and isinstance(getattr(pl_module.model, "head", None), Classifier):
            self.teardown(trainer, pl_module)
            if trainer.world_size > 1:
                trainer.strategy.configure_ddp()
            log.warning("cuda_graph: the training step runs eagerly: the number of labels is that of packed sequences")
            return
        first = batch_idx % trainer.accumulate_grad_batches == 0
        pl_module.captured.prepare(batch.tokens, batch.labels, cu_seqlens=batch.cu_seqlens, first=first)

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str = "fit") -> None:
        """Drop the graphs and their memory."""
        if pl_module.captured is None:
            return
        pl_module.captured = pl_module.captured_scores = None
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, AdamW | Muon):
                optimizer.replay = None
        gc.collect()  # parts of a step refer to each other, and NCCL waits for its graphs when a process ends

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        self.teardown(trainer, pl_module)


def obstacle(trainer: L.Trainer, model: nn.Module) -> str | None:
    """Return why the training steps of a run cannot be captured; None if that has to be tried."""
    if not isinstance(trainer.strategy, SingleDeviceStrategy) and not is_plain_ddp(trainer.strategy):
        return f"{type(trainer.strategy).__name__} exchanges more between processes than the gradients of a step"
    parts = trainer.world_size * trainer.accumulate_grad_batches if is_deterministic() else 1
    if parts > 1 or (is_deterministic() and trainer.lightning_module.sharing is not None):
        return "deterministic mode adds the gradients of the parts of a step in a fixed order"
    if trainer.world_size > 1 and registers_segments():
        return "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True with several processes requires NCCL_GRAPH_REGISTER=0"
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return f"trainer.precision={trainer.precision_plugin.precision} scales the loss on the host; use bf16-mixed"
    if torch.is_anomaly_enabled():
        return "trainer.detect_anomaly reads every gradient on the host"
    if (hooked := hooked_module(model)) is not None:
        return f"{hooked} has a hook, which a replay would not call"
    return None


def registers_segments() -> bool:
    """Return whether NCCL would register expandable segments that graphs use, which leads to illegal accesses."""
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    return "expandable_segments:True" in settings and os.environ.get("NCCL_GRAPH_REGISTER") != "0"


def only_on_request(trainer: L.Trainer) -> str | None:
    """Return why steps are captured with `cuda_graph: true` only; None if null captures them, too."""
    for part in (*trainer.callbacks, trainer.lightning_module):
        for name in HOOKS:
            method = getattr(part, name, None)
            if getattr(method, "__module__", "").partition(".")[0] not in ("", "lightning", __name__.partition(".")[0]):
                return f"{type(part).__name__}.{name} is called within it; cuda_graph: true calls it between replays"
    return None
