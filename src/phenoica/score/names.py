"""The metrics in the tables of scores: their names, what they range over, and how folds are put together.

Every row of `score/scores.parquet` has one of these names as `metric`; docs/method.md has the formula of each, and a
test keeps page and code in step. Other modules take the names from here.
"""

from __future__ import annotations

from math import inf

NO_PROBE, TREES = "none", "trees"  # values of `probe` beside l1 and l2

# probes on single perturbations
AUROC = "auroc"
AUROC_SD = "auroc_sd"  # spread over the random rotations
AVERAGE_PRECISION = "average_precision"
PREVALENCE = "prevalence"  # the chance level of average precision
HOYER = "hoyer"
GINI = "gini"
NON_ZERO = "non_zero"  # of the probe's weights; along the path as non_zero_at_<fraction>
BEST_COMPONENTS = "auroc_best_"  # followed by how many components
SHIFT = "auroc_shift_"  # followed by the number of training experiments
GAP = "auroc_gap"  # in distribution minus held out
RANK_SUM, ARRANGEMENTS = "rank_sum", "log10_arrangements"  # of single folds: what the tests are made of
P_VALUE, P_FLOOR, Q_VALUE = "p_value", "p_floor", "q_value"  # over folds
DETECTABLE = "detectable_difference"  # the smallest difference of an AUROC from 0.5 that the interval would show
POSITION_OVERLAP = "position_overlap"
# replicates of a perturbation, without a probe
CONSISTENCY, CONSISTENCY_CHANCE, CONSISTENCY_P = "consistency", "consistency_chance", "consistency_p"
MAGNITUDE, MAGNITUDE_CHANCE, MAGNITUDE_P = "magnitude", "magnitude_chance", "magnitude_p"
MAP_SAME, MAP_CROSS = "map_same_experiment", "map_cross_experiment"
MAP_SAME_CHANCE, MAP_CROSS_CHANCE = f"{MAP_SAME}_chance", f"{MAP_CROSS}_chance"
MAP_SAME_NORMALISED, MAP_CROSS_NORMALISED = f"{MAP_SAME}_normalised", f"{MAP_CROSS}_normalised"
MAP_SAME_SINGLETONS, MAP_CROSS_SINGLETONS = f"{MAP_SAME}_singletons", f"{MAP_CROSS}_singletons"
# probes compared, and effects on single components
L2_CONTROL = ("max_decision_difference", "max_auroc_difference", "holds")
CONCENTRATION = ("concentration_share", "concentration_corrected", "purity", "participation", "overlap")
# a whole view
DECODING, DECODING_CHANCE = "experiment_decoding", "experiment_decoding_chance"
DELETION_GAIN, DELETION_AUROC, DELETION_DECODING = "deletion_gain", "deletion_auroc", "deletion_decoding"

REPLICATES = (
    CONSISTENCY, CONSISTENCY_CHANCE, CONSISTENCY_P, MAGNITUDE, MAGNITUDE_CHANCE, MAGNITUDE_P,
    MAP_SAME, MAP_SAME_CHANCE, MAP_SAME_NORMALISED, MAP_SAME_SINGLETONS,
    MAP_CROSS, MAP_CROSS_CHANCE, MAP_CROSS_NORMALISED, MAP_CROSS_SINGLETONS,
)  # fmt: skip
# every metric of the table of scores, as docs/method.md lists them; numbers in a name are <k> or <fraction>
ALL = (
    AUROC, AUROC_SD, GAP, f"{SHIFT}<k>", RANK_SUM, ARRANGEMENTS, P_VALUE, P_FLOOR, Q_VALUE, DETECTABLE,
    POSITION_OVERLAP, AVERAGE_PRECISION, PREVALENCE, HOYER, GINI, f"{NON_ZERO}_at_<fraction>", f"{BEST_COMPONENTS}<k>",
    *L2_CONTROL, *CONCENTRATION, *REPLICATES, DECODING, DECODING_CHANCE, DELETION_GAIN, DELETION_AUROC,
    DELETION_DECODING,
)  # fmt: skip
MACRO_AVERAGED = (AUROC, GAP, AVERAGE_PRECISION, PREVALENCE, HOYER, GINI)  # over the perturbations of a contrast
P_VALUES = (CONSISTENCY_P, MAGNITUDE_P)
COUNTS = (MAP_SAME_SINGLETONS, MAP_CROSS_SINGLETONS)
# metrics that may be below 0, or above 1
_BOUNDS = {
    GAP: (-1.0, 1.0), "concentration_corrected": (-1.0, 1.0),  # the latter: the top holds less than its share
    CONSISTENCY: (-1.0, 1.0), CONSISTENCY_CHANCE: (-1.0, 1.0), MAP_SAME_NORMALISED: (-1.0, 1.0),
    MAP_CROSS_NORMALISED: (-1.0, 1.0), MAGNITUDE: (0.0, inf), MAGNITUDE_CHANCE: (0.0, inf),
    DELETION_GAIN: (-2.0, 2.0), DELETION_DECODING: (-1.0, 1.0),
}  # fmt: skip


def best_components(k: int) -> str:
    """Return the name of the AUROC of the best `k` components."""
    return f"{BEST_COMPONENTS}{k}"


def non_zero_at(fraction: float) -> str:
    """Return the name of the number of non-zero weights at a fraction of lambda_max."""
    return f"{NON_ZERO}_at_{fraction:g}"


def bounds(metric: str, *, difference: bool = False) -> tuple[float, float]:
    """Return the smallest and largest value of a metric, or of a difference of two; intervals are clipped to them."""
    low, high = (0.0, inf) if metric.startswith(NON_ZERO) else _BOUNDS.get(metric, (0.0, 1.0))
    return (low - high, high - low) if difference else (low, high)


def is_auroc(metric: str) -> bool:
    """Say whether a metric is an AUROC, so that folds weigh by their case-reference pairs."""
    return metric in (AUROC, GAP) or metric.startswith((BEST_COMPONENTS, SHIFT))


def pattern(metric: str) -> str:
    """Return the name as docs/method.md lists it: numbers in it become `<k>` or `<fraction>`."""
    for prefix in (BEST_COMPONENTS, SHIFT):
        if metric.startswith(prefix):
            return f"{prefix}<k>"
    if metric.startswith(f"{NON_ZERO}_at_"):
        return f"{NON_ZERO}_at_<fraction>"
    return metric
