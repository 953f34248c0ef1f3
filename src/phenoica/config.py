"""The one source of configuration defaults, for the command line and the workflow alike.

`resolve` takes what a user wrote, fills every default of `config.schema.yaml` (JSON Schema draft 2020-12) and refuses
what the schema does not know.
"""

from __future__ import annotations

import copy
import difflib
import functools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from phenoica import __version__
from phenoica import schema as schema_names
from phenoica.errors import ConfigError
from phenoica.files import sha256_of_json


@functools.cache
def schema() -> dict[str, Any]:
    """Return the configuration schema as a dict."""
    return yaml.safe_load(resources.files("phenoica").joinpath("config.schema.yaml").read_text(encoding="utf-8"))


def resolve(config: Mapping[str, Any], where: str = "config") -> dict[str, Any]:
    """Validate a configuration and fill its defaults.

    Parameters
    ----------
    config
        What the user wrote.
    where
        Name of the file, for messages.

    Returns
    -------
    dict
        A complete configuration; the input is not changed.

    Raises
    ------
    ConfigError
        Listing every wrong key, with the nearest known one, and every wrong value.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where}: expected keys and values, found {type(config).__name__}")
    config = copy.deepcopy(dict(config))
    _fill(config, schema())
    errors = sorted(Draft202012Validator(schema()).iter_errors(config), key=lambda e: list(e.absolute_path))
    if errors:
        raise ConfigError("\n".join(f"{where}: {_message(error)}" for error in errors))
    _check_sources(config, where)
    _check_together(config, where)
    _check_contrasts(config, where)
    return config


def _fill(value: dict[str, Any], node: Mapping[str, Any]) -> None:
    for key, sub in node.get("properties", {}).items():
        if key not in value and "default" in sub:
            value[key] = copy.deepcopy(sub["default"])
        if isinstance(value.get(key), dict):
            _fill(value[key], sub)


def _message(error: Any) -> str:
    path = ".".join(str(p) for p in error.absolute_path)
    if error.validator == "additionalProperties":
        known = list(error.schema["properties"])
        parts = []
        for key in sorted(set(error.instance) - set(known)):
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            parts.append(f"unknown key {'.'.join(filter(None, [path, str(key)]))!r}; {hint}")
        return "; ".join(parts)
    return f"{path + ': ' if path else ''}{error.message}"


def _check_sources(config: Mapping[str, Any], where: str) -> None:
    if config["source"] == "shards":
        if not config["plates"]["shards"]:
            raise ConfigError(f"{where}: source is 'shards' but plates.shards is empty; list the shard files there")
        if not config["plates"]["metadata"]:
            raise ConfigError(f"{where}: source is 'shards' but plates.metadata is not set; name the metadata file")
    problems = _profile_problems(config) if config["source"] == "profiles" else []
    if config["source"] != "profiles" and config["profiles"]["files"]:
        problems.append(f"profiles.files is set but source is {config['source']!r}; set source to profiles")
    if problems:
        raise ConfigError("\n".join(f"{where}: {problem}" for problem in problems))


def _profile_problems(config: Mapping[str, Any]) -> list[str]:
    """Return what is missing or contradictory where profiles are the source."""
    profiles, plates, embed = config["profiles"], config["plates"], config["embed"]
    columns, batch = profiles["columns"], profiles["batch"]
    problems = []
    if not profiles["files"]:
        problems.append("source is 'profiles' but profiles.files is empty; list the files there")
    if plates["shards"]:
        problems.append("plates.shards is set but source is 'profiles'; leave it out")
    used = [f"embed.{key}" for key in ("random_baseline", "channelwise") if embed[key]]
    used += ["embed.checkpoint"] * (embed["checkpoint"] != "random")
    problems += [f"{key} is set but source is 'profiles', which embeds no image; leave it out" for key in used]
    if plates["metadata"]:
        others = [f"columns.{k}" for k, v in columns.items() if v and k not in ("well_id", "cell_count")]
        others += [k for k in ("tables",) if profiles[k]] + [f"batch.{k}" for k, v in batch.items() if v]
        problems += [f"profiles.{key} is set, but plates.metadata says what the wells are; keep one" for key in others]
    else:
        problems += [
            f"profiles.columns.{k} is not set; name the column" for k in ("plate", "address") if not columns[k]
        ]
        if not columns["perturbation"] and not columns["treatment"]:
            problems.append("neither profiles.columns.perturbation nor .treatment is set; name a column")
        if bool(columns["experiment"]) == bool(batch["column"]):
            problems.append("set either profiles.columns.experiment or profiles.batch: what a batch is must be known")
        if bool(batch["column"]) != bool(batch["pattern"]):
            problems.append("profiles.batch needs both column and pattern")
        if columns["well_id"]:
            problems.append(
                "profiles.columns.well_id is set without plates.metadata: ids are made of experiment, plate and "
                "address; leave it out"
            )
    return problems + _pattern_problems(profiles)


def _pattern_problems(profiles: Mapping[str, Any]) -> list[str]:
    problems = []
    patterns = [("profiles.features.exclude", p) for p in profiles["features"]["exclude"]]
    if profiles["batch"]["pattern"]:
        patterns.append(("profiles.batch.pattern", profiles["batch"]["pattern"]))
    for key, pattern in patterns:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            problems.append(f"{key}: {pattern!r} is no regular expression: {error}")
            continue
        if key.endswith("batch.pattern") and groups != 1:
            problems.append(f"{key}: {pattern!r} must have one group in parentheses, the experiment; it has {groups}")
    return problems


def _check_together(config: Mapping[str, Any], where: str) -> None:
    """Refuse values that only together are wrong, before hours of work and not after."""
    plates, model, training = config["plates"], config["embed"]["model"], config["pretrain"]
    problems = []
    if config["embed"]["dna_channel"] not in plates["channels"]:
        problems.append(
            f"embed.dna_channel is {config['embed']['dna_channel']}, which is not among plates.channels "
            f"{plates['channels']}"
        )
    if plates["batch_key"] not in schema_names.WELL_COLUMNS:
        problems.append(
            f"plates.batch_key is {plates['batch_key']!r}; it must be an obs column: "
            f"{', '.join(schema_names.WELL_COLUMNS)}"
        )
    if plates["missing_channels"] == "available_channels" and (
        config["embed"]["features"] == "channelwise" or config["embed"]["channelwise"]
    ):
        problems.append(
            "plates.missing_channels is available_channels, but embed.features or embed.channelwise keeps the channels "
            "side by side, which has no place for a well that lacks one; use drop_well or a pooled X alone"
        )
    if config["embed"]["features"] == "channelwise" and config["embed"]["channelwise"]:
        problems.append(
            "embed.channelwise is set, but with embed.features channelwise X itself holds the channels side by side; "
            "leave embed.channelwise out, or set embed.features to pooled"
        )
    if model["dim"] % model["heads"] or model["dim"] % 4:
        problems.append(
            f"embed.model.dim is {model['dim']}; it must be a multiple of 4 and of heads ({model['heads']})"
        )
    if model["image_size"] % model["patch_size"]:
        problems.append(
            f"embed.model.image_size is {model['image_size']}; it must be a multiple of patch_size "
            f"({model['patch_size']})"
        )
    decoder = training["decoder"]
    if decoder["dim"] % decoder["heads"] or decoder["dim"] % 8:
        problems.append(
            f"pretrain.decoder.dim is {decoder['dim']}; it must be a multiple of 8 and of heads ({decoder['heads']})"
        )
    if training["warmup_steps"] >= training["steps"]:
        problems.append(
            f"pretrain.warmup_steps is {training['warmup_steps']}; it must be below steps ({training['steps']})"
        )
    if config["score"]["rotation_draws"] > config["disentangle"]["rotation_draws"]:
        problems.append(
            f"score.rotation_draws is {config['score']['rotation_draws']}, but disentangle.rotation_draws fits only "
            f"{config['disentangle']['rotation_draws']}"
        )
    known = config["known_biology"]
    if known["gene_positions"] and not known["gene_pairs"]:
        problems.append("known_biology.gene_positions is set without gene_pairs; name the pairs, or leave it out")
    if problems:
        raise ConfigError("\n".join(f"{where}: {problem}" for problem in problems))


def _check_contrasts(config: Mapping[str, Any], where: str) -> None:
    """Refuse rules of contrasts that the score stage would refuse hours later."""
    from phenoica.score.presets import parse  # their grammar is the score stage's; nothing else is asked of it

    try:
        parse(config["score"]["contrasts"])
    except ConfigError as error:
        raise ConfigError("\n".join(f"{where}: {line}" for line in str(error).splitlines())) from None


def load(source: str | os.PathLike) -> dict[str, Any]:
    """Read a YAML or JSON file, or JSON text (it starts with a brace), and resolve it."""
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return resolve(json.loads(source))
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"{path}: no such config file")
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    return resolve(value or {}, where=str(path))


def fingerprint(config: Mapping[str, Any], *sections: str) -> str:
    """Return a short hash of the package version, the seed and the named sections (all of them if none is named).

    It goes into `params: version=` of a rule, so that a change of what the rule depends on reruns it.
    """
    chosen = {k: config[k] for k in (sections or config)}
    return sha256_of_json({"version": __version__, "seed": config["seed"], **chosen})[:16]


@dataclass(frozen=True)
class RunPaths:
    """Where each file of a run is; the command line and the workflow both ask here.

    Attributes
    ----------
    root
        results/<run>.
    """

    root: Path

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RunPaths:
        """Return the paths of a resolved configuration."""
        return cls(Path(config["results"]) / config["run"])

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.root / "config.json"

    @property
    def demo(self) -> Path:
        """Folder of the demo plates."""
        return self.root / "demo"

    def demo_shards(self, n: int) -> list[Path]:
        """Return the `n` shards of the demo plates."""
        return [self.demo / "shards" / f"train-{i:05d}-of-{n:05d}.parquet" for i in range(n)]

    @property
    def demo_metadata(self) -> Path:
        """Metadata of the demo plates."""
        return self.demo / "metadata.csv"

    @property
    def demo_truth(self) -> Path:
        """True factors of the demo plates."""
        return self.demo / "truth.parquet"

    def plates(self, name: str) -> Path:
        """Return a file of the plates stage: wells.parquet, folds.csv, units.csv, design.csv, quarantine.csv."""
        return self.root / "plates" / name

    def part(self, unit: int | str) -> Path:
        """Return the embedded part of a shard."""
        return self.root / "embed" / "parts" / f"shard-{unit}.parquet"

    def part_quarantine(self, unit: int | str) -> Path:
        """Return the quarantine list of a shard."""
        return self.root / "embed" / "parts" / f"shard-{unit}.quarantine.csv"

    @property
    def pretrain_images(self) -> Path:
        """Folder of the rendered images for pre-training (source demo)."""
        return self.root / "pretrain" / "images"

    def pretrain(self, name: str) -> Path:
        """Return a file of pre-training: encoder.safetensors, log.csv, recipe.json."""
        return self.root / "pretrain" / "encoder" / name

    @property
    def embeddings(self) -> Path:
        """AnnData of the raw embedding."""
        return self.root / "embed" / "embeddings.h5ad"

    @property
    def quarantine(self) -> Path:
        """Every image and well that was left out."""
        return self.root / "embed" / "quarantine.csv"

    @property
    def qc_wells(self) -> Path:
        """Flags of each well."""
        return self.root / "qc" / "wells.parquet"

    @property
    def qc_plates(self) -> Path:
        """Statistics and flags of each plate."""
        return self.root / "qc" / "plates.parquet"

    def fold(self, fold: int | str) -> Path:
        """Return the folder of the states of a fold."""
        return self.root / "disentangle" / f"fold-{fold}"

    @property
    def exploration(self) -> Path:
        """Folder of the states of the exploration fit."""
        return self.root / "disentangle" / "exploration"

    @property
    def disentangled(self) -> Path:
        """AnnData with the views of the exploration fit."""
        return self.root / "disentangle" / "disentangled.h5ad"

    def score_fold(self, fold: int | str, kind: str = "parquet") -> Path:
        """Return the scores (parquet) or the training-side decisions (json) of a fold."""
        return self.root / "score" / f"fold-{fold}.{kind}"

    def score_views(self, fold: int | str, kind: str = "parquet") -> Path:
        """Return the scores of a fold's views as wholes (parquet), or what their training side decided (json)."""
        return self.root / "score" / f"views-{fold}.{kind}"

    def deletion_fold(self, fold: int | str) -> Path:
        """Return the deletion curves of a fold."""
        return self.root / "score" / f"deletion-{fold}.parquet"

    @property
    def deletion(self) -> Path:
        """The deletion curves of all folds, with their areas."""
        return self.root / "score" / "deletion.parquet"

    @property
    def consensus(self) -> Path:
        """AnnData of guides and perturbations."""
        return self.root / "score" / "consensus.h5ad"

    @property
    def guide_concordance(self) -> Path:
        """Whether guides of one gene agree, a row a view and gene (csv)."""
        return self.root / "score" / "guide_concordance.csv"

    @property
    def known_biology(self) -> Path:
        """What is found again of known biology (csv)."""
        return self.root / "score" / "known_biology.csv"

    def scib(self, view: str) -> Path:
        """Return the metrics of scib for a view (csv)."""
        return self.root / "score" / f"scib-{view}.csv"

    def scores(self, kind: str) -> Path:
        """Return the score table as parquet, csv or (short and printable) txt."""
        return self.root / "score" / f"scores.{kind}"

    def score_file(self, name: str) -> Path:
        """Return another file of the score stage: hits.csv, contrasts.csv."""
        return self.root / "score" / name

    def plate_pages(self, experiment: str) -> Path:
        """Return the folder of the plate pages of an experiment."""
        return self.root / "report" / "plates" / experiment

    def report(self, name: str) -> Path:
        """Return a file of the report folder."""
        return self.root / "report" / name

    @property
    def index(self) -> Path:
        """The run index page."""
        return self.root / "index.html"
