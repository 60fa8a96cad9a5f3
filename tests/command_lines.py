"""Commands that documents print: whether they parse, without the hours that they would take."""

from pathlib import Path

from zoo.config.parser import read
from zoo.sweeps.comparison import whole_configs

from .commands import Command

ON_GPUS = (["bench", "training"], ["bench", "scaling"], ["bench", "expansion"])  # for minutes, as peers do


def check_parses(arguments: list[str], command: Command, folder: Path) -> None:
    """Assert that what follows `python cli.py` is a command; cheap ones are run, and write into `folder`."""
    if arguments[:1] == ["compare"]:  # would train for an hour
        keys = [argument.removeprefix("--") for argument in arguments[1:] if argument.startswith("--")]
        overrides = [key for key in keys if not key.startswith(("jobs=", "folder="))]
        names = [argument for argument in arguments[1:] if not argument.startswith("--")]
        for name in names or whole_configs():
            read(name, *overrides)
        return
    arguments = [*arguments]
    if arguments and arguments[0] in ("fit", "validate", "test", "predict"):
        arguments.append("--print_config")  # all of it is parsed, and nothing is run
    elif arguments[:1] == ["sweep"]:
        arguments.append("--dry-run")
    elif arguments[:2] in ON_GPUS or "--peers" in arguments:
        arguments.append("--help")  # the options have to exist
        options = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
        assert all(option in command(*arguments).out for option in options)
    elif arguments[:1] == ["bench"]:
        arguments += ["--lengths=[]", "--shapes=[[1,1,64,16]]", "--seconds=0.01", f"--folder={folder}"]
    elif arguments[:2] == ["scaling", "fit"]:
        arguments.append("--help")  # of runs that take hours
    shown = command(*arguments)
    assert shown.code == 0, shown.err
