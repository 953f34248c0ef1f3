"""Published embeddings and profiles of one's own to embeddings.h5ad, a block of rows at a time; nothing is embedded.

What the plates stage found (wells.parquet) says which row of which file is which well. Wells without a usable vector
and features that say nothing are left out here, each with a reason in quarantine.csv.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from phenoica import __version__, config, files, schema
from phenoica.embed.assemble import as_categories
from phenoica.errors import MetadataError
from phenoica.plates.profiles import choose_features, feature_names
from phenoica.plates.run import QUARANTINE_COLUMNS, profile_quarantine
from phenoica.plates.tables import open_table
from phenoica.progress import Progress

CONSTANT = "constant feature: one and the same value in every well"
FEATURE_MISSING = "feature with missing values (NaN or inf)"
WELL_MISSING = "missing values (NaN or inf) in the profile"
MANY_LISTED = 5


def write_profiles(
    wells_parquet: str | Path,
    profiles: Sequence[Path],
    plates_quarantine: str | Path,
    out_h5ad: str | Path,
    out_quarantine: str | Path,
    cfg: Mapping[str, Any],
) -> None:
    """Write embeddings.h5ad and quarantine.csv of a run whose source is profiles.

    Parameters
    ----------
    wells_parquet
        Written by `phenoica.plates.run.run_profile_plates`.
    profiles
        The files, in the order of their numbers.
    plates_quarantine
        quarantine.csv of the plates stage.
    out_h5ad
        AnnData: `X` (wells, features) float32; var names are those of the features, or NAME_000...
        (`profiles.features.name`); obs = well columns, and cell_count where the profiles give it. n_tiles and obsm
        `image_measures` are absent: there are no images. uns `phenoica` names the files and their SHA-256.
    out_quarantine
        csv of every well and feature that was left out; `key` is "feature NAME" for features.
    cfg
        The resolved configuration (`profiles`).

    Raises
    ------
    MetadataError
        If features cannot be read, or `profiles.missing` or `profiles.duplicate_vectors` say to stop.
    """
    import anndata

    wells = pd.read_parquet(wells_parquet)
    names, called = feature_names(choose_features([open_table(p) for p in profiles], cfg), cfg)
    X = read_vectors(wells, profiles, names)
    usable, features, left_out = select(X, wells[schema.WELL_ID].to_numpy(), called, cfg["profiles"])
    if not usable.all() or not features.all():
        X = X[usable] if features.all() else X[np.ix_(usable, features)]
        wells, called = wells[usable], [name for name, kept in zip(called, features, strict=True) if kept]
    obs = as_categories(wells.drop(columns=[schema.PROFILE_FILE, schema.PROFILE_ROW]).reset_index(drop=True))
    adata = anndata.AnnData(X, obs=obs.set_index(schema.WELL_ID), var=pd.DataFrame(index=called))
    adata.uns[schema.UNS] = _description(profiles, len(called), cfg)
    schema.check(adata)
    files.write_h5ad(out_h5ad, adata)
    before = pd.read_csv(plates_quarantine, dtype={schema.WELL_ID: str}, keep_default_na=False, na_values={"key": ""})
    found = _quarantine(left_out, pd.read_parquet(wells_parquet, columns=_PLACE), profiles)
    files.write_csv(out_quarantine, pd.concat([f for f in (before, found) if len(f)] or [before], ignore_index=True))


_PLACE = [schema.WELL_ID, schema.PROFILE_FILE, schema.PROFILE_ROW]


def read_vectors(wells: pd.DataFrame, profiles: Sequence[Path], names: Sequence[str]) -> np.ndarray:
    """Return the features of the wells, float32 (wells, features); what is missing or too large is NaN or inf.

    Parameters
    ----------
    wells
        `schema.PROFILE_FILE` and `schema.PROFILE_ROW` of each well.
    profiles
        The files, in the order of their numbers.
    names
        The features, as the files call them.
    """
    X = np.full((len(wells), len(names)), np.nan, np.float32)
    number, row = (wells[c].to_numpy(np.int64) for c in (schema.PROFILE_FILE, schema.PROFILE_ROW))
    with Progress(len(wells), "read profiles") as progress:
        for n, path in enumerate(profiles):
            mine = np.flatnonzero(number == n)
            mine = mine[np.argsort(row[mine], kind="stable")]  # by row, so that a block's wells are a slice
            seen = 0
            for start, block in open_table(path).numbers(names):
                first, last = np.searchsorted(row[mine], [start, start + len(block)])
                X[mine[first:last]] = block[row[mine[first:last]] - start]
                progress.update(int(last - first))
                seen = start + len(block)
            if len(mine) and row[mine[-1]] >= seen:
                raise MetadataError(
                    f"{path}: has {seen} rows, fewer than when its wells were listed; run `phenoica plates` again"
                )
    return X


def select(
    X: np.ndarray, well_ids: np.ndarray, names: Sequence[str], section: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray, list[tuple[str, str, str]]]:
    """Choose the wells and features that can be used.

    Features without a single number go first; then what `missing` says of NaN and inf; then wells of one and the same
    vector, as `duplicate_vectors` says; then features that are constant over the wells that are left.

    Parameters
    ----------
    X
        float32 (wells, features).
    well_ids, names
        Of its rows and columns.
    section
        `profiles` of the configuration.

    Returns
    -------
    (bool (wells,), bool (features,), list of (kind, name, reason))
        What is kept, and what is not: kind is "well" or "feature".

    Raises
    ------
    MetadataError
        If a policy says to stop, or nothing is left.
    """
    finite = np.isfinite(X)
    features = finite.any(axis=0)
    left_out = [("feature", names[j], "feature without a single number") for j in np.flatnonzero(~features)]
    wells = np.ones(len(X), bool)
    gaps = ~finite[:, features]
    if gaps.any():
        _judge_missing(gaps, well_ids, [n for n, kept in zip(names, features, strict=True) if kept], section["missing"])
        if section["missing"] == "drop_wells":
            wells = finite[:, features].all(axis=1)
            left_out += [("well", well_ids[i], WELL_MISSING) for i in np.flatnonzero(~wells)]
        else:
            whole = finite.all(axis=0)
            left_out += [("feature", names[j], FEATURE_MISSING) for j in np.flatnonzero(features & ~whole)]
            features &= whole
    _refuse_nothing(wells, features, "profiles.missing leaves")
    twins = _twins(X, well_ids, wells, features, section["duplicate_vectors"])
    left_out += [("well", well_ids[i], reason) for i, reason in twins.items()]
    wells[list(twins)] = False
    _refuse_nothing(wells, features, "profiles.duplicate_vectors leaves")
    if wells.sum() < 2:
        raise MetadataError(
            f"there is one well with a profile ({well_ids[wells][0]}); a plate needs controls and treatments to compare"
        )
    low, high = (function.reduce(X, axis=0, where=wells[:, None], initial=start)
                 for function, start in ((np.minimum, np.inf), (np.maximum, -np.inf)))  # fmt: skip
    constant = features & (low == high)
    left_out += [("feature", names[j], CONSTANT) for j in np.flatnonzero(constant)]
    features &= ~constant
    _refuse_nothing(wells, features, "after constant features are left out there is")
    _say(left_out)
    return wells, features, left_out


def _judge_missing(gaps: np.ndarray, well_ids: np.ndarray, names: Sequence[str], policy: str) -> None:
    """Stop where the policy says so, with what each choice would cost."""
    by_well, by_feature = gaps.any(axis=1), gaps.any(axis=0)
    cost = (
        f"{int(gaps.sum())} numbers are missing (NaN or inf), in {int(by_well.sum())} of {len(well_ids)} wells (first "
        f"{well_ids[by_well][0]}) and {int(by_feature.sum())} of {len(names)} features (most in "
        f"{names[int(gaps.sum(axis=0).argmax())]})"
    )
    if policy == "error":
        raise MetadataError(
            f"{cost}. Set profiles.missing to drop_wells (loses these wells) or drop_features (loses these features), "
            "or exclude features (profiles.features.exclude)"
        )
    if policy == "drop_wells" and by_well.mean() > 0.5:
        raise MetadataError(
            f"{cost}. profiles.missing is drop_wells, which would lose more than half of the wells: exclude the "
            "features (profiles.features.exclude), or set drop_features"
        )
    if policy == "drop_features" and by_feature.mean() > 0.5:
        raise MetadataError(
            f"{cost}. profiles.missing is drop_features, which would lose more than half of the features: take the "
            "wells out of the files, or set drop_wells"
        )


def _twins(X: np.ndarray, well_ids: np.ndarray, wells: np.ndarray, features: np.ndarray, policy: str) -> dict[int, str]:
    """Return the wells whose vector another well has too, and why they are left out; empty unless they are."""
    groups = identical_rows(X, wells, features)
    if not groups:
        return {}
    n = sum(len(group) for group in groups)
    shown = "; ".join(" = ".join(well_ids[i] for i in group[:4]) for group in groups[:MANY_LISTED])
    text = f"{n} wells carry a vector that another well has too: {shown}{'; ...' * (len(groups) > MANY_LISTED)}"
    if policy == "error":
        raise MetadataError(f"{text}. Mend the files, or set profiles.duplicate_vectors to drop or warn")
    if policy == "warn":
        print(f"warning: {text}; they are kept (profiles.duplicate_vectors)", file=sys.stderr)
        return {}
    print(f"warning: {text}; which well it is of cannot be known, so all of them are left out", file=sys.stderr)
    return {
        i: f"the same vector as well {well_ids[group[0] if i != group[0] else group[1]]}; both are left out"
        for group in groups for i in group
    }  # fmt: skip


def identical_rows(X: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> list[np.ndarray]:
    """Return the groups of rows (two or more, ascending) that are equal in every column; 0 equals -0.

    Rows are hashed block by block, a weighted sum of their bits in 64-bit integers, and equal hashes are compared, so
    that no copy of the matrix is made.

    Parameters
    ----------
    X
        float32 (n, d).
    rows, columns
        bool (n,) and (d,): those that count.
    """
    weights = np.random.default_rng(0).integers(1, 2**63, columns.sum(), dtype=np.uint64) | np.uint64(1)
    at = np.flatnonzero(rows)
    hashes = np.empty(len(at), np.uint64)
    for start in range(0, len(at), 4096):
        block = X[at[start : start + 4096]][:, columns] + np.float32(0)  # -0 becomes 0
        hashes[start : start + len(block)] = block.view(np.uint32).astype(np.uint64) @ weights
    order = np.argsort(hashes, kind="stable")
    cuts = np.flatnonzero(np.diff(hashes[order])) + 1
    groups = []
    for candidates in np.split(at[order], cuts):
        while len(candidates) > 1:  # a hash may be shared by chance
            same = (X[candidates][:, columns] == X[candidates[0], columns]).all(axis=1)
            if same.sum() > 1:
                groups.append(candidates[same])
            candidates = candidates[~same]
    return sorted(groups, key=lambda group: group[0])


def _refuse_nothing(wells: np.ndarray, features: np.ndarray, words: str) -> None:
    for kept, what in ((wells, "well"), (features, "feature")):
        if not kept.any():
            raise MetadataError(f"{words} no {what}; look at the numbers of the files")


def _say(left_out: Sequence[tuple[str, str, str]]) -> None:
    by_reason: dict[tuple[str, str], list[str]] = {}
    for kind, name, reason in left_out:
        if not reason.startswith("the same vector"):  # said where they were found
            by_reason.setdefault((kind, reason), []).append(name)
    for (kind, reason), names in by_reason.items():
        shown = ", ".join(names[:MANY_LISTED]) + ", ..." * (len(names) > MANY_LISTED)
        print(f"note: {len(names)} {kind}(s) left out: {reason} ({shown})", file=sys.stderr)


def _quarantine(
    left_out: Sequence[tuple[str, str, str]], places: pd.DataFrame, profiles: Sequence[Path]
) -> pd.DataFrame:
    """Return what was left out as rows of quarantine.csv."""
    wells = pd.DataFrame([(name, reason) for kind, name, reason in left_out if kind == "well"],
                         columns=[schema.WELL_ID, "reason"], dtype=object)  # fmt: skip
    listed = profile_quarantine(wells.merge(places, on=schema.WELL_ID, how="left"), profiles)
    names = [(f"feature {name}", reason) for kind, name, reason in left_out if kind == "feature"]
    features = pd.DataFrame(names, columns=["key", "reason"], dtype=object)
    features = features.reindex(columns=[*QUARANTINE_COLUMNS, "file"])
    features = features.assign(shard=-1, row_group=-1, row=-1, file="")
    frames = [frame for frame in (listed, features) if len(frame)]
    return pd.concat(frames, ignore_index=True) if frames else listed


def _description(profiles: Sequence[Path], n_features: int, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return uns["phenoica"]: what is known of where the vectors come from."""
    hashes = {path.name: files.sha256(path) for path in profiles}
    names = ", ".join(list(hashes)[:3]) + (f" and {len(hashes) - 3} more files" if len(hashes) > 3 else "")
    digest = next(iter(hashes.values())) if len(hashes) == 1 else files.sha256_of_json(hashes)
    return {
        "version": __version__,
        "config_fingerprint": config.fingerprint(cfg, "source", "profiles", "plates", "embed", "licences"),
        "source": "profiles",
        "checkpoint": f"none run here; {n_features} features a well read from {names}",
        "checkpoint_sha256": digest,
        "profiles_sha256": np.array([f"{digest}  {path}" for path, digest in hashes.items()], dtype=object),
        "precision": "float32",
        "licences": f"profiles: {cfg['licences']['images']}; weights: {cfg['licences']['weights']}",
        "encoder_saw_test_images": cfg["embed"]["saw_test_images"],
        "fit_experiments": np.array([], dtype=object),
        "seed": int(cfg["seed"]),
    }
