"""Time and memory of the ICA solver against picard and scikit-learn's FastICA, on planted mixes.

    python benchmarks/ica.py

Each mix holds independent sources, some of several non-Gaussian kinds and the rest Gaussian, turned and whitened. Every
solver runs in a process of its own with the same threads, from the same random start, and is timed from its first
import to its last product, warm start included; generating and reading the mix are not counted. A solver counts when
the float64 relative gradient of what it returns is at most 1e-4 (`phenoica.disentangle.ica.gradient_and_shape`).
FastICA has no such rule: it runs at a tolerance of its own that would reach it, and is stopped once it has taken longer
than picard, which then is the faster one. The last line is one JSON object: `speedup_222601x128` and
`speedup_20000x64`, medians over the mixes of (faster oracle / ours), and `memory_vs_matrix`, the largest peak memory
beyond that of the imports as a multiple of the bytes of the float32 matrix of the large size, the matrix itself
included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

TOLERANCE, MAX_ITER = 1e-4, 1000
SIZES = ((222601, 128, 40), (20000, 64, 20))
SOURCES = (
    lambda rng, n: rng.laplace(size=n),
    lambda rng, n: rng.uniform(-1, 1, n),
    lambda rng, n: rng.gamma(2, size=n),
    lambda rng, n: rng.choice([-1.0, 1.0], n) + 0.6 * rng.standard_normal(n),
    lambda rng, n: rng.standard_t(5, n),
    lambda rng, n: rng.standard_normal(n) * np.where(rng.random(n) < 0.05, 3, 1),
    lambda rng, n: rng.standard_normal(n) + np.where(rng.random(n) < 0.01, 5, 0),
)


def mixture(n: int, k: int, n_sources: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a whitened float32 mix (n, k) and its non-Gaussian sources (n, n_sources) of unit variance."""
    rng = np.random.default_rng([seed, n, k])
    S = np.empty((n, k))
    for j in range(k):
        S[:, j] = SOURCES[j % len(SOURCES)](rng, n) if j < n_sources else rng.standard_normal(n)
    S -= S.mean(axis=0)
    S /= S.std(axis=0)
    values, vectors = np.linalg.eigh(S.T @ S / n)
    turn = np.linalg.qr(rng.standard_normal((k, k)))[0]
    return (S @ (vectors / np.sqrt(values)) @ turn).astype(np.float32), S[:, :n_sources].astype(np.float32)


def status(field: str) -> int:
    """Return a number of /proc/self/status in bytes."""
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(field))
    return int(line.split()[1]) * 1024


def work(solver: str, mix: str, seed: int) -> dict[str, float]:
    """Run one solver on a mix in this process; what it took, and its rotation beside the mix."""
    started = time.perf_counter()
    if solver == "ours":
        import torch  # noqa: F401  counted: its import is most of the start

        from phenoica.disentangle.orthogonal import search
    elif solver == "picard":
        from picard import picard
    else:
        from sklearn.decomposition import FastICA
    imported = time.perf_counter() - started
    from phenoica.disentangle.rotations import haar_rotation, nearest_rotation

    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
    before = status("VmRSS")
    Z = np.load(mix)
    start = haar_rotation(Z.shape[1], seed, 0)
    started = time.perf_counter()
    if solver == "ours":
        found = search(Z, start, contrast="adaptive", max_iter=MAX_ITER, tolerance=TOLERANCE, seed=seed)
        rotation, iterations = found.rotation, found.evaluations
    elif solver == "picard":
        _, unmixing, _, last = picard(
            np.ascontiguousarray(Z.T, dtype=np.float64), ortho=True, extended=True, whiten=False, centering=False,
            fun="tanh", max_iter=MAX_ITER, tol=TOLERANCE, w_init=start.T, return_n_iter=True,
        )  # fmt: skip
        rotation, iterations = nearest_rotation(unmixing.T), last + 1
    else:
        fit = FastICA(
            algorithm="parallel", whiten=False, fun="logcosh", max_iter=MAX_ITER, tol=1e-8, w_init=start.T
        ).fit(Z.astype(np.float64))
        rotation, iterations = fit.components_.T, fit.n_iter_
    seconds = time.perf_counter() - started + imported
    peak = status("VmHWM") - before
    np.save(f"{mix}.{solver}.npy", rotation)
    return {"seconds": seconds, "iterations": float(iterations), "memory": peak / (Z.size * 4)}


def run(solver: str, mix: Path, seed: int, limit: float | None) -> dict[str, float] | None:
    """Run `work` in a new process; None when it took longer than `limit` seconds."""
    command = [sys.executable, __file__, "--solver", solver, "--mix", str(mix), "--seed", str(seed)]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    result = json.loads(done.stdout.splitlines()[-1])
    from phenoica.disentangle.ica import gradient_and_shape

    result["gradient"] = gradient_and_shape(np.load(mix), np.load(f"{mix}.{solver}.npy")).gradient
    return result


def recovery(mix: Path, sources: np.ndarray, solver: str) -> np.ndarray:
    """Return the |r| of every source with the component assigned to it."""
    from scipy.optimize import linear_sum_assignment

    found = np.load(mix) @ np.load(f"{mix}.{solver}.npy").astype(np.float32)
    r = np.abs(sources.T @ found) / len(found)
    rows, columns = linear_sum_assignment(-r)
    return r[rows, columns]


def compare(n: int, k: int, n_sources: int, mixes: int, folder: Path) -> tuple[float, float]:
    """Return the median speed-up and the largest memory of ours for one size, printing a line a solver."""
    ratios, memory = [], []
    for seed in range(mixes):
        path = folder / "mix.npy"
        Z, sources = mixture(n, k, n_sources, seed)
        np.save(path, Z)
        del Z
        ours = run("ours", path, seed, None)
        picard = run("picard", path, seed, None)
        fastica = run("fastica", path, seed, picard["seconds"] + 5)
        for name, result in (("ours", ours), ("picard", picard), ("fastica", fastica)):
            if result is None:
                print(f"{n} x {k} mix {seed} {name:8} not done when picard was", flush=True)
                continue
            r = recovery(path, sources, name)
            print(
                f"{n} x {k} mix {seed} {name:8} {result['seconds']:7.2f} s, {result['iterations']:6.1f} passes or "
                f"iterations, gradient {result['gradient']:.1e}, least |r| with a source {r.min():.4f}, memory "
                f"{result['memory']:.2f} x matrix",
                flush=True,
            )
        reached = [r["seconds"] for r in (picard, fastica) if r is not None and r["gradient"] <= TOLERANCE]
        if ours["gradient"] > TOLERANCE or not reached:
            raise SystemExit("a solver did not reach the rule, so there is nothing to compare")
        ratios.append(min(reached) / ours["seconds"])
        memory.append(ours["memory"])
    return float(np.median(ratios)), max(memory)


def main() -> None:
    """Compare the solvers at both sizes, or be one of the processes that do."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mixes", type=int, default=3, help="mixes of each size")
    parser.add_argument("--small", action="store_true", help="the small size only")
    parser.add_argument("--solver", choices=("ours", "picard", "fastica"), help=argparse.SUPPRESS)
    parser.add_argument("--mix", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.solver:
        print(json.dumps(work(arguments.solver, arguments.mix, arguments.seed)))
        return
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        for n, k, n_sources in SIZES[1:] if arguments.small else SIZES:
            speedup, memory = compare(n, k, n_sources, arguments.mixes, Path(folder))
            result[f"speedup_{n}x{k}"] = round(speedup, 2)
            result.setdefault("memory_vs_matrix", round(memory, 3))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
