"""What the trainer relies on in DeepSpeed, besides what its own tests compare with plain PyTorch."""

import pytest


def test_the_shared_memory_collective_can_be_switched_off_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Built at first use, it would need a compiler and half a minute at each start (tasks/trainer/engine.py)."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.comm.torch import build_shm_op

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    assert builder.NAME == "deepspeed_shm_comm"
    monkeypatch.setattr(type(builder), "load", lambda self, verbose=True: "built")
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, builder.NAME, True)
    assert build_shm_op() == "built"
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, builder.NAME, False)
    assert build_shm_op() is None
