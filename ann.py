"""Search in the mention memory (§2.2.2, appendix C): which k keys have the largest dot products with a query.

    queries [Q, d], keys [N, d]  ->  scores [Q, k], ids [Q, k]

    exact_topk       appendix C.1.1: every query against every key, one tile of scores [chunk, Q] at a time
    BucketedIndex    appendix C.1.2: keys in k-means buckets, a query looks only into its n_search best ones
    sharded_topk     appendix C.1: each process searches its own keys for everybody's queries, a second top-k
    fetch            … and the chosen rows, and only those, are sent for

The three searches return the same thing: scores by falling value, equal scores by rising id; no entry of the
query's own passage (passage -1 is nobody's); score -inf and id -1 where there is nothing left. Keys may be
float32, float16 or bfloat16, tensors or numpy memory maps; scores are always float32. No gradient passes,
except through `dot` and `gather`.

All torch.distributed code of the project is at the end of this file. Without an initialised process group
every function there does the same for the one process, without a copy.
"""
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

INF = float("inf")
BLOCK = 16              # scores that are first looked at together, as their maximum
QUERIES = 1024          # a search of more queries is a loop over so many
TILE = 2 ** 20          # scores computed at a time in an exact search: they stay in the cache
SCORES = 2 ** 25        # scores held at a time in a bucketed search
SAMPLE = 256            # points a cluster on which k-means learns


def take(table, index, device):
    """Rows of a tensor or numpy array as a tensor; index: a slice or a tensor of row numbers."""
    if isinstance(table, torch.Tensor):
        return table[index].to(device)
    if isinstance(index, torch.Tensor):
        index = index.cpu().numpy()
    return torch.from_numpy(np.array(table[index])).to(device)   # of a memory map, only these rows


def dot(queries, keys):
    """queries [..., Q, d], keys [..., N, d] -> [..., Q, N] with gradient, in float32 also where training computes in
    bfloat16: that would round a score of 50 by up to 0.125, and weights are its exponentials."""
    with torch.autocast(queries.device.type, enabled=False):
        return queries.float() @ keys.float().mT


# ---- a top-k that is never arbitrary: score and id as one number

def pack(score, id):
    """float32 scores and ids < 2^31 as int64 that order by score, then by lower id: one topk for both."""
    bits = (score + 0.0).view(torch.int32)                           # + 0.0: -0.0 becomes 0.0
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32) + (0x7FFFFFFF - id)


def unpack(packed):
    bits = (packed >> 32).int()
    score = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return score, (0x7FFFFFFF - (packed & 0xFFFFFFFF)).masked_fill(score == -INF, -1)


NOTHING = int(pack(torch.tensor([-INF]), 0x7FFFFFFF))


def ragged(count):
    """Rows of count[r] things, one row after the other -> the row of each thing, its place in that row."""
    row = torch.arange(len(count), device=count.device).repeat_interleave(count)
    return row, torch.arange(len(row), device=count.device) - (count.cumsum(0) - count)[row]


def keep_best(best, query, packed):
    """The k best of best [Q, k] and of the candidates packed [n], which belong to query [n]."""
    Q, k = best.shape
    count = torch.bincount(query, minlength=Q)
    row, place = ragged(count)
    wide = torch.full((Q, k + int(count.max())), NOTHING, device=best.device)       # (Q, k + most candidates)
    wide[:, :k] = best
    wide[row, k + place] = packed[query.argsort()]
    return wide.topk(k).values


def in_parts(search, size, queries, query_passage):
    """search(queries, query_passage) on `size` queries at a time."""
    parts = [search(queries[i:i + size], None if query_passage is None else query_passage[i:i + size])
             for i in range(0, len(queries), size)]
    return tuple(torch.cat(part) for part in zip(*parts))


# ---- exact

@torch.no_grad()
def exact_topk(queries, keys, k, query_passage=None, key_passage=None):
    """The k best of all keys for every query (appendix C.1.1, but exact).

    queries [Q, d]; keys [N, d], which need not fit in memory; query_passage [Q], key_passage [N].
    Returns scores [Q, k], ids [Q, k] on the queries' device.
    """
    Q, N, device = len(queries), len(keys), queries.device
    if Q > QUERIES:
        return in_parts(lambda q, p: exact_topk(q, keys, k, p, key_passage), QUERIES, queries, query_passage)
    best = torch.full((Q, k), NOTHING, device=device)
    if Q == 0 or k == 0:
        return unpack(best)
    if query_passage is not None:
        query_passage = query_passage.masked_fill(query_passage < 0, -2)             # -2: no key has it
    queries = queries.float().T                                                      # (d, Q)
    # The first tile is larger: it alone has no bar to clear, and sets a high one.
    first_chunk = min(32768, max(8192, N // 16 // BLOCK * BLOCK))
    chunk = min(first_chunk, max(1024, TILE // Q)) // BLOCK * BLOCK
    tile = torch.empty(min(-(-N // BLOCK) * BLOCK, first_chunk), Q, device=device)
    bar = torch.full((Q,), -INF, device=device)         # only a score above it can be among the k best
    found, n_found, start = [], 0, 0
    while start < N:
        part = take(keys, slice(start, start + (chunk if start else first_chunk)), device).float()
        n, blocks = len(part), -(-len(part) // BLOCK)
        scores = tile[:blocks * BLOCK]                                               # (chunk, Q)
        torch.mm(part, queries, out=scores[:n])
        scores[n:] = -INF
        if start == 0 and query_passage is not None:
            own = take(key_passage, slice(n), device)
            own_row = torch.isin(own, query_passage).nonzero()[:, 0]                 # keys of some query's passage: few
            scores[own_row] = scores[own_row].masked_fill(own[own_row, None] == query_passage, -INF)
        # Beside the product, a tile can be read once, no more: take the best of each block of BLOCK keys, and
        # look only into the blocks whose best is above the bar. After the first tile these are few.
        scores = scores.view(blocks, BLOCK, Q)
        block_best = scores.amax(1)                                                  # (blocks, Q)
        if start == 0 and blocks >= k:   # the k best blocks hold k scores not below the worst of their maxima
            bar = block_best.T.contiguous().topk(k).values[:, -1].nextafter(bar)
        block, query = (block_best > bar).nonzero(as_tuple=True)
        found.append((query, scores[block, :, query], start + block * BLOCK))
        n_found, start = n_found + len(query), start + n
        if n_found > Q * k or start >= N:   # enough to make it worth while to raise the bar
            query, score, id = (torch.cat(x) for x in zip(*found))                   # (f,) (f, BLOCK) (f,)
            found, n_found = [], 0
            i, j = (score > bar[query, None]).nonzero(as_tuple=True)
            query, score, id = query[i], score[i, j], id[i] + j
            if query_passage is not None:
                allowed = take(key_passage, id, device) != query_passage[query]
                query, score, id = query[allowed], score[allowed], id[allowed]
            if len(query):
                best = keep_best(best, query, pack(score, id))
                bar = bar.maximum(unpack(best[:, -1])[0])
    return unpack(best)


# ---- k-means and buckets

def nearest(points, centroids):
    """Squared Euclidean distance to the nearest centroid [N], and which one it is [N]."""
    half = centroids.square().sum(1) / 2
    distance = torch.empty(len(points), device=centroids.device)
    cluster = torch.empty(len(points), dtype=torch.int64, device=centroids.device)
    for i in range(0, len(points), 4096):
        x = take(points, slice(i, i + 4096), centroids.device).float()
        best, cluster[i:i + 4096] = torch.addmm(half, x, centroids.T, beta=-1).max(1)        # x·c - |c|²/2
        distance[i:i + 4096] = x.square().sum(1) - 2 * best
    return distance, cluster


def fill_empty(distance, cluster, n_clusters):
    """Moves into every empty cluster the point farthest from its own centroid, unless it is alone there.
    Changes `cluster`; returns {cluster: point}."""
    count, moved = torch.bincount(cluster, minlength=n_clusters), {}
    for empty in (count == 0).nonzero()[:, 0].tolist():
        while empty not in moved:
            point = int(distance.argmax())
            distance[point] = -INF
            if count[cluster[point]] > 1:
                count[cluster[point]] -= 1
                cluster[point], count[empty], moved[empty] = empty, 1, point
    return moved


def sample_of(N, n_clusters, seed):
    """At most SAMPLE points a cluster out of N, chosen by seed: their numbers in order."""
    order = torch.randperm(N, generator=torch.Generator().manual_seed(seed))
    return order[:SAMPLE * n_clusters].sort().values


@torch.no_grad()
def kmeans(points, n_clusters, n_iters=10, seed=0, init=None):
    """Lloyd's k-means: centroids [C, d], the nearest one of each point [N] (int64). No cluster is empty.

    points [N, d], a tensor or a memory map; C = min(n_clusters, N). Centroids start at `init` [C, d] or at
    points chosen by seed; they learn on at most SAMPLE points a cluster, n_iters steps or until nothing changes.
    """
    C, device = min(n_clusters, len(points)), getattr(points, "device", "cpu")
    x = take(points, sample_of(len(points), C, seed), device).float()
    if init is None:
        init = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:C].to(device)]
    centroids, before = init.float().clone(), None
    for _ in range(n_iters):
        distance, cluster = nearest(x, centroids)
        fill_empty(distance, cluster, C)
        if before is not None and torch.equal(cluster, before):
            break
        before = cluster
        # In float64, for a GPU adds in no fixed order: the difference is lost when the mean is rounded.
        total = x.new_zeros(C, x.shape[1], dtype=torch.float64).index_add_(0, cluster, x.double())
        centroids = (total / torch.bincount(cluster, minlength=C)[:, None]).float()
    distance, cluster = nearest(points, centroids)
    for empty, point in fill_empty(distance, cluster, C).items():
        centroids[empty] = take(points, slice(point, point + 1), device)[0].float()
    return centroids, cluster


class BucketedIndex:
    """Keys in buckets by direction; a query looks only into its n_search best ones (appendix C.1.2).

    keys [N, d] are copied, bucket after bucket. k-means runs on keys of unit length, and a key's bucket and a
    query's are chosen by the dot product with the centroids' directions: centroids with their lengths would
    draw every query to the same few long ones (tests/bench.py buckets shows what that costs).
    """

    def __init__(self, keys, n_clusters, key_passage=None, seed=0):
        device = getattr(keys, "device", "cpu")
        sample = take(keys, sample_of(len(keys), n_clusters, seed), device).float()
        self.centroids = F.normalize(kmeans(F.normalize(sample), n_clusters, seed=seed)[0])          # (C, d)
        bucket = nearest(keys, self.centroids)[1]
        self.count = torch.bincount(bucket, minlength=len(self.centroids))
        self.start = self.count.cumsum(0) - self.count
        self.id = bucket.argsort(stable=True)                                       # (N,) bucket after bucket
        self.keys = [take(keys, id, device).T.contiguous()                           # C of (d, count)
                     for id in self.id.split(self.count.tolist())]
        if key_passage is not None:
            key_passage = take(key_passage, slice(None), device)
            self.passage, self.sorted_passage = key_passage[self.id], key_passage.sort().values

    @torch.no_grad()
    def search(self, queries, k, n_search, query_passage=None):
        """The k best keys in each query's n_search best buckets: queries [Q, d] -> scores, ids [Q, k]."""
        Q, device = len(queries), queries.device
        best = torch.full((Q, k), NOTHING, device=device)
        queries = queries.float()
        probe = dot(queries, self.centroids).topk(min(n_search, len(self.centroids))).indices  # (Q, n_search)
        n_scores = int(self.count[probe].sum())
        if n_scores == 0 or k == 0:
            return unpack(best)
        if n_scores > SCORES and Q > 1:
            return in_parts(lambda q, p: self.search(q, k, n_search, p), -(-Q // 2), queries, query_passage)

        # A row of scores for each (query, bucket it looks into), by bucket: read once, for all who ask.
        bucket, order = probe.view(-1).sort(stable=True)                             # (R,)
        query = order // probe.shape[1]
        queries = queries[query]                                                     # (R, d)
        width = -(-self.count // BLOCK) * BLOCK                                    # rows end on a whole block
        scores = torch.empty(int(width[bucket].sum()), device=device)                # row after row
        row = done = 0
        n_rows = torch.bincount(bucket, minlength=len(width))
        for keys, n, w in zip(self.keys, n_rows.tolist(), width.tolist()):
            if n:
                out = scores[done:done + n * w].view(n, w)
                torch.mm(queries[row:row + n], keys.float(), out=out[:, :keys.shape[1]])
                out[:, keys.shape[1]:] = -INF
                row, done = row + n, done + n * w

        # As in exact_topk: first the best of each block of b; b such that a query has 4 k to 8 k of them.
        b = BLOCK
        while b > 1 and n_scores < 4 * k * Q * b:
            b //= 2
        scores = scores.view(-1, b)                                                  # (B, b)
        block_best = scores.amax(1)
        row, place = ragged(width[bucket] // b)                           # (B,) each block's row, place in it
        before = (width[probe].cumsum(1) - width[probe]).view(-1)[order] // b  # (R,) its blocks before
        wide = torch.full((Q, int(width[probe].sum(1).max()) // b), -INF, device=device)
        wide[query[row], before[row] + place] = block_best                           # (Q, blocks of a query)
        rank = torch.full((Q, 1), k, device=device)
        if query_passage is not None:   # so many blocks may owe their best to its own passage
            query_passage = query_passage.masked_fill(query_passage < 0, -2)
            rank += (torch.searchsorted(self.sorted_passage, query_passage, right=True)
                     - torch.searchsorted(self.sorted_passage, query_passage))[:, None]
        bar = F.pad(wide.topk(min(wide.shape[1], int(rank.max()))).values, (0, 1), value=-INF)
        bar = bar.gather(1, (rank - 1).clamp(max=bar.shape[1] - 1))[:, 0]
        bar = bar.nextafter(torch.full_like(bar, -INF))[query]                       # (R,)

        hit = (block_best > bar[row]).nonzero()[:, 0]
        scores, row, place = scores[hit], row[hit], place[hit]
        i, j = (scores > bar[row, None]).nonzero(as_tuple=True)
        scores, row, place = scores[i, j], row[i], place[i] * b + j
        query, slot = query[row], self.start[bucket[row]] + place
        if query_passage is not None:
            allowed = self.passage[slot] != query_passage[query]
            query, scores, slot = query[allowed], scores[allowed], slot[allowed]
        return unpack(keep_best(best, query, pack(scores, self.id[slot])))


# ---- several processes

bytes_sent = {}         # what for -> bytes that this process has sent to others; for whoever counts to clear


def rank_and_size():
    """(which process this is, how many there are): (0, 1) when torch.distributed is not initialised."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def sum_over_processes(x, device="cpu"):
    """The sum over all processes of a number or tensor, without gradient."""
    x = torch.as_tensor(x, device=device).detach().clone()
    if rank_and_size()[1] > 1:
        dist.all_reduce(x)
    return x


def barrier():
    if rank_and_size()[1] > 1:
        dist.barrier()


def sum_gradients(parameters):
    """Adds up the gradients of all processes, as one message. Every loss is this process's share of a mean over
    all processes, so the sum is the gradient of the whole batch."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if rank_and_size()[1] > 1 and grads:
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        count_sent("gradients", flat.numel() * flat.element_size())
        for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads])):
            grad.copy_(summed.view_as(grad))


def count_sent(what, n_bytes):
    bytes_sent[what] = bytes_sent.get(what, 0) + n_bytes


def gather_counts(n, device):
    """Everybody's n, a list."""
    size = rank_and_size()[1]
    counts = torch.empty(size, dtype=torch.int64, device=device)
    dist.all_gather(list(counts.split(1)), torch.tensor([n], device=device))
    count_sent("lengths", 8 * (size - 1))
    return counts.tolist()


class Gather(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x):
        size = rank_and_size()[1]
        ctx.counts = gather_counts(len(x), x.device)
        padded = x.new_zeros(max(ctx.counts), *x.shape[1:])  # all_gather wants equal shapes: pad, gather, cut
        padded[:len(x)] = x
        parts = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(parts, padded)
        count_sent("gather", padded.nbytes * (size - 1))
        return torch.cat([part[:n] for part, n in zip(parts, ctx.counts)])

    @staticmethod
    def backward(ctx, grad):
        rank, size = rank_and_size()
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)                                        # everybody used every row
        count_sent("gather", grad.nbytes * (size - 1))
        return grad.split(ctx.counts)[rank]


def gather(x):
    """x [n, …] of all processes, one after the other: [sum of n, …]. n may differ and be 0. Differentiable: a
    row's gradient is the sum of what all processes have for it."""
    return Gather.apply(x) if rank_and_size()[1] > 1 else x


def exchange(what, x, counts, back=None):
    """Sends the first counts[0] rows of x to process 0, the next counts[1] to process 1, …; returns the rows
    received, in the order of their senders, and how many each sent. back: these numbers, where known."""
    rank, size = rank_and_size()
    if back is None:
        back = torch.empty(size, dtype=torch.int64, device=x.device)
        dist.all_to_all_single(back, torch.tensor(counts, device=x.device))
        back = back.tolist()
        count_sent("lengths", 8 * (size - 1))
    received = x.new_empty(sum(back), *x.shape[1:])
    dist.all_to_all_single(received, x.contiguous(), back, counts)
    count_sent(what, x[:1].nbytes * (len(x) - counts[rank]))
    return received, back


@torch.no_grad()
def sharded_topk(search, queries, k, k_shard, query_passage=None, n_local=None):
    """The k best, for this process's queries, of the k_shard best in every process's shard (appendix C.1).

    search(queries, k_shard, query_passage) -> scores, ids: a search of this process's own n_local keys.
    queries [Q, d], query_passage [Q]: Q may differ between processes. Returns scores [Q, k], ids [Q, k]; ids go
    on from shard to shard. Exact if k_shard = k; with less, what a shard has beyond its k_shard best is lost.
    "Without a second top-k" (app. C.1.4, entity prediction) is k = k_shard × processes.
    """
    rank, size = rank_and_size()
    Q = len(queries)
    if size == 1:
        scores, ids = search(queries, k_shard, query_passage)
    else:
        counts = gather_counts(Q, queries.device)
        offset = sum(gather_counts(n_local, queries.device)[:rank])
        everyone = None if query_passage is None else gather(query_passage)
        scores, ids = search(gather(queries), k_shard, everyone)
        ids = torch.where(ids < 0, ids, ids + offset)                              # (queries of all, k_shard)
        scores, ids = (exchange("candidates", x, counts, [Q] * size)[0].view(size, Q, k_shard).transpose(0, 1)
                       .reshape(Q, size * k_shard) for x in (scores, ids))
    missing = max(0, k - scores.shape[1])
    scores, ids = F.pad(scores, (0, missing), value=-INF), F.pad(ids, (0, missing), value=-1)
    scores, order = scores.sort(dim=1, descending=True, stable=True)       # stable: equal scores by rising id
    return scores[:, :k], ids.gather(1, order[:, :k])


@torch.no_grad()
def fetch(ids, tables):
    """Rows of sharded tables for ids [Q, k] of `sharded_topk`: a list of tensors [Q, k, …], zeros for id -1.

    tables: this process's shards, tensors or memory maps, all of one length. A process asks once for a row
    that it needs, however often it needs it, and nothing else travels.
    """
    rank, size = rank_and_size()
    chosen = ids >= 0
    if size == 1:
        found = [take(table, ids[chosen], ids.device) for table in tables]
    else:
        start = torch.tensor([0, *gather_counts(len(tables[0]), ids.device)], device=ids.device).cumsum(0)
        wanted, inverse = ids[chosen].unique(return_inverse=True)                   # sorted, hence by process
        owner = torch.searchsorted(start, wanted, right=True) - 1
        counts = torch.bincount(owner, minlength=size).tolist()
        asked, asked_counts = exchange("ids", wanted, counts)
        asked = asked - start[rank]
        found = [exchange("rows", take(table, asked, ids.device), asked_counts, counts)[0][inverse]
                 for table in tables]
    filled = [rows.new_zeros(*ids.shape, *rows.shape[1:]) for rows in found]
    for table, rows in zip(filled, found):
        table[chosen] = rows
    return filled
