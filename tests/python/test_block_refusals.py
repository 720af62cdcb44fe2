# SPDX-License-Identifier: Apache-2.0
"""What is refused of block drafters: folders, their heads, descriptions, numbers of drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from block_checks import SPECS, TARGET, drafter, opened
from drafter_checks import ENGINE
from errors import raises
from paceline import LLM
from paceline._core import ModelFileError, check_decoder_config
from paceline.loader.convert import convert
from tiny_models import edit_config, edit_section, edit_tensors, make


@pytest.mark.parametrize("layout", SPECS)
def test_more_drafts_than_the_block(layout: str, tmp_path: Path) -> None:
    most = SPECS[layout].max_drafts
    config = {"model": str(drafter(layout, tmp_path)), "num_speculative_tokens": most + 1}
    seen = (f"num_speculative_tokens is {most + 1}", "blocks of 5", f"allowed: 1 to {most}")
    with raises(ValueError, *seen):
        LLM(make(TARGET), speculative_config=config, **ENGINE)


@pytest.mark.parametrize("layout", SPECS)
def test_converting_with_more_drafts_than_the_block(layout: str, tmp_path: Path) -> None:
    most, path = SPECS[layout].max_drafts, drafter(layout, tmp_path)
    seen = (f"num_speculative_tokens is {most + 1}", path, f"allowed: 1 to {most}")
    with raises(ValueError, *seen):
        convert(make(TARGET), tmp_path / "out", path, num_speculative_tokens=most + 1)
    assert not (tmp_path / "out").exists()


def test_a_draft_model_is_no_block_drafter() -> None:
    config = {"method": "dspark", "model": str(make(TARGET))}
    seen = ("'method'] is 'dspark'", make(TARGET), "a drafter for 'draft_model'", "fc.weight")
    with raises(ValueError, *seen):
        LLM(make(TARGET), speculative_config=config, **ENGINE)


@pytest.mark.parametrize(
    ("layout", "edit", "error", "seen"),
    [
        (
            "z-lab",
            lambda path: edit_config(path, architectures=["LiLiCorrDraftModel"]),
            NotImplementedError,
            ("architectures", "LiLiCorrDraftModel", "DFlash, DFlash2 or DSpark"),
        ),
        (
            "speculators",
            lambda path: edit_config(path, speculators_model_type="peagle"),
            NotImplementedError,
            ("speculators_model_type", "peagle"),
        ),
        (
            "z-lab",
            lambda path: edit_section(path, "dflash_config", attention_sink_bias=True),
            NotImplementedError,
            ("dflash_config.attention_sink_bias",),
        ),
        (
            "deepseek",
            lambda path: edit_config(path, markov_rank=4),
            ModelFileError,
            ('"markov_rank" is 4', "8 columns"),
        ),
        (
            "deepseek",
            lambda path: edit_config(path, mask_token_id=128),
            ModelFileError,
            ("mask_token_id", "128", "127"),
        ),
        (
            "deepseek",
            lambda path: edit_config(path, block_size=0),
            ModelFileError,
            ("block_size", "is 0"),
        ),
        (
            "deepseek",
            lambda path: edit_config(path, target_layer_ids=[0, 2, 7]),
            ValueError,
            (
                "target_layer_ids",
                "[0, 2, 7]",
                "8 layers",
                "-1 (the embeddings) to 6 (not",
            ),
        ),
        (
            "deepseek",
            lambda path: edit_config(path, target_layer_ids=...),
            ValueError,
            ("'fc.weight' has 192 columns", 'by default, as key "target_layer_ids" is missing'),
        ),
        (
            "speculators",
            lambda path: edit_config(path, aux_hidden_state_layer_ids=[1, 3]),
            ValueError,
            ("'fc.weight' has 192 columns", "expected 128"),
        ),
        (
            "z-lab",
            lambda path: edit_config(path, vocab_size=130),
            ValueError,
            ('"vocab_size" is 130', "128 ids"),
        ),
        (
            "z-lab",
            lambda path: edit_tensors(path, lambda t: t.pop("hidden_norm.weight")),
            ModelFileError,
            ("hidden_norm.weight",),
        ),
        (
            "z-lab",
            lambda path: edit_tensors(path, lambda t: t.update({"extra.weight": torch.ones(2)})),
            ModelFileError,
            ("extra.weight",),
        ),
        # Heads.
        (
            "deepseek",
            lambda path: edit_config(path, markov_head_type="cubic"),
            NotImplementedError,
            ("markov_head_type", "cubic", "vanilla, gated and rnn"),
        ),
        (
            "deepseek",
            lambda path: edit_config(path, markov_head_type="gated"),
            ModelFileError,
            ("markov_head.gate_proj.weight",),
        ),
        (
            "gated",
            lambda path: edit_config(path, markov_head_type="vanilla"),
            ModelFileError,
            ("markov_head.gate_proj",),
        ),
        (
            "rnn",
            lambda path: edit_tensors(
                path, lambda t: t.update({"markov_head.joint_proj.weight": torch.ones(16, 80)})
            ),
            ModelFileError,
            ("markov_head.joint_proj.weight", "[16, 80]", "[24, 80]", "3 * markov_rank"),
        ),
        (
            "gated",
            lambda path: edit_tensors(path, lambda t: t.pop("markov_head.gate_proj.bias")),
            ModelFileError,
            ("markov_head.gate_proj.bias",),
        ),
        (
            "deepseek",
            lambda path: edit_config(path, enable_confidence_head=True),
            ModelFileError,
            ('"enable_confidence_head" is true', "'confidence_head.proj.weight'", "or false"),
        ),
        (
            "gated",
            lambda path: edit_config(path, confidence_head_with_markov=False),
            ModelFileError,
            ("'confidence_head.proj.weight' has 72 columns", "expected 64", "is false"),
        ),
        (
            "rnn",
            lambda path: edit_config(path, confidence_head_with_markov=True),
            ModelFileError,
            ("has 64 columns", "expected 72", "hidden_size + markov_rank", "is true"),
        ),
        (
            "gated",
            lambda path: edit_tensors(path, lambda t: t.pop("confidence_head.proj.bias")),
            ModelFileError,
            ("confidence_head.proj.bias",),
        ),
        # DFlash2.
        (
            "z-lab",
            lambda path: edit_config(path, architectures=["DFlash2DraftModel"]),
            ModelFileError,
            ('"dflash_config.conv_kernel_size" is missing', "an integer from 1"),
        ),
        (
            "dflash2",
            lambda path: edit_config(path, architectures=["DFlashDraftModel"]),
            NotImplementedError,
            ('"dflash_config.conv_kernel_size" is 2', '"architectures" of DFlash2'),
        ),
        (
            "dflash2",
            lambda path: edit_section(path, "dflash_config", selector_temperature=0.5),
            NotImplementedError,
            ('"dflash_config.selector_temperature" is 0.5', "selector_top_k"),
        ),
        (
            "dflash2",
            lambda path: edit_section(path, "dflash_config", selector_top_k=33),
            ModelFileError,
            ('key "dflash_config.selector_top_k"', "selector.top is 33", "1 to 32"),
        ),
        (
            "dflash2",
            lambda path: edit_section(path, "dflash_config", conv_group_size=7),
            ModelFileError,
            ('key "dflash_config.conv_group_size"', "convolution.group is 7", "divisors of"),
        ),
        (
            "dflash2",
            lambda path: edit_section(path, "dflash_config", conv_kernel_size=17),
            ModelFileError,
            ('key "dflash_config.conv_kernel_size"', "convolution.taps is 17", "1 to 16"),
        ),
        (
            "dflash2",
            lambda path: edit_section(path, "dflash_config", output_multiplier=0),
            ModelFileError,
            ('"dflash_config.output_multiplier" is 0', "above 0"),
        ),
        (
            "dflash2",
            lambda path: edit_config(path, markov_rank=8),
            ModelFileError,
            ('"markov_rank" is 8', "is not in the weights"),
        ),
        (
            "dflash2",
            lambda path: edit_tensors(
                path, lambda t: t.pop("candidate_selector.successor_codebook")
            ),
            ModelFileError,
            ("candidate_selector.successor_codebook",),
        ),
        (
            "dflash2",
            lambda path: edit_tensors(
                path,
                lambda t: t.update({"layers.1.mlp_conv.base_kernel": torch.ones(4, 64)}),
            ),
            ModelFileError,
            ("layers.1.mlp_conv.base_kernel", "[4, 64]", "[2, 2, 64]", "conv_kernel_size"),
        ),
        (
            "dflash2 speculators",
            lambda path: edit_tensors(
                path,
                lambda t: t.update(
                    {"lm_head.weight": torch.ones(8, 64), "d2t": torch.zeros(8, dtype=torch.int64)}
                ),
            ),
            NotImplementedError,
            ("'lm_head.weight' has 8 rows", "a row for each token id"),
        ),
        # The assistant of Muse-Glimmer.
        (
            "assistant",
            lambda path: edit_config(path, model_type="muse_glimmer"),
            NotImplementedError,
            ("model_type", "muse_glimmer", "muse_glimmer_assistant"),
        ),
        (
            "assistant",
            lambda path: edit_config(path, target_layer_ids=...),
            ModelFileError,
            ('"target_layer_ids" is missing', "a list of layers"),
        ),
        (
            "assistant",
            lambda path: edit_tensors(path, lambda t: t.pop("encoder.output_norm_enc.weight")),
            ModelFileError,
            ("encoder.output_norm_enc.weight",),
        ),
    ],
)
def test_refusals(
    layout: str, edit: Any, error: type[Exception], seen: tuple[str, ...], tmp_path: Path
) -> None:
    path = drafter(layout, tmp_path)
    edit(path)
    with raises(error, *seen):
        opened(path)


@pytest.mark.parametrize(
    ("layout", "heads", "seen"),
    [
        (
            "gated",
            {"markov": {"kind": "cubic", "rank": 8}},
            ("drafter.block.markov.kind", "'cubic'", "'vanilla', 'gated', 'rnn'"),
        ),
        ("rnn", {"markov": {"kind": "rnn", "rank": 65}}, ("drafter.block.markov.rank", "65", "64")),
        (
            "z-lab",
            {"confidence": {"reads_token": True}},
            ("drafter.block.confidence.reads_token", "true", "false where kind is not 'dspark'"),
        ),
        ("gated", {"confidence": {}}, ("drafter.block.confidence", "reads_token")),
        (
            "rnn",
            {"confidence": {"reads_token": False, "before_norm": True}},
            ("drafter.block.confidence.before_norm", "true", "false without streams"),
        ),
        (
            "z-lab",
            {"convolution": {"taps": 2, "group": 8}},
            ("drafter.block", "convolution"),
        ),
        (
            "dflash2",
            {"selector": {"rank": 5}},
            ("drafter.block.selector", "top"),
        ),
        (
            "dflash2",
            {"selector": {"rank": 1025, "top": 4}},
            ("drafter.block.selector.rank is 1025", "1 to 1024"),
        ),
        (
            "dflash2",
            {"convolution": {"taps": 2, "group": 5}},
            ("drafter.block.convolution.group is 5", "divisors of hidden_size, 64"),
        ),
    ],
)
def test_descriptions_that_are_refused(
    layout: str, heads: dict[str, Any], seen: tuple[str, ...], tmp_path: Path
) -> None:
    config = opened(drafter(layout, tmp_path)).config
    config["drafter"]["block"] |= heads
    with raises(ValueError, *seen):
        check_decoder_config(json.dumps(config))
