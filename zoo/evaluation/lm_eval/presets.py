"""Tables of the papers: which tasks, which metrics, at which lengths. `--tasks=gated_deltanet/table3` runs one."""

from dataclasses import dataclass, replace

from zoo.evaluation.task import Options

K = 1024
# The public needle-in-a-haystack test has 35 lengths, these, and 35 depths by default. The paper's text names only the
# maximum, 16k; its means fit 8 lengths up to 4k and 17 up to 8k (cosFormer2 at 2k in table 14: 34.2, 16.1 and 7.8).
NIAH_GRID = tuple(round(1000 + step * 15000 / 34) for step in range(35))


@dataclass(frozen=True)
class Preset:
    """A table of a paper.

    Attributes:
        measures: What it shows.
        needs: Which data it needs.
        metrics: Task → the metrics that the table prints, separated by spaces.
        lengths: In tokens, for all tasks or by task; None, or a task that is missing, for each task's own.
        samples: For each length; None for each task's own.
    """

    measures: str
    needs: str
    metrics: dict[str, str]
    lengths: tuple[int, ...] | dict[str, tuple[int, ...]] | None = None
    samples: int | None = None

    def choices(self, options: Options) -> list[tuple[str, Options]]:
        """The tasks to run, each with the paper's lengths and samples unless `options` have their own."""
        samples = self.samples if options.samples is None else options.samples
        chosen = []
        for task in self.metrics:
            lengths = self.lengths.get(task) if isinstance(self.lengths, dict) else self.lengths
            lengths = lengths if options.lengths is None else options.lengths
            chosen.append((task, replace(options, lengths=lengths, samples=samples)))
        return chosen


def _of_lm_eval(metric: str, names: str, form: str = "{}") -> dict[str, str]:
    """Tasks of lm-eval by their names, or by what completes `form`, with the same metric."""
    return {f"lm_eval/{form.format(name)}": metric for name in names.split()}


def _long_texts() -> Preset:
    names = "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique gov_report qmsum multi_news trec triviaqa"
    names += " samsum lcc repobench-p"
    return Preset("long texts", "the 14 files of Xnhyacinth/LongBench", _of_lm_eval("score", names, "longbench_{}"))


_MODELLING = {"lm_eval/wikitext": "word_perplexity", "lm_eval/lambada_openai": "perplexity acc"}
_SIX = "piqa hellaswag winogrande arc_easy arc_challenge social_iqa"
_NORMALISED = _of_lm_eval("acc_norm", "hellaswag arc_challenge")  # by the lengths of the answers
_CUT = "recall from documents, cut to 2048 tokens around the answer"
_EXAMPLES = _of_lm_eval("acc", "commonsense_qa arc_challenge copa cb mrpc sst2 qqp")
_EXAMPLES |= {"lm_eval/cola": "mcc"} | _of_lm_eval("acc", "sglue_rte wic")

PRESETS: dict[str, Preset] = {
    "gated_deltanet/table2": Preset(
        "one needle in a haystack, three kinds",
        "nothing",
        dict.fromkeys(("s_niah_1", "s_niah_2", "s_niah_3"), "accuracy"),
        {"s_niah_1": (K, 2 * K, 4 * K, 8 * K), "s_niah_2": (K, 2 * K, 4 * K, 8 * K), "s_niah_3": (K, 2 * K, 4 * K)},
    ),
    "gated_deltanet/table3": Preset(
        "language modelling and common sense; HellaSwag and ARC-c by acc_norm",
        "data of its 9 tasks",
        _MODELLING | _of_lm_eval("acc", f"{_SIX} boolq") | _NORMALISED,
    ),
    "gated_deltanet/table4": Preset(
        _CUT,
        "data of its 6 tasks",
        _of_lm_eval("contains", "swde squad_cloze fda triviaqa_cloze nq_cloze drop_cloze"),
        (2 * K,),
    ),
    "gated_deltanet/table5": _long_texts(),
    "state_expansion/table3": Preset(
        # which accuracies is not said; those printed fit acc (HellaSwag of a 400M Transformer++ .31)
        "language modelling and common sense, all by acc",
        "data of its 9 tasks",
        _MODELLING | _of_lm_eval("acc", f"{_SIX} boolq"),
    ),
    "state_expansion/table4": Preset(
        "recall from whole documents", "data of its 3 tasks", _of_lm_eval("contains", "fda swde squad_cloze")
    ),
    "state_expansion/table5": _long_texts(),
    "state_expansion/table6": Preset(
        "one of four needles in text", "nothing", {"m_niah_1": "accuracy"}, (512, K, 2 * K)
    ),
    "state_expansion/table11": Preset(
        _CUT, "data of its 3 tasks", _of_lm_eval("contains", "fda swde squad_cloze"), (2 * K,)
    ),
    "statex/table2": Preset(
        "recall from documents read twice",
        "data of its 5 tasks",
        _of_lm_eval("contains", "swde squad_cloze triviaqa_cloze nq_cloze drop_cloze", "{}_twice"),
    ),
    "statex/table3": Preset(
        "learning from 8, 16 and 24 examples; 10 of its 12 tasks, as lm-eval has no codah and dream",
        "data of its 10 tasks, with their train splits",
        {f"{task}@{shots}": metric for shots in (8, 16, 24) for task, metric in _EXAMPLES.items()},
    ),
    "statex/table4": Preset("common sense, all by acc", "data of its 6 tasks", _of_lm_eval("acc", _SIX)),
    "statex/table5": Preset(
        "a passkey in noise, a number in text",
        "nothing",
        dict.fromkeys(("passkey", "s_niah_2"), "accuracy"),
        tuple(n * K for n in (4, 8, 16, 32, 64)),
        256,
    ),
    "scaling_laws/table4": Preset(
        "common sense, perplexities and needles; HellaSwag, ARC-c and OpenBookQA by acc_norm",
        "data of its 9 tasks (its last column, the mean of SCROLLS, is scaling_laws/table9)",
        _of_lm_eval("acc", "boolq piqa hellaswag winogrande arc_easy arc_challenge")
        | _NORMALISED
        | {"lm_eval/openbookqa": "acc_norm", "lm_eval/wikitext": "word_perplexity"}
        | {"lm_eval/lambada_openai": "perplexity", "niah_easy": "weighted_accuracy"},
        {"niah_easy": NIAH_GRID},
    ),
    "scaling_laws/table9": Preset(
        "SCROLLS, zero-shot",
        "tau/scrolls, 7 files",
        _of_lm_eval("rouge1 rouge2 rougeL", "govreport summscreenfd qmsum", "scrolls_{}")
        | _of_lm_eval("f1", "qasper narrativeqa", "scrolls_{}")
        | _of_lm_eval("acc_norm", "quality contractnli", "scrolls_{}"),
    ),
    "scaling_laws/table12": Preset(
        "a needle at 35 lengths from 1,000 to 16,000 tokens and 35 depths, easy and standard",
        "nothing",
        dict.fromkeys(("niah_easy", "niah_standard"), "weighted_accuracy"),
        NIAH_GRID,
    ),
}
