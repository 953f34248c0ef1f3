import pandas as pd

from phenoica import schema
from phenoica.report import score_cells, view_tables
from phenoica.score import names
from phenoica.score.contrasts import QUERY


def rows(*found):
    base = {**dict.fromkeys(schema.SCORE_COLUMNS), "fold": -1, "scope": "pooled", "n_case": 4}
    return pd.DataFrame([{**base, **row} for row in found], columns=list(schema.SCORE_COLUMNS))


def test_whole_views_stand_with_their_chance_and_their_reason():
    macro = {"contrast": QUERY, "perturbation": "macro"}
    decoding = {"contrast": view_tables.DECODING_CONTRAST, "perturbation": "all"}
    total = rows(
        {**macro, "view": "ica", "metric": names.CONSISTENCY, "value": 0.31},
        {**macro, "view": "ica", "metric": names.CONSISTENCY_CHANCE, "value": 0.04},
        {**macro, "view": "ica", "perturbation": "GENE", "metric": names.CONSISTENCY, "value": 0.9},
        {**macro, "view": "ica", "metric": names.MAP_CROSS_NORMALISED, "reason": "no_cross_experiment_pairs"},
        {**decoding, "view": "rotation", "draw": 0, "metric": names.DECODING, "value": 0.2},
        {**decoding, "view": "rotation", "metric": names.DECODING, "value": 0.6},
        {**decoding, "view": "rotation", "metric": names.DECODING_CHANCE, "value": 0.25},
        {**decoding, "view": "rotation", "metric": names.DECODING, "value": 0.7, "scope": "in_distribution"},
    )  # fmt: skip
    table = view_tables.view_table(total)
    by_view = {row["view"]: row["cells"] for row in table["rows"]}
    assert set(by_view) == {"ica", "rotation"} and len(table["heads"]) == len(by_view["ica"])
    assert by_view["ica"][0]["value"] == "0.31" and by_view["ica"][0]["note"] == "chance 0.04"
    assert by_view["ica"][2]["value"] == "–" and "two held-out experiments" in by_view["ica"][2]["note"]
    assert [c["value"] for c in by_view["rotation"]] == ["–"] * 5 + ["0.60", "0.70"]
    assert by_view["rotation"][5]["note"] == "chance 0.25"
    assert view_tables.view_table(rows())["rows"] == []


def test_the_gain_of_deletion_is_shown_with_its_sign_and_interval():
    base = {"contrast": view_tables.DELETION_CONTRAST, "perturbation": "all", "view": "ica"}
    total = rows(
        {**base, "view_minus": "rotation", "metric": names.DELETION_GAIN, "value": 0.1, "ci_low": -0.2, "ci_high": 0.4,
         "ci_kind": "t over folds"},
        {**base, "view_minus": "rotation", "metric": names.DELETION_DECODING, "reason": "one_test_batch"},
        {**base, "metric": names.DELETION_GAIN, "value": 0.7},
    )  # fmt: skip
    table = view_tables.deletion_table(total)
    (row,) = table["rows"]
    assert table["heads"][0] == "Gain" and table["notes"] == []
    assert row["cells"][0]["value"] == "+0.100" and "-0.20 to +0.40" in row["cells"][0]["range"].replace("−", "-")
    assert row["cells"][1]["value"] == row["cells"][2]["value"] == "–"


def test_a_note_that_all_rows_share_stands_once_below_the_table():
    def cell(value, note):
        return {"value": value, "note": note}

    table = [
        {"cells": [cell("0.6", "few"), cell("0.5", "few"), cell("0.4", ""), cell("–", "")]},
        {"cells": [cell("0.7", "few"), cell("0.5", "other"), cell("0.4", ""), cell("–", "few")]},
        {"cells": [cell("–", ""), cell("0.5", "few"), cell("0.4", ""), cell("–", "few")]},
    ]
    assert score_cells.shared_notes(["a", "b", "c", "d"], table) == ["a; d: few."]
    assert [[c["note"] for c in row["cells"]] for row in table] == [
        ["", "few", "", ""], ["", "other", "", ""], ["", "few", "", ""],
    ]  # fmt: skip


def test_a_chance_level_that_all_views_share_stands_once():
    decoding = {"contrast": view_tables.DECODING_CONTRAST, "perturbation": "all"}
    found = []
    for view, chance in (("raw", 0.25), ("ica", 0.25)):
        found.append({**decoding, "view": view, "metric": names.DECODING, "value": 0.6})
        found.append({**decoding, "view": view, "metric": names.DECODING_CHANCE, "value": chance})
    table = view_tables.view_table(rows(*found))
    assert table["notes"] == ["Experiment told from controls, held out: chance 0.25."]
    assert {row["cells"][5]["note"] for row in table["rows"]} == {""}


def test_notes_of_a_row_are_taken_out_part_by_part():
    within = score_cells.INTERVAL_NOTE
    cells = [
        {"value": "0.6", "range": "0.5 to 0.7", "note": f"{within}; few"},
        {"value": "0.5", "range": "0.4 to 0.6", "note": f"{within}; few; other"},
        {"value": "0.4", "range": "", "note": "few"},  # no interval, so nothing to say of what it speaks of
        {"value": "–", "range": "", "note": "missing"},
    ]
    assert score_cells.row_note(cells) == f"{within}; few"
    assert [c["note"] for c in cells] == ["", "other", "", "missing"]


def test_baselines_stand_in_their_own_order_between_views_and_permuted_labels():
    names = ["ica", "cell_count", "permuted", "rotation", "position_trees", "pca", "position_linear"]
    assert score_cells.in_order(names) == [
        "ica", "pca", "rotation", "position_linear", "position_trees", "cell_count", "permuted"
    ]  # fmt: skip
