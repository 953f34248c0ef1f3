"""What the rows of the score tables are, in the words of the page: views, baselines and nulls.

Names of rows come in, the sentence that explains each goes out.
"""

from __future__ import annotations

from collections.abc import Sequence

from phenoica.score import baselines
from phenoica.score.rows import ROTATION

WORDS = {
    "raw": "The encoder's numbers (or the profile), each feature standardised, and nothing more.",
    "mad": "Each feature minus its median, divided by its median absolute deviation.",
    "spherize": "Features made uncorrelated and equally wide among control wells.",
    "pca": "Principal components: the directions in which wells differ most, scaled alike.",
    ROTATION: "Null. pca turned at random: it carries all that pca, varimax and ica carry, in arbitrary axes. "
    "ica must beat it to show that its axes matter.",
    "varimax": "pca turned so that each component draws on few features.",
    "ica": "pca turned so that components are as independent as can be: the method that is on trial here.",
    "centerscale": "Each feature centred and scaled on the control wells of its own batch.",
    "pca_cs": "Principal components of control wells, then centred and scaled on the controls of each batch.",
    "tvn": "Typical variation normalisation: the variation that controls show is scaled away, and batches are "
    "aligned on their controls.",
    "combat": "ComBat: batches aligned with all wells in view.",
    "harmony": "Harmony: batches aligned with all wells in view.",
    baselines.POSITION_LINEAR: "The same probe on plate row and column alone.",
    baselines.POSITION_TREES: "Boosted trees on row, column and distance to the edge: what the place of a well "
    "tells, however it does.",
    baselines.CELL_COUNT: "The same probe on the number of nuclei alone.",
    baselines.TRUE_CELL_COUNT: "The same probe on the true number of cells, where it is known.",
    baselines.IMAGE_MEASURES: "The same probe on plain image statistics (intensity, focus, saturation). A view that "
    "does not beat it has shown nothing that needs an encoder.",
    baselines.RANDOM_ENCODER: "The same images through a network of the encoder's size whose weights are random. "
    "What raw has beyond it is what training added.",
    baselines.PERMUTED: "Null. The labels of wells are shuffled within plates: it scatters around 0.5.",
}


def explained(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return each row's name with the sentence that says what it is; a chain ("centerscale + ica") is spelled out.

    A view that has no words here (one that a user has added) stands without.
    """
    result = []
    for name in names:
        parts = [part.strip() for part in name.split("+")]
        if len(parts) > 1:
            result.append((name, f"First {parts[0]}, then {', then '.join(parts[1:])}."))
        elif name in WORDS:
            result.append((name, WORDS[name]))
    return result
