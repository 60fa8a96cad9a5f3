"""The laws of Table 3 of arXiv 2406.16690, as a `laws.json` by which `scaling plan` divides a budget.

    python reproductions/published_laws.py hgrn2
    python cli.py scaling plan --mixers=hgrn2,transformer --budget=1e18 --law=runs/published/hgrn2.json

N is without embeddings. The paper does not name the unit of C; it is PF-days, since its LLaMA of 7B parameters at 300B
tokens is 179 of them and lies on the law.
"""

import sys
from pathlib import Path

from kernels import UserError
from zoo.arguments import check_names
from zoo.files.sealed_json import write_sealed
from zoo.scaling.curves import PF_DAY
from zoo.scaling.optima import Laws
from zoo.scaling.power import PowerLaw

FOLDER = Path("runs/published")


def _per_pf_day(loss: tuple[float, float], size: tuple[float, float], tokens: tuple[float, float]) -> Laws:
    """Laws printed for C in PF-days, for C in FLOPs."""
    return Laws(
        *(PowerLaw(coefficient * PF_DAY**-exponent, exponent) for coefficient, exponent in (loss, size, tokens))
    )


LAWS = {
    "llama": _per_pf_day((3.7087, -0.0798), (1.82e8, 0.7118), (2.56e10, 0.5102)),
    "tnl": _per_pf_day((3.5391, -0.0768), (2.74e8, 0.6470), (4.43e10, 0.4684)),
    "hgrn2": _per_pf_day((3.4788, -0.0753), (2.66e8, 0.6427), (4.80e10, 0.4500)),
    "cosformer2": _per_pf_day((3.5877, -0.0756), (2.65e8, 0.6516), (4.23e10, 0.4529)),
}


def write(name: str) -> Path:
    """Write one of the laws to a file of its name; returns the file."""
    check_names("law", [name], LAWS)
    parts = LAWS[name]._asdict().items()
    row = {f"{part}_{constant}": value for part, law in parts for constant, value in law._asdict().items()}
    write_sealed(FOLDER / f"{name}.json", {"laws": [{"mixer": name, **row}]})
    return FOLDER / f"{name}.json"


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{write(*sys.argv[1:2] or [''])}\n")
    except UserError as error:
        sys.exit(f"error: {error.on_command_line}")
