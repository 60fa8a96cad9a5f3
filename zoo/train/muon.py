"""Muon for the matrices of the blocks, and AdamW for everything else, as one optimiser."""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from kernels import UserError
from kernels.core.torch_internals import adjusted_rate, orthogonalised
from zoo.train.adamw import AdamW, device_rates, fixed_settings


class Muon(Optimizer):
    """`torch.optim.Muon` (PyTorch 2.9 and later) where it is meant to be used: on matrices between hidden vectors.

    AdamW takes the rest: embeddings, the head, vectors, convolutions, and what modules exempt from weight decay. Each
    map of a fused projection is a separate matrix: together they would share one spectrum, and a map with small
    gradients would get large updates. It needs whole matrices: no ZeRO, no FSDP.

    Args:
        params: Parameter groups of `zoo.train.optim.parameter_groups`, each with the keys `hidden` and `matrices`.
        lr: The learning rate of both.
        momentum: Muon's momentum.
        nesterov: Whether it is Nesterov's.
        ns_steps: Newton–Schulz iterations, by which an update is orthogonalised.
        adjust_lr_fn: How Muon's learning rate depends on the shape of a matrix: `match_rms_adamw` makes an update about
            as large as AdamW's, so that both share a learning rate; `original` is sqrt(max(1, rows / columns)).
        betas: Decay rates of AdamW's moments.
        eps: Added to AdamW's denominator.

    Attributes:
        replay: As for `zoo.train.adamw.AdamW`.
        found_inf: Not used: a step is skipped by leaving out the gradients.

    Raises:
        UserError: No trained parameter is a matrix of a block, or `ns_steps` is out of range.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        groups = [dict(group) for group in params]
        # not left in the groups, which are replaced by those of a checkpoint
        rows = {p: rows for group in groups for p, rows in zip(group["params"], group.pop("matrices"), strict=True)}
        matrices = [group for group in groups if group["hidden"]]
        others = [group for group in groups if not group["hidden"]]
        if not matrices:
            raise UserError("optim.optimizer is Muon, but no trained parameter is a matrix of one of model.layers.")
        if not 1 <= ns_steps < 100:
            raise UserError(f"optim.optimizer.ns_steps is {ns_steps}, but must be from 1 to 99.")
        muon = _MuonOfParts(
            matrices, rows, lr=lr, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn
        )
        self._parts: dict[bool, Optimizer] = {True: muon}
        self._on_gpu = all(parameter.is_cuda for group in groups for parameter in group["params"])
        if others:
            adamw = AdamW(others, lr, betas, eps) if self._on_gpu else torch.optim.AdamW(others, lr, betas, eps)
            self._parts[False] = adamw
        self.replay: Callable[[], bool] | None = None
        self.found_inf: Tensor | None = None
        # this optimiser has the groups and the state, for schedules and checkpoints; the parts only compute
        super().__init__([group for part in self._parts.values() for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for hidden, part in self._parts.items():
            part.param_groups = [group for group in self.param_groups if group["hidden"] == hidden]
            part.state = self.state
            if isinstance(part, _MuonOfParts | AdamW) and self._on_gpu:
                part.read_rates()
        if self.replay is None or not self.replay():
            self.update()
        return loss

    def update(self, *, captured: bool = False) -> None:
        """Launch the kernels of the update, with the learning rates that were read last.

        Args:
            captured: Whether a CUDA graph is being captured.
        """
        for part in self._parts.values():
            if isinstance(part, AdamW):
                part.update(captured=captured)
            else:
                part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in PyTorch; AdamW's part of a checkpoint may be of another device."""
        groups = [
            {**group, "fused": True, "foreach": None} if self._on_gpu and not group["hidden"] else group
            for group in state_dict["param_groups"]
        ]
        super().load_state_dict({**state_dict, "param_groups": groups})

    def settings(self) -> list[dict[str, Any]]:
        """Return the settings of the groups that a captured update cannot change: all but the learning rates."""
        return fixed_settings(self)


class _MuonOfParts(torch.optim.Muon):
    """PyTorch's Muon on parameters that hold several matrices of some numbers of rows, one below the other."""

    def __init__(self, params: Iterable[dict[str, Any]], rows: Mapping[Tensor, Sequence[int]], **settings: Any) -> None:
        self._rows = rows
        self._rates: list[Tensor] = []
        super().__init__(params, **settings)

    def read_rates(self) -> None:
        """Copy the learning rates of the groups to the device, from where `step` takes them then."""
        self._rates = device_rates(self, self._rates)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters; it is PyTorch's unless the learning rates are on the device."""
        if not self._rates:
            return super().step(closure)
        for rate, group in zip(self._rates, self.param_groups, strict=True):
            lists: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
            self._init_group(group, *lists)
            beta = group["momentum"]
            for parameter, gradient, momentum in zip(*lists, strict=True):
                momentum.lerp_(gradient, 1 - beta)
                change = gradient.lerp(momentum, beta) if group["nesterov"] else momentum.clone()
                change = orthogonalised(change, group["ns_coefficients"], group["ns_steps"], group["eps"])
                factor = adjusted_rate(1.0, group["adjust_lr_fn"], parameter.shape)
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.addcmul_(change.to(parameter.dtype), rate, value=-factor)
        return None

    def _init_group(
        self, group: MutableMapping[str, Any], params: list[Tensor], grads: list[Tensor], momenta: list[Tensor]
    ) -> bool:
        """Collect views of the matrices, with their gradients and momenta, which the update changes in place."""
        whole: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        is_complex = super()._init_group(group, *whole)
        for parameter, *others in zip(*whole, strict=True):
            for parts, tensor in zip((params, grads, momenta), (parameter, *others), strict=True):
                parts += tensor.split(list(self._rows[parameter]))
        return is_complex
