"""Screens by formula with sources of a known kind: what a component carries is known before any label is given."""

import numpy as np
import pandas as pd

from phenoica import schema

WELLS, REFERENCES = 120, 10  # of a plate; as many fit controls
N_ROWS, N_COLUMNS = 16, 24


def screen(rng, n_experiments=24, n_plates=3, wells=WELLS, references=REFERENCES, genes=60, rare=2):
    """Wells at random addresses of 384-well plates; every gene in two experiments, `RARE` in `rare` of them.

    RARE has four wells in each of its experiments, all on one plate or spread, as chance has it.
    """
    per_plate = n_plates * wells
    frames = []
    for e in range(n_experiments):
        own = [f"GENE{(e * 2 * genes // n_experiments + i) % genes:03d}" for i in range(4 * genes // n_experiments)]
        kinds = [schema.NEGATIVE, schema.POSITIVE, schema.NONE]
        control = np.tile(np.repeat(kinds, [2 * references, 6, wells - 2 * references - 6]), n_plates)
        name = np.where(control == schema.NEGATIVE, "EMPTY_control", "PLK1").astype(object)
        query = np.flatnonzero(control == schema.NONE)
        name[query] = np.resize(own, len(query))
        if e < rare:
            name[rng.choice(query, 4, replace=False)] = "RARE"
        plate = np.repeat(np.arange(1, n_plates + 1), wells)
        place = np.concatenate([rng.permutation(N_ROWS * N_COLUMNS)[:wells] for _ in range(n_plates)])
        role = np.full(per_plate, schema.NONE, dtype=object)
        role[control == schema.NEGATIVE] = np.tile(np.repeat([schema.FIT, schema.REFERENCE], references), n_plates)
        frames.append(
            pd.DataFrame(
                {
                    schema.EXPERIMENT: f"e{e:03d}", schema.PLATE_ID: [f"e{e:03d}_{p}" for p in plate],
                    schema.ROW: place // N_COLUMNS + 1, schema.COLUMN: place % N_COLUMNS + 1,
                    schema.PERTURBATION: name, schema.TREATMENT: name, schema.CONTROL: control,
                    schema.CONTROL_ROLE: role,
                }
            )
        )  # fmt: skip
    return pd.concat(frames, ignore_index=True)


def planted(obs, rng):
    """Return sources (n, s) of unit variance and what each carries, by name.

    Names start with the label that is right. Every source has Gaussian or Laplace noise of its own and is, but for one,
    far enough from Gaussian for an ICA to find it.
    """
    n = len(obs)
    experiment = pd.factorize(obs[schema.EXPERIMENT])[0]
    n_experiments = experiment.max() + 1
    gene = obs[schema.PERTURBATION].to_numpy()
    names = np.unique(gene[gene != "EMPTY_control"])
    pathway = rng.choice([g for g in names if g.startswith("GENE")], 8, replace=False)
    strength = dict(zip(pathway, rng.choice([-1, 1], 8) * rng.uniform(2.5, 4, 8), strict=True))
    odd = rng.choice(n_experiments, max(1, n_experiments // 12), replace=False)
    row, column = ((obs[c] - obs[c].mean()) / obs[c].std() for c in (schema.ROW, schema.COLUMN))
    signals = {
        "batch, every experiment its own": 2 * rng.permutation(np.linspace(-1, 1, n_experiments))[experiment],
        "batch, few odd experiments": 5.0 * np.isin(experiment, odd),
        "position, gradient over rows": 2.0 * row,
        "position, gradient over columns": 2.0 * column,
        "position, edge rows": 3.0 * obs[schema.ROW].isin([1, N_ROWS]),
        "biology, positive control": 4.0 * (gene == "PLK1"),
        "biology, pathway of 8 genes": np.array([strength.get(g, 0.0) for g in gene]),
        "biology, rare perturbation": 10.0 * (gene == "RARE"),
    }
    noise = {"batch": rng.standard_normal, "position": rng.standard_normal, "biology": rng.laplace}
    sources = {name: np.asarray(s, float) + noise[name.split(",")[0]](size=n) for name, s in signals.items()}
    sources |= {"unexplained, Laplace": rng.laplace(size=n), "unexplained, uniform": rng.uniform(size=n)}
    sources["unexplained, Gaussian"] = rng.standard_normal(n)
    sources["unexplained, Student"] = rng.standard_t(4, n)
    S = np.stack(list(sources.values()), axis=1)
    return (S - S.mean(axis=0)) / S.std(axis=0), list(sources)


def mixed(S, rng, d=30, noise=0.05):
    """Mix sources (n, s) into d features with a little noise."""
    return S @ rng.standard_normal((S.shape[1], d)) + noise * rng.standard_normal((len(S), d))
