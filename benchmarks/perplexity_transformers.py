"""Perplexity of a checkpoint in transformers, on token ids that accuracy.py wrote: what ours is compared with.

    accuracy.py perplexity SHAREGPT.json --model FOLDER --turns 200 --ids ids.txt
    perplexity_transformers.py FOLDER ids.txt [--score 448] [--dtype float32]

Needs torch, transformers and whatever reads the checkpoint's format there (gptqmodel, compressed-tensors), but not octavo, so that it runs in an
environment of those packages' own. Each line of the file is a turn; only its last --score tokens are scored.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def batches(turns: list[list[int]], size: int) -> Iterator[torch.Tensor]:
    """Turns that follow each other and are of one length, `size` at most."""
    for _, alike in groupby(turns, len):
        same = list(alike)
        for i in range(0, len(same), size):
            yield torch.tensor(same[i : i + size])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("ids", type=Path)
    parser.add_argument("--score", type=int, default=448)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--batch", type=int, default=8, help="turns of equal length that are run together")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=getattr(torch, args.dtype), device_map="cpu").eval()
    total, count = 0.0, 0
    for ids in batches([[int(word) for word in line.split()] for line in args.ids.read_text().splitlines()], args.batch):
        first = ids.shape[1] - args.score
        with torch.no_grad():
            logits = model(ids, logits_to_keep=args.score).logits[:, :-1].double()
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, first + 1 :].flatten(), reduction="sum")
        total, count = total + float(losses), count + ids.shape[0] * (args.score - 1)
    print(f"transformers {math.exp(total / count):.4f} over {count} tokens")


if __name__ == "__main__":
    main()
