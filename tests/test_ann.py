"""Checks ann.py against numpy: python -m pytest -q tests/test_ann.py"""
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import ann
from memory import MentionMemory
from traffic import counted

ROOT = Path(__file__).resolve().parent.parent

def small_integers(Q, N, d=16, n_passages=25, seed=0):
    """Queries, keys and passages (-1: none). Scores are exact in every dtype, with many ties."""
    rng = np.random.default_rng(seed)
    queries, keys = (rng.integers(-3, 4, (n, d)).astype(np.float32) for n in (Q, N))
    passages = (rng.integers(-1, n_passages, n) for n in (Q, N))
    return tuple(torch.from_numpy(x) for x in (queries, keys, *passages))

def random_numbers(Q, N, d=8):
    """Queries and keys without ties between their scores, and passages."""
    generator = torch.Generator().manual_seed(0)
    return *(torch.randn(n, d, generator=generator) for n in (Q, N)), *small_integers(Q, N)[2:]

def brute_force(queries, keys, k, query_passage=None, key_passage=None):
    """The k best (scores, ids) by a full float64 sort, ties by ascending id. Omits scores not finite in float32."""
    scores = queries.double().numpy() @ keys.double().numpy().T
    scores[~(np.abs(scores) < 3.4e38)] = -np.inf
    if query_passage is not None:
        own = query_passage.numpy()[:, None] == key_passage.numpy()[None]
        scores[own & (query_passage.numpy()[:, None] >= 0)] = -np.inf
    scores = np.pad(scores, ((0, 0), (0, k)), constant_values=-np.inf)
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    scores = np.take_along_axis(scores, ids, 1)
    return scores, np.where(np.isinf(scores), -1, ids)

def check(found, expected):
    scores, ids = found
    assert scores.dtype == torch.float32 and ids.dtype == torch.int64
    assert np.array_equal(ids.numpy(), expected[1])
    assert np.allclose(scores.numpy(), expected[0], rtol=1e-5, atol=1e-5)

@pytest.mark.parametrize("make, Q, N, k", [
    (small_integers, 7, 50, 5), (small_integers, 3, 4, 9), (small_integers, 5, 0, 3), (small_integers, 0, 50, 3),
    (small_integers, 5, 50, 0), (small_integers, 30, 9000, 128), (small_integers, 3, 70001, 40),
    (small_integers, 1030, 300, 7), (small_integers, 300, 12000, 2),
    (random_numbers, 5, 300, 20), (random_numbers, 5, 300, 299), (random_numbers, 5, 300, 300)])
def test_exact_topk_is_a_full_sort_with_equal_scores_by_rising_id(make, Q, N, k):
    queries, keys, query_passage, key_passage = make(Q, N)
    check(ann.exact_topk(queries, keys, k), brute_force(queries, keys, k))
    check(ann.exact_topk(queries, keys, k, query_passage, key_passage),
          brute_force(queries, keys, k, query_passage, key_passage))

class AsOnGpu(torch.Tensor):
    """A CPU tensor for which exact_topk takes its GPU path."""
    is_cuda = True

@pytest.mark.parametrize("Q, N, k", [(7, 50, 5), (3, 4, 9), (30, 9000, 128), (5, 1300, 1300)])
def test_the_path_for_gpus_finds_what_a_full_sort_finds(Q, N, k, monkeypatch):
    """Checks scores and ids, but not speed, on a CPU, with ties, NaN keys, and one or several tiles."""
    queries, keys, query_passage, key_passage = small_integers(Q, N)
    keys[::7] = torch.nan
    expected = brute_force(queries, keys, k, query_passage, key_passage)
    for tile in (ann.GPU_TILE, 512 * Q):
        monkeypatch.setattr(ann, "GPU_TILE", tile)
        found = ann.exact_topk(queries.as_subclass(AsOnGpu), keys, k, query_passage, key_passage)
        check([x.as_subclass(torch.Tensor) for x in found], expected)

@pytest.mark.parametrize("order", ["as made", "rising", "falling", "all equal", "all zero", "huge"])
def test_one_tile_or_several_find_the_best_in_any_order_of_the_keys(order, monkeypatch):
    """Covers falling order, where the k best are in the first tile and the bar guessed from that tile is too high."""
    queries, keys, query_passage, key_passage = small_integers(30, 20000)
    rising = keys[keys.sum(1).argsort()]
    keys = {"as made": keys, "rising": rising, "falling": rising.flip(0), "all equal": torch.ones_like(keys),
            "all zero": torch.zeros_like(keys), "huge": keys * 2.0 ** 60}[order]
    if order in ("rising", "falling"):
        queries = queries.abs()
    for k, tile in ((50, ann.CPU_TILE), (40, 2 ** 18), (40, 2 ** 15), (1500, 2 ** 15)):
        monkeypatch.setattr(ann, "CPU_TILE", tile)
        check(ann.exact_topk(queries, keys, k, query_passage, key_passage),
              brute_force(queries, keys, k, query_passage, key_passage))

def test_own_passage_never_takes_a_slot_and_nothing_allowed_is_minus_one():
    queries, keys, _, _ = small_integers(20, 10000)
    key_passage = torch.full((10000,), 7)
    key_passage[brute_force(queries, keys, 20)[1][0]] = 3
    # The queries' passage contains query 0's 20 best keys, then nearly all keys, then all keys.
    for own, key_passage in ((3, key_passage), (7, key_passage), (7, torch.full((10000,), 7))):
        passage = torch.full((20,), own)
        expected = brute_force(queries, keys, 20, passage, key_passage)
        check(ann.exact_topk(queries, keys, 20, passage, key_passage), expected)
        check(ann.BucketedIndex(keys, 10, key_passage).search(queries, 20, 10, passage), expected)
    assert (expected[1] == -1).all()
    check(ann.exact_topk(queries, keys[:9], 4, passage, key_passage[:9]), [x[:, :4] for x in expected])     # few scores

@pytest.mark.parametrize("N", [40, 900, 40000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scores_that_are_not_finite_count_as_not_there(N, dtype):
    queries, keys, query_passage, key_passage = small_integers(20, N)
    queries[11] = torch.nan                             # finds nothing, and does not affect other queries
    bad = torch.randperm(N, generator=torch.Generator().manual_seed(0))[:N // 10].split(3)
    keys = keys * 1000 if dtype == torch.float32 else keys
    for i, rows in enumerate(bad):
        keys[rows, i % 16] = [torch.nan, torch.inf, -torch.inf, 3e38][i % 4]
    keys = keys.to(dtype)                               # 3e38 overflows here (float16) or in the dot product (float32)
    expected = brute_force(queries, keys, 30, query_passage, key_passage)
    index = ann.BucketedIndex(keys, 8, key_passage)
    for found in (ann.plain_topk(queries, keys, 30, query_passage, key_passage),
                  ann.exact_topk(queries, keys, 30, query_passage, key_passage),
                  index.search(queries, 30, 8, query_passage)):
        check(found, expected)
    assert (expected[1][11] == -1).all() and (np.delete(expected[1], 11, 0) >= 0).any()

@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keys_are_searched_exactly(dtype):
    queries, keys, _, _ = random_numbers(50, 9000, 64)
    keys = keys.to(dtype)
    expected = brute_force(queries, keys, 30)
    check(ann.exact_topk(queries, keys, 30), expected)
    check(ann.BucketedIndex(keys, 8).search(queries, 30, 8), expected)

@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_keys_can_be_a_memory_map(tmp_path, dtype):
    queries, keys, query_passage, key_passage = small_integers(20, 20000)
    np.save(tmp_path / "keys.npy", keys.numpy().astype(dtype))
    mapped = np.load(tmp_path / "keys.npy", mmap_mode="c")
    expected = brute_force(queries, keys, 40, query_passage, key_passage)
    check(ann.exact_topk(queries, mapped, 40, query_passage, key_passage), expected)
    check(ann.BucketedIndex(mapped, 16, key_passage).search(queries, 40, 16, query_passage), expected)

MEMORY = """
import sys, resource, numpy as np, torch, ann
keys = np.load(sys.argv[1], mmap_mode="c")
queries = torch.randn(256, 128)
ann.exact_topk(queries, keys[:9000], 128)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ann.exact_topk(queries, keys, 128)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""

@pytest.mark.slow
def test_a_search_holds_a_tile_and_not_queries_times_keys(tmp_path):
    """Peak RAM grows by less than 120 MB. The keys take 51 MB on disk (102 MB in float32), all scores 205 MB."""
    rng = np.random.default_rng(0)
    np.save(tmp_path / "keys.npy", rng.standard_normal((200000, 128), dtype=np.float32).astype(np.float16))
    grown = subprocess.run([sys.executable, "-c", MEMORY, tmp_path / "keys.npy"], cwd=ROOT, check=True,
                           capture_output=True, text=True).stdout
    assert int(grown) * 1024 < 120e6

# ---- k-means and buckets

def test_kmeans_gives_the_golden_arrays():
    golden = np.load(Path(__file__).parent / "golden" / "kmeans.npz")
    points, init = torch.from_numpy(golden["in/observations"]), torch.from_numpy(golden["in/init_centroids"])
    for case in ("one_step", "out"):
        centroids, assignment = ann.kmeans(points, init, int(golden[f"{case}/steps"]))
        assert np.allclose(centroids.numpy(), golden[f"{case}/centroids"], atol=1e-5)
        assert np.array_equal(assignment.numpy(), golden[f"{case}/assignments"])
    assert np.array_equal(ann.nearest(points, init)[1].numpy(), golden["initial/assignments"])
    assert np.allclose(ann.nearest(points, init)[0].sqrt().numpy(), golden["initial/min_dist"], atol=1e-4)
    # The reference leaves a cluster empty, with a zero centroid; ours fills it.
    init = torch.from_numpy(golden["empty_cluster/in_init_centroids"])
    theirs = golden["empty_cluster/centroids_after_one_step"]
    ours = ann.kmeans(points, init, 1)[0].numpy()
    empty = (theirs == 0).all(1)
    assert empty.any() and not (ours == 0).all(1).any()

@pytest.mark.parametrize("points", [torch.ones(50, 3), torch.arange(12.0)[:, None] // 4,
                                    torch.cat([torch.zeros(1000, 2), torch.tensor([[1e4, 0.0]])])])
def test_kmeans_has_no_empty_cluster_and_no_nan(points):
    for n in (1, 3, 11, len(points)):
        order = torch.randperm(len(points), generator=torch.Generator().manual_seed(n))
        centroids, assignment = ann.kmeans(points, points[order[:n]], 5)
        assert centroids.shape == (n, points.shape[1]) and centroids.isfinite().all()
        assert sorted(set(assignment.tolist())) == list(range(n))

@pytest.mark.parametrize("k", [1, 10, 128, 3000, 3100])
def test_all_buckets_together_are_the_exact_search(k):
    queries, keys, query_passage, key_passage = small_integers(50, 3000)
    index = ann.BucketedIndex(keys, 20, key_passage)
    check(index.search(queries, k, 20), brute_force(queries, keys, k))
    check(index.search(queries, k, 99, query_passage),
          brute_force(queries, keys, k, query_passage, key_passage))

def test_a_few_buckets_hold_exactly_their_keys():
    queries, keys, query_passage, key_passage = small_integers(30, 2000)
    index = ann.BucketedIndex(keys, 25, key_passage)
    for n_search in (1, 3):
        probed = np.argsort(-(queries @ index.centroids.T).numpy(), axis=1)[:, :n_search]
        bucket = (keys @ index.centroids.T).argmax(1).numpy()
        scores, ids = index.search(queries, 60, n_search, query_passage)
        for q in range(30):
            inside = np.flatnonzero(np.isin(bucket, probed[q]))
            one = slice(q, q + 1)
            expected = brute_force(queries[one], keys[inside], 60, query_passage[one], key_passage[inside])
            expected_ids = [inside[i] if i >= 0 else -1 for i in expected[1][0]]
            assert ids[q].tolist() == expected_ids and np.array_equal(scores[q].numpy(), expected[0][0])

def test_where_many_keys_are_equal_no_bucket_that_is_searched_is_empty():
    keys = torch.eye(3).repeat_interleave(8, 0)
    index = ann.BucketedIndex(keys, 10)             # only 3 of the 24 keys are distinct
    for query in range(3):
        ids = index.search(keys[8 * query:8 * query + 1], 8, 1)[1]
        assert ids[0].tolist() == list(range(8 * query, 8 * query + 8))

def test_buckets_of_a_clustered_memory_find_most_of_the_best():
    generator = torch.Generator().manual_seed(0)
    entity = torch.randn(200, 32, generator=generator)
    keys = entity[torch.randint(200, (20000,), generator=generator)]
    keys = keys + 0.5 * torch.randn(20000, 32, generator=generator)
    keys *= 1 + torch.rand(20000, 1, generator=generator)       # lengths differ, as for real keys
    queries = entity[:100] + 0.3 * torch.randn(100, 32, generator=generator)
    index = ann.BucketedIndex(keys, 64)
    exact = ann.exact_topk(queries, keys, 20)[1]
    found = index.search(queries, 20, 8)[1]
    assert np.mean([np.isin(a, b).mean() for a, b in zip(exact, found)]) > 0.9

# ---- several processes

SHARDS = {1: [0, 500], 2: [0, 137, 500], 4: [0, 0, 137, 140, 500]}      # uneven, one empty, one smaller than k
QUERIES = {1: [0, 40], 2: [0, 40, 40], 4: [0, 7, 7, 39, 40]}                # uneven, some processes have none

def one_of_many(rank, size, file):
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    assert ann.rank_and_size() == (rank, size)
    queries, keys, query_passage, key_passage = small_integers(40, 500)
    a, b = SHARDS[size][rank:rank + 2]
    mine, n_rows = slice(*QUERIES[size][rank:rank + 2]), np.diff(SHARDS[size]).tolist()

    def search(queries, k, passage):
        return ann.exact_topk(queries, keys[a:b], k, passage, key_passage[a:b])

    def shards_best(k, k_shard):
        return ann.sharded_topk(search, queries[mine], k, k_shard, query_passage[mine], n_rows)

    # k_shard = k: the result of one process that searches the whole memory
    scores, ids = shards_best(20, 20)
    check((scores, ids), brute_force(queries[mine], keys, 20, query_passage[mine], key_passage))
    # k_shard < k: the k best of all shards' 3 best, up to all 3 * size candidates
    parts = [brute_force(queries[mine], keys[s:e], 3, query_passage[mine], key_passage[s:e])
             for s, e in zip(SHARDS[size], SHARDS[size][1:])]
    parts_ids = np.concatenate([np.where(i < 0, i, i + s) for (_, i), s in zip(parts, SHARDS[size])], 1)
    parts_scores = np.concatenate([s for s, _ in parts], 1)
    order = np.argsort(-parts_scores, axis=1, kind="stable")
    expected = np.take_along_axis(parts_scores, order, 1), np.take_along_axis(parts_ids, order, 1)
    for n in (size + 2, 3 * size):
        check(shards_best(n, 3), [x[:, :n] for x in expected])
    found = shards_best(3 * size + 1, 3)
    assert (found[1][:, -1] == -1).all() and np.array_equal(found[1][:, :-1].numpy(), expected[1])

    # MentionMemory raises k_shard until the processes offer k rows, even if some have few rows or none
    memory = MentionMemory(keys[a:b], keys[a:b], key_passage[a:b], key_passage[a:b], torch.arange(a, b))
    found = memory.retrieve(queries[mine], query_passage[mine], 20, 2).ids
    assert (found >= 0).all() and all(len(set(row)) == 20 for row in found.tolist())

    # fetch: rows have any dtype and shape, id -1 gives zeros, and a process receives each chosen row only once
    ids = ids.clone()
    ids[:, 5] = -1
    tables = [keys[a:b].half(), keys[a:b], key_passage[a:b]]
    with counted() as sent:
        fetched = ann.fetch(ids, tables)
    for rows, whole in zip(fetched, (keys.half(), keys, key_passage)):
        expected = whole[ids.clamp(min=0)]
        expected[ids < 0] = 0
        assert rows.dtype == whole.dtype and torch.equal(rows, expected)
    rows, = ann.fetch(torch.full((3, 2), -1), [keys[:0]])           # from an empty memory
    assert rows.shape == (3, 2, 16) and not rows.any()
    if size > 1:
        wanted = [None] * size
        dist.all_gather_object(wanted, ids[ids >= 0].unique().tolist())
        asked = sum(a <= i < b for process, w in enumerate(wanted) if process != rank for i in w)
        assert sent["rows"] == asked * (16 * 2 + 16 * 4 + 8)
        assert sent["ids"] == 8 * sum(not a <= i < b for i in wanted[rank])
        queries_of = [e - s for s, e in zip(QUERIES[size], QUERIES[size][1:])]
        with counted() as sent:
            shards_best(20, 2)
        assert sent["gather"] == max(queries_of) * (16 * 4 + 8) * (size - 1)
        assert sent["candidates"] == (40 - queries_of[rank]) * 2 * (4 + 8)

    # gather: the loss of the whole batch, divided by size on each process, gives the gradients of one process
    x = torch.linspace(-1, 1, 40 * 3).view(40, 3)
    weight = torch.linspace(0, 2, 40)[:, None]
    whole = x.clone().requires_grad_()
    (whole @ whole.T * weight).exp().sum().backward()
    part = x[mine].clone().requires_grad_()
    everything = ann.gather(part)
    assert torch.equal(everything, x)
    ((everything @ everything.T * weight).exp().sum() / size).backward()
    assert torch.allclose(part.grad, whole.grad[mine], rtol=1e-5)
    assert torch.equal(ann.gather(torch.arange(40)[mine] % 2 == 0), torch.arange(40) % 2 == 0)
    if size > 1:
        dist.destroy_process_group()

@pytest.mark.parametrize("size", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_shards_and_queries_of_uneven_processes_give_what_one_process_gives(size, tmp_path, monkeypatch):
    if size == 1:               # no process group; queries are searched 16 at a time
        monkeypatch.setattr(ann, "QUERIES", 16)
        one_of_many(0, 1, tmp_path / "init")
    else:
        mp.spawn(one_of_many, (size, tmp_path / "init"), size)
