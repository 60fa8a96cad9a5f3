"""Sentences of the pages that compare rows: the numbers in them follow from the rows."""

import csv
import re
from collections import defaultdict
from itertools import product
from pathlib import Path
from statistics import median

import pytest

import mixers
from mixers import HGRN1, LinearMixer, Mamba1
from zoo.experiments.definition import pairs_at

ROOT = Path(__file__).parents[2]
PAIRS = (4, 16, 32, 64, 128)
ONE_STEP = ("Gated DeltaNet", "Gated DeltaNet, β to 2", "KDA, β to 2", "DeltaProduct, 1 step")


def rows(name: str) -> list[dict[str, str]]:
    with open(ROOT / "reproductions" / "measured" / f"{name}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def says(page: str, sentence: str) -> bool:
    """Return whether a page has a sentence, whatever its line breaks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return " ".join(sentence.split()) in " ".join(text.split())


def recalled(name: str, mixer: str, factor: str = "1") -> int:
    """Pairs at 90 % of the median seed, at the learning rate whose median accuracy is the better one."""
    runs = defaultdict(list)
    for row in rows(name):
        if row["mixer"] == mixer and row.get("model.stack.mixer.factor", factor) == factor:
            runs[row["learning_rate"]].append(row)
    best = max(runs.values(), key=lambda runs: median(float(run["val_accuracy"]) for run in runs))
    accuracies = ({n: float(run[f"val_accuracy_by_task.pairs_{n}"]) for n in PAIRS} for run in best)
    return round(median(pairs_at(each, 0.9) for each in accuracies))


def test_one_cell_in_three_sweeps():
    state, family, newer = "state_h200", "delta_family_recall_h100", "newer_mixers_recall_h200"
    subheads = "Gated DeltaNet, subheads"
    small = recalled(state, subheads), recalled(family, "Gated DeltaNet"), recalled(newer, "Gated DeltaNet")
    large = recalled(state, subheads, "4"), recalled(family, "Gated DeltaNet", "4")
    assert says("docs/recall.md", "are {}, {} and {} at E = 1, {} and {} at E = 4.".format(*small, *large))


def test_long_heads_and_subheads_at_both_rates():
    accuracies = {
        (row["mixer"], row["model.stack.mixer.factor"], row["learning_rate"], row["seed"]): float(
            row["val_accuracy_by_task.pairs_128"]
        )
        for row in rows("state_h200")
    }

    def ahead(rate: str, first: str, second: str) -> int:
        cells = product("248", "012")
        return sum(
            accuracies[f"Gated DeltaNet, {first}", factor, rate, seed]
            > accuracies[f"Gated DeltaNet, {second}", factor, rate, seed]
            for factor, seed in cells
        )

    long, short = ahead("0.01", "long head", "subheads"), ahead("0.003", "subheads", "long head")
    assert says("docs/recall.md", f"the long head is more accurate in {long} of 9 pairs of seeds")
    assert says("docs/recall.md", f"at 3e-3, subheads are in {short} of 9.")


def test_the_better_rate_at_one_state():
    runs = defaultdict(list)
    for row in rows("state_h200"):
        if row["model.stack.mixer.factor"] == "1":
            runs[row["mixer"], row["learning_rate"]].append(float(row["val_accuracy_by_task.pairs_128"]))
    better = {mixer for mixer, rate in runs if median(runs[mixer, "0.003"]) > median(runs[mixer, "0.01"])}
    assert {"Gated DeltaNet, subheads", "GLA"} <= better
    assert not {"Mamba2", "no decay, subheads"} & better
    assert says("docs/recall.md", "At E = 1, 3e-3 is better for Gated DeltaNet and GLA")


def test_runs_that_track_states():
    runs = rows("state_tracking_h100")
    early = [run for run in runs if int(run["steps"]) < 5000]
    assert early
    assert says("docs/state_tracking.md", "(164M tokens), or until their validation accuracy is 0.99")
    assert all(run["gates"] != "failed" for run in early)
    of_one_step = [run for run in runs if run["group"] == "S3" and run["model"] in ONE_STEP]
    best = max(float(run[f"val_accuracy_by_task.length_{length}"]) for run in of_one_step for length in (128, 512))
    assert says("docs/state_tracking.md", f"no run exceeds {best:.2f}, not even at the training length.")


def kernel(op: str, column: str) -> float:
    (row,) = (r for r in rows("performance_kernels") if r["op"] == op and (r["shape.B"], r["shape.H"]) == ("4", "8"))
    return float(row[column])


def test_times_of_recurrences():
    delta = kernel("delta_rule", "fwd_bwd_graph_ms")
    shares = [kernel(op, "fwd_bwd_graph_ms") / delta for op in ("linear_constant", "linear_head")]
    sentence = "{:.0%} and {:.0%} of the time of the delta rule in both passes".format(*shares).replace("%", " %")
    assert says("docs/which_mixer.md", sentence)


def test_recurrences_next_to_attention():
    flops = 4 * 8 * 4096 * 128**2
    delta, channel = (
        factor * flops / kernel(op, "fwd_graph_ms") / 1e9 for factor, op in ((8, "delta_rule"), (6, "linear_channel"))
    )
    attention = next(row for row in rows("performance_attention") if row["shape.B"] == "8" and row["job"] == "full")
    of_attention = 2 * 8 * 8 * 4096**2 * 128 / float(attention["fwd_graph_ms"]) / 1e9
    page = "reproductions/state_expansion/table_10.yaml"
    assert says(page, f"reaches {delta:.0f} TFLOP/s with the delta rule")
    assert says(page, f"and {channel:.0f} with decays per channel")
    assert says(page, f"and attention {of_attention:.0f} at (8, 8, 4096, 128)")


@pytest.mark.parametrize("model", ["Transformer++", "E = 1", "E = 4", "E = 8"])
def test_several_needles(model: str):
    right = defaultdict(list)
    for row in rows("needles_h200"):
        name = row["model"].removeprefix("Gated DeltaNet, ")
        if name == model and row["task"] == "m_niah_1" and "GLA" not in row["model"]:
            right[row["length"], row["seed"]].append(float(row["right"]) / float(row["samples"]))
    means = {cell: f"{100 * sum(each) / len(each):.0f}" for cell, each in right.items()}
    numbers = [f"{means[length, '0']} {means[length, '1']}" for length in ("512", "1024")]
    assert says("reproductions/state_expansion/table_6.yaml", " and ".join(numbers))


def test_linear_mixers_are_counted():
    linear = [name for name in mixers.names() if issubclass(mixers.get(name), LinearMixer | HGRN1 | Mamba1)]
    assert says("docs/parity.md", f"| {len(linear)} (`python cli.py mixers`) |")


def test_mixers_with_proofs_and_comparisons():
    """README: all mixers but `Bidirectional` were examined on a GPU, and are on the parity page."""
    causal = [name for name in mixers.names() if mixers.get(name).causal]
    proven = {
        row["subject"]
        for row in rows("proofs_h200")
        if row["kind"] == "layers" and row["check"] == "causal" and row["status"] == "passed"
    }
    assert proven >= {*causal}
    assert says("README.md", "and are causal to the bit. [GPU proofs](docs/proofs.md) cover all.")
    parity = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    assert [name for name in causal if not re.search(rf"\b{name}\b", parity)] == []


@pytest.mark.parametrize("name", ["proofs_cpu", "proofs_h100"])
def test_properties_that_are_exact_everywhere(name: str):
    """docs/proofs.md does not show them."""
    of_ours = [row for row in rows(name) if row["check"] in ("one token", "memory", "resumed", "sampled")]
    assert {row["check"] for row in of_ours} == {"one token", "memory", "resumed", "sampled"}
    assert {row["says"] for row in of_ours} == {"exact"}


def test_public_layouts_there_and_back():
    with open(ROOT / "docs" / "public_families.csv", encoding="utf-8", newline="") as file:
        families = list(csv.DictReader(file))
    assert {(row["models"], row["differences"]) for row in families} == {("10", "0")}
    assert says("docs/public_checkpoints.md", "Ten models of each family, built by the other project")


def test_newer_mixers_do_not_track_a5():
    best = max(
        float(row["val_accuracy_by_task.length_512"])
        for row in rows("state_tracking_newer_h200")
        if row["group"] == "A5"
    )
    assert says("docs/state_tracking.md", f"No model of this sweep tracks A5 ({best:.2f} at 512 tokens, not shown).")
