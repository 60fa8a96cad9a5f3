"""Which kernels run for a call, as a table; nothing runs, so no GPU is needed."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels

pytest.importorskip("triton")
from kernels.__main__ import arguments, explain, main, parser
from kernels.gpu import device as device_module
from kernels.gpu.device import DIRECT

ROOT = Path(__file__).parents[2]
STEP = ["step.advance"]
GLUON_CHUNKS = ["general.hopper_chunks.pair_products", "general.hopper_solve.solve_pairs"]
CASES = {
    "linear_recurrence --gate channel --no-beta": (
        ["hopper_vector_decay"],
        ["hopper_vector_decay.outputs"],
        ["hopper_vector_decay.gradients"],
    ),
    "linear_recurrence --gate channel --no-beta --device A100 --K 64": (
        ["vector_decay"],
        ["vector_decay.channel_scores", "sequential_pass.output_pass"],
        ["vector_decay.channel_scores"]
        + ["sequential_pass.output_pass"] * 3
        + ["vector_decay.channel_score_grads", "vector_decay.channel_grads"],
    ),
    "linear_recurrence --gate channel --K 64 --H 32": (  # with input gates
        ["vector_decay"],
        ["vector_decay.channel_scores", "sequential_pass.output_pass"],
        None,
    ),
    "linear_recurrence --gate head --no-beta": (
        ["scores_in_pass", "hopper_scalar_decay"],
        ["scalar_decay.head_gates", "sequential_pass.output_pass"],
        ["scalar_decay.head_gates", "hopper_scalar_decay.states", "hopper_scalar_decay.gradients"],
    ),
    "linear_recurrence --gate head --V 64 --H 32": (  # Mamba-2's sizes
        ["scores_in_pass", "hopper_scalar_decay"],
        ["scalar_decay.head_gates", "sequential_pass.output_pass"],
        ["scalar_decay.head_gates", "hopper_scalar_decay.states", "hopper_scalar_decay.gradients"],
    ),
    "linear_recurrence --gate head --device A100 --K 64": (
        ["scores_in_pass", "scores_first"],
        ["scalar_decay.head_gates", "sequential_pass.output_pass"],
        ["scalar_decay.head_scores"] + ["sequential_pass.output_pass"] * 3 + ["scalar_decay.head_gate_grads"],
    ),
    "linear_recurrence --gate constant --fixed-gates --K 64 --H 32": (
        ["scores_in_pass"],
        ["sequential_pass.output_pass"],
        ["sequential_pass.output_pass"] * 3,
    ),
    "linear_recurrence --T 1 --inference": (["one_token"], STEP, []),
    "delta_rule": (
        ["one_pass", "hopper_prepare", "hopper_pass"],
        ["hopper_prepare.prepare", "hopper_sequential_pass.scan_forward"],
        ["hopper_backward.gradients", "chunk_gradients.gradient_of_log_decay"],
    ),
    "delta_rule --B 8": (
        ["one_pass_in_halves", "hopper_prepare", "hopper_pass"],
        ["hopper_prepare.prepare", "hopper_sequential_pass.scan_forward"],
        ["sequential_pass.scan_backward", "hopper_backward.gradients", "chunk_gradients.gradient_of_log_decay"],
    ),
    "delta_rule --inference": (
        ["hopper_prepare", "hopper_pass", "scores_in_pass"],
        ["hopper_prepare.prepare", "hopper_sequential_pass.scan_forward"],
        [],
    ),
    "delta_rule --B 1 --H 16": (
        ["hopper_prepare", "narrow_blocks"],
        ["hopper_prepare.prepare", "sequential_pass.scan_forward"],
        None,
    ),
    "delta_rule --gate none --device A100 --K 64": (
        ["three_passes", "prepare", "wide_blocks"],
        ["prepare.prepare", "sequential_pass.scan_forward"],
        ["sequential_pass.scan_backward", "chunk_gradients.gradient_of_queries", "chunk_gradients.gradient_of_keys"],
    ),
    "delta_rule --B 1 --H 16 --T 512 --K 64": (
        ["narrow_blocks"],
        ["prepare.prepare", "sequential_pass.scan_forward"],
        None,
    ),
    "delta_rule --K 512": (["long_keys"], ["prepare.prepare", "sequential_pass_long.long_forward"], None),
    "delta_rule --gate channel": (
        ["general", "hopper_chunks", "hopper_pass"],
        [*GLUON_CHUNKS, "general.hopper_sequential_pass.scan_forward"],
        ["general.sequential_pass.scan_backward", "general.gradients.pairs", "general.hopper_chunks.gradients"],
    ),
    "delta_rule --gate channel --K 64": (
        ["general", "hopper_chunks", "pass"],
        [*GLUON_CHUNKS, "general.sequential_pass.scan_forward"],
        ["general.sequential_pass.scan_backward", "general.gradients.pairs", "general.hopper_chunks.gradients"],
    ),
    "delta_rule --gate channel --T 1 --inference": (["one_token"], ["general.step.advance"], []),
    "delta_rule --T 1 --inference": (["one_token"], STEP, []),
}


@pytest.mark.parametrize("words", CASES)
def test_paths_and_launches(words: str):
    if not DIRECT and "hopper" in str(CASES[words]):
        pytest.skip("the kernels in Gluon were not tested with this version of Triton")
    forward, backward = explain(parser().parse_args(["explain", *words.split(), *["--B", "16"] * ("--B" not in words)]))
    paths, *expected = CASES[words]
    names = [path.name for path in forward.paths + backward.paths]
    assert not set(paths) - set(names)
    for record, kernels_ in zip((forward, backward), expected, strict=True):
        names = [spec.name.split(".", 1)[1] for spec in record.launches]
        names = [name for name in names if not name.startswith("reductions")]
        assert kernels_ is None or names == kernels_
    assert all(path.why for path in forward.paths + backward.paths)


GLA = ["linear_recurrence", "--gate", "channel", "--no-beta"]


@pytest.mark.parametrize("op", [GLA, ["delta_rule"], ["delta_rule", "--E", "2", "--gate", "none"]], ids=" ".join)
def test_packed_documents_and_states(op: list[str]):
    plain, packed = (
        [spec.constants | {"of": spec.name} for record in explain(args) for spec in record.launches]
        for args in (parser().parse_args(["explain", *op, "--T", "500", *more]) for more in ([], ["--documents", "3"]))
    )
    assert packed
    assert packed != plain
    args = parser().parse_args(["explain", *op, "--documents", "3", "--initial-state", "--V", "64"])
    assert arguments(args)["initial_state"].shape == (3, 8 * args.E, 128, 64)
    assert all(record.launches for record in explain(args))


@pytest.mark.parametrize(("device", "said"), [("H100", True), ("A100", False)])
def test_an_untested_triton_is_named_as_the_reason(
    device: str, said: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(device_module, "DIRECT", False)
    monkeypatch.setattr(device_module.triton, "__version__", "9.1.0")
    monkeypatch.setenv("COLUMNS", "300")
    main(["explain", *GLA, "--device", device])
    printed = capsys.readouterr().out
    assert "hopper" not in printed
    reason = "Triton 9.1.0: kernels in Gluon are left out, as they were tested with 3.6 and 3.7 only"
    assert (reason in printed) == said


@pytest.mark.skipif(not DIRECT, reason="the kernels in Gluon were not tested with this version of Triton")
def test_equal_launches_are_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Those of groups of rows, where the backward pass recomputes large states."""
    monkeypatch.setenv("COLUMNS", "200")
    main(["explain", "linear_recurrence", "--gate", "channel", "--E", "8", "--no-beta", "--device", "H200"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "hopper_vector_decay.gradients" in line]
    assert "4 × 128" in line


@pytest.mark.skipif(not DIRECT, reason="the kernels in Gluon were not tested with this version of Triton")
def test_training_and_inference_run_the_same_kernels_in_deterministic_mode():
    with kernels.deterministic():
        forward, _ = explain(parser().parse_args(["explain", "delta_rule", "--B", "16", "--inference"]))
    assert [path.name for path in forward.paths] == ["hopper_pass", "hopper_prepare"]


@pytest.mark.skipif(not DIRECT, reason="the kernels in Gluon were not tested with this version of Triton")
def test_the_path_of_the_gradients_is_listed_where_they_are_computed():
    forward, backward = explain(parser().parse_args(["explain", "delta_rule", "--B", "16"]))
    assert [path.name for path in forward.paths] == ["hopper_pass", "hopper_prepare"]
    assert backward.paths[0].name == "one_pass"
    forward, backward = explain(parser().parse_args(["explain", "delta_rule", "--inference"]))
    assert "one_pass" not in {path.name for path in forward.paths + backward.paths}


def test_the_terminal(capsys: pytest.CaptureFixture[str]):
    main(["explain", *GLA, "--device", "A100", "--inference", "--constants"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "forward" in printed
    assert "backward" not in printed
    assert "vector_decay: any other decay per channel" in printed


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("delta_rule --gate token", "--gate: 'token' is not one of none, constant, head, channel"),
        ("delta_rule --no-beta", "--no-beta: the delta rule has input gates"),
        ("gla.yaml size/400m.yaml", "models and mixers are explained by python -m zoo explain gla.yaml size/400m.yaml"),
        ("delta_rule --B 0", "expected a whole number from 1, got '0'"),
        ("delta_rule --device V100", "invalid choice: 'V100'"),
        ("delta_rule --K 4096", "which takes keys of at most 256 channels"),
        ("linear_recurrence --H 3 --E 0", "expected a whole number from 1"),
    ],
)
def test_mistakes(words: str, says: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as error:
        main(["explain", *words.split()])
    assert says in f"{error.value} {capsys.readouterr().err}"


def test_nothing_stays_assumed():
    q = torch.randn(1, 70, 2, 16)
    expected, _ = kernels.linear_recurrence(q, q, q)
    explain(parser().parse_args(["explain", "linear_recurrence", "--B", "1"]))
    assert torch.equal(kernels.linear_recurrence(q, q, q)[0], expected)


@pytest.mark.slow
def test_without_triton_it_is_one_sentence():
    code = "import runpy, sys; sys.modules['triton'] = None; runpy.run_module('kernels', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("python -m kernels explains kernels in Triton, which cannot be imported")
