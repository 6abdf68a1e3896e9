"""Writes tests/golden.json: what transformers renders for the templates in tests/templates.

    python tests/golden.py            # transformers 5.24.0, jinja2 3.1.6, Python 3.11+
    python tests/golden.py DIR OUT    # other templates

Each case holds the text without a generation prompt (`text`, or `error`: true), the one with a prompt (`prompt`: what
it adds, or `prompted`: the whole text), and for templates with generation blocks their ranges in characters.
"""

import datetime
import json
import pathlib
import sys

import jinja2
import transformers
from tokenizers import Tokenizer, models
from transformers.utils import chat_template_utils as utils

HERE = pathlib.Path(__file__).parent
DATE = "2024-07-26"


class FixedDatetime(datetime.datetime):
    """`strftime_now` calls `datetime.now()`: a fixed day makes the file reproducible."""

    @classmethod
    def now(cls, tz=None):
        return cls.fromisoformat(DATE)


utils.datetime = FixedDatetime

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a \"city\" – <now>",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name"},
                    "days": {"type": "integer", "enum": [1, 7], "default": 1},
                },
                "required": ["city"],
            },
        },
    }
]


def call(arguments, id="call00001"):
    return {"id": id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


def message(role, content, **others):
    return {"role": role, "content": content, **others}


CONVERSATIONS = {
    "prompt": ([message("user", "Hi")], None),
    "single": ([message("user", "Hi"), message("assistant", "Hello!")], None),
    "system": ([message("system", "Be brief."), message("user", "2 + 2?"), message("assistant", "4")], None),
    "multi": (
        [
            message("system", "You are an owl."),
            message("user", "Who are you?"),
            message("assistant", "An owl."),
            message("user", "Who are you?", weight=0),
            message("assistant", "An owl.", weight=0),
            message("user", "Bye"),
            message("assistant", "Hoo."),
        ],
        None,
    ),
    "unicode": (
        [
            message("user", "  „Zitat“ 'a' \"b\" <b>&amp;</b>\n\n\t\\n {{ x }} {% y %} 🦉👩‍🚀 "),
            message("assistant", " é\u0301 漢字\n\n```py\nprint('}')\n```\n \u2028end\u00a0 \n"),
            message("user", "\n"),
            message("assistant", "🙂"),
        ],
        None,
    ),
    "empty": ([message("user", "Say nothing."), message("assistant", ""), message("user", "?"), message("assistant", "")], None),
    "reasoning": (
        [
            message("user", "1 + 1?"),
            message("assistant", "2", reasoning_content="One and one.\nTwo."),
            message("user", "And 3 + 3?"),
            message("assistant", "6", reasoning_content="Six."),
        ],
        None,
    ),
    "think": (
        [
            message("user", "1 + 1?"),
            message("assistant", "<think>\nTwo.\n</think>\n\n2"),
            message("user", "And 3 + 3?"),
            message("assistant", "<think>\nSix.\n</think>\n\n6"),
        ],
        None,
    ),
    "tools": (
        [
            message("system", "Use tools."),
            message("user", "Weather in Köln?"),
            message("assistant", "", tool_calls=[call({"city": "Köln \"am\" Rhein", "days": 7, "x": [1.0, None, True, 1e-7]})]),
            message("tool", "{\"t\": 21.5}", name="get_weather", tool_call_id="call00001"),
            message("assistant", "21.5 °C"),
        ],
        TOOLS,
    ),
    "tool_chain": (
        [
            message("user", "Weather in Ulm and Rom?"),
            message("assistant", "I look.", reasoning_content="Two calls.", tool_calls=[call({"city": "Ulm"}), call({"city": "Rom"}, "call00002")]),
            message("tool", "4", name="get_weather", tool_call_id="call00001"),
            message("tool", "19", name="get_weather", tool_call_id="call00002"),
            message("assistant", "Ulm 4, Rom 19.", reasoning_content="Both known."),
            message("user", "Thanks"),
            message("assistant", "Welcome."),
        ],
        TOOLS,
    ),
    "call_text": (
        [
            message("user", "Weather?"),
            message("assistant", None, tool_calls=[call("{\"city\": \"Bonn\"}")]),
            message("tool", "7", name="get_weather", tool_call_id="call00001"),
        ],
        TOOLS,
    ),
    "parts": (
        [
            message("user", [{"type": "text", "text": "Part one. "}, {"type": "text", "text": "Part two."}]),
            message("assistant", [{"type": "text", "text": "Yes."}]),
            message("user", [{"type": "text", "text": "More?"}]),
            message("assistant", [{"type": "text", "text": "No."}]),
        ],
        None,
    ),
}

OPTIONS = {"enable_thinking": [{"enable_thinking": False}, {"enable_thinking": True}], "thinking": [{"thinking": True}],
           "reasoning_effort": [{"reasoning_effort": "high"}]}


def special_tokens(name):
    name = name.lower()
    for family, tokens in {
        "phi": ("<s>", "<|endoftext|>"),
        "gemma": ("<bos>", "<eos>"),
        "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
        "llama-3": ("<|begin_of_text|>", "<|eot_id|>"),
        "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        "qwen": (None, "<|im_end|>"),
    }.items():
        if family in name:
            break
    else:
        tokens = ("<s>", "</s>")
    return {key: token for key, token in zip(("bos_token", "eos_token"), tokens) if token}


def render(tokenizer, template, messages, tools, prompt, options):
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=template, add_generation_prompt=prompt, tokenize=False, **options
        )
    except Exception:  # the kind of error is jinja2's or that of Python's operation
        return None


def ranges(tokenizer, template, messages, tools, options):
    _, found = utils.render_jinja_template(
        [utils._normalize_chat_messages(messages)], tools=tools, chat_template=template,
        return_assistant_tokens_mask=True, **tokenizer.special_tokens_map, **options,
    )
    return [list(pair) for pair in found[0] if pair[0] < pair[1]]


def main(folder, out):
    templates = {}
    for path in sorted(folder.glob("*.jinja")):
        template = path.read_text()
        tokens = special_tokens(path.stem)
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **tokens)
        variants = [(name, {}) for name in CONVERSATIONS]
        for option, values in OPTIONS.items():
            if option in template:
                variants += [(name, value) for value in values for name in ("prompt", "reasoning")]
        cases = []
        for name, options in variants:
            messages, tools = CONVERSATIONS[name]
            case = {"conversation": name}
            if options:
                case["options"] = options
            text = render(tokenizer, template, messages, tools, False, options)
            prompted = render(tokenizer, template, messages, tools, True, options)
            case["text"] = text
            if text is not None and prompted is not None and prompted.startswith(text):
                case["prompt"] = prompted[len(text) :]
            else:
                case["prompted"] = prompted
            if text is not None and "endgeneration" in template:
                case["ranges"] = ranges(tokenizer, template, messages, tools, options)
            cases.append(case)
        templates[path.stem] = {"special_tokens": tokens, "cases": cases}
    golden = {
        "versions": {"transformers": transformers.__version__, "jinja2": jinja2.__version__, "python": sys.version.split()[0]},
        "date": DATE,
        "conversations": {name: {"messages": m, "tools": t} for name, (m, t) in CONVERSATIONS.items()},
        "templates": templates,
    }
    text = json.dumps(golden, ensure_ascii=False, separators=(",", ":")).replace('{"special_tokens"', '\n{"special_tokens"')
    out.write_text(text + "\n")
    print(len(templates), "templates,", len(text.encode()), "bytes")


if __name__ == "__main__":
    arguments = [pathlib.Path(argument) for argument in sys.argv[1:]]
    main(*(arguments or [HERE / "templates", HERE / "golden.json"]))
