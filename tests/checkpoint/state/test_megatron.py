"""Megatron-core's own model, whose modules say which part of which whole each rank has."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import holdfast
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.state.division import Division
from kit.ranks.together import together
from kit.tiny import checkpoints


def gpt(tensor: int, pipeline: int, experts: int | None = None) -> nn.Module:
    """A GPT of two layers with gated feed-forward blocks, divided over this many ranks.

    `experts`: over how many its experts are, if it has any.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.transformer_config import TransformerConfig

        parallel_state.initialize_model_parallel(tensor, pipeline, expert_model_parallel_size=experts or 1)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=16,
            num_attention_heads=4,
            use_cpu_initialization=True,
            gated_linear_unit=True,
            add_bias_linear=False,
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            pipeline_dtype=torch.float32,
            num_moe_experts=4 if experts else None,
            expert_model_parallel_size=experts or 1,
        )
        made: nn.Module = GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=4 if experts else None, moe_grouped_gemm=False),
            vocab_size=32,
            max_sequence_length=8,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
        return made


def parts(model: Any) -> list[Any]:
    """Its parts, as Megatron's own distributed checkpoints see them."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    given = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    apply_factories(given)
    found, left = [], [given]
    while left:
        one = left.pop()
        left += list(one.values()) if isinstance(one, dict) else one if isinstance(one, list) else []
        found += [one] if isinstance(one, ShardedTensor) else []
    return found


def values(part: Any) -> torch.Tensor:
    """What a part holds at first: of every element of every tensor something else, however it is divided."""
    whole = torch.arange(float(torch.Size(part.global_shape).numel())).reshape(part.global_shape)
    size = [1] * part.prepend_axis_num + list(part.data.size())
    mine = whole[tuple(slice(o, o + n) for o, n in zip(part.global_offset, size, strict=True))]
    return (mine / 64 + sum(part.key.encode()) % 97).reshape(part.data.size())


def stepped(run_dir: Path, shape: tuple[int, ...], steps: int, until: int) -> dict[str, Any]:
    """Train up to a step, without a forward: each gradient is half of what it is the gradient of."""
    model = gpt(*shape)
    mine = parts(model)
    with torch.no_grad():
        for part in mine:
            part.data.copy_(values(part) if not steps else torch.zeros_like(part.data))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    run = holdfast.Run(run_dir=run_dir, checkpoint_interval=0)
    run.track(model=model, optimizer=optimizer)
    assert run.start() == steps
    while run.step < until:
        run.begin_step()
        for parameter in model.parameters():
            parameter.grad = parameter.detach() / 2
        optimizer.step()
        optimizer.zero_grad()
        run.end_step()
    run.finish()
    wrong = []
    for part in mine:
        expected = values(part)
        momentum = torch.zeros_like(expected)
        for step in range(until):
            momentum = expected / 2 if step == 0 else momentum * 0.5 + expected / 2
            expected = expected - 0.5 * momentum
        if not torch.equal(part.data, expected):
            wrong.append(part.key)
    return {"parts": len(mine), "wrong": wrong}


def test_a_model_of_megatrons_goes_to_other_tensor_and_pipeline_sizes(tmp_path: Path) -> None:
    """Each stage numbers its layers from 0 on; each rank has a part of every matrix, of a gated one two."""
    run_dir = tmp_path / "run"
    for at, (tensor, pipeline) in enumerate([(2, 2), (1, 2), (2, 1), (1, 1)]):
        place = tmp_path / str(at)
        place.mkdir()

        def work(rank: int, tensor: int = tensor, pipeline: int = pipeline, at: int = at) -> Any:
            return stepped(run_dir, (tensor, pipeline), at, at + 1)

        for found in together(place, tensor * pipeline, work):
            assert found["parts"] > 8
            assert found["wrong"] == []
    for path in checkpoints(run_dir):
        assert manifests.read(path)[0].world.tied == []
        stored = FileSystemReader(path).read_metadata().state_dict_metadata
        gated = stored["model.decoder.layers.1.mlp.linear_fc1.weight"]
        assert isinstance(gated, TensorStorageMetadata)
        assert gated.size == (128, 16)


@pytest.mark.drill
def test_experts_go_to_another_number_of_ranks(tmp_path: Path) -> None:
    """Each rank numbers its own experts from 0 on, under the names that other ranks have for others."""
    run_dir = tmp_path / "run"
    for at, experts in enumerate((2, 4, 1)):
        place = tmp_path / str(at)
        place.mkdir()

        def work(rank: int, experts: int = experts, at: int = at) -> Any:
            return stepped(run_dir, (1, 1, experts), at, at + 1)

        for found in together(place, experts, work):
            assert found["parts"] > 8
            assert found["wrong"] == []
    for path in checkpoints(run_dir):
        assert manifests.read(path)[0].world.tied == []
        stored = FileSystemReader(path).read_metadata().state_dict_metadata
        assert "model.decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight" in stored


def test_what_fails_to_say_how_it_is_divided_is_kept_for_each_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(nn.Linear):
        def sharded_state_dict(self, **_: Any) -> Any:
            raise AttributeError("no process group")

    with caplog.at_level(logging.WARNING, "holdfast"):
        Division().describe({"model": nn.Sequential(Broken(2, 2))})
    assert "track(model=…): its sharded_state_dict failed (AttributeError: no process group)" in caplog.text
