"""Benchmarks of search and of training steps: python tests/bench.py [exact|buckets|step …]

The contenders take turns, so that other load on the machine slows down all of them. A time is the shortest of all
turns, in milliseconds. The first line names the machine, the number of threads and the load. faiss is optional (pip
install faiss-cpu).

If the number of queries times their length is at least faiss.cvar.distance_compute_blas_threshold (128,000 by default),
faiss multiplies with BLAS, as PyTorch does, and otherwise in its own loops. The tables show both: "faiss, default" is
the default, and "faiss, BLAS" sets the threshold to 20. A ratio is faiss's time divided by ours.
"""
import argparse
import os
import platform
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import ann  # noqa: E402
import data  # noqa: E402
import memory  # noqa: E402
import train  # noqa: E402
from encoder import Config, low_precision  # noqa: E402
from tome import TOME, BatchTOME, coreference_loss, entity_prediction_loss, mlm_loss  # noqa: E402

faiss = None            # imported below, so that test_bert can use this file without faiss

SMALL = Config(dropout=0.0, hidden=256, n_heads=4, intermediate=1024, n_initial=2, n_upper=2, key_dim=64, value_dim=128,
               coref_dim=128, k=32, k_shard=32, k_answer=32, k_answer_shard=32)
BASE = Config(dropout=0.0, k=128, k_shard=128, k_answer=128, k_answer_shard=128)

def machine(threads):
    """The processor, the number of threads and the load during the last minute."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor())
    return (f"{name}, {torch.backends.cpu.get_cpu_capability()}, {threads} threads, load {os.getloadavg()[0]:.1f}, "
            f"torch {torch.__version__}")

def row(what, times, **more):
    """Prints a line of a table: all times in ms, those of faiss with their ratio to ours."""
    cells = [f"{name} {1e3 * seconds:.3g}" + (f" ({seconds / times['ours']:.2f})" if "faiss" in name else "")
             for name, seconds in times.items()]
    cells += [f"{name} {value:.3f}" for name, value in more.items()]
    print("| " + " | ".join([what, *cells]) + " |", flush=True)

def race(turns, functions):
    """Calls all functions in turn, `turns` times. Returns {name: shortest time} and {name: result}. An untimed call
    precedes each timed one, because the previous contender leaves cold caches and, for a while, busy threads."""
    results = {name: function() for name, function in functions.items()}
    times = {name: [] for name in functions}
    sync = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(turns):
        for name, function in functions.items():
            time.sleep(0.05)
            function()
            sync()
            start = time.perf_counter()
            function()
            sync()
            times[name].append(time.perf_counter() - start)
    return {name: min(t) for name, t in times.items()}, results

def overlap(ids, exact):
    """Recall: the fraction of the exact ids that were found, averaged over queries."""
    return float(np.mean([np.isin(a, b).mean() for a, b in zip(exact.cpu().numpy(), torch.as_tensor(ids).cpu().numpy())]))

def clustered(N, d, n_entities, n_queries, device, seed=0):
    """Keys [N, d] like those of a memory, with many mentions per entity and different lengths, sorted by entity; and
    queries [Q, d], which are drawn like the keys."""
    generator = torch.Generator().manual_seed(seed)
    entity = torch.randn(n_entities, d, generator=generator)

    def mentions(n):
        x = entity[torch.randint(n_entities, (n,), generator=generator).sort().values]
        x = x + 0.8 * torch.randn(n, d, generator=generator)
        return (x * (1 + 0.2 * torch.rand(n, 1, generator=generator))).to(device)
    return mentions(N), mentions(n_queries)

# ---- search

def faiss_search(index, queries, k, threshold):
    """Searches with faiss, using this distance_compute_blas_threshold."""
    faiss.cvar.distance_compute_blas_threshold = threshold
    return index.search(queries.cpu().numpy(), k)

SHAPES = [(262144, 768, 128, 128), (100000, 768, 64, 128), (100000, 128, 64, 128), (100000, 1536, 64, 128),
          (91740, 340, 64, 64),                                                     # a step of the toy
          (10000, 768, 64, 128), (10000, 24, 64, 128), (10000, 1, 64, 128)]

def exact(args):
    generator = torch.Generator().manual_seed(0)
    for N, Q, k, d in SHAPES:
        queries, keys = (torch.randn(n, d, generator=generator).to(args.device) for n in (Q, N))
        half = keys.half()
        key_passage = torch.arange(N, device=args.device) // 20
        query_passage = torch.randint(N // 20, (Q,), generator=generator).to(args.device)
        contenders = {"ours": lambda: ann.exact_topk(queries, keys, k),
                      "own passage excluded": lambda: ann.exact_topk(queries, keys, k, query_passage, key_passage),
                      "float16 keys": lambda: ann.exact_topk(queries, half, k),
                      "one product": lambda: keys @ queries.T}
        if faiss:
            flat = faiss.IndexFlatIP(d)
            flat.add(keys.cpu().numpy())
            contenders["faiss, default"] = lambda: faiss_search(flat, queries, k, 128000)
            contenders["faiss, BLAS"] = lambda: faiss_search(flat, queries, k, 20)
        row(f"exact: N {N:,}, Q {Q}, k {k}, d {d}", race(args.turns, contenders)[0])

def buckets(args):
    keys, queries = clustered(524288, 128, 8192, args.queries, args.device)
    if args.keys:
        keys = torch.from_numpy(np.load(args.keys)).float().to(args.device)
        asked = torch.randperm(len(keys), generator=torch.Generator().manual_seed(0))[:args.queries]
        # queries near keys: the memory contains other mentions of their entities
        queries = keys[asked] + 0.1 * keys.std() * torch.randn(len(asked), keys.shape[1])
    N, d, k, C = *keys.shape, 128, args.clusters
    start = time.perf_counter()
    index = ann.BucketedIndex(keys, C)
    times = {"ours": time.perf_counter() - start}
    if faiss:
        start = time.perf_counter()
        ivf = faiss.IndexIVFFlat(faiss.IndexFlatIP(d), d, C, faiss.METRIC_INNER_PRODUCT)
        ivf.train(keys[torch.randperm(N)[:ann.SAMPLE * C]].cpu().numpy())
        ivf.add(keys.cpu().numpy())
        times["faiss"] = time.perf_counter() - start
    row(f"{N:,} keys into {C} buckets", times)
    times, results = race(args.turns, {"ours": lambda: ann.exact_topk(queries, keys, k)})
    row("… exact search", times)
    best, found, n_search = results["ours"][1], {}, args.probes
    while n_search <= C and min(found.values(), default=0) < 0.95:
        contenders = {"ours": lambda: index.search(queries, k, n_search)}
        if faiss:
            ivf.nprobe = n_search
            contenders["faiss, default"] = lambda: faiss_search(ivf, queries, k, 128000)
            contenders["faiss, BLAS"] = lambda: faiss_search(ivf, queries, k, 20)
        times, results = race(args.turns, contenders)
        found = {"recall" if name == "ours" else "recall of " + name: overlap(result[1], best)
                 for name, result in results.items()}
        row(f"… {len(queries)} queries, {n_search} of {C} buckets, k {k}", times, **found)
        n_search = max(n_search + 1, round(1.1 * n_search))         # steps of 10%
    # Different ways to choose a query's buckets. Recall is the fraction of exact ids whose bucket is searched.
    order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(0))
    raw, raw_bucket = ann.kmeans(keys, keys[order[:C]])
    bucket = ann.nearest(keys, index.centroids)[1]
    n = max(1, C // 32)
    for what, centroids, bucket, offset in (("directions (ours)", index.centroids, bucket, 0),
                                            ("k-means of the keys, dot product", raw, raw_bucket, 0),
                                            ("…, distance", raw, raw_bucket, raw.square().sum(1) / 2)):
        probe = (queries @ centroids.T - offset).topk(n).indices
        hit = (bucket[best][:, :, None] == probe[:, None]).any(2).double().mean()
        scanned = torch.bincount(bucket, minlength=C)[probe].sum(1).double().mean() / N
        print(f"  {n} buckets by {what}: recall {hit:.3f}, {100 * scanned:.1f}% of the keys scored")

# ---- a training step, forward and backward

def random_batch(config, B, T, n_mentions, n_targets, n_entities, device, seed=0):
    """B full passages of T tokens, each with n_mentions linked mentions and n_targets masked tokens."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1000, config.vocab_size, (B, T), generator=g)
    start = torch.arange(1, T - 3, (T - 4) // n_mentions)[:n_mentions].repeat(B)
    row = torch.arange(B).repeat_interleave(n_mentions)
    at = torch.cat([torch.randperm(T, generator=g)[:n_targets].sort().values + b * T for b in range(B)])
    nothing = torch.zeros_like(row)
    batch = data.Batch(tokens=tokens, unmasked=tokens.clone(), attention_mask=tokens > 0, row=row, start=start,
                       end=start + 2, entity=torch.randint(1, n_entities, (len(row),), generator=g), passage=row,
                       is_target=torch.zeros_like(tokens, dtype=torch.bool), label=nothing[:B], mention=nothing,
                       answer=nothing - 1)
    batch.tokens.view(-1)[at] = 103
    batch.is_target.view(-1)[at] = True
    return batch.to(device)

def random_memory(config, N, n_entities, device, seed=1):
    """N memories of random entities, none of them from the batch's passages."""
    g = torch.Generator().manual_seed(seed)
    return memory.MentionMemory(
        torch.randn(N, config.key_dim, generator=g), torch.randn(N, config.value_dim, generator=g),
        torch.randint(1, n_entities, (N,), generator=g), torch.arange(N) // 8 + 10 ** 6, torch.arange(N), device)

def tome_step(model, batch, table):
    with low_precision(model.config, batch.tokens.device):
        H, _ = model(batch.tokens, batch.attention_mask, batch, table, batch.is_used)
        z = model.entity_query(H, batch.row, batch.start, batch.end)
        found = table.retrieve(z, batch.passage, model.config.k_answer, model.config.k_answer_shard)
        loss = (0.85 * mlm_loss(model.mlm_logits(H, batch.is_target), batch.unmasked[batch.is_target])
                + 0.15 * entity_prediction_loss(found.scores, found.entity, batch.entity))
    model.zero_grad()
    loss.backward()

def batch_tome_step(model, batch):
    """A step with the batch memory, as after the fit."""
    with low_precision(model.config, batch.tokens.device):
        _, _, H, _ = model(batch, is_used=batch.is_used)
        z = model.coref(H, batch.row, batch.start, batch.end)
        mlm = mlm_loss(model.tome.mlm_logits(H, batch.is_target), batch.unmasked[batch.is_target])
        loss = 0.85 * mlm + 0.15 * coreference_loss(z, batch.entity, batch.passage)
    model.zero_grad()
    loss.backward()

def step(args):
    for name, config, B, T, n_mentions, N in (("toy's shape", SMALL, 64, 64, 5, 91740), ("small", SMALL, 16, 64, 8, 65536),
                                              ("base", BASE, 8, 128, 8, 131072)):
        batch = random_batch(config, B, T, n_mentions, T // 6, 5000, args.device)
        table = random_memory(config, N, 5000, args.device)
        for precision in ("float32", "bfloat16"):
            model = BatchTOME(TOME(replace(config, precision=precision))).to(args.device).train()
            times, _ = race(args.turns, {"batch-tome": lambda: batch_tome_step(model, batch),
                                         "TOME-1": lambda: tome_step(model.tome, batch, table)})
            row(f"step, {name}, {precision}", times)

SECTIONS = {"exact": exact, "buckets": buckets, "step": step}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="section", help=f"one of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--keys", metavar="FILE.npy", help="real keys [N, d] for `buckets`, a shard of a memory")
    parser.add_argument("--clusters", type=int, default=512)
    parser.add_argument("--queries", type=int, default=768)
    parser.add_argument("--probes", type=int, default=4, help="number of buckets to start with")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    train.fast_matmul()
    with suppress(ImportError):
        import faiss
        faiss.omp_set_num_threads(args.threads)
    print(machine(args.threads))
    for name in args.sections or SECTIONS:
        SECTIONS[name](args)
