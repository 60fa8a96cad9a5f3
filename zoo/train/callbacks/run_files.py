"""The run's config, tokenizer and foreign code, written to its folder, and the config to the loggers."""

from pathlib import Path

import lightning as L

from zoo.display import new_console
from zoo.files.atomic import atomic_write
from zoo.files.links import check_in_place
from zoo.files.output import CONFIG_HEADER
from zoo.files.safe_yaml import dump_yaml
from zoo.train.callbacks.run_callback import RunCallback
from zoo.train.history import HISTORY, record

APPENDED = ("metrics.jsonl", "metrics.csv", "samples.txt", "results.json", HISTORY)  # files to which a run appends


class RunFiles(RunCallback):
    """Writes the run's config to `config.yaml` and, for text data, its tokenizer to `tokenizer.json`; logs the config.

    The files of classes in the config that are not this project's are copied to `code/`.

    What a resumed run has changed in its config is added to `history.jsonl`.

    It waits until everything has loaded, so that a failed start leaves the folder unchanged. The files of an earlier
    run that was stopped before its first checkpoint are then removed.
    """

    order = 20

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for logger in trainer.loggers:
            logger.log_hyperparams(pl_module.config or {})
        if not trainer.is_global_zero:
            return
        folder = Path(trainer.default_root_dir)
        for name in APPENDED:
            check_in_place(folder / name)
        if not any((folder / "checkpoints").glob("*.ckpt")):
            for name in APPENDED:
                (folder / name).unlink(missing_ok=True)
        # with no steps left, the config stays that of the weights
        complete = 0 < trainer.max_steps <= pl_module.resumed_at
        if pl_module.changes:
            changed = "; ".join(map(str, pl_module.changes))
            since = "no steps are left, so this changes nothing" if complete else f"from step {pl_module.resumed_at}"
            new_console().print(f"{since}: {changed}", highlight=False, soft_wrap=True)
        if not complete:
            record(folder, pl_module.resumed_at, pl_module.changes)
            with atomic_write(folder / "config.yaml") as file:
                file.write(CONFIG_HEADER + dump_yaml(pl_module.config).encode())
            for source in pl_module.sources.values():
                source.copy_to(folder)
        if pl_module.tokenizer is not None:
            pl_module.tokenizer.save(folder / "tokenizer.json")
