"""What the parts of this project cost, beside others: python tests/bench.py [search|buckets|shards …]

One table. Times are seconds, the shortest of several turns that the contenders take one after the other, so that
a busy machine is everybody's. ratio: how many times faster ours is. floor: the bare matmul, in the same turns.
faiss is optional here (pip install faiss-cpu); without it its cells are empty.
"""
import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import ann  # noqa: E402

try:
    import faiss
except ImportError:
    faiss = None


def row(what, ours="", theirs="", floor="", unit="s"):
    ratio = f"{theirs / ours:.2f}" if ours and theirs else ""
    cells = [f"{x:.3g} {unit}" if isinstance(x, float) else x for x in (ours, theirs)]
    cells += [ratio, f"{floor:.3g} {unit} (ours {ours / floor:.2f} ×)" if isinstance(floor, float) else floor]
    print(f"| {what:<62} |", " | ".join(f"{x:>{n}}" for x, n in zip(cells, (10, 10, 6, 24))), "|", flush=True)


def race(turns, **functions):
    """Each function once to warm up, then `turns` times in turn: {name: shortest time}, {name: its result}."""
    results = {name: function() for name, function in functions.items()}
    times = {name: [] for name in functions}
    for _ in range(turns):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return {name: min(t) for name, t in times.items()}, results


def overlap(ids, exact):
    """Recall: the mean share of the exact ids that were found."""
    return float(np.mean([np.isin(a, b).mean() for a, b in zip(np.asarray(exact.cpu()), np.asarray(ids))]))


def clustered(N, d, n_entities, n_queries, device, seed=0):
    """Keys like those of a memory, many mentions an entity, lengths that differ; queries like its mentions.
    Returns keys [N, d] entity after entity, queries [Q, d]."""
    generator = torch.Generator().manual_seed(seed)
    entity = torch.randn(n_entities, d, generator=generator)

    def mentions(n):
        x = entity[torch.randint(n_entities, (n,), generator=generator).sort().values]
        x = x + 0.8 * torch.randn(n, d, generator=generator)
        return (x * (1 + 0.2 * torch.rand(n, 1, generator=generator))).to(device)
    return mentions(N), mentions(n_queries)


# ---- exact search

def naive(queries, keys, k, chunk=8192):
    """A chunk of scores at a time and the top-k of each chunk's: what one writes first."""
    parts = []
    for start in range(0, len(keys), chunk):
        scores, ids = (queries @ keys[start:start + chunk].T).topk(min(k, len(keys) - start))
        parts.append((scores, ids + start))
    scores, order = torch.cat([s for s, _ in parts], 1).topk(k)
    return scores, torch.cat([i for _, i in parts], 1).gather(1, order)


def product(queries, keys, chunk=8192):
    """The matmul alone, into one buffer."""
    out = torch.empty(chunk, len(queries), device=queries.device)
    for start in range(0, len(keys), chunk):
        part = keys[start:start + chunk]
        torch.mm(part, queries.T, out=out[:len(part)])


FROM_DISK = """
import resource, sys, time
import numpy as np, torch
import ann
torch.set_num_threads(int(sys.argv[2]))
keys, queries = np.load(sys.argv[1], mmap_mode="r"), torch.randn(768, 128)
ann.exact_topk(queries, keys[:20000], 128)
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
ann.exact_topk(queries, keys, 128)
print(time.perf_counter() - start, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2 ** 20)
"""


def search(args):
    d, k, Q, N = 128, 128, 768, 524288
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(N, d, generator=generator).to(args.device)
    queries = torch.randn(Q, d, generator=generator).to(args.device)
    key_passage = torch.arange(N, device=args.device) // 20
    query_passage = torch.randint(N // 20, (Q,), generator=generator).to(args.device)
    contenders = {"ours": lambda: ann.exact_topk(queries, keys, k),
                  "own": lambda: ann.exact_topk(queries, keys, k, query_passage, key_passage),
                  "naive": lambda: naive(queries, keys, k),
                  "floor": lambda: product(queries, keys)}
    if faiss:
        flat = faiss.IndexFlatIP(d)
        flat.add(keys.cpu().numpy())
        contenders["faiss"] = lambda: flat.search(queries.cpu().numpy(), k)
    times, results = race(args.turns, **contenders)
    what = f"exact, {Q} queries, {N:,} keys of {d}, k {k}"
    if faiss:
        row(f"{what}; theirs: faiss IndexFlatIP", times["ours"], times["faiss"], times["floor"])
        same = overlap(results["ours"][1].cpu(), torch.from_numpy(results["faiss"][1]))
        print(f"  share of faiss's ids that are also ours: {same:.6f} (the rest: scores that round differently)")
    row(f"{what}; theirs: chunks, topk", times["ours"], times["naive"], times["floor"])
    row("… without the query's own passage", times["own"], "", times["floor"])
    for dtype in (torch.float16, torch.bfloat16):
        half = keys.to(dtype)
        times, _ = race(args.turns, ours=lambda: ann.exact_topk(queries, half, k),
                        floor=lambda: product(queries, keys))
        row(f"… {str(dtype).removeprefix('torch.')} keys", times["ours"], "", times["floor"])

    few, toy = keys[:10000], torch.randn(1000, d, generator=generator).to(args.device)
    times, _ = race(5 * args.turns, ours=lambda: ann.exact_topk(toy, few, k),
                    theirs=lambda: (toy @ few.T).topk(k), floor=lambda: product(toy, few))
    row("exact, 1,000 queries, 10,000 keys; theirs: matmul, topk", *times.values())

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "keys.npy")
        on_disk = np.lib.format.open_memmap(path, "w+", np.float16, (4_000_000, d))
        for start in range(0, len(on_disk), N):
            on_disk[start:start + N] = keys[:len(on_disk) - start].cpu().numpy()
        on_disk.flush()
        run = subprocess.run([sys.executable, "-c", FROM_DISK, path, str(args.threads)], cwd=ROOT, check=True,
                             capture_output=True, text=True)
    seconds, grown = map(float, run.stdout.split())
    row("exact, 4,000,000 float16 keys on disk, once, on the CPU", seconds)
    row("… resident memory grows by; floor: the file itself", grown, "", 4e6 * d * 2 / 2 ** 30, "GiB")


# ---- buckets

def buckets(args):
    sets = {"clustered": clustered(524288, 128, 8192, 768, args.device)}
    if args.keys:
        keys = torch.from_numpy(np.load(args.keys)).float().to(args.device)
        asked = torch.randperm(len(keys), generator=torch.Generator().manual_seed(0))[:768]
        # mentions themselves, a little off: the memory holds other mentions of their entities
        sets[args.keys] = keys, keys[asked] + 0.1 * keys.std() * torch.randn(len(asked), keys.shape[1])
    for name, (keys, queries) in sets.items():
        N, d, k, C = *keys.shape, 128, args.clusters
        start = time.perf_counter()
        index = ann.BucketedIndex(keys, C)
        ours, theirs = time.perf_counter() - start, ""
        if faiss:
            start = time.perf_counter()
            ivf = faiss.IndexIVFFlat(faiss.IndexFlatIP(d), d, C, faiss.METRIC_INNER_PRODUCT)
            ivf.train(keys[ann.sample_of(N, C, 0)].cpu().numpy())
            ivf.add(keys.cpu().numpy())
            theirs = time.perf_counter() - start
        row(f"{name}: {N:,} keys into {C} buckets; theirs: faiss", ours, theirs)
        times, results = race(args.turns, exact=lambda: ann.exact_topk(queries, keys, k))
        exact = results["exact"][1]
        n_search = 1
        while n_search <= C:
            contenders = {"ours": lambda: index.search(queries, k, n_search)}
            if faiss:
                ivf.nprobe = n_search
                contenders["theirs"] = lambda: ivf.search(queries.cpu().numpy(), k)
            times, results = race(args.turns, **contenders)
            recall = overlap(results["ours"][1].cpu(), exact)
            theirs = f", {overlap(results['theirs'][1], exact):.3f}" if faiss else ""
            row(f"… {n_search} of {C}: recall@{k} {recall:.3f}{theirs}", *times.values())
            if recall > 0.98:
                break
            n_search *= 2
        times, _ = race(args.turns, exact=lambda: ann.exact_topk(queries, keys, k))
        row("… exact", times["exact"])
        length = index.count.double()
        print(f"  bucket sizes {int(length.min())} to {int(length.max())}")
        # ways to choose a query's buckets: recall is the share of exact ids whose bucket is probed
        raw, assignment = ann.kmeans(keys, C)
        where = torch.empty(N, dtype=torch.int64, device=keys.device)
        where[index.id] = ann.ragged(index.count)[0]
        n = max(1, C // 32)
        for what, centroids, bucket, offset in (
                ("directions (ours)", index.centroids, where, 0),
                ("k-means of the keys, dot product", raw, assignment, 0),
                ("k-means of the keys, distance", raw, assignment, raw.square().sum(1) / 2)):
            probe = (queries @ centroids.T - offset).topk(n).indices
            hit = (bucket[exact][:, :, None] == probe[:, None]).any(2).double().mean()
            scanned = torch.bincount(bucket, minlength=C)[probe].sum(1).double().mean() / N
            print(f"  {n} buckets by {what}: recall {hit:.3f}, {100 * scanned:.1f}% of the keys looked at")


# ---- shards

def shards(args):
    """What top-2 of each of 128 shards, then top-128, loses against the exact top-128 (app. C.2)."""
    keys, queries = clustered(524288, 128, 8192, 768, args.device)
    orders = {"dealt out at random": torch.randperm(len(keys), generator=torch.Generator().manual_seed(0)),
              "an entity's in one shard": torch.arange(len(keys))}
    for what, order in orders.items():
        dealt = keys[order.to(args.device)]
        exact = ann.exact_topk(queries, dealt, 128)
        for k_shard in (1, 2, 4, 8):
            parts = [ann.exact_topk(queries, part, k_shard) for part in dealt.chunk(128)]
            scores = torch.cat([scores for scores, _ in parts], 1)
            ids = torch.cat([ids + i * (len(keys) // 128) for i, (_, ids) in enumerate(parts)], 1)
            best = scores.topk(min(128, scores.shape[1]))
            found = ids.gather(1, best.indices)
            mass = (best.values.logsumexp(1) - exact[0].logsumexp(1)).exp().mean()
            recall = f"{overlap(found.cpu(), exact[1]):.3f}"
            row(f"128 shards, keys {what}: recall, top-{k_shard} of each", recall, "", f"softmax mass {mass:.3f}")


SECTIONS = {"search": search, "buckets": buckets, "shards": shards}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--keys", metavar="FILE.npy", help="real keys [N, d] for buckets: a shard of a memory")
    parser.add_argument("--clusters", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    unknown = set(args.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    torch.set_num_threads(args.threads)
    if faiss:
        faiss.omp_set_num_threads(args.threads)
    else:
        print("faiss is not installed, so nothing races against it; pip install faiss-cpu adds it.")
    print(f"| {'what':<62} | {'ours':>10} | {'theirs':>10} | {'ratio':>6} | {'floor':>24} |\n|{'---|' * 5}")
    for name in args.sections or SECTIONS:
        SECTIONS[name](args)
