"""Attacks a server while other clients use it, and checks that these lose nothing.

    python -m bench.robustness storm --clients 24 --minutes 2 --longest 8K --output storm.jsonl

A third of the clients is hostile: wrong arguments, fields and bodies, connections that end in mid-answer, dense
requests of the longest context, schemas, many copies, prompts that are too long. The others ask fixed prompts with
fixed seeds: twice without the hostile clients, then with them.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, NamedTuple

import httpx
import typer
from rich.console import Console

from bench.common.console import open_console
from bench.common.engine import Variant, WrongBackendError
from bench.common.metrics import metrics_text, read_metrics, wait_until_quiet
from bench.common.models import library_tokens, load_tokenizer, open_model
from bench.common.options import Commit, Output, parse_size
from bench.common.results import ResultFile, Row
from bench.common.servers import (
    AdditionalConfig,
    ServedModel,
    ServerArgument,
    StartSeconds,
    prepare_server,
    server_settings,
)
from bench.robustness.soak.clients import Asker
from bench.robustness.storm.ending import Idle, end_by_sigterm, health, read_idle
from bench.robustness.storm.hostile import OWN_KINDS, HostileRequests
from bench.robustness.storm.load import Hostile, Phase, Well, run_phase
from bench.robustness.storm.verdict import (
    allowed_gap,
    faults_of_end,
    faults_of_phases,
    phase_columns,
    ratios,
)
from vllm_sparse_plugin.config import KEY
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.arguments import parse_additional_config
from vllm_sparse_plugin.tools.provenance import describe_run
from vllm_sparse_plugin.tools.server import LaunchedServer, ServerError, launch_server

_HOSTILE = 1 / 3
"""Share of the clients."""
_LONG_ANSWER = 64
"""Room for the answer to a prompt of the longest context."""
_STEP = 1 << 16
"""Characters of text between the starts of two long prompts."""


def storm(
    output: Output,
    backend: Annotated[
        str, typer.Option(help="BACKEND or BACKEND:KV_CACHE_DTYPE; dense is vLLM's own attention.")
    ] = "unique",
    preset: Annotated[str | None, typer.Option(help="Preset of the plugin instead of the backend's.")] = None,
    model: ServedModel = "needle-8m",
    clients: Annotated[int, typer.Option(min=3, help="Clients; a third of them is hostile.")] = 200,
    minutes: Annotated[float, typer.Option(min=0.1, help="Duration of the storm.")] = 8,
    quiet_seconds: Annotated[float, typer.Option(min=1, help="Duration of each quiet phase.")] = 20,
    pause: Annotated[float, typer.Option(min=0.01, help="Mean seconds between requests of a hostile client.")] = 1,
    slowest: Annotated[
        float, typer.Option(min=1, help="Largest ratio of the median times per token, storm to quiet; inf for any.")
    ] = 1.5,
    context: Annotated[str, typer.Option(help="Tokens of a well-behaved prompt, such as 4K.")] = "4K",
    longest: Annotated[str | None, typer.Option(help="Longest context. Default: the model's.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Different well-behaved prompts.")] = 16,
    long_prompts: Annotated[int, typer.Option(min=1, help="Different hostile prompts of the longest context.")] = 2,
    answer_tokens: Annotated[int, typer.Option(min=16, help="Tokens of a well-behaved answer.")] = 64,
    additional_config: AdditionalConfig = None,
    server_argument: ServerArgument = None,
    start_seconds: StartSeconds = 600,
    commit: Commit = None,
) -> None:
    """Ask in peace, twice, then beside hostile clients; exit code 1 if a check failed, 3 if no server starts."""
    from vllm_sparse_plugin.tools.needles import build_questions

    variant, console = Variant.parse(backend), open_console()
    with open_model(model) as opened:
        length = parse_length("longest", longest, int(opened.config["max_position_embeddings"]))
        tokens = parse_length("context", context, length - answer_tokens)
        tokenizer = load_tokenizer(opened.folder)
        texts = [question.prompt for question in build_questions(tokenizer, "kv", tokens, prompts, seed=1)]
        longest_prompts = [
            library_tokens(tokenizer, number * _STEP, length - _LONG_ANSWER) for number in range(long_prompts)
        ]
        settings = server_settings(
            opened, variant, length, with_preset(variant, additional_config, preset), server_argument, start_seconds
        )
        about = {
            "backend": variant.name, "additional_config": settings.additional_config, "minutes": minutes,
            "context_tokens": tokens, "max_model_len": length,
        }  # fmt: skip
        try:
            with (
                ResultFile(output, describe_run(opened.folder, commit)) as file,
                launch_server(variant.name.replace(":", "-"), settings) as server,
            ):
                server.wait_until_ready()
                with server.explain_failures():
                    prepare_server(server.client, variant, opened)
                asker = Asker(server.client, opened.folder.name, answer_tokens)
                hostile = Hostile(
                    server.client.base_url.port or 80,
                    HostileRequests(opened.folder.name, texts, longest_prompts, length),
                    int(clients * _HOSTILE),
                    pause,
                )
                well = Well(asker, texts, clients - hostile.clients)
                limits = Limits(quiet_seconds, minutes * 60, slowest, OWN_KINDS if variant.sparse else ())
                row, faults = attack(server, well, hostile, limits, console)
                file.write({**about, **row, "faults": faults})
                if faults:
                    for fault in (*faults, f"the server's log is {server.log}"):
                        console.print(fault, markup=False)
                    raise typer.Exit(1)
        except (ServerError, WrongBackendError, httpx.HTTPError) as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(3) from None


class Limits(NamedTuple):
    """Durations and limits of a run."""

    quiet_seconds: float
    storm_seconds: float
    slowest: float
    """Largest allowed ratio of the median times per token."""
    own_kinds: tuple[str, ...]
    """Kinds of hostile requests whose refusals are the plugin's."""


def attack(
    server: LaunchedServer, well: Well, hostile: Hostile, limits: Limits, console: Console
) -> tuple[Row, list[str]]:
    """Runs all phases and ends the server; returns the columns of the row, and the failed checks."""
    client = server.client

    def idle() -> Idle:
        return read_idle(metrics_text(client))

    def show(phase: Phase) -> Phase:
        console.print(f"{phase.name}: {len(phase.ms_per_token)} answers in {phase.seconds:g} seconds")
        return phase

    last, after = Phase("end"), None
    with server.explain_failures():
        before = idle()
        phases = [show(run_phase(well, name, limits.quiet_seconds)) for name in ("quiet", "quiet again")]
        calm = idle()
    phases.append(show(run_phase(well, "storm", limits.storm_seconds, hostile)))
    with suppress(httpx.HTTPError):
        wait_until_quiet(lambda: read_metrics(metrics_text(client)))
        well.ask_once(last, 0)
        wait_until_quiet(lambda: read_metrics(metrics_text(client)))
        after = idle()
    allowed = allowed_gap(phases[:-1])
    code = health(str(client.base_url).removesuffix("/v1/"))
    end = end_by_sigterm(server.process)
    names = "quiet", "quiet_again", "storm"
    row = {
        "clients": well.clients,
        "hostile_clients": hostile.clients,
        "allowed_gap": allowed,
        **{name: phase_columns(phase, allowed) for name, phase in zip(names, phases, strict=True)},
        **ratios(phases[-2], phases[-1]),
        **hostile.as_row(),
        "preemptions": after and after.preemptions - calm.preemptions,
        "leaked_blocks": after and after.used_blocks - before.used_blocks,
        "end": after and asdict(after),
        "health": code,
        "end_seconds": end.seconds,
        "left_processes": end.left,
    }
    faults = faults_of_phases([*phases, last], allowed, row["preemptions"] or 0, row, limits.slowest, limits.own_kinds)
    return row, faults + faults_of_end(before, after, code, end)


def with_preset(variant: Variant, additional_config: str | None, preset: str | None) -> str | None:
    """Returns `--additional-config` with a preset.

    Raises:
        ConfigurationError: if the text is not a JSON object, or the backend has no presets.
    """
    if preset is None:
        return additional_config
    if not variant.sparse:
        raise ConfigurationError(
            f"preset: got {preset!r} with {variant.name}, allowed: none, or a backend of the plugin"
        )
    settings = parse_additional_config(additional_config or "{}")
    return json.dumps(settings | {KEY: {"preset": preset, **(settings.get(KEY) or {})}})


def parse_length(option: str, text: str | None, most: int) -> int:
    """Returns a number of tokens; None is the most.

    Raises:
        ConfigurationError: if it is more, or not a size.
    """
    try:
        tokens = most if text is None else parse_size(text)
    except ValueError:
        tokens = most + 1
    if tokens > most:
        raise ConfigurationError(f"{option}: got {text!r}, allowed: a positive integer up to {most}, such as 4K")
    return tokens
