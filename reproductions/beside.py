"""Benchmarks next to other libraries: flash-linear-attention (FLA), FlashQLA, and PyTorch's SDPA and FlexAttention.

    python reproductions/beside.py kernels --ops=delta_rule,window_attention
    python reproductions/beside.py training --config gla.yaml --config size/400m.yaml --length=4096
    python reproductions/beside.py decode --config gla.yaml --batch_sizes=[1,64] --positions=[1024]

The options are those of `python cli.py bench`. FLA tunes its kernels for minutes before the clock starts; FlashQLA
compiles for a minute or two at each shape.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache, partial
from math import inf
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from kernels import UserError
from reproductions import decay_kinds, peers
from zoo.arguments import check_names, names_in
from zoo.config import KEYS
from zoo.config.command_line import Keys, arguments_of
from zoo.lm.model import LanguageModel
from zoo.performance.bench_calls import OPS, BenchCall
from zoo.performance.bench_report import PATH, Report, captioned, complaint, pair, show, without
from zoo.performance.decoding import bench_decode, timed
from zoo.performance.kernels import (
    ABOUT_TIMES,
    OURS,
    TIMES,
    Call,
    KernelReport,
    bench_kernels,
    checked,
    speeds,
    times,
)
from zoo.performance.kernels import timed as timed_calls
from zoo.performance.model import PRECISIONS, build, read, running
from zoo.performance.training import DOES_NOT_FIT, Other, TimedLearner, bench_training, warmed
from zoo.train.devices import pick_device
from zoo.train.optim import Optimisation

FIRST_CALL = "first call of"
POSITION = 1024  # largest prefill of FLA's models; more is not needed, since their state has a constant size, too


class KernelsBeside(KernelReport):
    """Times of ops, with those of other libraries."""

    def table(self) -> Table:
        """A row for each op and shape, with the peers' times and their ratios to ours below."""
        suffixes = self.suffixes()
        columns = ["op", "B×H×T×D", "path", *(TIMES[suffix] for suffix in suffixes), "TFLOP/s", "of limit"]
        columns += [f"peer ÷ ours\n{TIMES[suffix].removesuffix(' ms')}" for suffix in suffixes]
        table, remarks = self.new_table(columns), [ABOUT_TIMES, PATH]
        remarks.append(
            "±: relative error of a peer's output / the largest of its gradients, against the fp32 reference"
        )
        for row in self.rows:
            self.add_times(
                table, remarks, row["op"] + (f", {row['decays']}" if row.get("decays") else ""), row, suffixes
            )
            for name, peer in row["peers"].items() if "fwd_ms" in row else ():
                if "note" in peer:
                    without(table, remarks, [f"  {name}", ""], peer)
                    continue
                remarks += [f"{name}: no graph, {peer['graph_note']}"] if "graph_note" in peer else []
                ratios = [pair(peer.get(f"fwd{s}_ratio"), peer.get(f"fwd_bwd{s}_ratio"), "{:.2f}×") for s in suffixes]
                table.add_row(f"  {name}", _deviation(peer["errors"]), "", *times(peer, suffixes), "", "", *ratios)
        return captioned(table, remarks)


def _deviation(errors: dict[str, float | None]) -> str:
    """The error of a peer's output, and the largest of its gradients."""
    output, *gradients = (inf if error is None else error for error in errors.values())
    return f"±{output:.0e} / {max(gradients):.0e}"


def kernels(
    ops: list[str] | str | None = None,
    shapes: list[tuple[int, int, int, int]] | None = None,
    dtype: str | None = None,
    backend: str | None = None,
    device: str | None = None,
    window_size: int | None = None,
    seconds: float = 0.8,
    libraries: list[str] | str | None = None,
    key_heads: int | None = None,
    decays: list[str] | str = decay_kinds.GENTLE,
    folder: str = "runs/beside-kernels",
) -> Report:
    """Time the ops, alternating with those of other libraries.

    Some functions of FLA are also timed for bounded decays (`safe_gate`), and with more kept for the gradients
    (`disable_recompute`).

    Args:
        ops, shapes, dtype, backend, device, window_size, seconds, key_heads, folder: As for `bench kernels`.
        decays: Log decays per channel, any of gentle (about 5 % a step), initial (softplus decays before
            training), bounded (at −5) and recorded (drawn from the quantiles of trained models). Other ops have
            gentle decays.
        libraries: Which of fla, flash_qla, sdpa, cudnn and flex_attention to time; null for all that are installed.

    Raises:
        UserError: An argument is invalid.
    """
    if libraries is not None:
        libraries = names_in(libraries)
        check_names("libraries", libraries or [""], peers.LIBRARIES)
    names = [*OPS] if ops is None else [name for name in names_in(ops) if name in OPS]
    kinds = list(dict.fromkeys(names_in(decays)))
    check_names("decays", kinds or [""], decay_kinds.KINDS)
    if kinds != [decay_kinds.GENTLE] and not decay_kinds.MODELS.keys() & {*names}:
        raise UserError(
            f"decays: none of the ops has decays per channel; those that have are {', '.join(decay_kinds.MODELS)}"
        )
    peers.require_for(names, pick_device(device), libraries)
    report = bench_kernels(
        ops=ops,
        shapes=shapes,
        dtype=dtype,
        backend=backend,
        device=device,
        window_size=window_size,
        seconds=seconds,
        key_heads=key_heads,
        folder=folder,
        others=partial(measured, libraries, kinds),
    )
    return KernelsBeside(report.folder, report.about, report.rows)


def measured(
    libraries: Collection[str] | None,
    kinds: Iterable[str],
    case: BenchCall,
    seconds: float,
    announce: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Yield the row of a case for each kind of log decays: its check and, if it passed, its times and its peers'."""
    model = decay_kinds.MODELS.get(case.name)
    for kind in [decay_kinds.GENTLE] if model is None else kinds:
        if model is not None and kind != decay_kinds.GENTLE:
            B, H, T, D = case.shape
            generator = torch.Generator(case.do.device).manual_seed(0)
            draw = partial(torch.randn, device=case.do.device, generator=generator)
            case.replace_inputs(log_decay=decay_kinds.log_decays(kind, model, (B, T, H, D), draw))
        row = checked(case) | {"decays": None if model is None else kind}
        if "note" not in row:
            says = partial(_announce, announce, case, row["decays"])
            calls, row["peers"] = peers_of(libraries, case, says)
            says("timing")
            milliseconds, refused = timed_calls(case, {OURS: case.call, **calls}, seconds)
            row |= speeds(case, milliseconds)
            for name, reason in refused.items():
                (row if name == OURS else row["peers"][name])["graph_note"] = reason
            for name in calls:
                for key, ms_of in milliseconds.items():
                    if name in ms_of and OURS in ms_of:
                        ratio = ms_of[name] / ms_of[OURS]
                        row["peers"][name] |= {f"{key}_ms": ms_of[name], f"{key}_ratio": ratio}
        yield row


def _announce(show: Callable[[str], None], case: BenchCall, decays: str | None, stage: str) -> None:
    """Show what is done next, and what can take minutes immediately in a log file, too."""
    says = stage if decays is None else f"{decays} decays, {stage}"
    show(says)
    if stage.startswith(FIRST_CALL) and not sys.stderr.isatty():
        sys.stderr.write(f"kernels: {case.name} {'×'.join(map(str, case.shape))}, {says}\n")


def peers_of(
    libraries: Collection[str] | None, case: BenchCall, announce: Callable[[str], None]
) -> tuple[dict[str, Call], dict[str, dict[str, Any]]]:
    """The peers of a case that run, and of all of them the errors or a note."""
    calls, rows, every = dict[str, Call](), dict[str, dict[str, Any]](), peers.kernel_peers(case)
    for library in {*(libraries or ())} - {name.split()[0] for name in every}:
        rows[library] = {"note": "does not compute this call on this machine"}
    for name, peer in every.items():
        if libraries is None or name.split()[0] in libraries:
            announce(f"{FIRST_CALL} {name}")  # which compiles and tunes it
            try:
                with torch.no_grad():
                    peer(case.inputs)
                rows[name], calls[name] = {"errors": case.compared(peer).record()["errors"]}, peer
            except Exception as error:  # errors of other libraries become remarks in the table
                rows[name] = {"note": complaint(error)}
    return calls, rows


def training(
    config: Sequence[str],
    batch_size: int | None = None,
    length: int | None = None,
    steps: int = 8,
    precision: str | None = None,
    backend: str | None = None,
    device: str | None = None,
    compile: bool = False,
    cuda_graph: bool = False,
    folder: str = "runs/beside-training",
) -> Report:
    """Time training steps in turns with those of FLA's model of the same mixers and sizes.

    If FLA has none, its Gated DeltaNet takes its place. The arguments are those of `bench training`.

    Args:
        config, batch_size, length, steps, precision, backend, device, compile, cuda_graph, folder: As there.

    Raises:
        UserError: An argument is invalid.
    """
    peers.require(pick_device(device))
    return bench_training(
        config,
        batch_size=batch_size,
        length=length,
        steps=steps,
        precision=precision,
        backend=backend,
        device=device,
        compile=compile,
        cuda_graph=cuda_graph,
        folder=folder,
        others=[similar_model],
    )


def similar_model(
    ours: LanguageModel, about: dict[str, Any], optim: Optimisation, tokens: Tensor, bar: Any
) -> tuple[dict[str, Any], TimedLearner | None]:
    """As `learner_of` its result, for FLA's model of the same mixers, or else its Gated DeltaNet."""
    return learner_of(peers.language_model(ours, about["model"], tokens.device))(ours, about, optim, tokens, bar)


def learner_of(peer: peers.PeerModel) -> Other:
    """Return a function to the row of a peer and its learner after the first steps, or None if it does not run."""

    def warm(
        ours: LanguageModel, about: dict[str, Any], optim: Optimisation, tokens: Tensor, bar: Any
    ) -> tuple[dict[str, Any], TimedLearner | None]:
        row: dict[str, Any] = {"model": peer.name}
        before, precision, tokens = torch.cuda.memory_allocated(tokens.device), about["precision"], tokens[:, :-1]
        try:
            model = peer.build()
            if precision.endswith("-true"):
                model = model.to(PRECISIONS[precision])
            learner = TimedLearner(model, optim, precision, "auto", lambda: model(input_ids=tokens, labels=tokens).loss)
            row["parameters"] = sum(p.numel() for p in model.parameters())
            done = warmed(row, learner, bar, before)
        except UserError:
            raise
        except torch.OutOfMemoryError:  # of its weights
            return row | {"note": DOES_NOT_FIT}, None
        except Exception as error:  # errors of other libraries become remarks in the table
            return row | {"note": complaint(error)}, None
        row["ready_s"] = None  # the process was busy with our model before
        return row, learner if done else None

    return warm


def decode(
    config: Sequence[str],
    batch_sizes: list[int] | None = None,
    positions: list[int] | None = None,
    precision: str | None = None,
    backend: str | None = None,
    device: str | None = None,
    seconds: float = 1.0,
    folder: str = "runs/beside-decode",
) -> Report:
    """Time decoding steps, and those of FLA's model of the same mixers and sizes, or of its Gated DeltaNet.

    Args:
        config, batch_sizes, positions, precision, backend, device, seconds, folder: As for `bench decode`.

    Raises:
        UserError: An argument is invalid.
    """
    where = pick_device(device)
    peers.require(where)
    report = bench_decode(
        config,
        batch_sizes=batch_sizes,
        positions=positions,
        precision=precision,
        backend=backend,
        device=device,
        seconds=seconds,
        folder=folder,
    )
    timed_in: str = report.about["precision"]
    ours = build(read(config), timed_in, torch.device("meta"))
    peer = peers.language_model(ours, report.about["model"], where)
    places = dict.fromkeys((row["batch_size"], row["position"]) for row in report.rows)
    for row in decoded(peer, timed_in, places, where, seconds):
        report.add(row)
    return report


def decoded(
    peer: peers.PeerModel,
    precision: str,
    places: Iterable[tuple[int, int]],
    device: torch.device,
    seconds: float,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a peer's eager decoding at batch sizes and positions, with a note where it fails."""
    model = cache(lambda: peer.build().to(PRECISIONS[precision]).eval())
    for batch, position in places:
        row = {"model": peer.name, "batch_size": batch, "position": position, "how": "eager"}
        with torch.no_grad(), running(precision, device):
            try:
                yield timed(row, seconds, partial(Peer, model, batch, position), device)
            except Exception as error:  # errors of other libraries become remarks in the table
                yield row | {"note": complaint(error)}
        if device.type == "cuda":
            torch.cuda.empty_cache()


class Peer:
    """Steps of a Hugging Face model with its key-value cache, after a prefill."""

    state_bytes = None

    def __init__(self, build: Callable[[], Any], batch_size: int, position: int) -> None:
        self.model, self.position = build(), min(position, POSITION)
        prompt = torch.randint(self.model.config.vocab_size, (batch_size, self.position), device=self.model.device)
        out = self.model(input_ids=prompt, use_cache=True, logits_to_keep=1)
        self.past, self.tokens = out.past_key_values, out.logits[:, -1:].argmax(-1)

    def __call__(self) -> None:
        """Make a step."""
        out = self.model(input_ids=self.tokens, past_key_values=self.past, use_cache=True)
        self.past, self.tokens = out.past_key_values, out.logits[:, -1:].argmax(-1)


KINDS: dict[str, Callable[..., Report]] = {"kernels": kernels, "training": training, "decode": decode}


def main(arguments: list[str]) -> int:
    """Run the command line; return 1 if a result was wrong."""
    name, *rest = arguments or [""]
    check_names("beside", [name], KINDS)
    keys = None if name == "kernels" else Keys(KEYS, lambda parser: None)
    items, options = arguments_of(KINDS[name], rest, name, keys)
    return int(show(KINDS[name](*([items] if keys else []), **options)).failed)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error.on_command_line}")
    except OSError as error:  # of a file that cannot be read or written
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
