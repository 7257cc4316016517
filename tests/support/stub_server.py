"""A stand-in for `vllm-sparse serve`: answers the prompt [token] with the entry of that name.

Reads from the variable STUB_SERVER a JSON object: `answers` by the last token of a prompt; `fails`, the attention
backend that ends at its start; `interrupts`, whether a question sends Ctrl-C to the process that started it; `pids`, a
folder for a file with the id of this process.
"""

import argparse
import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SETTINGS = json.loads(os.environ["STUB_SERVER"])
PARSER = argparse.ArgumentParser()
PARSER.add_argument("--port", type=int)
PARSER.add_argument("--served-model-name")
PARSER.add_argument("--attention-backend", default="dense")
ARGUMENTS, _ = PARSER.parse_known_args()


class Handler(BaseHTTPRequestHandler):
    def _send(self, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self._send({"object": "list", "data": [{"id": ARGUMENTS.served_model_name, "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if SETTINGS.get("interrupts"):
            os.kill(os.getppid(), signal.SIGINT)
        text = SETTINGS["answers"][ARGUMENTS.attention_backend].get(str(body["prompt"][-1]), "")
        self._send({"id": "0", "object": "text_completion", "choices": [{"index": 0, "text": text}]})

    def log_message(self, *_: object) -> None:
        pass


(Path(SETTINGS["pids"]) / ARGUMENTS.attention_backend).write_text(str(os.getpid()))
print("(EngineCore pid=7) INFO 01-01 00:00:00 [core.py:1] starts")
if SETTINGS.get("fails") == ARGUMENTS.attention_backend:
    print("(EngineCore pid=7) ERROR 01-01 00:00:00 [core.py:2] ValueError: there is no cache", file=sys.stderr)
    print("RuntimeError: Engine core initialization failed.", file=sys.stderr)
    sys.exit(1)
ThreadingHTTPServer(("127.0.0.1", ARGUMENTS.port), Handler).serve_forever()
