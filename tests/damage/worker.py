"""A process that loads damaged models one after the other, as the program would, and reports on each.

`python worker.py cases FOLDER FIRST STEP` or `python worker.py flips FOLDER FIRST STEP`. One JSON line before a case (so that a crash is known
by its name) and one after it. A hang ends the process with a traceback.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import hashlib
import io
import json
import resource
import shutil
import stat
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "unit" / "loader")]

import numpy as np  # noqa: E402
from cases import Case, write  # noqa: E402
from flips import flipped  # noqa: E402
from generate import all_cases  # noqa: E402
from quantised import HEALTHY  # noqa: E402

from octavo.cli.__main__ import run  # noqa: E402
from octavo.errors import ConfigError, ModelFileError  # noqa: E402
from octavo.loader.hf_config import load_generation_config, load_hf_config  # noqa: E402
from octavo.loader.load import load_weights, open_checkpoint  # noqa: E402
from octavo.loader.resolve import resolve_model  # noqa: E402
from octavo.models import build_model  # noqa: E402
from octavo.tokenizer.tokenizer import Tokenizer  # noqa: E402

HANG_SECONDS = 60
FLIPS = 600
PROMPT = "abc cab 012"
CLI = ("generate", "-p", PROMPT, "--max-tokens", "6", "--temperature", "0", "--ignore-eos", "--json", "--num-threads", "1")
MEMORY = ("--kv-cache-memory", "2M", "--max-num-seqs", "2", "--max-num-batched-tokens", "32")


def digest_of(model: str) -> str:
    """Loads all that the program reads of a model; a hash of what came of it."""
    source = resolve_model(model)
    tokenizer = Tokenizer.load(source.path, None)
    generation = load_generation_config(source)
    hf = load_hf_config(source)
    net = build_model(hf)
    load_weights(net, open_checkpoint(source, hf))
    sha = hashlib.sha256()
    for linear in net.linears():
        for weight in linear.weights:
            sha.update(f"{weight.kind} {weight.n} {weight.k}".encode())
            sha.update(np.ascontiguousarray(weight.dequantize()).tobytes())
    for vector in net.vectors():
        sha.update(np.ascontiguousarray(vector.value).tobytes())
    facts = (tokenizer.vocab_size, tokenizer.eos_token_ids, tokenizer.encode(PROMPT), generation, net.context_length, net.vocab_size)
    sha.update(repr(facts).encode())
    return sha.hexdigest()


def attempt(model: str) -> tuple[str, str]:
    """refused and the message, loaded and the digest, or broken and a traceback."""
    try:
        return "loaded", digest_of(model)
    except (ConfigError, ModelFileError) as e:
        return "refused", str(e)
    except BaseException:
        return "broken", traceback.format_exc()


def command_line(model: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = run([*CLI, *MEMORY, "--model", model])
        except BaseException:
            return -1, "", traceback.format_exc()
    return code, out.getvalue(), err.getvalue()


def reset_peak() -> int:
    """Bytes in memory now; the peak begins anew. 0 where the system cannot do that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return memory("VmRSS")
    except OSError:
        return 0


def memory(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def on_disk(folder: Path) -> int:
    """Bytes of all regular files."""
    states = [path.lstat() for path in folder.rglob("*")]
    return sum(state.st_size for state in states if stat.S_ISREG(state.st_mode))


def report(case: Case, folder: Path) -> dict[str, object]:
    write(folder, case.files)
    model = str(folder / case.start) if case.start else str(folder)
    begun = time.perf_counter()
    before = reset_peak()
    outcome, text = attempt(model)
    code, out, err = command_line(model)
    peak = memory("VmHWM") - before if before else 0
    return {
        "name": case.name, "outcome": outcome, "text": text, "code": code, "out": out, "err": err, "peak": peak,
        "size": on_disk(folder), "folder": str(folder), "seconds": time.perf_counter() - begun,
    }  # fmt: skip


# Flips


def stored(model: str) -> dict[str, bytes]:
    """All tensors' bytes, of a model that loads as a whole."""
    source = resolve_model(model)
    Tokenizer.load(source.path, None)
    load_generation_config(source)
    hf = load_hf_config(source)
    checkpoint = open_checkpoint(source, hf)
    load_weights(build_model(hf), checkpoint)
    return {name: checkpoint.tensors.get(name).data.tobytes() for name in checkpoint.names()}


@functools.cache
def healthy_tensors(form: str, root: Path) -> dict[str, bytes]:
    files, start = HEALTHY[form][0](), HEALTHY[form][1]
    folder = root / f"healthy-{form}"
    folder.mkdir()
    write(folder, files)
    return stored(str(folder / start) if start else str(folder))


def changed_bytes(before: dict[str, bytes], after: dict[str, bytes]) -> int:
    """How many bytes of the tensors differ; a tensor that is gone or of another size counts as a million."""
    count = 0
    for name, data in before.items():
        other = after.get(name, b"")
        same_size = len(other) == len(data)
        count += int(np.sum(np.frombuffer(data, np.uint8) != np.frombuffer(other, np.uint8))) if same_size else 1_000_000
    return count


def flip_report(seed: int, folder: Path) -> dict[str, object]:
    case = flipped(seed)
    write(folder, case.files)
    model = str(folder / case.start) if case.start else str(folder)
    before = reset_peak()
    changed = 0
    try:
        changed = changed_bytes(healthy_tensors(case.form, folder.parent), stored(model))
        outcome, text = "loaded", ""
    except (ConfigError, ModelFileError) as e:
        outcome, text = "refused", str(e)
    except BaseException:
        outcome, text = "broken", traceback.format_exc()
    return {
        "name": str(seed), "outcome": outcome, "text": text, "changed": changed, "flipped": case.count, "file": case.file,
        "peak": memory("VmHWM") - before if before else 0, "size": on_disk(folder), "folder": str(folder),
    }  # fmt: skip


def main(what: str, root: Path, first: int, step: int) -> None:
    cases = all_cases() if what == "cases" else range(FLIPS)
    for i, case in enumerate(cases):
        if i < first or (i - first) % step:
            continue
        print(json.dumps({"begun": i, "name": case.name if isinstance(case, Case) else str(case)}), flush=True)
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        folder = root / str(i)
        folder.mkdir()
        print(json.dumps(report(case, folder) if isinstance(case, Case) else flip_report(case, folder)), flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
