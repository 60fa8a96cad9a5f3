"""`zoo.report`: the page."""

import importlib.util
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels import UserError
from zoo.display import new_console
from zoo.files.atomic import atomic_write
from zoo.files.output import check_output

if TYPE_CHECKING:
    from zoo.report.folders import Contents

# Functions import other files of this room, since `zoo` imports this one, and these import Lightning.

WHOLE = 20  # runs whose whole configs are in the page


def report(
    folders: list[str] | str | Path,
    output: str | Path = "report.html",
    title: str = "Report",
    verbose: bool = True,
    overwrite: bool = False,
) -> Path:
    """Write runs, evaluations and sweeps as one HTML page for a colleague, which needs neither network nor server.

    ``zoo.report(["runs/a", "runs/b", "evaluations/c"])``

    It has what was trained and how the configs differ, curves that can be hovered, tables that can be sorted, heatmaps,
    samples, and the commands and versions that repeat all that.

    Args:
        folders: Folders of runs, evaluations or sweeps; on the command line as plain arguments.
        output: The page to write, which ends in .html.
        title: Its heading.
        verbose: Whether to print what is missing, and the page's path and size.
        overwrite: Whether to replace a page that exists.

    Returns:
        The page's path.

    Raises:
        UserError: A folder holds nothing to report, the page exists or cannot be written, or bokeh is not installed.
    """
    if importlib.util.find_spec("bokeh") is None:
        raise UserError("report: needs bokeh; pip install 'token-mixer-zoo[report]'")
    places = [folders] if isinstance(folders, str | Path) else list(folders)
    if not places:
        raise UserError("folders: the list is empty; name those of runs, evaluations or sweeps")
    file = Path(output)
    if file.is_dir():
        raise UserError(f"output: {file} is a folder; name a file, such as report.html")
    if file.suffix not in (".html", ".htm"):
        raise UserError(f"output: {file} is not named as a page; end it in .html (a browser prints it as a PDF)")
    check_output(file, "a page", overwrite)
    from zoo.report.folders import read_folders

    contents = read_folders(places)
    page = _page(contents, title, places).encode(errors="replace")  # JSON and YAML can hold half of a surrogate pair
    try:
        with atomic_write(file) as opened:
            opened.write(page)
    except OSError as error:
        raise UserError(f"output: {file} cannot be written: {error.strerror}") from None
    console = new_console(verbose)
    for sentence in contents.missing:
        console.print(sentence, style="yellow", highlight=False, markup=False)
    console.print(f"{file} ({len(page) / 1e6:.1f} MB)", style="dim", highlight=False, markup=False)
    return file


def _page(contents: "Contents", title: str, places: Sequence[str | Path]) -> str:
    from bokeh.embed import components
    from bokeh.resources import Resources
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from zoo.report import pictures, repeat, tables
    from zoo.report.folders import sweep_picture

    drawn: dict[str, Any] = pictures.losses(contents.runs) if contents.runs else {}
    curves = list(drawn)
    evaluations = []
    for folder, records in contents.evaluations.items():
        for task, rows in tables.task_rows(records).items():
            of_task = {f"{folder} {name}": picture for name, picture in pictures.evaluated(task, rows).items()}
            drawn |= of_task
            evaluations.append((tables.measured(f"{folder}: {task}", rows), list(of_task)))
    script, places_of = components(drawn) if drawn else ("", {})
    different = tables.differences(contents.runs)
    fields = {
        "title": title,
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "folders": list(map(repeat.portable, places)),
        "library": Resources(mode="inline", components=["bokeh"], minified=True).render() if drawn else "",
        "script": script,
        "divisions": places_of,
        "trained": tables.trained(contents.runs) if contents.runs else None,
        "different": different if different.rows else None,
        "alike": len(different.columns) > 2,  # several configs were compared
        "curves": curves,
        "undrawn": [run.name for run in contents.runs if not pictures.has_line(run)],
        "evaluations": evaluations,
        "sweeps": [
            (tables.swept(folder, rows), sweep_picture(folder, contents)) for folder, rows in contents.sweeps.items()
        ],
        "samples": [(run.name, run.samples) for run in contents.runs if run.samples],
        "recipes": [
            *(repeat.of_run(run, with_config=len(contents.runs) <= WHOLE) for run in contents.runs),
            *(
                each
                for folder, records in contents.evaluations.items()
                for each in repeat.of_evaluation(folder, records)
            ),
        ],
        "missing": contents.missing,
    }
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("page.html").render(fields)
