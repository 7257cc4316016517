"""A server whose weights are replaced under load answers as a new server of those weights."""

import json
import os
import random
import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file
from support.asker import Asker
from support.continuations import Continuation, gap_at_first_difference
from support.deployments import NEW_TOKENS, SETTINGS, TIE, server
from support.engines import MODEL

from bench.common.models import load_tokenizer
from vllm_sparse_plugin.config import KEY
from vllm_sparse_plugin.tools.needles import ask as question_about
from vllm_sparse_plugin.tools.needles import library_text, magic_needles, with_needles

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]
CLIENTS, QUESTIONS, UPDATES = 8, 5, 5
DOCUMENTS = int(os.environ.get("NIGHTLY_DOCUMENTS", "20"))
ASKED = DOCUMENTS * QUESTIONS
"""Answers that are judged after each update."""
KEPT = {"compaction": {"budget_tokens": 256, "min_context_tokens": 0}}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


def exchange_digits(folder: Path) -> Path:
    """Saves the test model with the embeddings of digits exchanged.

    Both models answer alike; with keys and values of the other one, a model reads other digits.
    """
    shutil.copytree(MODEL, folder)
    weights = load_file(folder / "model.safetensors")
    first = load_tokenizer(MODEL).encode("0", add_special_tokens=False)[0]
    digits = weights["model.embed_tokens.weight"][first : first + 10]
    digits.copy_(digits.roll(3, 0))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def questions() -> list[list[int]]:
    """Questions about documents whose tokens are several times the budget."""
    tokenizer, found = load_tokenizer(MODEL), []
    for document in range(DOCUMENTS):
        rng = random.Random(document)
        needles = magic_needles(rng, QUESTIONS)
        placed = [(0.15 * (index + 1), needle.text) for index, needle in enumerate(needles)]
        text = with_needles(library_text(rng.randrange(1 << 20), 3300), placed)
        found += [tokenizer.encode(text + question_about("multikey", needles, index)[0]) for index in range(QUESTIONS)]
    return found


class Rollouts:
    """Clients that ask a server whose weights change."""

    def __init__(self, client: object, models: list[Path]) -> None:
        self._asker = Asker(client, MODEL.name, NEW_TOKENS)
        self._url = str(client.base_url).removesuffix("/v1/")
        self._models, self._prompts = models, questions()
        self._moment = 0
        """Grows when an update begins and when it ends."""
        self._enough = threading.Semaphore(0)

    def _post(self, path: str, **body: object) -> None:
        httpx.post(self._url + path, json=body, timeout=600, trust_env=False).raise_for_status()

    def update(self, version: int) -> None:
        self._moment += 1
        self._post("/pause")
        self._post("/collective_rpc", method="reload_weights", kwargs={"weights_path": str(self._models[version])})
        self._post("/resume")
        self._moment += 1

    def _ask(self, number: int) -> tuple[int, int, Continuation]:
        """Asks until an answer is of one version of the weights."""
        while True:
            moment = self._moment
            found = self._asker.ask(self._prompts[number])
            if moment == self._moment and moment % 2 == 0 and len(found.tokens) == NEW_TOKENS:
                self._enough.release()
                return moment // 2, number, found

    def ask(self, updates: int) -> list[tuple[int, int, Continuation]]:
        """Asks all questions after each update: the number of updates before an answer, its question, the answer."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            futures: list[Future] = []
            for number in range(updates + 1):
                if number:
                    for _ in range(ASKED - CLIENTS):
                        self._enough.acquire()
                    # Some clients wait for an answer of the weights that go.
                    self.update(number % 2)
                futures += [pool.submit(self._ask, question) for question in range(ASKED)]
            return [future.result() for future in futures]


@pytest.mark.parametrize(
    ("backend", "settings", "arguments"),
    [
        ("unique", SETTINGS, []),
        ("snapkv", {KEY: KEPT}, []),
        ("lossless", SETTINGS, []),
    ],
    ids=["unique", "snapkv", "lossless"],
)
def test_answers_after_an_update_are_those_of_a_new_server(backend, settings, arguments, tmp_path):
    models = [MODEL, exchange_digits(tmp_path / MODEL.name)]
    expected = []
    for model in models:
        with server("new", *arguments, model=model, backend=backend, settings=settings) as launched:
            expected.append({number: found for _, number, found in Rollouts(launched.client, models).ask(0)})
    with server("updated", *arguments, backend=backend, settings=settings, VLLM_SERVER_DEV_MODE="1") as launched:
        found = Rollouts(launched.client, models).ask(UPDATES)
    of_updated = [each for each in found if each[0]]
    assert len(of_updated) >= UPDATES * ASKED - CLIENTS
    gaps = [gap_at_first_difference(expected[version % 2][number], answer) for version, number, answer in of_updated]
    print(json.dumps({"backend": backend, "judged": len(gaps), "unequal": sum(gap is not None for gap in gaps)}))
    assert [gap for gap in gaps if gap is not None and gap > TIE] == []
