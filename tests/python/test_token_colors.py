# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of a stream come from, and the colours that `generate --color` gives them."""

from __future__ import annotations

from paceline import LLM, SamplingParams

PROMPT = "x = "


def test_chunks_say_where_tokens_come_from(llm: LLM) -> None:
    chunks = list(llm.stream(PROMPT, SamplingParams(temperature=0.0, max_tokens=64)))
    output = chunks[-1].output
    assert output is not None and output.metrics.speculative_decoding is not None
    metrics = output.metrics.speculative_decoding
    assert sum(chunk.num_drafted for chunk in chunks) == metrics["num_draft_tokens"]
    assert sum(chunk.num_accepted for chunk in chunks) == metrics["num_accepted_draft_tokens"] > 0
    for chunk in chunks:
        # An iteration emits the accepted drafts and at most one token of the target.
        assert chunk.num_accepted <= chunk.num_drafted
        assert len(chunk.token_ids) - chunk.num_accepted in (0, 1)
        assert len(chunk.text_offsets) == len(chunk.token_ids)
    offsets = [offset for chunk in chunks for offset in chunk.text_offsets]
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    text = output.outputs[0].text
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] <= len(text)
    # A token whose text is whole characters stands at its offset.
    ends = [*offsets[1:], len(text)]
    tokenizer = llm.target.tokenizer
    assert tokenizer is not None
    whole = [
        (start, piece)
        for token, start, end in zip(tokens, offsets, ends, strict=True)
        if (piece := tokenizer.decode([token])) and "\ufffd" not in piece and end > start
    ]
    assert len(whole) > 20
    assert all(text[start:].lstrip(" ").startswith(piece.lstrip(" ")) for start, piece in whole)
