"""Image measures of one six-channel 512 px well, against plain numpy percentiles on the same images.

Nuclei of 10, 28 and 40 px, since counting works on images that are binned by the size of a nucleus. Both are timed in
turn in one run, so that the ratio holds when the machine's speed drifts, in time of this thread: a busy machine adds
little. The last line is one JSON object: `measures_ms_per_well` (of the slowest case), `plain_ms_per_well`, `speedup`
(medians over wells) and `by_diameter_px`.
"""

from __future__ import annotations

import json
import time

import numpy as np

from phenoica.embed.image_measures import measure

CHANNELS = [1, 2, 3, 4, 5, 6]
DIAMETERS_PX = (10, 28, 40)
WELLS = 15


def well(seed: int, diameter: int = 28, size: int = 512) -> np.ndarray:
    """Return uint8 (6, size, size): discs that cover about a seventh of a noisy background."""
    random = np.random.default_rng(seed)
    image = random.normal(12, 4, (6, size, size))
    y, x = np.mgrid[:diameter, :diameter] - (diameter - 1) / 2
    disc = 90 * (np.hypot(y, x) < diameter / 2)
    for top, left in random.integers(0, size - diameter, (int(0.19 * size**2 / diameter**2), 2)):
        image[:, top : top + diameter, left : left + diameter] += disc
    return np.clip(image, 0, 255).astype(np.uint8)


def plain(images: np.ndarray) -> list[np.ndarray]:
    """Return mean, sd and percentiles with numpy's own functions; no focus and no count."""
    return [np.concatenate([[c.mean(), c.std()], np.percentile(c, [1, 5, 25, 50, 75, 95, 99])]) for c in images]


def milliseconds(diameter: int) -> tuple[float, float]:
    """Time both on the same wells, in turn; return the median of each."""
    ours, theirs = [], []
    for seed in range(WELLS):
        images = well(seed, diameter)
        start = time.thread_time()
        measure(images, CHANNELS, dna_channel=1, nucleus_diameter_px=diameter)
        middle = time.thread_time()
        plain(images)
        ours.append(middle - start)
        theirs.append(time.thread_time() - middle)
    return tuple(1000 * float(np.median(times[2:])) for times in (ours, theirs))


def main() -> None:
    """Print a line a nuclear diameter, then the JSON."""
    cases = {diameter: milliseconds(diameter) for diameter in DIAMETERS_PX}
    for diameter, (ours, theirs) in cases.items():
        print(f"{diameter} px nuclei: {ours:.1f} ms a well, focus and count too; numpy percentiles alone: {theirs:.1f}")
    slowest, plain_ms = max(cases.values())
    print(
        json.dumps({
            "measures_ms_per_well": slowest, "plain_ms_per_well": plain_ms, "speedup": plain_ms / slowest,
            "by_diameter_px": {str(diameter): ours for diameter, (ours, _) in cases.items()},
        })
    )  # fmt: skip


if __name__ == "__main__":
    main()
