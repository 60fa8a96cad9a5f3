"""Text samples at each validation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L

from kernels.errors import UserError
from zoo.display import screen_text
from zoo.files.links import open_in_place
from zoo.generation.generate import check_sampling, generate
from zoo.generation.graphs import DecodingGraphs
from zoo.train.callbacks.run_callback import RunCallback


class Samples(RunCallback):
    """Samples text from the model at each validation, to the terminal and to `samples.txt` in the run's folder.

    Args:
        prompts: The prompts to continue; an empty prompt starts a document.
        max_new_tokens: Largest number of tokens to generate per prompt.
        temperature: Sampling temperature; 0 takes the likeliest token.
        top_p: Sample from the likeliest tokens whose probabilities add up to this; null samples from all.
        seed: Seed of the sampling, so that samples of different steps differ by the model alone.
        cuda_graph: Whether to capture decoding steps as CUDA graphs, on a GPU.

    Raises:
        UserError: A setting is out of its range.
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
        cuda_graph: bool = True,
    ) -> None:
        self.prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
        try:
            check_sampling(max_new_tokens, temperature, None, top_p, seed)
        except UserError as error:
            raise UserError(f"samples.{error}") from None
        self._settings: dict[str, Any] = settings
        self._graphs = DecodingGraphs(cuda_graph)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking or pl_module.tokenizer is None:
            return
        for prompt in self.prompts:
            with trainer.precision_plugin.forward_context():
                pieces = generate(pl_module.model, pl_module.tokenizer, prompt, graphs=self._graphs, **self._settings)
                try:
                    continuation = "".join(pieces)
                except UserError as error:  # no reason to end the training
                    continuation = f" [{error}]"
                text = f"── sample after {trainer.global_step} steps ──\n{prompt}{continuation}\n"
            if trainer.is_global_zero:  # all processes generate, since a sharded model needs all of them
                pl_module.print(screen_text(text))
                with open_in_place(Path(trainer.default_root_dir) / "samples.txt", "a") as file:
                    file.write(text + "\n")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Drop the graphs and their memory."""
        self._graphs.clear()
