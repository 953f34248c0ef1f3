"""The rules of contrasts: what `score.contrasts` of a configuration says, checked and with every default filled.

Names of presets and entries of the user's own come in; rules go out. The presets are plain data beside this module
(`contrast_presets.yaml`) and go through the same parser. The vocabulary (sameby, diffby) is copairs'.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from phenoica import schema
from phenoica.errors import ConfigError

Match = tuple[tuple[str, tuple[str | float, ...]], ...]

REFERENCE_CONTROLS: Match = ((schema.CONTROL_ROLE, (schema.REFERENCE,)),)
RESERVED = ("all_vs_reference", "l2_control", "macro")  # names that other rows of the table have
_NUMERIC = (schema.CONCENTRATION, schema.ROW, schema.COLUMN, schema.EDGE_DISTANCE)
_ALLOWED = {schema.CONTROL: schema.CONTROL_VALUES, schema.CONTROL_ROLE: schema.CONTROL_ROLE_VALUES}
_KEYS = (
    "name", "case", "reference", "each", "sameby", "diffby", "batch_key", "min_experiments", "min_values", "min_wells",
    "max_wells", "title",
)  # fmt: skip
_LONGEST_TITLE = 100  # characters; it heads columns of tables


@dataclass(frozen=True)
class Rule:
    """One family of comparisons; `contrast_presets.yaml` says what each key means.

    Attributes
    ----------
    name
        The table of scores calls its rows so.
    case, reference
        Pairs of an obs column and the values it may have, all of which must hold.
    each, sameby, diffby
        obs columns.
    batch_key
        obs column, or None for `plates.batch_key`.
    min_experiments, min_values
        At least 1.
    min_wells, max_wells
        Or None: `score.min_wells`, and no limit.
    title
        What pages call it; None where it has none (see `titles`).
    """

    name: str
    case: Match
    reference: Match
    each: tuple[str, ...] = ()
    sameby: tuple[str, ...] = ()
    diffby: tuple[str, ...] = ()
    batch_key: str | None = None
    min_experiments: int = 1
    min_values: int = 1
    min_wells: int | None = None
    max_wells: int | None = None
    title: str | None = None

    @property
    def within_experiments_only(self) -> bool:
        """Whether the batch is finer than the experiment, so that plates inside an experiment are held out."""
        return self.batch_key not in (None, schema.EXPERIMENT)

    @property
    def is_plain(self) -> bool:
        """Whether all wells of a perturbation are compared with reference controls over experiments."""
        return self.reference == REFERENCE_CONTROLS and not self.diffby and not self.within_experiments_only


@functools.cache
def presets() -> dict[str, list[Any]]:
    """Return the presets as they stand in `contrast_presets.yaml`: name -> entries."""
    text = resources.files("phenoica.score").joinpath("contrast_presets.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def parse(entries: Sequence[str | Mapping[str, Any]]) -> tuple[Rule, ...]:
    """Return the rules of `score.contrasts`, in the given order.

    Parameters
    ----------
    entries
        Names of presets, and mappings with the keys of `contrast_presets.yaml`.

    Raises
    ------
    ConfigError
        Listing everything that is wrong, each with the contrast and the key.
    """
    problems: list[str] = []
    rules = _rules(entries, (), problems)
    names = [rule.name for rule in rules]
    for name in sorted({n for n in names if names.count(n) > 1}):
        problems.append(f"contrast {name!r}: key 'name': {names.count(name)} contrasts are called so; rename one")
    if not entries:
        problems.append("the list is empty; name a preset: " + ", ".join(presets()))
    if problems:
        raise ConfigError("\n".join(f"score.contrasts: {problem}" for problem in problems))
    return tuple(rules)


def titles(entries: Sequence[str | Mapping[str, Any]]) -> dict[str, str]:
    """Return what pages call each contrast of `score.contrasts`, by name, in the given order.

    That is its `title`, or what it compares in the words of its definition. Of two that would be called alike, each is
    followed by its name.

    Raises
    ------
    ConfigError
        As `parse`.
    """
    found = {rule.name: rule.title or described(rule) for rule in parse(entries)}
    texts = list(found.values())
    return {name: text if texts.count(text) == 1 else f"{text} ({name})" for name, text in found.items()}


def described(rule: Rule) -> str:
    """Return what a rule compares, in the words of its definition."""

    def wells(match: Match) -> str:
        conditions = (f"{_spaced(column)} {' or '.join(map(_number, values))}" for column, values in match)
        return f"wells with {' and '.join(conditions)}"

    parts = [f"{wells(rule.case)} against {wells(rule.reference)}"]
    for columns, words in ((rule.each, "each"), (rule.sameby, "of the same"), (rule.diffby, "tested on another")):
        parts += [f"{words} {' and '.join(map(_spaced, columns))}"] if columns else []
    parts += [f"held out by {_spaced(rule.batch_key)} within experiments"] if rule.within_experiments_only else []
    text = ", ".join(parts)
    return text[0].upper() + text[1:]


def _spaced(column: str | None) -> str:
    return str(column).replace("_", " ")


def _number(value: str | float) -> str:
    return f"{value:g}" if isinstance(value, float) else value


def _rules(entries: Sequence[Any], inside: tuple[str, ...], problems: list[str]) -> list[Rule]:
    rules = []
    for number, entry in enumerate(entries):
        if isinstance(entry, str):
            if entry not in presets():
                near = difflib.get_close_matches(entry, presets(), n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known presets: {', '.join(presets())}"
                problems.append(f"{entry!r} is no preset; {hint}")
            elif entry in inside:
                problems.append(f"preset {entry!r} contains itself")
            else:
                rules += _rules(presets()[entry], (*inside, entry), problems)
        elif isinstance(entry, Mapping):
            rule = _rule(entry, number, problems)
            rules += [] if rule is None else [rule]
        else:
            problems.append(f"entry {number} is {entry!r}; give the name of a preset, or keys and values")
    return rules


class _Reader:
    """Reads one entry; everything wrong goes to `problems` with the contrast and the key."""

    def __init__(self, entry: Mapping[str, Any], where: str, problems: list[str]):
        self.entry, self.where, self.problems = entry, where, problems

    def wrong(self, key: str, what: str) -> None:
        self.problems.append(f"{self.where}: key {key!r}: {what}")

    def unknown_keys(self) -> None:
        for key in self.entry:
            if key not in _KEYS:
                near = difflib.get_close_matches(str(key), _KEYS, n=1)
                self.wrong(str(key), f"unknown; did you mean {near[0]!r}?" if near else
                           f"unknown; known keys are {', '.join(_KEYS)}")  # fmt: skip

    def match(self, key: str) -> Match:
        value = self.entry.get(key)
        if not isinstance(value, Mapping) or not value:
            self.wrong(key, f"must be obs columns with their values, such as {{control: none}}, not {value!r}")
            return ()
        return tuple(
            (column, self._values(key, column, wanted))
            for column, wanted in value.items()
            if self._is_column(key, column)
        )

    def _is_column(self, key: str, column: Any) -> bool:
        if column in schema.WELL_COLUMNS:
            return True
        near = difflib.get_close_matches(str(column), schema.WELL_COLUMNS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(schema.WELL_COLUMNS)}"
        self.wrong(key, f"{column!r} is no obs column; {hint}")
        return False

    def _values(self, key: str, column: str, wanted: Any) -> tuple[str | float, ...]:
        values = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted]
        kind = (int, float) if column in _NUMERIC else (str,)
        if not values or any(isinstance(v, bool) or not isinstance(v, kind) for v in values):
            self.wrong(key, f"{column} must be {'a number' if column in _NUMERIC else 'text'} or a list of it, "
                       f"not {wanted!r}; a number or a word such as yes needs quotes to be text")  # fmt: skip
            return ()
        strange = [v for v in values if v not in _ALLOWED.get(column, values)]
        if strange:
            self.wrong(key, f"{column} is never {strange[0]!r}; it is one of {', '.join(_ALLOWED[column])}")
        return tuple(float(v) if column in _NUMERIC else v for v in values)

    def columns(self, key: str) -> tuple[str, ...]:
        value = self.entry.get(key)
        names = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(names, (list, tuple)):
            self.wrong(key, f"must be an obs column or a list of them, not {value!r}")
            return ()
        found = tuple(name for name in names if self._is_column(key, name))
        if len(set(found)) < len(found):
            self.wrong(key, f"names a column twice: {', '.join(found)}")
        return found

    def number(self, key: str, default: int | None) -> int | None:
        value = self.entry.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.wrong(key, f"must be a whole number of at least 1, not {value!r}")
            return default
        return value

    def words(self, key: str) -> str | None:
        value = self.entry.get(key)
        if value is None:
            return None
        text = value.strip() if isinstance(value, str) else ""
        if not text or not text.isprintable() or len(text) > _LONGEST_TITLE:
            self.wrong(key, f"must be one line of text of at most {_LONGEST_TITLE} characters, not {value!r}")
            return None
        return text


def _rule(entry: Mapping[str, Any], number: int, problems: list[str]) -> Rule | None:
    name, before = entry.get("name"), len(problems)
    reader = _Reader(entry, f"contrast {name!r}" if isinstance(name, str) else f"entry {number}", problems)
    reader.unknown_keys()
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name) or name in RESERVED:
        reader.wrong("name", f"must be a word of letters, digits, _ and -, none of {', '.join(RESERVED)}; not {name!r}")
    batch = reader.columns("batch_key")
    if len(batch) > 1 or isinstance(entry.get("batch_key"), (list, tuple)):
        reader.wrong("batch_key", "must be one obs column")
    rule = Rule(
        str(name), reader.match("case"), reader.match("reference"), reader.columns("each"), reader.columns("sameby"),
        reader.columns("diffby"), batch[0] if batch else None, reader.number("min_experiments", 1) or 1,
        reader.number("min_values", 1) or 1, reader.number("min_wells", None), reader.number("max_wells", None),
        reader.words("title"),
    )  # fmt: skip
    _check_together(rule, reader)
    return rule if len(problems) == before else None


def _check_together(rule: Rule, reader: _Reader) -> None:
    """Refuse keys that are right alone and wrong together."""
    fixed = [column for column in rule.diffby if column in rule.each]
    if fixed:
        reader.wrong("diffby", f"{fixed[0]} is also in each, so all cases of a comparison agree on it")
    if rule.diffby and rule.within_experiments_only:
        reader.wrong("diffby", "cannot be held out together with a batch_key inside experiments")
    if rule.min_values > 1 and not rule.diffby:
        reader.wrong("min_values", "counts the values of diffby, which is not set")
    if rule.min_wells is not None and rule.max_wells is not None and rule.max_wells < rule.min_wells:
        reader.wrong("max_wells", f"is {rule.max_wells}, below min_wells ({rule.min_wells})")
