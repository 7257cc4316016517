"""Result files for the tests of generated pages."""

import json
from pathlib import Path

ABOUT = {
    "date": "2026-11-21T10:00:00+00:00",
    "command": "python -m bench.serving decode --output out.jsonl",
    "model": "llama-3.1-8b",
    "versions": {"python": "3.12", "vllm": "0.32.0"},
    "hardware": {"gpu": "GPU X", "driver": "1.2", "processor": "CPU Y", "cores": 8},
}


def write_run(path: Path, *rows: dict, **about) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, [ABOUT | about, *rows])) + "\n", encoding="utf-8")
    return path
