"""Search in the mention memory (§2.2.2, app. C): the k keys of largest dot product with a query.

    queries (Q, d), keys (N, d)  ->  scores (Q, k), ids (Q, k)      (TopMem(Query(m)), eq. 7)
    plain_topk       the definition; it holds all Q x N scores
    exact_topk       the same result from one tile of scores at a time (app. C.1.1, but exact)
    BucketedIndex    keys in k-means buckets; a query searches its n_search best ones (app. C.1.2)
    sharded_topk     each process searches its own keys for everybody's queries (app. C.1)
    fetch            requests the chosen rows from the processes that hold them

All searches return scores by falling value, and equal scores by rising id. They leave out the keys
of the query's own passage (passage -1 is nobody's) and every score that is not a finite number.
Where nothing is left, score is -inf and id is -1. Keys may be float32, float16 or bfloat16, and may
be a numpy memory map; scores are float32. The fast searches and `fetch` have no gradient.

The functions by which processes send each other data stand at the end. Without an initialised
process group, each of them does the same for the one process."""
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F

BLOCK = 16              # scores per block: only blocks with a high maximum are looked into
TILE = 2 ** 20          # scores computed at a time in an exact search, so that they stay in the
                        # cache; of the first tile up to 32 times as many
QUERIES = 2048          # queries that sharded_topk gives to a search at a time
SAMPLE = 256            # keys per bucket that k-means is trained on

def dot(queries, keys):
    """queries (..., Q, d), keys (..., N, d) -> float32 scores (..., Q, N), with gradient.
    In float32 also where training computes in bfloat16 (in which queries come from their layer).
    That would round a score of 50 by up to 0.125, and attention weights are exponentials."""
    with torch.autocast(queries.device.type, enabled=False):
        return queries.float() @ keys.float().mT

def plain_topk(queries, keys, k, query_passage=None, key_passage=None):
    """The definition of what the searches below find. Arguments as exact_topk's."""
    scores = dot(queries, torch.as_tensor(keys))                             # (Q, N)
    scores = scores.masked_fill(~scores.isfinite(), -torch.inf)
    if query_passage is not None:
        own = (query_passage[:, None] == key_passage) & (query_passage[:, None] >= 0)
        scores = scores.masked_fill(own, -torch.inf)
    return best_of(scores, torch.arange(len(keys), device=scores.device).expand_as(scores), k)

def best_of(scores, ids, k):
    """The k best of each row (Q, n); equal scores keep their order. Fills up with -inf and -1."""
    missing = max(0, k - scores.shape[1])
    scores = F.pad(scores, (0, missing), value=-torch.inf)
    ids = F.pad(ids, (0, missing), value=-1)
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    scores, ids = scores[:, :k], ids.gather(1, order[:, :k])
    return scores, ids.masked_fill(scores == -torch.inf, -1)

# ---- what the fast searches share

def largest(passage):
    """The size of the largest passage: so many of a query's best keys can be its own passage's."""
    return max(passage.unique(return_counts=True)[1].tolist(), default=0)

def high_scores(scores, bar, n):
    """The F finite scores of (Q, W) above their query's bar (Q,): (query, column, score), each of
    (F,), and the bar. A block is every (W / size)-th column. Only blocks whose maximum is above the
    bar are looked into: to sort all would be slow. bar None: it is put just below a query's n-th
    largest block maximum; n scores are then above it, if there are so many, and the n best are
    among them."""
    # With few scores the blocks are smaller: n maxima are needed.
    size = BLOCK if bar is not None else min(BLOCK, 1 + scores.shape[1] // (2 * n))
    missing = -scores.shape[1] % size
    if missing:
        scores = F.pad(scores, (0, missing), value=-torch.inf)
    blocks = scores.unflatten(1, (size, -1))           # block b: columns b, b + W / size, …
    maxima = blocks.amax(1)                                                  # (Q, W / size)
    if bar is None:
        # A block with NaN or inf sets no bar; it is looked into all the same.
        bar = F.pad(maxima, (0, n), value=-torch.inf)
        bar = bar.nan_to_num(-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
        bar = bar.topk(n).values[:, -1]
        bar = bar.nextafter(bar.new_tensor(-torch.inf))
    query, block = (~(maxima <= bar[:, None])).nonzero(as_tuple=True)        # also where it is NaN
    scores = blocks[query, :, block]                                         # (blocks found, size)
    i, j = ((scores > bar[query, None]) & (scores < torch.inf)).nonzero(as_tuple=True)
    return (query[i], block[i] + j * maxima.shape[1], scores[i, j]), bar

def keep_best(best, candidates, query_passage, key_passage):
    """The k best of `best` (scores, ids, each (Q, k)) and of `candidates` (query, id, score, each
    (F,)) without those of the query's own passage. A candidate's id is larger than those that are
    in `best`, so of equal scores the smaller id is kept."""
    query, id, score = candidates
    if query_passage is not None:
        own = query_passage[query]
        allowed = (key_passage[id] != own) | (own < 0)
        query, id, score = query[allowed], id[allowed], score[allowed]
    order = (query * 2 ** 40 + id).argsort()                     # by query, then by id (< 2^40)
    query, id, score = query[order], id[order], score[order]
    count = torch.bincount(query, minlength=len(best[0]))
    k, most = best[0].shape[1], int(count.max())
    column = k + torch.arange(len(query), device=query.device) - (count.cumsum(0) - count)[query]
    scores = F.pad(best[0], (0, most), value=-torch.inf)                     # (Q, k + most)
    ids = F.pad(best[1], (0, most), value=-1)
    scores[query, column] = score
    ids[query, column] = id
    return best_of(scores, ids, k)

# ---- exact search

@torch.no_grad()
def exact_topk(queries, keys, k, query_passage=None, key_passage=None):
    """The k best of all keys for every query (app. C.1.1, but exact): scores, ids (Q, k).
    queries (Q, d); keys (N, d), which may lie on disk; query_passage (Q,), key_passage (N,)."""
    keys, Q, N = torch.as_tensor(keys), len(queries), len(keys)
    best = plain_topk(queries, queries[:0], k)               # k empty places per query
    if Q == 0 or k == 0 or N == 0:
        return best
    # The first tile is larger: its scores set the bar that the later tiles have to exceed.
    first = min(32 * TILE // Q, max(8192, N // 16), N)
    # The sizes are measured: amax over blocks is slow where a tile's width is no multiple of 512.
    later = min(first, max(512, TILE // Q // 512 * 512))
    # Some of the best may be of the query's own passage, which keep_best takes out.
    n = k if query_passage is None else k + largest(key_passage[:first])
    tile, bar, found = torch.empty(Q * first, device=queries.device), None, []
    for start, end in pairwise([0, *range(first, N, later), N]):
        part = keys[start:end].to(queries.device, torch.float32)
        scores = tile[:Q * len(part)].view(Q, -1)
        torch.mm(queries.float(), part.T, out=scores)       # with out=, never in bfloat16
        (query, column, score), bar = high_scores(scores, bar, n)
        found.append((query, start + column, score))
        if end == N or sum(len(query) for query, _, _ in found) > Q * k:       # worth a higher bar
            candidates = [torch.cat(parts) for parts in zip(*found)]        # query, id, score
            best = keep_best(best, candidates, query_passage, key_passage)
            bar = bar.maximum(best[0][:, -1])
            found = []
    return best

# ---- k-means and buckets

def nearest(points, centroids):
    """points (N, d), centroids (C, d) -> squared distance to the nearest centroid, its number."""
    half = centroids.square().sum(1) / 2
    distance = torch.empty(len(points), device=centroids.device)
    cluster = torch.empty(len(points), dtype=torch.int64, device=centroids.device)
    for i in range(0, len(points), 4096):
        x = points[i:i + 4096].float()
        best, cluster[i:i + 4096] = torch.addmm(half, x, centroids.T, beta=-1).max(1)
        distance[i:i + 4096] = x.square().sum(1) - 2 * best      # |x|² - 2 (x·c - |c|²/2)
    return distance, cluster

def assign(points, centroids):
    """Each point's nearest centroid (N,). A centroid without points is moved onto the point that is
    farthest from its own centroid, among points that are not alone there. Changes `centroids`."""
    distance, cluster = nearest(points, centroids)
    for empty in (torch.bincount(cluster, minlength=len(centroids)) == 0).nonzero()[:, 0].tolist():
        alone = torch.bincount(cluster)[cluster] == 1
        point = distance.masked_fill(alone, -torch.inf).argmax()
        cluster[point] = empty
        centroids[empty] = points[point]
    return cluster

@torch.no_grad()
def kmeans(points, init, n_iters=10):
    """Lloyd's k-means: centroids (C, d), each point's nearest one (N,). No cluster is empty.
    points (N, d); init (C, d): the centroids to start from, C <= N."""
    centroids = init.float().clone()
    cluster = assign(points, centroids)
    for _ in range(n_iters):
        # A GPU adds in no fixed order. Summed in float64, the difference is lost in the rounding.
        total = torch.zeros_like(centroids).double().index_add_(0, cluster, points.double())
        centroids = (total / torch.bincount(cluster)[:, None]).float()
        cluster = assign(points, centroids)
    return centroids, cluster

class BucketedIndex:
    """Keys in buckets by direction; a query searches only its n_search best ones (app. C.1.2).
    keys (N, d) are copied, bucket after bucket. k-means runs on keys of unit length, and buckets of
    keys and queries are chosen by the dot product with the centroids' directions. With their
    lengths, the longest few would win every query (python tests/bench.py buckets)."""
    def __init__(self, keys, n_clusters, key_passage=None, seed=0):
        keys = torch.as_tensor(keys)
        order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(seed))
        sample = keys[order[:SAMPLE * n_clusters].to(keys.device)].float()
        sample = F.normalize(sample.nan_to_num(0, 0, 0))        # one NaN would spoil all centroids
        self.centroids = F.normalize(kmeans(sample, sample[:n_clusters])[0])     # (C, d)
        # To centroids of one length, the nearest is the one of largest dot product.
        bucket = nearest(keys, self.centroids)[1]
        # Of equal centroids, where many keys are equal, all but the first stay empty: left out.
        used, bucket = bucket.unique(return_inverse=True)
        self.centroids, self.count = self.centroids[used], torch.bincount(bucket)  # (C, d), (C,)
        self.start = self.count.cumsum(0) - self.count
        self.id = bucket.argsort(stable=True)                   # (N,) bucket after bucket
        self.keys = [keys[id].T.contiguous() for id in self.id.split(self.count.tolist())]
        self.passage = key_passage
        self.largest = 0 if key_passage is None else largest(key_passage)

    @torch.no_grad()
    def search(self, queries, k, n_search, query_passage=None):
        """The k best keys in the n_search best buckets of each query (Q, d): scores, ids (Q, k)."""
        Q, device = len(queries), queries.device
        best = plain_topk(queries, queries[:0], k)               # k empty places per query
        n_search = min(n_search, len(self.keys))
        if Q == 0 or k == 0 or n_search == 0:
            return best
        bucket = dot(queries, self.centroids).topk(n_search).indices.flatten()
        # A row of scores per query: the keys of its first bucket, then of its second, … The row is
        # as wide as the longest: at most N, and -inf where there is no key.
        count = self.count[bucket].view(Q, n_search)
        width = int(count.sum(1).max())
        scores = torch.full((Q * width,), -torch.inf, device=device)
        row = torch.arange(Q, device=device)[:, None] * width
        # Where in `scores` the scores of each pair (query, bucket) begin: (Q * n_search,), rising.
        begin = (row + count.cumsum(1) - count).flatten()
        # The pairs are computed bucket after bucket: so its keys are read once, for all who ask.
        pair = bucket.argsort(stable=True)
        n_asking = torch.bincount(bucket, minlength=len(self.keys)).tolist()
        asking = queries[pair // n_search].float().split(n_asking)
        for keys, askers, place in zip(self.keys, asking, begin[pair, None].split(n_asking)):
            if len(askers):
                place = place + torch.arange(keys.shape[1], device=device)       # (askers, count)
                scores[place] = askers @ keys.float()
        (query, column, score), _ = high_scores(scores.view(Q, width), None, k + self.largest)
        # Back from a place in `scores` to its pair, and from the place inside the pair to the key.
        place = query * width + column                                                   # (F,)
        pair = torch.searchsorted(begin, place, right=True) - 1
        id = self.id[self.start[bucket[pair]] + place - begin[pair]]
        return keep_best(best, (query, id, score), query_passage, self.passage)

# ---- several processes

def rank_and_size():
    """(which process this is, how many there are): (0, 1) without torch.distributed."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

def barrier():
    """Waits until all processes are here."""
    if rank_and_size()[1] > 1:
        dist.barrier()

def sum_over_processes(x, device="cpu"):
    """The sum over all processes of a number or tensor, without gradient."""
    x = torch.as_tensor(x, device=device).detach().clone()
    if rank_and_size()[1] > 1:
        dist.all_reduce(x)
    return x

def copy_from_first(parameters):
    """Sets the parameters of all processes to the first one's."""
    if rank_and_size()[1] > 1:
        for parameter in parameters:
            dist.broadcast(parameter.data, 0)

def sum_gradients(parameters):
    """Adds up the gradients of all processes, as one message. Every loss is this process's share of
    a mean over all processes, so the sum is the gradient of the whole batch."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if rank_and_size()[1] > 1 and grads:
        flat = torch.nn.utils.parameters_to_vector(grads)
        dist.all_reduce(flat)
        torch.nn.utils.vector_to_parameters(flat, grads)

def gather_counts(n, device):
    """n of every process, a number or a tensor of numbers, as a list."""
    n = torch.as_tensor(n, device=device)
    return (AllGather.apply(n) if rank_and_size()[1] > 1 else n[None]).tolist()

class AllGather(torch.autograd.Function):
    """x of every process, all of one shape: (processes, *x.shape). A process gets the sum of the
    gradients that all have for its x. torch.distributed.nn.functional.all_gather is deprecated."""
    @staticmethod
    def forward(ctx, x):
        parts = x.new_empty(dist.get_world_size(), *x.shape)
        dist.all_gather([*parts], x.contiguous())
        return parts

    @staticmethod
    def backward(ctx, grad):
        received = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, grad.contiguous())
        return received.sum(0)

def gather(x):
    """x (n, …) of all processes, one after the other: (sum of n, …). n may differ and be 0.
    Differentiable: a row's gradient is the sum of what all processes have for it."""
    if rank_and_size()[1] == 1:
        return x
    counts = gather_counts(len(x), x.device)
    padded = torch.cat([x, x.new_zeros(max(counts) - len(x), *x.shape[1:])])    # to equal shapes
    parts = AllGather.apply(padded)
    return torch.cat([part[:n] for part, n in zip(parts, counts)])

def exchange(x, send, receive):
    """Sends the first send[0] rows of x to process 0, the next send[1] to process 1, …; returns the
    rows received in the order of their senders: receive[0] of process 0, …"""
    if rank_and_size()[1] == 1:
        return x
    received = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(received, x.contiguous(), receive, send)
    return received

@torch.no_grad()
def sharded_topk(search, queries, k, k_shard, query_passage, n_rows):
    """For each query of this process, the k best of every shard's k_shard best (app. C.1).
    search(queries, k_shard, query_passage) -> scores, ids: a search of this process's keys.
    queries (Q, d), query_passage (Q,); Q may differ between processes. n_rows: how many keys each
    process has. Returns scores, ids (Q, k); ids number the rows of all shards one after the other.
    Exact if k_shard = k; with less, what a shard has beyond is lost. k = k_shard × processes keeps
    all: no further top-k (app. C.1.4)."""
    (rank, size), Q, device = rank_and_size(), len(queries), queries.device
    parts = zip(gather(queries).split(QUERIES), gather(query_passage).split(QUERIES))
    found = [search(part, k_shard, passage) for part, passage in parts]
    scores, ids = map(torch.cat, zip(*found))                          # (queries of all, k_shard)
    if size > 1:
        counts = gather_counts(Q, device)
        ids[ids >= 0] += sum(n_rows[:rank])
        found = (exchange(x, counts, [Q] * size) for x in (scores, ids))
        scores, ids = (x.view(size, Q, k_shard).transpose(0, 1).flatten(1) for x in found)
    return best_of(scores, ids, k)

@torch.no_grad()
def fetch(ids, tables):
    """Rows of sharded tables for ids (Q, k) of `sharded_topk`: tensors (Q, k, …), zeros for id -1.
    tables: this process's shards, all of one length. A process requests a row once, however often
    it needs it; but for counts nothing else travels."""
    (rank, size), device = rank_and_size(), ids.device
    start = torch.tensor([0, *gather_counts(len(tables[0]), device)], device=device).cumsum(0)
    wanted, inverse = ids[ids >= 0].unique(return_inverse=True)            # sorted, so by process
    owner = torch.searchsorted(start, wanted, right=True) - 1
    counts = gather_counts(torch.bincount(owner, minlength=size), device)    # [who][from whom]
    ours, theirs = counts[rank], [row[rank] for row in counts]
    asked = exchange(wanted, ours, theirs) - start[rank]
    filled = []
    for table in tables:
        rows = exchange(table[asked], theirs, ours)
        filled.append(rows.new_zeros(*ids.shape, *rows.shape[1:]))
        filled[-1][ids >= 0] = rows[inverse]
    return filled
