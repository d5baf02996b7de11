"""Search in the mention memory (§2.2.2, app. C): the k keys with the largest dot products.

    queries (Q, d), keys (N, d)  ->  scores (Q, k), ids (Q, k)      (TopMem(Query(m)), eq. 7)
    plain_topk       the definition; it holds all Q x N scores
    BucketedIndex    keys in k-means buckets; a query searches its n_search best buckets (C.1.2)
    sharded_topk     each process searches its own keys for the queries of all processes (app. C.1)
    fetch            requests the chosen rows from the processes that hold them
    exact_topk       the result of plain_topk, faster and in little memory (app. C.1.1, but exact)

All searches return scores in descending order, and ties in ascending order of id (a key's row).
They exclude keys from the query's own passage (a query with passage -1 excludes none) and scores
that are not finite. If fewer than k keys remain, empty places have score -inf and id -1. Keys may
be float32, float16 or bfloat16, and may be numpy memory maps; scores are float32. Only the scores
of plain_topk have gradients. The functions for several processes also work in a single process
without torch.distributed."""
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

def dot(queries, keys):
    """queries (..., Q, d), keys (..., N, d) -> float32 scores (..., Q, N), with gradient. Attention
    weights are exponentials of scores, and bfloat16 would round scores near 50 by up to 0.125."""
    with torch.autocast(queries.device.type, enabled=False):
        return queries.float() @ keys.float().mT

def plain_topk(queries, keys, k, query_passage=None, key_passage=None):
    """The definition of what the searches below find, used in tests and for empty results. The
    arguments are those of exact_topk."""
    scores = allowed_scores(queries, torch.as_tensor(keys), query_passage, key_passage)
    scores = scores.masked_fill(~scores.isfinite(), -torch.inf)
    return best_of(scores, torch.arange(len(keys), device=scores.device).expand_as(scores), k)

def allowed_scores(queries, keys, query_passage, key_passage):
    """All scores (Q, N); -inf for keys from the query's own passage."""
    scores = dot(queries, keys)
    if query_passage is not None:
        own = (query_passage[:, None] == key_passage) & (query_passage[:, None] >= 0)
        scores = scores.masked_fill(own, -torch.inf)
    return scores

def best_of(scores, ids, k):
    """The k best of each row (Q, n); ties keep their order. Empty places get score -inf, id -1."""
    missing = max(0, k - scores.shape[1])
    scores = F.pad(scores, (0, missing), value=-torch.inf)
    ids = F.pad(ids, (0, missing), value=-1)
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    scores, ids = scores[:, :k], ids.gather(1, order[:, :k])
    return scores, ids.masked_fill(scores == -torch.inf, -1)

# ---- k-means and buckets

SAMPLE = 256            # number of keys per bucket on which k-means is trained

def nearest(points, centroids):
    """points (N, d), centroids (C, d) -> nearest centroid's squared distance and number (N,)."""
    half = centroids.square().sum(1) / 2
    distance = torch.empty(len(points), device=centroids.device)
    cluster = torch.empty(len(points), dtype=torch.int64, device=centroids.device)
    for i in range(0, len(points), 4096):
        x = points[i:i + 4096].float()
        best, cluster[i:i + 4096] = torch.addmm(half, x, centroids.T, beta=-1).max(1)
        distance[i:i + 4096] = x.square().sum(1) - 2 * best      # |x|² - 2 (x·c - |c|²/2)
    return distance, cluster

def assign(points, centroids):
    """Each point's nearest centroid (N,). Changes `centroids`: moves a centroid without points to
    the point that is farthest from its nearest centroid. Never takes a centroid's only point."""
    distance, cluster = nearest(points, centroids)
    for empty in (torch.bincount(cluster, minlength=len(centroids)) == 0).nonzero()[:, 0].tolist():
        alone = torch.bincount(cluster)[cluster] == 1
        point = distance.masked_fill(alone, -torch.inf).argmax()
        cluster[point] = empty
        centroids[empty] = points[point]
    return cluster

@torch.no_grad()
def kmeans(points, init, n_iters=10):
    """Lloyd's k-means: centroids (C, d), and the number of each point's centroid (N,). No cluster
    is empty. points (N, d); init (C, d): the centroids to start from, C <= N."""
    centroids = init.float().clone()
    cluster = assign(points, centroids)
    for _ in range(n_iters):
        # A GPU adds in no fixed order. In float64 the differences vanish when the mean is rounded.
        total = torch.zeros_like(centroids).double().index_add_(0, cluster, points.double())
        centroids = (total / torch.bincount(cluster)[:, None]).float()
        cluster = assign(points, centroids)
    return centroids, cluster

class BucketedIndex:
    """Keys, grouped by direction into buckets. A query searches only n_search buckets (app. C.1.2).
    keys (N, d) are copied, bucket by bucket. Centroids have unit length. Otherwise the few longest
    would have the largest dot products with most queries (see `tests/bench.py buckets`)."""
    def __init__(self, keys, n_clusters, key_passage=None, seed=0):
        keys = torch.as_tensor(keys)
        order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(seed))
        sample = keys[order[:SAMPLE * n_clusters].to(keys.device)].float()
        sample = F.normalize(sample.nan_to_num(0, 0, 0))        # one NaN would spoil all centroids
        self.centroids = F.normalize(kmeans(sample, sample[:n_clusters], 20)[0])     # (C, d)
        # Since all centroids have the same length, the nearest has the largest dot product.
        bucket = nearest(keys, self.centroids)[1]
        # If many keys are equal, so are some normalised centroids. Only the first of equal
        # centroids gets keys; the rest are dropped.
        used, bucket = bucket.unique(return_inverse=True)
        self.centroids, self.count = self.centroids[used], torch.bincount(bucket)  # (C, d), (C,)
        self.start = self.count.cumsum(0) - self.count
        self.id = bucket.argsort(stable=True)                   # (N,) bucket by bucket
        # A list of the buckets' keys, (d, count) each.
        self.keys = [keys[id].T.contiguous() for id in self.id.split(self.count.tolist())]
        self.passage = key_passage
        # A search finds k keys and as many more as the largest passage has, so that k remain after
        # those from the query's own passage are excluded.
        sizes = [] if key_passage is None else key_passage.unique(return_counts=True)[1].tolist()
        self.largest_passage = max(sizes, default=0)

    def search(self, queries, k, n_search, query_passage=None):
        """scores, ids (Q, k): for each query (Q, d), the result of plain_topk over the keys in the
        n_search buckets whose centroids have the largest dot products with the query."""
        return search_buckets(self, queries, k, n_search, query_passage)

# ---- several processes

def rank_and_size():
    """(which process this is, how many there are): (0, 1) without torch.distributed."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

def barrier():
    """Waits until all processes have reached this point."""
    if rank_and_size()[1] > 1:
        dist.barrier()

def sum_over_processes(x, device="cpu"):
    """The sum over all processes of a number or tensor, without gradient."""
    x = torch.as_tensor(x, device=device).detach().clone()
    if rank_and_size()[1] > 1:
        dist.all_reduce(x)
    return x

def copy_from_first(parameters):
    """Copies the parameters of the first process to all others."""
    if rank_and_size()[1] > 1:
        for parameter in parameters:
            dist.broadcast(parameter.data, 0)

def sum_gradients(parameters):
    """Sums the gradients of all processes, in one message. Each process's loss is its share of a
    mean over all processes, so the sum is the gradient of the mean over the whole batch."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if rank_and_size()[1] > 1 and grads:
        flat = torch.nn.utils.parameters_to_vector(grads)
        dist.all_reduce(flat)
        torch.nn.utils.vector_to_parameters(flat, grads)

def gather_counts(n, device):
    """A list of the values of n in all processes. n: a number or a tensor of numbers."""
    n = torch.as_tensor(n, device=device)
    return (AllGather.apply(n) if rank_and_size()[1] > 1 else n[None]).tolist()

class AllGather(torch.autograd.Function):
    """The x of all processes (equal shapes), stacked: (processes, *x.shape). The backward pass sums
    x's gradients from all processes. (torch.distributed.nn.functional.all_gather is deprecated.)"""
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
    """The x (n, …) of all processes, concatenated: (sum of n, …). n may differ and may be 0.
    Differentiable: the gradient of a row is summed over all processes."""
    if rank_and_size()[1] == 1:
        return x
    counts = gather_counts(len(x), x.device)
    padded = torch.cat([x, x.new_zeros(max(counts) - len(x), *x.shape[1:])])    # to equal shapes
    parts = AllGather.apply(padded)
    return torch.cat([part[:n] for part, n in zip(parts, counts)])

def exchange(x, send, receive):
    """Sends the first send[0] rows of x to process 0, the next send[1] to process 1, …; returns the
    received rows in the order of their senders: receive[0] rows from process 0, …"""
    if rank_and_size()[1] == 1:
        return x
    received = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(received, x.contiguous(), receive, send)
    return received

QUERIES = 2048          # queries that sharded_topk passes to a search at a time

@torch.no_grad()
def sharded_topk(search, queries, k, k_shard, query_passage, n_rows):
    """For each query of this process, the k best among the k_shard best of each shard (app. C.1). A
    shard is the keys of one process. search(queries, k_shard, query_passage) -> scores, ids: a
    search of this process's shard. queries (Q, d), query_passage (Q,); Q may differ between
    processes. n_rows: the number of keys in each shard. Returns scores, ids (Q, k); an id is a row
    of the concatenated shards. The result is exact if k_shard = k and `search` is exact."""
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
    """Rows of sharded tables for ids (Q, k) from `sharded_topk`: tensors (Q, k, …), zero for id -1.
    tables: this process's shard of each table, all of the same length. A process requests each row
    once, however often it needs the row; besides ids and rows, only counts are sent."""
    (rank, size), device, found = rank_and_size(), ids.device, ids >= 0
    if size == 1 and len(tables[0]) > 0:                    # the same result, without sorting ids
        row = ids.clamp(min=0).flatten()
        filled = [table.index_select(0, row).unflatten(0, ids.shape) for table in tables]
        for rows in filled:
            rows[~found] = 0
        return filled
    filled = [table.new_zeros(*ids.shape, *table.shape[1:]) for table in tables]
    # Process i holds the rows first[i] to first[i + 1] - 1, and requests counts[i][j] rows from
    # process j. Each id is sent to the process that holds its row, which sends the row back.
    first = torch.tensor([0, *gather_counts(len(tables[0]), device)], device=device).cumsum(0)
    requests, inverse = ids[found].unique(return_inverse=True)      # sorted: grouped by process
    owner = torch.searchsorted(first, requests, right=True) - 1
    counts = gather_counts(torch.bincount(owner, minlength=size), device)
    asked_by_us, asked_of_us = counts[rank], [row[rank] for row in counts]
    local = exchange(requests, asked_by_us, asked_of_us) - first[rank]
    for rows, table in zip(filled, tables):
        rows[found] = exchange(table[local], asked_of_us, asked_by_us)[inverse]
    return filled

# ==== Set apart: fast search ======================================================================
# Exact search computes scores tile by tile, where a tile is all queries × some keys (app. C.1.1). A
# GPU then takes the k best of each tile. On a CPU that would take longer than computing the scores.
# So a CPU divides each query's scores into blocks, takes the maximum of each, and looks only into
# the few blocks whose maximum is above the query's bar, a score that about k keys reach.

BLOCK = 16          # scores per block: every (W / 16)-th of a query's W scores in a tile
CPU_TILE = 3 * 2 ** 20      # scores computed at a time, so that they stay in the cache
GPU_TILE = 2 ** 27          # on a GPU: few, large kernels
FEW_SCORES = 2 ** 19        # up to this many scores, torch.topk is faster than blocks
NOT_FINITE = 3 * [-torch.inf]       # what NaN, inf and -inf become

@torch.no_grad()
def exact_topk(queries, keys, k, query_passage=None, key_passage=None):
    """The k best of all keys for every query: scores, ids (Q, k). queries (Q, d); keys (N, d),
    which may be on disk; query_passage (Q,), key_passage (N,).

    On a CPU each query's bar is guessed from the first keys. If fewer than k scores turn out to be
    above it, the query is searched again with a safe bar, which is never too high."""
    keys, Q, N = torch.as_tensor(keys), len(queries), len(keys)
    if Q == 0 or k == 0 or N == 0:
        return plain_topk(queries, queries[:0], k)                  # k empty places per query
    if queries.is_cuda:
        return best_of_tiles(queries, keys, k, query_passage, key_passage)
    if k < N and Q * N <= FEW_SCORES:
        # torch.topk returns ties in any order, so its result is used only if there are none.
        best = allowed_scores(queries, keys, query_passage, key_passage).topk(k + 1)
        if best.values.isfinite().all() and (best.values.diff() < 0).all():
            return best.values[:, :k], best.indices[:, :k]
    best = above_bar(queries, keys, k, True, query_passage, key_passage)
    few = (best[1][:, -1] < 0).nonzero()[:, 0]
    if len(few) > 0 and N > CPU_TILE // Q:          # otherwise there is one tile, whose bar is safe
        passage = None if query_passage is None else query_passage[few]
        best[0][few], best[1][few] = above_bar(queries[few], keys, k, False, passage, key_passage)
    return best

def above_bar(queries, keys, k, is_guess, query_passage, key_passage):
    """The k best of each query among its scores above the bar. A safe bar is below the k-th best
    score so far. A guessed bar assumes that the keys are in random order. If half of the keys have
    been read, about k / 2 of the k best are among them, so a guessed bar is a little below the
    (k / 2)-th best score so far. The first tile sets the bar, which is raised when too many scores
    are above it. A guessed bar that was never raised is also raised after a few more tiles."""
    Q, N, found, n_found, is_raised = len(queries), len(keys), [], 0, False
    # The first tile should have enough keys for a good guess: 10,240 or, if more, enough to contain
    # about 8 of the k best (both found by trial). But unless k requires more, its scores take at
    # most 32 MB: malloc returns larger buffers to the system, and getting new ones takes time.
    first = max(k, CPU_TILE // Q, min(max(10240, 8 * N // k), 8 * 10**6 // Q))
    for start, scores in tiles(queries, keys, first, CPU_TILE, query_passage, key_passage):
        blocks, n_read = scores.view(BLOCK, -1, Q), min(start + len(scores), N)
        expected = k * n_read / N       # number of the k best read so far; rank adds 4σ as a margin
        rank = min(k, int(expected + 4 * expected ** 0.5 + 2)) if is_guess else k
        maxima = blocks.amax(0) if start else block_maxima(blocks)  # no NaN or inf in the bar
        if start == 0:          # the rank-th best maximum is at most the rank-th best score
            n = 3 if len(maxima) >= 3 * rank else 1                         # fewer: topk is faster
            largest = maxima[:len(maxima) // n * n].view(n, -1, Q).amax(0)
            bar = just_below(largest if len(largest) >= rank else scores, rank, dim=0)
        (j, block, query), score = high_scores(blocks, maxima, bar)
        found.append((query, start + j * len(maxima) + block, score))
        n_found += len(query)
        is_due = is_guess and not is_raised and 4 * first <= n_read < N / 4
        if n_found > 4 * Q * k or is_due:
            bar = bar.maximum(just_below(merge(found, Q, k)[0][:, :rank], rank, dim=1))
            query, id, score = map(torch.cat, zip(*found))
            high = (score > bar[query]).nonzero()[:, 0]
            found, n_found, is_raised = [(query[high], id[high], score[high])], len(high), True
    return merge(found, Q, k)

def tiles(queries, keys, first, size, query_passage, key_passage):
    """Yields, for each tile, the index of its first key and its float32 scores (W, Q), one row per
    key. The first tile has `first` keys; each later one has about `size` scores. Keys of the
    query's own passage score -inf, as do the rows added to make W a multiple of BLOCK."""
    queries, Q, N, later = queries.float(), len(queries), len(keys), max(512, size // len(queries))
    n_scores = (min(N, max(first, later)) + BLOCK) * Q          # of the largest tile
    if queries.device.type == "cpu":
        buffer = torch.from_numpy(np.empty(n_scores, np.float32))       # huge pages (on Linux)
    else:
        buffer = torch.empty(n_scores, device=queries.device)
    for start, end in pairwise([0, *range(first, N, later), N]):
        rows = keys[start:end].to(queries.device, torch.float32)
        W = len(rows) + -len(rows) % BLOCK
        scores = buffer[:W * Q].view(W, Q)
        torch.mm(rows, queries.T, out=scores[:len(rows)])           # autocast skips calls with out=
        scores[len(rows):] = -torch.inf
        if query_passage is not None:
            passage = key_passage[start:end]
            row = torch.isin(passage, query_passage).nonzero()[:, 0]
            own = (passage[row, None] == query_passage) & (query_passage >= 0)
            i, query = own.nonzero(as_tuple=True)
            scores[row[i], query] = -torch.inf
        yield start, scores

def best_of_tiles(queries, keys, k, query_passage, key_passage):
    """exact_topk on a GPU: merges each tile's k best. (Few, large tiles are faster, partly because
    `nonzero`, twice in `tiles`, waits for the GPU each time.)"""
    first, best = max(512, GPU_TILE // len(queries)), plain_topk(queries, queries[:0], k)
    for start, scores in tiles(queries, keys, first, GPU_TILE, query_passage, key_passage):
        row = torch.arange(len(scores), device=scores.device)[:, None]
        codes = falling(scores.nan_to_num_(*NOT_FINITE)) * 2 ** 31 + row    # breaks ties by row
        row = codes.topk(min(k, len(scores)), 0, largest=False).values & 0x7FFFFFFF
        score, id = scores.gather(0, row).T, start + row.T
        best = best_of(torch.cat([best[0], score], 1), torch.cat([best[1], id], 1), k)
    return best

def falling(scores):
    """int64 numbers from 0 to 2^32 - 1 that rise as float32 scores fall."""
    bits = (scores + 0.0).view(torch.int32).long()                  # -0.0 + 0.0 is 0.0
    # Apart from the sign bit, a float's bits rise with its magnitude; ^ flips them in negatives.
    return 0x7FFFFFFF - (bits ^ (bits >> 31 & 0x7FFFFFFF))

# ---- the scores above a bar; (A, B) is (blocks per query, Q) or (Q, blocks per query)

def block_maxima(blocks):
    """The maxima (A, B) of blocks (size, A, B). Sets scores that are not finite to -inf."""
    maxima = blocks.amax(0)
    # If any score is NaN or inf, so is the maximum of all scores.
    return maxima if maxima.amax() < torch.inf else blocks.nan_to_num_(*NOT_FINITE).amax(0)

def just_below(maxima, n, dim):
    """The largest float below the n-th largest value along dim, or below the smallest value if
    there are fewer than n."""
    bar = maxima.topk(min(n, maxima.shape[dim]), dim, sorted=False).values.amin(dim)
    return bar.nextafter(torch.full_like(bar, -torch.inf))

def high_scores(blocks, maxima, bar):
    """Finds the F scores in blocks (size, A, B) that are above a bar, which broadcasts to (A, B):
    their positions, three tensors (F,), and the scores (F,). Skips blocks without such scores."""
    block = (maxima <= bar).logical_not_().flatten().nonzero()[:, 0]    # NaN counts as above
    a, b = block // maxima.shape[1], block % maxima.shape[1]
    # The scores of these blocks. gather is faster than indexing, but needs contiguous blocks.
    if blocks.is_contiguous():
        found = blocks.flatten(1).gather(1, block.expand(len(blocks), -1))
    else:
        found = blocks[:, a, b]
    found = found.nan_to_num_(*NOT_FINITE)
    high = (found > bar.expand_as(maxima)[a, b]).flatten().nonzero()[:, 0]
    j, i = high // len(block), high % len(block)
    return (j, a.index_select(0, i), b.index_select(0, i)), found.flatten().index_select(0, high)

def merge(found, Q, k):
    """The k best of each query: scores, ids (Q, k). found: a list of (query, id, score), three
    tensors (F,) each. Equal scores of a query must be in ascending order of id."""
    query, id, score = map(torch.cat, zip(*found))
    if len(query) == 0:
        return best_of(score.new_empty(Q, 0), id.new_empty(Q, 0), k)
    order = (query * 2 ** 32 + falling(score)).sort(stable=True).indices    # by query, then score
    count = torch.bincount(query, minlength=Q)[:, None]
    nth = torch.arange(k, device=score.device)
    chosen = order[(count.cumsum(0) - count + nth).clamp(max=len(order) - 1)]      # (Q, k)
    score = score[chosen].masked_fill(nth >= count, -torch.inf)
    return score, id[chosen].masked_fill(score == -torch.inf, -1)

# ---- bucketed search

@torch.no_grad()
def search_buckets(index, queries, k, n_search, query_passage):
    """Implements BucketedIndex.search: puts the scores of each query's buckets side by side in one
    row, and finds the scores in this row that are above a bar."""
    Q, device = len(queries), queries.device
    n_search = min(n_search, len(index.keys))
    if Q == 0 or k == 0 or n_search == 0:
        return plain_topk(queries, queries[:0], k)           # k empty places per query
    probed = dot(queries, index.centroids).topk(n_search).indices.flatten()
    # One row of scores per query: for the keys of its first bucket, of its second, …, then -inf.
    count = index.count[probed].view(Q, n_search)
    width = -(-int(count.sum(1).max()) // BLOCK) * BLOCK
    scores = torch.full((Q * width,), -torch.inf, device=device)
    begin = torch.arange(0, Q * width, width, device=device)[:, None]
    begin = (begin + count.cumsum(1) - count).flatten()       # where each (query, bucket) begins
    buckets, n_asking = (x.tolist() for x in probed.unique(return_counts=True))
    if 4 * Q < len(buckets):        # few queries per bucket: query by query
        rows = zip(probed.view(Q, -1).tolist(), queries.float(), scores.view(Q, width))
        for own, query, row in rows:
            keys = torch.cat([index.keys[b] for b in own], 1).float()
            torch.mv(keys.T, query, out=row[:keys.shape[1]])
    else:                           # bucket by bucket, so that each bucket's keys are read once
        order = probed.argsort(stable=True)
        places = begin[order, None].split(n_asking)
        asking = queries[order // n_search].float().split(n_asking)
        number = torch.arange(max(index.keys[b].shape[1] for b in buckets), device=device)
        for b, askers, place in zip(buckets, asking, places):
            keys = index.keys[b].float()
            scores[place + number[:keys.shape[1]]] = askers @ keys
    n = k + index.largest_passage
    blocks = scores.view(Q, BLOCK, -1).transpose(0, 1)
    maxima = block_maxima(blocks)                           # (Q, width / BLOCK)
    bar = just_below(maxima if maxima.shape[1] >= n else scores.view(Q, width), n, dim=1)
    (j, query, block), score = high_scores(blocks, maxima, bar[:, None])
    # Map each place in `scores` back to its bucket, and the place in the bucket to a key.
    place = query * width + j * maxima.shape[1] + block     # (F,)
    pair = torch.searchsorted(begin, place, right=True) - 1
    id = index.id[index.start[probed[pair]] + place - begin[pair]]
    if query_passage is not None:
        own = (query_passage[query] == index.passage[id]) & (query_passage[query] >= 0)
        score = score.masked_fill(own, -torch.inf)
    order = id.argsort()
    return merge([(query[order], id[order], score[order])], Q, k)
