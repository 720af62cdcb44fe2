# SPDX-License-Identifier: Apache-2.0
"""The training form of the Gemma 4 pair equals drafting, and transformers reads its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.demo import find_demo

TARGET_SIZES = {"hidden": 64, "intermediate": 96, "head_dim": 16, "full_head_dim": 32}
NUM_STEPS = 3


def randomised(model: Any, seed: int) -> Any:
    """Adds noise to every weight and rounds it to bf16."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_((parameter + 0.1 * noise).bfloat16().float())
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def gemma4() -> Any:
    """The models."""
    return pytest.importorskip("gemma4_model")


@pytest.fixture(scope="module")
def files(gemma4: Any) -> Any:
    """What saves and loads them."""
    pytest.importorskip("safetensors")
    return pytest.importorskip("gemma4_files")


@pytest.fixture(scope="module")
def target(gemma4: Any) -> Any:
    """A tiny target whose last layers read the keys and values of others."""
    torch.manual_seed(0)
    kinds = (gemma4.SLIDING, gemma4.SLIDING, gemma4.FULL) * 2
    config = gemma4.Gemma4Config(
        layer_types=kinds, shared_layers=2, window=8, vocab=200, **TARGET_SIZES
    )
    return randomised(gemma4.Target(config), seed=1)


@pytest.fixture(scope="module")
def assistant(gemma4: Any) -> Any:
    """A tiny assistant for that target."""
    torch.manual_seed(0)
    kinds = (gemma4.SLIDING, gemma4.SLIDING, gemma4.FULL)
    sizes = TARGET_SIZES | {"hidden": 32}
    config = gemma4.Gemma4Config(
        layer_types=kinds, shared_layers=3, window=8, vocab=200, soft_cap=None, **sizes
    )
    return randomised(gemma4.Assistant(config, backbone=64), seed=2)


def some_ids(*shape: int) -> torch.Tensor:
    """Token ids of the tiny vocabulary."""
    return torch.randint(200, shape, generator=torch.Generator().manual_seed(3))


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts equality up to the order of sums."""
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_transformers_reads_the_target(files: Any, target: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    files.save_target(target, tmp_path, find_demo("draft_model").target)
    # Rows longer than the window, so that the sliding layers forget.
    ids = some_ids(2, 40)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(theirs).__name__ == "Gemma4ForCausalLM"
    close(target(ids), theirs.eval()(ids).logits)
    close(files.load_target(tmp_path, torch.device("cpu"))(ids), target(ids))


def test_generation_continues_each_prompt_alone(gemma4: Any, target: Any) -> None:
    prompts, lengths = some_ids(3, 20), torch.tensor([20, 5, 12])
    together = gemma4.generate(target, prompts, 15, lengths)
    for row, length, continuation in zip(prompts, lengths.tolist(), together, strict=True):
        ids = row[:length]
        for _ in range(15):
            ids = torch.cat([ids, target(ids[None])[0, -1:].argmax(-1)])
        assert continuation.tolist() == ids[length:].tolist()


@pytest.mark.parametrize("ahead", [0, 1])
def test_training_drafts_as_inference_does(
    gemma4: Any, target: Any, assistant: Any, ahead: int
) -> None:
    training = pytest.importorskip("train_gemma4")
    texts = pytest.importorskip("texts")
    ids = some_ids(2, 40)
    batch = texts.Texts(ids, torch.tensor([3, 20]), count=16)
    drafting = training.Drafting(target, assistant, NUM_STEPS)
    wanted, trained = drafting.run(batch, ahead=ahead)
    close(wanted[1], target(ids)[1, 19 : 19 + 16 + NUM_STEPS - 1])

    for row, first in enumerate(batch.first.tolist()):
        for draft in (0, 5, 13):
            p = first + draft - 1
            # One draft alone, over the states of the tokens that it may see.
            states = target.states(ids[row : row + 1, :p])
            last = torch.tensor([[p - 1]])
            view = gemma4.View.of(assistant.config, states, last, ahead)
            hidden = states.hidden[:, -1:]
            for step in range(NUM_STEPS):
                token = target.embed(ids[row : row + 1, p + step : p + step + 1])
                logits, hidden = assistant(token, hidden, view)
                close(trained[step][row, draft], logits[0, 0])


@pytest.mark.parametrize("ahead", [0, 1])
def test_transformers_reads_the_assistant(
    gemma4: Any, files: Any, target: Any, assistant: Any, tmp_path: Path, ahead: int
) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Gemma4AssistantForCausalLM"):
        pytest.skip("this version of transformers has no Gemma 4 assistant")
    files.save_target(target, tmp_path / "target", find_demo("draft_model").target)
    files.save_assistant(assistant, tmp_path / "assistant")
    their_target = transformers.Gemma4ForCausalLM.from_pretrained(
        tmp_path / "target", dtype=torch.float32
    ).eval()
    theirs = transformers.Gemma4AssistantForCausalLM.from_pretrained(
        tmp_path / "assistant", dtype=torch.float32
    ).eval()

    # No more tokens than the window has: beyond it, transformers would show one key more.
    ids = some_ids(1, 8)
    p = ids.shape[1] - 1
    out = their_target(
        ids[:, :p], use_cache=True, output_hidden_states=True, return_shared_kv_states=True
    )
    states = target.states(ids[:, :p])
    view = gemma4.View.of(assistant.config, states, torch.tensor([[p - 1]]), ahead)
    their_hidden, hidden = out.hidden_states[-1][:, -1:], states.hidden[:, -1:]
    close(hidden, their_hidden)
    token = ids[:, p:]
    for _ in range(NUM_STEPS):
        logits, hidden = assistant(target.embed(token), hidden, view)
        embedding = their_target.get_input_embeddings()(token)
        their_out = theirs(
            inputs_embeds=torch.cat([embedding, their_hidden], -1),
            position_ids=torch.tensor([[p - 1 + ahead]]),
            attention_mask=torch.ones(1, p + 1),
            shared_kv_states=out.shared_kv_states,
        )
        close(logits, their_out.logits)
        their_hidden = their_out.last_hidden_state
        close(hidden, their_hidden)
        token = logits.argmax(-1)
    loaded = files.load_assistant(tmp_path / "assistant", torch.device("cpu"))
    close(
        loaded(target.embed(token), hidden, view)[0],
        assistant(target.embed(token), hidden, view)[0],
    )


def test_counts_what_drafts_emit() -> None:
    measures = pytest.importorskip("measures")
    continuation = [10, 11, 12, 13, 14, 15]
    # After token 0 only the first draft is right: 2 tokens. After token 2 both are right: 3.
    first_steps = [11, 0, 13, 0, 0, 0]
    second_steps = [0, 0, 14, 0, 0, 0]
    assert measures.emitted_by_drafts(continuation, [first_steps, second_steps]) == [2, 3]
    # The last token is reached in the middle of a draft.
    assert measures.emitted_by_drafts(continuation[:4], [first_steps, second_steps]) == [2, 1]


def test_paceline_reads_the_target(gemma4: Any, files: Any, tmp_path: Path) -> None:
    from paceline.loader import load_checkpoint

    torch.manual_seed(0)
    model = randomised(gemma4.Target(gemma4.target_config()), seed=4)
    files.save_target(model, tmp_path, find_demo("draft_model").target)
    assert load_checkpoint(tmp_path) is not None
