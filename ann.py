"""Search in the mention memory (§2.2.2, appendix C): the k keys with the largest dot product with a query.

    queries [Q, d] · keys [N, d]  ->  scores [Q, k], ids [Q, k]

in three forms, each of which can stand in for the others:

    exact_topk       appendix C.1.1: every query against every key, a tile of [Q, chunk] scores at a time
    BucketedIndex    appendix C.1.2: k-means buckets, only the n_search most promising ones for each query
    sharded_topk     appendix C.1:   every process searches its own shard for the queries of all, then a second top-k

All return scores by falling value, equal ones by rising id (a bucketed search may lose the order of ids between
equal scores at place k), never an entry of the query's own passage, and fill what is missing with score -inf and
id -1.  Nothing here carries a gradient except `gather`.  A `passage` of -1 belongs to no passage and excludes nothing.
The last part holds all the torch.distributed code of the project; without an initialised process group
each function there is its plain local self.
"""
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

INF = float("inf")
BLOCK = 32          # keys whose scores are first looked at together
TILE = 2 ** 20
QUERIES = 1024
SCORES = 2 ** 25



# ---------------------------------------------------------------------------------------- exact

def rows(table, index, device):
    """Rows of a tensor or a numpy array (a memory map, say) as a tensor on `device`; index: a slice or int64 ids."""
    if isinstance(table, torch.Tensor):
        return table[index].to(device)
    if isinstance(index, torch.Tensor):
        index = index.cpu().numpy()
    return torch.from_numpy(np.array(table[index])).to(device)     # a copy: only these rows leave the disk


def pack(score, id):
    """One int64 that orders like (score, then lower id): a single topk of these sorts by both and is never arbitrary."""
    bits = (score + 0.0).view(torch.int32)                          # + 0.0 makes -0.0 and 0.0 equal
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32) + (0x7FFFFFFF - id)


def unpack(packed):
    bits = (packed >> 32).int()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32), 0x7FFFFFFF - (packed & 0xFFFFFFFF)


NOTHING = (int(np.float32(-INF).view(np.int32)) ^ 0x7FFFFFFF) << 32      # pack(-inf, 0x7FFFFFFF): what is missing


def ragged(count):
    """For rows of count[r] things, one row after the other: the row of each thing, its place in the row."""
    row = torch.arange(len(count), device=count.device).repeat_interleave(count)
    return row, torch.arange(len(row), device=count.device) - (count.cumsum(0) - count)[row]


def keep_best(best, query, packed):
    """The k best of best [Q, k] and the candidates, of which packed[i] belongs to query[i]."""
    Q, k = best.shape
    count = torch.bincount(query, minlength=Q)
    row, place = ragged(count)
    wide = torch.full((Q, k + int(count.max())), NOTHING, device=best.device)            # (Q, k + most candidates)
    wide[:, :k] = best
    wide[row, k + place] = packed[query.argsort()]
    return wide.topk(k).values


@torch.no_grad()
def exact_topk(queries, keys, k, query_passage=None, key_passage=None):
    """The k best of all keys for every query (appendix C.1.1, without its approximation).

    queries [Q, d] on any device; keys [N, d] float32, float16 or bfloat16, a tensor or a numpy memory map that need
    not fit in memory; query_passage [Q], key_passage [N] integers.  Returns scores [Q, k] float32, ids [Q, k] int64.
    """
    Q, N, device = len(queries), len(keys), queries.device
    if Q > QUERIES:
        parts = [exact_topk(queries[i:i + QUERIES], keys, k,
                            None if query_passage is None else query_passage[i:i + QUERIES], key_passage)
                 for i in range(0, Q, QUERIES)]
        return tuple(torch.cat(part) for part in zip(*parts))
    best = torch.full((Q, k), NOTHING, device=device)
    if Q == 0 or k == 0:
        return finish(best)
    if query_passage is not None:
        query_passage = query_passage.masked_fill(query_passage < 0, -2)     # -2: no key has it
    queries_T = queries.float().T                                            # (d, Q)
    bar = torch.full((Q,), -INF, device=device)         # what a score must exceed: the k-th best so far
    small = min(32768, max(TILE // Q, 1024)) // BLOCK * BLOCK
    large = 8192
    tile = torch.empty(max(small, large), Q, device=device)
    found, n_found, first = [], 0, 0
    while first < N:
        keys_here = rows(keys, slice(first, first + (small if first else large)), device).float()
        n = len(keys_here)
        blocks = -(-n // BLOCK)
        scores = tile[:blocks * BLOCK]                                       # (chunk, Q): keys first is the faster way
        torch.mm(keys_here, queries_T, out=scores[:n])
        scores[n:] = -INF
        if first == 0 and query_passage is not None:
            scores[:n].masked_fill_(rows(key_passage, slice(n), device)[:, None] == query_passage, -INF)
        # We can afford to read a tile once, so we take the best of each block and look only into blocks above the bar.
        scores = scores.view(blocks, BLOCK, Q)
        block_best = scores.amax(1)                                          # (blocks, Q)
        if first == 0 and blocks >= k:      # k blocks hold k scores at least as good as the k-th best block
            bar = torch.nextafter(block_best.T.contiguous().topk(k).values[:, -1], bar)
        block, query = (block_best > bar).nonzero(as_tuple=True)
        found.append((query, scores[block, :, query], first + block * BLOCK))
        n_found += len(query)
        first += n
        if n_found > Q * k or first >= N:
            query, score, id = (torch.cat(x) for x in zip(*found))           # (found,) (found, BLOCK) (found,)
            i, j = (score > bar[query, None]).nonzero(as_tuple=True)
            query, score, id = query[i], score[i, j], id[i] + j
            if query_passage is not None:
                allowed = rows(key_passage, id, device) != query_passage[query]
                query, score, id = query[allowed], score[allowed], id[allowed]
            if len(query):
                best = keep_best(best, query, pack(score, id))
                bar = torch.maximum(bar, unpack(best[:, -1])[0])
            found, n_found = [], 0
    return finish(best)


def finish(best):
    scores, ids = unpack(best)
    return scores, ids.masked_fill_(scores == -INF, -1)


# ---------------------------------------------------------------------------------------- bucketed

def nearest(points, centroids):
    """The nearest centroid of each point by Euclidean distance: squared distance [n], cluster [n]."""
    half = centroids.square().sum(1) / 2
    distance = torch.empty(len(points), device=centroids.device)
    cluster = torch.empty(len(points), dtype=torch.int64, device=centroids.device)
    for i in range(0, len(points), 4096):
        x = rows(points, slice(i, i + 4096), centroids.device).float()
        best, cluster[i:i + 4096] = torch.addmm(half, x, centroids.T, beta=-1).max(1)     # x·c - |c|²/2
        distance[i:i + 4096] = x.square().sum(1) - 2 * best
    return distance.clamp_(min=0), cluster


def fill_empty(distance, cluster, n_clusters):
    """Gives every empty cluster the point that is farthest from its centroid, the only point of a cluster excepted;
    changes `cluster`, returns {cluster: point}."""
    count, moved = torch.bincount(cluster, minlength=n_clusters), {}
    for empty in (count == 0).nonzero()[:, 0].tolist():
        while count[empty] == 0:
            point = int(distance.argmax())
            distance[point] = -1
            if count[cluster[point]] > 1:
                count[cluster[point]] -= 1
                cluster[point], count[empty], moved[empty] = empty, 1, point
    return moved


def sample_of(N, n_clusters, seed):
    """At most 256 points a cluster, chosen by seed: their indices in order."""
    return torch.randperm(N, generator=torch.Generator().manual_seed(seed))[:256 * n_clusters].sort().values


@torch.no_grad()
def kmeans(points, n_clusters, n_iters=10, seed=0, init=None):
    """Lloyd's k-means: centroids [C, d], assignment [N] (int64) of each point to its nearest one; no cluster is empty.

    points [N, d], a tensor or a memory map; C = min(n_clusters, N).  Centroids are learnt on at most 256 points a
    cluster, sampled by `seed`, and start at points of the sample or at init [C, d]; the assignment is of all points.
    """
    N, device = len(points), points.device if isinstance(points, torch.Tensor) else None
    C = min(n_clusters, N)
    generator = torch.Generator().manual_seed(seed)
    x = rows(points, sample_of(N, C, seed), device).float()
    centroids = x[torch.randperm(len(x), generator=generator)[:C].to(x.device)] if init is None else init.float()
    last = None
    for _ in range(n_iters):
        distance, cluster = nearest(x, centroids)
        fill_empty(distance, cluster, C)
        if last is not None and torch.equal(cluster, last):
            break
        last = cluster
        # Summed in float64: a GPU adds in any order, which then drowns in the rounding.
        total = torch.zeros(C, x.shape[1], dtype=torch.float64, device=x.device).index_add_(0, cluster, x.double())
        centroids = (total / torch.bincount(cluster, minlength=C)[:, None]).float()
    distance, cluster = nearest(points, centroids)
    for empty, point in fill_empty(distance, cluster, C).items():
        centroids[empty] = rows(points, slice(point, point + 1), x.device)[0].float()
    return centroids, cluster


class BucketedIndex:
    """Keys in buckets by direction; a query looks only into its n_search best ones (appendix C.1.2).

    keys [N, d] are copied bucket after bucket.  k-means runs on them at unit length, and a key's bucket as well as a
    query's are chosen by the dot product with the centroids' directions: the largest dot product is what is asked for,
    and centroids with their lengths would draw every query to the same few.
    """

    def __init__(self, keys, n_clusters, key_passage=None, seed=0):
        device = keys.device if isinstance(keys, torch.Tensor) else None
        sample = rows(keys, sample_of(len(keys), n_clusters, seed), device).float()
        self.centroids = F.normalize(kmeans(F.normalize(sample), n_clusters, seed=seed)[0])              # (C, d)
        bucket = nearest(keys, self.centroids)[1]
        self.count = torch.bincount(bucket, minlength=len(self.centroids))
        self.start = self.count.cumsum(0) - self.count
        self.id = bucket.argsort(stable=True)                                            # (N,) bucket after bucket
        self.keys = [rows(keys, id, device).T.contiguous() for id in self.id.split(self.count.tolist())]
        if key_passage is not None:
            key_passage = rows(key_passage, slice(None), device)
            self.passage, self.sorted_passage = key_passage[self.id], key_passage.sort().values

    @torch.no_grad()
    def search(self, queries, k, n_search, query_passage=None):
        """The k best keys in each query's n_search best buckets: scores [Q, k], ids [Q, k].
        queries [Q, d], query_passage [Q]."""
        Q, device = len(queries), queries.device
        queries = queries.float()
        probe = (queries @ self.centroids.T).topk(min(n_search, len(self.centroids))).indices      # (Q, n_search)
        n_scores = int(self.count[probe].sum())
        if Q > 1 and n_scores > SCORES:
            half = Q // 2
            parts = [self.search(queries[part], k, n_search, None if query_passage is None else query_passage[part])
                     for part in (slice(half), slice(half, Q))]
            return tuple(torch.cat(part) for part in zip(*parts))
        best = torch.full((Q, k), NOTHING, device=device)
        if n_scores == 0 or k == 0:
            return finish(best)
        # One row for each (query, bucket it looks into), sorted by bucket: a bucket is read once, for all who ask.
        bucket, order = probe.view(-1).sort(stable=True)                                 # (R,)
        query = order // probe.shape[1]
        queries = queries[query]                                                         # (R, d)
        width = -(-self.count // BLOCK) * BLOCK                                          # whole blocks, filled with -inf
        scores = torch.empty(int(width[bucket].sum()), device=device)                    # row after row
        row = done = 0
        for keys, n, w in zip(self.keys, torch.bincount(bucket, minlength=len(width)).tolist(), width.tolist()):
            out = scores[done:done + n * w].view(n, w)
            if n:
                torch.mm(queries[row:row + n], keys.float(), out=out[:, :keys.shape[1]])
                out[:, keys.shape[1]:] = -INF
            row, done = row + n, done + n * w
        # As in exact_topk, only the best of each block is looked at first; b such that a query has some 4 k to 8 k blocks.
        b = BLOCK
        while b > 1 and n_scores < 4 * k * Q * b:
            b //= 2
        scores = scores.view(-1, b)
        block_best = scores.amax(1)
        row, place = ragged(width[bucket] // b)                                          # of each block
        before = (width[probe].cumsum(1) - width[probe]).view(-1)[order] // b            # blocks in the query's other rows
        wide = torch.full((Q, int(width[probe].sum(1).max()) // b), -INF, device=device)
        wide[query[row], before[row] + place] = block_best
        rank = torch.full((Q, 1), k, device=device)
        if query_passage is not None:       # up to `own` blocks may owe their best to the query's own passage
            query_passage = query_passage.masked_fill(query_passage < 0, -2)
            own = [torch.searchsorted(self.sorted_passage, query_passage, right=right) for right in (True, False)]
            rank[:, 0] += own[0] - own[1]
        top = F.pad(wide.topk(min(wide.shape[1], int(rank.max()))).values, (0, 1), value=-INF)
        bar = top.gather(1, (rank - 1).clamp(max=top.shape[1] - 1))[:, 0]
        bar = bar.nextafter(torch.full_like(bar, -INF))[query]                           # (R,)
        hit = (block_best > bar[row]).nonzero()[:, 0]
        scores, row, place = scores[hit], row[hit], place[hit]
        i, j = (scores > bar[row, None]).nonzero(as_tuple=True)
        scores, row = scores[i, j], row[i]
        slot = self.start[bucket[row]] + place[i] * b + j
        query = query[row]
        if query_passage is not None:
            allowed = self.passage[slot] != query_passage[query]
            query, scores, slot = query[allowed], scores[allowed], slot[allowed]
        return finish(keep_best(best, query, pack(scores, self.id[slot])))


# ---------------------------------------------------------------------------------------- several processes

bytes_sent = {}         # what for -> bytes this process sent to others, since the dictionary was last cleared


def rank_and_size():
    """(number of this process, number of processes); (0, 1) when torch.distributed is not initialised."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def total(x, device="cpu"):
    """The sum over all processes of a number or tensor, without gradient."""
    x = torch.as_tensor(x, device=device).detach().clone()
    if rank_and_size()[1] > 1:
        dist.all_reduce(x)
    return x


def sum_gradients(parameters):
    """Adds up the gradients of all processes, as one message. Every loss is this process's share of a mean over all
    processes, so the sum is the gradient of the whole batch."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if rank_and_size()[1] > 1 and grads:
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        count_bytes("gradients", flat.numel() * flat.element_size())
        for g, total_g in zip(grads, flat.split([g.numel() for g in grads])):
            g.copy_(total_g.view_as(g))


def barrier():
    if rank_and_size()[1] > 1:
        dist.barrier()


def count_bytes(what, n):
    bytes_sent[what] = bytes_sent.get(what, 0) + n


def lengths(n, device):
    """Everybody's n, as a list."""
    size = rank_and_size()[1]
    counts = torch.empty(size, dtype=torch.int64, device=device)
    dist.all_gather(list(counts.split(1)), torch.tensor([n], device=device))
    count_bytes("lengths", 8 * (size - 1))
    return counts.tolist()


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        rank, size = rank_and_size()
        ctx.counts = counts = lengths(len(x), x.device)
        padded = x.new_zeros(max(counts), *x.shape[1:])         # collectives want equal shapes: pad, gather, cut
        padded[:len(x)] = x
        parts = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(parts, padded)
        count_bytes("gather", padded.nbytes * (size - 1))
        return torch.cat([part[:n] for part, n in zip(parts, counts)])

    @staticmethod
    def backward(ctx, grad):
        rank, size = rank_and_size()
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)                                   # every process used all rows: their gradients add up
        count_bytes("gather", grad.nbytes * (size - 1))
        return grad.split(ctx.counts)[rank]


def gather(x):
    """x [n, ...] of every process, one after the other -> [sum of n, ...]; n may differ, 0 included.  Differentiable:
    the gradient of a row is summed over processes, so that W processes that each take the loss of the whole batch
    divided by W get the gradient of one."""
    return Gather.apply(x) if rank_and_size()[1] > 1 else x


def exchange(x, counts, back=None):
    """Sends the first counts[0] rows of x to process 0, the next counts[1] to process 1, …  -> (the rows received, in the
    order of their senders; how many came from each).  back: those numbers, where they are known already."""
    rank, size = rank_and_size()
    if back is None:
        back = torch.empty(size, dtype=torch.int64, device=x.device)
        dist.all_to_all_single(back, torch.tensor(counts, device=x.device))
        back = back.tolist()
        count_bytes("lengths", 8 * (size - 1))
    received = x.new_empty(sum(back), *x.shape[1:])
    dist.all_to_all_single(received, x.contiguous(), back, counts)
    count_bytes("exchange", x[:1].nbytes * (len(x) - counts[rank]))
    return received, back


@torch.no_grad()
def sharded_topk(search, queries, k, k_shard, query_passage=None, n_local=None):
    """The k best of the k_shard best of every process's shard, for this process's own queries (appendix C).

    search(queries, k_shard, query_passage) -> scores, local ids: any search of this process's n_local keys.
    queries [Q, d], query_passage [Q]: each process its own, Q may differ.  Returns scores [Q, k], ids [Q, k]; ids count
    through the shards in the order of the processes.  k_shard = k is exact; with less, a shard that holds more than
    k_shard of the k best loses the rest.  No second top-k (entity prediction): k = k_shard times the processes.
    """
    rank, size = rank_and_size()
    Q = len(queries)
    if size == 1:
        scores, ids = search(queries, k_shard, query_passage)
    else:
        counts = lengths(Q, queries.device)
        shard_start = sum(lengths(n_local, queries.device)[:rank])
        everyone = None if query_passage is None else gather(query_passage)
        scores, ids = search(gather(queries), k_shard, everyone)                # (queries of all, k_shard)
        ids = torch.where(ids < 0, ids, ids + shard_start)
        back = [Q] * size
        scores, ids = (exchange(x, counts, back)[0].view(size, Q, k_shard).transpose(0, 1).reshape(Q, size * k_shard)
                       for x in (scores, ids))
    missing = max(0, k - scores.shape[1])
    scores = F.pad(scores, (0, missing), value=-INF)
    ids = F.pad(ids, (0, missing), value=-1)
    scores, order = scores.sort(dim=1, descending=True, stable=True)            # stable: equal scores stay by rising id
    return scores[:, :k], ids.gather(1, order[:, :k])


@torch.no_grad()
def fetch(ids, tables):
    """Rows of sharded tables for the global ids [Q, k] of `sharded_topk`: a list of tensors [Q, k, …], zeros where the
    id is -1.  tables: this process's shards (tensors or memory maps) with equal first dimension.  Every process asks
    once for each row it chose, and only those rows travel."""
    size = rank_and_size()[1]
    found = ids >= 0
    if size == 1:
        parts = [rows(table, ids[found], ids.device) for table in tables]
    else:
        start = torch.tensor([0] + lengths(len(tables[0]), ids.device), device=ids.device).cumsum(0)
        wanted, inverse = ids[found].unique(return_inverse=True)                # sorted, hence grouped by process
        owner = torch.searchsorted(start, wanted, right=True) - 1
        counts = torch.bincount(owner, minlength=size).tolist()
        asked, asked_counts = exchange(wanted, counts)
        asked = asked - start[rank_and_size()[0]]
        parts = [exchange(rows(table, asked, ids.device), asked_counts, counts)[0][inverse] for table in tables]
    for i, part in enumerate(parts):
        parts[i] = part.new_zeros(*ids.shape, *part.shape[1:])
        parts[i][found] = part
    return parts
