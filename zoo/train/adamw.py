"""PyTorch's fused AdamW, with learning rates that a CUDA graph can read."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class AdamW(torch.optim.AdamW):
    """The fused AdamW, whose kernel reads the learning rates from the device, in fp32.

    The parameter groups hold Python numbers, as with PyTorch's AdamW, and so do checkpoints. A replayed update and one
    that is launched kernel by kernel compute the same to the bit.

    Args:
        params: Parameter groups, all on one device.
        lr: Learning rate.
        betas: Rates of the running averages of the gradient and of its square.
        eps: Added to the root of the second average.

    Attributes:
        replay: Runs the update if it can be replayed, and returns whether it did; None if there is nothing to replay.
        found_inf: A scalar that is not 0 if the next update is to be skipped; None for 0.
    """

    def __init__(self, params: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, fused=True)
        self.replay: Callable[[], bool] | None = None
        self.found_inf: Tensor | None = None
        self._rates: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.read_rates()
        if self.replay is None or not self.replay():
            self.update()
        return loss

    def read_rates(self) -> None:
        """Copy the learning rates of the groups to the device."""
        self._rates = device_rates(self, self._rates)

    def update(self, *, captured: bool = False) -> None:
        """Launch the kernels of the update, with the learning rates that were read last.

        Args:
            captured: Whether a CUDA graph is being captured.
        """
        before = [(group["lr"], group["capturable"]) for group in self.param_groups]
        try:
            for rate, group in zip(self._rates, self.param_groups, strict=True):
                group["lr"], group["capturable"] = rate, captured
            super().step()
        finally:
            for group, (rate, capturable) in zip(self.param_groups, before, strict=True):
                group["lr"], group["capturable"] = rate, capturable

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in PyTorch, also from an AdamW that is not fused."""
        groups = [{**group, "fused": True, "foreach": None} for group in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})

    def settings(self) -> list[dict[str, Any]]:
        """Return the settings of the groups that a captured update cannot change: all but the learning rates."""
        return fixed_settings(self)


def device_rates(optimizer: torch.optim.Optimizer, rates: list[Tensor]) -> list[Tensor]:
    """Copy the learning rates of an optimiser's groups into `rates`, or if it is empty into new scalars."""
    device = optimizer.param_groups[0]["params"][0].device
    rates = rates or [torch.zeros((), dtype=torch.float32, device=device) for _ in optimizer.param_groups]
    for rate, group in zip(rates, optimizer.param_groups, strict=True):
        rate.fill_(group["lr"])
    return rates


def fixed_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of an optimiser's groups without the learning rates."""
    return [{key: group[key] for key in group if key not in ("params", "lr")} for group in optimizer.param_groups]
