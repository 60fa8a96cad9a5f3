"""Tables of the papers: which tasks, which metric, at which lengths. `--tasks=gated_deltanet/table3` runs one."""

from dataclasses import dataclass, replace

from zoo.evaluation.task import Options

K = 1024
LONGBENCH = "the 14 files of Xnhyacinth/LongBench"


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: As printed in the paper.
        task: The task that measures it.
        metric: Which of its metrics it shows.
        lengths: In tokens; None for the task's own.
        samples: For each length; None for the task's own.
    """

    title: str
    task: str
    metric: str
    lengths: tuple[int, ...] | None = None
    samples: int | None = None


@dataclass(frozen=True)
class Preset:
    """A table of a paper.

    Attributes:
        measures: What it shows.
        needs: Which data it needs.
        columns: From the left.
    """

    measures: str
    needs: str
    columns: tuple[Column, ...]

    def choices(self, options: Options) -> list[tuple[str, Options]]:
        """The tasks to run, each with the paper's lengths and samples unless `options` have their own."""
        chosen = {}
        for column in self.columns:
            chosen[column.task] = replace(
                options,
                lengths=column.lengths if options.lengths is None else options.lengths,
                samples=column.samples if options.samples is None else options.samples,
            )
        return list(chosen.items())


def _accuracies(*names: str, normalised: tuple[str, ...] = ()) -> tuple[Column, ...]:
    """Columns of choices, by accuracy, or by accuracy with log-likelihoods divided by the lengths of the answers."""
    titles = {
        "piqa": "PIQA",
        "hellaswag": "Hella.",
        "winogrande": "Wino.",
        "arc_easy": "ARC-e",
        "arc_challenge": "ARC-c",
        "social_iqa": "SIQA",
        "boolq": "BoolQ",
        "openbookqa": "OBQA",
    }
    return tuple(Column(titles[name], f"lm_eval/{name}", "acc_norm" if name in normalised else "acc") for name in names)


def _cloze(*names: str, lengths: tuple[int, ...] | None = None) -> tuple[Column, ...]:
    titles = {"swde": "SWDE", "squad_cloze": "SQuAD", "fda": "FDA"}
    titles |= {"triviaqa_cloze": "TQA", "nq_cloze": "NQ", "drop_cloze": "Drop"}
    return tuple(Column(titles[name.removesuffix("_twice")], f"lm_eval/{name}", "contains", lengths) for name in names)


_WIKI = Column("Wiki. ppl", "lm_eval/wikitext", "word_perplexity")
_LAMBADA = Column("LMB. ppl", "lm_eval/lambada_openai", "perplexity")
_LAMBADA_ACCURACY = Column("LMB. acc", "lm_eval/lambada_openai", "acc")
_EIGHT = ("piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "social_iqa", "boolq")
_LONGBENCH = tuple(
    Column(title, f"lm_eval/longbench_{name}", "score")
    for title, name in {
        "NQA": "narrativeqa",
        "QQA": "qasper",
        "MFQ": "multifieldqa_en",
        "HQA": "hotpotqa",
        "2WM": "2wikimqa",
        "Mus": "musique",
        "GvR": "gov_report",
        "QMS": "qmsum",
        "MNs": "multi_news",
        "TRC": "trec",
        "TQA": "triviaqa",
        "SSM": "samsum",
        "LCC": "lcc",
        "RBP": "repobench-p",
    }.items()
)
_SCROLLS = tuple(
    Column(title, f"lm_eval/scrolls_{name}", metric)
    for name, metrics in {
        "govreport": {"GovReport R.1": "rouge1", "GovReport R.2": "rouge2", "GovReport R.L": "rougeL"},
        "summscreenfd": {"SummScreenFD R.1": "rouge1", "SummScreenFD R.2": "rouge2", "SummScreenFD R.L": "rougeL"},
        "qmsum": {"QMSum R.1": "rouge1", "QMSum R.2": "rouge2", "QMSum R.L": "rougeL"},
        "qasper": {"Qasper": "f1"},
        "narrativeqa": {"NarrativeQA": "f1"},
        "quality": {"QuALITY": "acc_norm"},
        "contractnli": {"ContractNLI": "acc_norm"},
    }.items()
    for title, metric in metrics.items()
)
_IN_CONTEXT = {
    "commonsense_qa": "acc",
    "arc_challenge": "acc",
    "copa": "acc",
    "cb": "acc",
    "mrpc": "acc",
    "sst2": "acc",
    "qqp": "acc",
    "cola": "mcc",
    "sglue_rte": "acc",
    "wic": "acc",
}

PRESETS: dict[str, Preset] = {
    "gated_deltanet/table2": Preset(
        "one needle in a haystack, three kinds",
        "nothing",
        (
            Column("S-NIAH-1", "s_niah_1", "accuracy", (K, 2 * K, 4 * K, 8 * K)),
            Column("S-NIAH-2", "s_niah_2", "accuracy", (K, 2 * K, 4 * K, 8 * K)),
            Column("S-NIAH-3", "s_niah_3", "accuracy", (K, 2 * K, 4 * K)),
        ),
    ),
    "gated_deltanet/table3": Preset(
        "language modelling and common sense; HellaSwag and ARC-c by acc_norm",
        "data of its 9 tasks",
        (_WIKI, _LAMBADA, _LAMBADA_ACCURACY, *_accuracies(*_EIGHT, normalised=("hellaswag", "arc_challenge"))),
    ),
    "gated_deltanet/table4": Preset(
        "recall from documents, cut to 2048 tokens around the answer",
        "data of its 6 tasks",
        _cloze("swde", "squad_cloze", "fda", "triviaqa_cloze", "nq_cloze", "drop_cloze", lengths=(2 * K,)),
    ),
    "gated_deltanet/table5": Preset("long texts", LONGBENCH, _LONGBENCH),
    "state_expansion/table3": Preset(
        # which accuracies is not said; those printed fit acc (HellaSwag of a 400M Transformer++ .31)
        "language modelling and common sense, all by acc",
        "data of its 9 tasks",
        (_WIKI, _LAMBADA, _LAMBADA_ACCURACY, *_accuracies(*_EIGHT)),
    ),
    "state_expansion/table4": Preset(
        "recall from whole documents", "data of its 3 tasks", _cloze("fda", "swde", "squad_cloze")
    ),
    "state_expansion/table5": Preset("long texts", LONGBENCH, _LONGBENCH),
    "state_expansion/table6": Preset(
        "one of four needles in text", "nothing", (Column("M-NIAH", "m_niah_1", "accuracy", (512, K, 2 * K)),)
    ),
    "state_expansion/table11": Preset(
        "recall from documents, cut to 2048 tokens around the answer",
        "data of its 3 tasks",
        _cloze("fda", "swde", "squad_cloze", lengths=(2 * K,)),
    ),
    "statex/table2": Preset(
        "recall from documents read twice",
        "data of its 5 tasks",
        _cloze("swde_twice", "squad_cloze_twice", "triviaqa_cloze_twice", "nq_cloze_twice", "drop_cloze_twice"),
    ),
    "statex/table3": Preset(
        "learning from 8, 16 and 24 examples; 10 of its 12 tasks, as lm-eval has no codah and dream",
        "data of its 10 tasks, with their train splits",
        tuple(
            Column(f"{name}, {shots}-shot", f"lm_eval/{name}@{shots}", metric)
            for shots in (8, 16, 24)
            for name, metric in _IN_CONTEXT.items()
        ),
    ),
    "statex/table4": Preset(
        "common sense, all by acc",
        "data of its 6 tasks",
        _accuracies("piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "social_iqa"),
    ),
    "statex/table5": Preset(
        "a passkey in noise, a number in text",
        "nothing",
        tuple(
            Column(title, task, "accuracy", tuple(n * K for n in (4, 8, 16, 32, 64)), 256)
            for title, task in {"Passkey Retrieval": "passkey", "NIAH-Single-2": "s_niah_2"}.items()
        ),
    ),
    "scaling_laws/table4": Preset(
        "common sense, perplexities and needles; HellaSwag, ARC-c and OpenBookQA by acc_norm",
        "data of its 9 tasks (its last column, the mean of SCROLLS, is scaling_laws/table9)",
        (
            *_accuracies(
                "boolq",
                "piqa",
                "hellaswag",
                "winogrande",
                "arc_easy",
                "arc_challenge",
                "openbookqa",
                normalised=("hellaswag", "arc_challenge", "openbookqa"),
            ),
            _WIKI,
            _LAMBADA,
            Column("NIAH", "niah_easy", "weighted_accuracy"),
        ),
    ),
    "scaling_laws/table9": Preset("SCROLLS, zero-shot", "tau/scrolls, 7 files", _SCROLLS),
    "scaling_laws/table12": Preset(
        "a needle by length and depth, easy and standard",
        "nothing",
        (
            Column("easy", "niah_easy", "weighted_accuracy"),
            Column("standard", "niah_standard", "weighted_accuracy"),
        ),
    ),
}
