"""The check that arguments are tensors."""

from torch import Tensor


def check_tensors(**arguments: object) -> None:
    """Raise a ValueError for the first argument that is neither a tensor nor None, such as a list."""
    for name, x in arguments.items():
        if x is not None and not isinstance(x, Tensor):
            raise ValueError(f"{name}: must be a tensor, got a {type(x).__name__}; torch.as_tensor makes one of it")
