"""DeepSpeed's engine with the checkpoints of `zoo.train.zero.Zero`. Importing this module imports DeepSpeed.

It overrides private methods of the engine (tried with DeepSpeed 0.19); `tests/test_deepspeed.py` fails if they change.
"""

from collections.abc import Callable, Sequence
from typing import Any

from deepspeed import DeepSpeedEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch import Tensor, nn


class Engine(DeepSpeedEngine):
    """DeepSpeed's engine, whose failed writes do not stop one process, which the others would wait for.

    Its checkpoints have neither whole parameters in stage 3, which no process has, nor a script that converts them.
    """

    def module_state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        """The state of the module; in stage 3 its buffers alone."""
        if not self.zero_optimization_partition_weights():
            return super().module_state_dict(*args, **options)
        return {
            f"{name}.{key}" if name else key: buffer
            for name, part in self.module.named_modules()
            for key, buffer in part.named_buffers(recurse=False)
            if key not in part._non_persistent_buffers_set
        }

    def _configure_checkpointing(self) -> None:
        super()._configure_checkpointing()
        self.checkpoint_engine = Writer(self._config)

    def _copy_recovery_script(self, save_path: str) -> None:
        pass


class Writer(TorchCheckpointEngine):
    """Writes the files of a checkpoint, and adds what it cannot write to `failures`."""

    failures: list[OSError]

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file, or note the failure."""
        try:
            super().save(state_dict, path)
        except OSError as error:
            self.failures.append(error)
        except RuntimeError:  # what PyTorch's writer makes of a full disk: "unexpected pos 128 vs 0"
            self.failures.append(OSError(f"only a part of {path} could be written; is the disk full?"))


def norm_in_few_calls(optimizer: Any) -> None:
    """Make an optimiser of ZeRO compute the norm of its gradients in a few calls.

    DeepSpeed's makes three calls for each gradient, while the GPU waits. A subclass is not possible: the engine builds
    the optimiser, of a class that no argument chooses.
    """
    norm: Callable[..., Tensor] = optimizer.get_grad_norm_direct

    def of_all(gradients: Sequence[Tensor], parameters: Any, norm_type: float = 2) -> Tensor:
        whole = [nn.utils.get_total_norm(gradients, norm_type)] if gradients else gradients
        return norm(whole, parameters, norm_type)

    optimizer.get_grad_norm_direct = of_all
