"""Workers that are forked from the preloaded parent use CUDA; the parent itself never does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.launch.workers.preload import ColdStart, Preload, PreloadedParent
from kit.ranks.forking import command, warm

USE = """
import torch, torch.distributed as dist
x = torch.ones(1000, 1000, device="cuda")
print(float((x @ x)[0, 0]), torch.cuda.current_device(), torch.cuda.initial_seed())
dist.init_process_group("nccl")
dist.all_reduce(x)
torch.cuda.synchronize()
dist.destroy_process_group()
print("done")
"""

pytestmark = pytest.mark.gpu


def test_a_forked_worker_uses_cuda_and_nccl_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "use.py").write_text(USE)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    parent = PreloadedParent(Preload((), str(tmp_path), environment))
    try:
        for port in ("29611", "29612"):
            told = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            ours = warm(parent, command("use.py"), {**environment, **told, "CUDA_VISIBLE_DEVICES": "0"})
            assert ours.code == 0, ours.err
            assert ours.out.splitlines()[-1] == "done"
    finally:
        parent.close()


@pytest.mark.parametrize("text", ["import torch; torch.cuda.init()", "import torch; torch.ones(1).cuda()"])
def test_a_module_that_uses_cuda_makes_starts_cold(text: str, tmp_path: Path) -> None:
    (tmp_path / "chosen.py").write_text(text)
    parent = PreloadedParent(Preload(("chosen",), str(tmp_path), dict(os.environ)))
    try:
        with pytest.raises(ColdStart, match=r"threads|CUDA was initialised|has opened /dev/nvidia"):
            parent.wait()
    finally:
        parent.close()
