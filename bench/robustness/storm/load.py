"""The clients of a storm, and the phases in which they ask."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException
from socket import SHUT_RDWR

from bench.common.continuations import Continuation, gap_at_first_difference
from bench.common.results import Row
from bench.robustness.soak.clients import Asker
from bench.robustness.storm.hostile import HostileRequests, Request

_SECONDS = 600.0
"""Longest wait for a part of an answer."""
_SHOWN = 200
"""Characters of a body that a fault shows."""
NO_ANSWER = "no answer"
"""A status: the server closed the connection."""


@dataclass
class Phase:
    """The answers of well-behaved clients in a phase."""

    name: str
    ms_per_token: list[float] = field(default_factory=list)
    """Of each answer."""
    gaps: list[float] = field(default_factory=list)
    """Of each changed answer: how much likelier the first answer's token was where it differs, in nats."""
    failures: list[str] = field(default_factory=list)
    """Requests that failed, one sentence each."""
    seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)


class Well:
    """Well-behaved clients. Each asks the prompts in turn, and compares the answers with the first ones."""

    def __init__(self, asker: Asker, prompts: Sequence[str], clients: int) -> None:
        """Takes the prompts, and the number of clients. The seed of a prompt is its number."""
        self._asker, self._prompts, self.clients = asker, prompts, clients
        self._first: dict[int, Continuation] = {}

    def ask(self, phase: Phase, is_over: Callable[[], bool]) -> list[threading.Thread]:
        """Starts the clients. Each asks once or more, until `is_over`. A failed request ends its client."""

        def run(number: int) -> None:
            while self.ask_once(phase, number % len(self._prompts)) and not is_over():
                number += 1

        return _started([partial(run, client) for client in range(self.clients)])

    def ask_once(self, phase: Phase, number: int) -> bool:
        """Asks a prompt; returns whether it was answered."""
        try:
            found, ms_per_token = self._asker.ask_timed(self._prompts[number], seed=number)
        except Exception as error:  # a failing client must be reported
            with phase.lock:
                phase.failures.append(f"a well-behaved request failed: {' '.join(str(error).split()):.200}")
            return False
        with phase.lock:
            phase.ms_per_token.append(ms_per_token)
            gap = gap_at_first_difference(self._first.setdefault(number, found), found)
            if gap is not None:
                phase.gaps.append(gap)
        return True


class Hostile:
    """Hostile clients, and the statuses that they got."""

    def __init__(self, port: int, requests: HostileRequests, clients: int, pause: float) -> None:
        """Takes the port of a server on this machine, and the mean seconds between the requests of a client."""
        self._port, self._requests, self.clients, self._pause = port, requests, clients, pause
        self._lock = threading.Lock()
        self._open: set[HTTPConnection] = set()
        self._end = threading.Event()
        self.statuses: Counter[tuple[str, str]] = Counter()
        """Requests by kind and status."""
        self.failed: dict[str, str] = {}
        """Requests that got no answer or a server's error: their kind, the begin of the body, and the status."""

    def ask(self) -> list[threading.Thread]:
        """Starts the clients."""
        return _started([partial(self._run, random.Random(client)) for client in range(self.clients)])

    def stop(self) -> None:
        """Ends all clients. Requests that still run lose their connection at the same time."""
        self._end.set()
        with self._lock:
            for connection in self._open:
                if connection.sock is not None:
                    with suppress(OSError):
                        connection.sock.shutdown(SHUT_RDWR)

    def send(self, request: Request) -> str:
        """Sends a request; returns its status, or what came instead of it."""
        with closing(HTTPConnection("127.0.0.1", self._port, timeout=_SECONDS)) as connection:
            with self._lock:
                self._open.add(connection)
            try:
                connection.connect()
                # `stop` has not ended a connection that did not exist yet.
                if self._end.is_set():
                    return "hung up"
                connection.request("POST", request.path, request.body, {"Content-Type": "application/json"})
                with connection.getresponse() as reply:
                    lines = 0
                    while request.lines is None or lines < request.lines:
                        if not reply.readline():
                            break
                        lines += 1
                    return str(reply.status)
            except TimeoutError:
                return "late"
            except (HTTPException, OSError):
                return "hung up" if self._end.is_set() else NO_ANSWER
            finally:
                with self._lock:
                    self._open.discard(connection)

    def as_row(self) -> Row:
        """Returns the requests by kind, by kind and status, and those that failed."""
        statuses: dict[str, dict[str, int]] = {}
        for (kind, status), count in sorted(self.statuses.items()):
            statuses.setdefault(kind, {})[status] = count
        return {
            "requests": {kind: sum(of.values()) for kind, of in statuses.items()},
            "statuses": statuses,
            "failed": dict(self.failed),
        }

    def _run(self, rng: random.Random) -> None:
        while not self._end.wait(rng.expovariate(1 / self._pause)):
            request = self._requests.draw(rng)
            status = self.send(request)
            with self._lock:
                self.statuses[request.kind, status] += 1
                if status.startswith("5") or status == NO_ANSWER:
                    self.failed[f"{request.kind}: {request.body[:_SHOWN].decode(errors='replace')}"] = status


def run_phase(well: Well, name: str, seconds: float, hostile: Hostile | None = None) -> Phase:
    """Runs the well-behaved clients for some time, with the hostile ones if there are any."""
    phase, start = Phase(name), time.monotonic()
    attackers = [] if hostile is None else hostile.ask()
    for thread in well.ask(phase, lambda: time.monotonic() > start + seconds):
        thread.join()
    if hostile is not None:
        hostile.stop()
    for thread in attackers:
        thread.join()
    phase.seconds = round(time.monotonic() - start, 1)
    return phase


def _started(runs: list[Callable[[], None]]) -> list[threading.Thread]:
    threads = [threading.Thread(target=run, daemon=True) for run in runs]
    for thread in threads:
        thread.start()
    return threads
