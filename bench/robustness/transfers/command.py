"""Hangs up between a server that prefills and one that decodes, among other requests.

    python -m bench.robustness transfers --output transfers.jsonl

A client asks the first server for a prompt's blocks, and then the second one for the answer. Some clients leave: before
the first server has answered, between the two, while the blocks move, or after the first token. NIXL lends the blocks
of a client that does not come back for some time.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection
from typing import Annotated, Any

import httpx
import typer
from openai import OpenAI

from bench.common.console import end_with, open_console
from bench.common.continuations import Continuation, gap_at_first_difference, logprob_error
from bench.common.engine import Variant
from bench.common.metrics import metrics_text, read_metrics, wait_until_quiet
from bench.common.models import NEEDLE_8M
from bench.common.options import Commit, Output
from bench.common.results import ResultFile, Row
from bench.robustness.deployments.cells import ONE_STEP
from bench.robustness.deployments.trials import (
    NEW_TOKENS,
    WANTED,
    Launcher,
    moved_tokens,
    nixl_pair,
    prefilled,
    prompts,
)
from bench.robustness.soak.clients import Asker
from bench.robustness.storm.ending import Idle, read_idle
from bench.robustness.storm.hostile import COMPLETIONS
from vllm_sparse_plugin.tools.provenance import describe_run
from vllm_sparse_plugin.tools.server import LaunchedServer, ServerError

HANG_UPS = "in prefill", "between", "while blocks move", "after a token"
ANSWER = "answer"
_LENT = {
    "expired": "vllm:nixl_num_kv_expired_reqs_total",
    "unexpected_notifications": "vllm:nixl_num_notifications_after_expiry_total",
}
"""Metrics of the first server by column: requests whose blocks nobody read in time, and messages of the second server
about requests that have ended. vLLM names blocks that were read too late, but a request that is left while its blocks
move sends two messages."""
_PATIENCE = (0.0, 0.02, 0.1, 0.4)
"""Seconds after which clients leave that have sent their request, in turn."""


def transfers(
    output: Output,
    hang_ups: Annotated[int, typer.Option(min=4, help="Requests that are left; the four ways in turn.")] = 200,
    answers: Annotated[int, typer.Option(min=1, help="Other requests.")] = 100,
    clients: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 4,
    lease_seconds: Annotated[
        int, typer.Option(min=6, help="How long blocks are lent; a slow machine needs more.")
    ] = 30,
    variant: Annotated[str, typer.Option(help="BACKEND or BACKEND:KV_CACHE_DTYPE.")] = "unique",
    commit: Commit = None,
) -> None:
    """Leave requests between a server that prefills and one that decodes.

    Exit code 3 for a changed answer, a lost block or a request that failed.
    """
    launcher, console = Launcher({}, Variant.parse(variant)), open_console()
    try:
        with (
            ResultFile(output, describe_run(NEEDLE_8M, commit)) as file,
            # A prefix cache would answer without moving blocks.
            nixl_pair(launcher, "--no-enable-prefix-caching", kv_lease_duration=lease_seconds) as pair,
        ):
            row, faults = leave_between(*pair, plan(hang_ups, answers), clients)
            file.write(
                {
                    "backend": launcher.variant.name,
                    "clients": clients,
                    "lease_seconds": lease_seconds,
                    **row,
                    "faults": faults,
                }
            )
            console.print(row)
    except (ServerError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(3) from None
    end_with(faults)


def plan(hang_ups: int, answers: int) -> list[str]:
    """Returns the kinds of all requests, in a fixed random order."""
    kinds = [HANG_UPS[number % len(HANG_UPS)] for number in range(hang_ups)] + [ANSWER] * answers
    random.Random(0).shuffle(kinds)
    return kinds


@dataclass
class Found:
    """The results of all requests. Threads append."""

    kinds: list[str] = field(default_factory=list)
    pairs: list[tuple[Continuation, Continuation]] = field(default_factory=list)
    """Answers without hang-ups, and with them."""
    failures: list[str] = field(default_factory=list)


def leave_between(
    prefill: LaunchedServer, decode: LaunchedServer, kinds: Sequence[str], clients: int
) -> tuple[Row, list[str]]:
    """Sends all requests; returns the columns of the row, and the failed checks."""
    asker, found = Asker(decode.client, NEEDLE_8M.name, NEW_TOKENS), Found()
    questions = prompts()
    # The second server computes these prompts itself.
    local = [asker.ask(tokens) for tokens in questions]
    before = idle_pair(prefill, decode)
    alone = [asker.ask(tokens, kv_transfer_params=prefilled(prefill.client, tokens)) for tokens in questions]
    moved = moved_tokens(decode.client)

    def send(number: int) -> None:
        kind, index = kinds[number], number % len(questions)
        try:
            answer = run(kind, _PATIENCE[number % len(_PATIENCE)], prefill, asker, questions[index])
        except Exception as error:  # a failing request must be reported
            found.failures.append(f"{kind}: a request failed: {' '.join(str(error).split()):.200}")
            return
        found.kinds.append(kind)
        if answer is not None:
            found.pairs.append((alone[index], answer))

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(send, range(len(kinds))))
    for server in (prefill, decode):
        wait_until_quiet(lambda server=server: read_metrics(metrics_text(server.client)))  # type: ignore[misc]
    after = idle_pair(prefill, decode)
    lent = read_metrics(metrics_text(prefill.client))
    moves = list(zip(local, alone, strict=True))
    row = {
        "sent": dict(Counter(found.kinds)),
        "moved_alone": compared(moves),
        "moved_tokens_alone": moved,
        "prompt_tokens": sum(map(len, questions)),
        "beside_hang_ups": compared(found.pairs),
        "end": {name: asdict(idle) for name, idle in after.items()},
        **{column: round(lent.get(metric, 0)) for column, metric in _LENT.items()},
        "leaked_blocks": {name: idle.used_blocks - before[name].used_blocks for name, idle in after.items()},
    }
    return row, [*dict.fromkeys(found.failures), *faults_of(row, kinds)]


def run(kind: str, patience: float, prefill: LaunchedServer, asker: Asker, tokens: list[int]) -> Continuation | None:
    """Sends one request; returns its answer, or None if the client leaves.

    Args:
        kind: one of `HANG_UPS`, or `ANSWER`.
        patience: seconds that a client waits for a server before it leaves.
        prefill: the server that prefills.
        asker: asks the server that decodes.
        tokens: the prompt.
    """
    if kind == HANG_UPS[0]:
        leave(prefill.client, patience, prompt=tokens, max_tokens=1, kv_transfer_params=WANTED)
        return None
    blocks = prefilled(prefill.client, tokens)
    if kind == HANG_UPS[2]:
        leave(asker.client, patience, prompt=tokens, max_tokens=asker.answer_tokens, kv_transfer_params=blocks)
    elif kind == HANG_UPS[3]:
        asker.hang_up(tokens, 1, kv_transfer_params=blocks)
    return asker.ask(tokens, kv_transfer_params=blocks) if kind == ANSWER else None


def leave(client: OpenAI, patience: float, **fields: Any) -> None:
    """Sends a request, and closes the connection after some seconds, whether there is an answer or not."""
    body = {"model": NEEDLE_8M.name, "temperature": 0, "ignore_eos": True, **fields}
    with closing(HTTPConnection("127.0.0.1", client.base_url.port or 80)) as connection:
        connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
        if patience and connection.sock is not None:
            connection.sock.settimeout(patience)
            with suppress(TimeoutError):
                connection.getresponse()


def idle_pair(prefill: LaunchedServer, decode: LaunchedServer) -> dict[str, Idle]:
    """Returns the state of both servers by name."""
    return {server.name: read_idle(metrics_text(server.client)) for server in (prefill, decode)}


def compared(pairs: Sequence[tuple[Continuation, Continuation]]) -> Row:
    """Returns how answers differ from the expected ones, which come first in each pair."""
    gaps = [gap for gap in (gap_at_first_difference(*pair) for pair in pairs) if gap is not None]
    return {
        "answers": len(pairs),
        "parted": len(gaps),
        "too_far": sum(gap > ONE_STEP for gap in gaps),
        "logprob_error": round(max([0.0, *(logprob_error(*pair) for pair in pairs)]), 4),
    }


def faults_of(row: Mapping[str, Any], kinds: Sequence[str]) -> list[str]:
    """The failed checks of a row, one sentence each; `kinds` are of all requests."""
    faults = [
        f"{name}: {row[name]['too_far']} of {row[name]['answers']} answers part by more than a tie"
        for name in ("moved_alone", "beside_hang_ups")
        if row[name]["too_far"]
    ]
    if row["moved_tokens_alone"] * 2 < row["prompt_tokens"]:
        faults.append(f"{row['moved_tokens_alone']} of {row['prompt_tokens']} tokens came from the other server")
    if row["sent"] != dict(Counter(kinds)):
        faults.append(f"sent {row['sent']} of {dict(Counter(kinds))}")
    for name, idle in row["end"].items():
        if idle["running"] or idle["waiting"]:
            faults.append(f"{name}: {idle['running']} requests run and {idle['waiting']} wait")
        if leaked := row["leaked_blocks"][name]:
            faults.append(f"{name}: {leaked} blocks are in use without requests")
    return faults
