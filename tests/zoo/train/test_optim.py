import math

import lightning as L
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim import lr_scheduler

from kernels.errors import UserError
from tests.zoo.tiny import Data, ResumableLoader, TinyModel, pretraining, trainer, validation_loader
from zoo.train.optim import Optimisation, build_schedule, clip, freeze_others, parameter_groups, total_norm


def factors(optim: Optimisation, total: int) -> list[float]:
    """What the scheduler applies at each step, as a fraction of the learning rate."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = build_schedule(optimizer, optim, total)
    found = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_cosine():
    found = factors(Optimisation(schedule="cosine", warmup_steps=10, min_learning_rate_ratio=0.1), 110)
    assert found[0] == pytest.approx(0.1)
    assert found[9] == found[10] == 1.0
    assert found[60] == pytest.approx(0.55)  # half way between 1 and 0.1
    assert found[109] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 0.99)))


@pytest.mark.parametrize(("schedule", "factor"), [("constant", 1.0), ("inverse_sqrt", 0.1)])
def test_schedules_that_need_no_length(schedule, factor):
    optim = Optimisation(schedule=schedule, warmup_steps=4)
    assert [optim.factor(step, -1) for step in (0, 3, 4, 400)] == pytest.approx([0.25, 1.0, 1.0, factor])


def test_warmup_stable_decay():
    optim = Optimisation(schedule="wsd", warmup_steps=10, decay_fraction=0.2, min_learning_rate_ratio=0)
    found = factors(optim, 100)
    assert found[5] == pytest.approx(0.6)
    assert found[10:81] == [1.0] * 71
    assert found[90] == pytest.approx(0.5)
    assert found[99] == pytest.approx(0.05)
    assert optim.decay_start(100) == 80


@pytest.mark.parametrize(("schedule", "start"), [("constant", 100), ("cosine", 10), ("wsd", 80), ("inverse_sqrt", 10)])
def test_where_the_learning_rate_begins_to_fall(schedule, start):
    optim = Optimisation(schedule=schedule, warmup_steps=10)
    assert optim.decay_start(100) == start
    found = factors(optim, 100)
    assert found[10 : start + 1] == [1.0] * len(found[10 : start + 1])
    assert start == 100 or found[start + 1] < 1


def test_the_schedule_is_applied_and_nothing_is_warmed_up_without_warmup():
    assert factors(Optimisation(warmup_steps=0, min_learning_rate_ratio=1), 3) == [1.0, 1.0, 1.0]


def test_weight_decay_spares_vectors_and_what_a_module_exempts():
    model = TinyModel()
    decayed, exempt = parameter_groups(model, 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [names[id(p)] for p in decayed["params"]] == ["embedding.weight", "head.weight"]
    assert [names[id(p)] for p in exempt["params"]] == ["mixer_weight", "head.bias"]
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.1, 0.0)


def test_a_shared_parameter_is_in_one_group_and_exempt_if_one_of_its_modules_says_so():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    for exempt, decay in (((), 0.1), (("weight",), 0.0)):
        model[1].no_weight_decay = exempt
        (group,) = parameter_groups(model, 0.1)
        assert (len(group["params"]), group["weight_decay"]) == (1, decay)


def test_frozen_parameters_are_left_out():
    model = TinyModel()
    model.embedding.requires_grad_(False)
    assert sum(len(group["params"]) for group in parameter_groups(model, 0.1)) == 3


def test_only_what_is_named_is_trained(tmp_path):
    module = pretraining(train_only=["head.*", "mixer_*"])
    before = {name: parameter.detach().clone() for name, parameter in module.model.named_parameters()}
    trainer(tmp_path).fit(module, ResumableLoader(12), validation_loader())
    changed = {name for name, parameter in module.model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {"head.weight", "head.bias", "mixer_weight"}


def test_names_to_train_that_match_nothing():
    with pytest.raises(UserError, match=r"^optim.train_only: 'heads.\*' matches no parameter; names are such as head"):
        pretraining(train_only=["head.*", "heads.*"]).setup("fit")


def test_a_shared_parameter_is_trained_by_any_of_its_names():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    freeze_others(model, ["1.*"])
    assert model[0].weight.requires_grad


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("train_only", []),
        ("learning_rate", 0.0),
        ("weight_decay", -1.0),
        ("weight_decay", float("inf")),
        ("learning_rate", float("inf")),
        ("learning_rate", float("nan")),
        ("eps", float("inf")),
        ("betas", (0.9, 1.0)),
        ("schedule", "linear"),
        ("warmup_steps", -1),
        ("warmup_fraction", 1.0),
        ("decay_fraction", 0.0),
        ("min_learning_rate_ratio", 2.0),
        ("gradient_clip", 0.0),
    ],
)
def test_values_out_of_range(field, value):
    with pytest.raises(UserError, match=rf"optim\.{field} is .*, but must be"):
        Optimisation(**{field: value})


def test_a_schedule_without_a_length(tmp_path):
    with pytest.raises(UserError, match=r"optim\.schedule is cosine, which needs the length of the run"):
        trainer(tmp_path, max_steps=-1, max_epochs=-1).fit(pretraining(), ResumableLoader(4), validation_loader())


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda optimizer: lr_scheduler.StepLR(optimizer, 0), "StepLR fails after step 1: integer modulo by zero"),
        (lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1e-3, 5), "OneCycleLR fails after step 6: Tried to step"),
    ],
)
def test_a_schedule_that_would_fail_in_the_run_fails_before_it(schedule, message):
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(UserError, match=f"^optim.schedule: {message}"):
        build_schedule(optimizer, Optimisation(schedule=schedule), 8)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]) == (1.0, (0.9, 0.999))


def test_a_schedule_may_be_shorter_than_a_run_of_unknown_length():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    optim = Optimisation(schedule=lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1e-3, 5, cycle_momentum=False))
    assert build_schedule(optimizer, optim, -1).last_epoch == 0


def test_a_schedule_of_a_class_starts_at_its_beginning():
    optim = Optimisation(schedule=lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5))
    assert factors(optim, 6) == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


def test_a_warmup_longer_than_the_run(tmp_path, caplog):
    trainer(tmp_path).fit(pretraining(warmup_steps=50), Data())
    assert "the run ends within its warm-up (12 of 50 steps)" in caplog.text


def test_a_warmup_as_a_part_of_the_run():
    parts, steps = Optimisation(warmup_fraction=0.01), Optimisation(warmup_steps=30)
    assert factors(parts, 3000) == factors(steps, 3000)
    assert factors(parts, 3000) != factors(Optimisation(), 3000) == factors(Optimisation(warmup_steps=100), 3000)
    with pytest.raises(UserError, match=r"optim\.warmup_fraction is 0\.1 and optim\.warmup_steps 5, but only one"):
        Optimisation(warmup_steps=5, warmup_fraction=0.1)


def test_a_part_of_a_run_without_a_length(tmp_path):
    learner = pretraining(schedule="constant", warmup_steps=None, warmup_fraction=0.1)
    with pytest.raises(UserError, match=r"optim\.warmup_fraction is 0\.1 of a run whose length is not known"):
        trainer(tmp_path, max_steps=-1, max_epochs=-1).fit(learner, ResumableLoader(4), validation_loader())


def test_clipping_belongs_to_optim(tmp_path):
    with pytest.raises(UserError, match=r"set optim\.gradient_clip instead"):
        trainer(tmp_path, gradient_clip_val=1.0).fit(pretraining(), Data())


def test_the_gradient_is_clipped_to_its_norm(tmp_path):
    class Norms(L.Callback):
        def __init__(self):
            self.after = []

        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
            if grads:
                self.after.append(nn.utils.get_total_norm(grads).item())

    run = trainer(tmp_path, [norms := Norms()], max_steps=3)
    run.fit(pretraining(gradient_clip=1e-3), Data())
    assert max(norms.after) <= 1.01e-3
    assert run.logged_metrics["gradient_norm"] > 1e-2  # the logged norm is the one before


@pytest.mark.slow
@pytest.mark.parametrize("form", ["checkpoint", "run folder", "state dict", "safetensors"])
def test_warm_start_takes_the_weights_and_nothing_else(tmp_path, form):
    first = trainer(tmp_path / "first")
    first.fit(teacher := pretraining(), Data())
    weights = teacher.model.state_dict()
    path = {
        "checkpoint": tmp_path / "first" / "checkpoints" / "last.ckpt",
        "run folder": tmp_path / "first",
        "state dict": tmp_path / "weights.pt",
        "safetensors": tmp_path / "weights.safetensors",
    }[form]
    if form == "state dict":
        torch.save(weights, path)
    elif form == "safetensors":
        save_file(weights, path)

    class Start(L.Callback):
        def on_train_start(self, trainer, pl_module):
            self.weights = {name: tensor.clone() for name, tensor in pl_module.model.state_dict().items()}
            self.state, self.step = dict(trainer.optimizers[0].state), trainer.global_step

    second = trainer(tmp_path / "second", [start := Start()], max_steps=2)
    second.fit(pretraining(initial_weights=str(path)), Data())
    assert all(torch.equal(start.weights[name], weights[name]) for name in weights)
    assert not start.state
    assert start.step == 0


def test_warm_start_with_weights_that_do_not_fit(tmp_path):
    weights = TinyModel().state_dict()
    weights["head.bias"] = torch.zeros(3)
    torch.save(weights, tmp_path / "weights.pt")
    module = pretraining(initial_weights=str(tmp_path / "weights.pt"))
    with pytest.raises(UserError, match=r"head\.bias has shape \(3,\), the model's is \(13,\)"):
        module.setup("fit")
    del weights["head.bias"]
    torch.save(weights, tmp_path / "weights.pt")
    with pytest.raises(UserError, match=r"lacks 1 of its weights, first head\.bias"):
        module.setup("fit")


def test_warm_start_without_a_file(tmp_path):
    for name, message in (("none.ckpt", "there is no checkpoint at .*"), ("none.safetensors", ".* does not exist")):
        with pytest.raises(UserError, match=rf"^optim\.initial_weights: {message}"):
            pretraining(initial_weights=str(tmp_path / name)).setup("fit")


def parameters(*dtypes: torch.dtype) -> list[nn.Parameter]:
    """Matrices with gradients, and one without."""
    made = [nn.Parameter(torch.randn(20, 30).to(dtype)) for dtype in dtypes]
    for parameter in made:
        parameter.grad = torch.randn(20, 30).to(parameter.dtype)
    return [*made, nn.Parameter(torch.ones(3))]


def gradients(of: list[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad for p in of if p.grad is not None]


def exact_norm(of: list[nn.Parameter]) -> float:
    return float(torch.cat([g.double().flatten() for g in gradients(of)]).norm())


def test_one_dtype_is_what_pytorch_does():
    ours, theirs = (parameters(torch.float32, torch.float32) for _ in range(2))
    for one, other in zip(gradients(ours), gradients(theirs), strict=True):
        other.copy_(one)
    norm = total_norm(gradients(ours))
    assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs, 0.5))
    clip(ours, 0.5, norm)
    assert all(torch.equal(one, other) for one, other in zip(gradients(ours), gradients(theirs), strict=True))


@pytest.mark.parametrize("most", [0.5, 1e3])
def test_two_dtypes_have_one_norm_and_one_factor(most: float):
    clipped = parameters(torch.bfloat16, torch.float32, torch.bfloat16)
    before, norm = [g.double() for g in gradients(clipped)], exact_norm(clipped)
    total = total_norm(gradients(clipped))
    assert total.dtype == torch.float32
    assert float(total) == pytest.approx(norm, rel=5e-3)
    clip(clipped, most, total)
    assert exact_norm(clipped) == pytest.approx(min(norm, most), rel=1e-2)
    for one, other in zip(before, gradients(clipped), strict=True):
        torch.testing.assert_close(other.double(), one * min(1, most / norm), rtol=2e-2, atol=0)


def test_without_gradients_there_is_nothing_to_clip():
    clipped = [nn.Parameter(torch.ones(3))]
    assert total_norm(gradients(clipped)) == 0
    clip(clipped, 1.0, torch.tensor(0.0))
