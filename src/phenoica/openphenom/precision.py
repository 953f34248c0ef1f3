"""The arithmetic that an embedding is computed in, and why.

Comes in: float32, bfloat16 or auto, and a device. Goes out: one of the two with its reason, which a run records.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phenoica.errors import ConfigError

PRECISIONS = ("auto", "float32", "bfloat16")


@dataclass(frozen=True)
class Precision:
    """What matrix products and attention are computed in.

    Attributes
    ----------
    name
        float32 or bfloat16. Sums inside a product, norms, the residual stream and the mean over tokens are float32
        either way.
    reason
        Why, in a few words: `as configured`, or what the machine has or lacks.
    """

    name: str
    reason: str

    @property
    def dtype(self) -> torch.dtype:
        """The type of the factors of a product."""
        return getattr(torch, self.name)

    def __str__(self) -> str:
        """Return, for example, `bfloat16 (AMX)`."""
        return f"{self.name} ({self.reason})"


def choose_precision(name: str, device: torch.device) -> Precision:
    """Return the precision of a name on a device.

    `auto` takes bfloat16 where the machine multiplies it in hardware: GPUs of compute capability 8.0 or more, and CPUs
    with AMX or AVX512-BF16. The latter has no matrix unit, but one instruction multiplies and adds twice as many
    bfloat16 as float32: measured on such a CPU, products run 2.2 times and whole embeddings about 1.8 times as fast.
    Elsewhere bfloat16 would be emulated, and slower than float32.

    Parameters
    ----------
    name
        auto, float32 or bfloat16.
    device
        Where the model is.

    Raises
    ------
    ConfigError
        For another name.
    """
    if name not in PRECISIONS:
        raise ConfigError(f"embed.precision is {name!r}; it must be one of {', '.join(PRECISIONS)}")
    if name != "auto":
        return Precision(name, "as configured")
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        kind = f"GPU of compute capability {major}.{minor}"
        return Precision("bfloat16" if major >= 8 else "float32", kind)
    if device.type == "cpu" and torch.backends.mkldnn.is_available():  # torch's bfloat16 kernels for CPUs
        if _cpu_has("amx_tile"):
            return Precision("bfloat16", "AMX")
        if _cpu_has("avx512_bf16"):
            return Precision("bfloat16", "AVX512-BF16")
    return Precision("float32", "no bfloat16 units")


def _cpu_has(feature: str) -> bool:
    """Ask torch for a CPU feature; a torch too old to know the question counts as no."""
    query = getattr(torch.cpu, f"_is_{feature}_supported", None)
    return query is not None and bool(query())
