"""Load on a running service: many clients, many watchers, many jobs; what it costs in time and memory. A script, no test.

    python tests/service/load.py                    STILLHOUSE_BIN, or target/debug/stillhouse
    python tests/service/load.py --jobs 2000        less of everything, for a look

A teacher job holds the only slot, so all other jobs wait. Limits that are raised over the defaults (`CONFIG`): requests and submissions
a minute (all clients are one user), waiting jobs of a user, connections of one address, watchers, and how long
a connection may be idle (header_seconds). Prints a table and one line of JSON.

    (a) 50 clients submit 1,000 jobs, (b) while 200 watchers read events: half of all jobs, half of one job
    (c) 10,000 jobs in the store: lists of 50, with a state, from a cursor near the oldest
    (d) resident memory before, during, after; after 10,000 more lists; with 200 watchers that never read
"""
import argparse
import asyncio
import json
import os
import platform
import re
import statistics
import tempfile
import time

from conftest import BINARY, Server, furnish, job_file

CONFIG = {
    "limits": {"queued_jobs": 100_000, "queued_jobs_per_user": 100_000, "connections": 4096, "connections_per_address": 4096, "watchers": 2000,
               "watchers_per_user": 2000, "watchers_per_token": 2000,
               "header_seconds": 3600},
}


class Client:
    """One connection that is kept, as raw streams: a client library would be slower than the server."""

    def __init__(self, server):
        self.server, self.streams = server, None

    async def ask(self, method, path, body=b"", extra=""):
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.server.port, limit=1 << 24)
        reader, writer = self.streams
        lines = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.server.port}\r\nAuthorization: Bearer {self.server.token}\r\n{extra}"
        if body:
            lines += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        writer.write(lines.encode() + b"\r\n" + body)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(re.search(r"(?i)content-length: (\d+)", head)[1])
        return int(head.split()[1]), await reader.readexactly(length)

    async def watch(self, path, events, mine):
        """Counts events until it is cancelled."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.write(watching(self.server, path))
        await reader.readuntil(b"\r\n\r\n")
        events[mine] = 0
        try:
            async for line in reader:
                events[mine] += line.startswith(b"event:")
        finally:
            writer.close()


def watching(server, path):
    return (f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {server.token}\r\n"
            "Accept: text/event-stream\r\n\r\n").encode()


def spread(seconds):
    """Milliseconds."""
    at = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50_ms": round(at[49] * 1e3, 2), "p99_ms": round(at[98] * 1e3, 2), "largest_ms": round(max(seconds) * 1e3, 2), "n": len(seconds)}


async def several(clients, total, one):
    """`one(client, n)` for each n, shared among the clients; seconds of each, and of all."""
    seconds, left = [], iter(range(total))

    async def work(client):
        for n in left:
            began = time.perf_counter()
            await one(client, n)
            seconds.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(work(c) for c in clients))
    return seconds, time.perf_counter() - began


async def measure(server, args):
    out, memory = {}, {"start": server.memory_bytes()}
    clients = [Client(server) for _ in range(args.clients)]
    busy = json.loads((await clients[0].ask("POST", "/api/v1/jobs", busy_job(), ""))[1])["id"]
    ids, events, watchers = [], {}, []
    for n in range(args.watchers):
        path = "/api/v1/events" if n % 2 == 0 else f"/api/v1/jobs/{busy}/events"
        watchers.append(asyncio.create_task(Client(server).watch(path, events, n)))
    while len(events) < args.watchers:
        await asyncio.sleep(0.05)
    memory["with watchers"] = server.memory_bytes()

    async def submit(client, n):
        status, body = await client.ask("POST", "/api/v1/jobs", json.dumps(job_file(output__path=f"load/{n}")).encode())
        assert status == 201, body
        ids.append(json.loads(body)["id"])

    seconds, whole = await several(clients, args.submissions, submit)
    out["submit"] = {**spread(seconds), "per_second": round(args.submissions / whole, 1), "distinct_ids": len(set(ids))}
    stored = await count(clients[0])
    out["submit"]["stored"] = stored - 1
    await asyncio.sleep(2)
    memory["after submissions"] = server.memory_bytes()
    all_jobs, of_one = [[events[n] for n in range(first, args.watchers, 2)] for first in (0, 1)]
    out["watchers"] = {"n": len(events), "of_all_events_least": min(all_jobs), "of_all_events_most": max(all_jobs),
                       "of_one_job_least": min(of_one), "of_one_job_most": max(of_one)}
    for task in watchers:
        task.cancel()
    await asyncio.gather(*watchers, return_exceptions=True)

    seconds, whole = await several(clients, max(0, args.jobs - stored), submit)
    if seconds:
        out["submit to a full store"] = {**spread(seconds), "per_second": round(len(seconds) / whole, 1)}
    memory["full store"] = server.memory_bytes()
    cursor = await deep_cursor(clients[0])
    lists = {"list": "", "list by state": "&state=queued", "list by two states": "&state=running,failed", "list from a deep cursor": f"&cursor={cursor}",
             "list by user and state": "&user=ada&state=queued", "list by name": "&name=nobody"}
    for name, query in lists.items():
        async def ask(client, _n, query=query):
            status, body = await client.ask("GET", f"/api/v1/jobs?limit=50{query}")
            assert status == 200, body

        seconds, whole = await several(clients[:1], args.lists // 20, ask)
        out[name] = {**spread(seconds), "clients": 1}
        seconds, whole = await several(clients[:10], args.lists // 5, ask)
        out[f"{name}, 10 clients"] = {**spread(seconds), "per_second": round(len(seconds) / whole, 1)}

    async def show(client, n):
        await client.ask("GET", f"/api/v1/jobs/{ids[n % len(ids)]}")

    out["show, with its place in the queue"] = spread((await several(clients[:1], args.lists // 20, show))[0])
    memory["after these lists"] = server.memory_bytes()
    await several(clients, args.lists, ask)
    memory[f"after {args.lists} more lists"] = server.memory_bytes()
    await several(clients, args.lists, ask)
    memory[f"after another {args.lists}"] = server.memory_bytes()

    silent = [await asyncio.open_connection("127.0.0.1", server.port, limit=1024) for _ in range(args.watchers)]
    for n, (reader, writer) in enumerate(silent):
        reader._transport.pause_reading()
        writer.write(watching(server, "/api/v1/events" if n % 2 == 0 else f"/api/v1/jobs/{busy}/events"))
    await several(clients, args.submissions, submit)
    memory["with watchers that never read"] = server.memory_bytes()
    await several(clients, args.submissions, submit)
    memory["the same, later"] = server.memory_bytes()
    for _, writer in silent:
        writer.transport.abort()
    status, figures = await clients[0].ask("GET", "/metrics")
    memory["after figures were asked for"] = server.memory_bytes()
    pattern = rb'stillhouse_http_seconds(_sum|_count|)\{route="([^"]+)"(?:,quantile="(0.5|0.99)")?\} (\S+)'
    own = {}
    for kind, route, quantile, value in re.findall(pattern, figures):
        own.setdefault(route.decode(), {})[(quantile or kind).decode()] = float(value)
    out["the server's own seconds"] = own
    out["memory_megabytes"] = {k: round(v / 1e6, 1) for k, v in memory.items()}
    return out


def busy_job():
    """Holds the slot: a teacher goes over the corpus again and again."""
    job = job_file(input__paths=["long.jsonl"], extract={"teacher": {"path": "teacher"}, "topk": 64}, output__path="busy")
    return json.dumps(job).encode()


async def count(client):
    n, cursor = 0, ""
    while cursor is not None:
        body = json.loads((await client.ask("GET", f"/api/v1/jobs?limit=500{cursor}"))[1])
        n += len(body["jobs"])
        cursor = f"&cursor={body['next_cursor']}" if body["next_cursor"] else None
    return n


async def deep_cursor(client):
    """Of the page before the last one."""
    cursor = before = None
    while True:
        path = "/api/v1/jobs?limit=500" + (f"&cursor={cursor}" if cursor else "")
        following = json.loads((await client.ask("GET", path))[1])["next_cursor"]
        if following is None:
            return before or cursor or "64"
        before, cursor = cursor, following


def machine():
    model = re.search(r"model name\s*: (.+)", open("/proc/cpuinfo").read())
    total = re.search(r"MemTotal:\s+(\d+)", open("/proc/meminfo").read())
    return {"processors": os.cpu_count(), "model": model[1] if model else platform.machine(), "memory_gigabytes": round(int(total[1]) / 1e6, 1),
            "kernel": platform.release(), "load_average": os.getloadavg()[0], "binary": BINARY}


def table(result):
    for name, values in result.items():
        if name == "the server's own seconds":
            continue
        print(f"\n{name}")
        for key, value in values.items():
            print(f"  {key:36} {value}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in [("clients", 50), ("submissions", 1000), ("watchers", 200), ("jobs", 10_000), ("lists", 10_000)]:
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(folder, config=CONFIG)
        try:
            furnish(server.start())
            (server.allowed / "long.jsonl").write_text("".join(json.dumps({"text": f"number {n} " * 2000}) + "\n" for n in range(5000)))
            result = {"machine": machine(), **asyncio.run(measure(server, args))}
        finally:
            server.stop()
    table(result)
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main()
