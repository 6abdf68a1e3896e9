"""Writes tests/golden.jsonl.gz: documents with the words, sentences and decisions of datatrove.

    /tmp/dt/v/bin/python operators/filters/tests/golden.py

Needs datatrove 0.10.1, spaCy 3.8.18 and numpy on CPython 3.11.7; the first line of the file states the versions. Seeds are
fixed, so the same versions write the same file. `--compare N SEED` prints N generated documents and their decisions
instead, in the format of the example `judge`, which is how larger comparisons are made.
"""

import gzip
import json
import pathlib
import platform
import random
import sys
import warnings

import datatrove.pipeline.filters as filters
import spacy
from datatrove.data import Document
from datatrove.pipeline.formatters import PIIFormatter
from datatrove.pipeline.filters.c4_filters import C4ParagraphFilter
from datatrove.utils.text import split_into_sentences, split_into_words

warnings.simplefilter("ignore")
HERE = pathlib.Path(__file__).parent
CORPUS = HERE.parent.parent.parent / "assets" / "corpus" / "sotu-small.jsonl.gz"

# name: (rules of the crate, filters of datatrove)
OFF = {"min_words": None, "max_words": None, "min_mean_word_characters": None, "max_mean_word_characters": None,
       "max_symbols_per_word": None, "max_bullet_line_share": None, "max_ellipsis_line_share": None,
       "min_alphabetic_word_share": None, "min_stop_words": None}
DT_OFF = dict(min_doc_words=None, max_doc_words=None, min_avg_word_length=None, max_avg_word_length=None,
              max_symbol_word_ratio=None, max_bullet_lines_ratio=None, max_ellipsis_lines_ratio=None,
              max_non_alpha_words_ratio=None, min_stop_words=None)
REPETITION_OFF = {"max_duplicate_line_share": None, "max_duplicate_paragraph_share": None,
                  "max_duplicate_line_character_share": None, "max_duplicate_paragraph_character_share": None}
DT_REPETITION_OFF = dict(dup_line_frac=None, dup_para_frac=None, dup_line_char_frac=None, dup_para_char_frac=None)
C4_OFF = {"remove_citations": False, "remove_unterminated_lines": False, "min_sentences": None,
          "min_words_per_line": None, "max_word_characters": None, "drop_lorem_ipsum": False,
          "remove_javascript_lines": False, "drop_curly_brackets": False, "remove_policy_lines": False}
DT_C4_OFF = dict(remove_citations=False, filter_no_terminal_punct=False, min_num_sentences=-1, min_words_per_line=-1,
                 max_word_length=-1, filter_lorem_ipsum=False, filter_javascript=False, filter_curly_bracket=False,
                 filter_policy=False)


def ngrams(*limits):
    return [{"words": n, "max_character_share": share} for n, share in limits]


CASES = {
    "repetition": ({"rule": "gopher_repetition"}, filters.GopherRepetitionFilter()),
    "top": ({"rule": "gopher_repetition", **REPETITION_OFF, "top_ngrams": ngrams((4, 0.3), (1, 0.25), (2, 0.1), (3, 0.05)),
             "duplicated_ngrams": []},
            filters.GopherRepetitionFilter(**DT_REPETITION_OFF, top_n_grams=((4, 0.3), (1, 0.25), (2, 0.1), (3, 0.05)), dup_n_grams=())),
    "duplicated": ({"rule": "gopher_repetition", **REPETITION_OFF, "top_ngrams": [],
                    "duplicated_ngrams": ngrams((7, 0.02), (3, 0.03), (2, 0.08), (1, 0.5), (5, 0.001))},
                   filters.GopherRepetitionFilter(**DT_REPETITION_OFF, top_n_grams=(), dup_n_grams=((7, 0.02), (3, 0.03), (2, 0.08), (1, 0.5), (5, 0.001)))),
    "lines": ({"rule": "gopher_repetition", "max_duplicate_line_share": 0.05, "max_duplicate_paragraph_share": 0.1,
               "max_duplicate_line_character_share": 0.02, "max_duplicate_paragraph_character_share": 0.05, "top_ngrams": [],
               "duplicated_ngrams": []},
              filters.GopherRepetitionFilter(0.05, 0.1, 0.02, 0.05, (), ())),
    "quality": ({"rule": "gopher_quality"}, filters.GopherQualityFilter()),
    "quality_small": ({"rule": "gopher_quality", "min_words": 3, "max_words": 60}, filters.GopherQualityFilter(3, 60)),
    "symbols": ({"rule": "gopher_quality", **OFF, "max_symbols_per_word": 0.05}, filters.GopherQualityFilter(**{**DT_OFF, "max_symbol_word_ratio": 0.05})),
    "bullets": ({"rule": "gopher_quality", **OFF, "max_bullet_line_share": 0.2, "max_ellipsis_line_share": 0.1},
                filters.GopherQualityFilter(**{**DT_OFF, "max_bullet_lines_ratio": 0.2, "max_ellipsis_lines_ratio": 0.1})),
    "alphabetic": ({"rule": "gopher_quality", **OFF, "min_alphabetic_word_share": 0.6, "min_mean_word_characters": 2.5, "max_mean_word_characters": 5.5},
                   filters.GopherQualityFilter(**{**DT_OFF, "max_non_alpha_words_ratio": 0.6, "min_avg_word_length": 2.5, "max_avg_word_length": 5.5})),
    "stop_words": ({"rule": "gopher_quality", **OFF, "min_stop_words": 2, "stop_words": ["the", "n't", ",", "中"]},
                   filters.GopherQualityFilter(**{**DT_OFF, "min_stop_words": 2}, stop_words=["the", "n't", ",", "中"])),
    "c4": ({"rule": "c4"}, filters.C4QualityFilter()),
    "c4_small": ({"rule": "c4", "min_sentences": 2, "max_word_characters": 12}, filters.C4QualityFilter(min_num_sentences=2, max_word_length=12)),
    "c4_sentences": ({"rule": "c4", "remove": "sentences", "min_sentences": 3}, filters.C4QualityFilter(split_paragraph=False, min_num_sentences=3)),
    "c4_off": ({"rule": "c4", **C4_OFF}, filters.C4QualityFilter(**DT_C4_OFF)),
    "c4_count": ({"rule": "c4", **C4_OFF, "min_sentences": 7}, filters.C4QualityFilter(**{**DT_C4_OFF, "min_num_sentences": 7})),
    "c4_phrases": ({"rule": "c4", **C4_OFF, "drop_lorem_ipsum": True, "remove_javascript_lines": True, "drop_curly_brackets": True,
                    "remove_policy_lines": True, "remove_citations": True},
                   filters.C4QualityFilter(**{**DT_C4_OFF, "filter_lorem_ipsum": True, "filter_javascript": True, "filter_curly_bracket": True,
                                              "filter_policy": True, "remove_citations": True})),
    "c4_paragraphs": ({"rule": "c4_paragraphs"}, C4ParagraphFilter()),
    "fineweb": ({"rule": "fineweb"}, filters.FineWebQualityFilter()),
    "fineweb_options": ({"rule": "fineweb", "min_terminated_line_share": 0.5, "keep_if_no_line_is_terminated": True,
                         "terminal_punctuation": [".", "?!", "म"], "max_short_line_share": 0.8, "short_line_characters": 12,
                         "max_duplicate_line_character_share": 0.1, "max_newlines_per_word": 0.1},
                        filters.FineWebQualityFilter(line_punct_thr=0.5, line_punct_exclude_zero=True, stop_chars=(".", "?!", "म"),
                                                     short_line_thr=0.8, short_line_length=12, char_duplicates_ratio=0.1, new_line_ratio=0.1)),
    "pii": ({"rule": "pii"}, PIIFormatter),
    "pii_all": ({"rule": "pii", "only_public_ips": False, "email_replacements": ["E"], "ip_replacements": ["I", "J", "K"]},
                lambda: PIIFormatter(only_remove_public_ips=False, email_replacement="E", ip_replacement=("I", "J", "K"))),
}
RULES = {name: [{rule["rule"]: {key: value for key, value in rule.items() if key != "rule"}}] for name, (rule, _) in CASES.items()}


def decide(text, reference):
    """`None` keeps the text, a string keeps a changed text, a list drops it for a reason, `["error"]` is an exception."""
    if callable(reference) and not hasattr(reference, "filter"):
        changed = reference().format(text)
        return None if changed == text else changed
    document = Document(text=text, id="")
    try:
        result = reference.filter(document)
    except ZeroDivisionError:
        return ["error"]
    if isinstance(result, tuple):
        return [result[1]]
    assert result is True
    return None if document.text == text else document.text


def decisions(text):
    return {name: decide(text, reference) for name, (_, reference) in CASES.items()}


WORDS = """the of and to a in is that it was for on with as be have I you we he she they don't can't won't it's I'm you're
they've he'd we'll y'all cannot gonna Gotta let's c'mon o'clock ma'am and/or w/o Mr. Mrs. Dr. St. Ph.D. e.g. i.e. vs. U.S. U.S.A.
a.m. 10am 5p.m. 3:30pm Jan. Dec. Inc. Ltd. co. N.Y. D.C. Calif. don’t it’s she’ll ’cause 'em 'tis rock'n'roll doin' Goin’ dont
wont cant Im ive hes lets its Its were Were shell she'll ill I'd've couldn't've wouldnt shouldve mightn't daren't ain't
http://example.com https://www.example.org/path/to?q=1&b=2#frag www.site.co.uk ftp://user:pass@host.net:8080/x example.com/foo
foo.bar.Baz lower.Upper end.Start mailto:me@x.org me@example.com John.Doe+tag@mail.example.co.uk a@b.c x@[1.2.3.4] 8.8.8.8 192.168.0.1
10.0.0.1 1.1.1.1:53 256.1.1.1 01.02.03.04 100.64.1.1 192.0.0.9 198.51.100.7 http://223.255.255.254/ 172.15.0.1 172.16.0.1
:) :-) ;-) :( :D :P XD <3 </3 ^_^ o_O (-_-) ¯\\(ツ)/¯ ಠ_ಠ >.< :'( :/ 8) =) (: hi:) ok:D
5km 10kg 3.5GB 20% 100m² $5 US$20 €7 7€ £3.50 5$ C$3 +5 -3 3+ 1-2 2*3 4^5 1+1 1,000 1,000.50 5.0 .5 5. 12°C. 30°F 9/11 50mm 5m/s 7тб
"quoted" 'single' “curly” ‘curly’ «guillemets» (paren) [bracket] {brace} <tag> </div> `code` "nested 'quotes'." (e.g., this) word.) end." 'end.'
well-known state-of-the-art semi--dash em—dash en–dash a—b 1–2 x---y x----y tilde~d --flag -dash- — – ~ -- --- a-1 1-a B-2-b
wait... wait.. .... … a…b …… ...start end… a..b A...B
foo,bar foo:bar foo;bar foo=bar foo<bar foo>bar foo/bar 1/2 a/b/c foo_bar __init__ #hashtag #1 @user C++ C# .NET a.b a.B A.b A.B 'x' x' 'x
* - • ○ ► – © ® ™ ° § ¶ † ‡ • - * # ## #### ### &amp; &nbsp; %20 50%off 5%-10% = == === + ++ | || \\ \\n \\t
日本語 中文字符。 これは、テスト！ 한국어 مرحبا العالم، كيف؟ हिन्दी वाक्य। नमस्ते ру́сский Привет, Ελληνικά עברית ไทย 2km²で Größe naïve café
e\u0301 n\u0303o a\u0300\u0301b ①②③ ½ ² x² ٣٤٥ ५६ ７８ Ａｂ ǅ ß ﬁ İstanbul ſ Ω K 𝐀𝐁 😀 👍🏽 🇩🇪 👨\u200d👩\u200d👧 ☃ ★★★ →→ \ufeff \u200b zero\u200bwidth soft\u00adhyphen
ORTH NOUN <space> SPACE supercalifragilisticexpialidocious aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
javascript JavaScript lorem ipsum Lorem { } privacy policy cookies use uses terms [1] [12] [edit] [citation needed] [] [٣] [[2]]""".split()
PHRASES = ["Lorem ipsum dolor sit amet.", "Please enable JavaScript to view this page.", "We use cookies to improve.", "Read our Privacy Policy and Terms of Use.",
           "function() { return 1; }", "It was said.[1] And again.[23][citation needed]", "Section one [edit]", "All rights reserved ©2020.",
           "He said: \"Stop!\" Then he left.", "Is it? Yes! No... Maybe.", "Contact us: info@company.com, +1 (555) 123-4567.", "Click here » Read more...",
           "- first item", "• second item", "* third item…", "1. Introduction", "a) option", "The server 8.8.4.4 and 93.184.216.34 answered 10.1.1.1.",
           "use coo\u212aies today.", "from a.b.@c.d..e@f.gh. to !x!y@z-.com and é@x.org", "Mr. Smith went to Washington. He arrived at 10 p.m. on Jan. 5th.",
           "The quick brown fox jumps over the lazy dog and that is what we have to say with it."]
SPACES = [" "] * 40 + ["  ", "   ", "\t", "\n", "\n", "\n\n", "\n \n", "\r\n", "\r", "\u00a0", " \u00a0", "\u3000", "\u2003", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x1f", "\x85", "\u2028", "\u2029", "\n\n\n", ""]
CHARACTERS = list("abcXYZ019.,:;!?'\"’“”-–—~()[]{}<>/\\@#$%^&*+=_|`… \n\t") + list("éÀßжЖ中あ한مहा٣²°€£½•→😀´、。？！；\u0301\u200d\u00a0\x1c\x85\u2028µкм")


def random_words(rng, most):
    return "".join(rng.choice(WORDS) + rng.choice(SPACES) for _ in range(rng.randrange(1, most)))


def random_characters(rng, most):
    pool = rng.sample(CHARACTERS, rng.randrange(2, 12)) if rng.random() < 0.5 else CHARACTERS
    return "".join(rng.choice(pool) for _ in range(rng.randrange(1, most)))


def random_glued(rng, most):
    """Words without space between them, as affixes and infixes meet."""
    return " ".join("".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 4))) for _ in range(rng.randrange(1, most)))


def random_unicode(rng, most):
    def character():
        kind = rng.random()
        if kind < 0.4:
            return chr(rng.randrange(32, 127))
        if kind < 0.7:
            return chr(rng.randrange(0x80, 0x3100))
        code = rng.randrange(0x110000)
        return " " if 0xD800 <= code < 0xE000 else chr(code)

    return "".join(character() for _ in range(rng.randrange(1, most)))


def random_page(rng, most):
    lines = []
    for _ in range(rng.randrange(1, most)):
        kind = rng.random()
        if kind < 0.35:
            line = rng.choice(PHRASES)
        elif kind < 0.5 and lines:
            line = rng.choice(lines)
        elif kind < 0.85:
            line = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 25))) + rng.choice([".", "!", "?", "...", "", '"', "。"])
        else:
            line = " ".join(rng.sample(PHRASES, 3))
        lines.append(line)
    return rng.choice(["\n", "\n", "\n\n", "\r\n", "\u2028"]).join(lines)


def fixed():
    long_lines = "\n".join(["x" * 200] * 3)
    return ["", " ", "\n", " \n\t\u00a0", ".", "...", "!?!?", "#" * 40, "a " * 300, "ab" * 700, "word " * 60 + "\n" * 30, "line one\n" * 20,
            "para one\n\n" * 20, long_lines, long_lines + "\n" + "y" * 199, "\n".join(["y" * 199] * 4), "- item one\n" * 30, "read more...\n" * 12,
            "x" * 1001 + " one two three.", "One two three. " * 10, "Is this it? " * 6 + "{", "lorem ipsum. and more words here. " * 3, "( " * 50, ": ) " * 40,
            ":) " * 30, "." * 300, "-" * 300, "'" * 99, "a" + "." * 50 + "b", "http://" + "a" * 64 + ".com", "http://" + "a" * 65 + ".com", "x." + "a" * 63,
            "x." + "a" * 64, "@" * 20 + "a.com", "a@" * 30 + "b.com", "1." * 60, "\x1c\x1d", "\ufeffBOM text.", "tab\tseparated\tvalues", "\x00\x01\x02 control"]


def generated(rng, count):
    kinds = [random_words, random_words, random_characters, random_glued, random_unicode, random_page, random_page, random_page]
    for index in range(count):
        yield kinds[index % len(kinds)](rng, rng.choice([4, 12, 40]))


def excerpts(rng, count, path=CORPUS):
    with gzip.open(path, "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    for _ in range(count):
        text = rng.choice(texts)
        start = rng.randrange(max(1, len(text) - 1500))
        yield text[start : start + rng.randrange(100, 1500)]


def write_golden():
    rng = random.Random(20250101)
    documents = fixed() + list(generated(rng, 640)) + list(excerpts(rng, 40))
    versions = {"datatrove": "0.10.1", "spacy": spacy.__version__, "python": platform.python_version()}
    lines = [{"versions": versions, "rules": RULES}]
    for index, text in enumerate(documents):
        words = split_into_words(text)
        # the words are found in the text in order, so their lengths and the gaps between them give them
        line = {"text": text, "words": lengths(text, words), "decisions": {name: got for name, got in decisions(text).items() if got is not None}}
        if index % 2 == 0:
            line["sentences"] = [len(sentence) for sentence in split_into_sentences(text)]
        lines.append(line)
    with open(HERE / "golden.jsonl.gz", "wb") as raw, gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0, compresslevel=9) as file:
        for line in lines:
            file.write((json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n").encode())


def lengths(text, words):
    """The lengths of the words in code points; white space between them is not stored."""
    position, found = 0, []
    for word in words:
        start = text.index(word, position)
        assert not text[position:start].strip(), (text, word)
        position = start + len(word)
        found.append(len(word))
    assert not text[position:].strip()
    return found


def compare(count, seed):
    rng = random.Random(seed)
    for text in generated(rng, count):
        print(json.dumps({"text": text, "words": split_into_words(text), "sentences": split_into_sentences(text), "decisions": decisions(text)}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rules"]:
        print(json.dumps(RULES))
    elif sys.argv[1:2] == ["--compare"]:
        compare(int(sys.argv[2]), int(sys.argv[3]))
    else:
        write_golden()
