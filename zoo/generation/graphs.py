"""Decoding steps as CUDA graphs, which later calls with the same shapes replay."""

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from types import FunctionType
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

import kernels
from kernels.core.backend import backend_name
from kernels.core.torch_internals import copy_each, tree_flatten, tree_leaves, tree_map
from mixers.state import Slots
from zoo.generation.cuda_graph import capture, casts_not_cached, hooked_module, no_graphs

log = logging.getLogger(__name__)

KEPT_GRAPHS = 4
KEPT_BYTES = 4 << 30  # of the inputs of those that are kept, together


class Graph(NamedTuple):
    """A captured step."""

    key: Hashable
    inputs: Any  # the pytree of tensors that a replay reads
    replay: Callable[[], Any]  # returns the result, always in the same tensors
    others: tuple[Callable[[], Any], ...] = ()  # replays of further steps

    @property
    def size(self) -> int:
        """Bytes of the inputs."""
        return sum(leaf.nbytes for leaf in tree_leaves(self.inputs))


class DecodingGraphs:
    """Owns the CUDA graphs of decoding steps, and keeps the last few for later calls.

    A graph serves calls of one model whose inputs have the same shapes and dtypes, in the same precision and mode.
    Weights may change in place, which a replay sees. The step is captured again if they move, or if an attribute of a
    module that is a number, a tuple of numbers, a string or a function changes. A batch of another size is captured,
    too: to pad it would change the shapes of matrix products, and thereby the rounding of its results.

    Args:
        enabled: Whether to capture; without it, the same steps run eagerly.

    Attributes:
        refused: Why the last step could not be captured; None if it was.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.refused: str | None = None
        self._kept: dict[Hashable, Graph] = {}  # the least recently used first
        self._failures: dict[Hashable, str] = {}  # captures that are not tried a second time, with the reason

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.enabled,)  # a copy captures its own

    def take(self, model: nn.Module, inputs: Any, *steps: Callable[..., Any]) -> Graph | None:
        """Return graphs of `step(*inputs)` that hold a copy of these inputs, for the caller alone until `put_back`.

        `Slots` among the inputs are not copied unless a kept graph has some: they belong to the graph from then on.

        Args:
            model: The model that each step calls; it is not kept alive.
            inputs: A tuple of tensors and states. A step may overwrite them, if their shapes and dtypes stay.
            steps: Depend on nothing but the model, the inputs and their shapes.

        Returns:
            The graph; None if the step is to run eagerly, for a reason that is logged once.
        """
        if not self.enabled:
            return None
        device = tree_leaves(inputs)[0].device
        if (obstacle := _obstacle(model, device)) is not None:
            self.refuse(obstacle, logging.INFO)
            return None
        self.refused = None
        key = _key(model, inputs)
        if (graph := self._kept.pop(key, None)) is not None:
            overwrite(graph.inputs, inputs)
            return graph
        reason = self._failures.get(key)
        if reason is None:
            try:
                # a rehearsal may read weights that are still being written, but its results are dropped
                with kernels.read_only(model.parameters()):
                    return self._captured(key, inputs, steps, device)
            except RuntimeError as error:
                reason = str(error)
                if not isinstance(error, torch.OutOfMemoryError):  # memory may be free next time
                    self._failures[key] = reason
        self.refuse(reason)
        return None

    def refuse(self, reason: str, level: int = logging.WARNING) -> None:
        """Log once why a step runs eagerly, unless graphs are switched off."""
        if self.enabled:
            self.refused = " ".join(reason.split())
            _say(self.refused, level)

    def put_back(self, graph: Graph) -> None:
        """Keep a graph for later calls; the least recently used ones are dropped, and with them their memory."""
        self._kept.pop(graph.key, None)
        self._kept[graph.key] = graph
        size = 0
        for number, (key, each) in enumerate(reversed(list(self._kept.items()))):  # other threads may use `_kept`, too
            size += each.size
            if number >= KEPT_GRAPHS or size > KEPT_BYTES:
                self._kept.pop(key, None)

    def clear(self) -> None:
        """Drop all graphs."""
        self._kept.clear()
        self._failures.clear()

    def _captured(self, key: Hashable, inputs: Any, steps: Sequence[Callable[..., Any]], device: torch.device) -> Graph:
        # inputs may consist of views, or of tensors that the caller still uses
        with torch.inference_mode(False), torch.no_grad(), casts_not_cached():
            held = tree_map(_copy, inputs, is_leaf=_is_slots)
            calls = [partial(step, *held) for step in steps]
            replay, *others = [capture(call, call, device) for call in calls]
            overwrite(held, inputs)  # rehearsals, which compile kernels, have changed them
            return Graph(key, held, replay, tuple(others))


def _obstacle(model: nn.Module, device: torch.device) -> str | None:
    if (reason := no_graphs(device)) is not None:
        return reason
    if dist.is_available() and dist.is_initialized():
        return "the model may be sharded over the processes of a distributed run"
    hooked = hooked_module(model)
    return None if hooked is None else f"{hooked} has a hook, which a replay would not call"


@cache  # says it once
def _say(reason: str, level: int) -> None:
    log.log(level, "decoding runs without a CUDA graph: %s", reason)


def _key(model: nn.Module, inputs: Any) -> Hashable:
    """Everything that a captured step depends on, apart from the values of tensors."""
    leaves, structure = tree_flatten(inputs)
    device = leaves[0].device.type
    modes = (
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.get_default_dtype()),
        (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()),
        (backend_name(), kernels.is_deterministic()),
    )
    weights = tuple((x.data_ptr(), x.dtype, x.shape) for x in (*model.parameters(), *model.buffers()))
    settings = tuple((type(part), *filter(_is_setting, vars(part).items())) for part in model.modules())
    return ref(model), weights, settings, modes, str(structure), tuple((x.shape, x.dtype, x.device) for x in leaves)


def _is_setting(attribute: tuple[str, object]) -> bool:
    value = attribute[1]
    if isinstance(value, tuple):  # such as the log decays of `ConstantDecay`
        return all(isinstance(item, int | float) for item in value)
    return isinstance(value, int | float | str | torch.dtype | FunctionType)


def fits(state: Any, following: Any) -> bool:
    """Return whether the tensors of `state` can hold `following` without loss."""
    pairs = zip(tree_leaves(state), tree_leaves(following), strict=True)
    return all(old.shape == new.shape and torch.promote_types(old.dtype, new.dtype) == old.dtype for old, new in pairs)


def check_fits(state: Any, following: Any) -> None:
    """Raise a RuntimeError unless the tensors of `state` can hold `following` without loss."""
    if not fits(state, following):
        raise RuntimeError("the state grows, or changes otherwise, with every token")


def overwrite(state: Any, following: Any) -> None:
    """Copy `following` into the tensors of `state`, except what is already there."""
    pairs = list(zip(tree_leaves(state), tree_leaves(following), strict=True))
    owned = {old.untyped_storage().data_ptr() for old, _ in pairs}
    copies: dict[tuple[torch.dtype, ...], tuple[list[Tensor], list[Tensor]]] = {}  # few launches for many tensors
    for old, new in pairs:
        if new.numel() and new.data_ptr() != old.data_ptr():
            into, out_of = copies.setdefault((old.dtype, new.dtype), ([], []))
            into.append(old)
            # part of the old state might be overwritten before it is read
            out_of.append(new.clone() if new.untyped_storage().data_ptr() in owned else new)
    for into, out_of in copies.values():
        copy_each(into, out_of)


def _is_slots(x: object) -> bool:
    return isinstance(x, Slots)


def _copy(x: Any) -> Any:
    """A tensor cloned; slots stay, as a rehearsal only writes the entry that the step writes later."""
    return x if _is_slots(x) else x.clone(memory_format=torch.contiguous_format)
