"""`bench`: what is measured is right first, and what is written down is sane."""

import dataclasses
import importlib
import json
import math
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from kernels import UserError
from zoo.generation.graphs import DecodingGraphs
from zoo.performance import model as models
from zoo.performance.accuracy import Gate, relative_error
from zoo.performance.bench_calls import OPS, BenchCall, Shape
from zoo.performance.decoding import bench_decode, moved_bytes
from zoo.performance.kernels import bench_kernels
from zoo.performance.steps import OurSteps, state_at
from zoo.performance.timing import medians
from zoo.performance.training import TrainingReport, bench_training, timed

CPU = torch.device("cpu")
GENERAL = ("kda", "kda_with_gates", "gated_deltanet2", "comba", "gated_deltaproduct")
SMALL = ("--model.vocab_size=32", "--model.num_layers=2", "--model.hidden_size=16", "--model.num_heads=2")
PLAIN = [item.removeprefix("--") for item in SMALL]
ABOUT = {"batch_size": 8, "length": 4096, "compiled": False, "precision": "bf16-true"}
ABOUT |= dict.fromkeys(("device", "torch", "triton", "dtype"), "")


def record(folder: Path) -> dict:
    return json.loads((folder / "bench.json").read_text())


def test_files_of_somebody_else_are_kept(tmp_path: Path):
    (tmp_path / "bench.json").write_text('{"bench": "in the park"}')
    message = r"folder: .*bench\.json exists and is not a record of a benchmark; choose another folder"
    with pytest.raises(UserError, match=message):
        bench_kernels(ops=["delta_rule"], folder=str(tmp_path))
    assert (tmp_path / "bench.json").read_text() == '{"bench": "in the park"}'


@pytest.mark.parametrize("name", OPS)
def test_every_op_passes_its_check(name):
    case = BenchCall(name, Shape(2, 2, 100, 8), "fp32", CPU, "auto", window=20)
    gate = case.check()
    assert gate.passed, gate.says
    assert {"o", "dq", "dk", "dv"} <= set(gate.errors)
    assert ("dlog_decay" in gate.errors) == (OPS[name].decay in ("head", "channel") and name != "kda_with_gates")
    assert (case.implementation, case.op.general) == ("torch", name in GENERAL)
    assert case.flops > 0
    assert case.moved[1] > 2 * case.moved[0]


@pytest.mark.parametrize("name", ["kda_with_gates", "comba", "gated_deltaproduct"])
def test_kernels_are_compared_with_a_form_that_agrees_with_the_loop(name: str, monkeypatch: pytest.MonkeyPatch):
    case = BenchCall(name, Shape(2, 2, 90, 8), "fp32", CPU, "torch", window=1)
    case.implementation = "triton"  # for which the chunkwise form stands in
    errors = case.check().errors
    assert {f"{result} of the chunkwise form" for result in ("o", "dq", "dk", "dv")} <= set(errors)
    implementations = case.op.kernel_op.implementations
    right = implementations["torch"]

    def wrong(a: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        o, state = right(a)
        return o * 1.01, state

    monkeypatch.setitem(implementations, "torch", wrong)
    gate = case.check()
    assert not gate.passed
    assert "o of the chunkwise form is off by 1.0e-02" in gate.says


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_low_precision_passes_too(dtype):
    gate = BenchCall("linear_head", Shape(1, 2, 100, 16), dtype, CPU, "auto", window=20).check()
    assert gate.passed, gate.says


def test_rows_of_kernels(tmp_path):
    report = bench_kernels(shapes=[(1, 2, 20, 8)], seconds=0.2, folder=str(tmp_path))
    report.write()
    assert not report.failed
    rows = record(tmp_path)["rows"]
    assert [row["op"] for row in rows] == [*OPS]
    for row in rows:
        assert row["gate"]["passed"]
        assert 0 < row["fwd_ms"] < row["fwd_bwd_ms"] < 1e4
        assert row["fwd_tflops"] > 0
        assert row["fwd_roofline"] is None
        assert row["implementation"] == "torch"
    path = next(column for column in report.table().columns if column.header == "path")
    assert set(path.cells) == {"torch"}
    assert record(tmp_path)["device"].startswith("cpu")


def test_a_wrong_implementation_has_no_time(monkeypatch, command, desk):
    package = importlib.import_module("kernels.linear_recurrence")
    right = package.OP.implementations["torch"]

    def wrong(a):
        o, state = right(a)
        return o * 1.01, state

    monkeypatch.setitem(package.OP.implementations, "torch", wrong)
    done = command("bench", "kernels", "--ops=linear_head,delta_rule", "--shapes=[[1,1,40,8]]", "--seconds=0.01")
    assert done.code == 1
    assert "o is off by 1.0e-02" in done.out
    bad, good = record(desk / "runs/bench-kernels")["rows"]
    assert not bad["gate"]["passed"]
    assert "fwd_ms" not in bad
    assert good["fwd_ms"] > 0


def test_a_model_on_several_paths_names_the_rarer_ones():
    row = {"model": "h2", "implementations": {op: ["triton"] for op in ("delta_rule", "features", "rms_norm")}}
    row["implementations"] |= {"window_attention": ["torch"], "linear_recurrence": ["torch", "triton"]}
    row |= dict.fromkeys(("step_ms", "forward_ms", "backward_ms", "optimiser_ms", "first_step_s", "parameters"), 1.0)
    row |= {"tokens_per_second": 1.0, "peak_gib": None, "mfu": None, "ready_s": None, "not_captured": "it waits"}
    table = TrainingReport(Path(), ABOUT, [row]).table()
    (path,) = next(column for column in table.columns if column.header == "path").cells
    assert path.startswith("triton + ")
    assert "h2: torch: window_attention" in table.caption
    assert "h2: torch + triton: linear_recurrence" in table.caption
    assert "h2 runs eagerly: it waits" in table.caption


def test_the_widest_table_is_whole_at_100_columns():
    milliseconds = dict.fromkeys(("step_ms", "forward_ms", "backward_ms", "optimiser_ms"), 166.1)
    row = {"model": "gated_deltanet", "parameters": 400e6, "implementations": {"delta_rule": ["triton"]}} | milliseconds
    row |= {"tokens_per_second": 197_225, "peak_gib": 31.2, "mfu": 0.351, "first_step_s": 12.3, "ready_s": 25.6}
    console = Console(width=100)
    with console.capture() as shown:
        console.print(TrainingReport(Path(), ABOUT, [row]).table())
    assert "…" not in shown.get()


@pytest.mark.parametrize(
    ("config", "kept"),
    [("gla.yaml", 2), ("rwkv7.yaml", 2), ("tnl.yaml", 2), ("gdn_h2.yaml", 3), ("kda_hybrid.yaml", 4)],
)
def test_the_lowest_layers_have_all_kinds(config: str, kept: int):
    parsed = models.read([config, *PLAIN, "model.num_layers=8", "model.hidden_size=64"])
    model = models.build(parsed, "32-true", torch.device("cpu"))
    kinds = {type(mixer) for mixer in model.mixers}
    lowest = models.lowest_layers(model)
    assert len(lowest.layers) == kept
    assert {type(mixer) for mixer in lowest.mixers} == kinds
    assert models.learning(lowest)["loss"].isfinite()


def test_windows_of_two_sizes_are_two_kinds_of_layers():
    pattern = {"pattern": "abac", "mixers": {"a": "GLA"}}
    for name, window in (("b", 8), ("c", 16)):
        pattern["mixers"][name] = {"class_path": "SlidingWindowAttention", "init_args": {"window_size": window}}
    stack = json.dumps({"class_path": "Pattern", "init_args": pattern})
    parsed = models.read(["gla.yaml", *PLAIN, "model.num_layers=8", f"model.stack={stack}"])
    model = models.build(parsed, "32-true", torch.device("meta"))
    assert len(models.lowest_layers(model).layers) == 4


def test_attention_in_half_precision_is_checked_at_full_length(monkeypatch: pytest.MonkeyPatch):
    case = BenchCall("window_attention", Shape(1, 2, 400, 16), "bf16", CPU, "auto", window=1000)
    gate = case.check()
    assert gate.passed, gate.says
    assert "dq of the chunkwise form" in gate.errors
    implementations = case.op.kernel_op.implementations
    right = implementations["torch"]

    def wrong(a: Any) -> torch.Tensor:
        late = torch.arange(a.q.shape[1])[:, None, None] >= 390
        return right(a) * (1 + late * (a.q.dtype == torch.bfloat16))

    monkeypatch.setitem(implementations, "torch", wrong)
    assert not case.check().passed


def test_heads_that_share_keys(tmp_path: Path):
    case = BenchCall("delta_rule", Shape(2, 4, 90, 8), "fp32", CPU, "torch", window=1, key_heads=2)
    assert (case.inputs["k"].shape[2], case.inputs["v"].shape[2]) == (2, 4)
    case.implementation = "triton"  # which is compared at full length
    gate = case.check()
    assert gate.passed, gate.says
    [row] = bench_kernels("delta_rule", [(1, 4, 40, 8)], key_heads=2, seconds=0.01, folder=str(tmp_path)).rows
    assert row["gate"]["passed"]
    assert row["key_heads"] == 2
    for options in ({"ops": "delta_rule", "key_heads": 3}, {"ops": "kda", "key_heads": 2}):
        with pytest.raises(UserError, match=r"key_heads: . is for --ops=delta_rule alone, and must divide H"):
            bench_kernels(shapes=[(1, 4, 40, 8)], **options)


@pytest.mark.parametrize(
    ("device", "expected"), [("cpu", "aaaabbbbaabb"), ("cuda", "aaaabbbb--aaaabbbb--aaaabbbbaabb")]
)
def test_models_train_in_turns(device: str, expected: str, monkeypatch: pytest.MonkeyPatch):
    """On a GPU, untimed turns come first. Here, each step takes a quarter of a second."""
    order: list[str] = []
    clock = types.SimpleNamespace(perf_counter=lambda: len("".join(order).replace("-", "")) / 4)
    monkeypatch.setattr("zoo.performance.training.time", clock)
    learners = [
        types.SimpleNamespace(
            step=lambda name=name: order.append(name),
            clock=types.SimpleNamespace(between=lambda: order.append("-")),
            device=torch.device(device if name == "a" else "cpu"),
        )
        for name in "ab"
    ]
    updates: list[None] = []
    timed([({}, learner) for learner in learners], 6, types.SimpleNamespace(update=lambda: updates.append(None)))
    assert "".join(order) == expected
    assert len(updates) == 2 * 6


def test_a_small_model_heats_a_gpu_for_a_hundred_steps(monkeypatch: pytest.MonkeyPatch):
    steps: list[None] = []
    monkeypatch.setattr("zoo.performance.training.time", types.SimpleNamespace(perf_counter=lambda: len(steps) / 1e3))
    learner = types.SimpleNamespace(
        step=lambda: steps.append(None), clock=types.SimpleNamespace(between=lambda: None), device=torch.device("cuda")
    )
    timed([({}, learner)], 8, types.SimpleNamespace(update=lambda: None))
    assert len(steps) == 100 + 8


@pytest.mark.slow
def test_a_wrong_model_is_not_timed(monkeypatch, tmp_path):
    package = importlib.import_module("kernels.delta_rule")
    right = package.OP.implementations["torch"]

    def leaking(a):
        o, state = right(a)
        return o.flip(1), state

    monkeypatch.setitem(package.OP.implementations, "torch", leaking)
    trained = bench_training(["gated_deltanet.yaml", *PLAIN], batch_size=1, length=8, steps=1, folder=str(tmp_path))
    decoded = bench_decode(["gated_deltanet.yaml", *PLAIN], batch_sizes=[1], positions=[4], folder=str(tmp_path))
    for report in (trained, decoded):
        assert report.failed
        assert "tokens_per_second" not in report.rows[0]
        assert "off by" in report.table().caption


@pytest.mark.slow
@pytest.mark.parametrize("config", ["gla.yaml", "retnet.yaml"])
def test_a_slightly_wrong_model_is_not_timed(config, monkeypatch, tmp_path):
    """Not even where the norms of outputs are made to forgive the rounding of first tokens."""
    package = importlib.import_module("kernels.linear_recurrence")
    right = package.OP.implementations["torch"]

    def cut(decay):
        return decay if decay is None or decay.dim() == 1 else decay[:, 64:]

    def forgetting(a):
        last = right(dataclasses.replace(a, q=a.q[:, 64:], k=a.k[:, 64:], v=a.v[:, 64:], log_decay=cut(a.log_decay)))
        o, state = right(a)
        return torch.cat([o[:, :64], last[0]], 1), state  # nothing is carried into the second chunk

    monkeypatch.setitem(package.OP.implementations, "torch", forgetting)
    report = bench_training([config, *PLAIN], batch_size=1, length=80, steps=1, folder=str(tmp_path))
    assert report.failed
    assert "off by" in report.table().caption


@pytest.mark.slow
def test_the_check_of_gradients_does_not_hang_on_a_few_first_tokens():
    """Whatever the seed: q·k of a first token may be nearly 0, and its norm divides by it."""
    config = models.read(["retnet.yaml", *PLAIN, "model.hidden_size=256", "model.num_layers=4"])
    errors = []
    for seed in range(8):
        torch.manual_seed(seed)
        model = models.conditioned(models.build(config, "bf16-true", CPU))
        errors.append(models.compared(model, "bf16-true", "torch", models.learning).errors["gradients"])
    assert max(errors) < 1.5 * min(errors)


def test_training(command, desk):
    done = command(
        "bench", "training", "--config", "gated_deltanet.yaml", *SMALL, "--batch_size=2", "--length", "40", "--steps=2"
    ).ok()
    actual = record(desk / "runs/bench-training")
    (row,) = actual["rows"]
    parts = row["forward_ms"] + row["backward_ms"] + row["optimiser_ms"]
    assert row["step_ms"] == pytest.approx(parts, rel=0.5)
    assert row["tokens_per_second"] == pytest.approx(2 * 40 / row["step_ms"] * 1e3)
    assert 0 < row["first_step_s"] < row["ready_s"]
    assert row["mfu"] is None
    assert actual["length"] == 40
    assert actual["model"]["num_layers"] == 2
    assert "gated_deltanet" in done.out
    assert row["implementations"]["delta_rule"] == row["implementations"]["rms_norm"] == ["torch"]
    assert "path" in done.out


def test_decode(command, desk):
    command(
        *("bench", "decode", "--config", "transformer.yaml", *SMALL),
        *("--batch_sizes=[1,3]", "--positions=[8,64]", "--seconds=0.02"),
    ).ok()
    rows = record(desk / "runs/bench-decode")["rows"]
    assert [(row["batch_size"], row["position"]) for row in rows] == [(1, 8), (1, 64), (3, 8), (3, 64)]
    assert all(row["ms"] > 0 and row["how"] == "eager" for row in rows)
    assert rows[1]["state_bytes"] > 4 * rows[0]["state_bytes"]


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_of_a_decoding_step(tied: bool):
    config = ["transformer.yaml", *PLAIN, f"model.tie_embeddings={str(tied).lower()}"]
    model = models.build(models.read(config), "32-true", CPU)
    read = model.num_parameters() - (0 if tied else (32 - 3) * 16)  # of untied embeddings, the rows of three tokens
    entries = 3 * (100 + 1) * 2 * 16  # keys and values
    positions = 3 * 2 * 8  # int64, read and written
    assert moved_bytes(model, 3, 100) == 4 * read + 2 * (4 * entries + positions)


@pytest.mark.parametrize(("config", "growing"), [("transformer.yaml", True), ("gdn_h1.yaml", False)])
def test_a_state_at_a_position(config, growing):
    model = models.build(models.read([config, *PLAIN, "model.num_layers=3"]), "32-true", CPU)
    state = state_at(model, 2, 50)
    logits, _ = model(torch.zeros(2, 1, dtype=torch.int64), state)
    assert torch.isfinite(logits).all()
    longest = max(leaf.shape[1] for leaf in torch.utils._pytree.tree_leaves(state) if leaf.dim() == 4)
    assert (longest == 50) == growing


def test_low_precision_of_a_model_is_measured_by_its_rounding():
    model = models.build(models.read(["gated_deltanet.yaml", *PLAIN]), "bf16-true", CPU)
    gate = models.compared(model, "bf16-true", "torch", models.learning)
    assert gate.passed, gate.says
    assert max(gate.limits.values()) <= models.WORST


def test_errors_that_are_no_numbers_never_pass():
    x = torch.ones(3)
    gate = Gate()
    assert not gate.passed  # nothing was compared
    gate.check("o", x * math.nan, x, 1.0)
    assert not gate.passed
    assert gate.record()["errors"] == {"o": None}
    assert relative_error(torch.ones(2), x) == math.inf


def test_calls_take_turns():
    order: list[str] = []
    times = medians({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, CPU, least=3, most=14)
    turns = "aaaaaaaaaabbbbbbbbbbaaaabbbb"  # of ten calls; what takes no time is repeated as often as allowed
    assert order == ["a", "a", "b", "b", *turns]
    assert set(times) == {"a", "b"}


def test_a_file_as_the_folder_is_refused_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("zoo.performance.kernels.measured", lambda *_: pytest.fail("measured"))
    with pytest.raises(UserError, match=r"folder: .*file is a file"):
        bench_kernels("delta_rule", [(1, 1, 8, 8)], folder=str(tmp_path / "file"))


def test_without_a_kind_it_lists_them(command):
    done = command("bench").ok()
    for kind in ("kernels", "training", "decode"):
        assert f"\n  {kind} " in done.out
    assert max(map(len, done.out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["kernels", "--ops=delta_rul"], "did you mean 'delta_rule'"),
        (["kernels", "--ops="], "ops: '' is empty; write a value, or leave it out"),
        (["kernels", "--shapes=[[1,2,3]]"], "shapes"),
        (["kernels", "--seconds=-1"], "seconds: -1.0 must be above 0 and finite"),
        (["decode", "--config", "gla.yaml", *SMALL, "--seconds=0"], "seconds: 0.0 must be above 0 and finite"),
        (["kernels", "--shapes=[[1,2,0,4]]"], "shapes: all sizes must be at least 1"),
        (["kernels", "--dtype=bf61"], "did you mean 'bf16'"),
        (["kernels", "--backend=tritn"], "did you mean 'triton'"),
        (["kernels", "--config", "gla.yaml"], "config: unknown key"),
        (["training", "--config"], "--config has no value"),
        (["training", "--config", "gl.yaml"], "did you mean 'gla.yaml'"),
        (["training", "--config", "gla.yaml", "--batch_sze=4"], "did you mean 'batch_size'"),
        (["training", "--config", "gla.yaml", "--model.num_layer=4"], "did you mean 'num_layers'"),
        (["training", "--config", "gla.yaml", *SMALL, "--steps=0"], "steps: 0 must be at least 1"),
        (["training", "--config", "gla.yaml", *SMALL, "--precision=16"], "precision: '16' is not one of"),
        (
            ["training", "--config", "gla.yaml", *SMALL, "--cuda_graph=true"],
            "cuda_graph is true, but the device is a cpu",
        ),
        (["decode", "--config", "gla.yaml", "--device=cuda"], "no CUDA device"),
        (["decode", "--config", "gla.yaml", *SMALL, "--positions=[0]"], "positions: 0 must be at least 1"),
    ],
)
def test_a_mistake_is_one_sentence(command, desk, monkeypatch, arguments, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert expected in command("bench", *arguments).sentence()
    assert not (desk / "runs").exists()


@pytest.mark.gpu
def test_a_captured_graph_says_what_the_model_says():
    device = torch.device("cuda")
    model = models.build(models.read(["gated_deltanet.yaml", *PLAIN]), "32-true", device).eval()
    with torch.no_grad():
        captured, eager = OurSteps(model, 2, 10, graphs := DecodingGraphs()), OurSteps(model, 2, 10)
        captured()
        assert graphs.refused is None
        eager.decoder.state = torch.utils._pytree.tree_map(torch.clone, captured.decoder.state)
        eager.tokens = captured.tokens.clone()
        for _ in range(5):
            captured()
            eager()
    for one, other in zip(
        *map(torch.utils._pytree.tree_leaves, (captured.decoder.state, eager.decoder.state)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_kernels_on_a_gpu_pass_at_the_timed_call(tmp_path):
    report = bench_kernels(shapes=[(2, 4, 1000, 64)], seconds=0.02, folder=str(tmp_path))
    assert {row["op"]: row["note"] for row in report.rows if "note" in row} == {}  # names the gate that fails
    assert not report.failed
    assert all(row["fwd_ms"] > 0 for row in report.rows)
