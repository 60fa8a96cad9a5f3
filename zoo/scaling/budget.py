"""Cost of a ladder of runs, in FLOPs."""

import json
from pathlib import Path

import numpy as np

from kernels import UserError
from zoo.scaling.curves import PF_DAY
from zoo.train.devices import peak_flops_named


def measured(bench: Path) -> tuple[float, float]:
    """The fraction of its peak that a GPU reached in training, and the peak in FLOP/s.

    Args:
        bench: A bench.json of `bench training`.

    Raises:
        UserError: The file does not exist, or lacks these numbers.
    """
    try:
        record = json.loads(bench.read_text())
        device, kind = record["device"], record["kind"]
        mfus = [row["mfu"] for row in record["rows"] if kind == "training" and row.get("mfu")]
    except FileNotFoundError:
        raise UserError(f"bench: the file {bench} does not exist") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"bench: {bench} is not a bench.json of bench training") from None
    peak = peak_flops_named(str(device))
    if kind != "training":
        raise UserError(f"bench: {bench} is of bench {kind}; bench training measures what is needed here")
    if not mfus or peak is None:
        raise UserError(
            f"bench: {bench} has no mfu, as the peak of its device ({device}) is not known; give mfu and peak"
        )
    return float(mfus[0]), peak


def budget_of(
    budget: float | None, gpu_hours: float | None, mfu: float, peak: float | None, pf_days: float | None
) -> float:
    """The budget in FLOPs, of which one form is given, with the fraction of a peak in FLOP/s that hours are worth.

    Raises:
        UserError: None or several are given, a number is out of range, or the peak is not known.
    """
    forms = {"budget": budget, "gpu_hours": gpu_hours, "pf_days": pf_days}
    named = [name for name, value in forms.items() if value is not None]
    if len(named) != 1:
        problem = f"{' and '.join(named)} are given" if named else "none is given"
        raise UserError(f"budget: give one of budget, gpu_hours and pf_days; {problem}")
    if not 0 < mfu <= 1:
        raise UserError(f"mfu: {mfu} must be above 0 and at most 1")
    for name, value in {**forms, "peak": peak}.items():
        if value is not None and not 0 < value < np.inf:
            raise UserError(f"{name}: {value} must be above 0 and finite")
    if budget is not None:
        return budget
    if pf_days is not None:
        return pf_days * PF_DAY
    if peak is None or gpu_hours is None:
        raise UserError("gpu_hours: needs the device's peak, which is not known here; give peak=989e12 (FLOP/s, H200)")
    return gpu_hours * 3600 * mfu * peak
