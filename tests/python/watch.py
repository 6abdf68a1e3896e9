"""Watches a data set while it is made, as an impatient reader would: all that can be seen must be whole, at any moment.

    watch.py s3://BUCKET/PREFIX --until FILE        (boto3; the AWS_* variables say where and who)
    watch.py FOLDER --until FILE

    list all ─► data/*.parquet ─► fetch whole ─► sha256 as before? pyarrow reads all, rows > 0?
             └► _SUCCESS ─► manifest.json ─► every shard it names is there with its bytes and sha256

Looks again and again until FILE exists or SIGTERM comes, then once more. Shards of files that have been looked at are fetched
again each time: what was seen once must not change. Prints one line of JSON:
{"looks", "shards_seen", "opened", "retried", "complete", "problems"}. A connection that fails is tried again and counted
in "retried": the server may be killed under it. With --once it looks once. Exit code 0, with problems or not.
"""
import argparse
import hashlib
import io
import json
import os
import pathlib
import signal
import time

import pyarrow.parquet as pq


class Folder:
    """A data set on disk."""

    def __init__(self, root):
        self.root = pathlib.Path(root)

    def names(self):
        found = []
        for folder, _, files in os.walk(self.root):
            found += [str((pathlib.Path(folder) / name).relative_to(self.root)) for name in files]
        return sorted(found)

    def read(self, name):
        """Bytes and a tag of the version; None when it is gone."""
        try:
            return (self.root / name).read_bytes(), None
        except FileNotFoundError:
            return None


class Bucket:
    """A data set in a bucket."""

    def __init__(self, url, on_retry, may_go_on):
        import boto3
        import botocore.config

        self.bucket, _, prefix = url.removeprefix("s3://").partition("/")
        self.prefix = prefix.rstrip("/") + "/" if prefix.strip("/") else ""
        config = botocore.config.Config(
            retries={"total_max_attempts": 1},
            connect_timeout=5,
            read_timeout=30,
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
        )
        self.s3 = boto3.client("s3", config=config)
        self.on_retry, self.may_go_on = on_retry, may_go_on

    def tried(self, call):
        """Through connections that break and servers that are not well; as long as it takes until told to stop, then 60 s."""
        from botocore.exceptions import ClientError, HTTPClientError
        from botocore.exceptions import ConnectionError as NoConnection
        from urllib3.exceptions import HTTPError

        deadline = None
        while True:
            try:
                return call()
            except ClientError as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] < 500:
                    raise
                failed = error
            # botocore reads the body of an error answer outside of what turns urllib3's errors into its own.
            except (HTTPClientError, NoConnection, HTTPError, OSError) as error:
                failed = error
            self.on_retry()
            if not self.may_go_on():
                deadline = deadline or time.monotonic() + 60
                if time.monotonic() > deadline:
                    raise failed
            time.sleep(0.1)

    def names(self):
        found, token = [], {}
        while True:
            page = self.tried(lambda: self.s3.list_objects_v2(Bucket=self.bucket, Prefix=self.prefix, **token))
            found += [item["Key"].removeprefix(self.prefix) for item in page.get("Contents", [])]
            if not page.get("IsTruncated"):
                return found
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def read(self, name):
        def fetch():
            answer = self.s3.get_object(Bucket=self.bucket, Key=self.prefix + name)
            return answer["Body"].read(), answer["ETag"]

        try:
            return self.tried(fetch)
        except self.s3.exceptions.NoSuchKey:
            return None


class Watch:
    """What has been seen, and what was wrong with it."""

    def __init__(self, store):
        self.store = store
        self.seen = {}
        self.looks = self.opened = 0
        self.complete = False
        self.problems = []

    def problem(self, text):
        if text not in self.problems:
            self.problems.append(text)

    def look(self):
        self.looks += 1
        names = self.store.names()
        for name in names:
            if not name.startswith("data/"):
                continue
            if not name.endswith(".parquet") or name.count("/") != 1:
                self.problem(f"{name}: no shard, and yet under data/")
                continue
            self.open(name)
        for name in self.seen.keys() - set(names):
            self.problem(f"{name}: gone")
        if "_SUCCESS" in names:
            self.check_complete()
        elif self.complete:
            self.problem("_SUCCESS: gone")

    def open(self, name):
        """A shard that is listed: there, readable, the same as ever. Returns bytes and sha256."""
        read = self.store.read(name)
        if read is None:
            self.problem(f"{name}: listed, but not there")
            return None
        content, etag = read
        now = (len(content), hashlib.sha256(content).hexdigest(), etag)
        before = self.seen.setdefault(name, now)
        if before != now:
            self.problem(f"{name}: was {before}, is {now}")
        try:
            table = pq.read_table(io.BytesIO(content), use_threads=False, pre_buffer=False)
            if table.num_rows == 0:
                self.problem(f"{name}: no rows")
            self.opened += 1
        except Exception as error:  # whatever a reader would meet
            self.problem(f"{name}: {type(error).__name__}: {error}")
        return now

    def check_complete(self):
        self.complete = True
        read = self.store.read("manifest.json")
        if read is None:
            self.problem("_SUCCESS without manifest.json")
            return
        try:
            shards = {shard["path"]: (shard["bytes"], shard["sha256"]) for shard in json.loads(read[0])["shards"]}
        except (ValueError, KeyError, TypeError) as error:
            self.problem(f"manifest.json: {type(error).__name__}: {error}")
            return
        for name, recorded in shards.items():
            # Seen when it was listed, unless it came after that.
            now = self.seen.get(name) or self.open(name)
            if now is not None and now[:2] != recorded:
                self.problem(f"{name}: {now[:2]}, manifest.json says {recorded}")
        for name in self.seen.keys() - shards.keys():
            self.problem(f"{name}: not in manifest.json")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--until", type=pathlib.Path, help="stop when this file exists")
    parser.add_argument("--once", action="store_true", help="look once")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between two looks")
    arguments = parser.parse_args()

    told, retried = [], []
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))

    def may_go_on():
        return not (told or arguments.once or (arguments.until and arguments.until.exists()))

    if arguments.dataset.startswith("s3://"):
        store = Bucket(arguments.dataset, lambda: retried.append(True), may_go_on)
    else:
        store = Folder(arguments.dataset)
    watch = Watch(store)
    while may_go_on():
        watch.look()
        time.sleep(arguments.pause)
    # The last look is after the end: what it sees is what remains.
    watch.look()
    result = {
        "looks": watch.looks,
        "shards_seen": len(watch.seen),
        "opened": watch.opened,
        "retried": len(retried),
        "complete": watch.complete,
        "problems": watch.problems,
    }
    print(json.dumps(result), flush=True)
    # Arrow's threads now and then abort an interpreter that ends in good order.
    os._exit(0)


if __name__ == "__main__":
    main()
