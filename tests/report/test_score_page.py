"""The score page and the run index of a small hand-made table of scores, read back from the HTML."""

import json

import anndata
import numpy as np
import pandas as pd
import pytest

from phenoica import config as configuration
from phenoica import schema
from phenoica.config import RunPaths
from phenoica.disentangle.views import VIEWS
from phenoica.errors import SchemaError
from phenoica.report import figures, row_words, run_index, score_page
from phenoica.score import presets
from phenoica.score.baselines import BASELINES
from phenoica.score.hits import hits

VERDICT = "ICA does not beat pca, rotation on held-out experiments."
VALUES = {"pca": 0.71, "ica": 0.74, "rotation": 0.70, "cell_count": 0.66, "permuted": 0.50}
EVIL = "<script>x</script>"
TITLES = presets.titles(["standard"])
SPREAD = "Batch is spread over 2.0 of 2 ica components (participation number): ica is NOT more concentrated."


def row(**values):
    base = dict.fromkeys(schema.SCORE_COLUMNS) | {
        "contrast": "query_vs_reference", "perturbation": "macro", "view": "ica", "test_data_used": "none",
        "probe": "l1", "metric": "auroc", "scope": "pooled", "n_components": 8, "n_case": 40,
        "n_reference": 60, "n_experiments": 6, "fold": -1,
    }  # fmt: skip
    return base | values


def score_rows(l2_holds=1.0):
    rows = []
    for view, value in VALUES.items():
        interval = {"ci_low": value - 0.04, "ci_high": value + 0.05, "ci_kind": "t over folds"}
        rows.append(row(view=view, value=value, **interval))
        rows.append(row(view=view, value=value - 0.1, scope="within_experiment", **interval))
        rows.append(row(view=view, perturbation=EVIL, value=value + 0.01, ci_low=None, reason="under_4_experiments"))
        rows.append(row(view=view, perturbation="LONELY", value=None, reason="one_experiment"))
    rows.append(row(view_minus="pca", value=0.03, ci_low=0.01, ci_high=0.05))
    rows.append(row(view_minus="rotation", value=0.04, ci_low=-0.02, ci_high=0.10))
    control = {"contrast": "l2_control", "perturbation": "all", "view": "pca+rotation+ica", "probe": "l2"}
    for metric, value in zip(
        ("max_decision_difference", "max_auroc_difference", "holds"), (3e-8, 0.0, l2_holds), strict=True
    ):
        rows.append(row(**control, metric=metric, value=value))
    effects = {"contrast": "all_vs_reference", "perturbation": "all", "metric": "concentration_share", "probe": "none"}
    rows += [row(**effects, view=v, value=s) for v, s in (("pca", 0.4), ("ica", 0.6), ("rotation", 0.3))]
    rows += [row(**effects, view="rotation", draw=d, value=0.2 + 0.1 * d) for d in range(3)]
    rows.append(row(fold=0, value=0.99))
    return pd.DataFrame(rows)


@pytest.fixture
def run(tmp_path):
    """Write the files of a run that the two pages read, and return its configuration."""
    config = configuration.resolve({"run": "r 1", "source": "demo", "results": str(tmp_path)} | {"run": "r1"})
    paths = RunPaths.of(config)
    adata = anndata.AnnData(np.zeros((3, 2), np.float32), obs=pd.DataFrame(index=list("abc")))
    adata.uns[schema.UNS] = dict.fromkeys(schema.UNS_KEYS, "x") | {
        "checkpoint": "random weights, seed 0 (not a trained model)",
        "encoder_saw_test_images": "yes",
        "fit_experiments": np.array(["e1", "e2"], dtype=object),
    }
    numbers = dict.fromkeys(("biology", "batch_omega2", "row_omega2", "column_omega2", "kurtosis", "top_effect"), 0.25)
    component = {"label": "biology", "top_perturbation": "PLK1", **numbers}
    adata.uns[schema.UNS_COMPONENTS] = pd.DataFrame(
        [component, component | {"label": "batch"}], index=pd.Index(["ica_000", "ica_001"], name="component")
    )
    adata.uns[schema.UNS_CONCENTRATION] = np.array([SPREAD, "Position: no component carries any."], dtype=object)
    adata.uns[schema.UNS_ICA] = {"converged": False, "n_iter": 300, "gradient": 0.02}
    for path in (paths.disentangled, paths.embeddings):
        path.parent.mkdir(parents=True, exist_ok=True)
        adata.write_h5ad(path)
    paths.score_fold(0).parent.mkdir(parents=True)
    decided = {
        "fold": 0, "training_experiments": ["e1"], "test_experiments": ["e2"], "fit": {"warnings": ["short"]},
        "fractions": {"ica": {"fraction": 0.1}}, "probes": {"ica": {"q/A": {"converged": False}}},
    }  # fmt: skip
    paths.score_fold(0, "json").write_text(json.dumps(decided))
    paths.scores("txt").write_text(f"table\nVerdict: {VERDICT}\nrest\n")
    paths.quarantine.write_text(
        "key,well_id,reason,shard,row_group,row\nk1,w1,truncated,0,0,1\nk2,w1,truncated,0,0,2\n"
    )
    paths.plates("design.csv").parent.mkdir()
    paths.plates("design.csv").write_text(
        "treatment,gene,well_type_label,control,control_source,n_wells,n_plates,n_experiments,n_addresses\n"
        "DMSO,,,negative,config,9,2,2,7\n<b>SRC</b>,SRC,,cutting,inferred,2,2,2,1\n"
        "A,A,,none,,2,2,2,1\nB,B,,none,,2,2,2,2\n"
    )
    paths.plates("units.csv").write_text("kind,name\nexperiment,e1\nfold,0\nfold,1\n")
    paths.qc_plates.parent.mkdir()
    plates = {schema.EXPERIMENT: ["e1", "e2"], "n_wells": [2, 1], "flags": ["", ""], "n_acquisition": [1, 0]}
    pd.DataFrame(plates).to_parquet(paths.qc_plates)
    return config


def write_scores(config, rows):
    paths = RunPaths.of(config)
    rows.to_parquet(paths.scores("parquet"))
    hits(rows, config).to_csv(paths.score_file("hits.csv"), index=False)
    files = paths.scores("parquet"), paths.score_file("hits.csv"), [paths.score_fold(0, "json")]
    score_page.write(*files, paths.scores("txt"), paths.disentangled, paths.report("score.html"), config)
    return paths.report("score.html").read_text(encoding="utf-8")


def test_views_stand_beside_chance_and_baselines_in_one_table():
    total = score_rows().query("fold == -1")
    pooled, within = (score_page.score_table(total, s, TITLES) for s in ("pooled", "within_experiment"))
    assert [r["view"] for r in pooled["rows"]] == ["pca", "rotation", "ica", "cell_count", "permuted"]
    assert [r["kind"] for r in pooled["rows"]] == ["view", "null", "view", "baseline", "null"]
    ica = pooled["rows"][2]["cells"][0]
    assert (ica["value"], ica["range"]) == ("0.740", "0.70 to 0.79")
    assert within["rows"][2]["cells"][0]["value"] == "0.640"


def test_figure_shows_the_same_rows_as_the_table_with_their_intervals():
    (panel,) = score_page.panels(score_rows(), TITLES)
    assert [r["name"] for r in panel["rows"]] == ["pca", "rotation", "ica", "cell_count", "permuted"]
    assert panel["rows"][2] == {
        "name": "ica", "kind": "view", "value": 0.74, "low": pytest.approx(0.70), "high": pytest.approx(0.79)
    }  # fmt: skip
    assert "<svg" in figures.svg(figures.scores_figure([panel]))
    assert "<svg" in figures.svg(figures.scores_figure([]))


def test_differences_say_what_their_interval_says():
    outcomes = {d["minus"]: (d["value"], d["outcome"]) for d in score_page.differences(score_rows())}
    assert outcomes == {"pca": ("+0.030", "ica is higher"), "rotation": ("+0.040", "not decided")}


def test_l2_control_is_an_alarm_only_when_it_fails(run):
    held, failed = (write_scores(run, score_rows(l2_holds=h)) for h in (1.0, 0.0))
    assert "L2 control holds" in held and "L2 CONTROL FAILS" not in held
    assert '<div class="alarm" role="alert">L2 CONTROL FAILS' in failed and "L2 control holds" not in failed
    no_control = score_rows()
    no_control = write_scores(run, no_control[no_control["contrast"] != "l2_control"])
    assert "L2 control not run" in no_control


def test_training_has_a_section_only_where_an_untrained_encoder_was_scored(run):
    question = "Does the encoder's training help?"
    assert question not in write_scores(run, score_rows())
    extra = [row(view=v, value=value) for v, value in (("raw", 0.6), ("random_encoder", 0.7))]
    extra.append(row(view="raw", view_minus="random_encoder", value=-0.1, ci_low=-0.15, ci_high=-0.05))
    text = write_scores(run, pd.DataFrame([*score_rows().to_dict("records"), *extra]))
    section = text[text.index(question) : text.index("Sparsity and concentration")]
    assert "−0.100" in section and "−0.15 to −0.05" in section and "trained is lower" in section
    ica = text[text.index("Does ICA help?") : text.index(question)]
    assert "−0.100" not in ica and "+0.030" in ica


def test_page_content(run):
    text = write_scores(run, score_rows())
    assert VERDICT in text
    assert "in one experiment only" in text and "LONELY" in text  # a skipped contrast and why
    assert "<script>x" not in text and "&lt;script&gt;x" in text
    assert f'<ul id="spread"><li>{SPREAD}</li><li>Position: no component carries any.</li></ul>' in text
    assert text.index('id="spread"') < text.index('id="components"')
    assert "exploration fit" in text and "1 biology, 1 batch, 0 position" in text
    assert "ICA DID NOT CONVERGE" in text
    assert "0.30 on average, from 0.20 to 0.40" in text and "3 random rotations" in text
    assert "1 of 1 L1 probe did not converge" in text
    assert "not a trained model" in text
    assert "http://" not in text.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )


def test_every_contrast_stands_under_its_title_and_never_under_its_name(run):
    own = {"name": "dose_series", "case": {"control": "none"}, "reference": {"control": "positive"}}
    run["score"]["contrasts"] = ["demo", own]
    names = ["guide_holdout", "cutting_vs_other_cutting", "dose_series"]
    extra = [row(contrast=c, perturbation=p, value=0.8) for c in names for p in ("macro", "A")]
    extra += [row(contrast=c, perturbation="B", value=None, reason="one_experiment") for c in names]
    rows = pd.DataFrame([*score_rows().to_dict("records"), *extra])
    text = write_scores(run, rows)
    titles = presets.titles(run["score"]["contrasts"])
    for name in names:
        assert f">{titles[name]}</button>" in text and f"{titles[name]}: 1 perturbation</summary>" in text
        assert f"<td>{titles[name]}</td><td>B</td>" in text  # not testable
        assert name not in text
    shown = [panel["title"] for panel in score_page.panels(rows, titles)]
    assert shown == [
        titles[c] for c in ("query_vs_reference", "cutting_vs_other_cutting", "guide_holdout", "dose_series")
    ]


def test_a_contrast_that_the_configuration_does_not_know_is_refused(run):
    rows = pd.DataFrame([*score_rows().to_dict("records"), row(contrast="guide_holdout", value=0.8)])
    with pytest.raises(SchemaError, match="contrast 'guide_holdout' is not in score.contrasts"):
        write_scores(run, rows)


def test_the_page_says_what_each_row_is_and_at_which_level_its_intervals_are(run):
    run["score"]["confidence"] = 0.9
    text = write_scores(run, score_rows())
    meaning = text[text.index('id="meaning"') :]
    assert all(f"<dt><strong>{view}</strong></dt>" in meaning for view in VALUES)
    assert "<dt><strong>position_trees</strong></dt>" not in meaning  # no such row here
    assert "Bars: 90% intervals" in text and "95%" not in text
    assert row_words.explained(["centerscale + ica"]) == [("centerscale + ica", "First centerscale, then ica.")]
    assert {name for name, _ in row_words.explained([*VIEWS, *BASELINES])} == {*VIEWS, *BASELINES}


def test_skipped_contrasts_are_listed_once_for_all_views():
    (skipped,) = score_page.skipped(score_rows().query("fold == -1"), TITLES)
    assert skipped["perturbation"] == "LONELY" and skipped["views"] == "all"


def test_a_table_without_rows_over_folds_is_refused(run):
    with pytest.raises(SchemaError, match="fold -1"):
        write_scores(run, score_rows().query("fold == 0"))
    with pytest.raises(SchemaError, match="none.parquet: no such file; run `phenoica summarise`"):
        score_page.read_scores("none.parquet")


def test_run_index_links_what_exists(run):
    paths = RunPaths.of(run)
    run_index.write(run)
    text = paths.index.read_text(encoding="utf-8")
    assert 'href="disentangle/disentangled.h5ad"' in text and 'href="embed/quarantine.csv"' in text
    assert "Scores: not made in this run" in text and "report/score.html" not in text
    assert "2 × truncated" in text and "(1 well in all)" in text
    assert VERDICT in text and "3 wells on 2 plates of 2 experiments" in text
    assert "Cutting controls are inferred" in text and "&lt;b&gt;SRC&lt;/b&gt;" in text and "<td>DMSO</td>" in text
    assert "2 treatments are not a control; 1 of them\nsits on one address" in text
    write_scores(run, score_rows())
    run_index.write(run)
    assert 'href="report/score.html"' in paths.index.read_text(encoding="utf-8")


@pytest.mark.parametrize("checkpoint", ["bundled", "pretrain", "random"])
def test_run_index_links_the_encoder_that_phenoica_trained(run, checkpoint):
    paths = RunPaths.of(run)
    run["embed"]["checkpoint"] = checkpoint
    run_index.write(run)
    assert ("Encoder: not made in this run</li>" in paths.index.read_text()) == (checkpoint != "random")
    paths.report("encoder.html").parent.mkdir(exist_ok=True)
    paths.report("encoder.html").touch()
    run_index.write(run)
    assert ('href="report/encoder.html"' in paths.index.read_text()) == (checkpoint != "random")


def test_scores_of_an_earlier_run_of_the_same_name_are_not_shown(run):
    paths = RunPaths.of(run)
    write_scores(run, score_rows())
    paths.plates("units.csv").write_text("kind,name\nexperiment,e1\n")
    run_index.write(run)
    text = paths.index.read_text(encoding="utf-8")
    assert VERDICT not in text and "report/score.html" not in text and "disentangled.h5ad" not in text


def test_run_index_shows_every_setting(run):
    settings = dict(run_index.flatten(run))
    assert settings["qc.limit_mads"] == "5" and settings["embed.model.dim"] == "384"
    assert settings["plates.holdout_experiments"] == "(not set)"
    assert not [k for k in settings if k.endswith(".")]
