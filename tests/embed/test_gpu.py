"""Claiming GPUs with processes that are real and GPUs that are not."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phenoica.embed import gpu
from phenoica.embed.gpu import Gpu, candidates, claim_gpu, parse_gpu_list
from phenoica.errors import ConfigError

LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-aaaa1111-0000)
GPU 1: NVIDIA H200 (UUID: GPU-bbbb2222-0000)
  MIG 1g.18gb     Device  0: (UUID: MIG-cccc-1)
  MIG 1g.18gb     Device  1: (UUID: MIG-cccc-2)
GPU 2: NVIDIA A100-SXM4-80GB (UUID: GPU-dddd3333-0000)
"""
MACHINE = [Gpu(name, name) for name in ("GPU-aaaa1111-0000", "GPU-bbbb2222-0000", "GPU-bbbb9999-0000")]


def test_the_list_of_the_driver_is_read():
    names = ["GPU-aaaa1111-0000", "MIG-cccc-1", "MIG-cccc-2", "GPU-dddd3333-0000"]
    assert parse_gpu_list(LISTING) == [Gpu(name, name) for name in names]
    assert parse_gpu_list("No devices were found\n") == []


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, MACHINE),
        ("2,0", [Gpu("2", MACHINE[2].name), Gpu("0", MACHINE[0].name)]),
        ("GPU-bbbb2222-0000", [MACHINE[1]]),
        ("GPU-aaaa", [Gpu("GPU-aaaa", MACHINE[0].name)]),
        ("GPU-bbbb", [Gpu("GPU-bbbb", "GPU-bbbb")]),  # the start of two: kept as it is
        ("MIG-x/1/0, 1", [Gpu("MIG-x/1/0", "MIG-x/1/0"), Gpu("1", MACHINE[1].name)]),
        ("7", [Gpu("7", "number-7")]),
        ("", []),
        ("-1", []),
        ("1,-1,0", [Gpu("1", MACHINE[1].name)]),
    ],
)
def test_only_gpus_that_the_environment_lists_are_candidates(visible, expected):
    assert candidates(visible, MACHINE) == expected


HOLDER = """
import os, sys, time
from pathlib import Path
from phenoica.embed import gpu
gpu.machine_gpus = lambda: [gpu.Gpu(f"GPU-{i}", f"GPU-{i}") for i in range(int(sys.argv[2]))]
gpu.lock_folder = lambda: Path(sys.argv[1])
gpu._POLL_S = 0.05
with gpu.claim_gpu("auto"):
    print(os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
    sys.stdin.read()
assert "CUDA_VISIBLE_DEVICES" not in os.environ
"""


@pytest.fixture
def start(tmp_path):
    """Start processes that claim one of `n` GPUs and hold it until their input ends."""
    started = []

    def start(n):
        environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, "-c", HOLDER, str(tmp_path), str(n)]
        started.append(subprocess.Popen(command, text=True, env=environment, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_jobs_get_a_gpu_each_and_the_next_one_waits_for_the_first_to_end(start):
    first, second = start(2), start(2)
    held = {first.stdout.readline().strip(): first, second.stdout.readline().strip(): second}
    assert set(held) == {"GPU-0", "GPU-1"}
    third = start(2)
    assert "waiting: all 2 GPUs" in (said := third.stderr.readline())
    assert "--resources gpu=2" in said
    time.sleep(0.3)
    assert third.poll() is None
    held["GPU-1"].communicate()  # its input ends, it leaves
    assert held["GPU-1"].returncode == 0
    assert third.stdout.readline().strip() == "GPU-1"


def test_a_killed_job_gives_its_gpu_back(start):
    first = start(1)
    assert first.stdout.readline().strip() == "GPU-0"
    second = start(1)
    assert "waiting" in second.stderr.readline()
    first.send_signal(signal.SIGKILL)
    assert second.stdout.readline().strip() == "GPU-0"


def test_many_jobs_at_once_never_share(start):
    jobs = [start(5) for _ in range(5)]
    assert {job.stdout.readline().strip() for job in jobs} == {f"GPU-{i}" for i in range(5)}


@pytest.fixture
def fake_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "machine_gpus", lambda: MACHINE)
    monkeypatch.setattr(gpu, "lock_folder", lambda: tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def test_the_environment_is_as_before_afterwards(fake_machine):
    with claim_gpu("cuda") as claimed:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == claimed.visible == "GPU-aaaa1111-0000"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    fake_machine.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    with claim_gpu("auto") as claimed:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == claimed.visible == "2"
        # the same GPU is taken under another name too
        os.environ["CUDA_VISIBLE_DEVICES"] = "GPU-bbbb9999-0000,0"
        with claim_gpu("auto") as other:
            assert other.visible == "0"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,1"


def test_nothing_is_claimed_on_a_cpu_or_without_gpus(fake_machine, tmp_path):
    with claim_gpu("cpu") as claimed:
        assert claimed is None
    fake_machine.setenv("CUDA_VISIBLE_DEVICES", "")
    with claim_gpu("auto") as claimed:
        assert claimed is None
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert not list(tmp_path.iterdir())


def test_a_claim_after_cuda_has_started_is_refused(fake_machine):
    import torch

    fake_machine.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="before CUDA starts"), claim_gpu("auto"):
        pass


def test_a_lock_folder_of_somebody_else_is_refused(monkeypatch):
    folder = gpu.lock_folder()
    assert folder == gpu.lock_folder()
    monkeypatch.setenv("TMPDIR", "/nowhere")
    assert folder == gpu.lock_folder()
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user)
    status = os.stat(folder)

    class Foreign:
        st_mode, st_uid = status.st_mode, user + 1

    monkeypatch.setattr(type(folder), "lstat", lambda self: Foreign)
    with pytest.raises(ConfigError, match="belongs to somebody else"):
        gpu.lock_folder()


def test_embed_claims_a_gpu(fake_machine, tiny_screen):
    """The verb holds a claim while it loads the model and embeds."""
    import json

    from phenoica import cli
    from phenoica.embed import run

    seen = []
    fake_machine.setattr(run, "embed_shard", lambda *_: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]))
    config = tiny_screen.write()
    text = json.dumps(config)
    assert CliRunner().invoke(cli.app, ["plates", "--config", text]).exit_code == 0
    result = CliRunner().invoke(cli.app, ["embed", "--config", text, "--unit", "0"])
    assert result.exit_code == 0, result.output
    assert seen == ["GPU-aaaa1111-0000"]
    assert "GPU GPU-aaaa1111-0000 is claimed, of 3" in result.output


@pytest.mark.parametrize(
    ("options", "cores"), [([], 8), (["--resources", "gpu=4"], 2), (["--workflow-profile", "none"], 8)], ids=str
)
def test_the_workflow_shares_its_cores_among_the_jobs_that_run_together(tmp_path, options, cores):
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "snakemake", "-s", str(root / "Snakefile"), "-d", str(tmp_path), "-n"]
    command += ["--configfile", str(root / "config/config.yaml"), "--cores", "8", *options]
    plan = subprocess.run(
        [*command, "--", "results/demo/embed/parts/shard-0.parquet"], capture_output=True, text=True, check=True
    ).stdout
    assert re.search(r"rule embed_shard:(?s:.)*?threads: (\d+)", plan)[1] == str(cores)
