"""The production job that benchmarks/embed.py times is the job of the workflow, and does what its yardstick does."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from phenoica.embed.encoder import load_encoder
from phenoica.openphenom import OpenPhenom, OpenPhenomConfig

pytest.importorskip("PIL")
spec = importlib.util.spec_from_file_location("embed_benchmark", Path(__file__).parents[2] / "benchmarks/embed.py")
benchmark = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)


def test_job_agrees_with_the_plain_loop(tmp_path):
    images = benchmark.render(1)
    OpenPhenom.random(OpenPhenomConfig(depth=1), 0).save(tmp_path / "model.safetensors")
    job = benchmark.Job(tmp_path, "job", images, 2, "cpu")
    model = load_encoder(job.config("float32"), len(benchmark.CHANNELS)).model
    plain = benchmark.plain_loop(job.shard, model)
    found = job.run("float32")
    assert found.shape == (2, 384)
    np.testing.assert_allclose(found, plain, rtol=0, atol=1e-5)
    assert np.abs(plain).max() > 0.1  # something to agree on
