# SPDX-License-Identifier: Apache-2.0
"""The training form of the DSpark drafter equals its equations for one block at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from eagle_reference import TargetReference
from paceline.demo import find_demo
from tiny_models import load_tensors

NUM_TOKENS = 20


def expected(folder: Path, streams: Tensor, embed: Tensor, tokens: list[int], count: int) -> Tensor:
    """The uncorrected logits of the block after the first `count` tokens, in float64.

    `streams` are what leaves each layer of the target, `[layers, tokens, hidden]`.
    """
    config = json.loads((folder / "config.json").read_text())
    weights = {name: value.double() for name, value in load_tensors(folder).items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size, block = config["head_dim"], config["block_size"]

    def norm(x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"])
        return x * scale * weights[name + ".weight"]

    def project(x: Tensor, name: str) -> Tensor:
        return x @ weights[name + ".weight"].T

    def turned(x: Tensor, positions: Tensor) -> Tensor:
        exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
        angles = positions.double()[:, None, None] * config["rope_theta"] ** -exponents
        a, b = x.chunk(2, -1)
        return torch.cat(
            [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1
        )

    taps = torch.cat([streams[layer, : count - 1] for layer in config["target_layer_ids"]], -1)
    context = norm(project(taps, "fc"), "hidden_norm")
    x = embed[[tokens[count - 1]] + [config["mask_token_id"]] * (block - 1)]
    positions = torch.arange(count - 1 + block)
    for layer in range(config["num_hidden_layers"]):
        name = f"layers.{layer}."
        rows = norm(x, name + "input_layernorm")
        q = project(rows, name + "self_attn.q_proj").view(block, heads, size)
        q = turned(norm(q, name + "self_attn.q_norm"), positions[count - 1 :])
        # Keys and values of the context are not normalised a second time.
        inputs = torch.cat([context, rows])
        k = project(inputs, name + "self_attn.k_proj").view(-1, kv_heads, size)
        k = turned(norm(k, name + "self_attn.k_norm"), positions)
        v = project(inputs, name + "self_attn.v_proj").view(-1, kv_heads, size)
        k, v = (part.repeat_interleave(heads // kv_heads, 1) for part in (k, v))
        weight = (torch.einsum("bhd,lhd->hbl", q, k) / size**0.5).softmax(-1)
        attended = torch.einsum("hbl,lhd->bhd", weight, v).reshape(block, -1)
        x = x + project(attended, name + "self_attn.o_proj")
        y = norm(x, name + "post_attention_layernorm")
        gate = silu(project(y, name + "mlp.gate_proj"))
        x = x + project(gate * project(y, name + "mlp.up_proj"), name + "mlp.down_proj")
    return norm(x, "norm")


def test_training_drafts_as_inference_does(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model = pytest.importorskip("dspark_model")
    training = pytest.importorskip("train_dspark")
    target = TargetReference(find_demo("draft_model").target)
    generator = torch.Generator().manual_seed(0)
    config = model.DSparkConfig(
        target_hidden=256, target_layers=6, hidden=256, intermediate=48, head_dim=32, layers=2,
        taps=(0, 3, 4), block=5, rank=8,
    )  # fmt: skip
    torch.manual_seed(0)
    drafter = model.DSpark(config, target.lm_head.detach())
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_((parameter + 0.1 * noise).bfloat16())
    model.save_dspark(drafter, tmp_path / "drafter")
    tokens = torch.randint(4096, (NUM_TOKENS,), generator=generator)
    # states.streams enter the layers.
    left = target.states(tokens.tolist()).streams[1:]
    anchors = torch.tensor([[0, 6, NUM_TOKENS - 2]])
    drafter = drafter.double()
    with torch.no_grad():
        texts = training.Texts(tokens[None], torch.zeros(1, dtype=torch.long), NUM_TOKENS)
        streams, _ = training.states_of(target.model, texts, config.taps)
        hidden = drafter(streams, anchors, tokens[anchors])
        drafts = drafter.draft(hidden, tokens[anchors])[0]
    weights = {k: v.double() for k, v in load_tensors(tmp_path / "drafter").items()}
    for index, anchor in enumerate(anchors[0].tolist()):
        rows = expected(tmp_path / "drafter", left, target.embedding, tokens.tolist(), anchor + 1)
        torch.testing.assert_close(hidden[0, index], rows, rtol=1e-4, atol=1e-4, check_dtype=False)
        token = tokens[anchor]
        for row, draft in zip(rows, drafts[index], strict=True):
            embedding = weights["markov_head.markov_w1.weight"][token]
            correction = weights["markov_head.markov_w2.weight"] @ embedding
            token = (target.lm_head @ row + correction).argmax()
            assert token == draft


def test_the_saved_drafter_reads_streams_as_they_are() -> None:
    """Training divides the streams by a scale, which `fc` then contains."""
    pytest.importorskip("safetensors")
    training = pytest.importorskip("train_dspark")
    plan = training.Plan(
        prompts=4, rounds=1, longest_prompt=40, new_tokens=8, batch=2, windows=0, blocks=2,
        steps=1, rate=0.0, layers=1, intermediate=16, rank=8,
    )  # fmt: skip
    stream = torch.randint(4096, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    target = find_demo("draft_model").target
    clock = training.Clock.start(None)
    material = training.Material.make(plan, target, stream, "cpu", clock)
    drafter = training.new_drafter(plan, material.target)
    pool = training.Pool(plan, drafter, material)
    _, _, anchors, streams, _ = pool.draw()
    tokens = torch.zeros_like(anchors)
    before = drafter(streams, anchors, tokens).detach()
    training.train(plan, drafter, material, None)
    after = drafter(streams * pool.scale, anchors, tokens).detach()
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    assert pool.scale.max() > 2 * pool.scale.min()
