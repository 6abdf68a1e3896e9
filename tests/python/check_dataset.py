"""Checks a data set without Stillhouse's code: pyarrow reads it, numpy recomputes what it must hold.

    check_dataset.py DATASET [--tokens N] [--words CORPUS]

The data set must have been made with `topk` = V, so that the teacher's whole distribution is in it. N tokens a shard are
drawn for what is slow (every token if there are fewer). `--words` re-packs a corpus of JSON lines whose text is words `w17`
of a tokenizer where `w17` is token 17. Prints one line of JSON that says how much was checked; any fault is an exception.
"""
import argparse
import hashlib
import json
import pathlib
import sys
import zlib

import noise_reference as reference
import numpy as np
import pyarrow.parquet as pq

UNSIGNED = {np.dtype(t) for t in ("uint8", "uint16", "uint32")}


class Row:
    """One packed sequence: columns by name, as numpy arrays."""

    def __init__(self, table, i):
        self.columns = {}
        for name in table.column_names:
            value = table.column(name)[i]
            self.columns[name] = value.values.to_numpy(zero_copy_only=False) if hasattr(value, "values") else value.as_py()

    def __getitem__(self, name):
        return self.columns[name]

    def __contains__(self, name):
        return name in self.columns


def base_of(vocab, length):
    base = 1
    while base**length < vocab:
        base += 1
    return base


def written_by(job):
    """How the teacher wrote the text, or None."""
    if job["extract"].get("mode") != "sequential":
        return None
    return {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "stop": "eos", **(job["extract"].get("sequential") or {})}


def certain_positions(row, job, bos):
    """Positions that are given or padding, not predicted (docs/FORMAT.md, 'What the teacher sees')."""
    ids, valid = row["input_ids"], row_valid(row)
    given = ~valid
    if written_by(job):
        given[: row["given"]] = True
        return given
    starts = row["document_offsets"] if job["extract"]["context"] == "document" else [0]
    for start in starts:
        given[start] |= ids[start] == bos
    return given


def row_valid(row):
    if "attention_mask" in row:
        return np.array(row["attention_mask"], dtype=bool)
    return np.ones(len(row["input_ids"]), dtype=bool)


def check_files(folder, manifest):
    assert (folder / "_SUCCESS").exists()
    for path in ("README.md", "tokenizer.json"):
        assert (folder / path).stat().st_size > 0, path
    assert hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest() == manifest["tokenizer"]["sha256"]
    shards = {s["path"]: s for s in manifest["shards"]}
    assert set(shards) == {f"data/{p.name}" for p in (folder / "data").iterdir()}
    for path, shard in shards.items():
        content = (folder / path).read_bytes()
        assert hashlib.sha256(content).hexdigest() == shard["sha256"], path
        assert len(content) == shard["bytes"], path
        metadata = pq.read_metadata(folder / path)
        assert metadata.num_rows == shard["rows"], path
        check_sums(content, metadata.metadata[b"stillhouse.pages"], shard["footer"], path)
    for split, totals in manifest["totals"].items():
        for key in ("rows", "tokens", "bytes"):
            assert totals[key] == sum(s[key] for s in shards.values() if s["dataset_split"] == split), (split, key)


def check_sums(content, pages, footer, path):
    """Every page, from byte 4 to the footer, has its CRC-32; the footer has its sha256."""
    at = 4
    for entry in pages.split():
        size, crc = entry.split(b":")
        assert zlib.crc32(content[at : at + int(size)]) == int(crc, 16), (path, at)
        at += int(size)
    assert at == len(content) - footer["bytes"], path
    assert hashlib.sha256(content[at:]).hexdigest() == footer["sha256"], path


def check_row(row, job, manifest):
    """What every row must satisfy, whatever the teacher."""
    ids, valid = row["input_ids"], row_valid(row)
    length, vocab = job["pack"]["length"], manifest["vocab_size"]
    specials = {role: token["id"] for role, token in manifest["tokenizer"]["special_tokens"].items()}
    assert len(ids) == length or (job["pack"]["remainder"] == "keep" and 0 < len(ids) < length)
    assert ids.dtype == np.int32 and ids.min() >= 0 and ids.max() < vocab
    assert np.all(valid[:-1] >= valid[1:]), "the attention mask is not a prefix"
    assert np.all(ids[~valid] == specials["pad"])
    text = ids[valid]
    written = written_by(job)
    if written:
        ends = np.flatnonzero(text[row["given"] :] == specials["eos"])
        assert text[0] == specials["bos"] and 1 <= row["given"] < len(text)
        if written["stop"] == "eos":
            assert len(text) == length if len(ends) == 0 else row["given"] + ends[0] + 1 == len(text)
        else:
            assert len(text) == length
    elif job["pack"]["boundary"] == "bos_eos":
        assert text[0] == specials["bos"] and text[-1] == specials["eos"]
    offsets, documents = row["document_offsets"], row["document_ids"]
    assert len(offsets) == len(documents) >= 1 and offsets[0] == 0 and offsets[-1] < valid.sum()
    assert np.all(np.diff(offsets) > 0) and np.all(np.diff(documents.astype(np.int64)) >= 0)
    # Within a document a segment begins after an eos or before a bos of its text, and only where those are parsed.
    same = np.diff(documents.astype(np.int64)) == 0
    inner, outer = offsets[1:][same], offsets[1:][~same]
    if job["tokenizer"]["special_tokens"] == "parse":
        assert np.all((ids[inner - 1] == specials["eos"]) | (ids[inner] == specials["bos"]))
    else:
        assert len(inner) == 0
    assert np.all(documents >> np.uint64(32) == row["sequence_id"] >> 32)
    if job["pack"]["mode"] == "pad":
        assert len(set(documents)) == 1
    elif job["pack"]["separator"] == "eos":
        # A document begins after the separator of the one before.
        assert np.all(ids[outer - 1] == specials["eos"]) or job["pack"]["boundary"] == "bos_eos" and offsets[1] == 1


def check_subtokens(row, record, vocab):
    base, length = record["base"], record["length"]
    assert base == base_of(vocab, length)
    digits = row["subtokens"].astype(np.int64).reshape(-1, length)
    assert digits.min() >= 0 and digits.max() < base
    assert np.array_equal(digits @ base ** np.arange(length - 1, -1, -1), row["input_ids"])


class Uniforms:
    """docs/FORMAT.md, 'Other randomness'."""

    def __init__(self, seed, purpose, sequence_id, stream):
        h = 0xCBF29CE484222325
        for byte in purpose.encode("ascii"):
            h = (h ^ byte) * 0x100000001B3 % 2**64
        z = ((seed ^ h) + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        s = z ^ z >> 31
        self.key = s % 2**32, s >> 32
        self.counter = [0, stream, sequence_id % 2**32, sequence_id >> 32]
        self.words = []

    def word(self):
        if not self.words:
            self.words = [int(w) for w in reference.philox4x32_10([[c] for c in self.counter], self.key)[:, 0]]
            self.counter[0] += 1
        return self.words.pop(0)

    def uniform(self):
        a, b = self.word(), self.word()
        return float((a + (b << 32)) >> 11) * 2.0**-53

    def below(self, n):
        m = self.word() * n
        while m % 2**32 < (2**32 - n) % n:
            m = self.word() * n
        return m >> 32


def partitions_of(seed, spec, sequence_id, valid, tally):
    """All views of a sequence, derived from docs/FORMAT.md: groups [views, L] and t [views]."""
    views, eps = spec["views"], spec["eps"]
    strata, shuffle = list(range(views)), Uniforms(seed, "partition_strata", sequence_id, 0)
    for i in range(views - 1, 0, -1):
        j = shuffle.below(i + 1)
        strata[i], strata[j] = strata[j], strata[i]
    groups, times = np.zeros((views, len(valid)), bool), np.zeros(views, np.float32)
    for view in range(views):
        u = Uniforms(seed, "partition_t", sequence_id, view).uniform()
        part = (strata[view] + u) / views if spec["sampling"] == "stratified" else u
        t = np.float32(eps + (1 - 2 * eps) * part)
        if float(t) < eps:
            t = np.nextafter(t, np.float32(2))
        elif float(t) > 1 - eps:
            t = np.nextafter(t, np.float32(-1))
        times[view] = t
        share = float(t) if spec["schedule"] == "linear" else 1 - (1 - float(t)) ** spec["power"]
        uniforms = Uniforms(seed, "partition_group", sequence_id, view)
        groups[view] = np.array([uniforms.uniform() for _ in valid]) < share
        groups[view] &= valid
        n, ones = int(valid.sum()), int(groups[view].sum())
        if n >= 2 and ones in (0, n):
            moved = np.flatnonzero(valid)[Uniforms(seed, "partition_repair", sequence_id, view).below(n)]
            groups[view, moved] ^= True
            tally["repaired"] += 1
    return groups, times


def check_partitions(row, seed, spec, tally):
    valid, views = row_valid(row), spec["views"]
    groups = np.asarray(row["partition"]).reshape(views, -1)
    t = row["partition_t"].astype(np.float64)
    eps = spec["eps"]
    expected, times = partitions_of(seed, spec, row["sequence_id"], valid, tally)
    assert np.array_equal(groups, expected) and np.array_equal(row["partition_t"], times), "not the partitions of the seed"
    assert len(t) == views and np.all(t >= eps - 1e-6) and np.all(t <= 1 - eps + 1e-6)
    if spec["sampling"] == "stratified":
        strata = (np.sort(t) - eps) / (1 - 2 * eps) * views
        assert np.all(np.abs(strata - np.arange(views) - 0.5) <= 0.5 + 1e-4), strata
    n = valid.sum()
    for view in range(views):
        assert not groups[view][~valid].any()
        ones = groups[view][valid].sum()
        assert n < 2 or 0 < ones < n, "an empty group"
        p = t[view] if spec["schedule"] == "linear" else 1 - (1 - t[view]) ** spec["power"]
        tally["ones"] += ones - n * p
        tally["variance"] += n * p * (1 - p)


def noise_lists(row, draws):
    """Corrections by [draw][position]."""
    assert row["noise_count"].dtype in UNSIGNED and row["noise_index"].dtype in UNSIGNED
    count = row["noise_count"].astype(np.int64)
    assert count.sum() == len(row["noise_index"]) == len(row["noise_logprob"])
    ends = np.cumsum(count)
    lists = [(row["noise_index"][e - c : e], row["noise_logprob"][e - c : e]) for c, e in zip(count, ends)]
    length = len(row["input_ids"])
    assert len(lists) == draws * length
    return [lists[d * length : (d + 1) * length] for d in range(draws)]


def decode(vocab, x, logprob, index, value, e0, e):
    """Decoded noise; an entry that occurs twice adds up."""
    p = np.zeros(vocab)
    np.add.at(p, index.astype(np.int64), np.exp(value.astype(np.float64)))
    big_e = e + p * e0
    big_e[x] = np.exp(float(logprob)) * e0
    return -np.log(big_e)


def check_lead(logp, x, xi, lead):
    """x wins in l + ξ as it is stored, by the lead (less the rounding of the top-k to f32)."""
    score = logp + xi
    score[x], won = -np.inf, score[x]
    assert won - score.max() >= 0.9 * lead - 2e-6, (won, score.max())


def check_written(row, i, index, logp, written, manifest):
    """The token wins under the seed's own noise, of which nothing is stored; `index`: the entries, the likeliest first."""
    x, temperature = int(row["input_ids"][i]), written["temperature"]
    if temperature == 0:
        assert x == index[0]
        return
    left = index[: written["top_k"]] if written["top_k"] else index
    if written["top_p"] < 1:
        p = np.exp((logp[left] - logp[left[0]]) / temperature)
        left = left[np.concatenate([[0], np.cumsum(p / p.sum())[:-1]]) < written["top_p"]]
    _, e = reference.exponentials(manifest["noise_seed"], 0, row["sequence_id"], i, len(logp))
    scores = logp[left] / temperature - np.log(e[left])
    # the top-k is of f32
    assert x in left and scores[left == x][0] >= scores.max() - 4e-6, (row["sequence_id"], i, x)


def check_signals(row, i, certain, logp, extract):
    """The other signals of one position, by their definitions on the whole distribution; drawn tokens by their number alone."""
    x, at_temperatures = int(row["input_ids"][i]), extract.get("logz_temperatures") or []
    if at_temperatures:
        logz = row["logz"].reshape(-1, len(at_temperatures))[i].astype(np.float64)
        assert not certain or not logz.any(), logz
        # l = ln p + logz at T = 1
        if not certain and 1.0 in at_temperatures:
            one = logz[at_temperatures.index(1.0)]
            right = np.array([one / t + np.logaddexp.reduce(logp / t) for t in at_temperatures])
            assert np.all(np.abs(logz - right) <= 1e-4 * np.maximum(1, np.abs(right))), (logz, right)
    if extract.get("entropy"):
        kept = logp[np.isfinite(logp)]
        assert abs(row["entropy"][i] + (np.exp(kept) * kept).sum()) <= 1e-4
    candidates = extract.get("candidates") or []
    if candidates:
        got, right = row["candidate_logprob"].reshape(-1, len(candidates))[i].astype(np.float64), logp[candidates]
        near = np.abs(np.where(got == right, 0, got - np.where(np.isfinite(right), right, 0))) <= 1e-5 * np.maximum(1, np.abs(got))
        assert np.all((got == right) | near), (got, right)
    if extract.get("samples"):
        counts = row["sampled_count"].astype(np.int64)
        of = slice(counts[:i].sum(), counts[: i + 1].sum())
        assert row["sampled_times"][of].sum() == extract["samples"]["draws"] and np.all(np.isfinite(logp[row["sampled_index"][of]]))
        assert not certain or row["sampled_index"][of].tolist() == [x]
    if extract.get("top_p"):
        counts, top_p = row["top_p_count"].astype(np.int64), extract["top_p"]
        of = slice(counts[:i].sum(), counts[: i + 1].sum())
        index, mass = row["top_p_index"][of].astype(np.int64), np.exp(row["top_p_logprob"][of].astype(np.float64))
        assert np.all(np.abs(mass - np.exp(logp[index])) <= 1e-5) and abs(mass.sum() + np.exp(float(row["top_p_tail"][i])) - 1) <= 1e-4
        # the fewest that hold so much, if so many may be kept
        assert mass[:-1].sum() < top_p["mass"] + 1e-5
        assert counts[i] == top_p["most"] or mass.sum() >= top_p["mass"] - 1e-5
        others = np.delete(np.exp(logp), index)
        assert len(others) == 0 or others.max() <= mass.min() + 1e-6


def check_token(row, i, certain, job, manifest, tally):
    """The noise of one position, of every draw, against the formula on the whole distribution."""
    vocab, noise, x = manifest["vocab_size"], job["extract"].get("noise"), int(row["input_ids"][i])
    index = row["topk_index"].reshape(-1, vocab)[i].astype(np.int64)
    value = row["topk_logprob"].reshape(-1, vocab)[i].astype(np.float64)
    logp = np.full(vocab, -np.inf)
    if certain:
        assert row["logprob"][i] == 0.0
        logp[x] = 0.0
    else:
        assert np.all(np.diff(value) <= 0), "top-k does not descend"
        assert len(np.unique(index)) == vocab
        logp[index] = value
        assert abs(np.logaddexp.reduce(logp)) < 1e-4
        assert abs(logp[x] - row["logprob"][i]) <= 1e-5 * max(1, abs(logp[x])), (logp[x], row["logprob"][i])
    check_signals(row, i, certain, logp, job["extract"])
    if written_by(job):
        if not certain:
            check_written(row, i, index, logp, written_by(job), manifest)
            tally["noises"] += 1
        return
    for draw in range(noise["draws"]):
        e0, e = reference.exponentials(manifest["noise_seed"], draw, row["sequence_id"], i, vocab)
        exact = reference.posterior_gumbel(logp, x, e0, e)
        assert np.argmax(logp + exact) == x
        if noise["codec"] == "dense":
            got = row["noise"].reshape(noise["draws"], -1, vocab)[draw, i].astype(np.float64)
            half = row["noise"].dtype == np.float16
            bound = np.maximum(1.0, np.abs(exact)) * (2.0**-11 if half else 0) + 2e-5
            off = np.abs(got - exact) > bound
            if noise["condition"] and not certain:
                # Rounded so that x wins: up at x, down elsewhere, by a step of the type and the lead at most.
                assert np.all((got > exact)[off] == (np.flatnonzero(off) == x))
                bound = 2 * bound + 2.0**-12
                check_lead(logp, x, got, 2.0**-12)
            else:
                assert not off.any(), np.abs(got - exact).max()
            assert np.all(np.abs(got - exact) <= bound), np.abs(got - exact).max()
            tally["difference"] = max(tally["difference"], float(np.abs(got - exact).max()))
        else:
            corrections = tally["lists"][draw][i]
            if certain:
                assert len(corrections[0]) == 0
            stored = decode(vocab, x, row["logprob"][i], *corrections, e0, e)
            tv = reference.tv(reference.softmax(exact), reference.softmax(stored))
            assert tv <= noise["tolerance"] * (1 + 1e-3) + 1e-6, (row["sequence_id"], i, draw, tv)
            tally["tv"] = max(tally["tv"], float(tv))
            if noise["condition"] and not certain:
                check_lead(logp, x, stored, min(2.0**-12, noise["tolerance"]))
        tally["noises"] += 1


def repack(corpus, job, manifest):
    """Rows of ids, written anew from the text: one split of words."""
    pack = job["pack"]
    special = {role: token["id"] for role, token in manifest["tokenizer"]["special_tokens"].items()}
    length, ends, keep = pack["length"], pack["boundary"] == "bos_eos", pack["remainder"]
    documents = [[int(w[1:]) for w in json.loads(line)["text"].split()] for line in corpus.read_text().splitlines()]
    rows = []
    if pack["mode"] == "pad":
        for d in documents:
            row = [special["bos"], *d[: length - 2], special["eos"]] if ends else None
            if row is None:
                row = [*d[: length - 1], special["eos"]] if pack["separator"] == "eos" else d[:length]
            rows.append(row + [special["pad"]] * (length - len(row)))
        return rows
    if pack["mode"] == "best_fit":
        room = length - 2 if ends else length
        closed, opened = [], []
        for d in documents:
            tokens = d + [special["eos"]] if d and pack["separator"] == "eos" else list(d)
            while len(tokens) >= room:
                closed.append(tokens[:room])
                tokens = tokens[room:]
            if tokens:
                fitting = [row for row in opened if len(row) + len(tokens) <= room]
                if not fitting:
                    fitting = [[]]
                    opened += fitting
                row = max(fitting, key=len)  # the first of the fullest
                row += tokens
                if len(row) == room:
                    closed.append(row)
                    opened = [other for other in opened if other is not row]
        assert len(opened) <= min(4096, (1 << 22) // length)
        rows = [[special["bos"], *row, special["eos"]] if ends else row for row in closed + opened]
        return [row + [special["pad"]] * (length - len(row)) for row in rows]
    stream = [t for d in documents for t in (d + [special["eos"]] if pack["separator"] == "eos" else d)]
    block = length - 2 if ends else length
    for start in range(0, len(stream), block):
        part = stream[start : start + block]
        if len(part) < block and keep == "drop":
            break
        row = [special["bos"], *part, special["eos"]] if ends else part
        rows.append(row + [special["pad"]] * (length - len(row)) if keep == "pad" else row)
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("dataset", type=pathlib.Path)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--words", type=pathlib.Path)
    options = parser.parse_args()
    manifest = json.loads((options.dataset / "manifest.json").read_text())
    job, vocab = manifest["job"], manifest["vocab_size"]
    assert job["extract"]["topk"] == vocab, "made for data sets with k = V"
    check_files(options.dataset, manifest)

    rng = np.random.default_rng(1)
    tally = {"repaired": 0, "rows": 0, "tokens": 0, "certain": 0, "noises": 0, "tv": 0.0, "difference": 0.0, "ones": 0.0, "variance": 0.0}
    logprob_sum, predicted, corrections, repacked = 0.0, 0, 0, []
    for shard in manifest["shards"]:
        table = pq.read_table(options.dataset / shard["path"])
        rows = [Row(table, i) for i in range(table.num_rows)]
        assert [r["sequence_id"] for r in rows] == [(shard["split"] << 32) + i for i in range(len(rows))]
        assert sum(int(row_valid(r).sum()) for r in rows) == shard["tokens"]
        places = [(r, i) for r in range(len(rows)) for i in range(len(rows[r]["input_ids"]))]
        if len(places) > options.tokens:
            firsts = [(r, 0) for r in range(len(rows))]
            places = firsts + [places[j] for j in rng.choice(len(places), options.tokens, replace=False)]
        by_row = {}
        for r, i in places:
            by_row.setdefault(r, []).append(i)
        for r, row in enumerate(rows):
            check_row(row, job, manifest)
            repacked.append(row["input_ids"].tolist())
            if job.get("subtokens"):
                check_subtokens(row, manifest["subtokens"], vocab)
            if job.get("partitions"):
                check_partitions(row, job["seed"], job["partitions"], tally)
            certain = certain_positions(row, job, manifest["teacher"]["bos_token_id"])
            assert np.all(row["logprob"][certain] == 0) and np.all(row["logprob"] <= 0)
            logprob_sum += float(row["logprob"].astype(np.float64).sum())
            predicted += int((~certain).sum())
            tally["rows"] += 1
            tally["certain"] += int(certain.sum())
            if not written_by(job) and job["extract"]["noise"]["codec"] == "replay":
                tally["lists"] = noise_lists(row, job["extract"]["noise"]["draws"])
                for lists in tally["lists"]:
                    assert not any(len(lists[i][0]) for i in np.flatnonzero(certain))
                corrections += len(row["noise_index"])
            for i in by_row.get(r, []):
                check_token(row, i, bool(certain[i]), job, manifest, tally)
                tally["tokens"] += 1
    if tally["variance"] > 0:
        z = tally["ones"] / tally["variance"] ** 0.5
        assert abs(z) < 5, f"the groups do not have the size that t says: z = {z}"
    statistics = manifest["statistics"]
    assert statistics["predicted_tokens"] == predicted
    assert statistics["corrections"] == corrections
    assert abs(statistics["logprob_sum"] - logprob_sum) <= 1e-4 * abs(logprob_sum)
    if options.words:
        assert repacked == repack(options.words, job, manifest), "another packing"
    tally.pop("lists", None)
    print(json.dumps({k: float(v) if isinstance(v, np.floating) else v for k, v in tally.items()}))


if __name__ == "__main__":
    sys.exit(main())
