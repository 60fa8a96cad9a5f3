"""flash-linear-attention (FLA) without autotuning, which takes minutes for each op and dtype."""

import json
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

CONFIGS, MODE = "FLA_CONFIG_DIR", "FLA_CACHE_MODE"  # variables that FLA reads: of the first call, and of its import
WARPS = 4


def without_autotuning(module: str) -> None:
    """Import a module of FLA whose kernels are launched in one of their configurations, perhaps not the fastest.

    This is FLA's cache of configurations, with one for each kernel: the one that needs the least shared memory.
    Where FLA is imported already, or `FLA_CACHE_MODE` is set, nothing changes.
    """
    if MODE in os.environ or "fla" in sys.modules:
        import_module(module)
        return
    folder = Path(mkdtemp(prefix="fla-"))
    os.environ |= {CONFIGS: str(folder), MODE: "default"}
    import_module(module)
    for kernel in _autotuned():
        config = min(kernel.configs, key=_size)
        chosen = {"kwargs": config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
        record = {"kernel_name": kernel.kernel_name, "default_config": chosen | {"num_ctas": config.num_ctas}}
        (folder / f"{kernel.kernel_name}.json").write_text(json.dumps(record), encoding="utf-8")


def _size(config: Any) -> tuple[int, int, int]:
    """Order configurations: few stages and small blocks first, then those of four warps."""
    blocks = 1
    for size in config.kwargs.values():
        blocks *= size
    return config.num_stages, blocks, abs(config.num_warps - WARPS)


def _autotuned() -> Iterator[Any]:
    """The kernels of FLA's ops that look for a configuration in its cache, in the modules that are imported."""
    seen = set[str]()
    for name, module in [*sys.modules.items()]:
        for kernel in [*vars(module).values()] if name.startswith("fla.ops.") else []:
            while not hasattr(kernel, "configs") and hasattr(kernel, "fn"):
                kernel = kernel.fn
            if hasattr(kernel, "kernel_name") and kernel.kernel_name not in seen:
                seen.add(kernel.kernel_name)
                yield kernel
