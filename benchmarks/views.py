"""Memory and time of fitting each view and transforming its training wells, at the size of RxRx3-core.

Each view runs in a process of its own: peak resident memory beyond that of the loaded matrix, as a multiple of the
matrix, and seconds. The solver of ica has a benchmark of its own; here it is replaced by the identity, so that what
the view hands to it is measured and the solver is not. The last line is one JSON object.

    python benchmarks/views.py [--wells 222601] [--features 384] [--components 128] [--views raw,pca,...]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import numpy as np
import pandas as pd

VIEWS = (
    "raw", "centerscale", "mad", "spherize", "pca", "rotation", "varimax", "ica", "tvn", "pca_cs", "centerscale + ica",
)  # fmt: skip
BLOCK = 4096


def wells(n: int, d: int, shift: np.ndarray | None = None) -> tuple[np.ndarray, pd.DataFrame]:
    """Make correlated float32 wells block by block, 1,265 an experiment, a tenth of them fit controls.

    Sources are Gaussian; with `shift` (n, s), which is added to the first s of them, they are Laplace.
    """
    mixing = np.random.default_rng(0).standard_normal((d, d)).astype(np.float32) / np.sqrt(d)
    X = np.empty((n, d), dtype=np.float32)
    for start in range(0, n, BLOCK):
        rng = np.random.default_rng([1, start])
        size = min(BLOCK, n - start), d
        if shift is None:
            sources = rng.standard_normal(size, dtype=np.float32)
        else:
            sources = rng.laplace(scale=np.sqrt(0.5), size=size).astype(np.float32)
            sources[:, : shift.shape[1]] += shift[start : start + BLOCK]
        X[start : start + BLOCK] = sources @ mixing + 1.0
    obs = pd.DataFrame({
        "experiment": pd.Categorical.from_codes(np.arange(n) // 1265, [f"e{i:03d}" for i in range(n // 1265 + 1)]),
        "control_role": pd.Categorical.from_codes((np.arange(n) % 10 == 0).astype(int), ["none", "fit"]),
    })  # fmt: skip
    return X, obs


def peak_bytes() -> int:
    """Return the largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(name: str, n: int, d: int, k: int) -> dict[str, float]:
    """Fit and transform one view in this process."""
    from phenoica.disentangle import linear_views, view
    from phenoica.disentangle.ica import IcaFit

    def identity(Z: np.ndarray, **_: object) -> IcaFit:
        return IcaFit(np.eye(Z.shape[1]), 0, 0.0, True, 0, np.zeros(Z.shape[1]), ())

    linear_views.fit_rotation = identity
    X, obs = wells(n, d)
    options = {"n_components": k} if name.split(" + ")[-1] not in ("raw", "centerscale", "mad", "spherize") else {}
    before, start = peak_bytes(), time.perf_counter()
    fitted = view(name, **options).fit(X, obs)
    middle, after_fit = peak_bytes(), time.perf_counter()
    fitted.transform(X, obs)
    return {
        "fit_memory_vs_matrix": (middle - before) / X.nbytes, "memory_vs_matrix": (peak_bytes() - before) / X.nbytes,
        "fit_s": after_fit - start, "transform_s": time.perf_counter() - after_fit,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wells", type=int, default=222601)
    parser.add_argument("--features", type=int, default=384)
    parser.add_argument("--components", type=int, default=128)
    parser.add_argument("--views", default=",".join(VIEWS))
    parser.add_argument("--one", help="measure this view in this process and print its numbers")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.wells, args.features, args.components)))
        return
    found = {}
    for name in args.views.split(","):
        size = ["--wells", args.wells, "--features", args.features, "--components", args.components]
        command = [sys.executable, __file__, "--one", name, *map(str, size)]
        found[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"{name:<20}" + "  ".join(f"{key} {value:.2f}" for key, value in found[name].items()), flush=True)
    print(json.dumps({
        "wells": args.wells, "features": args.features, "components": args.components,
        "largest_memory_vs_matrix": max(v["memory_vs_matrix"] for v in found.values()), "views": found,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
