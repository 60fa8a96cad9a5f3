"""The key that is meant by an unknown one: another spelling, another name of it, or another place."""

from collections.abc import Collection, Iterable
from itertools import takewhile

from mixers import similar

# last part of a key in other projects → its name here; of several, the first that exists
_ALIASES = {
    ("lr",): ("learning_rate",),
    ("wd",): ("weight_decay",),
    ("epochs", "num_epochs", "num_train_epochs"): ("max_epochs",),
    ("steps", "num_steps", "iters", "max_iters", "iterations", "train_steps"): ("max_steps",),
    ("batch", "batchsize", "bs", "micro_batch_size"): ("batch_sizes", "batch_size"),
    ("layers", "n_layer", "n_layers", "depth", "num_hidden_layers"): ("num_layers", "layers"),
    ("heads", "n_head", "n_heads", "num_attention_heads"): ("num_heads",),
    ("dim", "d_model", "n_embd", "width", "hidden", "hidden_dim", "embed_dim"): ("hidden_size",),
    ("d_ff", "ffn_dim", "mlp_dim"): ("intermediate_size",),
    ("seq_len", "seq_length", "context", "context_length", "block_size"): ("sequence_length",),
    ("seed", "random_seed"): ("seeds", "seed_everything"),
    ("clip", "grad_clip", "max_grad_norm", "gradient_clip_val"): ("gradient_clip",),
    ("warmup",): ("warmup_steps",),
    ("gpus", "num_gpus"): ("devices",),
    ("device",): ("accelerator",),
    ("val_interval", "eval_interval", "eval_every"): ("val_check_interval",),
    ("tokenizer_path",): ("tokenizer",),
    ("dataset", "data_path", "file"): ("path",),
    ("conf", "cfg", "configs"): ("config",),
    ("name", "run_name"): ("run",),
    ("output", "out", "output_dir", "folder"): ("output", "run", "folder"),
    ("checkpoint", "ckpt", "resume", "load"): ("checkpoint", "resume"),
    ("max_tokens", "num_tokens", "max_length"): ("max_new_tokens",),
}
_NAMES = {alias: names for aliases, names in _ALIASES.items() for alias in aliases}
CLOSE = 0.8  # similarity of two spellings, from 0 to 1, above which another key of the same name matters less


def suggestions(key: str, group: str, keys: Iterable[str]) -> list[str]:
    """The keys that may be meant by an unknown one, equally likely; empty if none is likely.

    Args:
        key: The unknown key, such as `model.stack.factor`.
        group: The part of it that exists, such as `model.stack`; empty for the top level.
        keys: All keys that exist, with those of the parts that a config names.
    """
    keys = {*keys}
    name, _, rest = key.removeprefix(group).lstrip(".").partition(".")
    start = f"{group}." if group else ""
    siblings = {other.removeprefix(start).partition(".")[0] for other in keys if other.startswith(start)}
    spelled = [start + other for other in similar(name, siblings)]
    if whole := [f"{other}.{rest}" for other in spelled if rest and f"{other}.{rest}" in keys]:
        return whole
    leaf = key.rpartition(".")[2]
    for target in _NAMES.get(leaf.lower(), ()):
        if target != name and (places := _places(target, group, keys)):
            return places
    exact = _places(leaf, group, keys)
    if spelled and not (group and exact and not similar(name, siblings, cutoff=CLOSE)):
        return spelled
    if exact:
        return exact
    leaves = {other.rpartition(".")[2] for other in keys}
    close = [place for other in similar(leaf, leaves, cutoff=CLOSE) for place in _places(other, group, keys)]
    top = key.rpartition(".")[0].partition(".")[0]
    # elsewhere a longer name means something else: the `decay` of a mixer, and optim.decay_fraction
    return [place for place in close if place.startswith(top) or not place.rpartition(".")[2].startswith(leaf)]


def is_certain(key: str, group: str, keys: Iterable[str], partial: Collection[str]) -> bool:
    """Return whether there are suggestions, which further keys of some top-level groups would not change.

    Args:
        key, group, keys: As for `suggestions`.
        partial: The groups of which not all keys are in `keys`.
    """
    keys, leaf = {*keys}, key.rpartition(".")[2]
    close = suggestions(key, group, keys)
    if not close or leaf.lower() in _NAMES or any(other.partition(".")[0] in partial for other in close):
        return False
    if group:  # another spelling of a key of the group comes before all others, unless it is far from it
        siblings = [other.rpartition(".")[2] for other in close if other.rpartition(".")[0] == group]
        return len(siblings) == len(close) and bool(similar(leaf, siblings, cutoff=CLOSE))
    return "." not in key and all(other.rpartition(".")[2] == leaf for other in close)


def _places(leaf: str, group: str, keys: Iterable[str]) -> list[str]:
    """The keys that end with a name and are nearest to a group: below it, above it, or in another top-level group."""
    parts = group.split(".") if group else []
    nearest: dict[tuple[int, int], list[str]] = {}
    for key in sorted(keys):
        *above, last = key.split(".")
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(above, parts, strict=False)))
        if last == leaf and shared in (0, len(above), len(parts)):
            nearest.setdefault((-shared, len(above)), []).append(key)
    return nearest[min(nearest)] if nearest else []
