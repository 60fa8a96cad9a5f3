"""GRPO with and without deterministic mode: is the policy that samples the policy that is trained?

    PYTHONPATH=. python reproductions/on_policy.py --config=gdn_h1.yaml model.hidden_size=64 model.num_layers=2 \\
        model.num_heads=2  # ten minutes on a CPU
    PYTHONPATH=. python reproductions/on_policy.py --numbers=12 --prompts=16 --learning_rate=1e-3 --policy_rate=1e-4 \\
        --demonstrations=1200 --steps=100 --table=reproductions/measured/on_policy_h200.csv \\
        --config=gdn_h1.yaml model.hidden_size=512 model.num_heads=4 model.num_layers=8  # on a GPU, three minutes

The task is recall with arithmetic on the keys. A prompt gives each number x a random value v(x), in random order, and a
first number; the answer is the chain x → v(x + 1), whose next number is always recalled for the last one plus one. The
reward is the share of the chain before its first mistake. A model is first trained on chains that make mistakes, so
that it knows the form of the task; then GRPO (arXiv 2402.03300) improves it: groups of answers to a prompt, their
rewards less the group's mean over its standard deviation as advantages, the clipped ratio of probabilities, and one
update for each batch of samples.

Each step adds a row: the reward, KL(sampler ‖ trained) of the sampled tokens in nats, and the largest difference of
their log-probabilities in sampling and in training, which is exactly 0 in deterministic mode. Runs with rows of all
steps are skipped. A picture shows both over the steps.
"""

import argparse
import copy
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

import kernels
import zoo
from kernels.linear_cross_entropy import losses_of_logits
from reproductions import write_csv
from zoo.display import new_figure, write_figure
from zoo.generation.generate import sample_tokens
from zoo.lm.model import LanguageModel

GROUP, CLIP = 8, 0.2  # answers to a prompt; largest change of a probability's ratio
MODES = [(precision, deterministic) for precision in ("fp32", "bf16") for deterministic in (True, False)]
KEY = ("policy_rate", "precision", "deterministic", "seed")  # of a run
COLUMNS = (*KEY, "step", "reward", "kl", "largest_difference", "seconds")
COLUMNS += ("numbers", "hops", "parameters", "device", "torch")


class Task(NamedTuple):
    """Chains of recalled numbers, in a vocabulary of the numbers and a token that ends the pairs."""

    numbers: int  # keys and values
    hops: int  # tokens of an answer

    @property
    def vocab_size(self) -> int:
        return self.numbers + 1

    def prompts(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Prompts [B,2N+2], and the value of each number [B,N]."""
        keys, values = (torch.rand(2, count, self.numbers, generator=generator).argsort(-1)).unbind(0)
        pairs = torch.stack([keys, values], 2).flatten(1)
        end = torch.full((count, 1), self.numbers)
        first = torch.randint(self.numbers, (count, 1), generator=generator)
        return torch.cat([pairs, end, first], 1), torch.empty_like(values).scatter_(1, keys, values)

    def next(self, values: Tensor, last: Tensor) -> Tensor:
        """The right number after each [B,L]; any number for the token that is none."""
        return values.gather(1, (last + 1) % self.numbers)

    def demonstrations(self, count: int, right: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Prompts with answers [B,T], each number of which is right with this probability, and where the answer is."""
        tokens, values = self.prompts(count, generator)
        for _ in range(self.hops):
            other = torch.randint(self.numbers, (count, 1), generator=generator)
            correct = torch.rand(count, 1, generator=generator) < right
            tokens = torch.cat([tokens, torch.where(correct, self.next(values, tokens[:, -1:]), other)], 1)
        return tokens, values

    def rewards(self, values: Tensor, first: Tensor, answers: Tensor) -> Tensor:
        """The share [B] of each answer before its first mistake."""
        right = answers == self.next(values, torch.cat([first, answers[:, :-1]], 1))
        return right.cumprod(1).double().mean(1)


def log_probabilities(model: LanguageModel, tokens: Tensor, count: int) -> Tensor:
    """Log-probabilities [B,L] of the last `count` tokens, with gradients, as a training step computes them."""
    hidden, _ = model.last_hidden(tokens[:, :-1])
    answers = tokens[:, -count:]
    return -losses_of_logits(model.logits(hidden[:, -count:].flatten(0, 1)), answers.flatten()).view_as(answers)


def demonstrate(model: LanguageModel, task: Task, options: argparse.Namespace, seed: int) -> None:
    """Train on demonstrations, in fp32."""
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, max(options.demonstrations, 1))
    generator, device = torch.Generator().manual_seed(seed), next(model.parameters()).device
    with tqdm(range(options.demonstrations), desc=f"demonstrations, seed {seed}") as bar:
        for _ in bar:
            tokens, _ = task.demonstrations(options.prompts * GROUP, options.right, generator)
            loss = -log_probabilities(model, tokens.to(device), task.hops).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


def improve(
    model: LanguageModel, task: Task, options: argparse.Namespace, precision: str, deterministic: bool, seed: int
) -> Iterator[dict[str, float]]:
    """Train by GRPO, and return each step's numbers."""
    optimizer = torch.optim.AdamW(model.parameters(), options.policy_rate, betas=(0.9, 0.95), weight_decay=0.0)
    generator, device = torch.Generator().manual_seed(1000 + seed), next(model.parameters()).device
    for step in range(options.steps):
        start = time.perf_counter()
        prompts, values = (x.repeat_interleave(GROUP, 0) for x in task.prompts(options.prompts, generator))
        half = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
        with kernels.deterministic(deterministic), half:
            drawn = sample_tokens(model, prompts.to(device), max_new_tokens=task.hops, seed=1000 * seed + step)
            answers, sampled = (torch.stack(parts, 1) for parts in zip(*drawn, strict=True))
            trained = log_probabilities(model, torch.cat([prompts.to(device), answers], 1), task.hops)
            reward = task.rewards(values, prompts[:, -1:], answers.cpu()).to(device)
            groups = reward.view(-1, GROUP)
            advantage = ((groups - groups.mean(1, True)) / (groups.std(1, keepdim=True) + 1e-6)).view(-1, 1)
            ratio = (trained - sampled).exp()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        difference = (sampled - trained.detach()).double()
        yield {
            "step": step,
            "reward": float(reward.mean()),
            "kl": float((difference + (-difference).exp() - 1).mean()),  # unbiased and never below 0
            "largest_difference": float(difference.abs().max()),
            "seconds": time.perf_counter() - start,
        }


def draw(rows: Sequence[dict[str, str]], file: Path) -> None:
    """Plot reward and difference over blocks of ten steps: the mean and the range of the seeds, for each rate."""
    panels = {"reward": "share of the chain before a mistake", "largest_difference": "largest |Δ log-probability|"}
    rates = sorted({row["policy_rate"] for row in rows}, key=float)
    figure = new_figure(10, 3.8 * len(rates))
    for place, (rate, (key, label)) in enumerate(product(rates, panels.items()), start=1):
        title = f"learning rate of GRPO {float(rate):.0e}"
        axes = figure.add_subplot(len(rates), 2, place, xlabel="step", ylabel=label, title=title)
        for precision, deterministic in MODES:
            run = (rate, precision, str(deterministic))
            here = [row for row in rows if tuple(row[name] for name in KEY[:3]) == run]
            if not here:
                continue
            seeds, steps = sorted({row["seed"] for row in here}), sorted({int(row["step"]) // 10 * 10 for row in here})
            blocks = {(seed, step): list[float]() for seed in seeds for step in steps}
            for row in here:
                blocks[row["seed"], int(row["step"]) // 10 * 10].append(float(row[key]))
            joined = max if key == "largest_difference" else fmean
            lines = [[joined(blocks[seed, step]) for seed in seeds] for step in steps]
            name = f"{precision}, {'deterministic' if deterministic else 'default'}"
            axes.plot(steps, [fmean(line) for line in lines], label=name, linestyle="-" if deterministic else "--")
            axes.fill_between(steps, [min(line) for line in lines], [max(line) for line in lines], alpha=0.15)
        axes.grid(alpha=0.3)
        if key == "largest_difference":
            axes.set_yscale("symlog", linthresh=1e-8)
    figure.axes[-2].legend(fontsize="small")
    write_figure(figure, file)


def main(options: argparse.Namespace) -> None:
    task, device = Task(options.numbers, options.hops), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    rows: list[dict[str, object]] = [*write_csv.read(options.table)]
    for seed in options.seeds:
        model = None
        for precision, deterministic in MODES:
            run = {"policy_rate": options.policy_rate, "precision": precision, "deterministic": deterministic}
            key = tuple(map(str, (run | {"seed": seed}).values()))
            others = [row for row in rows if tuple(str(row[name]) for name in KEY) != key]
            if len(rows) - len(others) == options.steps:
                continue
            if model is None:
                torch.manual_seed(seed)
                model = zoo.build(
                    *options.config, *options.overrides, f"model.vocab_size={task.vocab_size}", device=device
                )
                demonstrate(model, task, options, seed)
            facts = run | {"seed": seed, "numbers": task.numbers, "hops": task.hops}
            facts |= {"parameters": model.num_parameters(), "device": name, "torch": torch.__version__}
            policy, new = copy.deepcopy(model), []
            title = f"{precision}, {'deterministic' if deterministic else 'default'}, seed {seed}"
            with tqdm(total=options.steps, desc=title) as bar:
                for numbers in improve(policy, task, options, precision, deterministic, seed):
                    new.append(facts | numbers)
                    bar.set_postfix({key: f"{numbers[key]:.3g}" for key in ("reward", "kl", "largest_difference")})
                    bar.update()
            rows = others + new
            write_csv.write(rows, options.table, COLUMNS)
    draw(write_csv.read(options.table), options.picture or options.table.with_suffix(".png"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", action="append", required=True, help="a model; several are laid over each other")
    parser.add_argument("overrides", nargs="*", help="key=value, of the model")
    parser.add_argument("--numbers", type=int, default=5, help="keys and values in a prompt")
    parser.add_argument("--hops", type=int, default=4, help="numbers in an answer")
    parser.add_argument("--prompts", type=int, default=8, help=f"prompts in a step, with {GROUP} answers each")
    parser.add_argument("--demonstrations", type=int, default=600, help="steps of training before GRPO")
    parser.add_argument("--right", type=float, default=0.6, help="share of right numbers in a demonstration")
    parser.add_argument("--learning_rate", type=float, default=3e-3, help="of the demonstrations")
    parser.add_argument("--policy_rate", type=float, default=1e-3, help="learning rate of GRPO")
    parser.add_argument("--steps", type=int, default=150, help="of GRPO")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--table", type=Path, default=Path("reproductions/measured/on_policy_cpu.csv"))
    parser.add_argument("--picture", type=Path, help="by default next to the table")
    main(parser.parse_args())
