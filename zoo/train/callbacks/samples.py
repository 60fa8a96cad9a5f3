"""Text that the model writes at each validation."""

from collections.abc import Sequence
from pathlib import Path

import lightning as L

from zoo.generation.generate import generate
from zoo.train.callbacks.run_callback import RunCallback


class Samples(RunCallback):
    """Lets the model write at each validation, to the terminal and to `samples.txt` in the run's folder.

    Args:
        prompts: What it continues; an empty prompt starts a document.
        max_new_tokens: How far.
        temperature: 0 takes the likeliest token.
        top_p: Draw from the likeliest tokens that together have this probability; null draws from all.
        seed: Of the draws, so that samples of different steps differ by the model alone.
    """

    key = "samples"
    order = 130

    def __init__(
        self,
        prompts: Sequence[str] = ("",),
        max_new_tokens: int = 64,
        temperature: float = 0.8,
        top_p: float | None = 0.95,
        seed: int = 0,
    ) -> None:
        self.prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.top_p = top_p
        self.seed = seed

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write a sample for each prompt."""
        if trainer.state.fn != "fit" or trainer.sanity_checking or pl_module.tokenizer is None:
            return
        for prompt in self.prompts:
            with trainer.precision_plugin.forward_context():
                pieces = generate(
                    pl_module.model,
                    pl_module.tokenizer,
                    prompt,
                    max_new_tokens=self.max_new_tokens,
                    temperature=self.temperature,
                    top_p=self.top_p,
                    seed=self.seed,
                )
                text = f"── sample after {trainer.global_step} steps ──\n{prompt}{''.join(pieces)}\n"
            if trainer.is_global_zero:  # all processes generate, since a sharded model needs all of them
                trainer.print(text)
                with open(Path(trainer.default_root_dir) / "samples.txt", "a", encoding="utf-8") as file:
                    file.write(text + "\n")
