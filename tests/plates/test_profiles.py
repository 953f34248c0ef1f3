"""Which well each row of a table is: columns, batches, joins, duplicates, orphans and everything that can be wrong."""

import numpy as np
import pandas as pd
import pytest

from phenoica import schema
from phenoica.config import resolve
from phenoica.errors import ConfigError, MetadataError
from phenoica.plates.profiles import (
    DUPLICATE,
    NO_METADATA,
    NO_PROFILE,
    choose_features,
    feature_names,
    find_profiles,
    profile_metadata,
)
from phenoica.plates.run import inputs, run_profile_plates
from phenoica.plates.tables import open_table


def metadata_of(config):
    files, path = inputs(config)
    return profile_metadata(files, config, path)


def features_of(config):
    return choose_features([open_table(p) for p in find_profiles(config)], config)


def test_wells_experiments_from_an_expression_and_text_as_written(profile_screen):
    profile_screen.write()
    found, left_out = metadata_of(profile_screen.config())
    assert len(found) == 64 and left_out.empty
    assert found["experiment_name"].value_counts().to_dict() == {"W1": 32, "W2": 32}
    assert set(found["plate"]) == {"W1_08", "W1_8.0", "W2_123_456", "W2_8"}
    assert set(found["gene"]) == {"DMSO", "NA", "SEPT2"}
    assert found["well_id"].iloc[0] == "W1_W1_08_A01"
    assert found["perturbation_type"].eq("not stated").all()


def test_plates_stage_writes_wells_folds_units_design_and_quarantine(profile_screen, tmp_path):
    profile_screen.write()
    config = profile_screen.config()
    run_profile_plates(*inputs(config), tmp_path / "plates", config)
    wells = pd.read_parquet(tmp_path / "plates/wells.parquet")
    schema.check_obs(wells)
    assert not set(schema.IMAGE_COLUMNS) & set(wells.columns) and schema.CELL_COUNT not in wells.columns
    place = wells.set_index("well_id").loc["W2_W2_8_D04"]
    assert (place[schema.PROFILE_FILE], place[schema.PROFILE_ROW]) == (0, 63)
    assert wells.groupby("plate_id")["control_role"].value_counts().unstack()[["fit", "reference"]].eq(3).all(axis=None)
    units = pd.read_csv(tmp_path / "plates/units.csv", dtype=str)
    assert set(units["kind"]) == {"experiment", "fold"}
    assert pd.read_csv(tmp_path / "plates/design.csv", keep_default_na=False)["gene"].tolist().count("NA") == 3
    assert pd.read_csv(tmp_path / "plates/quarantine.csv").empty


def test_addresses_are_normalised_and_wrong_ones_listed_with_file_and_row(profile_screen):
    frame = profile_screen.frame
    frame.loc[0, "Metadata_Well"] = " a1"
    profile_screen.write(frame)
    assert metadata_of(profile_screen.config())[0]["address"].iloc[0] == "A01"
    frame.loc[[3, 5], "Metadata_Well"] = ["AG01", "A49"]
    frame.loc[7, ["gene", "drug"]] = ""
    profile_screen.write(frame)
    with pytest.raises(MetadataError) as error:
        metadata_of(profile_screen.config())
    text = str(error.value)
    assert "3 problems" in text and "profiles.csv, row 4: 'AG01'" in text
    assert "row 6: 'A49'" in text and "row 8: perturbation is empty" in text


def test_smiles_and_odd_treatment_names_survive(profile_screen):
    frame = profile_screen.frame.assign(smiles="CC", dose="0.5")
    frame.loc[8, ["drug", "smiles"]] = ["mevinolin/lovastatin_µ \U0001f9ea", 'C(=O),"N" |t:1|']
    profile_screen.write(frame)
    columns = {**profile_screen.COLUMNS, "smiles": "smiles", "concentration": "dose"}
    row = metadata_of(profile_screen.config(columns=columns))[0].iloc[8]
    assert (row["treatment"], row["SMILES"], row["concentration"]) == (
        "mevinolin/lovastatin_µ \U0001f9ea", 'C(=O),"N" |t:1|', 0.5,
    )  # fmt: skip


def test_plate10_is_not_plate1(profile_screen):
    frame = profile_screen.frame.replace({"Metadata_Plate": {"W1_08": "W1_1", "W1_8.0": "W1_10"}})
    profile_screen.write(frame)
    found, left_out = metadata_of(profile_screen.config())
    assert found.groupby("plate").size().loc[["W1_1", "W1_10"]].tolist() == [16, 16] and left_out.empty


def test_a_number_that_is_none_names_row_and_column(profile_screen):
    profile_screen.write(profile_screen.frame.assign(dose=["1"] * 9 + ["10 uM"] + ["inf"] * 54))
    columns = {**profile_screen.COLUMNS, "concentration": "dose"}
    with pytest.raises(MetadataError, match="row 10: concentration '10 uM' is no finite number"):
        metadata_of(profile_screen.config(columns=columns))


def test_a_batch_expression_that_does_not_match_names_the_row(profile_screen):
    profile_screen.frame.loc[40, "Metadata_Plate"] = "week2"
    profile_screen.write()
    with pytest.raises(
        MetadataError, match=r"row 41: profiles.batch.pattern .* finds no experiment .* = 'week2' \(1 such"
    ):
        metadata_of(profile_screen.config())


def test_date_like_genes_are_warned_about_once_and_kept(profile_screen):
    profile_screen.write(profile_screen.frame.replace({"gene": {"SEPT2": "2-Sep"}}))
    with pytest.warns(UserWarning, match="look like dates: 2-Sep") as caught:
        found, _ = metadata_of(profile_screen.config())
    assert len(caught) == 1 and "2-Sep" in set(found["gene"])


def test_a_second_row_of_a_well_goes_to_quarantine(profile_screen):
    frame = pd.concat([profile_screen.frame, profile_screen.frame.iloc[[2]].assign(Metadata_Well="c1")])
    profile_screen.write(frame)
    found, left_out = metadata_of(profile_screen.config())
    assert len(found) == 64 and found["well_id"].is_unique
    assert left_out[["well_id", "reason", schema.PROFILE_ROW]].values.tolist() == [["W1_W1_08_C01", DUPLICATE, 64]]


def test_more_rows_than_wells_are_sites_not_duplicates(profile_screen):
    profile_screen.write(pd.concat([profile_screen.frame] * 3))
    with pytest.raises(MetadataError, match="192 rows are of 64 wells only, first W1_W1_08_A01: .*Average"):
        metadata_of(profile_screen.config())


def test_files_are_put_below_each_other_and_must_agree(profile_screen):
    profile_screen.write(profile_screen.frame.iloc[:32], "profiles-1.csv")
    second = profile_screen.frame.iloc[32:]
    profile_screen.write(second[second.columns[::-1]], "profiles-2.parquet")
    config = profile_screen.config()
    found, _ = metadata_of(config)
    assert found[[schema.PROFILE_FILE, schema.PROFILE_ROW]].iloc[[0, 31, 32]].values.tolist() == [
        [0, 0],
        [0, 31],
        [1, 0],
    ]
    assert features_of(config) == [f"Cells_{j}" for j in range(6)]
    profile_screen.write(second.drop(columns=["drug", "Cells_3"]), "profiles-2.parquet")
    with pytest.raises(MetadataError, match="not have the same columns:\n  .*profiles-2.parquet: lacks drug"):
        metadata_of(config)
    with pytest.raises(
        MetadataError, match="not have the same features .*\n  .*profiles-2.parquet: lacks 1, first Cells_3"
    ):
        features_of(config)


def test_a_pattern_without_files_and_an_empty_file(profile_screen):
    with pytest.raises(MetadataError, match="profiles.files: '.*profiles\\*' matches no file"):
        inputs(profile_screen.config())
    profile_screen.write(profile_screen.frame.iloc[:0])
    with pytest.raises(MetadataError, match="holds no wells"):
        metadata_of(profile_screen.config())


def test_columns_that_are_nowhere_are_named(profile_screen):
    profile_screen.write()
    columns = {**profile_screen.COLUMNS, "smiles": "SMILES", "cell_count": "n_cells"}
    with pytest.raises(MetadataError, match="columns 'SMILES', 'n_cells' of profiles.columns .* are in no file"):
        metadata_of(profile_screen.config(columns=columns))


def joined(screen, moa, by=None, columns=None):
    """Profiles without genes, which come from a table by drug and dose."""
    frame = screen.frame.drop(columns="gene").assign(dose=np.where(screen.frame["drug"] == "DMSO", "0.3", "1"))
    screen.write(frame)
    moa.to_csv(screen.folder / "moa.csv", index=False)
    tables = [{"file": str(screen.folder / "moa.csv"), "by": by or {"drug": "compound", "dose": "um"}}]
    mapped = {**screen.COLUMNS, "perturbation": "class", "concentration": "dose"} if columns is None else columns
    return screen.config(columns=mapped, tables=tables)


def test_tables_are_joined_on_text_and_on_the_concentration_as_a_number(profile_screen, capsys):
    drugs = sorted(set(profile_screen.frame["drug"]) - {"NA_0"})
    moa = pd.DataFrame({"compound": [*drugs, "unused"], "um": ["0.300000"] + ["1.0"] * len(drugs), "class": "kinase"})
    moa = pd.concat([moa, moa.iloc[:3]])  # rows that agree are one row
    found, _ = metadata_of(joined(profile_screen, moa))
    assert set(found["gene"]) == {"kinase", "NA_0"}  # without a class, the drug stands for itself
    said = capsys.readouterr().err
    n = (profile_screen.frame["drug"] == "NA_0").sum()
    assert f"warning: {n} of 64 profiles have no row in" in said and "first NA_0 / 1.0" in said
    assert "note: 1 of" in said and "belong to no profile" in said


def test_a_table_that_says_two_things_or_nothing_is_refused(profile_screen):
    moa = pd.DataFrame({"compound": ["DMSO", "DMSO"], "um": ["0.3", "0.30"], "class": ["a", "b"]})
    with pytest.raises(
        MetadataError, match=r"moa.csv: 1 keys stand on several rows that disagree, first DMSO / 0.3 \(class: a, b"
    ):
        metadata_of(joined(profile_screen, moa))
    with pytest.raises(MetadataError, match="no profile has a row here; its first key is nobody"):
        metadata_of(joined(profile_screen, moa.iloc[:1].assign(compound="nobody")))
    with pytest.raises(MetadataError, match="is joined on Compound .profiles.tables., which it does not hold"):
        metadata_of(joined(profile_screen, moa, by={"drug": "Compound"}))
    with pytest.raises(MetadataError, match="is joined on plate .* neither the files nor a table before"):
        metadata_of(joined(profile_screen, moa, by={"plate": "compound"}))
    with pytest.raises(MetadataError, match="holds no column that profiles.columns"):
        metadata_of(joined(profile_screen, moa, columns={**profile_screen.COLUMNS, "perturbation": None}))


def published(screen, ids=None):
    """Write published metadata of the screen, and a table of embeddings by well id only."""
    frame = screen.frame
    experiment = frame["Metadata_Plate"].str[:2]
    well_id = experiment + "_" + frame["Metadata_Plate"] + "_" + frame["Metadata_Well"]
    pd.DataFrame({
        "well_id": well_id, "experiment_name": experiment, "plate": frame["Metadata_Plate"],
        "address": frame["Metadata_Well"], "gene": frame["gene"], "treatment": frame["drug"], "SMILES": "",
        "concentration": "", "perturbation_type": "CRISPR", "cell_type": "HUVEC",
    }).to_csv(screen.folder / "metadata.csv", index=False)  # fmt: skip
    features = frame.filter(like="Cells_").rename(columns=lambda c: c.replace("Cells", "feature"))
    screen.write(features.assign(well_id=well_id if ids is None else ids(well_id)), "profiles.parquet")
    return {
        "columns": {}, "batch": {}, "features": {"prefix": ["feature_"], "name": "openphenom"},
        "plates": {"metadata": str(screen.folder / "metadata.csv")},
    }  # fmt: skip


def test_published_embeddings_are_joined_on_the_well_id(profile_screen):
    config = profile_screen.config(**published(profile_screen, lambda ids: ids.sample(frac=1, random_state=0)))
    found, left_out = metadata_of(config)
    assert len(found) == 64 and left_out.empty
    rows = pd.read_parquet(profile_screen.folder / "profiles.parquet")["well_id"].iloc[found[schema.PROFILE_ROW]]
    assert rows.tolist() == found["well_id"].tolist()


def test_orphans_both_ways_are_listed_and_judged(profile_screen, tmp_path, capsys):
    def spoil(ids):
        return ids.where(~ids.index.isin([3, 4, 5]), ["x"] * 3 + ["stranger_1_A01"] + [ids.iloc[1]] * 2 + ["x"] * 58)

    options = published(profile_screen, spoil)
    config = profile_screen.config(**options)
    run_profile_plates(*inputs(config), tmp_path / "plates", config)
    quarantine = pd.read_csv(tmp_path / "plates/quarantine.csv", keep_default_na=False)
    reasons = quarantine.groupby("reason")["well_id"].apply(list).to_dict()
    assert reasons[NO_METADATA] == ["stranger_1_A01"] and reasons[DUPLICATE] == ["W1_W1_08_B01"] * 2
    assert reasons[NO_PROFILE] == ["W1_W1_08_D01", "W1_W1_08_A02", "W1_W1_08_B02"]
    assert "3 quarantined: metadata without a profile" in capsys.readouterr().err
    options["plates"]["orphans"] = "error"
    strict = profile_screen.config(**options)
    with pytest.raises(MetadataError, match="1 wells are not in .*metadata.csv: stranger_1_A01; 3 wells are not in"):
        run_profile_plates(*inputs(strict), tmp_path / "strict", strict)


def test_embeddings_of_other_wells_are_refused(profile_screen, tmp_path):
    config = profile_screen.config(**published(profile_screen, lambda ids: "x" + ids))
    with pytest.raises(MetadataError, match="none of its wells is in"):
        run_profile_plates(*inputs(config), tmp_path / "plates", config)


def test_features_by_prefix_list_exclusion_and_their_names(profile_screen):
    profile_screen.write(profile_screen.frame.assign(Nuclei_2=1.0, Nuclei_10=2.0, Metadata_row=3, note="x"))
    cells, nuclei = [f"Cells_{j}" for j in range(6)], ["Nuclei_2", "Nuclei_10"]

    def chosen(**features):
        return features_of(profile_screen.config(features=features))

    assert chosen() == [*cells, *nuclei]
    assert chosen(exclude=[]) == [*cells, *nuclei, "Metadata_row"]
    assert chosen(prefix=["Nuclei_"]) == nuclei
    assert chosen(columns=["Cells_3", "Nuclei_2"]) == ["Cells_3", "Nuclei_2"]
    assert chosen(prefix=["Nuclei_"], columns=["Cells_1"], exclude=["_10$"]) == ["Cells_1", "Nuclei_2"]
    with pytest.raises(MetadataError, match="columns Cells_9 of profiles.features.columns are missing"):
        chosen(columns=["Cells_9"])
    with pytest.raises(MetadataError, match="chooses no column"):
        chosen(prefix=["Feature"])
    named = profile_screen.config(features={"name": "openphenom"})
    assert feature_names(["f_10", "f_2"], named) == (["f_2", "f_10"], ["openphenom_000", "openphenom_001"])
    with pytest.raises(MetadataError, match="not told apart by a number"):
        feature_names(["a_1", "b_1"], named)


def test_a_column_of_numbers_and_text_is_no_silent_metadata(profile_screen):
    profile_screen.frame["Cells_4"] = profile_screen.frame["Cells_4"].astype(object)
    profile_screen.frame.loc[5, "Cells_4"] = "out of range"
    profile_screen.write()
    with pytest.raises(MetadataError, match=r"1 columns hold numbers and text, first Cells_4 \('out of range'\)"):
        features_of(profile_screen.config())
    assert "Cells_4" not in features_of(profile_screen.config(features={"exclude": ["_4$"]}))


BASE = {"run": "r", "source": "profiles"}
GOOD = {"files": ["p.csv"], "columns": {"experiment": "e", "plate": "p", "address": "w", "treatment": "t"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"profiles": {"files": []}}, "profiles.files is empty"),
        ({"profiles": {**GOOD, "columns": {}}}, "profiles.columns.plate is not set"),
        ({"profiles": {**GOOD, "batch": {"column": "p", "pattern": "(.)"}}}, "either profiles.columns.experiment or"),
        ({"profiles": {**GOOD, "columns": {**GOOD["columns"], "well_id": "id"}}}, "well_id is set without"),
        ({"profiles": {**GOOD, "features": {"exclude": ["("]}}}, "exclude: '\\(' is no regular expression"),
        ({"profiles": GOOD, "plates": {"metadata": "m.csv"}}, "profiles.columns.plate is set, but plates.metadata"),
        ({"profiles": GOOD, "plates": {"shards": ["s"]}}, "plates.shards is set but source is 'profiles'"),
        ({"profiles": GOOD, "embed": {"checkpoint": "x"}}, "embed.checkpoint is set but source is 'profiles'"),
        ({"profiles": GOOD, "source": "demo"}, "profiles.files is set but source is 'demo'"),
    ],
)  # fmt: skip
def test_contradictory_configurations_are_refused_before_any_work(changes, message):
    resolve({**BASE, "profiles": GOOD})
    with pytest.raises(ConfigError, match=message):
        resolve({**BASE, **changes})


def test_a_batch_pattern_needs_one_group():
    columns = {k: v for k, v in GOOD["columns"].items() if k != "experiment"}
    for pattern, n in (("W", 0), ("(W)(.)", 2)):
        section = {**GOOD, "columns": columns, "batch": {"column": "p", "pattern": pattern}}
        with pytest.raises(ConfigError, match=f"must have one group in parentheses, the experiment; it has {n}"):
            resolve({**BASE, "profiles": section})
