"""The hits of the score page, from lists of hits written by hand, and in a browser."""

import pandas as pd
import pytest

from phenoica.errors import SchemaError
from phenoica.report import hit_tables, pages
from phenoica.score import presets
from phenoica.score.contrasts import POSITIVE, QUERY
from phenoica.score.hits import HIT_COLUMNS

TITLES = presets.titles(["standard"])


def hit(perturbation="A", view="ica", **values):
    """Return a row that is a hit; give what differs."""
    base = {
        "contrast": QUERY, "perturbation": perturbation, "view": view, "test_data_used": "none", "scope": "pooled",
        "effect": 0.3, "ci_low": 0.1, "ci_high": 0.45, "ci_kind": "t over folds", "p": 0.00012, "q": 0.0034,
        "adjustment": "Benjamini-Hochberg of 12", "p_floor": 1e-6, "n_case": 24, "n_reference": 48, "n_experiments": 5,
        "batch_flag": "none", "position_overlap": 0.9, "position_flag": "none", "count_effect": 0.05,
        "count_flag": "none", "claim": True, "holds_for": "other experiments",
    }  # fmt: skip
    return {**dict.fromkeys(HIT_COLUMNS), **base, **values}


def no_claim(perturbation, reason, **values):
    return hit(perturbation, claim=False, holds_for=None, reason=reason, **values)


def read(tmp_path, rows):
    path = tmp_path / "hits.csv"
    pd.DataFrame(rows, columns=list(HIT_COLUMNS)).to_csv(path, index=False)
    return hit_tables.read_hits(path)


def section(tmp_path, rows, alpha=0.05):
    return hit_tables.hit_section(read(tmp_path, rows), TITLES, alpha)


def render(found):
    template = pages.environment().get_template("hits.html")
    return template.render(hits=found, alpha="0.05", level="95%", hits_link="../score/hits.csv")


def test_a_row_shows_the_numbers_of_the_file_with_auroc_on_its_own_scale(tmp_path):
    found = section(tmp_path, [hit(count_flag="count_only", count_effect=0.42)])
    (group,) = found["groups"]
    (row,) = group["rows"]
    assert group["title"] == TITLES[QUERY] and found["sentence"] == ""
    assert (row["auroc"]["value"], row["auroc"]["range"]) == ("0.800", "0.60 to 0.95")
    assert row["p"] == (0.00012, "0.00012") and row["q"] == (0.0034, "0.0034")
    assert row["overlap"] == (0.9, "0.90") and row["count"] == (pytest.approx(0.92), "0.92")
    assert (row["hit"], row["holds_for"], row["flags"]) == ("yes", "others too", "count only")
    assert row["wells"] == "24 / 48 (5)"
    assert found["flags"] == [hit_tables.FLAG_WORDS["count_only"]]  # flags that stand nowhere are not explained
    text = render(found)
    assert 'data-sort="0.0034">0.0034</td>' in text and 'href="../score/hits.csv"' in text
    assert "count only" in text and "No hit" not in text


def test_what_passes_the_test_but_supports_no_claim_is_shown_with_its_reason(tmp_path):
    rows = [
        hit("A"),
        no_claim("B", "few_test_wells;position_confounded", position_flag="position_confounded"),
        no_claim("C", "interval_includes_0"),
        no_claim("F", "zero_variance;interval_includes_0", effect=0.5, ci_low=None, ci_high=None),
        no_claim("D", "not_significant", q=0.2),
        no_claim("E", "one_experiment", q=None, p=None, effect=None, ci_low=None, ci_high=None),
    ]
    found = section(tmp_path, rows)
    shown = {row["perturbation"]: (row["hit"], row["why_not"], row["flags"]) for row in found["groups"][0]["rows"]}
    assert shown == {
        "A": ("yes", "", ""),
        "B": ("no", "", "position"),  # the flag says why
        "C": ("no", "the interval reaches down to 0.5", ""),
        "F": ("no", "there is no interval", ""),
    }
    (line,) = found["overview"]
    (cell,) = line["cells"]
    assert (cell["value"], cell["range"], cell["note"]) == ("1", "of 5", "3 more without claim")
    assert line["untested"] == 1 and line["adjustment"] == "Benjamini-Hochberg of 12" and line["p_floor"] == "1.0e-06"


def test_without_a_hit_a_sentence_says_so_and_why(tmp_path):
    confounded = [no_claim(p, "position_confounded", position_flag="position_confounded") for p in "ABC"]
    both = no_claim("D", "position_confounded;not_within_experiments", position_flag="position_confounded",
                    batch_flag="not_within_experiments")  # fmt: skip
    found = section(tmp_path, [*confounded, both, no_claim("E", "not_significant", q=0.3)])
    assert found["sentence"] == (
        "No hit: of 5 tested comparisons (a perturbation in a view) none supports a claim. 4 have q at most 0.05, but: "
        "position alone explains it (4), not above 0.5 inside experiments (1)."
    )
    text = render(found)
    assert (
        '<p class="plateflag" id="no-hit"><strong>No hit: of 5' in text and "<details><summary>" in text
    )  # shut: no hit is in them
    nothing = section(tmp_path, [no_claim("E", "not_significant", q=0.3)])
    assert nothing["sentence"].endswith("none supports a claim. None has q at most 0.05.") and not nothing["groups"]
    assert "hits.csv" in render(nothing) and "Below" not in render(nothing)
    untested = section(tmp_path, [no_claim("E", "one_experiment", q=None, effect=None)])
    assert untested["sentence"].startswith("No hit: no comparison could be tested")
    empty = section(tmp_path, [])
    assert empty["sentence"].startswith("No hit: no comparison") and "<table" not in render(empty)


def test_a_screen_is_cut_to_the_first_rows_of_every_contrast_and_view(tmp_path):
    rows = [hit(f"G{i}", view, contrast=c, q=i * 1e-6) for c in (QUERY, POSITIVE) for view in ("pca", "ica")
            for i in range(400 if c == QUERY else 2)]  # fmt: skip
    found = section(tmp_path, rows)
    assert (found["n_rows"], found["n_shown"]) == (804, hit_tables.MOST_ROWS)
    query, positive = found["groups"]
    assert (query["n"], positive["n"], len(positive["rows"])) == (800, 4, 4)
    names = [row["perturbation"] for row in query["rows"] if row["view"] == "ica"]
    assert names == [f"G{i}" for i in range(148)]  # half of what the small contrast leaves, in the order of the file
    text = render(found)
    assert "the first 300 of 804 rows" in text and "296 of 800 rows" in text and text.count("<tr><td>G") == 300


def test_names_that_look_like_missing_values_keep_their_text(tmp_path):
    read_back = read(tmp_path, [hit("NA"), hit("None"), hit("12")])
    assert read_back["perturbation"].tolist() == ["NA", "None", "12"]
    assert read_back["claim"].dtype == bool and read_back["reason"].isna().all()


def test_a_list_without_its_columns_is_refused(tmp_path):
    pd.DataFrame([hit()]).drop(columns="q").to_csv(tmp_path / "old.csv", index=False)
    with pytest.raises(SchemaError, match="columns q are missing; run `phenoica summarise` again"):
        hit_tables.read_hits(tmp_path / "old.csv")
    with pytest.raises(SchemaError, match="none.csv: no such file; run `phenoica summarise`"):
        hit_tables.read_hits(tmp_path / "none.csv")
