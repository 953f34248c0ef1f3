"""The batched L1 probes against a loop over liblinear, at the sizes of RxRx3-core's gene screen.

735 query perturbations (104 case wells, the 144 reference wells of their two experiments; train on one, test on the
other) in 8 views of 128 columns, and 16 guides that are in all 176 experiments, in 5 folds; 5 lambdas each: 62,000
probes. Features are made by formula: heavy-tailed, with a few columns that a perturbation shifts, more correlated from
view to view. The batched solver does all of it (or `--share`); the loop does a sample of problems at every lambda,
extrapolated to the same work. It runs on one core, as liblinear does, and its time is that of its thread, which a busy
machine adds little to; the batched solver runs on `--threads`, and its time is by the clock (`..._per_core_second`
compares processor time with processor time).

The oracle is liblinear with intercept_scaling 1e4 and tol 1e-8, which often stalls at its rounding floor and then goes
on to its 1,000 iterations; `speedup_loose` is against tol 1e-6 and at most 100, which does not always converge. The
last line is one JSON object: `speedup`, `peak_gib`, `max_auroc_difference` (on held-out wells, against the oracle), ...
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
import warnings

import numpy as np
import torch

from phenoica.score.l1_path import Problem
from phenoica.score.metrics import auroc
from phenoica.score.probes import L1Path, fit_l1_paths

EXPERIMENTS, REFERENCES, CASES = 176, 72, 52  # wells an experiment: references, and cases of a query perturbation
QUERIES, GUIDES, GUIDE_WELLS, FOLDS = 735, 16, 9, 5
VIEWS, WIDTH = 8, 128
FRACTIONS = (0.5, 0.25, 0.1, 0.05, 0.02)
ORACLE, LOOSE = {"tol": 1e-8, "max_iter": 1000}, {"tol": 1e-6, "max_iter": 100}

Split = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # train, its labels, test, its labels


class Screen:
    """Which well is where: references first, then the wells of query perturbations, then those of guides."""

    def __init__(self, share: float):
        rng = np.random.default_rng(0)
        queries, guides = max(2, round(share * QUERIES)), max(2, round(share * GUIDES))
        experiments = max(10, round(share * EXPERIMENTS))
        pairs = [rng.choice(experiments, 2, replace=False) for _ in range(queries)]
        everywhere = np.arange(EXPERIMENTS)  # the guides keep their size whatever the share
        self.experiment = np.concatenate([
            np.repeat(everywhere, REFERENCES), *[np.repeat(pair, CASES) for pair in pairs],
            *[np.repeat(everywhere, GUIDE_WELLS)] * guides,
        ])  # fmt: skip
        counts = [EXPERIMENTS * REFERENCES, *[2 * CASES] * queries, *[EXPERIMENTS * GUIDE_WELLS] * guides]
        self.perturbation = np.repeat(np.arange(len(counts)), counts)  # 0 is the references
        self.queries = [s for i, pair in enumerate(pairs) for s in (self.split(i + 1, [e], pair) for e in pair)]
        self.guides = [
            self.split(queries + 1 + i, np.flatnonzero(everywhere % FOLDS == fold), everywhere)
            for i in range(guides) for fold in range(FOLDS)
        ]  # fmt: skip

    def split(self, perturbation: int, held_out: np.ndarray, experiments: np.ndarray) -> Split:
        """Return the wells of a perturbation and of the references of `experiments`, by whether they are held out."""
        used = np.isin(self.perturbation, (0, perturbation)) & np.isin(self.experiment, experiments)
        test = used & np.isin(self.experiment, held_out)
        sides = np.flatnonzero(used & ~test), np.flatnonzero(test)
        return sides[0], self.perturbation[sides[0]] > 0, sides[1], self.perturbation[sides[1]] > 0

    def view(self, number: int) -> np.ndarray:
        """Return float64 (wells, `WIDTH`)."""
        rng = np.random.default_rng([1, number])
        values = rng.laplace(size=(len(self.experiment), WIDTH)) / np.sqrt(2)
        shifts = np.zeros((self.perturbation.max() + 1, WIDTH))
        strength = rng.exponential(0.4, len(shifts))
        for i in range(1, len(shifts)):
            shifts[i, rng.choice(WIDTH, 6, replace=False)] = strength[i] * rng.standard_normal(6)
        mixing = np.eye(WIDTH) + 0.7 * number / VIEWS * rng.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)
        values = (values + shifts[self.perturbation]) @ mixing
        return values / values.std(axis=0)


def liblinear(X: np.ndarray, labels: np.ndarray, penalty: float, **options: float) -> tuple[np.ndarray, float, float]:
    """Fit one probe; return weights, intercept, and seconds of this thread."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(
        l1_ratio=1.0, solver="liblinear", C=1 / (len(X) * penalty), class_weight="balanced", intercept_scaling=1e4,
        random_state=0, **options,
    )  # fmt: skip
    start = time.thread_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of convergence
        model.fit(X, labels)
    return model.coef_[0], float(model.intercept_[0]), time.thread_time() - start


def sample(values: np.ndarray, split: Split, path: L1Path, lambdas: list[int]) -> tuple[list[tuple], float]:
    """Time the loop's two settings on one problem at some lambdas; return those and the largest AUROC difference."""
    train, labels, test, truth = split
    times, largest = [], 0.0
    for k in lambdas:
        ours = path.probes[k]
        weights, intercept, seconds = liblinear(values[train], labels, ours.penalty, **ORACLE)
        loose = liblinear(values[train], labels, ours.penalty, **LOOSE)[2]
        times.append((k, seconds, loose))
        if weights.any() and ours.weights.any():
            theirs = auroc(truth, values[test] @ weights + intercept)
            largest = max(largest, abs(auroc(truth, ours.decision(values[test])) - theirs))
    return times, largest


def main() -> None:
    """Print a line a view and the totals, then the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=1.0, help="of the perturbations and guides, for a quick look")
    parser.add_argument("--views", type=int, default=VIEWS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    screen = Screen(options.share)
    groups = {"queries": screen.queries, "guides": screen.guides}
    seconds, processor = dict.fromkeys(groups, 0.0), 0.0
    loops: dict[str, list[tuple]] = {name: [] for name in groups}
    difference, unsolved = 0.0, 0
    for number in range(options.views):
        values = screen.view(number)
        for name, splits in groups.items():
            start, used = time.perf_counter(), time.process_time()
            paths = fit_l1_paths([Problem(values, *s[:2]) for s in splits], FRACTIONS, device=options.device)
            seconds[name] += time.perf_counter() - start
            processor += time.process_time() - used
            unsolved += sum(not probe.converged for path in paths for probe in path.probes)
            # queries: one at every lambda in each view; guides: one lambda a view, so that all come up
            lambdas = list(range(len(FRACTIONS))) if name == "queries" else [number % len(FRACTIONS)]
            i = (7 * number) % len(splits)
            times, found = sample(values, splits[i], paths[i], lambdas)
            loops[name] += times
            difference = max(difference, found)
        print(f"view {number + 1}: batched {sum(seconds.values()):.1f} s so far", file=sys.stderr, flush=True)
    totals = {"oracle": 0.0, "loose": 0.0}
    for name, splits in groups.items():
        times = np.array(loops[name])
        per_lambda = [times[times[:, 0] == k, 1:].mean(axis=0) for k in np.unique(times[:, 0])]
        oracle, loose = len(splits) * options.views * len(FRACTIONS) * np.mean(per_lambda, axis=0)
        totals = {"oracle": totals["oracle"] + oracle, "loose": totals["loose"] + loose}
        print(
            f"{len(splits) * options.views * len(FRACTIONS)} probes of {name}: batched {seconds[name]:.1f} s, "
            f"loop {oracle:.0f} s at tol 1e-8, {loose:.0f} s at 1e-6 (extrapolated from {len(times)})"
        )
    batched = sum(seconds.values())
    print(
        json.dumps({
            "speedup": totals["oracle"] / batched, "speedup_loose": totals["loose"] / batched,
            "speedup_per_core_second": totals["oracle"] / processor,
            "speedup_loose_per_core_second": totals["loose"] / processor,
            "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            "max_auroc_difference": difference, "batched_seconds": batched, "not_converged": unsolved,
            "threads": options.threads, "device": options.device, "share": options.share,
        })
    )  # fmt: skip


if __name__ == "__main__":
    main()
