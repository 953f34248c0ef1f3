"""The design of a screen, from metadata alone: which treatments sit where, under which label.

The table answers, before any score: which wells are controls and who said so, and could the well position alone
explain a treatment?
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from phenoica import schema
from phenoica.plates.metadata import LABEL, classify_controls


def design_table(metadata: pd.DataFrame, plates_config: Mapping[str, Any]) -> pd.DataFrame:
    """Return a row for each treatment and label.

    Parameters
    ----------
    metadata
        As from `phenoica.plates.metadata.read_metadata`.
    plates_config
        The `plates` section of the configuration.

    Returns
    -------
    DataFrame
        treatment, gene, well_type_label, control, control_source (label, config, inferred or empty), n_wells,
        n_plates, n_experiments, n_addresses, top_address and top_address_share (share of the treatment's wells on
        its commonest address; 1 means a fixed position, which could explain any score).
    """
    control, source = classify_controls(metadata, plates_config)
    table = metadata.assign(
        **{schema.CONTROL: control, schema.PLATE_ID: metadata["experiment_name"] + "_" + metadata[schema.PLATE]},
        control_source=source,
    )
    table[["gene", LABEL]] = table[["gene", LABEL]].fillna("")
    rows = []
    for (treatment, gene, label, kind, origin), wells in table.groupby(
        [schema.TREATMENT, "gene", LABEL, schema.CONTROL, "control_source"], sort=True
    ):
        counts = wells[schema.ADDRESS].value_counts()
        top = sorted(counts.index[counts == counts.iloc[0]])[0]
        rows.append({
            schema.TREATMENT: treatment, "gene": gene, LABEL: label, schema.CONTROL: kind, "control_source": origin,
            "n_wells": len(wells), "n_plates": wells[schema.PLATE_ID].nunique(),
            "n_experiments": wells["experiment_name"].nunique(), "n_addresses": len(counts),
            "top_address": top, "top_address_share": round(float(counts.iloc[0]) / len(wells), 3),
        })  # fmt: skip
    order = {schema.NEGATIVE: 0, schema.POSITIVE: 1, schema.CUTTING: 2, schema.NONE: 3}
    result = pd.DataFrame(rows)
    return result.sort_values(
        [schema.CONTROL, schema.TREATMENT],
        key=lambda s: s.map(order) if s.name == schema.CONTROL else s,
        ignore_index=True,
    )
