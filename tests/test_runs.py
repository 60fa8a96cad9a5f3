"""The folder of a run: one process at a time, nothing deleted, no dead end."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

import cli
import zoo
from kernels import UserError
from zoo.checkpoints.format import read_checkpoint
from zoo.config.parser import read
from zoo.files.output import CONFIG_HEADER
from zoo.files.sealed_json import read_sealed
from zoo.runs.folder import claimed, find_run
from zoo.train.metrics_file import read_metrics

from .commands import FIT, Command, run_process, sitting_at
from .forked_python import fork_server

TWO = ("--trainer.devices=2", "--trainer.strategy=ddp")


def test_a_row_has_what_a_scaling_law_needs(finished: Path) -> None:
    row = read_sealed(finished / "runs" / "done" / "results.json")
    assert row["mixers"] == "Mamba2+GatedDeltaNet+SlidingWindowAttention"
    assert row["parameters"] - row["parameters_without_embeddings"] == 2 * 512 * 32
    assert row["training_flops_per_token"] == 3 * row["forward_flops_per_token"]
    assert (row["schedule"], row["learning_rate"], row["warmup_steps"]) == ("cosine", 3e-3, 50)
    assert row["decay_starts"] == 50  # a warm-up longer than the run
    assert row["tokens_per_step"] == row["tokens_seen"] / row["steps"] == 2 * 32
    assert len(row["data_hash"]) == 16


@pytest.mark.slow
def test_the_data_hash_is_of_the_samples_and_not_of_their_order(command: Command, finished: Path) -> None:
    def data_hash(*arguments: str) -> str:
        name = f"run{len(arguments[0])}"
        assert command(*FIT, *arguments, "--run", name, "--trainer.max_steps=1").code == 0
        return read_sealed(f"runs/{name}/results.json")["data_hash"]

    whole = read_sealed(finished / "runs" / "done" / "results.json")["data_hash"]
    assert data_hash("--data.seed=7", "--data.batch_size=4") == whole
    assert data_hash("--data.max_characters=150000") != whole


@pytest.fixture
def copied(finished: Path, desk: Path) -> Path:
    """A copy of the complete run, in `runs/done` of the desk."""
    shutil.copytree(finished / "runs" / "done", desk / "runs" / "done")
    return desk / "runs" / "done"


# one process at a time


@pytest.mark.slow
def test_a_development_run_says_that_nothing_is_kept(command: Command, desk: Path):
    done = command(*FIT, "--run=try", "--trainer.fast_dev_run=true").ok()
    assert "trainer.fast_dev_run: training and validation work; nothing is kept" in done.out


@pytest.mark.slow
def test_one_process_trains_in_a_folder(command: Command, copied: Path):
    before = (copied / "metrics.jsonl").read_bytes()
    with FileLock(copied / ".lock"):
        for options in (("--resume", "done", "--trainer.max_steps=6"), (*FIT[1:], "--run", "done")):
            failed = command("fit", *options).refused()
            assert "runs/done is being trained by another process" in failed.err
    assert (copied / "metrics.jsonl").read_bytes() == before
    assert command("fit", "--resume", "done", "--trainer.max_steps=5").code == 0  # and then one may


# nothing is deleted


@pytest.mark.slow
@pytest.mark.usefixtures("forked_runs")
def test_what_a_run_has_not_made_is_kept(command: Command, desk: Path):
    notes = desk / "mine" / "gated_deltanet" / "notes"
    notes.mkdir(parents=True)
    (notes / "thesis.tex").write_text("years of work")
    options = ("--folder=mine", "--trainer.max_steps=1", "--model.num_layers=1", "--data.max_characters=200000")
    command("compare", "gated_deltanet.yaml", *options).refused()
    assert (notes / "thesis.tex").read_text() == "years of work"
    log = (desk / "mine" / "gated_deltanet.log").read_text()
    assert "mine/gated_deltanet exists already and holds notes/thesis.tex, which is not a run's file" in log


@pytest.mark.slow
def test_a_run_with_any_checkpoint_is_never_new(command: Command, copied: Path):
    for name in ("last.ckpt", "best.ckpt"):
        if name == "last.ckpt":
            (copied / "checkpoints" / name).rename(copied / "checkpoints" / "step-00000004.ckpt")
        else:
            (copied / "checkpoints" / name).unlink()
        failed = command(*FIT, "--run", "done").refused()
        assert "runs/done exists already; continue it with --resume" in failed.err
        assert (copied / "results.json").is_file()


# no dead end


@pytest.mark.slow
@pytest.mark.parametrize("moved", [1, 3, None])
def test_a_run_whose_replacement_was_killed_is_put_back(command: Command, copied: Path, moved: int | None):
    """As by SIGKILL while the old files are set aside, or when all of them are and some of the new ones exist."""
    before = {file.relative_to(copied): file.read_bytes() for file in copied.rglob("*") if file.is_file()}
    paths = sorted(copied.iterdir())
    aside = copied / (".replaced" if moved is None else ".replacing")
    aside.mkdir()
    for path in paths[:moved]:
        path.rename(aside / path.name)
    if moved is None:
        (copied / "config.yaml").write_text("a new one")
    assert "runs/done exists already" in command(*FIT, "--run", "done").err
    after = {file.relative_to(copied): file.read_bytes() for file in copied.rglob("*") if file.is_file()}
    assert {name: after.get(name) for name in before} == before


def killed_while_replacing(run: Path) -> dict[Path, bytes]:
    """As by SIGKILL of `fit --overwrite` before its first batch, then files of the user; return all to be kept."""
    before = {file.relative_to(run): file.read_bytes() for file in run.rglob("*") if file.is_file()}
    paths = sorted(run.iterdir())
    (run / ".replaced").mkdir()
    for path in paths:
        path.rename(run / ".replaced" / path.name)
    (run / "config.yaml").write_bytes(CONFIG_HEADER)
    (run / "lightning_logs" / "version_0").mkdir(parents=True)
    (run / "lightning_logs" / "version_0" / "hparams.yaml").write_text("{}")
    for name in ("notes.md", "figures/1.png", "checkpoints/why.txt", "lightning_logs/mine.txt"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("years of work")
        before[Path(name)] = b"years of work"
    return before


@pytest.mark.parametrize("resume", [False, True])
def test_files_of_the_user_next_to_a_killed_replacement_stay(finished: Path, tmp_path: Path, resume: bool):
    run = tmp_path / "run"
    shutil.copytree(finished / "runs" / "done", run)
    expected = killed_while_replacing(run)
    if resume:
        assert find_run(str(run)) == (run, run / "checkpoints" / "last.ckpt")
    else:
        with pytest.raises(UserError, match="exists already; continue it"), claimed(run, new=True):
            pass
    files = {file.relative_to(run): file.read_bytes() for file in run.rglob("*") if file.is_file()}
    assert files | {Path(".lock"): b""} == expected | {Path(".lock"): b""}


def _write_twice(file: Path) -> None:
    file.write_text("years of work")
    file.open("x")


def test_a_run_that_fails_before_its_first_batch_removes_no_file_of_the_user(finished: Path, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(finished / "runs" / "done", run)
    with pytest.raises(FileExistsError), claimed(run, new=True, overwrite=True):
        _write_twice(run / "notes.md")
    assert (run / "notes.md").read_text() == "years of work"
    assert find_run(str(run)) == (run, run / "checkpoints" / "last.ckpt")


def test_nothing_is_moved_through_links(finished: Path, tmp_path: Path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    shutil.copytree(finished / "runs" / "done", run)
    elsewhere.mkdir()
    (elsewhere / "thesis.tex").write_text("years of work")
    for name in (".replaced", ".replacing"):
        (run / name).symlink_to(elsewhere)
    find_run(str(run))
    assert [path.name for path in elsewhere.iterdir()] == ["thesis.tex"]
    for name in (".replaced", ".replacing"):
        (run / name).unlink()
    killed_while_replacing(run)
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").symlink_to(elsewhere)
    with pytest.raises(UserError, match=r"checkpoints is a link where the run that is put back has a folder; remove"):
        find_run(str(run))
    assert [path.name for path in elsewhere.iterdir()] == ["thesis.tex"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "folder"), [("a/b", "runs/a/b"), ("runs/c", "runs/c"), ("./d/e", "d/e"), ("../x", "../x")]
)
def test_a_run_is_in_the_folder_of_runs_unless_its_name_is_a_path(name: str, folder: str, desk: Path):
    tiny = ("tiny.yaml", "trainer.max_steps=1", "trainer.limit_val_batches=0")
    assert zoo.fit("gdn_h2.yaml", *tiny, run=name, dry_run=True).folder == Path(folder)
    assert zoo.fit("gdn_h2.yaml", *tiny, run=name).folder == Path(folder)
    assert (desk / folder / "checkpoints" / "last.ckpt").is_file()
    assert zoo.fit(resume=name).folder.samefile(desk / folder)


@pytest.mark.slow
def test_a_home_directory_in_the_name_of_a_run(command: Command, desk: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(desk / "home"))
    assert command(*FIT, "--run=~/mine").code == 0
    assert (desk / "home" / "mine" / "metrics.jsonl").is_file()
    assert not (desk / "~").exists()
    assert "is complete" in command("fit", "--resume=~/mine").out


@pytest.mark.parametrize("name", ["config.yaml", "tokenizer.json", "results.json", "fit-profile.txt"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_files_of_somebody_else_are_kept(tmp_path: Path, name: str, overwrite: bool):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("years of work")
    message = f"holds {name}, but not the config.yaml of a run, so nothing there is replaced; choose another run"
    with pytest.raises(UserError, match=message), claimed(tmp_path, new=True, overwrite=overwrite):
        pass
    assert (tmp_path / name).read_text() == "years of work"


def test_a_run_without_a_checkpoint_is_known_by_its_config(tmp_path: Path):
    (tmp_path / "config.yaml").write_bytes(CONFIG_HEADER + b"model: {}\n")
    with claimed(tmp_path, new=True):
        pass


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_checkpoint_starts_anew(command: Command, copied: Path):
    shutil.rmtree(copied / "checkpoints")
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "train_loss": 1.0}\n')
    assert command(*FIT, "--run", "done").code == 0
    assert [row["step"] for row in read_metrics(copied / "metrics.jsonl")] == [0, 1, 2, 3]


@pytest.mark.slow
def test_other_checkpoints_take_the_place_of_a_lost_one(
    command: Command, copied: Path, caplog: pytest.LogCaptureFixture
):
    (copied / "checkpoints" / "last.ckpt").unlink()
    command("fit", "--resume", "done", "--trainer.max_steps=6").ok()
    assert "last.ckpt is missing; continuing from best.ckpt" in caplog.text
    assert read_checkpoint(copied / "checkpoints" / "last.ckpt")["global_step"] == 6
    best = copied / "checkpoints" / "best.ckpt"
    assert command("fit", "--resume", str(best), "--trainer.max_steps=7").code == 0  # named


@pytest.mark.parametrize(
    "number",
    # test_signals.py and test_signal_connector.py have all signals, in one process
    [pytest.param(signal.SIGHUP, marks=pytest.mark.nightly), signal.SIGTERM],
    ids=lambda number: number.name,
)
@pytest.mark.slow
def test_a_signal_to_the_group_stops_all_processes_with_a_checkpoint(
    number: signal.Signals, tmp_path: Path, shared_cache: Path
):
    """As schedulers send it: to two processes, and to their data workers."""
    (tmp_path / "stopper.py").write_text(
        "import os\nimport signal\nimport lightning as L\n\nclass Stop(L.Callback):\n"
        "    def on_before_backward(self, trainer, module, loss):\n"
        "        if trainer.global_step == 3 and trainer.global_rank == 1:\n"
        f"            os.killpg(os.getpgid(0), {int(number)})\n"
    )
    (tmp_path / "stopping.yaml").write_text("trainer: {callbacks: {class_path: stopper.Stop}}\n")
    with sitting_at(tmp_path, shared_cache):
        options = (*TWO, "--data.num_workers=1", "--trainer.max_steps=40", "--trainer.val_check_interval=40")
        arguments = [cli.__file__, *FIT, *options, "--config", "stopping.yaml", "--run", "x"]
        # the leader of a new group, which the process that it starts belongs to
        leader = fork_server().start(arguments, tmp_path, {"OMP_NUM_THREADS": "1"}, tmp_path / "log")
        ended = fork_server().wait(leader, 240)
    said = (tmp_path / "log").read_text()
    assert ended is not None, said
    assert ended == 128 + number, said
    step = read_checkpoint(tmp_path / "runs" / "x" / "checkpoints" / "last.ckpt")["global_step"]
    assert 4 <= step <= 6  # a step later, when both know
    assert f"step {step} is saved" in said


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="needs a small disk, which only root can mount"
)
@pytest.mark.parametrize("kilobytes", [150, 700, 1600])
def test_a_full_disk_is_one_sentence(kilobytes: int, tmp_path: Path, shared_cache: Path, finished: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount")
    try:
        with sitting_at(disk, shared_cache):
            (disk / "fill").write_bytes(bytes(2048 * 1024 - kilobytes * 1024))
            done = run_process(disk, shared_cache, *FIT, "--run", "x", "--trainer.max_steps=40").refused()
        assert "Traceback" not in done.err
        assert "No space left on device" in done.err.splitlines()[-1]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# damage


@pytest.mark.slow
def test_damaged_results_are_told_and_written_anew(command: Command, copied: Path, caplog: pytest.LogCaptureFixture):
    file = copied / "results.json"
    whole, written = read_sealed(file), file.read_bytes()
    for content in (written[:-20], written.replace(b'"steps": 4', b'"steps": 5')):  # test_sealed_json.py has every kind
        assert content != written
        file.write_bytes(content)
        caplog.clear()
        assert command("fit", "--resume", "done").code == 0
        assert "results.json is damaged" in caplog.text
        assert read_sealed(file)["val_loss"] == whole["val_loss"]


def test_damaged_metrics_are_told(copied: Path, caplog: pytest.LogCaptureFixture):
    file = copied / "metrics.jsonl"
    rows = read_metrics(file)
    lines = file.read_bytes().splitlines()
    for bad in (b'{"step": 1, "train_l', b"[]", b"null", b'{"loss": 3}', b'{"step": "x"}', b"\xff\xfe", b"[" * 100_000):
        caplog.clear()
        file.write_bytes(b"\n".join([*lines, bad]))
        assert read_metrics(file) == rows
        assert "1 lines are not rows of metrics" in caplog.text


# configs


@pytest.mark.slow
def test_every_default_survives_the_config_file(command: Command, desk: Path):
    """MQAR's tasks are objects in its signature."""
    done = command("fit", "--config", "gated_deltanet.yaml", "--config", "tiny.yaml", "--data=MQAR", "--run", "recall")
    assert done.code == 0, done.err
    kept = read_checkpoint(desk / "runs/recall/checkpoints/last.ckpt")["zoo"]["config"]
    assert kept["data"]["init_args"]["tasks"] == [{"length": 64, "pairs": 8, "weight": 1.0}]
    assert command("validate", "--checkpoint", "runs/recall", "--trainer.limit_val_batches=1").code == 0
    assert command("export", "--checkpoint", "runs/recall", "--output", "out").code == 0
    assert command("fit", "--resume", "recall", "--trainer.max_steps=5").code == 0


def test_a_default_that_no_file_can_hold_is_left_to_the_class(command: Command, desk: Path):
    (desk / "odd.py").write_text(
        "import lightning as L\n\nclass Thing: ...\n\n"
        "class Odd(L.Callback):\n    def __init__(self, thing: object = Thing()): ...\n"
    )
    command(*FIT, "--trainer.callbacks+=odd.Odd", "--trainer.max_steps=1", "--run", "x").ok()
    written = yaml.safe_load((desk / "runs/x/config.yaml").read_text())
    assert written["trainer"]["callbacks"] == [{"class_path": "odd.Odd"}]
    assert command("fit", "--resume=x", "--trainer.max_steps=2").code == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MarkovChain", "MQAR", "own.Numbers"])
def test_a_data_class_has_its_own_defaults(name: str, desk: Path):
    """Not those of TextData, which is what a config's `data` means otherwise; what was set to something else stays."""
    (desk / "own.py").write_text(
        "import lightning as L\n\nclass Numbers(L.LightningDataModule):\n"
        "    def __init__(self, vocab_size: int = 64, sequence_length: int = 32, batch_size: int = 4): ...\n"
    )
    wanted = {
        "MarkovChain": {"vocab_size": 1024, "sequence_length": 1024, "batch_size": 8},
        "MQAR": {"vocab_size": 512, "batch_size": 32},
        "own.Numbers": {"vocab_size": 64, "sequence_length": 32, "batch_size": 4},
    }[name]
    for sources in ((f"data={name}",), (f"{{data: {{class_path: {name}}}}}",)):
        actual = read("gla.yaml", *sources).data.init_args
        assert {key: actual[key] for key in wanted} == wanted
        for order in (("data.batch_size=6", *sources), (*sources, "data.batch_size=6")):
            assert read("gla.yaml", *order).data.init_args.batch_size == 6
