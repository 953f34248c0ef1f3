"""Do the intervals and tests hold what they promise when there is nothing to find?

Simulated screens, always the same: G experiments, each with 60 reference and 12 case wells on 3 plates, 32 columns;
column offsets of an experiment N(0, 1), noise N(0, 1), and a case shift of an experiment N(0, s) in every column with
s = 0 or 0.3, independent between experiments. So nothing carries over from one experiment to another: the true held-out
AUROC is 0.5, and 95 % intervals should cover it in 91 to 98 % of the screens. With s = 0.3 cases do differ from
references inside every experiment, in another way each time, which is what an interval over experiments must allow for.
The rank sum's null (wells of a plate are exchangeable) holds for s = 0 only; its rejections are printed for both.

    python benchmarks/coverage.py                       1,000 screens a setting (most of an hour on one core)
    python benchmarks/coverage.py --nulls 100 --experiments 4 8 20

The last printed line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass

import numpy as np

from phenoica.score import inference, metrics
from phenoica.score.intervals import delong_interval, delong_variance, fold_correlation, t_interval
from phenoica.score.probes import fit_l1

N_REFERENCE, N_CASE, N_PLATES, N_COLUMNS = 60, 12, 3, 32
FRACTION = 0.1  # lambda of the L1 probe, as a share of lambda_max
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Screen:
    """One simulated screen: features (n, 32), and the label, experiment and plate of each of its n = 72 G wells."""

    X: np.ndarray
    labels: np.ndarray
    experiments: np.ndarray
    plates: np.ndarray


def simulate(n_experiments: int, shift: float, rng: np.random.Generator, effect: float = 0.0) -> Screen:
    """Return a screen; `effect` shifts column 0 of the cases of all experiments alike (0: nothing to find)."""
    per_plate = np.repeat([False, True], [N_REFERENCE // N_PLATES, N_CASE // N_PLATES])
    labels = np.tile(per_plate, N_PLATES * n_experiments)
    plates = np.repeat(np.arange(N_PLATES * n_experiments), len(per_plate))
    experiments = plates // N_PLATES
    X = rng.standard_normal((len(labels), N_COLUMNS)) + rng.standard_normal((n_experiments, N_COLUMNS))[experiments]
    X += labels[:, None] * (shift * rng.standard_normal((n_experiments, N_COLUMNS)))[experiments]
    X[:, 0] += effect * labels
    return Screen(X, labels, experiments, plates)


def mean_difference(X: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the weights of the simplest linear probe: the difference of the class means."""
    return X[labels].mean(axis=0) - X[~labels].mean(axis=0)


def l1_weights(X: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the weights of the L1 probe that scores views."""
    return fit_l1(X, labels, FRACTION).weights


PROBES = {"l1": l1_weights, "mean_difference": mean_difference}


def held_out(screen: Screen, n_folds: int, probe: str) -> dict[str, list]:
    """Return AUROC, pairs, DeLong variance and rank sum of every fold of experiments."""
    found: dict[str, list] = {"auroc": [], "pairs": [], "variance": [], "rank_sum": []}
    for fold in range(n_folds):
        test = screen.experiments % n_folds == fold
        scores = screen.X[test] @ PROBES[probe](screen.X[~test], screen.labels[~test])
        labels, plates = screen.labels[test], screen.plates[test]
        found["auroc"].append(metrics.auroc(labels, scores))
        found["pairs"].append(int(labels.sum() * (~labels).sum()))
        found["variance"].append(delong_variance(labels, scores, plates))
        found["rank_sum"].append(inference.rank_sum(labels, scores, plates))
    return found


def interval(found: dict[str, list], n_experiments: int) -> tuple[float, float]:
    """Return the interval that the score stage would give."""
    if n_experiments >= 4:
        result = t_interval(found["auroc"], found["pairs"], CONFIDENCE)
    else:
        result = delong_interval(found["auroc"], found["variance"], found["pairs"], CONFIDENCE)
    # no spread at all (every probe empty): the score stage gives no interval, which excludes nothing
    return (0.0, 1.0) if result.low is None else (result.low, result.high)


def p_value(found: dict[str, list]) -> float:
    """Return the p value that the score stage would give."""
    sums = found["rank_sum"]
    correlation = fold_correlation(len(sums))
    return inference.combined_p(
        [f.auroc for f in sums], [f.pairs for f in sums], [f.variance for f in sums], correlation
    )


def coverage(
    n_experiments: int, n_folds: int, shift: float, n_screens: int, probe: str = "l1", seed: int = 0
) -> dict[str, float]:
    """Return how often the interval covers 0.5, its mean width, how often p <= 0.05, and the mean AUROC."""
    covered, width, rejected, values = [], [], [], []
    for number in range(n_screens):
        rng = np.random.default_rng([seed, n_experiments, n_folds, int(10 * shift), number])
        found = held_out(simulate(n_experiments, shift, rng), n_folds, probe)
        low, high = interval(found, n_experiments)
        covered.append(low <= 0.5 <= high)
        width.append(high - low)
        rejected.append(p_value(found) <= 0.05)
        values.append(np.average(found["auroc"], weights=found["pairs"]))
    return {
        "coverage": float(np.mean(covered)), "width": float(np.mean(width)), "rejected": float(np.mean(rejected)),
        "auroc": float(np.mean(values)),
    }  # fmt: skip


def main() -> None:
    """Run the settings, print a line each and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nulls", type=int, default=1000, help="screens a setting")
    parser.add_argument("--experiments", type=int, nargs="+", default=[4, 8, 20, 176])
    parser.add_argument("--probe", choices=PROBES, default="l1")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    results = []
    for n_experiments in options.experiments:
        for n_folds in (4, 10) if n_experiments >= 20 else (min(4, n_experiments),):
            for shift in (0.0, 0.3):
                start = time.monotonic()
                found = coverage(n_experiments, n_folds, shift, options.nulls, options.probe, options.seed)
                setting = {"experiments": n_experiments, "folds": n_folds, "shift": shift, "nulls": options.nulls}
                results.append({**setting, **{key: round(value, 4) for key, value in found.items()}})
                print(
                    f"G {n_experiments:3d}  K {n_folds:2d}  s {shift:.1f}: covers 0.5 in {found['coverage']:.1%}, mean "
                    f"width {found['width']:.3f}, p <= .05 in {found['rejected']:.1%}, mean AUROC {found['auroc']:.4f} "
                    f"({time.monotonic() - start:.0f} s)",
                    flush=True,
                )
    inside = all(0.91 <= r["coverage"] <= 0.98 for r in results if r["experiments"] >= 4)
    print(json.dumps({"probe": options.probe, "all_within_91_98": inside, "settings": results}))


if __name__ == "__main__":
    main()
