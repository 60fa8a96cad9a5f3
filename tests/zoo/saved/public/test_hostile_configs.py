"""Folders of every family whose values are of another kind, or name code: one sentence, and nothing is run."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zoo
from zoo.saved.public.families import FAMILIES
from zoo.saved.public.family import Family

from ..test_convert import CLASS, Bomb

WRONG = (CLASS, [CLASS], "os.system", -1)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_values_of_another_kind(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "theirs"
    folder.mkdir()
    save_file({"x": torch.ones(1)}, folder / "model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    (folder / "evil.py").write_text("open('exploded', 'w').close()")
    config = {"model_type": family.model_types[0], "auto_map": {"AutoConfig": "evil.Evil"}, "num_hidden_layers": 2}
    config |= {"norm_eps": 1e-5} if family.name == "fla_mamba2" else {}
    for key in (*family.keys, *family.fixed, "architectures", "unheard_of"):
        for value in WRONG:
            (folder / "config.json").write_text(json.dumps({**config, key: value}))
            with pytest.raises(zoo.UserError) as raised:
                zoo.load(folder)
            assert "\n" not in str(raised.value), (key, value)
    assert [file.name for file in tmp_path.iterdir()] == ["theirs"]
