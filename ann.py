"""Search in the mention memory (§2.2.2, app. C): the k keys of largest dot product with a query.

    queries [Q, d], keys [N, d]  ->  scores [Q, k], ids [Q, k]            TopMem(Query(m)) of eq. 7
    plain_topk       the definition, in ten lines; it holds all Q x N scores
    exact_topk       the same result from one tile of scores at a time (app. C.1.1, but exact)
    BucketedIndex    keys in k-means buckets; a query searches its n_search best ones (app. C.1.2)
    sharded_topk     each process searches its own keys for everybody's queries (app. C.1)
    fetch            sends for the rows that were chosen, and only for those

All searches return scores by falling value, and equal scores by rising id. They leave out the keys
of the query's own passage (passage -1 is nobody's) and every score that is not a finite number.
Where nothing is left, score is -inf and id is -1. Keys may be float32, float16 or bfloat16, tensors
or numpy memory maps; scores are float32. Gradients pass only through `dot` and `gather`.

All torch.distributed code of the project is at the end of this file. Without an initialised process
group, every function there does the same for the one process, without a copy.
"""
from collections import Counter
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.nn.functional import all_gather

INF = float("inf")
BLOCK = 16              # scores that are first looked at together, as their maximum
QUERIES = 1024          # an exact search of more queries is a loop over so many
TILE = 2 ** 20          # scores computed at a time in an exact search: they stay in the cache
SCORES = 2 ** 25        # scores held at a time in a bucketed search
SAMPLE = 256            # points a cluster on which k-means learns

def dot(queries, keys):
    """queries [..., Q, d], keys [..., N, d] -> float32 scores [..., Q, N], with gradient.
    In float32 also where training computes in bfloat16. That would round a score of 50 by up to
    0.125, and attention weights are exponentials of scores."""
    with torch.autocast(queries.device.type, enabled=False):
        return queries.float() @ keys.float().mT

def plain_topk(queries, keys, k, query_passage=None, key_passage=None):
    """The definition that the searches below are tested against. Arguments as exact_topk's."""
    scores = dot(queries, keys)                                              # (Q, N)
    scores = scores.masked_fill(~scores.isfinite(), -INF)
    if query_passage is not None:
        own = (query_passage[:, None] == key_passage) & (query_passage[:, None] >= 0)
        scores = scores.masked_fill(own, -INF)
    return best_of(scores, torch.arange(len(keys), device=scores.device).expand_as(scores), k)

def best_of(scores, ids, k):
    """The k best of each row [Q, n]; equal scores keep their order. Fills up with -inf and -1."""
    missing = max(0, k - scores.shape[1])
    scores = F.pad(scores, (0, missing), value=-INF)
    ids = F.pad(ids, (0, missing), value=-1)
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    scores, ids = scores[:, :k], ids.gather(1, order[:, :k])
    return scores, ids.masked_fill(scores == -INF, -1)

# ---- what the fast searches share

def take(table, index, device):
    """Rows of a tensor or numpy array as a tensor. index: a slice, or a tensor of row numbers."""
    if isinstance(table, torch.Tensor):
        return table[index].to(device)
    if isinstance(index, torch.Tensor):
        index = index.cpu().numpy()
    return torch.from_numpy(np.array(table[index])).to(device)     # of a memory map only these rows

def ragged(count):
    """Rows of count[r] things, one after the other -> each thing's row, its place in that row."""
    row = torch.arange(len(count), device=count.device).repeat_interleave(count)
    before = count.cumsum(0) - count
    return row, torch.arange(len(row), device=count.device) - before[row]

def largest(passage):
    """The most keys of one passage: so many places of a top-k may be the query's own."""
    return max(passage.unique(return_counts=True)[1].tolist(), default=0)

def high_scores(scores, bar, n_pass):
    """Scores above their query's bar: (query, column, score [n]), bar [Q]. scores [Q, W].
    Beside the matrix product there is time to read the scores once. So only the maximum of each
    block of scores is taken, and only blocks with a maximum above the bar are looked into.

    bar None: one is set just below the n_pass-th largest maximum of a query. Each of those blocks
    has a score above it, so at least n_pass scores pass. For that there must be enough blocks:
    where there are few scores, blocks are smaller."""
    size = BLOCK
    while bar is None and size > 1 and scores.shape[1] < 2 * n_pass * size:
        size //= 2
    blocks = scores.view(len(scores), size, -1)          # every (W / size)-th score is of one block
    maxima = blocks.amax(1)                                                  # (Q, W / size)
    if not maxima.max() < INF:            # infinite or NaN: rare, so only maxima are checked for it
        blocks.masked_fill_(~(blocks < INF), -INF)
        maxima = blocks.amax(1)
    if bar is None:
        bar = torch.full((len(scores),), -INF, device=scores.device)
        if n_pass <= maxima.shape[1]:
            bar = maxima.topk(n_pass).values[:, -1].nextafter(bar)
    query, block = (maxima > bar[:, None]).nonzero(as_tuple=True)
    scores = blocks[query, :, block]                                         # (blocks found, size)
    i, j = (scores > bar[query, None]).nonzero(as_tuple=True)
    return (query[i], block[i] + j * maxima.shape[1], scores[i, j]), bar

def keep_best(best, candidates, query_passage, key_passage):
    """The k best of best (scores, ids [Q, k]) and of candidates (query, id, score [n]), which are
    not of the query's own passage. A candidate's id is above those in its row of best."""
    query, id, score = candidates
    if query_passage is not None:
        own = query_passage[query]
        allowed = (take(key_passage, id, id.device) != own) | (own < 0)
        query, id, score = query[allowed], id[allowed], score[allowed]
    order = (query * 2 ** 40 + id).argsort()                                 # by query, then by id
    count = torch.bincount(query, minlength=len(best[0]))
    row, place = ragged(count)
    k, most = best[0].shape[1], int(count.max())
    scores = F.pad(best[0], (0, most), value=-INF)                           # (Q, k + most)
    ids = F.pad(best[1], (0, most), value=-1)
    scores[row, k + place] = score[order]
    ids[row, k + place] = id[order]
    return best_of(scores, ids, k)

def in_parts(search, size, queries, query_passage):
    """search(queries, query_passage) on `size` queries at a time."""
    queries = queries.split(size)
    passages = [None] * len(queries) if query_passage is None else query_passage.split(size)
    scores, ids = zip(*map(search, queries, passages))
    return torch.cat(scores), torch.cat(ids)

# ---- exact search

@torch.no_grad()
def exact_topk(queries, keys, k, query_passage=None, key_passage=None):
    """The k best of all keys for every query (app. C.1.1, but exact): scores, ids [Q, k].
    queries [Q, d]; keys [N, d], which may lie on disk; query_passage [Q], key_passage [N]."""
    Q, N, device = len(queries), len(keys), queries.device
    if Q > QUERIES:
        return in_parts(lambda q, passage: exact_topk(q, keys, k, passage, key_passage),
                        QUERIES, queries, query_passage)
    best = plain_topk(queries, queries[:0], k)                               # of no keys
    if Q == 0 or k == 0 or N == 0:
        return best
    # The first tile is larger: it alone has no bar to clear, and sets a high one.
    size = min(32768, max(8192, N // 16), N)
    later_size = min(size, max(1024, TILE // Q) // 512 * 512)        # odd sizes make maxima slow
    # Some of the best may be of the query's own passage, which keep_best takes out.
    n_pass = k if query_passage is None else k + largest(take(key_passage, slice(size), device))
    tile = torch.empty(Q * (size + BLOCK), device=device)
    bar, found = None, []
    for start, end in pairwise([0, *range(size, N, later_size), N]):
        part = take(keys, slice(start, end), device).float()
        scores = tile[:Q * (-(-len(part) // BLOCK) * BLOCK)].view(Q, -1)       # whole blocks
        torch.mm(queries.float(), part.T, out=scores[:, :len(part)])
        scores[:, len(part):] = -INF
        (query, column, score), bar = high_scores(scores, bar, n_pass)
        found.append((query, start + column, score))
        if end == N or sum(len(query) for query, _, _ in found) > Q * k:       # worth a higher bar
            best = keep_best(best, map(torch.cat, zip(*found)), query_passage, key_passage)
            bar = bar.maximum(best[0][:, -1])
            found = []
    return best

# ---- k-means and buckets

def nearest(points, centroids):
    """Squared Euclidean distance to the nearest centroid [N], and which one it is [N]."""
    half = centroids.square().sum(1) / 2
    distance = torch.empty(len(points), device=centroids.device)
    cluster = torch.empty(len(points), dtype=torch.int64, device=centroids.device)
    for i in range(0, len(points), 4096):
        x = take(points, slice(i, i + 4096), centroids.device).float()
        best, cluster[i:i + 4096] = torch.addmm(half, x, centroids.T, beta=-1).max(1)
        distance[i:i + 4096] = x.square().sum(1) - 2 * best      # |x|² - 2 (x·c - |c|²/2)
    return distance, cluster

def assign(points, centroids):
    """Each point's nearest centroid [N]. To each centroid that is nearest to none goes, and moves,
    the point farthest from its own centroid that is not alone there. Changes `centroids`."""
    distance, cluster = nearest(points, centroids)
    for empty in (torch.bincount(cluster, minlength=len(centroids)) == 0).nonzero()[:, 0].tolist():
        alone = torch.bincount(cluster)[cluster] == 1
        point = int(distance.masked_fill(alone, -INF).argmax())
        cluster[point] = empty
        centroids[empty] = take(points, slice(point, point + 1), centroids.device)[0].float()
    return cluster

def sample_of(N, n_clusters, seed):
    """At most SAMPLE points a cluster out of N, chosen by seed: their numbers in order."""
    order = torch.randperm(N, generator=torch.Generator().manual_seed(seed))
    return order[:SAMPLE * n_clusters].sort().values

@torch.no_grad()
def kmeans(points, n_clusters, n_iters=10, seed=0, init=None):
    """Lloyd's k-means: centroids [C, d], each point's nearest one [N] (int64). No cluster is empty.
    points [N, d], a tensor or a memory map; C = min(n_clusters, N). Centroids start at `init`
    [C, d] or at points chosen by seed. They learn on at most SAMPLE points a cluster."""
    C, device = min(n_clusters, len(points)), getattr(points, "device", "cpu")
    x = take(points, sample_of(len(points), C, seed), device).float()
    if init is None:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        init = x[order[:C].to(device)]
    centroids = init.float().clone()
    for _ in range(n_iters):
        cluster = assign(x, centroids)
        # A GPU adds in no fixed order. In float64 the difference is lost when the mean is rounded.
        total = x.new_zeros(C, x.shape[1], dtype=torch.float64).index_add_(0, cluster, x.double())
        centroids = (total / torch.bincount(cluster, minlength=C)[:, None]).float()
    cluster = assign(points, centroids)
    return centroids, cluster

class BucketedIndex:
    """Keys in buckets by direction; a query searches only its n_search best ones (app. C.1.2).
    keys [N, d] are copied, bucket after bucket. k-means runs on keys of unit length, and buckets of
    keys and queries are chosen by the dot product with the centroids' directions. Centroids with
    their lengths would draw every query to the same few (python tests/bench.py buckets)."""
    def __init__(self, keys, n_clusters, key_passage=None, seed=0):
        device = getattr(keys, "device", "cpu")
        sample = take(keys, sample_of(len(keys), n_clusters, seed), device).float()
        sample = F.normalize(sample.nan_to_num(0, 0, 0))        # one NaN would spoil all centroids
        self.centroids = F.normalize(kmeans(sample, n_clusters, seed=seed)[0])           # (C, d)
        bucket = nearest(keys, self.centroids)[1]
        self.count = torch.bincount(bucket, minlength=len(self.centroids))               # (C,)
        self.start = self.count.cumsum(0) - self.count
        self.id = bucket.argsort(stable=True)                   # (N,) bucket after bucket
        self.keys = [take(keys, id, device).T.contiguous()      # C of (d, count)
                     for id in self.id.split(self.count.tolist())]
        self.passage = None if key_passage is None else take(key_passage, slice(None), device)
        self.largest = 0 if key_passage is None else largest(self.passage)

    @torch.no_grad()
    def search(self, queries, k, n_search, query_passage=None):
        """The k best keys in the n_search best buckets of each query [Q, d]: scores, ids [Q, k]."""
        Q, device = len(queries), queries.device
        best = plain_topk(queries, queries[:0], k)                               # of no keys
        probe = dot(queries, self.centroids).topk(min(n_search, len(self.centroids))).indices
        n_blocks = -(-self.count // BLOCK)                # (C,) a bucket's scores fill whole blocks
        width = n_blocks[probe]                           # (Q, n_search) blocks
        if k == 0 or width.numel() == 0:
            return best
        if width.sum() * BLOCK > SCORES and Q > 1:
            return in_parts(lambda q, passage: self.search(q, k, n_search, passage),
                            -(-Q // 2), queries, query_passage)
        # Rows of scores, one for each query and bucket that it searches, are computed in the order
        # of the buckets: so a bucket is read once, for all who ask.
        bucket, order = probe.view(-1).sort(stable=True)                         # (R,)
        query = order // probe.shape[1]                                          # (R,)
        blocks, done = torch.empty(int(width.sum()), BLOCK, device=device), 0
        n_rows = torch.bincount(bucket, minlength=len(n_blocks)).tolist()
        asking_of = queries[query].float().split(n_rows)
        for keys, asking, n in zip(self.keys, asking_of, n_blocks.tolist()):
            out = blocks[done:done + len(asking) * n].view(len(asking), n * BLOCK)
            torch.mm(asking, keys.float(), out=out[:, :keys.shape[1]])
            out[:, keys.shape[1]:] = -INF
            done += len(asking) * n
        # Then they are put side by side, a row for each query.
        row, place = ragged(n_blocks[bucket])             # (B,) each block's row, and place in it
        before = (width.cumsum(1) - width).view(-1)[order]                       # (R,) blocks
        at = query[row], before[row] + place
        scores = torch.full((Q, int(width.sum(1).max()), BLOCK), -INF, device=device)
        scores[at] = blocks
        slot = torch.zeros(scores.shape[:2], dtype=torch.int64, device=device)   # a block's first
        slot[at] = self.start[bucket[row]] + place * BLOCK
        n_pass = k if query_passage is None else k + self.largest
        (query, column, score), _ = high_scores(scores.flatten(1), None, n_pass)
        id = self.id[slot[query, column // BLOCK] + column % BLOCK]
        return keep_best(best, (query, id, score), query_passage, self.passage)

# ---- several processes

bytes_sent = Counter()      # what for -> to other processes, but for gradients of gathered rows

def rank_and_size():
    """(which process this is, how many there are): (0, 1) without torch.distributed."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

def barrier():
    if rank_and_size()[1] > 1:
        dist.barrier()

def sum_over_processes(x, device="cpu"):
    """The sum over all processes of a number or tensor, without gradient."""
    x = torch.as_tensor(x, device=device).detach().clone()
    if rank_and_size()[1] > 1:
        dist.all_reduce(x)
    return x

def sum_gradients(parameters):
    """Adds up the gradients of all processes, as one message. Every loss is this process's share of
    a mean over all processes, so the sum is the gradient of the whole batch."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if rank_and_size()[1] > 1 and grads:
        flat = torch.nn.utils.parameters_to_vector(grads)
        dist.all_reduce(flat)
        bytes_sent["gradients"] += flat.nbytes
        torch.nn.utils.vector_to_parameters(flat, grads)

def gather_counts(n, device):
    """Everybody's n, a number or a tensor of numbers: a list, or a list of lists."""
    rank, size = rank_and_size()
    n = torch.as_tensor(n, device=device)
    counts = n.new_zeros(size, *n.shape)
    counts[rank] = n
    return sum_over_processes(counts, device).tolist()

def gather(x):
    """x [n, …] of all processes, one after the other: [sum of n, …]. n may differ and be 0.
    Differentiable: a row's gradient is the sum of what all processes have for it."""
    if rank_and_size()[1] == 1:
        return x
    counts = gather_counts(len(x), x.device)
    padded = torch.cat([x, x.new_zeros(max(counts) - len(x), *x.shape[1:])])    # to equal shapes
    bytes_sent["gather"] += padded.nbytes * (len(counts) - 1)
    parts = all_gather(padded)
    return torch.cat([part[:n] for part, n in zip(parts, counts)])

def exchange(what, x, counts, back):
    """Sends the first counts[0] rows of x to process 0, the next counts[1] to process 1, …; returns
    the rows received in the order of their senders: back[0] of process 0, …"""
    received = x.new_empty(sum(back), *x.shape[1:])
    dist.all_to_all_single(received, x.contiguous(), back, counts)
    bytes_sent[what] += x[:1].nbytes * (len(x) - counts[rank_and_size()[0]])
    return received

@torch.no_grad()
def sharded_topk(search, queries, k, k_shard, query_passage=None, n_local=None):
    """The k best for this process's queries of the k_shard best in every shard (app. C.1).
    search(queries, k_shard, query_passage) -> scores, ids: a search of this process's n_local keys.
    queries [Q, d], query_passage [Q]; Q may differ between processes. Returns scores, ids [Q, k];
    ids go on from shard to shard. Exact if k_shard = k; with less, what a shard has beyond its
    k_shard best is lost. "Without a second top-k" (app. C.1.4) is k = k_shard × processes."""
    (rank, size), Q = rank_and_size(), len(queries)
    if size == 1:
        return best_of(*search(queries, k_shard, query_passage), k)
    counts = gather_counts(Q, queries.device)
    offset = sum(gather_counts(n_local, queries.device)[:rank])
    query_passage = None if query_passage is None else gather(query_passage)
    scores, ids = search(gather(queries), k_shard, query_passage)      # (queries of all, k_shard)
    ids = torch.where(ids < 0, ids, ids + offset)
    scores, ids = (exchange("candidates", x, counts, [Q] * size) for x in (scores, ids))
    scores, ids = (x.view(size, Q, k_shard).transpose(0, 1).flatten(1) for x in (scores, ids))
    return best_of(scores, ids, k)

@torch.no_grad()
def fetch(ids, tables):
    """Rows of sharded tables for ids [Q, k] of `sharded_topk`: tensors [Q, k, …], zeros for id -1.
    tables: this process's shards, tensors or memory maps, all of one length. A process asks once
    for a row that it needs, however often it needs it, and nothing else travels."""
    (rank, size), device = rank_and_size(), ids.device
    chosen, filled = ids >= 0, []
    asked = ids[chosen]
    if size > 1:
        start = torch.tensor([0, *gather_counts(len(tables[0]), device)], device=device).cumsum(0)
        wanted, inverse = asked.unique(return_inverse=True)            # sorted, hence by process
        owner = torch.searchsorted(start, wanted, right=True) - 1
        counts = gather_counts(torch.bincount(owner, minlength=size), device)    # [who][from whom]
        ours, theirs = counts[rank], [row[rank] for row in counts]
        asked = exchange("ids", wanted, ours, theirs) - start[rank]
    for table in tables:
        rows = take(table, asked, device)
        if size > 1:
            rows = exchange("rows", rows, theirs, ours)[inverse]
        filled.append(rows.new_zeros(*ids.shape, *rows.shape[1:]))
        filled[-1][chosen] = rows
    return filled
