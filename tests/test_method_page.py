"""docs/method.md lists the metrics of the code, no more and no fewer."""

import re
from pathlib import Path

from phenoica.score import names, rows

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/method.md").read_text(encoding="utf-8")


def listed():
    section = PAGE.partition("## Every metric")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE)


def test_page_and_code_list_the_same_metrics():
    found = listed()
    assert len(found) == len(set(found))
    assert set(found) == set(names.ALL)
    assert names.CONCENTRATION == rows.CONCENTRATION and names.L2_CONTROL == rows.L2_METRICS


def test_names_with_numbers_are_found_by_their_pattern():
    assert names.pattern(names.best_components(4)) == "auroc_best_<k>"
    assert names.pattern(names.non_zero_at(0.05)) == "non_zero_at_<fraction>"
    assert names.pattern("gini") == "gini"


def test_every_key_that_the_page_names_is_one_of_the_configuration():
    from phenoica.config import resolve

    config = resolve({"run": "x", "source": "demo"})
    sections = "|".join(key for key, value in config.items() if isinstance(value, dict))
    for key in re.findall(rf"`((?:{sections})\.[a-z_.]+)`", PAGE):
        value = config
        for part in key.rstrip(".").split("."):
            assert part in value, key
            value = value[part]


def test_the_readme_links_the_page():
    assert "(docs/method.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
