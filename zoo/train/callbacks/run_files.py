"""What a run is made of, written to its folder."""

from pathlib import Path

import lightning as L
import yaml

from zoo.train.callbacks.run_callback import RunCallback

HEADER = "# Everything that this run was made of; fit --config takes it as it is.\n"
APPENDED = ("metrics.jsonl", "metrics.csv", "samples.txt", "results.json")  # files to which a run appends


class RunFiles(RunCallback):
    """Writes what a run is made of to its folder, `config.yaml` and, of text, `tokenizer.json`.

    It waits until all of it has loaded, so that a start that fails leaves the folder as it was. What a run left that
    was stopped before its first checkpoint is removed then.
    """

    order = 20

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write them, in the first process."""
        if not trainer.is_global_zero:
            return
        folder = Path(trainer.default_root_dir)
        if not any((folder / "checkpoints").glob("*.ckpt")):
            for name in APPENDED:
                (folder / name).unlink(missing_ok=True)
        text = yaml.safe_dump(pl_module.config, sort_keys=False, allow_unicode=True)
        (folder / "config.yaml").write_text(HEADER + text, encoding="utf-8")
        if pl_module.tokenizer is not None:
            pl_module.tokenizer.save(folder / "tokenizer.json")
