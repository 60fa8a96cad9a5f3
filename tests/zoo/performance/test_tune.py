"""`tune` and the files it writes. What runs on a GPU is played by stand-ins: here nothing can be timed."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kernels
from kernels.delta_rule.gpu import plan as gpu_plan
from kernels.delta_rule.gpu.general import plan as general_plan
from kernels.gpu import device, launch_file, launch_table
from kernels.gpu.launch import LaunchSpec
from kernels.gpu.launch_table import TABLE, LaunchConfig, launch, optional
from kernels.gpu.miscompilations import miscompiled
from zoo.performance import tune
from zoo.performance.bench_calls import BenchCall, Shape
from zoo.performance.tune import ALONE, Target, Trial, Tuner, _targets, around, cases, fits, table

pytest_plugins = "tests.desk"

GPU = torch.device("cuda", 6)
BF16, FP32 = torch.bfloat16, torch.float32
CARRY = {"kernel": "linear_recurrence.carry", "size": 128, "itemsize": 2, "block": 32, "warps": 8, "stages": 3}
DQ = {"kernel": "delta_rule.dq", "size": 64, "itemsize": 2, "keys": 32, "values": 16, "warps": 2, "stages": 1}


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    properties = SimpleNamespace(shared_memory_per_block_optin=227 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    forget()


def forget() -> None:
    for cached in (
        device._capability,
        launch_table._entry,
        launch_table._largest,
        launch_file.version,
        launch_file._for,
    ):
        cached.cache_clear()
    launch_file.read.cache_clear()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pretend(monkeypatch, (9, 0))
    yield
    forget()


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pretend(monkeypatch, (8, 0))
    yield
    forget()


def written(folder: Path, *entries: dict[str, Any], capability: tuple[int, int] = (9, 0)) -> str:
    file = folder / "launch.json"
    file.write_text(json.dumps({"capability": capability, "entries": entries}))
    return str(file)


def test_a_file_names_what_the_tables_have():
    assert set(launch_file.KERNELS) == set(TABLE)
    assert {number for numbers in launch_file.NUMBERS.values() for number in numbers} == set(LaunchConfig._fields)
    for kernel, entries in TABLE.items():
        unused = set(LaunchConfig._fields) - set(launch_file.KERNELS[kernel])
        assert not any(getattr(entry, number) for entry in entries.values() for number in unused)


def test_entries_of_a_file_go_first(hopper: None, tmp_path: Path):
    file = written(tmp_path, CARRY, DQ)
    with launch_file.launch_file(file):
        assert launch("linear_recurrence.carry", 128, BF16, GPU) == LaunchConfig(8, 3, block=32)
        assert launch("linear_recurrence.carry", 64, BF16, GPU) == LaunchConfig(8, 3, block=32)
        # other sizes, dtypes and kernels stay
        assert launch("linear_recurrence.carry", 256, BF16, GPU) == TABLE["linear_recurrence.carry"][9, 256, 2]
        assert launch("linear_recurrence.carry", 64, FP32, GPU) == TABLE["linear_recurrence.carry"][9, 64, 4]
        assert (
            launch("linear_recurrence.head_scores", 128, BF16, GPU) == TABLE["linear_recurrence.head_scores"][9, 256, 2]
        )
        assert launch("delta_rule.dq", 64, BF16, GPU) == LaunchConfig(2, 1, keys=32, values=16)
        assert launch("delta_rule.dk", 64, BF16, GPU) == TABLE["delta_rule.dk"][9, 64, 2]
        assert launch("delta_rule.dq", 128, BF16, GPU) == TABLE["delta_rule.dq"][9, 128, 2]
    assert launch("linear_recurrence.carry", 128, BF16, GPU) == TABLE["linear_recurrence.carry"][9, 128, 2]
    assert launch("delta_rule.dq", 64, BF16, GPU) == TABLE["delta_rule.dq"][9, 64, 2]


def test_a_smaller_built_in_entry_is_nearer(hopper: None, tmp_path: Path):
    file = written(tmp_path, {**CARRY, "size": 256}, {**DQ, "size": 256})
    with launch_file.launch_file(file):
        assert launch("linear_recurrence.carry", 128, BF16, GPU) == TABLE["linear_recurrence.carry"][9, 128, 2]
        assert launch("linear_recurrence.carry", 129, BF16, GPU) == LaunchConfig(8, 3, block=32)
        assert launch("delta_rule.dq", 128, BF16, GPU) == TABLE["delta_rule.dq"][9, 128, 2]


def test_longer_heads_need_an_entry_of_every_kernel(ampere: None, tmp_path: Path):
    assert launch_table.largest("linear_recurrence", BF16, GPU) == 64
    one = written(tmp_path, CARRY, capability=(8, 0))
    with launch_file.launch_file(one):
        assert launch_table.largest("linear_recurrence", BF16, GPU) == 64
    names = [name for name in TABLE if name.startswith("linear_recurrence")]
    (tmp_path / "all").mkdir()
    every = written(tmp_path / "all", *({**CARRY, "kernel": name} for name in names), capability=(8, 0))
    with launch_file.launch_file(every):
        assert launch_table.largest("linear_recurrence", BF16, GPU) == 128
        assert launch_table.largest("linear_recurrence", FP32, GPU) == 32


def test_a_file_for_another_gpu_is_not_used(hopper: None, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    file = written(tmp_path, CARRY, capability=(8, 9))
    with launch_file.launch_file(file):
        for size in (128, 64):
            assert launch("linear_recurrence.carry", size, BF16, GPU) == TABLE["linear_recurrence.carry"][9, 128, 2]
        assert caplog.text.count("compute capability 8.9, not for 9.0") == 1
        assert (
            launch("linear_recurrence.carry", 64, BF16, torch.device("cpu"))
            == TABLE["linear_recurrence.carry"][9, 128, 2]
        )


@pytest.mark.slow
def test_the_environment_names_the_file(tmp_path: Path):
    code = "from kernels.gpu import launch_file; import sys; sys.stdout.write(repr(launch_file.current()))"
    for value, expected in (("here.json", "'here.json'"), ("", "None")):
        environment = {**os.environ, "ZOO_LAUNCH": value}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=tune.ROOT, env=environment, capture_output=True, text=True)
        assert done.stdout == expected


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read .*No such file"),
        ("{", "is not JSON"),
        ("[]", "no list of entries"),
        ('{"capability": [9, 0]}', "no list of entries"),
        ('{"capability": 9, "entries": []}', "capability: expected two whole numbers, got 9"),
        ([3], "entry 0: expected an object, got 3"),
        ([CARRY, {**CARRY, "kernel": "carry"}], "entry 1: kernel: 'carry' is not one of"),
        ([{**CARRY, "keys": 16}], "expected the keys block, itemsize, kernel, size, stages, warps, got"),
        ([{k: x for k, x in DQ.items() if k != "keys"}], "expected the keys itemsize, kernel, keys"),
        ([{**CARRY, "block": 48}], "block: 48 is not one of"),
        ([{**CARRY, "block": True}], "block: True is not one of"),
        ([{**DQ, "warps": 3}], "warps: 3 is not one of"),
        ([{**DQ, "stages": 0}], "stages: 0 is not one of"),
        ([{**DQ, "itemsize": 8}], "itemsize: 8 is not one of"),
        ([{**DQ, "size": 0}], "size: expected a whole number"),
        ([{**DQ, "size": "64"}], "size: expected a whole number"),
    ],
)
def test_a_broken_file_is_explained_in_a_sentence(content, words: str, hopper: None, tmp_path: Path):
    file = tmp_path / "launch.json"
    if isinstance(content, list):
        written(tmp_path, *content)
    elif content is not None:
        file.write_text(content)
    with launch_file.launch_file(file), pytest.raises(kernels.UserError, match=rf"^ZOO_LAUNCH: .*{words}") as raised:
        launch("linear_recurrence.carry", 64, BF16, GPU)
    assert "\n" not in str(raised.value)


def test_candidates_differ_in_one_number_and_are_allowed():
    entry = {"keys": 0, "values": 64, "warps": 4, "stages": 2}
    actual = around(entry)
    assert actual[0] == entry
    assert {e["values"] for e in actual} == {32, 64, 128}
    assert {e["warps"] for e in actual} == {2, 4, 8}
    assert {e["stages"] for e in actual} == {1, 2, 3, 4}
    for other in actual[1:]:
        assert sum(other[name] != entry[name] for name in entry) == 1
        assert all(other[name] in launch_file.ALLOWED[name] for name in other)
    assert {e["block"] for e in around({"block": 256, "warps": 4, "stages": 2})} == {128, 256}
    assert {e["block"] for e in around({"block": 16, "warps": 4, "stages": 2})} == {16, 32}


def test_what_cannot_fit_is_not_tried():
    forward = Target("delta_rule.forward", 256, 4)
    entry = {"keys": 0, "values": 64, "warps": 4, "stages": 2}
    assert not fits(forward, entry, 99 << 10)
    assert fits(forward, {**entry, "stages": 1}, 99 << 10)  # nothing is in flight
    assert fits(forward, entry, 227 << 10)
    assert fits(Target("linear_recurrence.step", 256, 4), {"block": 64, "warps": 4, "stages": 4}, 1)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_present_entries_fit(size: int, itemsize: int, hopper: None):
    for kernel in launch_file.KERNELS:
        entry = tune.present(target := Target(kernel, size, itemsize), GPU)
        if entry is None:
            assert kernel in ("delta_rule.narrow", "delta_rule.long", "general_delta_rule.narrow")
            continue
        assert fits(target, entry, 227 << 10)
        assert not launch_file._mistake({**target._asdict(), **entry})
        assert list(cases(target, timed=True))
        assert list(cases(target, timed=False))


@pytest.mark.parametrize("processors", [108, 128, 132, 160])
def test_cases_reach_the_kernel_that_is_meant(processors: int, hopper: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_plan, "multiprocessors", lambda device: processors)
    for size in (64, 128):
        forward, narrow = (optional(f"delta_rule.{name}", size, BF16, GPU) for name in ("forward", "narrow"))
        for name in ("forward", "backward", "narrow"):
            used, segments = set(), set()
            for timed in (True, False):
                for _, (B, H, T, D) in cases(Target(f"delta_rule.{name}", size, 2), timed=timed):
                    room = gpu_plan.fitting(forward, B * H, D, GPU)
                    cut = gpu_plan.segments(room, -(-T // 64)) > 1
                    used.add("narrow" if narrow and room > 1 and not cut else "wide")
                    segments.add(cut)
            assert used == {"narrow"} if name == "narrow" else "wide" in used
            assert segments == ({False} if name == "narrow" else {False, True})


def general_launches(heads: int) -> dict[str, LaunchSpec]:
    """The launches of a general delta rule over keys and values of 64 channels in bf16; `pass` is the forward one."""
    sizes = torch.Size((1, 256, heads, 64))
    plan, per_head = (
        general_plan.GeneralDeltaRule(sizes, sizes, 1, 1.0, gate, False, False, BF16, GPU, None)
        for gate in ("channel", "head")
    )
    plan.layout = per_head.layout = SimpleNamespace(chunks=range(4))
    launches = {"prepare": plan.prepare(False), "pass": plan.forward(), "backward": plan.backward()}
    launches |= {"scalar_prepare": per_head.scalar_prepare(), "scalar_gradients": per_head.scalar_gradients()}
    return launches | {"pairs": plan.pairs(), "gradients": plan.gradients(False)}


@pytest.mark.parametrize("kernel", launch_file.NAMES["general_delta_rule"])
def test_a_file_changes_one_launch_of_the_general_delta_rule(
    kernel: str, hopper: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(general_plan, "multiprocessors", lambda device: 132)
    target = Target(f"general_delta_rule.{kernel}", 64, 2)
    entry = {**tune.present(target, GPU), "warps": 2}
    file = written(tmp_path, {**target._asdict(), **entry})
    heads = 4 if kernel == "narrow" else 100
    before = general_launches(heads)
    with launch_file.launch_file(file):
        after = general_launches(heads)
    name = "pass" if kernel in ("forward", "narrow") else kernel
    assert {each for each in before if before[each].warps != after[each].warps} == {name}
    assert after[name].warps == 2
    sizes = {"keys": "BK", "values": "BV"}
    assert all(after[name].options[sizes[axis]] == min(entry[axis], 64) for axis in sizes if entry[axis])


@pytest.mark.parametrize("processors", [108, 160])
def test_cases_reach_both_forward_launches_of_the_general_delta_rule(
    processors: int, hopper: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(general_plan, "multiprocessors", lambda device: processors)
    for name in ("forward", "narrow"):
        for timed in (True, False):
            used = set()
            for op, (B, H, T, D) in cases(Target(f"general_delta_rule.{name}", 64, 2), timed=timed):
                sizes = torch.Size((B, T, H, D))
                plan = general_plan.GeneralDeltaRule(sizes, sizes, 1, 1.0, "channel", False, False, BF16, GPU, None)
                used.add((op, plan.pass_entry("forward") == plan.entry(name)))
            assert {op for op, meant in used if meant} == {"kda", "comba"}


class Processes:
    """Stands in for other processes: candidates with 8 warps are wrong, the time is given by a function."""

    def __init__(self, time):
        self.time, self.files = time, []

    def __call__(self, task):
        target = Target(*task["target"])
        if "entry" in task:
            with launch_file.launch_file(task["file"]):
                in_force = tune.present(target, GPU) == task["entry"]
            assert in_force
            assert not tune.is_cut(target, GPU) or target.kernel.startswith("linear")
            self.files.append(json.loads(Path(task["file"]).read_text())["entries"])
            return {"wrong": "illegal memory access" if task["entry"]["warps"] == 8 else None}
        actual = {}
        for key, file in task["files"].items():
            with launch_file.launch_file(file):
                actual[key] = self.time(tune.present(target, GPU) if file else None)
        return {"ms": actual}


def tuned(targets, time, folder: Path) -> tuple[Tuner, dict[str, Any]]:
    tuner = Tuner(GPU, 1, 0.1, Processes(time))  # one at a time: the stand-ins share this process
    tuner.run(targets, folder / "out" / "launch.json")
    return tuner, json.loads((folder / "out" / "launch.json").read_text())


def test_kernels_by_op_by_name_and_by_both():
    def kernels(inputs: str) -> list[str]:
        return [target.kernel for target in _targets(inputs, [64], "bf16")]

    assert kernels("local") == ["linear_recurrence.local"]
    assert kernels("delta_rule.narrow,dq,delta_rule.dq") == ["delta_rule.narrow", "delta_rule.dq"]
    for op in launch_file.NAMES:
        assert kernels(op) == [f"{op}.{name}" for name in launch_file.NAMES[op]]
    assert kernels("narrow") == ["delta_rule.narrow", "general_delta_rule.narrow"]
    assert {target.kernel for target in _targets(None, [64], "bf16")} == set(launch_file.KERNELS)


def test_the_fastest_right_candidate_is_proposed_and_the_file_can_be_used(hopper: None, tmp_path: Path):
    targets = _targets("carry,delta_rule", [128], "bf16")

    def time(entry):
        return 1.0 if entry is None else 1 / entry["warps"] + 0.1 * entry["stages"]

    tuner, record = tuned(targets, time, tmp_path)
    # 8 warps would be the fastest, if they were right
    assert all(trial.entries[trial.best]["warps"] == 4 for trial in tuner.trials)
    # one stage is, but that is known to be compiled wrongly with 32 values
    stages = {trial.target.kernel: trial.entries[trial.best]["stages"] for trial in tuner.trials}
    assert stages.pop("delta_rule.narrow") == 2
    assert set(stages.values()) == {1}
    assert {"linear_recurrence.carry", "delta_rule.dk"} < {entry["kernel"] for entry in record["entries"]}
    with launch_file.launch_file(tmp_path / "out" / "launch.json"):
        assert launch("linear_recurrence.carry", 128, BF16, GPU) == LaunchConfig(4, 1, block=64)
        assert launch("delta_rule.dk", 128, BF16, GPU) == TABLE["delta_rule.dk"][9, 128, 2]._replace(stages=1)
    # what was found for one kernel is in force for the next
    (forward,) = (e for e in tuner.process.files[-1] if e["kernel"] == "delta_rule.forward")
    assert forward["stages"] == 1
    wrong = [row for kernel in record["measured"] for row in kernel["rows"] if row["wrong"]]
    assert wrong
    assert all(row["warps"] == 8 and row["ms"] is None and not row["proposed"] for row in wrong)
    shown = table(tuner.trials, "a GPU")
    assert shown.row_count == sum(len(trial.entries) + 1 for trial in tuner.trials)


def test_noise_changes_nothing(hopper: None, tmp_path: Path):
    def time(entry):
        return 1.0 if entry is None or entry["stages"] == 2 else 0.98

    tuner, record = tuned(_targets("dq", [64], "bf16"), time, tmp_path)
    assert [trial.best for trial in tuner.trials] == [0]
    (entry,) = record["entries"]
    assert {name: entry[name] for name in ("keys", "values", "warps", "stages")} == {
        name: getattr(TABLE["delta_rule.dq"][9, 64, 2], name) for name in ("keys", "values", "warps", "stages")
    }


@pytest.mark.parametrize(("alone", "kept"), [(1.0, True), (0.1, False)])
def test_heads_that_are_cut_stay_so_unless_it_pays(alone: float, kept: bool, ampere: None, tmp_path: Path):
    def time(entry):
        return alone if entry is None else 0.5

    _, record = tuned(_targets("linear_recurrence", [128], "bf16"), time, tmp_path)
    assert bool(record["entries"]) == kept
    with launch_file.launch_file(tmp_path / "out" / "launch.json"):
        assert launch_table.largest("linear_recurrence", BF16, GPU) == (128 if kept else 64)
    _, record = tuned(_targets("carry", [128], "bf16"), time, tmp_path)  # one of five is no use
    assert not record["entries"]


def test_where_nothing_is_right_nothing_is_proposed(hopper: None, tmp_path: Path):
    tuner = Tuner(GPU, 1, 0.1, lambda task: {"wrong": "exit code -11"})
    tuner.run(_targets("dq", [64], "bf16"), tmp_path / "launch.json")
    assert tuner.trials[0].best is None
    assert set(tuner.trials[0].wrong.values()) == {"exit code -11"}
    assert json.loads((tmp_path / "launch.json").read_text())["entries"] == []
    assert launch_file.read(str(tmp_path / "launch.json")).entries == {}


def test_a_timing_that_dies_leaves_no_proposal(hopper: None):
    tuner = Tuner(GPU, 1, 0.1, lambda task: {"wrong": None if "entry" in task else "died"})
    target = Target("delta_rule.dq", 64, 2)
    trial = tuner.try_all(target, {target: tune.present(target, GPU)})
    assert trial.best is None
    assert set(trial.wrong.values()) == {"timing: died"}


def test_the_present_entry_can_be_the_wrong_one():
    entries = [{"block": 64}, {"block": 32}]
    trial = Trial(Target("linear_recurrence.carry", 64, 2), entries, {0: "wrong"}, {"1": 2.0, ALONE: 1.0})
    assert trial.best == 1
    assert not trial.gains


@pytest.fixture
def checked(hopper: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Checks a candidate on the CPU: the chunkwise form takes the part of Triton."""
    monkeypatch.setattr(
        tune,
        "BenchCall",
        lambda name, shape, dtype, device, backend, window: BenchCall(
            name, shape, dtype, torch.device("cpu"), "torch", window
        ),
    )
    monkeypatch.setattr(tune, "cases", lambda target, timed: [("delta_rule", Shape(1, 2, 70, 16))])
    target, entry = Target("delta_rule.dq", 64, 4), {name: DQ[name] for name in launch_file.NUMBERS["delta_rule"]}
    file = written(tmp_path, {**target._asdict(), **entry})
    return lambda **other: tune.check(target, {**entry, **other}, file, GPU)


def test_what_is_right_passes(checked):
    assert checked() is None
    assert checked(warps=8) == "does not take effect"


def test_what_is_wrong_or_does_not_repeat_fails(checked, monkeypatch: pytest.MonkeyPatch):
    package = sys.modules["kernels.delta_rule"]
    right, calls = package.chunk.forward, []

    def wrong(a):
        calls.append(a)
        o, state = right(a)
        return o * special.get(len(calls), 1), state

    monkeypatch.setitem(package.OP.implementations, "torch", wrong)
    special = {1: 1.01}  # the first call is the candidate's, the second the one it is compared with
    assert "o is off by 1.0e-02" in checked()
    calls.clear()
    special = {12: 1.00001}
    assert checked() == "delta_rule: results do not repeat"


def test_every_file_is_in_force_when_its_graph_is_recorded(checked, monkeypatch: pytest.MonkeyPatch):
    recorded = []

    def as_graph(call, device):
        recorded.append(launch_file.current())
        return call

    monkeypatch.setattr(tune, "as_graph", as_graph)
    files = {"0": "first.json", "3": "second.json", ALONE: None}
    with launch_file.launch_file("another.json"):
        actual = tune.times(Target("delta_rule.dq", 64, 4), files, 0.001, torch.device("cpu"))
    assert recorded == ["first.json", "second.json", None]
    assert actual.keys() == files.keys()
    assert all(ms > 0 for ms in actual.values())


def test_a_process_that_dies_is_a_remark(monkeypatch: pytest.MonkeyPatch):
    task = {"target": ["delta_rule.dq", 64, 2], "entry": DQ, "file": "nowhere.json"}
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert tune.in_process(task) == {"wrong": "exit code 1"}
    monkeypatch.undo()
    monkeypatch.setattr(subprocess, "run", lambda *inputs, timeout, **_: expire(timeout))
    assert "longer than" in tune.in_process(task)["wrong"]


def expire(timeout: float) -> None:
    raise subprocess.TimeoutExpired("python", timeout)


def test_without_a_gpu_it_says_so(command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = command("tune")
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert "no CUDA device" in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kernels=dk2"], "kernels: 'dk2' is not one of .*did you mean 'dk'"),
        (["--sizes=[100]"], "sizes: 100 is not one of"),
        (["--sizes=128"], r"sizes: 128 is not a list, as \[128\] would be"),
        (["--dtypes=fp8"], "dtypes: 'fp8' is not one of"),
        (["--jobs=0"], "jobs: expected at least 1"),
    ],
)
def test_wrong_arguments(arguments: list[str], words: str, command):
    done = command("tune", *arguments)
    assert done.code == 2
    assert re.search(words, done.err)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kernel", ["linear_recurrence.carry", "linear_recurrence.step", "delta_rule.forward", "delta_rule.narrow"]
)
def test_present_entries_pass_their_check_on_device(kernel: str, tmp_path: Path):
    device = torch.device("cuda")
    target = Target(kernel, 64, 2)
    entry = tune.present(target, device)
    assert entry is not None
    file = written(tmp_path, {**target._asdict(), **entry}, capability=torch.cuda.get_device_capability())
    assert tune.in_process({"target": target, "entry": entry, "file": file}) == {"wrong": None}
    actual = tune.in_process({"target": target, "files": {"0": file, ALONE: None}, "seconds": 0.2})
    assert set(actual["ms"]) == {"0", ALONE}
    assert all(0 < ms < 1000 for ms in actual["ms"].values())


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("kernel", TABLE)
def test_no_candidate_is_known_to_be_compiled_wrongly(kernel: str, itemsize: int, size: int):
    entries = [entry for (gpu, _, bytes_), entry in TABLE[kernel].items() if (gpu, bytes_) == (9, itemsize)]
    for entry in entries:
        present = {name: getattr(entry, name) for name in launch_file.KERNELS[kernel]}
        target = Target(kernel, size, itemsize)
        offered = tune.candidates(target, present, 227 << 10, 9)
        assert all(miscompiled(kernel, each, 9) is None for each in offered)
        assert len(offered) <= len(tune.candidates(target, present, 227 << 10, 8))


def test_tune_leaves_out_what_is_compiled_wrongly():
    present = {"keys": 64, "values": 64, "warps": 4, "stages": 2}
    target = Target("delta_rule.dq", 128, 2)
    halved = {**present, "keys": 32}
    assert halved in tune.candidates(target, present, 227 << 10, 8)
    assert halved not in tune.candidates(target, present, 227 << 10, 9)
