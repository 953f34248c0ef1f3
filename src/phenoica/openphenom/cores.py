"""Spread forward passes over the cores of a CPU: a few images a core, rather than every product over all cores.

Comes in: the passes of a batch. Goes out: their results, in order. Cores that work on one product wait for each other
hundreds of times an image, and while images are decoded beside the model one of them is always late; cores with images
of their own never wait, and a result does not depend on their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

TOKENS_A_PASS = 4096  # enough for large products; their activations (about 11 kB a token in bfloat16) stay in cache


def tiles_a_pass(tiles: int, tokens: int) -> int:
    """Return how many tiles of `tokens` tokens go through the model together: few, and a share for every core."""
    return max(1, min(TOKENS_A_PASS // tokens, -(-tiles // torch.get_num_threads())))


def map_on_cores(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Apply a function to every item, in threads that share torch's threads evenly; without gradients.

    With fewer items than threads each gets several, so that one image still uses all cores.
    """
    threads = torch.get_num_threads()
    workers = min(threads, len(items))
    if workers == 1:
        return [function(item) for item in items]

    def run(item: T) -> R:
        with torch.inference_mode():  # holds for one thread only
            return function(item)

    try:
        with ThreadPoolExecutor(workers, "embed", torch.set_num_threads, (threads // workers,)) as pool:
            return list(pool.map(run, items))
    finally:
        torch.set_num_threads(threads)  # one library behind torch keeps its number for the whole process
