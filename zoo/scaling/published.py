"""Published laws, to compare with and to plan by."""

from pathlib import Path

from kernels import UserError
from mixers import did_you_mean
from zoo.arguments import errors_about
from zoo.files.sealed_json import read_sealed
from zoo.scaling.curves import PF_DAY
from zoo.scaling.optima import Laws
from zoo.scaling.parametric import Parametric
from zoo.scaling.power import PowerLaw

# L(N, D), where N includes embeddings: the constants in arXiv 2203.15556, and those refitted by arXiv 2404.10102
CHINCHILLA = Parametric(E=1.69, A=406.4, B=410.7, alpha=0.3392, beta=0.2849)
CHINCHILLA_REPLICATED = Parametric(E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658)
CHINCHILLA_FLOPS = 6.0  # per parameter and token


def _per_pf_day(loss: tuple[float, float], size: tuple[float, float], tokens: tuple[float, float]) -> Laws:
    """Laws printed for C in PF-days, for C in FLOPs."""
    return Laws(
        *(PowerLaw(coefficient * PF_DAY**-exponent, exponent) for coefficient, exponent in (loss, size, tokens))
    )


# Table 3 of arXiv 2406.16690, N without embeddings. The paper does not name the unit of C; it is PF-days, since its
# LLaMA of 7B parameters at 300B tokens is 179 of them and lies on the law.
LINEAR = {
    "llama": _per_pf_day((3.7087, -0.0798), (1.82e8, 0.7118), (2.56e10, 0.5102)),
    "tnl": _per_pf_day((3.5391, -0.0768), (2.74e8, 0.6470), (4.43e10, 0.4684)),
    "hgrn2": _per_pf_day((3.4788, -0.0753), (2.66e8, 0.6427), (4.80e10, 0.4500)),
    "cosformer2": _per_pf_day((3.5877, -0.0756), (2.65e8, 0.6516), (4.23e10, 0.4529)),
}


def law_named(name: str) -> Laws:
    """A published law by its name, or the first one of a `laws.json`, for C in FLOPs.

    Raises:
        UserError: The name is neither a law nor a file, or the file is damaged.
    """
    parametric_laws = {"chinchilla": CHINCHILLA, "chinchilla_replicated": CHINCHILLA_REPLICATED}
    if name in parametric_laws:
        return parametric_laws[name].laws(CHINCHILLA_FLOPS)
    if name in LINEAR:
        return LINEAR[name]
    if not Path(name).is_file():
        names = [*parametric_laws, *LINEAR]
        raise UserError(f"law: {name!r} is neither a file nor one of {', '.join(names)}{did_you_mean(name, names)}")
    with errors_about("law"):
        content = read_sealed(name, advice="name a laws.json that scaling fit wrote")
        if not content.get("laws"):
            raise UserError(f"{name} is not a laws.json of scaling fit")
    row = content["laws"][0]
    parts = (
        PowerLaw(row[f"{part}_coefficient"], row[f"{part}_exponent"], row.get(f"{part}_offset", 0.0))
        for part in Laws._fields
    )
    return Laws(*parts)
