"""Plate pages of made wells: what they must list, escape and link, read back with an HTML parser."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import anndata
import numpy as np
import pandas as pd
import pytest

from phenoica import config as configuration
from phenoica import schema
from phenoica.errors import SchemaError
from phenoica.plates.address import format_address
from phenoica.qc.run import run_qc
from phenoica.report import pages, plate_pages

CONFIG = configuration.resolve({"run": "test", "source": "demo"})
EVIL = "<script>alert('x')</script> & co"
SENTENCE = "random weights, seed 0 (not a trained model)"


class Page(HTMLParser):
    """Links, tables, ids and texts of a page; text inside script and style is kept apart."""

    def __init__(self, text):
        super().__init__()
        self.links, self.scripts, self.rows, self.ids, self.text = [], [], [], {}, ""
        self._stack, self._cell = [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.links += [attributes[k] for k in ("href", "src") if attributes.get(k)]
        if "id" in attributes:
            self.ids[attributes["id"]] = attributes
        if tag in ("script", "style"):
            self._stack.append((attributes.get("id"), []))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._cell = []

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self.scripts.append((self._stack[-1][0], "".join(self._stack.pop()[1])))
        if tag in ("td", "th") and self._cell is not None:
            self.rows[-1].append(" ".join("".join(self._cell).split()))
            self._cell = None

    def handle_data(self, data):
        if self._stack:
            self._stack[-1][1].append(data)
            return
        self.text += data
        if self._cell is not None:
            self._cell.append(data)

    def data(self, name):
        return json.loads(dict(self.scripts)[name])


def make_embeddings(path, experiment="exp 1", n_plates=3, seed=0):
    """Write plates of 70 wells; the first has one well of each acquisition failure and one toxic treatment."""
    rng = np.random.default_rng(seed)
    rows = []
    for plate in range(1, n_plates + 1):
        for k, place in enumerate(rng.permutation(32 * 48)[:70]):
            row, column = place // 48 + 1, place % 48 + 1
            label, control, role = f"GENE{k % 8}", "none", "none"
            if k < 28:
                label, control = ("EMPTY_control", "negative") if k < 16 else ("PLK1", "positive")
                role = ("fit", "reference")[k % 2] if k < 16 else "none"
            where = format_address(row, column)
            rows.append(
                (f"{experiment}_{plate}_{where}", experiment, str(plate), f"{experiment}_{plate}", where, row, column)
                + (min(row - 1, 32 - row, column - 1, 48 - column), label, f"{label}_guide_{k % 4}", "CRISPR")
                + (np.nan, "", "HUVEC", control, role)
            )
    obs = pd.DataFrame(rows, columns=list(schema.WELL_COLUMNS)).set_index(schema.WELL_ID)
    n = len(obs)
    obs[schema.N_TILES] = 4
    obs[schema.CELL_COUNT] = np.round(rng.normal(60, 5, n))
    centre = {"mean": 40, "sd": 20, "saturated": 0.001, "empty": 0.02, "focus": -2.4}
    measures = pd.DataFrame(
        {f"c{c}_{m}": v * (1 + 0.04 * rng.standard_normal(n)) for c in (1, 3) for m, v in centre.items()}, obs.index
    )
    obs.iloc[30, obs.columns.get_loc(schema.TREATMENT)] = EVIL
    obs.iloc[30, obs.columns.get_loc(schema.CELL_COUNT)] = 9.0
    measures.iloc[31, [measures.columns.get_loc(f"c{c}_focus") for c in (1, 3)]] = -5.0
    measures.iloc[32, measures.columns.get_loc("c3_saturated")] = 0.2
    obs.iloc[33, obs.columns.get_loc(schema.N_TILES)] = 3
    measures.iloc[34, measures.columns.get_loc("c1_mean")] = np.nan
    adata = anndata.AnnData(rng.standard_normal((n, 8)).astype(np.float32), obs=obs)
    adata.obsm[schema.IMAGE_MEASURES] = measures
    adata.uns[schema.UNS] = dict.fromkeys(schema.UNS_KEYS, "x") | {
        "checkpoint": SENTENCE,
        "licences": "images: none",
        "encoder_saw_test_images": "no",
    }
    adata.write_h5ad(path)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    make_embeddings(root / "embeddings.h5ad")
    run_qc(root / "embeddings.h5ad", root / "wells.parquet", root / "plates.parquet", CONFIG)
    pages.plotly_script(root / "report" / "plotly.min.js")
    plate_pages.write_experiment(
        root / "embeddings.h5ad",
        root / "wells.parquet",
        root / "plates.parquet",
        "exp 1",
        root / "report" / "plates" / "exp 1",
        root / "report" / "plotly.min.js",
    )
    plate_pages.write_index(
        root / "plates.parquet", root / "embeddings.h5ad", root / "report" / "plates" / "index.html"
    )
    return root


def read(run_dir, name="exp 1/1.html"):
    return (run_dir / "report" / "plates" / name).read_text(encoding="utf-8")


def test_every_flagged_well_is_listed_with_a_reason_and_no_other(run_dir):
    wells = pd.read_parquet(run_dir / "wells.parquet").set_index(schema.WELL_ID)
    obs = anndata.read_h5ad(run_dir / "embeddings.h5ad").obs
    for plate in ("1", "2", "3"):
        flagged = wells[(wells[schema.QC_ACQUISITION] + wells[schema.QC_PHENOTYPE]) != ""]
        on_plate = obs.loc[flagged.index][obs.loc[flagged.index, schema.PLATE] == plate]
        rows = [r for r in Page(read(run_dir, f"exp 1/{plate}.html")).rows if r and r[0] != "Well"]
        assert sorted(r[0] for r in rows) == sorted(on_plate[schema.ADDRESS])
        assert all(r[6] for r in rows)


def test_reasons_carry_the_numbers_of_the_well(run_dir):
    obs = anndata.read_h5ad(run_dir / "embeddings.h5ad").obs
    why = {r[0]: r[6] for r in Page(read(run_dir)).rows if r}
    address = [str(a) for a in obs[schema.ADDRESS].iloc[30:35]]
    assert why[address[0]].startswith("fewer cells than the control wells of this plate (9; their median is")
    assert "out of focus" in why[address[1]]
    assert "20 % of the pixels of channel 3" in why[address[2]]
    assert why[address[3]] == "incomplete: 3 of 4 tiles"
    assert "images or measures of this well are missing" in why[address[4]]


def test_hover_data_of_every_well_and_measure(run_dir):
    data = Page(read(run_dir)).data("plate-data")
    obs = anndata.read_h5ad(run_dir / "embeddings.h5ad").obs
    first = obs[obs[schema.PLATE] == "1"]
    assert (data["columns"], len(data["row_names"]), data["row_names"][-1]) == (48, 32, "AF")
    assert [(w["row"], w["column"]) for w in data["wells"]] == list(zip(first["row"], first["column"], strict=True))
    for well, (_, row) in zip(data["wells"], first.iterrows(), strict=True):
        assert row[schema.ADDRESS] in well["hover"] and row[schema.PERTURBATION] in well["hover"]
    maps = {m["id"]: m["measures"] for m in data["maps"]}
    assert maps["map-count"][0]["values"] == list(first[schema.CELL_COUNT])
    assert [m["label"] for m in maps["map-focus"]] == ["all channels", "channel 1", "channel 3"]
    assert maps["map-intensity"][0]["values"][34] is None
    assert maps["map-intensity"][0]["text"][34] == "not measured"


def test_a_script_in_a_treatment_name_stays_text(run_dir):
    text = read(run_dir)
    assert "<script>alert" not in text and "</script> & co" not in text
    page = Page(text)
    assert any(EVIL in row for row in page.rows)  # shown as it is written in the metadata
    hover = page.data("plate-data")["wells"][30]["hover"]
    assert "&lt;script&gt;" in hover and "<script" not in hover


def test_pages_ask_nothing_of_the_network_and_their_links_exist(run_dir):
    for name in ("exp 1/1.html", "exp 1/2.html", "exp 1/3.html", "index.html"):
        page = Page(read(run_dir, name))
        assert not [link for link in page.links if re.match(r"(https?:)?//", link)]
        assert "url(" not in read(run_dir, name).replace("url(#", "") and "@import" not in read(run_dir, name)
        for link in set(page.links) - {"data:,"}:
            target = (run_dir / "report" / "plates" / name).parent / link.replace("%20", " ").split("#")[0]
            assert target.exists() or target.resolve() == (run_dir / "index.html").resolve(), link


def test_navigation_follows_the_plates(run_dir):
    links = [Page(read(run_dir, f"exp 1/{p}.html")).links for p in (1, 2, 3)]
    assert "2.html" in " ".join(links[0]) and "1.html" in " ".join(links[1]) and "3.html" in " ".join(links[1])
    assert not [link for link in links[2] if link.endswith("4.html")]


def test_every_page_says_which_encoder_and_licence(run_dir):
    for name in ("exp 1/1.html", "index.html"):
        text = Page(read(run_dir, name)).text
        assert SENTENCE in text and "images: none" in text


def test_index_lists_every_plate_once_with_its_numbers(run_dir):
    plates = pd.read_parquet(run_dir / "plates.parquet")
    page = Page(read(run_dir, "index.html"))
    rows = [r for r in page.rows if r and r[0] != "Experiment" and not r[0].startswith("Experiment")]
    assert [(r[0], r[1], r[2]) for r in rows] == [("exp 1", p, "70") for p in plates[schema.PLATE]]
    assert [int(r[7]) for r in rows] == list(plates["n_acquisition"])


def test_plates_are_in_natural_order():
    plates = pd.DataFrame({schema.EXPERIMENT: ["b", "a", "a", "a"], schema.PLATE: ["1", "10", "2", "1"]})
    ordered = plate_pages.sorted_plates(plates)
    assert list(ordered[schema.EXPERIMENT] + ordered[schema.PLATE]) == ["a1", "a2", "a10", "b1"]


def test_an_experiment_without_a_well_says_so_and_an_unsafe_name_is_refused(run_dir):
    arguments = [run_dir / name for name in ("embeddings.h5ad", "wells.parquet", "plates.parquet")]
    plate_pages.write_experiment(*arguments, "exp 9", run_dir / "x", run_dir / "p.js")
    assert [p.name for p in (run_dir / "x").iterdir()] == ["index.html"]
    assert "every well of this experiment is quarantined" in (run_dir / "x/index.html").read_text()
    with pytest.raises(SchemaError, match="cannot name a page"):
        plate_pages.write_experiment(*arguments, "../up", run_dir / "x", run_dir / "p.js")


def test_plate_flags_are_told_in_words():
    row = {"flags": "plate_focus;dispenser", "focus_shift": -7.25, "blocked_columns": "17"}
    focus, dispenser = plate_pages.plate_sentences(row)
    assert "blurrier" in focus and "7.2" in focus
    assert "dispensed in column 17:" in dispenser


def test_numbers_and_plurals():
    assert [pages.number(v) for v in (12.0, 0.12345, 1234.5, None, pd.NA)] == ["12", "0.123", "1,234", "–", "–"]
    assert [pages.fixed(v) for v in (-0.001, -1.5, float("nan"))] == ["0.00", "−1.50", "–"]
    assert [pages.counted(n, "well has", "wells have") for n in (0, 1, 2)] == [
        "0 wells have",
        "1 well has",
        "2 wells have",
    ]


def test_json_cannot_close_its_script_element():
    text = pages.script_json({"a": "</script><!--\u2028"})
    assert "<" not in text and "\u2028" not in text
    assert json.loads(text) == {"a": "</script><!--\u2028"}
    with pytest.raises(ValueError):
        pages.script_json(float("nan"))


def test_static_figure_is_one_reproducible_svg(run_dir, tmp_path):
    plate_pages.write_figure(run_dir / "plates.parquet", tmp_path / "a.svg")
    plate_pages.write_figure(run_dir / "plates.parquet", tmp_path / "b.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert text.count("<svg") == 1 and "aria-label" in text and 'href="http' not in text


def chromium():
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if found is None:
        pytest.skip("NO CHROMIUM: the plate page was not opened in a browser; install chromium to run this test")
    return found


def test_plate_page_in_a_browser(run_dir):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1366, "height": 900})
        problems, requests = [], []
        page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: problems.append(str(e)))
        page.on("request", lambda r: requests.append(r.url))
        page.goto((run_dir / "report" / "plates" / "exp 1" / "1.html").as_uri())
        page.wait_for_selector("#map-intensity .hm image")
        assert page.locator(".hm image").count() == 3
        box = page.locator("#map-count .hm image").bounding_box()
        assert box["width"] > 700 and box["height"] > 400
        before = page.evaluate("document.querySelector('#map-focus .hm image').href.baseVal")
        page.select_option("#map-focus-select", label="channel 3")
        page.wait_for_function("b => document.querySelector('#map-focus .hm image').href.baseVal !== b", arg=before)
        well = page.evaluate("JSON.parse(document.getElementById('plate-data').textContent).wells[30]")
        x = box["x"] + box["width"] * (well["column"] - 0.5) / 48
        page.mouse.move(x, box["y"] + box["height"] * (well["row"] - 0.5) / 32)
        page.wait_for_selector("#map-count .hoverlayer .hovertext")
        shown = page.locator("#map-count .hoverlayer").text_content()
        assert "GENE" in shown and "<script>alert" in shown and "cells: 9" in shown
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert not problems
        assert not [url for url in requests if not url.startswith(("file:", "data:", "blob:"))]
        browser.close()


def test_plate_pages_load_no_torch():
    code = "import sys, phenoica.report.plate_pages; assert not {'torch', 'scanpy', 'plotly'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
