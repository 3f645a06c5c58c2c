"""How near the kernels are to the definition, and the model to itself elsewhere.

    accuracy.py logits SHAREGPT.json [--prompts 50] [--tokens 96]   kernels against octavo's numpy definition, logits and greedy tokens
    accuracy.py perplexity SHAREGPT.json [--turns 100] [--peer]     of the default model; --peer: beside llama-cpp-python on the same file
    accuracy.py perplexity SHAREGPT.json --model FOLDER             of another model

A turn is one assistant message with what went before it, cut to --tokens; only the last --score tokens are scored.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from octavo.config import EngineArgs
from octavo.json_file import whole_values
from octavo.loader.hf_config import load_hf_config
from octavo.loader.load import load_weights, open_checkpoint
from octavo.loader.resolve import ModelSource, resolve_model
from octavo.models import build_model
from octavo.ops.batch import Batch
from octavo.ops.cpu.program import CpuProgram
from octavo.runner.reference import ReferenceProgram
from octavo.tokenizer.tokenizer import Tokenizer

BLOCK = 16


def conversations(path: Path) -> list[list[str]]:
    """Messages of whole conversations; the file may be cut off in the middle of one."""
    text = path.read_text()
    found = []
    for item in whole_values(text, text.index("[") + 1):
        messages = [m["value"] for m in item.get("conversations", []) if m.get("value")]
        if len(messages) >= 2:
            found.append(messages)
        if len(found) >= 2000:
            break
    return found


def turns(path: Path, tokenizer: Tokenizer, count: int, tokens: int) -> list[list[int]]:
    """Token ids of `count` question-and-answer turns of exactly `tokens` tokens, one a conversation, evenly picked."""
    out = []
    for messages in conversations(path)[:: max(1, 2000 // (count * 4))]:
        ids = tokenizer.encode(f"{messages[0]}\n\n{messages[1]}")
        if len(ids) >= tokens:
            out.append(ids[:tokens])
        if len(out) == count:
            return out
    return out


def whole(ids: list[int], groups: int) -> Batch:
    """One sequence from its start; each group of layers has blocks of its own, one after the other."""
    n = len(ids)
    positions = np.arange(n, dtype=np.int32)
    table_GSB = np.arange(groups * -(-n // BLOCK), dtype=np.int32).reshape(groups, 1, -1)
    slots_GT = table_GSB[:, 0, positions // BLOCK] * BLOCK + positions % BLOCK
    return Batch(np.array(ids, np.int32), positions, slots_GT, np.array([0, n], np.int32), np.array([n], np.int32), table_GSB)


class Run:
    """A model on one backend, with room for one sequence of up to `tokens`."""

    def __init__(self, source: ModelSource, backend: str, tokens: int, quantization: str | None = None) -> None:
        hf = load_hf_config(source)
        model = build_model(hf)
        checkpoint = open_checkpoint(source, hf, "auto", quantization, EngineArgs().quantize_embeddings)  # as the engine holds it
        self.report = load_weights(model, checkpoint, 2)
        self.groups = len(model.kv_layout.windows)
        common = dict(num_blocks=-(-tokens // BLOCK) * self.groups, block_size=BLOCK, kv_dtype="bfloat16", max_rows=64, max_positions=tokens)
        self.program: CpuProgram | ReferenceProgram
        if backend == "reference":
            self.program = ReferenceProgram(model, **common)
        else:
            self.program = CpuProgram(model, max_tokens=tokens, **common)

    def logits(self, ids: list[int], first: int) -> np.ndarray:
        """float32 [len(ids) - first, V]: predictions of the tokens after position first.."""
        self.program.forward(whole(ids, self.groups))
        rows = np.arange(first, len(ids), dtype=np.int32)
        return np.concatenate([self.program.logits(rows[i : i + 64]).copy() for i in range(0, len(rows), 64)])


def compare_logits(args: argparse.Namespace, source: ModelSource, prompts: list[list[int]]) -> None:
    kernels, definition = Run(source, "cpu", args.tokens), Run(source, "reference", args.tokens)
    worst, errors, spread, differ = 0.0, [], [], []
    for number, ids in enumerate(prompts):
        ours, theirs = (run.logits(ids, args.tokens - args.score) for run in (kernels, definition))
        error = np.abs(ours - theirs)
        worst = max(worst, float(error.max()))
        errors.append(float(np.sqrt((error**2).mean())))
        spread.append(float(theirs.std()))
        for row in np.nonzero(ours.argmax(1) != theirs.argmax(1))[0]:
            first, second = np.sort(theirs[row])[::-1][:2]
            differ.append((number, args.tokens - args.score + int(row), float(first - second)))
    scored = len(prompts) * args.score
    print(f"{len(prompts)} prompts, {scored} positions; logits' own standard deviation {np.mean(spread):.2f}")
    print(f"difference: root mean square {np.mean(errors):.4f}, largest {worst:.3f}")
    print(f"greedy token differs at {len(differ)} positions ({100 * len(differ) / scored:.2f} %); margin of the definition's best over its second there:")
    for number, position, margin in differ:
        print(f"  prompt {number:2d} position {position:4d} margin {margin:.4f}")


def perplexity(rows: Iterable[np.ndarray], targets: list[np.ndarray]) -> float:
    """`rows`: each prompt's logits, made one prompt at a time: over a large vocabulary all of them would not fit into memory."""
    total = count = 0.0
    for logits, ids in zip(rows, targets, strict=True):
        top = logits.max(1, keepdims=True)
        norm = np.log(np.exp(logits - top).sum(1, dtype=np.float64)) + top[:, 0]
        total += float((norm - logits[np.arange(len(ids)), ids]).sum())
        count += len(ids)
    return math.exp(total / count)


def compare_perplexity(args: argparse.Namespace, source: ModelSource, prompts: list[list[int]]) -> None:
    first = args.tokens - args.score
    targets = [np.array(ids[first + 1 :]) for ids in prompts]
    run = Run(source, "cpu", args.tokens, args.quantization)
    print(f"weights {run.report.weights_bytes / 1e6:.1f} MB, {run.report.weights_bytes / run.report.fp16_bytes:.1%} of fp16")
    if args.ids:
        args.ids.write_text("".join(f"{' '.join(map(str, ids))}\n" for ids in prompts))
    print(f"octavo {perplexity((run.logits(ids, first)[:-1] for ids in prompts), targets):.4f} over {sum(map(len, targets))} tokens")
    if args.peer:
        from llama_cpp import Llama

        peer = Llama(str(source.path), n_ctx=args.tokens, n_batch=args.tokens, logits_all=True, verbose=False, n_threads=2)

        def theirs() -> Iterator[np.ndarray]:
            for ids in prompts:
                peer.reset()
                peer.eval(ids)
                yield np.array(peer.scores[first : len(ids) - 1])

        print(f"llama-cpp-python {perplexity(theirs(), targets):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("logits", "perplexity"))
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", default=None, help="w4 or w8: round a plain checkpoint while it is loaded")
    parser.add_argument("--prompts", "--turns", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=None)
    parser.add_argument("--score", type=int, default=None)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--ids", type=Path, default=None, help="write the turns' token ids here, one turn a line")
    args = parser.parse_args()
    logits = args.what == "logits"
    args.prompts = args.prompts or (50 if logits else 100)
    args.tokens = args.tokens or (96 if logits else 512)
    args.score = args.score or (32 if logits else args.tokens - 64)
    source = resolve_model(args.model)
    prompts = turns(args.dataset, Tokenizer.load(source.path), args.prompts, args.tokens)
    (compare_logits if logits else compare_perplexity)(args, source, prompts)


if __name__ == "__main__":
    main()
