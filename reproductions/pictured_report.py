"""The report of a benchmark with a picture."""

from matplotlib.figure import Figure

from zoo.display import write_figure
from zoo.files.output import check_no_others
from zoo.performance.bench_report import FILE, Report

PICTURE = "bench.png"


class PicturedReport(Report):
    """A report whose benchmark also draws bench.png.

    Raises:
        UserError: As in the base class, or the folder has a bench.png that no benchmark wrote.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.folder / FILE).exists():
            check_no_others([self.folder / PICTURE], "folder", FILE)

    def picture(self) -> Figure | None:
        """Return the contents of bench.png; None without a curve."""
        raise NotImplementedError

    def write(self) -> None:
        """Write bench.json and bench.png."""
        super().write()
        if (picture := self.picture()) is not None:
            write_figure(picture, self.folder / PICTURE)
