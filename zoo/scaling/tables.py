"""Tables of laws, and remarks on them."""

from collections.abc import Callable, Sequence
from operator import attrgetter

from rich.table import Table

from zoo.display import new_table
from zoo.scaling.curves import PF_DAY, sizes
from zoo.scaling.law import Crossing, Law
from zoo.scaling.optima import Laws
from zoo.scaling.power import PowerLaw

FEW_SIZES = 8  # for an envelope


def table(laws: Sequence[Law]) -> Table:
    """Laws in the form of Table 3 of arXiv 2406.16690, with C in PF-days, exponents with their intervals."""
    columns = ("mixer", "L(C)", "N_opt(C)", "D_opt(C)", "runs", "a + b")
    shown = new_table(columns, wrapped=columns[1:])
    for law in laws:
        cells = [_cell(law, attrgetter(part)) for part in Laws._fields]
        shown.add_row(law.mixer, *cells, str(len(law.curves)), f"{law.laws.balance:.2f}")
    shown.caption = (
        "C in PF-days (8.64e19 FLOPs); N without embeddings; in brackets the middle 95 % of a bootstrap over runs"
    )
    return shown


def _cell(law: Law, part: Callable[[Laws], PowerLaw]) -> str:
    fitted = part(law.laws)
    coefficient = fitted.coefficient * PF_DAY**fitted.exponent
    start = f"{fitted.offset:.3f} + " if fitted.offset else ""
    interval = law.interval(lambda laws: part(laws).exponent)
    ends = "[?]" if interval is None else f"[{interval[0]:.3f}, {interval[1]:.3f}]"
    return f"{start}{coefficient:.4g} · C^{fitted.exponent:.4f}\n{ends}"


def crossing_table(crossings: Sequence[Crossing]) -> Table:
    """Table of crossings, one row a pair: the mixer that has the lower loss with less compute, and the one with more.

    Of two that do not cross, the better one is named in the first column, the other as `never …` in the second.
    """
    columns = ("better below", "better above", "FLOPs", "95 %", "loss", "draws that cross")
    shown = new_table(columns, left=2, wrapped=columns[2:])
    for pair in crossings:
        flops = "do not cross" if pair.flops is None else f"{pair.flops:.2g}"
        ends = "?" if pair.flops_interval is None else "{:.2g} to {:.2g}".format(*pair.flops_interval)
        loss = "" if pair.loss is None else f"{pair.loss:.3f}"
        crossed = "" if pair.crossed is None else f"{100 * pair.crossed:.0f} %"
        above = f"never {pair.mixers[1]}" if pair.flops is None else pair.mixers[1]
        shown.add_row(pair.mixers[0], above, flops, "" if pair.flops is None else ends, loss, crossed)
    low, high = crossings[0].between
    shown.caption = f"L(C) of both is equal there; looked for between {low:.2g} and {high:.2g} FLOPs"
    return shown


def remarks(laws: Sequence[Law]) -> list[str]:
    """Remarks on the laws for their readers: runs left out, offsets, balances."""
    lines = []
    for law in laws:
        if law.optima is not None and (reasons := {why: n for why, n in law.optima.left_out.items() if n}):
            number = len(law.optima.flops)
            listed = ", ".join(f"{count} since {why}" for why, count in reasons.items())
            lines.append(f"{law.mixer}: {number} amounts of compute have an optimum; without: {listed}")
        if law.offset is not None:
            power, with_offset = law.offset.errors
            better = "with an offset" if with_offset < power else "without an offset"
            lines.append(
                f"{law.mixer}: L(C) {better} predicts the largest best size better: {100 * power:.2f} % off without, "
                f"{100 * with_offset:.2f} % with ({law.offset.with_offset.offset:.3f})"
            )
        if abs(law.laws.balance - 1) > 0.1:
            lines.append(
                f"{law.mixer}: the exponents of N_opt and D_opt add up to {law.laws.balance:.2f}, so FLOPs per token "
                "do not grow as the size does"
            )
        if law.method == "envelope" and len(sizes(law.curves)) < FEW_SIZES:
            lines.append(
                f"{law.mixer}: an envelope of {len(sizes(law.curves))} sizes has steps that its intervals do not know "
                "of (without noise they shift exponents by 0.03 to 0.05); compare method=isoflop"
            )
        if law.failed_draws:
            lines.append(
                f"{law.mixer}: {law.failed_draws} of {law.failed_draws + len(law.draws)} draws could not be fitted"
            )
    return lines


def alike(crossings: Sequence[Crossing]) -> list[str]:
    """A sentence for each pair of mixers that the runs do not distinguish."""
    return [
        f"{' and '.join(pair.mixers)} cannot be told apart: at {pair.spent:.2g} FLOPs, the most that both have spent, "
        f"the loss of the second is higher by {pair.difference[0]:.3f} to {pair.difference[1]:.3f} nats"
        for pair in crossings
        if pair.difference is not None and pair.difference[0] <= 0 <= pair.difference[1]
    ]
