"""What all pages share: templates, the plotly script, relative links, numbers as text.

Pages are static HTML with their style inside; nothing is fetched from a network. jinja2 escapes every text
that comes from data, and JSON in a page cannot close its script element.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from phenoica import __version__, files, schema
from phenoica.errors import SchemaError

if TYPE_CHECKING:
    import jinja2

SAW_TEST_IMAGES = {
    "yes": "The encoder was trained on images of these experiments: “held out” holds for views and probes, "
    "not for the encoder.",
    "no": "The encoder was not trained on images of these experiments.",
    "unknown": "Whether the encoder was trained on images of these experiments is not known.",
}


@functools.cache
def environment() -> jinja2.Environment:
    """Return the jinja2 environment of the packaged templates, with escaping on."""
    import jinja2

    result = jinja2.Environment(
        loader=jinja2.PackageLoader("phenoica.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    result.filters["number"] = number
    result.filters["fixed"] = fixed
    result.filters["count"] = counted
    return result


def write_page(template: str, out_path: str | os.PathLike, **values: Any) -> None:
    """Render a template and write it atomically."""
    text = environment().get_template(template).render(version=__version__, **values)
    files.write_text(out_path, text)


def plotly_script(out_path: str | os.PathLike) -> None:
    """Copy the script that plotly packages; the plate pages of a run share this one file."""
    from plotly.offline import get_plotlyjs

    files.write_text(out_path, get_plotlyjs())


def script_json(value: Any) -> str:
    """Return JSON that is safe inside a script element; NaN is refused."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for character, code in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026"), ("\u2028", "\\u2028")):
        text = text.replace(character, code)
    return text.replace("\u2029", "\\u2029")


def link(target: str | os.PathLike, page: str | os.PathLike) -> str:
    """Return the relative, percent-encoded link from a page to a file."""
    return quote(Path(os.path.relpath(target, Path(page).parent)).as_posix())


def file_name(text: str, what: str) -> str:
    """Return a label as the name of a file.

    Raises
    ------
    SchemaError
        If it is no safe name: it would leave the report folder.
    """
    if not files.is_file_name(text):
        raise SchemaError(f"{what} {text!r} cannot name a page; rename it in the metadata (no slash, no leading dot)")
    return text


def number(value: Any, digits: int = 3) -> str:
    """Return a number with `digits` significant digits, whole numbers as they are, and an en dash for none."""
    if is_missing(value):
        return "–"
    value = float(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    size = abs(value)
    if size >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if size >= 1e-4 else f"{value:.1e}"


def fixed(value: Any, decimals: int = 2, sign: bool = False) -> str:
    """Return a number with a fixed count of decimals and a true minus sign, and an en dash for none."""
    if is_missing(value):
        return "–"
    text = f"{float(value):{'+' if sign else ''}.{decimals}f}"
    if not float(text):
        text = text.lstrip("+-")
    return text.replace("-", "−")


def is_missing(value: Any) -> bool:
    """Return whether a cell of a table holds no number: None, pd.NA or NaN."""
    import pandas as pd

    return value is None or value is pd.NA or value != value


def counted(n: int, singular: str, plural: str | None = None) -> str:
    """Return a number with its noun in the right form: 1 well, 2 wells."""
    return f"{n:,} {singular if n == 1 else plural or singular + 's'}"


def encoder_sentences(uns: Mapping[str, Any]) -> dict[str, str]:
    """Return what every page says of the encoder and the licences, from `uns["phenoica"]`.

    Raises
    ------
    SchemaError
        If an entry is missing.
    """
    missing = [k for k in ("checkpoint", "licences", "encoder_saw_test_images") if k not in uns]
    if missing:
        raise SchemaError(f"uns[{schema.UNS!r}] lacks {', '.join(missing)}; rerun the embed stage")
    saw = str(uns["encoder_saw_test_images"])
    if uns.get("source") == "profiles":
        known = {"yes": "What made them was trained on images of these experiments: “held out” holds for views and "
                 "probes only.", "no": "What made them was not trained on images of these experiments."}  # fmt: skip
        sentence = known.get(saw, "Whether what made them was trained on images of these experiments is not known.")
        return {"encoder": f"Profiles: {uns['checkpoint']}. {sentence}", "licences": f"Licences: {uns['licences']}."}
    return {
        "encoder": f"Encoder: {uns['checkpoint']}. {SAW_TEST_IMAGES.get(saw, saw)}",
        "licences": f"Licences: {uns['licences']}.",
    }


def read_uns(h5ad: str | os.PathLike) -> dict[str, Any]:
    """Return `uns["phenoica"]` of an h5ad file without reading its matrix.

    Raises
    ------
    SchemaError
        If the file was not written by phenoica.
    """
    import anndata

    adata = anndata.read_h5ad(h5ad, backed="r")
    try:
        if schema.UNS not in adata.uns:
            raise SchemaError(f"{h5ad}: uns[{schema.UNS!r}] is missing; the file was not written by phenoica")
        return dict(adata.uns[schema.UNS])
    finally:
        adata.file.close()


def natural_key(text: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts plate 2 before plate 10."""
    import re

    parts: Sequence[str] = re.split(r"(\d+)", str(text))
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in parts if p]
