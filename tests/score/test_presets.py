import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phenoica import config, schema
from phenoica.errors import ConfigError
from phenoica.score import presets
from phenoica.score.contrasts import CONTRASTS

ENTRY = {"name": "mine", "case": {"control": "none"}, "reference": {"control_role": "reference"}}


@pytest.mark.parametrize("name", ["standard", "demo", "profiles", "rxrx3-core"])
def test_presets_pass_their_own_parser(name):
    rules = presets.parse([name])
    assert set(CONTRASTS) <= {rule.name for rule in rules}  # names that readers of the table know
    assert all(rule.case and rule.reference for rule in rules)


def test_the_real_preset_holds_out_guides_and_keeps_compounds_inside_experiments():
    rules = {rule.name: rule for rule in presets.parse(["rxrx3-core"])}
    assert rules["guide_holdout"].diffby == ("treatment",) and rules["guide_holdout"].min_values == 4
    assert rules["compound_dose"].within_experiments_only and not rules["query_vs_reference"].within_experiments_only
    assert rules["compound_dose"].each == ("perturbation", "concentration")
    other = rules["cutting_vs_other_cutting"]
    assert other.case == other.reference and other.each == ("treatment",)


def test_presets_and_own_entries_stand_side_by_side_in_the_given_order():
    rules = presets.parse(["standard", {**ENTRY, "each": "perturbation", "max_wells": 9}])
    assert [rule.name for rule in rules] == [*CONTRASTS, "mine"]
    assert rules[-1].max_wells == 9 and rules[-1].each == ("perturbation",) and rules[-1].min_experiments == 1


@pytest.mark.parametrize("name", ["standard", "demo", "profiles", "rxrx3-core"])
def test_every_preset_contrast_has_a_title_in_words(name):
    titles = presets.titles([name])
    assert list(titles) == [rule.name for rule in presets.parse([name])]
    assert all(rule.title for rule in presets.parse([name])) and not any("_" in text for text in titles.values())
    assert len(set(titles.values())) == len(titles)


def test_a_contrast_without_a_title_is_called_by_its_definition():
    entry = {
        **ENTRY, "case": {"control": ["none", "positive"], "concentration": 0.5}, "each": ["perturbation"],
        "sameby": "cell_type", "diffby": "treatment",
    }  # fmt: skip
    assert presets.titles([entry])["mine"] == (
        "Wells with control none or positive and concentration 0.5 against wells with control role reference, "
        "each perturbation, of the same cell type, tested on another treatment"
    )
    inside = {**ENTRY, "batch_key": "plate_id"}
    assert presets.titles([inside])["mine"].endswith(", held out by plate id within experiments")


def test_a_title_of_ones_own_is_taken_and_two_that_are_alike_are_told_apart():
    mine = {**ENTRY, "title": "  Dose of DMSO_2  "}
    assert presets.titles(["standard", mine])["mine"] == "Dose of DMSO_2"
    titles = presets.titles([mine, {**mine, "name": "other"}])
    assert titles == {"mine": "Dose of DMSO_2 (mine)", "other": "Dose of DMSO_2 (other)"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"case": {"controll": "none"}}, "contrast 'mine': key 'case': 'controll' is no obs column; did you mean"),
        ({"case": {"control": "nothing"}}, "contrast 'mine': key 'case': control is never 'nothing'"),
        ({"case": {"perturbation": 5}}, "contrast 'mine': key 'case': perturbation must be text"),
        ({"case": {"concentration": "high"}}, "contrast 'mine': key 'case': concentration must be a number"),
        ({"case": {}}, "contrast 'mine': key 'case': must be obs columns with their values"),
        ({"reference": None}, "contrast 'mine': key 'reference': must be obs columns"),
        ({"eech": "perturbation"}, "contrast 'mine': key 'eech': unknown; did you mean 'each'"),
        ({"each": 3}, "contrast 'mine': key 'each': must be an obs column or a list"),
        ({"sameby": ["plate_id", "plate_id"]}, "contrast 'mine': key 'sameby': names a column twice"),
        ({"min_experiments": 0}, "contrast 'mine': key 'min_experiments': must be a whole number of at least 1"),
        ({"max_wells": True}, "contrast 'mine': key 'max_wells': must be a whole number"),
        ({"max_wells": 3, "min_wells": 4}, "contrast 'mine': key 'max_wells': is 3, below min_wells"),
        ({"min_values": 4}, "contrast 'mine': key 'min_values': counts the values of diffby, which is not set"),
        ({"each": "treatment", "diffby": "treatment"}, "contrast 'mine': key 'diffby': treatment is also in each"),
        ({"diffby": "treatment", "batch_key": "plate_id"}, "contrast 'mine': key 'diffby': cannot be held out"),
        ({"batch_key": ["plate", "row"]}, "contrast 'mine': key 'batch_key': must be one obs column"),
        ({"name": "l2_control"}, "contrast 'l2_control': key 'name': must be a word"),
        ({"name": 5}, "entry 0: key 'name': must be a word"),
        ({"title": " "}, "contrast 'mine': key 'title': must be one line of text"),
        ({"title": "two\nlines"}, "contrast 'mine': key 'title': must be one line of text"),
        ({"title": "x" * 101}, "contrast 'mine': key 'title': must be one line of text of at most 100 characters"),
        ({"title": 5}, "contrast 'mine': key 'title': must be one line of text"),
    ],
)
def test_messages_name_the_contrast_and_the_key(change, message):
    with pytest.raises(ConfigError) as error:
        presets.parse([{**ENTRY, **change}])
    assert message in str(error.value)


def test_everything_wrong_is_listed_at_once_by_the_configuration():
    with pytest.raises(ConfigError) as error:
        config.resolve({"run": "r", "source": "demo", "score": {"contrasts": ["demoo", ENTRY, ENTRY, 7]}})
    lines = str(error.value).splitlines()
    assert len(lines) == 3 and all(line.startswith("config: score.contrasts: ") for line in lines)
    assert "'demoo' is no preset; did you mean 'demo'?" in lines[0] and "entry 3 is 7" in lines[1]
    assert "contrast 'mine': key 'name': 2 contrasts are called so" in lines[2]
    with pytest.raises(ConfigError, match="the list is empty"):
        presets.parse([])


text_columns = st.sampled_from([schema.PERTURBATION, schema.TREATMENT, schema.SMILES, schema.PLATE])
number, text = st.integers(1, 50), st.text(max_size=5)
entries = st.fixed_dictionaries(
    {
        "name": st.from_regex(r"\A[A-Za-z][A-Za-z0-9_-]{0,12}\Z").filter(lambda n: n not in presets.RESERVED),
        "case": st.dictionaries(text_columns, text | st.lists(text, min_size=1), min_size=1),
        "reference": st.dictionaries(
            st.just(schema.CONCENTRATION), st.floats(0, 10) | st.integers(0, 10), min_size=1, max_size=1
        ),
    },
    optional={
        "each": st.none() | text_columns, "sameby": st.lists(text_columns, unique=True), "min_experiments": number,
        "batch_key": st.none() | text_columns, "min_wells": st.none() | st.integers(1, 5),
        "max_wells": st.none() | st.integers(5, 99),
    },
)  # fmt: skip
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@given(entries)
def test_whatever_is_well_formed_is_kept_as_written(entry):
    before = copy.deepcopy(entry)
    (rule,) = presets.parse([entry])
    assert entry == before
    assert rule.name == entry["name"]
    assert {c: v for c, v in rule.case} == {
        c: tuple(v) if isinstance(v, list) else (v,) for c, v in entry["case"].items()
    }
    assert rule.reference == ((schema.CONCENTRATION, (float(entry["reference"][schema.CONCENTRATION]),)),)
    assert rule.each == ((entry["each"],) if entry.get("each") else ())
    assert rule.sameby == tuple(entry.get("sameby", ()))
    assert rule.max_wells == entry.get("max_wells") and rule.min_experiments == entry.get("min_experiments", 1)


@given(entries, st.sampled_from(presets._KEYS) | st.text(max_size=6), anything)
def test_whatever_else_is_written_gives_a_rule_or_a_message_with_its_key(entry, key, value):
    entry = {**entry, key: value}
    try:
        (rule,) = presets.parse([entry])
    except ConfigError as error:
        assert f"key {key!r}" in str(error) or key in ("min_wells", "each", "batch_key")  # refused with another key
    else:
        assert key in presets._KEYS and rule.name == entry["name"]
