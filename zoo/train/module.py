"""Pretraining as a LightningModule: the loss, the metrics, and the contents of a checkpoint."""

import gc
import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, get_args

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelSummary, Timer
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.optim.lr_scheduler import LambdaLR

from kernels import is_deterministic
from kernels.core.documents import copied, tracked
from kernels.errors import UserError
from mixers import ContextParallel, TokenMixer, takes_context_parallel
from zoo.arguments import errors_about
from zoo.checkpoints.format import FORMAT, KEY, check_format, check_weights, load_weights
from zoo.checkpoints.signature import sign
from zoo.checkpoints.sources import Source, sources
from zoo.data.batch import NO_LOSS, Batch
from zoo.data.contract import as_batch, check_tokens, tokenizer_of
from zoo.data.gradient_accumulation import convert_batches, forget_unfinished, unfinished_batches
from zoo.data.resumable import ResumableData
from zoo.lm.classifier import Classifier
from zoo.lm.mlp import ChannelMixer
from zoo.train.agreement import check_same
from zoo.train.captured_passes import CapturedForward
from zoo.train.captured_step import CapturedStep
from zoo.train.devices import CopyStream
from zoo.train.distillation import Distillation, check_match
from zoo.train.history import Change, differences
from zoo.train.lightning_internals import (
    device_mesh,
    is_attached,
    is_logged_step,
    is_plain_ddp,
    logs_steps,
    number_rows_from,
)
from zoo.train.metrics import ContextLoss, TaskMeans, label_scores, summable, total_loss
from zoo.train.optim import (
    Optimisation,
    Schedule,
    build_optimizer,
    build_schedule,
    clip,
    freeze_others,
    total_norm,
    update_rates,
)
from zoo.train.partial_sums import PartialSums, add_processes
from zoo.train.trainer import write_whole

log = logging.getLogger(__name__)

# settings that are part of the optimiser's state
OF_OPTIMISER = ("optimizer", "train_only", "betas", "eps")
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW

# Lightning's callbacks that read no metrics
WITHOUT_METRICS = (GradientAccumulationScheduler, ModelSummary, Timer)


def best_precision(accelerator: str) -> str:
    """The fastest precision that is safe on an accelerator, `bf16-mixed` or `32-true`; all names are Lightning's."""
    on_gpu = accelerator in ("gpu", "cuda", "auto") and torch.cuda.is_available()
    return "bf16-mixed" if on_gpu and torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"


class Pretraining(L.LightningModule):
    """Next-token prediction with any language model of the zoo, or classification if the model has such a head.

    Args:
        model: tokens [B, T] → (logits [B, T, vocab], state); if it has methods `loss` and `token_losses`, training and
            evaluation use those.
        optim: Optimiser and schedule.
        tokenizer: Saved in the checkpoint, and used by callbacks that write samples; None takes the data module's.
        config: The resolved config as plain containers; saved in the checkpoint, so that the model can be rebuilt.
            None takes the model's, which `zoo.build` and `zoo.load` set.
        context_length: Positions over which the loss is divided into eight buckets; None takes the length of the
            first evaluated batch.
        tasks: Names of the evaluation data loaders, whose losses and accuracies are logged separately; empty for a
            single loader.
        extra_sets: Names of the loaders after those, whose losses are logged separately and are not part of the others.
        context_parallel: How many neighbouring processes share each sequence.
        distillation: The loss against a teacher; None for that of the labels.
        sequence_parts: Parts into which deterministic mode divides each sequence; None for one in each process that
            shares it.

    Attributes:
        sharing: The parts of each sequence and the processes that share it, set by `setup`; None for whole sequences.

    Raises:
        UserError: `context_parallel` is below 1, or does not divide `sequence_parts`, a power of two.
    """

    def __init__(
        self,
        model: nn.Module,
        optim: Optimisation,
        tokenizer: Any = None,
        config: dict[str, Any] | None = None,
        context_length: int | None = None,
        tasks: Sequence[str] = (),
        context_parallel: int = 1,
        extra_sets: Sequence[str] = (),
        distillation: Distillation | None = None,
        sequence_parts: int | None = None,
    ) -> None:
        super().__init__()
        if context_parallel < 1:
            raise UserError(f"context_parallel is {context_parallel}; it must be at least 1, for whole sequences.")
        if sequence_parts is not None and (not _is_power_of_two(sequence_parts) or sequence_parts % context_parallel):
            raise UserError(
                f"sequence_parts is {sequence_parts}; it must be a power of two and a multiple of context_parallel, "
                f"which is {context_parallel}."
            )
        self.model = model
        self.optim = optim
        self.tokenizer = tokenizer
        self.config = getattr(model, "config", None) if config is None else config
        self.context_length = context_length
        self.tokens_seen = 0  # by all processes, with padding; a Python number, so that nothing waits for a GPU
        self.resumed_at = 0  # steps of the checkpoint that the run is resumed from
        self.is_restoring = False  # from a checkpoint, until training starts
        self.sources: dict[str, Source] = {}  # files of the classes in the config that are not this project's
        self.changes: list[Change] = []  # of the config, since that checkpoint
        # highest rate and weight decay of each of the optimiser's groups, as the config has them
        self._built_groups: list[tuple[Any, float | None]] = []
        self.loss_by_position: list[float] = []
        self.context_loss = ContextLoss(context_length)
        self.tasks = list(tasks)
        self.accuracy = TaskMeans(len(self.tasks) or 1, torch.int64)
        self.task_loss = TaskMeans(len(self.tasks) or 1)
        self.extra_sets = list(extra_sets)
        self.extra_loss = TaskMeans(len(self.extra_sets) or 1)
        self.label_bytes = TaskMeans(1, torch.int64)  # bytes of the text that each label stands for
        self.context_parallel, self.sequence_parts = context_parallel, sequence_parts
        self.distillation = distillation
        self.captured: CapturedStep | None = None  # both set by the callback `CapturedSteps`
        self.captured_scores: CapturedForward | None = None
        self.sharing: ContextParallel | None = None
        self.train_loss: Tensor | None = None  # of the last step, in all processes; None if they did not exchange it
        self._gradient_norm: Tensor | None = None  # of the step in progress
        self._losses: Tensor | None = None  # of the step in progress: sum and count
        self._sums: PartialSums | None = None  # of its gradients, if deterministic mode adds them in a fixed order
        # losses of the parts of a micro-batch in deterministic mode, and copies of them, which `backward` derives first
        self._part_losses: list[tuple[Tensor, Tensor]] = []
        self._tokens_before_step = 0
        self._step_ends = True  # with the batch in progress
        self._metrics_are_read = True  # whether a callback may read metrics in each step, in any process
        self._unlabelled = False  # whether a batch had no labels; the first is reported
        self._copies: CopyStream | None = None  # of batches to the device
        self._token_bytes: Tensor | None = None  # of the text of each token; not a buffer, which DDP would send

    def setup(self, stage: str) -> None:
        """Prepare the model before a strategy shards or copies it.

        All processes are compared, sequences are shared if `context_parallel` says so, and initial weights are loaded.
        A data module's tokenizer is saved in checkpoints unless another one was given.

        Raises:
            UserError: Processes have different data, configs or code, context parallelism is not possible here, or the
                weights or the names to train do not fit.
        """
        if stage == "fit":
            self._check_parts()
        if is_attached(self):
            write_whole(self.trainer)  # also the checkpoints of a plain Trainer
            data = getattr(self.trainer, "datamodule", None)
            self.tokenizer = tokenizer_of(data) if self.tokenizer is None else self.tokenizer
            self._token_bytes = self._bytes_of_tokens()
            if stage == "fit":
                check_same(self.trainer, self.tokenizer, self.config)
                self.sources = sources(self.config)
        parts = self.sequence_parts if is_deterministic() and stage != "predict" else None
        parts = self.context_parallel if parts is None else parts
        if parts > 1 and self.sharing is None:
            self._check_context_parallel(stage)
            group = dist.new_subgroups(self.context_parallel)[0] if dist.is_initialized() else None
            self.sharing = ContextParallel(group, parts // self.context_parallel)
        if stage == "fit" and self.optim.initial_weights is not None:
            with errors_about("optim.initial_weights"):
                load_weights(self.model, self.optim.initial_weights)
        if stage == "fit" and self.distillation is not None:
            self._check_whole()
        train_only = self.optim.train_only
        if train_only is None and self.distillation is not None:
            train_only = self.distillation.train_only
        if stage == "fit" and train_only is not None:
            freeze_others(self.model, train_only)

    def _bytes_of_tokens(self) -> Tensor | None:
        """The bytes of each token of the model's vocabulary; None if labels are not tokens of such a tokenizer."""
        measure = getattr(self.tokenizer, "token_bytes", None)
        if measure is None or isinstance(getattr(self.model, "head", None), Classifier) or (sizes := measure()) is None:
            return None
        unused = max(getattr(self.model, "vocab_size", None) or 0, len(sizes)) - len(sizes)
        return nn.functional.pad(torch.from_numpy(sizes), (0, unused))

    def teardown(self, stage: str) -> None:
        """Let other processes receive what this one has sent."""
        if self.sharing is not None:
            self.sharing.finish()

    def configure_model(self) -> None:
        """Shard the parameters block by block if the strategy is Lightning's for FSDP2 (`zoo.train.fsdp2`)."""
        if device_mesh(self) is None or isinstance(self.model, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.layers:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        for method in ("loss", "token_losses"):  # called in place of `forward`
            if hasattr(self.model, method):
                register_fsdp_forward_method(self.model, method)

    def _check_whole(self) -> None:
        """Refuse to compare a model with a teacher layer by layer if processes have parts of its layers."""
        strategy = self.trainer.strategy if is_attached(self) else None
        zero_3 = isinstance(strategy, DeepSpeedStrategy) and strategy.zero_stage_3
        if self.sharing is not None or zero_3 or isinstance(strategy, FSDPStrategy | ModelParallelStrategy):
            name = type(strategy).__name__ if self.sharing is None else "context_parallel or sequence_parts"
            raise UserError(
                f"teacher: needs whole layers and sequences in each process (DDP, ZeRO 1 or 2), not {name}."
            )

    def _check_context_parallel(self, stage: str) -> None:
        number, trainer = self.context_parallel, self.trainer
        if stage == "predict":
            raise UserError("context_parallel: predict reads whole sequences; set context_parallel=1.")
        strategy = trainer.strategy
        sharded = isinstance(strategy, DeepSpeedStrategy) and strategy.zero_stage_3
        possible = number == 1 or isinstance(strategy, DDPStrategy | ModelParallelStrategy)
        if sharded or not possible or trainer.world_size % number:
            name = "ZeRO 3" if sharded else type(strategy).__name__
            raise UserError(
                f"context_parallel is {number}; it needs DDP, ZeRO 1 or 2, or FSDP2 (such as trainer.strategy=ddp), "
                f"and a multiple of {number} processes, not {trainer.world_size} with {name}."
            )
        if number > 1 and not isinstance(getattr(trainer, "datamodule", None), ResumableData):
            raise UserError("context_parallel: the data must be a ResumableData, whose neighbours get the same rows.")
        modules = list(self.model.modules())
        mixers = [part for part in modules if isinstance(part, TokenMixer)]
        mlps = [part for part in modules if isinstance(part, ChannelMixer) and part.stateful]
        for module in (*mixers, *mlps, self.model):
            if not takes_context_parallel(type(module)):
                raise UserError(f"context_parallel: {type(module).__name__} works on whole sequences only.")

    def _check_parts(self) -> None:
        """Refuse processes that cannot add gradients in the order of one process, and parts that nothing would add."""
        if (adds := self._adds_parts()) and not _is_power_of_two(count := self.trainer.world_size):
            raise UserError(
                f"deterministic_kernels: {count} processes cannot add the parts of a step in the order of one process; "
                "use a power of two, or deterministic_kernels=false."
            )
        if self.sequence_parts is not None and not adds:
            raise UserError(
                f"sequence_parts is {self.sequence_parts}; it needs deterministic_kernels=true, and one process or "
                "trainer.strategy=ddp."
            )

    def _adds_parts(self) -> bool:
        """Return whether gradients of the parts of a step are added in a fixed order, instead of by the strategy."""
        strategy: Any = self.trainer.strategy if is_attached(self) else None
        return is_deterministic() and (isinstance(strategy, SingleDeviceStrategy) or is_plain_ddp(strategy))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As in PyTorch, but a checkpoint of another model raises a UserError of one sentence."""
        if strict:
            check_weights(state_dict, self, "the checkpoint")
        return super().load_state_dict(state_dict, strict, assign)

    def forward(
        self, tokens: Tensor, cu_seqlens: Tensor | None = None, context_parallel: ContextParallel | None = None
    ) -> Tensor:
        """Logits [B, T, vocab] of tokens [B, T]."""
        shared = {} if context_parallel is None else {"context_parallel": context_parallel}
        return self.model(tokens, cu_seqlens=cu_seqlens, **shared)[0]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Batch:
        """Move a batch of any data module to the device, as a `Batch`."""
        batch = as_batch(batch)
        if getattr(self.model, "head", None) is None and (vocab_size := getattr(self.model, "vocab_size", None)):
            check_tokens(batch, vocab_size)
        # on a GPU already, the answer would have to be waited for
        if self.trainer.training and not self._unlabelled and batch.labels.device.type == "cpu":
            self._unlabelled = not (batch.labels != NO_LOSS).any()
            if self._unlabelled:
                log.warning("data: a batch has no label but %d, so that nothing is learned from it", NO_LOSS)
        if self._copies is None:
            self._copies = CopyStream(device)
        move = partial(super().transfer_batch_to_device, batch, device, dataloader_idx)
        moved = self._copies.copied(batch, move)
        if batch.cu_seqlens is not None and moved.cu_seqlens is not None:
            copied(moved.cu_seqlens, batch.cu_seqlens)
        return moved

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean loss over the labelled tokens of the batch, in nats.

        It also logs `train_loss`, the mean over the whole step in all processes.
        """
        tokens = batch.tokens.shape[:2].numel() * self.trainer.world_size // self.context_parallel
        if self._sums is not None:
            loss, total, count = self._losses_of_parts(batch)
        elif self.captured is None:
            loss, total, count = self.losses(batch.tokens, batch.labels, batch.cu_seqlens)
        else:
            first = batch_idx % self.trainer.accumulate_grad_batches == 0
            loss, total, count = self.captured(batch.tokens, batch.labels, cu_seqlens=batch.cu_seqlens, first=first)
        self.tokens_seen += tokens  # a patch of an image is one
        self._step_ends = self.trainer.is_last_batch or (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0
        self._log_loss(total, count)
        self.log("tokens", self.tokens_seen)
        self.log("learning_rate", self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def losses(self, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The mean loss over the labelled tokens, by which the model is trained; its sum, and their number.

        With context parallelism, processes get whole sequences, and sum and number are those of this process's part.
        """
        ((batch, part),) = self._local_parts(Batch(tokens, labels, cu_seqlens))
        total, count = self._total_loss(batch, part), (batch.labels != NO_LOSS).sum()
        loss = total / count.clamp(min=1) if part is None else part.mean(total, count)
        return loss, total.detach(), count

    def _total_loss(self, batch: Batch, part: ContextParallel | None) -> Tensor:
        """Sum of the losses by which the model is trained."""
        if self.distillation is None:
            return total_loss(self.model, *batch, part)
        return self.distillation.total_loss(self.model, *batch)  # type: ignore[arg-type]

    def _losses_of_parts(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """As `losses`, with a separate backward pass for each part of the sequences, which `backward` runs.

        The mean of the loss over all processes is the mean loss. Sum and number are in fp64, without rounding errors.
        """
        labelled, parts = (batch.labels != NO_LOSS).sum(), self._local_parts(batch)
        totals = [self._total_loss(*each) for each in parts]
        means = [total / labelled.clamp(min=1) for total in totals]
        self._part_losses = [(mean, mean.detach().requires_grad_()) for mean in means]
        loss = self.context_parallel * torch.stack([copied for _, copied in self._part_losses]).sum()
        count = torch.stack([(own.labels != NO_LOSS).sum() for own, _ in parts]).sum()
        return loss, summable(torch.stack(totals).detach()).sum(), count

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients; in deterministic mode those of each part alone, added in a fixed order."""
        super().backward(loss, *args, **kwargs)
        if self._sums is None:
            return
        parameters, parts = [p for p in self.model.parameters() if p.requires_grad], PartialSums()
        while self._part_losses:  # each hands the gradients of its first state to the part before
            own, copied = self._part_losses.pop()
            assert copied.grad is not None
            own.backward(copied.grad / self.trainer.world_size)
            parts.add([parameter.grad for parameter in parameters])
            for parameter in parameters:
                parameter.grad = None
        self._sums.add(add_processes(parts.take(), parameters))
        if self._step_ends:
            for parameter, gradient in zip(parameters, self._sums.take(), strict=True):
                parameter.grad = gradient

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """As in Lightning, also for callbacks; a Python number stays on the host, to avoid waiting for the device.

        Lightning spends more time on a number than many kernels take. Between logged steps it gets a number only if a
        callback may read it, or if it is to average it over an epoch.
        """
        averaged = kwargs.get("on_epoch") or len(args) > 3
        if isinstance(value, int | float) and not averaged and self._is_between_logs():
            return
        value = torch.tensor(value, dtype=torch.float64) if isinstance(value, int | float) else value
        super().log(name, value, *args, **kwargs)

    def _is_between_logs(self) -> bool:
        """Return whether a training step is in progress whose metrics nothing reads."""
        trainer = self.trainer
        if not trainer.training or self._metrics_are_read or not logs_steps(self):
            return False
        return not (trainer.global_step + 1 >= trainer.max_steps > 0 or is_logged_step(trainer))

    def on_train_start(self) -> None:
        """Discard the losses of an interrupted step, set learning rates, and look for callbacks that read metrics."""
        for optimizer in self.trainer.optimizers if self.is_restoring else ():
            for parameter, state in optimizer.state.items():
                shapes = [tuple(state[name].shape) for name in MOMENTS if name in state]
                if any(shape != parameter.shape for shape in shapes):  # fused kernels would write beyond its end
                    raise ValueError(f"moments of the optimiser have shapes {shapes}, not {tuple(parameter.shape)}")
        self.is_restoring = False
        self._losses, self._sums = None, PartialSums() if self.captured is None and self._adds_parts() else None
        if self._sums is not None and self.trainer.world_size > 1:
            self.trainer.strategy.model = self  # without DDP, which averages the gradients in another order
            gc.collect()  # DDP is part of a reference cycle
        if isinstance(self.optim.schedule, str) and isinstance(schedule := self.lr_schedulers(), LambdaLR):
            update_rates(schedule, self._built_groups)
        reads = any(map(_may_read_metrics, (self, *self.trainer.callbacks)))
        self._metrics_are_read = self.trainer.strategy.reduce_boolean_decision(reads, all=False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Note the token count at the start of a step."""
        if unfinished_batches(self.trainer) == 1:  # this one
            self._tokens_before_step = self.tokens_seen
            # after a resume Lightning may be off by one, depending on the hook that saved the checkpoint
            number_rows_from(self.trainer, self.trainer.global_step)

    def _log_loss(self, total: Tensor, count: Tensor) -> None:
        """Log the mean over all labelled tokens of the optimiser step: all its batches, all processes.

        Processes wait for each other here, so several do it at logged steps only, unless a callback may read it.
        """
        trainer, losses = self.trainer, torch.stack([total, count.to(total.dtype)])
        self._losses = losses if self._losses is None else self._losses + losses
        if not self._step_ends:
            return
        losses, self._losses, self.train_loss = self._losses, None, None
        if trainer.world_size > 1:
            interval = trainer.log_every_n_steps
            if not self._metrics_are_read and (not interval or (trainer.global_step + 1) % interval):
                return
            dist.all_reduce(losses)
        self.train_loss = losses[0] / losses[1].clamp(min=1)
        self.log("train_loss", self.train_loss)  # with prog_bar=True, Lightning would wait for the device in each step

    def _local_parts(self, batch: Batch) -> list[tuple[Batch, ContextParallel | None]]:
        """The parts of a batch that this process computes, and where each is; None if that is all of it."""
        if batch.cu_seqlens is not None:  # a validation in inference mode moves it to the device there
            batch = batch._replace(cu_seqlens=tracked(batch.cu_seqlens))
        if self.sharing is None:
            return [(batch, None)]
        parts = self.sharing.all_of(batch.tokens.shape[1], batch.cu_seqlens)
        return [(Batch(part.take(batch.tokens), part.take(batch.labels), part.cu_seqlens), part) for part in parts]

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Negative log-likelihood of each label in nats, fp32, in the shape of labels; nan without a label."""
        losses, _ = label_scores(self.model, batch.tokens, batch.labels, batch.cu_seqlens)
        return losses.masked_fill(batch.labels == NO_LOSS, float("nan"))

    def on_validation_epoch_start(self) -> None:
        """Discard what an interrupted evaluation may have left."""
        for metric in (self.context_loss, self.accuracy, self.task_loss, self.extra_loss, self.label_bytes):
            metric.reset()
        if self._token_bytes is not None:
            self._token_bytes = self._token_bytes.to(self.device)

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add a batch to the metrics of a validation or test."""
        for own, part in self._local_parts(batch):
            self._validate(own, part, dataloader_idx)

    def _validate(self, batch: Batch, part: ContextParallel | None, dataloader_idx: int) -> None:
        labels, task = batch.labels, dataloader_idx if self.tasks else 0
        # labels of packed sequences: their number changes from batch to batch
        of_sequences = batch.cu_seqlens is not None and labels.shape != batch.tokens.shape
        if self.captured_scores is None or of_sequences:
            losses, correct = label_scores(self.model, batch.tokens, labels, batch.cu_seqlens, part)
        else:
            losses, correct = self.captured_scores(batch.tokens, labels, cu_seqlens=batch.cu_seqlens)
        if self.extra_sets and (number := dataloader_idx - (len(self.tasks) or 1)) >= 0:
            self.extra_loss.update(losses, labels, number)
            return
        if self._token_bytes is not None:
            self.label_bytes.update(self._token_bytes[labels.clamp(min=0)], labels)
        self.accuracy.update(correct, labels, task)
        self.task_loss.update(losses, labels, task)
        bounds = batch.cu_seqlens
        if batch.labels.shape[1] != batch.tokens.shape[1]:  # the label of a whole sequence has no position in it
            losses, labels, bounds = losses.view(-1, 1), labels.reshape(-1, 1), None
        self.context_loss.update(losses, labels, bounds, part)

    test_step = validation_step

    def _log_evaluation(self, prefix: str) -> None:
        """Log the loss, its perplexity, the loss by position, and loss and accuracy by task."""
        (mean_loss, by_position), (accuracy, by_task) = self.context_loss.compute(), self.accuracy.compute()
        _, loss_by_task = self.task_loss.compute()
        loaders = self.trainer.num_test_batches if prefix == "test" else self.trainer.num_val_batches
        with_extra = self.extra_sets and len(loaders) > (len(self.tasks) or 1)  # a test may be without them
        extra_losses = self.extra_loss.compute()[1] if with_extra else None
        mean_bytes = None if self._token_bytes is None else self.label_bytes.compute()[0]
        self.on_validation_epoch_start()
        self.loss_by_position = by_position.tolist()
        self.log(f"{prefix}_loss", mean_loss, prog_bar=True)
        self.log(f"{prefix}_perplexity", mean_loss.exp())
        if mean_bytes is not None:  # ends of documents have a loss and no bytes: it is the cost of the documents
            self.log(f"{prefix}_bits_per_byte", mean_loss / (mean_bytes * math.log(2)))
        for number, loss in enumerate(by_position, start=1):
            self.log(f"{prefix}_loss_position_{number}", loss)
        shown = bool(self.tasks) or isinstance(getattr(self.model, "head", None), Classifier)
        self.log(f"{prefix}_accuracy", accuracy, prog_bar=shown)
        # torchmetrics squeezes a single value
        for name, loss, value in zip(self.tasks, loss_by_task.view(-1), by_task.view(-1), strict=False):
            self.log(f"{prefix}_loss_{name}", loss)
            self.log(f"{prefix}_accuracy_{name}", value)
        if extra_losses is not None:
            for name, loss in zip(self.extra_sets, extra_losses.view(-1), strict=True):
                self.log(f"{prefix}_loss_{name}", loss)
        self.log("tokens", self.tokens_seen)

    def configure_optimizers(self) -> dict[str, Any]:
        """The optimiser, and its learning-rate schedule, stepped with it.

        The length of the run is `trainer.max_steps`, or what `trainer.max_epochs` comes to if that is less.
        """
        if (self.trainer.max_epochs or -1) > 0:  # everything here counts steps
            self.trainer.fit_loop.epoch_loop.max_steps = int(self.trainer.estimated_stepping_batches)
        sharding = (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)
        optimizer = build_optimizer(self.model, self.optim, isinstance(self.trainer.strategy, sharding))
        schedule = build_schedule(optimizer, self.optim, self.trainer.max_steps)
        self._built_groups = [(g.get("initial_lr", g["lr"]), g.get("weight_decay")) for g in optimizer.param_groups]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Log the total gradient norm, then clip it to `optim.gradient_clip`.

        A strategy that holds the gradients itself (DeepSpeed) leaves none here, and does the clipping.
        """
        if gradient_clip_val is not None:
            raise UserError(f"trainer.gradient_clip_val is {gradient_clip_val}: set optim.gradient_clip instead.")
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        if parameters:
            norm = self.gradient_norm()
            if not self._is_between_logs():
                self.log("gradient_norm", norm)
            if self.optim.gradient_clip is not None and self.captured is not None:
                self.captured.clip(self.optim.gradient_clip, norm)
            elif self.optim.gradient_clip is not None:
                clip(parameters, self.optim.gradient_clip, norm)
        self._gradient_norm = None

    def gradient_norm(self) -> Tensor:
        """Total norm of the gradients before clipping, a scalar; computed once per step and cached."""
        if self._gradient_norm is None and self.captured is not None:
            self._gradient_norm = self.captured.gradient_norm()
        elif self._gradient_norm is None:
            self._gradient_norm = total_norm(p.grad for p in self.model.parameters() if p.grad is not None)
        return self._gradient_norm

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what rebuilding the model and resuming need; plain containers only."""
        forget_unfinished(self.trainer, checkpoint["loops"])
        in_step = unfinished_batches(self.trainer) > 0
        checkpoint[KEY] = {
            "format": FORMAT,
            "config": self.config,
            "signature": sign(self.config),
            "tokenizer": None if self.tokenizer is None else self.tokenizer.to_json(),
            "tokens_seen": self._tokens_before_step if in_step else self.tokens_seen,
        }
        if self.sources:
            checkpoint[KEY]["sources"] = {path: source.hash for path, source in self.sources.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint that this project did not write, and restore the token count."""
        check_format(checkpoint)
        if is_attached(self) and self.trainer.state.fn == "fit":
            self.is_restoring = True
            saved = checkpoint[KEY].get("config")
            self.resumed_at, tokens = checkpoint["global_step"], checkpoint[KEY].get("tokens_seen", 0)
            self.check_continued(saved, self.resumed_at, self.trainer.max_steps)
            if "trainer" in (saved or {}):
                convert_batches(self.trainer, checkpoint["loops"], saved["trainer"]["accumulate_grad_batches"] or 1)
            changed = differences(saved, self.config) if saved and self.config else ()
            kept = [each for each in changed if each[0] != "optim.initial_weights"]
            self.changes = [Change(self.resumed_at, tokens, *each) for each in kept]
        self.tokens_seen = checkpoint[KEY].get("tokens_seen", 0)

    def check_continued(self, config: dict[str, Any] | None, step: int, max_steps: int) -> None:
        """Raise a UserError unless a run with this config, saved after `step` steps, can be continued by this one."""
        self._check_data(config)
        self._check_optimiser(config)
        check_match(self.config, config)
        if 0 < max_steps < step:
            raise UserError(
                f"trainer.max_steps: {max_steps} is below step {step}, which the run has reached; a number above "
                f"{step} trains it further"
            )

    def _check_data(self, config: dict[str, Any] | None) -> None:
        """Refuse a data module of another class: Lightning would silently start it from the beginning."""
        paths = ((side or {}).get("data", {}).get("class_path", "") for side in (self.config, config))
        current, saved = (path.rpartition(".")[2] for path in paths)  # Lightning finds its state by this name
        if current and saved and current != saved:
            raise UserError(
                f"data is {current}, but the checkpoint was trained with {saved}; "
                "resume with the checkpoint's data settings, or start a new run."
            )

    def _check_optimiser(self, config: dict[str, Any] | None) -> None:
        """Refuse what the optimiser's state in the checkpoint does not fit, or would silently override."""
        current, saved = ((side or {}).get("optim", {}) for side in (self.config, config))
        by_step = all(side.get("schedule") in get_args(Schedule) for side in (current, saved))
        # a schedule that is a class keeps rates in its state
        for key in (*OF_OPTIMISER, "schedule", "learning_rate", "weight_decay"):
            now, before = current.get(key), saved.get(key)
            ours = key in ("schedule", "learning_rate", "weight_decay") and by_step
            if key in current and key in saved and now != before and not ours:
                names = [_named(value) for value in (now, before)]
                now, before = names if names[0] != names[1] else (now, before)
                raise UserError(
                    f"optim.{key} is {now}, but the checkpoint was trained with {before}; resume with that, or start a "
                    "new run from its weights, by optim.initial_weights."
                )


def _may_read_metrics(part: object) -> bool:
    """Return whether a callback or module is neither this project's nor one of Lightning's that reads no metrics."""
    ours = type(part).__module__.partition(".")[0] == __name__.partition(".")[0]
    return not ours and type(part) not in WITHOUT_METRICS


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _named(part: Any) -> Any:
    """Return the name of a part in a config: its class, if it is one."""
    return part["class_path"] if isinstance(part, dict) else "null" if part is None else part
