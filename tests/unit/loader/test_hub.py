"""Needs Python only, and sockets on this machine. Fetching from a hub: its client against a server that speaks the hub's protocol."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")
COMMIT = "1" * 40
INDEX_OF_TWO = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()


class Hub(BaseHTTPRequestHandler):
    """One repository, org/name; `files` and `asked` belong to the server."""

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        files: dict[str, bytes] = self.server.files  # type: ignore[attr-defined]
        path = self.path.split("?")[0]
        name = path.rpartition("/")[2]
        if path.startswith("/api/models/org/name/tree/"):
            listing = [{"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()} for file, data in files.items()]
            self.reply(200, json.dumps(listing).encode(), body, {"Content-Type": "application/json"})
        elif path.startswith("/api/models/org/name"):
            info = {"_id": "1", "id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
            self.reply(200, json.dumps(info).encode(), body, {"Content-Type": "application/json"})
        elif path.startswith("/org/name/resolve/") and name in files:
            if body:
                self.server.asked.append(name)  # type: ignore[attr-defined]
            data = files[name]
            self.reply(200, data, body, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'})
        else:
            self.reply(404, b"", body, {"X-Error-Code": "RepoNotFound" if "org/name" not in path else "EntryNotFound"})

    def reply(self, status: int, data: bytes, body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.asked = {}, []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


CODE = """
import sys
from octavo.errors import ConfigError
from octavo.loader.resolve import resolve_model
for model in sys.argv[1:]:
    try:
        source = resolve_model(model, progress=False)
        print(source.kind, source.path.name if source.kind == "gguf" else sorted(f.name for f in source.path.iterdir()))
    except ConfigError as e:
        print(e)
"""


@pytest.fixture
def resolved(tmp_path: Path) -> Callable[..., list[str]]:
    """Resolves models in a process of their own: the hub's client reads its address once, when it is imported."""

    def run(server: ThreadingHTTPServer, *models: str) -> list[str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING_FACE")) and "proxy" not in key.lower()}
        env |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "hf"), "OCTAVO_CACHE": str(tmp_path / "cache"),
                "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}  # fmt: skip
        done = subprocess.run([sys.executable, "-c", CODE, *models], env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def test_weights_and_companions_are_fetched_once(hub: ThreadingHTTPServer, resolved: Callable[..., list[str]], tmp_path: Path) -> None:
    hub.files = {"config.json": b"{}", "model.safetensors.index.json": INDEX_OF_TWO, "model-1.safetensors": b"a", "model-2.safetensors": b"b",
                 "tokenizer.json": b"{ }", "modeling_own.py": b"raise SystemExit", "pytorch_model.bin": b"pickle", "x.gguf": b"g"}  # fmt: skip
    wanted = ["config.json", "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    assert resolved(hub, "org/name", "org/name") == [f"safetensors {wanted}"] * 2
    assert sorted(hub.asked) == wanted
    assert (tmp_path / "cache" / "hub" / "models--org--name").is_dir()
    hub.asked.clear()
    assert resolved(hub, "org/name") == [f"safetensors {wanted}"]
    assert hub.asked == []


def test_gguf_repositories(hub: ThreadingHTTPServer, resolved: Callable[..., list[str]]) -> None:
    hub.files = {"a.Q4_0.gguf": b"a", "b.Q8_0.gguf": b"b", "README.md": b""}
    assert resolved(hub, "org/name", "org/name/b.Q8_0.gguf", "org/name/c.gguf", "org/other") == [
        "model = 'org/name': holds 2 gguf models; give one of them: org/name/a.Q4_0.gguf, ...",
        "gguf b.Q8_0.gguf",
        *resolved(hub, "org/name/c.gguf", "org/other"),
    ]
    assert hub.asked == ["b.Q8_0.gguf"]


def test_refusals_are_one_line(hub: ThreadingHTTPServer, resolved: Callable[..., list[str]]) -> None:
    hub.files = {"pytorch_model.bin": b"pickle"}
    lines = resolved(hub, "org/name", "org/absent", "org/name/c.gguf")
    assert lines[0] == "model = 'org/name': has no .safetensors or .gguf file on the hub"
    assert len(lines) == 3
    assert all("is not on this machine and could not be fetched from the hub: " in line for line in lines[1:])
    hub.files = {}
    assert hub.asked == []
