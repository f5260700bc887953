"""Distributed wrappers: their parts keep the model's own paths."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.instrumented import App, Block

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch was built without gloo", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def app():
    made = App()
    yield made
    made.close()


def test_data_parallel_training_step(app):
    model = DistributedDataParallel(Block(Block()))
    with app.request():
        model(torch.ones(2, 4)).sum().backward()
    assert app.rows.names() == ["linear", "inner.linear", "inner", "Block", "DistributedDataParallel"]
    assert model.module.linear.weight.grad is not None


def test_fully_sharded_modules(app):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this torch has no fully_shard")
    from torch.distributed.device_mesh import init_device_mesh

    model, mesh = Block(Block()), init_device_mesh("cpu", (1,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fsdp.fully_shard(model.inner, mesh=mesh)
        fsdp.fully_shard(model, mesh=mesh)
        with app.request():
            model(torch.ones(2, 4)).sum().backward()
    assert app.rows.names()[:3] == ["linear", "inner.linear", "inner"]
    assert len(app.rows) == 4
