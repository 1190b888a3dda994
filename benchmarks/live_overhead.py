"""Measures the cost of viewers, which are clients that watch a running server live: tokens per second of one server,
with ten viewers and with none, in turns.

    python benchmarks/live_overhead.py [--model hashlm:20ms] [--viewers 10] [--rounds 12] [--json FILE] [-- FLAG ...]

One server works all the time: each of ``--streams`` clients sends its next request when the previous one has ended, and
the ends are spread evenly over time. Viewers connect and leave for windows of a few seconds. Four windows form a block:
not watched, watched, watched, not watched, or the reverse, chosen by the seed, so that a drift of the machine cancels
out. A round is one such block and one block without viewers, which shows the noise of the method. Within a block, the
script compares

- tokens and steps per second, from the server's own counters, and
- processor time per step of the engine's and the server's process.

The 95 % intervals of the means over blocks are computed by resampling blocks. Normally the engine continues to record
for half a minute after the last viewer has left; here it stops at once, because windows are shorter. An engine without
a step log does not exist, so a comparison with one is impossible. Instead, the calls of the step log and of the
recorder are timed in the engine's process. Flags after ``--`` are passed to ``chairlift serve``.
"""

from __future__ import annotations

import argparse
import http.client
import json
import mmap
import multiprocessing
import os
import platform
import random
import selectors
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast

SETTLE = 0.5
"""Seconds at the beginning of each window that are not measured, because viewers connect then and receive the
history."""
CLOCKS = struct.Struct("4d")
"""Layout of four numbers in a file: (steps, seconds in the step log, seconds in the recorder, steps since the recorder
exists)."""
BUDGET = 0.01
ENOUGH = 8
"""Minimum number of rounds; with fewer rounds the intervals are not reliable."""


# --- in the server's and the engine's process ------------------------------------------------------------------------


def serve(clocks: str) -> None:
    """Run ``chairlift serve`` so that recording stops with the last viewer, and with an engine whose step log and
    recorder are timed."""
    from chairlift.cli.main import main as chairlift
    from chairlift.engine.process import process_client
    from chairlift.server.pages import live_feed

    live_feed._LINGER_SECONDS = 0.0  # type: ignore[misc]
    folder = str(Path(__file__).parent)
    boot = f"import sys; sys.path += [sys.argv[1], {folder!r}]; import live_overhead; live_overhead.engine({clocks!r})"
    process_client._BOOT = boot  # type: ignore[misc]
    sys.exit(chairlift())


def engine(clocks: str) -> None:
    """Main function of the engine's process. It writes the time spent on recording to the file ``clocks``."""
    from chairlift.engine.core import EngineCore
    from chairlift.engine.process.core_process import CoreProcess
    from chairlift.engine.process.engine_process import main as engine_process
    from chairlift.engine.step_log import StepRecord
    from chairlift.engine.step_recorder import StepRecorder

    with open(clocks, "r+b") as file:
        shared = mmap.mmap(file.fileno(), CLOCKS.size)
    totals = {"steps": 0.0, "log": 0.0, "recorder": 0.0, "watched": 0.0}

    def timed(owner: type, name: str, part: str, count: str = "") -> None:
        function = getattr(owner, name)

        def call(*args: Any, **settings: Any) -> Any:
            begin = time.perf_counter()  # a clock of the thread alone would cost more than the timed code
            try:
                return function(*args, **settings)
            finally:
                totals[part] += time.perf_counter() - begin
                if count:
                    totals[count] += 1
                    CLOCKS.pack_into(shared, 0, *totals.values())

        setattr(owner, name, call)

    timed(StepRecord, "of", "log", "steps")
    timed(StepRecorder, "landed", "recorder", "watched")
    for name in ("added", "scheduled", "ended"):
        timed(StepRecorder, name, "recorder")
    timed(EngineCore, "watch", "recorder")
    timed(CoreProcess, "_show", "recorder")  # takes the lines, and sends them
    engine_process()


# --- clients, in processes of their own, that do as little as they can -----------------------------------------------


def connect(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setblocking(False)
    return sock


def load(port: int, streams: int, prompt: int, tokens: int, told: Connection) -> None:
    """Run ``streams`` clients until a message arrives on ``told``. The first outputs have different lengths, so that
    their ends are spread over time."""

    def request(number: int, count: int) -> bytes:
        ids = [3 + (number * 31 + at * 7) % 250 for at in range(prompt)]
        body = {
            "model": "model",
            "prompt": ids,
            "max_tokens": count,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        data = json.dumps(body)
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(data)}\r\n\r\n{data}".encode()

    socks = {connect(port): number for number in range(streams)}
    tails = dict.fromkeys(socks, b"")
    with selectors.DefaultSelector() as selector:
        selector.register(told, selectors.EVENT_READ)
        for sock, number in socks.items():
            selector.register(sock, selectors.EVENT_READ)
            sock.sendall(request(number, max(1, tokens * (number + 1) // streams)))
        while True:
            for key, _ in selector.select():
                if key.fileobj is told:
                    return
                sock = cast(socket.socket, key.fileobj)
                data = sock.recv(1 << 18)
                if not data or (not tails[sock] and not data.startswith(b"HTTP/1.1 200")) or b'"error"' in data:
                    told.send(data[-400:].decode("utf-8", "replace") or "the connection was closed")
                    return
                tails[sock] = (tails[sock] + data)[-8:]
                if tails[sock].endswith(b"\r\n0\r\n\r\n"):
                    tails[sock] = b""
                    sock.sendall(request(socks[sock], tokens))


def look(port: int, told: Connection) -> None:
    """Keep as many viewers connected as the last message on ``told`` says. When they are connected, send back the
    number of bytes that the earlier viewers received."""
    viewers: list[socket.socket] = []
    with selectors.DefaultSelector() as selector:
        selector.register(told, selectors.EVENT_READ)
        size = 0
        while True:
            for key, _ in selector.select():
                if key.fileobj is not told:
                    viewer = cast(socket.socket, key.fileobj)
                    if viewer in viewers:  # it may have just been closed
                        data = viewer.recv(1 << 18)
                        if not data:
                            raise ConnectionError("the server has cut off a viewer")
                        size += len(data)
                    continue
                wanted = told.recv()
                while len(viewers) > wanted:
                    sock = viewers.pop()
                    selector.unregister(sock)
                    sock.close()
                while len(viewers) < wanted:
                    viewers.append(connect(port))
                    viewers[-1].sendall(b"GET /live/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                    selector.register(viewers[-1], selectors.EVENT_READ)
                told.send(size)
                size = 0
                if wanted < 0:
                    return


# --- measuring -------------------------------------------------------------------------------------------------------


class Edge(NamedTuple):
    """Counters of the server and its processes at one moment. Times are in seconds."""

    time: float
    """Time at which the newest counted token was generated."""
    error: float
    """Maximum error of :attr:`time`."""
    tokens: float
    steps: float
    engine_cpu: float
    server_cpu: float
    clocks: tuple[float, ...]


class Server:
    """The server under test."""

    def __init__(self, model: str, flags: list[str], clocks: Path) -> None:
        clocks.write_bytes(bytes(CLOCKS.size))
        self._clocks = clocks
        folder = str(Path(__file__).parent)
        code = f"import sys; sys.path.append({folder!r}); import live_overhead; live_overhead.serve({str(clocks)!r})"
        command = [sys.executable, "-c", code, "serve", *([] if model == "bundled" else [model])]
        command += ["--port", "0", "--served-model-name", "model", "--status-interval", "0", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        lines = []
        for line in self.process.stdout or ():
            lines.append(line)
            if "ready at " in line:
                self.port = int(line.split("ready at ")[1].split()[0].rstrip("/").rpartition(":")[2])
                break
        else:
            raise SystemExit("the server did not start:\n" + "".join(lines))
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (self.engine,) = (int(pid) for pid in children if b"live_overhead" in Path(f"/proc/{pid}/cmdline").read_bytes())
        self._http = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def get(self, path: str) -> str:
        self._http.request("GET", path)
        return self._http.getresponse().read().decode()

    def edge(self) -> Edge:
        """Counters from the most exact of several readings, which is the one with the fastest response."""
        looks = []
        for _ in range(5):
            begin = time.monotonic()
            text = self.get("/metrics")
            end = time.monotonic()
            found = {line.partition("{")[0]: line.rpartition(" ")[2] for line in text.splitlines() if "{" in line}
            age, tokens, steps = (
                float(found[f"chairlift:{name}"])
                for name in ("seconds_since_last_token", "generation_tokens_total", "iteration_tokens_total_count")
            )
            cpu = cpu_seconds(self.engine), cpu_seconds(self.process.pid)
            clocks = CLOCKS.unpack(self._clocks.read_bytes())
            looks.append(Edge((begin + end) / 2 - age, (end - begin) / 2, tokens, steps, *cpu, clocks))
        return min(looks, key=lambda each: each.error)


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((thread / "schedstat").read_text().split()[0])
        except OSError:
            continue  # the thread has ended
    return total / 1e9


def measure(server: Server, viewers: Callable[[int], int], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all windows, and return their measurements in order."""
    rng = random.Random(args.seed)
    windows: list[dict[str, Any]] = []
    for round_ in range(args.rounds):
        for kind in rng.sample(["watched", "null"], 2):
            block = []
            for side in rng.choice(["ABBA", "BAAB"]):
                viewers(args.viewers if side == "B" and kind == "watched" else 0)
                time.sleep(SETTLE)
                a = server.edge()
                time.sleep(args.window - SETTLE)
                b = server.edge()
                seconds, tokens, steps = b.time - a.time, b.tokens - a.tokens, b.steps - a.steps
                if tokens <= 0 or steps <= 0 or seconds <= 0:
                    raise SystemExit(f"no tokens in a window of {seconds:.1f} s: take a longer --window")
                block.append(
                    {
                        **{"round": round_, "kind": kind, "side": side, "seconds": seconds, "error": a.error + b.error},
                        **{"tokens": tokens, "steps": steps},
                        **{"tokens_per_second": tokens / seconds, "steps_per_second": steps / seconds},
                        "engine_cpu_us_per_step": (b.engine_cpu - a.engine_cpu) / steps * 1e6,
                        "server_cpu_us_per_step": (b.server_cpu - a.server_cpu) / steps * 1e6,
                        "clocks": [after - before for before, after in zip(a.clocks, b.clocks, strict=True)],
                    }
                )
            windows += block
            change = compare(block, "tokens_per_second", kind)
            print(f"round {round_:2} {kind:7} {change[0]:+.2%} tokens/s", flush=True)
    return windows


def compare(windows: list[dict[str, Any]], what: str, kind: str) -> list[float]:
    """Change of the value ``what`` from the windows of side A to the windows of side B, one number per block: relative
    for rates, absolute for times."""
    changes = []
    for round_ in sorted({each["round"] for each in windows if each["kind"] == kind}):
        own = [each for each in windows if (each["round"], each["kind"]) == (round_, kind)]
        a, b = ([each[what] for each in own if each["side"] == side] for side in "AB")
        if what.endswith("per_second"):
            changes.append(statistics.geometric_mean(b) / statistics.geometric_mean(a) - 1)
        else:
            changes.append(statistics.fmean(b) - statistics.fmean(a))
    return changes


def interval(changes: list[float], seed: int) -> dict[str, float]:
    """Mean and median over the blocks, and a 95 % interval of each, from 4,000 resamples."""
    rng = random.Random(seed)
    draws = [rng.choices(changes, k=len(changes)) for _ in range(4000)]
    found: dict[str, float] = {}
    for name, of in (("mean", statistics.fmean), ("median", statistics.median)):
        all_ = sorted(of(draw) for draw in draws)
        found |= {name: of(changes), f"{name}_low": all_[100], f"{name}_high": all_[-101]}
    return found


def calls(windows: list[dict[str, Any]]) -> dict[str, float]:
    """Microseconds per step in the step log and in the recorder, and their fractions of a step."""
    watched = [each for each in windows if each["kind"] == "watched" and each["side"] == "B"]
    steps, log, _, _ = (sum(column) for column in zip(*(each["clocks"] for each in windows), strict=True))
    _, _, recorder, recorded = (sum(column) for column in zip(*(each["clocks"] for each in watched), strict=True))
    step = sum(each["seconds"] for each in windows) / sum(each["steps"] for each in windows) * 1e6
    log, recorder = log / max(1, steps) * 1e6, recorder / max(1, recorded) * 1e6
    return {
        **{"step_us": step, "step_log_us": log, "step_log_share": log / step},
        **{"recorder_us": recorder, "recorder_share": recorder / step},
    }


def report(windows: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Print the results, and return them as a record."""
    names = ("tokens_per_second", "steps_per_second", "engine_cpu_us_per_step", "server_cpu_us_per_step")
    found: dict[str, Any] = {name: {} for name in names}
    print(f"\n{'change when watched, 95 % interval':36}{'with viewers':>30}{'without (noise)':>30}")
    for name in names:
        form = "+.2%" if name.endswith("per_second") else "+,.0f"
        cells = []
        for kind in ("watched", "null"):
            found[name][kind] = each = interval(compare(windows, name, kind), seed)
            cells.append(f"{each['mean']:{form}} ({each['mean_low']:{form}} to {each['mean_high']:{form}})")
        print(f"{name.replace('_', ' '):36}{cells[0]:>30}{cells[1]:>30}")
    found["calls"] = calls(windows)
    print(
        "of a step of {step_us:,.0f} us the step log takes {step_log_us:.1f} ({step_log_share:.2%}), always,"
        " and the recorder {recorder_us:.1f} ({recorder_share:.2%}), while somebody looks".format(**found["calls"])
    )
    loss, noise = (found["tokens_per_second"][kind] for kind in ("watched", "null"))
    found["verdict"] = "cannot tell"
    if windows[-1]["round"] + 1 < ENOUGH or max(-noise["mean_low"], noise["mean_high"]) > BUDGET:
        found["verdict"] += f" (it takes at least {ENOUGH} rounds, and less noise than that)"
    elif -loss["mean_low"] <= BUDGET:
        found["verdict"] = "yes"
    elif -loss["mean_high"] > BUDGET:
        found["verdict"] = "no"
    print(f"at most {BUDGET:.0%} of the tokens per second: {found['verdict']}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled", help="model to serve: bundled, hashlm:20ms, or a directory")
    parser.add_argument("--viewers", type=int, default=10)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=24, help="tokens of each prompt")
    parser.add_argument(
        "--tokens", type=int, default=1000, help="tokens of each output, or fewer if the model's limit is lower"
    )
    parser.add_argument(
        "--window", type=float, default=4.0, help="seconds of a window; its first half second is not measured"
    )
    parser.add_argument("--rounds", type=int, default=12, help="rounds of two blocks of four windows each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="flags of chairlift serve, after --")
    args = parser.parse_args()
    if args.rounds < 2 or args.window < 2 * SETTLE:
        parser.error(f"there must be two rounds or more, and windows of at least {2 * SETTLE:g} s")
    with tempfile.TemporaryDirectory() as folder:
        server = Server(args.model, args.flags, Path(folder, "clocks"))
        (mine, theirs), (to_load, told) = multiprocessing.Pipe(), multiprocessing.Pipe()
        helpers: list[multiprocessing.Process] = []
        try:
            longest = json.loads(server.get("/v1/models"))["data"][0]["max_model_len"] - args.prompt
            tokens = min(args.tokens, longest)
            if tokens < args.streams:
                raise SystemExit(f"with --prompt {args.prompt} the model has no room for long outputs")
            helpers.append(multiprocessing.Process(target=look, args=(server.port, theirs), daemon=True))
            loads = (server.port, args.streams, args.prompt, tokens, told)
            helpers.append(multiprocessing.Process(target=load, args=loads, daemon=True))
            for process in helpers:
                process.start()

            def viewers(count: int) -> int:
                """Set the number of viewers. Returns the number of bytes that the earlier viewers received."""
                if to_load.poll():
                    raise SystemExit(f"a stream ended early: {to_load.recv()}")
                mine.send(count)
                if not mine.poll(60):
                    raise SystemExit("the viewers do not respond")
                return int(mine.recv())

            viewers(args.viewers)
            time.sleep(2 * args.window)  # warm-up
            if viewers(0) < 1000 * args.viewers:
                raise SystemExit("the viewers received nothing")
            windows = measure(server, viewers, args)
        finally:
            for process in helpers:
                process.terminate()
            server.process.terminate()
            server.process.wait(60)
    found = report(windows, args.seed)
    if args.json:
        about = {"machine": platform.processor() or platform.machine(), "processors": os.cpu_count()}
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
        record = {"benchmark": "live_overhead", **about, **settings, "tokens": tokens, **found, "windows": windows}
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
