"""Image measures of one six-channel 512 px well, against plain numpy percentiles on the same images.

Both are timed in turn in one run, so that the ratio holds when the machine's speed drifts. The last line is one JSON
object: `measures_ms_per_well`, `plain_ms_per_well`, `speedup` (medians over wells).
"""

from __future__ import annotations

import json
import time

import numpy as np

from phenoica.embed.image_measures import measure

CHANNELS = [1, 2, 3, 4, 5, 6]


def well(seed: int, size: int = 512) -> np.ndarray:
    """Return uint8 (6, size, size): discs on a noisy background."""
    random = np.random.default_rng(seed)
    image = random.normal(12, 4, (6, size, size))
    y, x = np.mgrid[:size, :size]
    for cy, cx in random.integers(20, size - 20, (40, 2)):
        image += 90 * (((y - cy) ** 2 + (x - cx) ** 2) < 14**2)
    return np.clip(image, 0, 255).astype(np.uint8)


def plain(images: np.ndarray) -> list[np.ndarray]:
    """Return mean, sd and percentiles with numpy's own functions; no focus and no count."""
    return [
        np.concatenate([[c.mean(), c.std()], np.percentile(c, [1, 5, 25, 50, 75, 95, 99])])
        for c in images
    ]


def main() -> None:
    """Time both on the same wells, in turn."""
    ours, theirs = [], []
    for seed in range(12):
        images = well(seed)
        start = time.perf_counter()
        measure(images, CHANNELS, dna_channel=1, nucleus_diameter_px=28)
        middle = time.perf_counter()
        plain(images)
        ours.append(middle - start)
        theirs.append(time.perf_counter() - middle)
    a, b = (1000 * float(np.median(v[2:])) for v in (ours, theirs))
    print(f"phenoica: {a:.1f} ms a well, with focus and count; numpy percentiles alone: {b:.1f} ms")
    print(json.dumps({"measures_ms_per_well": a, "plain_ms_per_well": b, "speedup": b / a}))


if __name__ == "__main__":
    main()
