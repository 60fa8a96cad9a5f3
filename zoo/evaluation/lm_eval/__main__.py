"""lm-eval's own command line with the model `zoo`.

    python -m zoo.evaluation.lm_eval run --model zoo --model_args checkpoint=runs/first --tasks piqa

It takes all of lm-eval's options. lm-eval 0.4.13 knows only the models of its package, unless others are imported
first, as this module does.
"""

import sys

from kernels import UserError


def main() -> None:
    """Run lm-eval; a user's mistake is reported in one sentence, as by our command line."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        sys.exit("error: lm_eval: is not installed; pip install 'token-mixer-zoo[eval]'")
    import zoo.evaluation.lm_eval.model  # noqa: F401  registers the model

    try:
        cli_evaluate()
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
