import json

import pandas as pd
import pytest
from typer.testing import CliRunner

from phenoica import __version__
from phenoica.cli import app, main

runner = CliRunner()
VERBS = [command.name or command.callback.__name__ for command in app.registered_commands]


def test_help_lists_every_verb_and_each_verb_explains_its_options():
    listed = runner.invoke(app, ["--help"])
    assert listed.exit_code == 0
    for verb in VERBS:
        assert verb in listed.output
        help_text = runner.invoke(app, [verb, "--help"])
        assert help_text.exit_code == 0
        assert help_text.output.count("--") > 1
    assert len(VERBS) >= 12


def test_version():
    assert runner.invoke(app, ["--version"]).output.strip() == __version__


def test_config_verb_fills_defaults_from_text_and_file(tmp_path):
    out = tmp_path / "c.json"
    assert runner.invoke(app, ["config", '{"run": "r", "source": "demo"}', "--out", str(out)]).exit_code == 0
    resolved = json.loads(out.read_text())
    assert resolved["plates"]["fit_control_share"] == 0.5
    assert json.loads(runner.invoke(app, ["config", str(out)]).output) == resolved


def test_an_error_is_one_message_without_traceback(tmp_path, monkeypatch, capsys):
    path = tmp_path / "c.yaml"
    path.write_text("run: r\nsource: demo\nplate: {}\n")
    monkeypatch.setattr("sys.argv", ["phenoica", "plates", "--config", str(path)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    assert capsys.readouterr().err == f"error: {path}: unknown key 'plate'; did you mean 'plates'?\n"


def test_verbs_run_without_snakemake_in_the_default_places(tiny_screen, tmp_path):
    """Every verb after demo, on a screen so small that nothing is testable: the table then says why."""
    config = tmp_path / "config.json"
    cfg = tiny_screen.write()
    cfg["disentangle"] |= {"n_components": 1, "min_fit_controls": 2}
    config.write_text(json.dumps(cfg))
    verbs = [["plates"], ["embed", "--unit", "0"], ["embed", "--unit", "1"], ["assemble"], ["qc"]]
    verbs += [["disentangle"], ["disentangle", "--fold", "0"], ["disentangle", "--fold", "1"], ["views"]]
    verbs += [["score", "--fold", "0"], ["score", "--fold", "1"]]
    verbs += [["score-views", "--fold", "0"], ["score-views", "--fold", "1"], ["summarise"], ["deletion"]]
    verbs += [["consensus"], ["report-plate-index"]]
    verbs += [["report-plates", "--experiment", "gene-001"], ["report-plates", "--experiment", "gene-002"]]
    verbs += [["report-scores"], ["report-index"]]
    for arguments in verbs:
        result = runner.invoke(app, [*arguments, "--config", str(config)])
        assert result.exit_code == 0, (arguments, result.output, result.exception)
    root = tiny_screen.folder / "results/tiny"
    assert len(pd.read_parquet(root / "qc/wells.parquet")) == 16
    scores = pd.read_parquet(root / "score/scores.parquet")
    probed = scores[(scores["metric"] == "auroc") & (scores["scope"] != "in_distribution")]
    assert probed.loc[probed["perturbation"] == "PLK1", "reason"].str.contains("few_train_wells").all()
    assert (scores["value"].notna() | scores["reason"].notna()).all()
    assert (root / "score/deletion.parquet").is_file() and (root / "score/consensus.h5ad").is_file()
    assert "too few wells of a side in the" in (root / "score/scores.txt").read_text()
    for page in ("index.html", "report/score.html", "report/plates/index.html", "report/plates/gene-002/1.html"):
        assert (root / page).read_text().startswith("<!DOCTYPE html>")
    printed = runner.invoke(app, ["design", "--config", str(config)])
    assert "EIF3H_guide_1" in printed.output and "inferred" in printed.output
