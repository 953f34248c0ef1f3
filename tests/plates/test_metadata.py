import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phenoica import schema
from phenoica.config import resolve
from phenoica.errors import MetadataError
from phenoica.plates.design import design_table
from phenoica.plates.metadata import classify_controls, control_roles, read_metadata, wells_from_metadata

HEADER = "well_id,experiment_name,plate,address,gene,treatment,SMILES,concentration,perturbation_type,cell_type"
PLATES = resolve({"run": "r", "source": "demo"})["plates"]


def read(tmp_path, *rows, header=HEADER):
    path = tmp_path / "metadata.csv"
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return read_metadata(path)


def test_genes_named_like_null_survive_and_empty_cells_are_null(tmp_path):
    frame = read(
        tmp_path,
        "e_1_A01,e,1,A01,NA,NA_guide_1,,,CRISPR,HUVEC",
        "e_1_A02,e,1,A02,NaN,NaN_guide_1,,,CRISPR,HUVEC",
        "e_1_A03,e,1,A03,None,None_guide_1,,,CRISPR,",
        'e_08_A04,e,08,A04,,"drug, ""x"" µ/🧪","C(=O),N |t:1|",0.25,COMPOUND,HUVEC',
    )
    assert frame["gene"].tolist() == ["NA", "NaN", "None", None]
    assert frame["cell_type"].tolist()[2] is None
    assert frame["plate"].tolist() == ["1", "1", "1", "08"]
    assert frame["treatment"].iloc[3] == 'drug, "x" µ/🧪'
    assert frame["SMILES"].iloc[3] == "C(=O),N |t:1|"
    assert frame["concentration"].iloc[3] == 0.25
    assert np.isnan(frame["concentration"].iloc[0])


def test_every_problem_is_listed_by_row(tmp_path):
    with pytest.raises(MetadataError) as error:
        read(
            tmp_path,
            "e_1_A01,e,1,A01,G,G_1,,,CRISPR,HUVEC",
            "e_1_A99,e,1,A99,G,G_1,,many,CRISPR,HUVEC",
            "e_1_A03,,1,A03,G,G_1,,,CRISPR,HUVEC",
            "e_1_A01,e,1,A01,G,,,,CRISPR,HUVEC",
        )
    text = str(error.value)
    assert "metadata.csv: 5 problems" in text
    for part in ("row 2, address: 'A99'", "row 2, concentration: 'many'", "row 3, experiment_name", "row 4, treatment"):
        assert part in text
    assert "row 4, well_id: 'e_1_A01': well id stands more than once" in text


def test_two_spellings_of_one_well_are_a_duplicate(tmp_path):
    with pytest.raises(MetadataError, match="row 2: well e_1_A01 stands more than once"):
        read(tmp_path, "e_1_A01,e,1,A01,G,G_1,,,CRISPR,H", "e_1_a1,e,1,a1,G,G_1,,,CRISPR,H")


def test_a_well_id_that_contradicts_its_parts(tmp_path):
    with pytest.raises(MetadataError, match="row 1: well_id is 'e_2_A01'.*'e_1_A01'"):
        read(tmp_path, "e_2_A01,e,1,A01,G,G_1,,,CRISPR,H")


def test_missing_columns_and_missing_file(tmp_path):
    with pytest.raises(MetadataError, match="columns gene, cell_type are missing"):
        read(
            tmp_path,
            "e_1_A01,e,1,A01,t,,,CRISPR",
            header="well_id,experiment_name,plate,address,treatment,SMILES,concentration,perturbation_type",
        )
    with pytest.raises(MetadataError, match="none.csv: no such file"):
        read_metadata(tmp_path / "none.csv")
    with pytest.raises(MetadataError, match="holds no wells"):
        read(tmp_path)


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00\r\n"), min_size=1)


@given(st.lists(TEXT, min_size=1, max_size=5))
def test_any_treatment_text_comes_back(tmp_path_factory, names):
    path = tmp_path_factory.mktemp("m") / "metadata.csv"
    rows = [
        {
            "well_id": f"e_1_A{i + 1:02d}", "experiment_name": "e", "plate": "1", "address": f"A{i + 1:02d}",
            "gene": name, "treatment": name, "SMILES": "", "concentration": "", "perturbation_type": "CRISPR",
            "cell_type": "H",
        }
        for i, name in enumerate(names)
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(path, index=False)
    assert read_metadata(path)["treatment"].tolist() == names


def labelled(label_column):
    rows = [
        ("EMPTY_control", None, None), ("PLK1_guide_1", "PLK1", "x"), ("SRC_guide_1", "SRC", label_column),
        ("HCK_guide_1", "HCK", None), ("TP53_guide_1", "TP53", None),
    ]  # fmt: skip
    return pd.DataFrame([
        {
            "well_id": f"e_1_A0{i + 1}", "experiment_name": "e", "plate": "1", "address": f"A0{i + 1}", "gene": g,
            "treatment": t, "SMILES": None, "concentration": None, "perturbation_type": "CRISPR", "cell_type": "H",
            "well_type_label": label,
        }
        for i, (t, g, label) in enumerate(rows)
    ])  # fmt: skip


def test_cutting_controls_come_from_the_label_else_are_inferred():
    control, source = classify_controls(labelled("cutting_control"), PLATES)
    assert control.tolist() == ["negative", "positive", "cutting", "none", "none"]
    assert source.tolist() == ["config", "config", "label", "", ""]
    control, source = classify_controls(labelled(None), PLATES)
    assert control.tolist() == ["negative", "positive", "cutting", "cutting", "none"]
    assert source.tolist() == ["config", "config", "inferred", "inferred", ""]
    table = design_table(labelled(None), PLATES).set_index("treatment")
    assert table.loc["SRC_guide_1", "control_source"] == "inferred"
    assert table.loc["SRC_guide_1", "top_address_share"] == 1.0


def test_obs_columns_of_a_screen(tmp_path):
    rows = [f"e_1_A{i:02d},e,1,A{i:02d},,EMPTY_control,,,CRISPR,H" for i in range(1, 17)]
    rows += ["e_1_B01,e,1,B01,TP53,TP53_guide_1,,,CRISPR,H", "e_1_C03,e,1,C03,,aspirin,CC,2.5,COMPOUND,H"]
    wells = wells_from_metadata(read(tmp_path, *rows), PLATES, seed=0)
    schema.check_obs(wells)
    assert wells["plate_id"].unique().tolist() == ["e_1"]
    by_id = wells.set_index("well_id")
    assert by_id.loc["e_1_B01", "perturbation"] == "TP53"
    assert by_id.loc["e_1_C03", "perturbation"] == "aspirin"
    assert by_id.loc["e_1_A01", "perturbation"] == "EMPTY_control"
    assert tuple(by_id.loc["e_1_C03", ["row", "column", "edge_distance"]]) == (3, 3, 2)
    assert wells["control_role"].value_counts().to_dict() == {"fit": 8, "reference": 8, "none": 2}


def test_control_split_of_a_plate_does_not_depend_on_other_plates():
    def plate(name, n):
        return pd.DataFrame({"plate_id": [name] * n, "control": ["negative"] * n})

    alone = control_roles(plate("a", 10), 0.5, seed=3)
    together = control_roles(pd.concat([plate("b", 7), plate("a", 10)], ignore_index=True), 0.5, seed=3)
    assert alone.tolist() == together[7:].tolist()
    assert (alone == "fit").sum() == 5
    assert control_roles(plate("a", 10), 0.5, seed=4).tolist() != alone.tolist()
    assert sorted(control_roles(plate("a", 2), 0.9, seed=0)) == ["fit", "reference"]
