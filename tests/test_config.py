from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from phenoica.config import fingerprint, load, resolve, schema
from phenoica.errors import ConfigError

CONFIGS = sorted(Path(__file__).resolve().parents[1].glob("config/*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_shipped_configurations_are_valid_and_complete(path):
    assert resolve(load(path)) == load(path)


def test_no_demo_value_leaks_into_another_configuration():
    demo = load(next(p for p in CONFIGS if p.name == "config.yaml"))
    plain = resolve({"run": "r", "source": "demo"})
    assert demo["disentangle"]["n_components"] == 11
    assert plain["disentangle"]["n_components"] == 128
    assert plain["embed"]["model"]["dim"] == 384


def test_mistyped_keys_name_the_nearest_one():
    with pytest.raises(ConfigError, match="unknown key 'plates.fit_controls_share'; did you mean 'fit_control_share'"):
        resolve({"run": "r", "source": "demo", "plates": {"fit_controls_share": 0.5}})
    with pytest.raises(ConfigError, match="unknown key 'sead'; did you mean 'seed'"):
        resolve({"run": "r", "source": "demo", "sead": 1})


def test_all_wrong_values_are_listed_at_once():
    with pytest.raises(ConfigError) as error:
        resolve({"run": "a/b", "source": "demo", "qc": {"limit_mads": -1}, "plates": {"folds": "some"}})
    text = str(error.value)
    assert "run:" in text and "qc.limit_mads" in text and "plates.folds" in text


def test_shards_need_their_inputs():
    with pytest.raises(ConfigError, match="plates.shards is empty"):
        resolve({"run": "r", "source": "shards"})
    with pytest.raises(ConfigError, match="plates.metadata is not set"):
        resolve({"run": "r", "source": "shards", "plates": {"shards": ["x"]}})


@given(st.dictionaries(st.text(max_size=5), st.integers(), max_size=3))
def test_unknown_top_level_keys_never_pass(extra):
    extra = {k: v for k, v in extra.items() if k not in schema()["properties"]}
    if extra:
        with pytest.raises(ConfigError):
            resolve({"run": "r", "source": "demo", **extra})


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("embed", {"dna_channel": 9}, "dna_channel is 9, which is not among plates.channels"),
        ("plates", {"batch_key": "plat_id"}, "batch_key is 'plat_id'; it must be an obs column"),
        ("plates", {"missing_channels": "some"}, "missing_channels"),
        ("embed", {"model": {"dim": 100, "heads": 6}}, "dim is 100; it must be a multiple of 4 and of heads"),
        ("embed", {"model": {"image_size": 100}}, "image_size is 100; it must be a multiple of patch_size"),
        ("embed", {"features": "channelwise", "channelwise": True}, "X itself holds the channels side by side"),
        ("score", {"rotation_draws": 21}, "rotation_draws fits only 20"),
        ("disentangle", {"views": []}, "disentangle.views"),
        ("pretrain", {"decoder": {"dim": 20, "heads": 4}}, "decoder.dim is 20; it must be a multiple of 8"),
        ("pretrain", {"warmup_steps": 50, "steps": 50}, r"warmup_steps is 50; it must be below steps \(50\)"),
    ],
)
def test_values_that_cannot_work_are_refused_before_any_work(section, values, message):
    with pytest.raises(ConfigError, match=message):
        resolve({"run": "r", "source": "demo", section: values})


@pytest.mark.parametrize("embed", [{"features": "channelwise"}, {"channelwise": True}])
def test_channels_side_by_side_have_no_place_for_a_well_that_lacks_one(embed):
    plates = {"missing_channels": "available_channels"}
    with pytest.raises(ConfigError, match="no place for a well that lacks one"):
        resolve({"run": "r", "source": "demo", "plates": plates, "embed": embed})


def test_files_that_are_no_configuration(tmp_path):
    with pytest.raises(ConfigError, match="no such config file"):
        load(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1\nb: 2")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="found list"):
        load(tmp_path / "list.yaml")


def test_fingerprint_follows_the_named_sections_only():
    a = resolve({"run": "r", "source": "demo"})
    b = resolve({"run": "r", "source": "demo", "qc": {"limit_mads": 6}})
    assert fingerprint(a, "embed") == fingerprint(b, "embed")
    assert fingerprint(a, "qc") != fingerprint(b, "qc")
    assert fingerprint(a) != fingerprint(b)


def test_every_key_of_the_schema_is_described():
    def walk(node, path):
        for key, sub in node.get("properties", {}).items():
            assert "description" in sub or sub.get("type") == "object" or key in ("model",), f"{path}.{key}"
            walk(sub, f"{path}.{key}")

    walk(schema(), "config")
    link = Path(__file__).resolve().parents[1] / "workflow/schemas/config.schema.yaml"
    assert yaml.safe_load(link.read_text()) == schema()


def test_the_readme_of_the_configurations_lists_every_key_with_its_default():
    text = (CONFIGS[0].parent / "README.md").read_text()

    def walk(node, path=""):
        for key, sub in node["properties"].items():
            if sub.get("type") == "object":
                yield from walk(sub, f"{path}{key}.")
            else:
                yield f"| `{path}{key}` | `{sub.get('default', 'required')}` |", sub["description"]

    for row, description in walk(schema()):
        assert row in text, row
        assert description in text, row
