"""Hooks of test_schemathesis.py: live streams are cut after their head, and some submissions are of a job that can run."""
import io
import itertools

import schemathesis
from urllib3.response import HTTPResponse

NUMBERS = itertools.count(1)


def cut_streams(response, *_args, **_kwargs):
    """Called by requests before it reads a body. A stream does not end by itself; its status and head are what is checked."""
    live = response.headers.get("content-type", "").startswith("text/event-stream")
    follows = "follow=true" in response.request.url and response.status_code == 200
    if live or follows:
        headers = {k: v for k, v in response.raw.headers.items() if k.lower() != "transfer-encoding"}
        response.raw.close()
        response.raw = HTTPResponse(body=io.BytesIO(b""), headers=headers, status=response.status_code, preload_content=False)
    return response


@schemathesis.hook
def before_call(_context, case, kwargs):
    kwargs["hooks"] = {"response": [cut_streams]}
    good = case.meta is not None and case.meta.generation.mode.is_positive
    if good and case.operation.label == "POST /jobs" and case.media_type == "application/json":
        n = next(NUMBERS)
        # a job made from the schema names folders that are not there; one in three can run, so that what follows a submission is met
        if n % 3 == 0:
            case.body = runnable(n)
            case.query = {}


def runnable(n):
    """Of what test_schemathesis.py has put into the allowed folder."""
    return {
        "version": 1, "name": f"job-{n}", "input": {"format": "jsonl", "paths": ["tiny.jsonl"], "text": "text"}, "tokenizer": {"path": "teacher"},
        "pack": {"length": 256}, "output": {"path": f"made/{n}"},
    }
