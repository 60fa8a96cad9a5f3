"""`bench decode`: time per token at a given position, eager and as a captured CUDA graph."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import kernels
from kernels.core.torch_internals import tree_leaves
from zoo import config as configs
from zoo.arguments import check_above_0
from zoo.display import progress_bar
from zoo.generation.graphs import DecodingGraphs
from zoo.lm.model import LanguageModel
from zoo.lm.states import growing
from zoo.performance import model as models
from zoo.performance.bench_report import Report, captioned, formatted, without
from zoo.performance.device import described, pick_backend, roofline_ms
from zoo.performance.steps import OurSteps, state_at
from zoo.performance.timing import medians
from zoo.train.devices import pick_device


class DecodeReport(Report):
    """Times of tokens."""

    benchmark = "decode"

    def table(self) -> Table:
        """A row for each batch size and position."""
        table = self.new_table(["model", "batch", "position", "how", "ms/token", "floor", "tok/s", "state MB"])
        remarks: list[str] = []
        for row in self.rows:
            head = [row["model"], str(row["batch_size"]), str(row["position"]), row["how"]]
            if "ms" not in row:
                without(table, remarks, head, row)
                continue
            state = None if row["state_bytes"] is None else row["state_bytes"] / 1e6
            times = f"{row['ms']:.3f}", formatted(row.get("floor_ms"), "{:.3f}")
            table.add_row(*head, *times, f"{row['tokens_per_second']:,.0f}", formatted(state, "{:.1f}"))
            remarks += [row["note"]] if "note" in row else []
        return captioned(table, remarks)


def bench_decode(
    config: Sequence[str],
    batch_sizes: list[int] | None = None,
    positions: list[int] | None = None,
    precision: str | None = None,
    backend: str | None = None,
    device: str | None = None,
    seconds: float = 1.0,
    folder: str = "runs/bench-decode",
) -> Report:
    """Time a model's decoding steps, after checking them against a forward pass over all tokens.

    The state is random, with the size it has at the position; each step feeds the likeliest token and the new state to
    the next one. The floor of a time is what the memory's bandwidth needs for `moved_bytes`. In deterministic mode
    (`ZOO_DETERMINISTIC=1`) a step computes its chunk of 64 tokens again; positions should be multiples of 64.

    Args:
        config: Configs and `key=value` overrides, in order.
        batch_sizes: Sequences in a batch; null for 1 and 64.
        positions: Numbers of preceding tokens; null for 1024 and 65536.
        precision: 32-true, bf16-true, 16-true or bf16-mixed; null for bf16-true on a GPU and 32-true on a CPU.
        backend: Backend of the kernels: auto, triton, torch or reference; null for ZOO_BACKEND, or auto.
        device: cpu or cuda; null for the GPU if available.
        seconds: Time to spend on each measurement.
        folder: The folder of bench.json.

    Raises:
        UserError: An argument is invalid.
    """
    where = pick_device(device)
    check_above_0("seconds", seconds)
    batch_sizes = [1, 64] if batch_sizes is None else batch_sizes
    positions = [1024, 65536] if positions is None else positions
    precision = precision or ("bf16-true" if where.type == "cuda" else "32-true")
    backend = pick_backend(backend)
    for batch_size, position in itertools.product(batch_sizes, positions):
        models.check_options(precision, batch_sizes=batch_size, positions=position)
    parsed = models.read(config)
    name = models.name(config)
    about = {
        **described(where),
        "deterministic": kernels.is_deterministic(),
        "model": configs.to_dict(parsed)["model"],
        "precision": precision,
    }
    report = DecodeReport(Path(folder), about)
    model = models.build(parsed, precision, where).eval()
    gate = models.compared(model, precision, backend, models.continuing, models.at_once)
    places = [(batch, position) for batch in batch_sizes for position in positions]
    for batch, position in progress_bar(places, desc="decode", unit=" places"):
        row = {"model": name, "batch_size": batch, "position": position, "gate": gate.record()}
        if not gate.passed:
            report.add({**row, "how": "", "note": gate.says})
            continue
        with torch.no_grad(), models.running(precision, where, backend):
            row["floor_ms"] = roofline_ms(where, "bf16", 0, moved_bytes(model, batch, position))
            for measured in _measured(row, model, seconds):
                report.add(measured)
        if where.type == "cuda":
            torch.cuda.empty_cache()
    return report


def moved_bytes(model: LanguageModel, batch_size: int, position: int) -> int:
    """Return the bytes that a decoding step must read and write: weights and states.

    The weights are read once, of embeddings that the head does not share only a row for each sequence. States of
    constant size are read and written; caches that grow are read, and an entry is appended.
    """
    state = state_at(model, 1, 1)
    sizes = {True: 0, False: 0}
    for leaf, grows in zip(tree_leaves(state), growing(model, state), strict=True):
        sizes[grows] += leaf.nbytes
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if model.embeddings is not None and model.lm_head is not None:
        weights -= model.embeddings.weight[batch_size:].nbytes
    return weights + batch_size * (2 * sizes[False] + (position + 1) * sizes[True])


def _measured(row: dict[str, Any], model: LanguageModel, seconds: float) -> list[dict[str, Any]]:
    """The rows of a batch size and position: eager and, on a GPU, a captured graph."""
    device = next(model.parameters()).device
    place = row["batch_size"], row["position"]
    eager = timed({**row, "how": "eager"}, seconds, lambda: OurSteps(model, *place), device)
    if device.type != "cuda" or "ms" not in eager:
        return [eager]
    try:
        return [eager, timed({**row, "how": "CUDA graph"}, seconds, lambda: _captured(model, *place), device)]
    except RuntimeError as error:
        eager["note"] = f"no CUDA graph: {' '.join(str(error).split())[:120]}"
        return [eager]


def timed(row: dict[str, Any], seconds: float, make: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """A row of batch size and position with the time of the steps that `make` prepares; a note if out of memory."""
    try:
        step = make()
        row["position"] = step.position
        row["ms"] = medians({"step": step}, device, seconds)["step"]
    except torch.OutOfMemoryError:
        return {**row, "note": "does not fit into memory"}
    row["tokens_per_second"] = row["batch_size"] / row["ms"] * 1e3
    row["state_bytes"] = step.state_bytes
    return row


def _captured(model: LanguageModel, batch_size: int, position: int) -> OurSteps:
    """Steps as a CUDA graph, as `generate` runs them on a GPU; a RuntimeError if they cannot be captured."""
    graphs = DecodingGraphs()
    steps = OurSteps(model, batch_size, position, graphs)
    steps()
    if graphs.refused:
        raise RuntimeError(graphs.refused)
    return steps
