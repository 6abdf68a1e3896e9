"""Writes tests/urls.json: lists, URLs, and the decisions of datatrove's URLFilter.

    python operators/filters/tests/urls.py

Needs datatrove 0.10.1, tldextract, pyahocorasick and fasteners. The seed is fixed. The list of domains has no addresses,
and no URL is below a subdomain of the list: there stillhouse_filters blocks more (see `UrlBlocklist`).
"""

import json
import pathlib
import random

from datatrove.data import Document
from datatrove.pipeline.filters import URLFilter
from tldextract import TLDExtract

LISTS = {
    "domains": ["blocked.example.com", "spam.org", "bad-site.co.uk", "casino.net", "blocked.github.io", "x.info"],
    "urls": ["https://ok.org/one", "http://news.org/a?b=C", "https://ok.org/Trailing/"],
    "banned_words": ["porn", "xxx", "Free-Bets", "viagra"],
    "soft_banned_words": ["bet", "win", "hot", "live", "cam"],
    "banned_subwords": ["jackpot", "sex chat", "100%free"],
}
HOSTS = [
    "ok.org", "www.ok.org", "spam.org", "www.spam.org", "a.b.spam.org", "spam.org.uk", "notspam.org", "example.com", "blocked.example.com",
    "other.example.com", "bad-site.co.uk", "www.bad-site.co.uk", "site.co.uk", "casino.net", "casino.network", "192.0.2.7", "192.0.2.70",
    "github.io", "blocked.github.io", "me.github.io", "localhost", "x.info", "WWW.OK.ORG", "xn--bcher-kva.example", "news.org", "jackpot.org",
]
WORDS = ["one", "two", "porn", "Porn", "xxx", "freebets", "free", "bets", "bet", "win", "Win", "hot", "live", "cam", "sex", "chat", "jack", "pot",
         "JackPot", "100", "viagra", "a", "Trailing", ""]
SEPARATORS = ["/", "-", "_", "?", "=", "&", ".", "+", "%20", "#", "é"]


def url(draw):
    scheme = draw.choice(["https://", "http://", "HTTPS://", "//", "", "ftp://", "https://user:pw@"])
    port = draw.choice(["", "", "", ":80", ":8443"])
    path = "".join(draw.choice(WORDS) + draw.choice(SEPARATORS) for _ in range(draw.randrange(6)))
    return scheme + draw.choice(HOSTS) + port + draw.choice(["", "/", "/" + path, "/" + path, "?" + path])


def main():
    judge = URLFilter(extra_domains=LISTS["domains"], extra_urls=LISTS["urls"], banned_words=LISTS["banned_words"],
                      banned_subwords=LISTS["banned_subwords"], soft_banned_words=LISTS["soft_banned_words"], use_integrated_lists=False)
    # the list of public suffixes that tldextract ships
    judge.tldextractor = TLDExtract(suffix_list_urls=())
    draw = random.Random(34)
    urls = LISTS["urls"] + [url(draw) for _ in range(1500)]
    decisions = []
    for address in urls:
        verdict = judge.filter(Document(text="", id="", metadata={"url": address}))
        decisions.append([address, "" if verdict is True else verdict[1]])
    path = pathlib.Path(__file__).parent / "urls.json"
    lines = ",\n".join(json.dumps(decision, ensure_ascii=False) for decision in decisions)
    path.write_text(f'{{"lists": {json.dumps(LISTS)},\n"decisions": [\n{lines}\n]}}\n')
    counts = {}
    for _, reason in decisions:
        counts[reason] = counts.get(reason, 0) + 1
    print(counts)


if __name__ == "__main__":
    main()
