"""The tasks of lm-eval that the papers use: what they measure, and which public data set their files hold.

Every other task of lm-eval can be named as well; these are listed, and found without reading lm-eval's 14,000 configs.
"""

from typing import NamedTuple


class Listed(NamedTuple):
    """A task that a paper uses.

    Attributes:
        measures: What it measures, in one phrase.
        source: The public data set and its split; "" if the task generates its data.
        folder: The folder of lm-eval's tasks that defines it; "" for the zoo's own.
        file: The data's file or folder, without its suffix, if not called like the task.
    """

    measures: str
    source: str
    folder: str
    file: str | None = None


_LANGUAGE = {
    "wikitext": Listed(
        "perplexity of Wikipedia", "EleutherAI/wikitext_document_level (wikitext-2-raw-v1), test", "wikitext"
    ),
    "lambada_openai": Listed("the last word of a passage", "EleutherAI/lambada_openai (default), test", "lambada"),
    "piqa": Listed("physical common sense, 2 choices", "baber/piqa, validation", "piqa"),
    "hellaswag": Listed("how a text continues, 4 choices", "Rowan/hellaswag, validation", "hellaswag"),
    "winogrande": Listed("pronouns, 2 choices", "allenai/winogrande (winogrande_xl), validation", "winogrande"),
    "arc_easy": Listed("school science, 4 choices", "allenai/ai2_arc (ARC-Easy), test", "arc"),
    "arc_challenge": Listed("harder school science, 4 choices", "allenai/ai2_arc (ARC-Challenge), test", "arc"),
    "social_iqa": Listed("social common sense, 3 choices", "lighteval/siqa, validation", "siqa"),
    "boolq": Listed("yes or no about a passage", "aps/super_glue (boolq), validation", "super_glue/boolq"),
    "openbookqa": Listed("elementary science, 4 choices", "allenai/openbookqa (main), test", "openbookqa"),
}
CLOZE = {
    "fda": Listed("values in reports of the FDA", "hazyresearch/based-fda (default), validation", "fda"),
    "swde": Listed("values in web pages", "hazyresearch/based-swde-v2 (default), validation", "swde"),
    "squad_cloze": Listed(
        "SQuAD in cloze form", "hazyresearch/based-squad (default), validation", "", "squad_completion"
    ),
    "triviaqa_cloze": Listed("TriviaQA in cloze form", "hazyresearch/based_triviaqa, validation", ""),
    "nq_cloze": Listed("Natural Questions in cloze form", "hazyresearch/based_nq_2048, validation", ""),
    "drop_cloze": Listed("DROP in cloze form", "hazyresearch/based_drop, validation", ""),
}
_TWICE = {
    f"{name}_twice": Listed(
        f"{listed.measures}, prompt given twice (Just Read Twice)", listed.source, "", listed.file or name
    )
    for name, listed in CLOZE.items()
}
_LONGBENCH = {
    f"longbench_{name}": Listed(f"LongBench: {measures}", f"Xnhyacinth/LongBench ({name}), test", "longbench")
    for name, measures in {
        "narrativeqa": "questions about a story, F1",
        "qasper": "questions about a paper, F1",
        "multifieldqa_en": "questions about a text, F1",
        "hotpotqa": "questions about several texts, F1",
        "2wikimqa": "questions about several texts, F1",
        "musique": "questions about several texts, F1",
        "gov_report": "summaries of reports, ROUGE-L",
        "qmsum": "summaries of meetings, ROUGE-L",
        "multi_news": "summaries of news, ROUGE-L",
        "trec": "kinds of questions, accuracy",
        "triviaqa": "questions with examples, F1",
        "samsum": "summaries of dialogues, ROUGE-L",
        "lcc": "the next line of code, similarity",
        "repobench-p": "the next line of code in a repository, similarity",
    }.items()
}
_SCROLLS = {
    f"scrolls_{name}": Listed(f"SCROLLS: {measures}", f"tau/scrolls ({data_set}), validation", "")
    for name, (data_set, measures) in {
        "govreport": ("gov_report", "summaries of reports, ROUGE"),
        "summscreenfd": ("summ_screen_fd", "summaries of episodes, ROUGE"),
        "qmsum": ("qmsum", "summaries of meetings, ROUGE"),
        "qasper": ("qasper", "questions about a paper, F1"),
        "narrativeqa": ("narrative_qa", "questions about a story, F1"),
        "quality": ("quality", "questions about a text, 4 choices"),
        "contractnli": ("contract_nli", "what follows from a contract, 3 choices"),
    }.items()
}
_ESSAYS = ("baber/paul_graham_essays, train", "ruler", "paul_graham_essays")
RULER = {
    "niah_single_1": Listed("RULER: a number in noise", "", "ruler"),
    "niah_single_2": Listed("RULER: a number in essays", *_ESSAYS),
    "niah_single_3": Listed("RULER: a uuid in essays", *_ESSAYS),
    "niah_multikey_1": Listed("RULER: one of 4 numbers in essays", *_ESSAYS),
    "niah_multikey_2": Listed("RULER: a number among numbers", "", "ruler"),
    "niah_multikey_3": Listed("RULER: a uuid among uuids", "", "ruler"),
    "niah_multivalue": Listed("RULER: 4 numbers of one key in essays", *_ESSAYS),
    "niah_multiquery": Listed("RULER: 4 numbers of 4 keys in essays", *_ESSAYS),
}
BABILONG = {
    f"babilong_qa{number}": Listed(
        f"BABILong: bAbI's task {number} inside books",
        f"RMT-team/babilong-1k-samples (0k; 1k, 2k … for lengths), split qa{number}",
        "babilong",
    )
    for number in range(1, 21)
}
# with `@8`, 8 examples before each question
_IN_CONTEXT = {
    "commonsense_qa": Listed("common sense, 5 choices", "tau/commonsense_qa, validation and train", "commonsense_qa"),
    "copa": Listed("cause or effect, 2 choices", "aps/super_glue (copa), validation and train", "super_glue/copa"),
    "cb": Listed("entailment, 3 choices", "aps/super_glue (cb), validation and train", "super_glue/cb"),
    "mrpc": Listed("paraphrases", "nyu-mll/glue (mrpc), validation and train", "glue/mrpc"),
    "sst2": Listed("sentiment of reviews", "nyu-mll/glue (sst2), validation and train", "glue/sst2"),
    "qqp": Listed("questions that mean the same", "nyu-mll/glue (qqp), validation and train", "glue/qqp"),
    "cola": Listed("grammatical or not", "nyu-mll/glue (cola), validation and train", "glue/cola"),
    "sglue_rte": Listed("entailment, 2 choices", "aps/super_glue (rte), validation and train", "super_glue/rte"),
    "wic": Listed("a word in two senses", "aps/super_glue (wic), validation and train", "super_glue/wic"),
}

PAPER_TASKS = _LANGUAGE | CLOZE | _TWICE | _LONGBENCH | _SCROLLS | RULER | BABILONG | _IN_CONTEXT
