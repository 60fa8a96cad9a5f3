import pytest
import torch
import torch.nn.functional as F

import zoo
from kernels import UserError
from zoo.train.distillation import Distillation, Match, Teacher, check_match

SIZES = ("model.hidden_size=32", "model.num_heads=2", "model.num_layers=2", "model.vocab_size=50")


def model(config: str, *overrides: str, seed: int = 0) -> zoo.LanguageModel:
    torch.manual_seed(seed)
    return zoo.build(config, *SIZES, *overrides)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and labels of which some are ignored."""
    tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1)
    labels[:, -3:] = -100
    return tokens, labels


def test_logits_by_definition():
    teacher, student = model("transformer.yaml"), model("gated_deltanet.yaml", seed=1)
    tokens, labels = batch()
    distillation = Distillation(Teacher("here", temperature=2.0), teacher, student)
    total = distillation.total_loss(student, tokens, labels)
    s, t = (each(tokens)[0][labels != -100].div(2).log_softmax(-1) for each in (student, teacher))
    torch.testing.assert_close(total, 4 * F.kl_div(s, t, log_target=True, reduction="sum"))
    total.backward()
    assert all(parameter.grad is not None for parameter in student.parameters())
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert distillation.train_only is None


def test_layers_by_definition():
    teacher = model("transformer.yaml")
    student = model("gdn_h1.yaml", "model.stack.second={class_path: SoftmaxAttention}", seed=1)
    tokens, labels = batch()
    distillation = Distillation(Teacher("here", match="layers"), teacher, student)
    assert distillation.layers == [0]
    assert distillation.train_only == ["layers.0.mixer.*"]
    total = distillation.total_loss(student, tokens, labels)
    x = teacher.layers[0].mixer_norm(teacher.embeddings(tokens))
    counted = labels != -100
    (y, _), (computed, _) = teacher.mixers[0](x), student.mixers[0](x)
    error = (computed - y)[counted].square().sum() / y[counted].square().sum()
    torch.testing.assert_close(total, error * counted.sum())
    total.backward()
    assert {name.rpartition("layers.0.mixer.")[1] for name, p in student.named_parameters() if p.grad is not None} == {
        "layers.0.mixer."
    }


def test_ignored_tokens_do_not_count():
    teacher, student = model("transformer.yaml"), model("gated_deltanet.yaml", seed=1)
    tokens, labels = batch()
    for match in ("layers", "logits"):
        distillation = Distillation(Teacher("here", match=match), teacher, student)  # type: ignore[arg-type]
        total = distillation.total_loss(student, tokens, labels)
        other = tokens.clone()
        other[:, -3:] = 3  # what comes last changes nothing before it
        torch.testing.assert_close(distillation.total_loss(student, other, labels), total)


@pytest.mark.parametrize("match", ["layers", "logits"])
def test_a_student_in_bf16_has_a_teacher_in_bf16(match: Match):
    teacher, student = model("transformer.yaml"), model("gated_deltanet.yaml", seed=1).bfloat16()
    total = Distillation(Teacher("here", match=match), teacher, student).total_loss(student, *batch())
    total.backward()
    assert total.isfinite()
    assert teacher.embeddings.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("student", "overrides", "match", "message"),
    [
        (
            "gated_deltanet.yaml",
            ("model.vocab_size=51",),
            "logits",
            "its vocab_size is 50, but that of the model is 51",
        ),
        ("gated_deltanet.yaml", ("model.num_layers=3",), "layers", "its num_layers is 2, but that of the model is 3"),
        ("gated_deltanet.yaml", ("model.hidden_size=64",), "layers", "its hidden_size is 32"),
        ("transformer.yaml", (), "layers", "all mixers of the model are of the teacher's classes"),
    ],
)
def test_models_that_cannot_be_compared(student: str, overrides: tuple[str, ...], match: str, message: str):
    with pytest.raises(UserError, match=message):
        Distillation(Teacher("here", match=match), model("transformer.yaml"), model(student, *overrides))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"match": "outputs"}, "teacher.match: 'outputs' is not one of logits, layers"),
        ({"temperature": 0.0}, "teacher.temperature is 0.0, but must be above 0 and finite"),
        ({"checkpoint": " "}, "teacher.checkpoint: ' ' is empty"),
    ],
)
def test_wrong_settings(arguments: dict[str, str | float], message: str):
    with pytest.raises(UserError, match=message):
        Teacher(**arguments)  # type: ignore[arg-type]


def test_a_run_that_matches_something_else_is_not_continued():
    layers = {"teacher": {"checkpoint": "a", "match": "layers"}}
    logits = {"teacher": {"checkpoint": "a", "match": "logits"}}
    for now, before in ((layers, layers), (logits, logits), ({}, logits), (None, None)):
        check_match(now, before)
    for now, before, named in ((layers, logits, "logits"), (layers, {}, "nothing"), ({}, layers, "layers")):
        with pytest.raises(UserError, match=f"checkpoint was trained to match {named}"):
            check_match(now, before)
