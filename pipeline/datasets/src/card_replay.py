import glob
import json

import numpy as np
import pyarrow.parquet as pq

manifest = json.load(open("manifest.json"))
V, seed = manifest["vocab_size"], manifest["noise_seed"]
LOW = 0xFFFFFFFF


def philox(counter, key):  # Philox4x32-10: four arrays of words to four arrays of random words
    c = [np.asarray(word, np.uint64) for word in counter]
    k0, k1 = key & LOW, key >> 32
    for _ in range(10):
        p, q = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(q >> np.uint64(32)) ^ c[1] ^ np.uint64(k0), q & np.uint64(LOW),
             (p >> np.uint64(32)) ^ c[3] ^ np.uint64(k1), p & np.uint64(LOW)]
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return np.stack(c, axis=-1)


def replay(row, position, draw=0):  # softmax(ξ) [V] of one token
    key = (seed + draw * 0x9E3779B97F4A7C15) % 2**64
    low, high = row["sequence_id"] & LOW, row["sequence_id"] >> 32

    def exponential(blocks):
        words = np.ones(len(blocks), np.uint64)
        r = philox([blocks, words * np.uint64(position), words * np.uint64(low), words * np.uint64(high)], key)
        return -np.log1p(-(r.astype(np.float64) + 0.5) * 2.0**-32)

    e = exponential(np.arange((V + 3) // 4, dtype=np.uint64)).reshape(-1)[:V]
    e0 = exponential(np.array([LOW], np.uint64))[0, 0]
    count = np.array(row["noise_count"]).reshape(-1, len(row["input_ids"]))
    begin = count[:draw].sum() + count[draw, :position].sum()
    mine = slice(begin, begin + count[draw, position])
    p = np.zeros(V)
    np.add.at(p, row["noise_index"][mine], np.exp(np.array(row["noise_logprob"][mine], np.float64)))
    E = e + p * e0
    E[row["input_ids"][position]] = np.exp(row["logprob"][position]) * e0
    return (1 / E) / (1 / E).sum()  # ξ itself is -log(E)


shard = pq.ParquetFile(sorted(glob.glob("data/*.parquet"))[0])
row = next(shard.iter_batches(batch_size=1)).to_pylist()[0]
print(replay(row, position=1).max())
