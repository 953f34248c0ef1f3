"""One GPU for one job: several embed jobs on a machine each claim a free one.

A claim is a lock (flock) on a file per GPU in a folder of the user, so the kernel gives it back when the job ends,
however it ends. The claimed GPU is then the only one in CUDA_VISIBLE_DEVICES, which has to be set before CUDA starts
in this process; GPUs are therefore counted by `nvidia-smi -L`, outside of it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from phenoica.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_GPU_LINE = re.compile(r"^GPU (\d+): .*\(UUID: (GPU-[^)]+)\)")
_MIG_LINE = re.compile(r"^\s+MIG .*\(UUID: (MIG-[^)]+)\)")
_POLL_S = 1.0
_SAY_EVERY_S = 300.0


@dataclass(frozen=True)
class Gpu:
    """A GPU that a job may claim.

    Attributes
    ----------
    visible
        What CUDA_VISIBLE_DEVICES has to say to get it.
    name
        What the machine calls it, the same for every job: its UUID where that is known.
    """

    visible: str
    name: str


def machine_gpus() -> list[Gpu]:
    """Return the GPUs of the machine, or the parts (MIG) of those that are split, without starting CUDA here.

    They are in the order of nvidia-smi; where that command is missing, those that torch counts without CUDA (by NVML).

    Raises
    ------
    ConfigError
        If nvidia-smi does not answer.
    """
    command = shutil.which("nvidia-smi")
    if command is None:
        import torch

        return [Gpu(str(number), f"number-{number}") for number in range(torch.cuda.device_count())]
    try:
        listed = subprocess.run([command, "-L"], capture_output=True, text=True, check=False, timeout=120)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command} -L does not answer; check the driver, or set embed.device to cpu") from None
    return parse_gpu_list(listed.stdout) if listed.returncode == 0 else []


def parse_gpu_list(text: str) -> list[Gpu]:
    """Return the GPUs in the output of `nvidia-smi -L`; the parts of a split GPU stand in its place."""
    found: list[list[str]] = []  # of each GPU its UUID, then those of its parts
    for line in text.splitlines():
        if match := _GPU_LINE.match(line):
            found.append([match[2]])
        elif match := _MIG_LINE.match(line):
            found[-1].append(match[1])
    return [Gpu(uuid, uuid) for uuids in found for uuid in (uuids[1:] or uuids)]


def candidates(visible: str | None, machine: Sequence[Gpu]) -> list[Gpu]:
    """Return the GPUs that this job may use.

    Parameters
    ----------
    visible
        CUDA_VISIBLE_DEVICES as the job found it; None if it is not set.
    machine
        The GPUs of the machine.

    Returns
    -------
    list of Gpu
        All of the machine if `visible` is None. Else those it lists, by number or by (the start of) a UUID, up to the
        first entry that is neither: CUDA reads it in this way too. A number keeps its own meaning (CUDA may number
        GPUs otherwise than nvidia-smi does).
    """
    if visible is None:
        return list(machine)
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdecimal():
            number = int(entry)
            name = machine[number].name if number < len(machine) else f"number-{number}"
        elif entry.startswith(("GPU-", "MIG-")):
            named = [gpu.name for gpu in machine if gpu.name.startswith(entry)]
            name = named[0] if len(named) == 1 else entry
        else:
            break  # CUDA stops at the first entry it does not know, as in "-1" or "NoDevFiles"
        chosen.append(Gpu(entry, name))
    return chosen


def lock_folder() -> Path:
    """Return the folder of the user's lock files, the same for all jobs on the machine whatever their TMPDIR.

    Raises
    ------
    ConfigError
        If somebody else has made a folder of that name.
    """
    base = Path("/tmp") if os.access("/tmp", os.W_OK) else Path(tempfile.gettempdir())
    folder = base / f"phenoica-gpus-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(f"{folder}: belongs to somebody else; GPUs cannot be shared out. Remove it, then run again")
    return folder


@contextlib.contextmanager
def claim_gpu(device: str) -> Iterator[Gpu | None]:
    """Hold a GPU that no other job of the user holds, as the only one CUDA sees, while the block runs.

    Waits, and says so on stderr, while all are taken. CUDA_VISIBLE_DEVICES is respected: only GPUs it lists are
    claimed. Jobs of other users, and other programs, are not seen.

    Parameters
    ----------
    device
        `embed.device`: auto, cpu or cuda. With cpu, or where no GPU is found, nothing is claimed.

    Yields
    ------
    Gpu or None

    Raises
    ------
    RuntimeError
        If CUDA has started in this process: it would not notice the choice.
    """
    if device == "cpu":
        yield None
        return
    before = os.environ.get(VISIBLE)
    gpus = candidates(before, machine_gpus())
    if not gpus:
        yield None
        return
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError("a GPU must be claimed before CUDA starts in this process")
    with contextlib.ExitStack() as stack:
        gpu = _wait_for_one(gpus, stack)
        print(f"GPU {gpu.visible} is claimed, of {len(gpus)}", file=sys.stderr, flush=True)
        os.environ[VISIBLE] = gpu.visible
        try:
            yield gpu
        finally:
            if before is None:
                del os.environ[VISIBLE]
            else:
                os.environ[VISIBLE] = before


def _wait_for_one(gpus: Sequence[Gpu], stack: contextlib.ExitStack) -> Gpu:
    folder = lock_folder()
    said = None
    while True:
        for gpu in gpus:
            if _lock(folder / f"{gpu.name}.lock", stack):
                return gpu
        if said is None or time.monotonic() - said > _SAY_EVERY_S:
            said = time.monotonic()
            print(
                f"waiting: all {len(gpus)} GPUs that this job may use are held by other phenoica jobs of this user "
                f"({folder}); run no more of them at a time than there are GPUs, e.g. with `snakemake --resources "
                f"gpu={len(gpus)}`",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        time.sleep(_POLL_S)


def _lock(path: Path, stack: contextlib.ExitStack) -> bool:
    """Try to lock a file; if that works, it stays locked until the stack closes or this process ends."""
    import fcntl

    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return False
    stack.callback(os.close, handle)
    return True
