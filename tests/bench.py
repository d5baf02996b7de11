"""What the parts of this project cost, beside others: python tests/bench.py [search|buckets|shards|step|cost|build …]

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
import data  # noqa: E402
import memory  # noqa: E402
import train  # noqa: E402
from encoder import Config  # noqa: E402
from tome import TOME, BatchTOME, coreference_loss, entity_prediction_loss, mlm_loss  # noqa: E402

try:
    import faiss
except ImportError:
    faiss = None


def row(what, ours="", theirs="", floor="", unit="s"):
    ratio = f"{theirs / ours:.2f}" if isinstance(ours, float) and isinstance(theirs, float) else ""
    cells = [f"{x:.3g} {unit}" if isinstance(x, float) else x for x in (ours, theirs)]
    cells += [ratio, f"{floor:.3g} {unit} (ours {ours / floor:.2f} ×)" if isinstance(floor, float) else floor]
    print(f"| {what:<62} |", " | ".join(f"{x:>{n}}" for x, n in zip(cells, (10, 10, 6, 24))), "|", flush=True)


def race(turns, **functions):
    """Each function once to warm up, then `turns` times in turn: {name: shortest time}, {name: its result}."""
    results = {name: function() for name, function in functions.items()}
    times = {name: [] for name in functions}
    for _ in range(turns):
        for name, function in functions.items():
            time.sleep(0.2)             # the last one's threads may still spin, waiting for more
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
    """What top-2 of each of 128 shards, then top-128, loses against the exact top-128 (app. C.1.4)."""
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


# ---- a training step, forward and backward

# The public JAX implementation's CPU seconds on two cores, measured once: batch-tome, TOME-1 with its approximate
# search, TOME-1 with exact search.
JAX = {"small": (0.57, 0.75, 4.9), "base": (8.0, 7.6, 12.8)}
STEPS = {"small": (Config(hidden=256, n_heads=4, intermediate=1024, n_initial=2, n_block=2, key_dim=64, value_dim=128,
                          coref_dim=128, k=32, k_shard=32, k_answer=32, k_answer_shard=32), 16, 64, 10, 65536),
         "base": (Config(k=128, k_shard=128, k_answer=128, k_answer_shard=128), 8, 128, 20, 131072)}


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
                       target_index=at, target=tokens.flatten()[at], mention=nothing)
    batch.tokens.view(-1)[at] = 103
    return batch.to(device)


def random_memory(config, N, n_entities, device, seed=1):
    """N memories, of which every entity has some; nothing of the batch's passages."""
    g = torch.Generator().manual_seed(seed)
    return memory.MentionMemory(*(x.to(device) for x in (
        torch.randn(N, config.key_dim, generator=g), torch.randn(N, config.value_dim, generator=g),
        torch.randint(1, n_entities, (N,), generator=g), torch.arange(N) // 8 + 10 ** 6, torch.arange(N))))


def tome_losses(model, batch, table):
    H, _ = model(batch.tokens, batch.attention_mask, batch, table)
    z = model.answer(H, batch.row, batch.start, batch.end)
    found = table.retrieve(z, batch.passage, model.config.k_answer, model.config.k_answer_shard)
    return (0.85 * mlm_loss(model.mlm_logits(H, batch.target_index), batch.target)
            + 0.15 * entity_prediction_loss(found.scores, found.entity, batch.entity))


def batch_tome_losses(model, batch):
    H, _ = model(batch)
    z = model.coref(H, batch.row, batch.start, batch.end)
    return (0.85 * mlm_loss(model.tome.mlm_logits(H, batch.target_index), batch.target)
            + 0.15 * coreference_loss(z, batch.entity, batch.passage))


def cpu_seconds(turns, function):
    """Shortest CPU time of `turns` calls, all threads together (on a GPU: the shortest time)."""
    times = []
    for turn in range(turns + 1):
        clock = time.perf_counter if torch.cuda.is_available() else time.process_time
        start = clock()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(clock() - start)
    return min(times[1:])


def matmul_rate(device):
    """Multiply-adds a CPU second of a square float32 matmul of the size that a step is made of."""
    a, b = torch.randn(1024, 1024, device=device), torch.randn(1024, 1024, device=device)
    return 4 * 1024 ** 3 / cpu_seconds(10, lambda: [a @ b for _ in range(4)])


def layer_work(config, n_tokens, T):
    """Multiply-adds of one Transformer layer's forward pass: its weights, and T x T attention."""
    h, f = config.hidden, config.intermediate
    return n_tokens * (4 * h * h + 2 * h * f + 2 * T * h)


def step(args):
    rate = matmul_rate(args.device)
    print(f"  a step is forward and backward, in CPU seconds of all threads together; floor: its multiply-adds at the "
          f"{rate / 1e9:.0f} billion a second of a matmul here; theirs: the public JAX code, measured once elsewhere")
    for name, (config, B, T, n_targets, N) in STEPS.items():
        torch.manual_seed(0)
        batch = random_batch(config, B, T, 8, n_targets, 5000, args.device)
        model = BatchTOME(TOME(config)).to(args.device).train()
        table = random_memory(config, N, 5000, args.device)
        index = table.bucketed(32)
        layers = (config.n_initial + config.n_block) * layer_work(config, B * T, T)
        head = B * n_targets * config.hidden * (config.vocab_size + config.hidden)
        scores = len(batch.row) * N * config.key_dim

        def backward(loss):
            model.zero_grad()
            loss.backward()

        def run(function):
            with torch.autocast(args.device, torch.bfloat16, enabled=args.bf16):
                loss = function()
            backward(loss)

        theirs = JAX[name] if args.device == "cpu" else ("",) * 3
        for what, function, work, their in (
                ("batch-tome", lambda: batch_tome_losses(model, batch), 3 * (2 * layers + head), theirs[0]),
                ("TOME-1, bucketed; theirs: approximate", lambda: tome_losses(model.tome, batch, index),
                 3 * (layers + head), theirs[1]),
                ("TOME-1, exact; theirs: approximate", lambda: tome_losses(model.tome, batch, table),
                 3 * (layers + head) + 2 * scores, theirs[1]),
                ("TOME-1, exact; theirs: exact", None, 3 * (layers + head) + 2 * scores, theirs[2])):
            if function is not None:
                ours = cpu_seconds(args.turns, lambda: run(function))
            row(f"step, {name}: {what}", ours, their, work / rate)


# ---- what the memory costs (the paper's table 11)

def cost(args):
    """A TPU of the paper reads 32 passages a step, and searches 32 x 24 x 128 queries among 38M / 128 keys. Here four
    passages and an eighth of these queries: the same ratio."""
    readers = {"BERT-base": Config(), "BERT-large": Config(hidden=1024, n_heads=16, intermediate=4096, n_initial=8,
                                                           n_block=16)}
    paper = {"BERT-base": (0.79, 0.22), "BERT-large": (0.48, 0.07)}
    keys, queries = clustered(38_000_000 // 128, 128, 20000, 4 * 24 * 128, args.device)
    index = ann.BucketedIndex(keys, int(4 * len(keys) ** 0.5))
    exact_ids = ann.exact_topk(queries[:768], keys, 2)[1]
    n_search = 4
    while overlap(index.search(queries[:768], 2, n_search)[1].cpu(), exact_ids) < 0.95:
        n_search *= 2
    print(f"  {n_search} of {len(index.centroids)} buckets find 95% of the two best")
    seconds = {"exact": [], "bucketed": []}
    for k in (2, 32):                   # the memory layer, entity prediction (app. C.1.4)
        seconds["exact"].append(cpu_seconds(1, lambda: ann.exact_topk(queries, keys, k)))
        seconds["bucketed"].append(cpu_seconds(1, lambda: index.search(queries, k, n_search)))
    for name, config in readers.items():
        batch = random_batch(config, 4, 128, 24, 20, 5000, args.device)
        model = TOME(config).to(args.device).train()
        few = random_memory(config, 256, 5000, args.device)         # its search costs nothing; the rest is as ever

        def run():
            model.zero_grad()
            tome_losses(model, batch, few).backward()

        reader = cpu_seconds(2, run)
        for search_name, their in zip(seconds, paper[name]):
            ours = sum(seconds[search_name])
            row(f"share of a step spent on search, {name}, {search_name}; theirs: TPU", f"{ours / (ours + reader):.2f}",
                f"{their:.2f}", f"search {ours:.1f} s, reader {reader:.1f} s")


# ---- building the memory

def build(args):
    """Passages a second of build_memory, and of the bare encoder on the same batches."""
    with tempfile.TemporaryDirectory() as folder:
        data.write_toy(folder, *data.toy_world(0))
        tokenizer = data.train_tokenizer((t.text for t in data.read_corpus(f"{folder}/corpus.jsonl")), 2000)
        corpus = data.Corpus.build(f"{folder}/corpus.jsonl", f"{folder}/corpus", tokenizer, 64, 128)
        for name, config in (("toy", train.preset("toy")[1]), ("mini", train.preset("mini")[1])):
            model = BatchTOME(TOME(config)).to(args.device).eval()
            n = len(corpus.article) if name == "toy" else 4000
            passages, calls = np.arange(n), []

            def record(module, inputs):
                calls.append(inputs)

            handle = model.encoder.register_forward_pre_hook(record)
            memory.encode_passages(model.encoder, corpus, passages, torch.device(args.device))
            handle.remove()

            @torch.no_grad()
            def bare():
                for inputs in calls:
                    model.encoder(*inputs)

            folder_of = Path(folder) / f"memory-{name}"

            def whole():
                rows = memory.encode_passages(model.encoder, corpus, passages, torch.device(args.device))
                folder_of.mkdir(exist_ok=True)
                for key, array in rows.items():
                    np.save(folder_of / f"{key}.npy", array)

            times, _ = race(args.turns, bare=bare, whole=whole)
            row(f"building the memory, {name}: {n / times['whole']:.0f} passages a second", times["whole"], "",
                times["bare"])


SECTIONS = {"search": search, "buckets": buckets, "shards": shards, "step": step, "cost": cost, "build": build}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--keys", metavar="FILE.npy", help="real keys [N, d] for buckets: a shard of a memory")
    parser.add_argument("--clusters", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="autocast in the section step")
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
