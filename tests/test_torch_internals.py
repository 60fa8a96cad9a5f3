"""PyTorch's private names are used in one file, so that an upgrade of PyTorch is a change to one file."""

import ast
from collections.abc import Iterator

import pytest

from tests.test_architecture import trees

ALLOWED = "kernels/core/torch_internals.py"
# files that need names of one part of PyTorch alone
OTHERS = {
    "zoo/checkpoints/fsdp_shards.py": {"torch.distributed.checkpoint.filesystem._StorageInfo"},
    "zoo/generation/cuda_graph.py": {"torch._C"},
    "zoo/train/callbacks/compiled_blocks.py": {"torch._dynamo", "torch._inductor"},
}


def private_names(tree: ast.AST) -> Iterator[str]:
    """Names of PyTorch up to the first private part, in imports and in attributes of `torch`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            private = [number for number, part in enumerate(parts) if part.startswith("_") and part[:2] != "__"]
            if parts[0] == "torch" and all(map(str.isidentifier, parts)) and private:
                yield ".".join(parts[: private[0] + 1])


def test_no_private_name_of_pytorch_is_used():
    used = {file: names for file, tree in trees().items() if (names := set(private_names(tree)))}
    assert used.pop(ALLOWED)
    assert used == OTHERS


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("from torch.utils._pytree import tree_map", ["torch.utils._pytree"]),
        ("from torch.optim._muon import _adjust_lr", ["torch.optim._muon"]),
        ("import torch._dynamo.config", ["torch._dynamo"]),
        ("torch._foreach_copy_(a, b)", ["torch._foreach_copy_"]),
        ("torch.nn.Linear.__init__; self._torch; torch.float32; x._version", []),
    ],
)
def test_the_search_finds_private_names(code: str, names: list[str]):
    assert list(private_names(ast.parse(code))) == names
