# SPDX-License-Identifier: Apache-2.0
"""Compares the output of several GPUs with that of one, for models of real size.

    check_ranks.py --config NAME|--model DIR [--drafter METHOD:NAME|itself]
                   [--drafter-ranks 1|all] [--ranks 1,2,4] [--requests N] [--tokens N]
                   [--max-num-seqs N] [--drivers LIST]

With --config the models have dummy weights and are those of `paceline bench latency --config`; with
--model they are checkpoints, and so is the drafter. Half of the requests are greedy and half are
drawn. One rank decodes plainly, and the others speculate with every driver of --drivers, with 3
drafts in every iteration. With `--drafter itself` the target drafts for itself, and every draft has
to be accepted. Prints how many tokens were compared and how many differ, how many drafts there
were, and how long each run took. Exits with 1 if a token differs, if a draft of such a drafter is
not accepted, or if there were fewer drafts than half of the tokens.
"""

from __future__ import annotations

import argparse
import random
import time

from paceline import LLM, SamplingParams
from paceline.bench.models import load, load_draft


def outputs(args: argparse.Namespace, num_ranks: int, driver: str) -> list[list[int]]:
    """The tokens of every request, with this many ranks and this driver of draft steps."""
    dummy = args.model is None
    placed = {"device": "cuda", "gpus": range(num_ranks) if num_ranks > 1 else ()}
    begin = time.monotonic()
    target, draft, speculative = load(args.model or args.config, dummy=dummy, **placed), None, None
    if args.drafter and num_ranks > 1:
        size = {None: None, "1": 1, "all": num_ranks}[args.drafter_ranks]
        method, _, name = args.drafter.partition(":")
        if args.drafter == "itself":
            method, draft = "draft_model", target
        else:
            draft = load_draft(
                name, target, method=method, draft_tensor_parallel_size=size, dummy=dummy, **placed
            )
        # Drafts of random weights do not pay: an adaptive engine would soon draft nothing.
        speculative = {
            "method": method, "model": name or "itself", "num_speculative_tokens": 3,
            "draft_tensor_parallel_size": size, "x": {"draft_driver": driver, "adaptive": False},
        }  # fmt: skip
    vocab = target.config["vocab_size"]
    llm = LLM.from_loaded(
        target.loaded, None if draft is None else draft.loaded, speculative_config=speculative,
        tensor_parallel_size=num_ranks, max_model_len=args.tokens + 600,
        max_num_seqs=min(args.requests, args.max_num_seqs), show_progress=False,
    )  # fmt: skip
    numbers = random.Random(1)
    prompts = [
        [numbers.randrange(vocab) for _ in range(numbers.randrange(1, 500))]
        for _ in range(args.requests)
    ]
    params = [
        SamplingParams(temperature=i % 2, seed=i, max_tokens=args.tokens, ignore_eos=True)
        for i in range(args.requests)
    ]
    loaded = time.monotonic()
    tokens = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    end = time.monotonic()
    if speculative is not None:
        counters = llm.stats()["speculative_decoding"]
        accepted, drafted = counters["num_accepted_draft_tokens"], counters["num_draft_tokens"]
        print(f"{num_ranks} ranks, {driver}: {accepted} of {drafted} drafts accepted")
        if drafted < args.requests * args.tokens / 2 or (draft is target and accepted < drafted):
            raise SystemExit(1)
    llm.close()
    took = f"loaded in {loaded - begin:.1f} s, generated in {end - loaded:.1f} s"
    print(f"{num_ranks} ranks, {driver}: {took}", flush=True)
    return tokens


def main() -> None:
    """Compares and reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models = parser.add_mutually_exclusive_group(required=True)
    models.add_argument("--config")
    models.add_argument("--model")
    parser.add_argument("--drafter")
    parser.add_argument("--drafter-ranks", choices=["1", "all"], help="default: bytes decide")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--drivers", default="unrolled", help="unrolled,replay,while,eager")
    args = parser.parse_args()
    one, *more = [int(number) for number in args.ranks.split(",")]
    drivers = args.drivers.split(",")
    first = outputs(args, one, drivers[0])
    others = [outputs(args, number, driver) for number in more for driver in drivers]
    compared = sum(map(len, first)) * len(others)
    differ = sum(
        a != b for other in others for x, y in zip(first, other, strict=True)
        for a, b in zip(x, y, strict=True)
    )  # fmt: skip
    print(f"{args.config or args.model}: {compared} tokens compared, {differ} differ")
    raise SystemExit(differ != 0)


if __name__ == "__main__":
    main()
