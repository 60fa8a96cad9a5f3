"""The model card of a converted model: README.md, as Hugging Face shows it."""

from zoo.lm.model import LanguageModel
from zoo.lm.size_table import mixer_names
from zoo.saved.public.family import Exported

CARD = """\
---
library_name: {library}
pipeline_tag: text-generation
tags: [{tags}]
---

# {name}

A language model of {layers} layers of {mixers} with {parameters:,} parameters, trained and converted by the
token-mixer zoo into the layout `{layout}`.

*To be filled in*: the training data, the evaluation, the licence (also as `license:` at the top), what the model is
for, and what it must not be used for.

```python
{load}
```
"""
_TRANSFORMERS = 'from transformers import AutoModelForCausalLM\n\nmodel = AutoModelForCausalLM.from_pretrained("{name}"'
_LOAD = {
    "fla": f"import fla  # flash-linear-attention, on a GPU\n{_TRANSFORMERS})",
    "huggingface": f"{_TRANSFORMERS})",
    "transformers": f"{_TRANSFORMERS}, trust_remote_code=True)",
}


def model_card(name: str, model: LanguageModel, exported: Exported) -> str:
    """Return the text of a model card.

    Args:
        name: The name of the folder, and so of the model.
        model: The model; may be on the meta device.
        exported: What it was converted to.
    """
    return CARD.format(
        library="transformers",
        tags=", ".join(dict.fromkeys(type(mixer).__name__ for mixer in model.mixers)),
        name=name,
        layers=model.num_layers,
        mixers=mixer_names(model),
        parameters=model.num_parameters(),
        layout=exported.layout,
        load=_LOAD[exported.target].format(name=name),
    )
