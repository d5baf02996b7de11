"""The mention memory, which is a table of the linked mentions of a corpus (those whose entity is
known), and attention to this table (§2.1.2, §2.2.1).

    MemKey (N, d_K)   MemValue (N, d_V)   MemEnt (N,)         keys, values, entity
    passage and mention: where each row comes from in the corpus (N,)

    Query(m) = SpanEncodingLayer(H, (s, e))                                           eq. 6
    alpha_i  ∝ exp(Query(m) · MemKey(i)),  i in TopMem(Query(m))                      eq. 7
    Value(m) = sum_i alpha_i MemValue(i)                                              eq. 8
    M_s      = LayerNorm(H_s + W_U Value(m))                                          eq. 9

The classes BatchMemory (BATCH-TOME, §2.3), MentionMemory (TOME, §2.2), OwnValues (before retrieval
works), GivenMemory (teacher forcing) and EntityTable (a baseline) all have a method `attend`, which
returns a Retrieved. Only searches use the arguments k and k_shard of `attend`. M mentions attend to
N rows, and each mention retrieves K rows: usually the k best, or all N of a small memory. A row is
also called a memory. With several processes, each holds N rows of a MentionMemory, and ids number
the rows of all processes. The comments at data.Batch list what a corpus and a batch contain."""
import copy
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import ann
import data                     # its Corpus, its Batch, and functions for files
from encoder import SpanEncodingLayer, low_precision

PASSAGES_PER_SHARD = 8192       # here a shard is a set of files; in ann.py, one process's rows
BATCH_TOKENS = 8192             # maximum number of tokens, with padding, encoded at a time
ARRAYS = ("keys", "values", "entity", "passage", "mention")

class Retrieved(NamedTuple):
    """What M mentions retrieve: K memories each. After a search, the best come first; if fewer are
    found, the empty places have score -inf, id -1 and entity 0. attend_to_all returns all N rows,
    unsorted; an excluded row has score -inf but keeps its id and entity."""
    scores: torch.Tensor            # (M, K) query · key, with gradient unless given by GivenMemory
    ids: torch.Tensor               # (M, K) row numbers, counted over all processes
    entity: torch.Tensor            # (M, K) MemEnt
    weights: torch.Tensor = None    # (M, K) alpha of eq. 7; zeros if all memories are excluded
    value: torch.Tensor = None      # (M, d_V) eq. 8

def attention_weights(scores):
    """Softmax over the last dimension. If all scores are -inf, the weights are 0 instead of NaN."""
    none = scores.isneginf().all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(none, 0.0), dim=-1).masked_fill(none, 0.0)

def attend_to_all(query, memory, excluded):
    """Eq. 7 and 8 over all N rows of a memory small enough to need no search. query (M, d_K);
    excluded (M, N) or (N,): true where the weight must be 0. Returns a Retrieved with K = N."""
    scores = ann.dot(query, memory.keys).masked_fill(excluded, -torch.inf)      # (M, N)
    ids = torch.arange(len(memory.keys), device=query.device).expand_as(scores)
    alpha = attention_weights(scores)
    return Retrieved(scores, ids, memory.entity.expand_as(scores), alpha, alpha @ memory.values)

class BatchMemory:
    """Linked mentions of a batch as a memory (§2.3): N rows, gathered from all processes, with
    gradients to keys and values. It is useful because a batch has related passages (app. A.1)."""
    def __init__(self, keys, values, entity, passage):
        self.keys, self.values = ann.gather(keys), ann.gather(values)           # (N, d_K), (N, d_V)
        self.entity, self.passage = ann.gather(entity), ann.gather(passage)     # (N,)

    def attend(self, query, passage, k=None, k_shard=None):
        """A mention never attends to memories from its own passage (app. A)."""
        return attend_to_all(query, self, passage[:, None] == self.passage)

class OwnValues:
    """Used in the first part of stage batch-tome (train.BatchTOMEStage), when retrieval is random:
    whatever its query, each mention is given its own value, from the unmasked text. This gives the
    answer away on purpose, so that the layers above learn to read values. values (M, d_V)."""
    def __init__(self, values):
        self.values = values

    def attend(self, query, passage, k=None, k_shard=None):
        """A Retrieved that contains only weights (all 1) and value."""
        return Retrieved(None, None, None, query.new_ones(len(query), 1), self.values)

class EntityTable(nn.Module):
    """Entities as Experts (Févry et al. 2020), a primary baseline of the paper: a trained key and
    value per entity, not per mention. (With a single vector for both, as in the original, the model
    learned less here.) With --memory none, only eq. 10 uses the table. If no training passage links
    an entity, the table can only learn that this entity is never the answer. Row 0: no entity."""
    def __init__(self, config):
        super().__init__()
        self.keys = nn.Parameter(torch.randn(config.n_entities, config.key_dim) * 0.1)
        self.values = nn.Parameter(torch.randn(config.n_entities, config.value_dim) * 0.1)
        self.register_buffer("entity", torch.arange(config.n_entities), persistent=False)

    def attend(self, query, passage=None, k=None, k_shard=None):
        """Attends to all entities, whatever the passage."""
        return attend_to_all(query, self, self.entity == 0)

    retrieve = attend           # for eq. 10, which uses only the scores and entity of the result

class MentionMemory:
    """This process's N rows of the frozen table, as tensors. The arguments may be numpy arrays. A
    query never retrieves rows from its own passage ("disallowed same passage retrieval", §2.4)."""
    def __init__(self, keys, values, entity, passage, mention, device=None):
        for name, array in zip(ARRAYS, (keys, values, entity, passage, mention)):
            setattr(self, name, torch.as_tensor(array, device=device))
        # n_search is the number of buckets that a query searches (app. C.1.2), set with `changed`.
        # With 0, search is exact. Otherwise the first search makes 4 sqrt(N) buckets (our choice).
        self.n_search, self.index = 0, None

    def __len__(self):
        return len(self.keys)

    def search(self, query, k, query_passage):
        """scores, ids (Q, k): this process's k best rows that are not from the query's passage."""
        if self.n_search == 0:
            return ann.exact_topk(query, self.keys, k, query_passage, self.passage)
        with torch.autocast(query.device.type, enabled=False):          # in float32, as in ann.dot
            if self.index is None:
                self.index = ann.BucketedIndex(self.keys, int(4 * len(self) ** 0.5), self.passage)
            return self.index.search(query, k, self.n_search, query_passage)

    def retrieve(self, query, passage, k, k_shard):
        """TopMem (§2.2.1): a Retrieved without weights and value. The search has no gradient; the
        keys that it finds are scored again, with gradient. Each process offers its k_shard best
        rows, and the k best of these are kept (app. C.1.4: 128 processes, k_shard = 2, k = 128).
        With few processes, k_shard is raised until together they offer k rows or all their rows."""
        n_rows = ann.gather_counts(len(self), query.device)         # of each process
        while sum(min(n, k_shard) for n in n_rows) < min(k, sum(n_rows)):
            k_shard += 1
        _, ids = ann.sharded_topk(self.search, query.detach().float(), k, k_shard, passage,
                                  n_rows)                                       # (M, K)
        keys, entity = ann.fetch(ids, [self.keys, self.entity])                # (M, K, d_K), (M, K)
        scores = ann.dot(query[:, None], keys)[:, 0].masked_fill(ids < 0, -torch.inf)
        return Retrieved(scores, ids, entity)

    def attend(self, query, passage, k, k_shard):
        """Eq. 7 and 8. query (M, d_K), passage (M,) -> Retrieved with weights and value."""
        found = self.retrieve(query, passage, k, k_shard)
        values, = ann.fetch(found.ids, [self.values])                           # (M, K, d_V)
        weights = attention_weights(found.scores)
        value = torch.einsum("mk,mkv->mv", weights, values.float())
        return found._replace(weights=weights, value=value)

    def changed(self, **attributes):
        """A copy with these attributes replaced."""
        other = copy.copy(self)
        vars(other).update(attributes)
        return other

    def select(self, keep):
        """The memory with only the rows where keep (N,) is true. If keep is true everywhere,
        returns the memory itself, not a copy."""
        if keep.all():
            return self
        return self.changed(index=None, **{name: getattr(self, name)[keep] for name in ARRAYS})

    def of_passages(self, keep):
        """The memory with only the rows from passages where keep (P,), a numpy array, is true."""
        return self.select(torch.from_numpy(keep).to(self.passage.device)[self.passage])

    def sample(self, fraction, seed=0):
        """A uniform sample of passages (§4.1 samples mentions, 38M of 150M). The rows of a passage
        are all kept or all left out, since a fact that the passage states can be found through any
        of them. sample(0) is an empty memory."""
        # n may differ between processes, but random(n) always begins with the same numbers.
        n = int(self.passage.max()) + 1 if len(self) else 0
        keep = np.random.default_rng([seed, 1]).random(n) < fraction
        return self.of_passages(keep)

    def shuffled(self):
        """The memory with permuted values: a query retrieves the same rows, but wrong values."""
        order = np.random.default_rng(0).permutation(len(self))
        return self.changed(values=self.values[torch.from_numpy(order)])

    def by_article(self, article):
        """The same rows with article numbers as `passage`, so that a query with passage = a
        retrieves nothing from article a. article: the article number of each passage."""
        article = torch.tensor(article).to(self.passage)
        return self.changed(passage=article[self.passage], index=None)

class MemoryAttention(nn.Module):
    """Eq. 6–9. H (B, T, hidden) -> the paper's matrix M, of the same shape, and a Retrieved.
    mentions: a data.Batch, of which row, start, end and passage are used. memory: an object with
    `attend`."""
    def __init__(self, config):
        super().__init__()
        self.k, self.k_shard = config.k, config.k_shard
        self.query = SpanEncodingLayer(config.hidden, config.key_dim)
        self.up = nn.Linear(config.value_dim, config.hidden)        # W_U, and a bias
        self.norm = nn.LayerNorm(config.hidden, eps=1e-12)

    def forward(self, H, mentions, memory):
        query = self.query(H, mentions.row, mentions.start, mentions.end)
        found = memory.attend(query, mentions.passage, self.k, self.k_shard)
        # accumulate=True adds the update to H_s. A mention without any allowed memory gets no
        # update, not even W_U's bias.
        update = self.up(found.value) * (found.weights.sum(-1, keepdim=True) > 0)
        H = H.index_put((mentions.row, mentions.start), update.to(H.dtype), accumulate=True)
        # Eq. 9 normalises only position s. Like the public code, we normalise all positions, so
        # that mention starts have the same scale as the other positions.
        return self.norm(H), found

@torch.no_grad()
@np.errstate(over="ignore")     # overflow in float16 gives inf, which build_memory refuses
def encode_passages(encoder, corpus, passages, device, dtype=np.float32):
    """The memory rows of the linked mentions in these passages, from their unmasked text (§2.4):
    {name in ARRAYS: array} in corpus order. encoder: a BatchTOME. passages (n,): numbers, n > 0."""
    encoder.eval()
    # Passages without a linked mention are skipped, except the first, so that `parts` is not empty.
    linked = np.array([corpus.passage_entities(p).any() for p in passages])
    passages, parts = passages[linked | (passages == passages[0])], []
    # Passages of similar length are encoded together, because the longest sets the batch's width.
    # n_tokens[i] is the number of tokens, with padding, in a batch of the first i + 1 of `left`.
    lengths = corpus.passage_start[passages + 1] - corpus.passage_start[passages]
    left = np.argsort(lengths, kind="stable")
    while len(left):
        n_tokens = lengths[left] * np.arange(1, len(left) + 1)
        n = max(1, int(np.searchsorted(n_tokens, BATCH_TOKENS, "right")))
        batch = data.corpus_batch(corpus, passages[left[:n]]).to(device)
        left = left[n:]
        mentions = (batch.row, batch.start, batch.end, batch.entity, batch.passage, batch.mention)
        row, start, end, *numbers = (x[batch.entity > 0] for x in mentions)
        with low_precision(encoder.config, device):
            keys, values = encoder.encode_mentions(batch.tokens, batch.attention_mask,
                                                   row, start, end)
        parts.append([x.cpu() for x in (keys.float(), values.float(), *numbers)])
    columns = [torch.cat(part).numpy() for part in zip(*parts)]
    order = np.argsort(columns[-1])                                 # by mention number
    keys, values, *numbers = (column[order] for column in columns)
    return dict(zip(ARRAYS, (keys.astype(dtype), values.astype(dtype), *numbers)))

# ==== Set apart: teacher forcing ==================================================================

N_GIVEN = 8                     # memories that GivenMemory draws for a mention

class GivenMemory:
    """Teacher forcing (preset mini): a mention is given random memories of its own entity (N_GIVEN
    draws with replacement, without those from its own passage). So the model learns to read
    memories before it can find the right ones. Given memories pass no gradient to the queries.

    Before each use, set `wanted` (M,) to the entity whose memories each mention is given; 0: none.
    If others_search is true, mentions whose `wanted` is 0 search the memory. `found` is then the
    result of the last search for all mentions, which the linking loss (train.py) needs."""
    def __init__(self, memory, n_entities):
        self.memory, self.values, self.others_search = memory, memory.values, False
        entity = ann.gather(memory.entity)
        self.count = torch.bincount(entity, minlength=n_entities)   # (E,) rows of each entity
        self.first = self.count.cumsum(0) - self.count              # (E,) where they begin in `row`
        # The ids of all processes' rows, sorted by entity, with -1 added at the end. If the last
        # entities have no rows, their `first` points to this -1.
        self.row = F.pad(entity.argsort(stable=True), (0, 1), value=-1)

    attend = MentionMemory.attend       # attends to what `retrieve` returns

    def retrieve(self, query, passage, k, k_shard):
        """A Retrieved with N_GIVEN places for given memories and, if others_search is true, k more
        for the memories that a search finds. Places that a mention does not use have id -1."""
        first, count = (x[self.wanted, None] for x in (self.first, self.count))
        chance = torch.rand(len(query), N_GIVEN, device=query.device)
        ids = self.row[first + (chance * count).long()].masked_fill(count == 0, -1)
        memory = self.memory
        keys, entity, key_passage = ann.fetch(ids, [memory.keys, memory.entity, memory.passage])
        ids = ids.masked_fill(key_passage == passage[:, None], -1)
        scores = ann.dot(query.detach()[:, None], keys)[:, 0].masked_fill(ids < 0, -torch.inf)
        given = Retrieved(scores, ids, entity.masked_fill(ids < 0, 0))
        if not self.others_search:
            return given
        self.found = memory.retrieve(query, passage, k, k_shard)
        is_given = self.wanted[:, None] > 0     # where true, what the search found is removed
        searched = [x.masked_fill(is_given, empty)
                    for x, empty in zip(self.found, (-torch.inf, -1, 0))]
        return Retrieved(*(torch.cat(pair, 1) for pair in zip(given, searched)))

# ==== Set apart: files ============================================================================

def build_memory(encoder, corpus, folder, device, dtype, made_from, old_folder=None):
    """Writes the memory of the corpus's linked mentions to `folder`, which must not exist. Every
    process calls this function and writes some of the shards. made_from: checksums {"corpus": …,
    "batch-tome": …}, stored in meta.json. old_folder: the memory before text was appended; its full
    shards are reused as hard links (or copies). Raises UserError.

    Each file is written atomically. After an interruption, the next call writes only the missing
    shards or, if `made_from` has changed, starts over."""
    rank, size = ann.rank_and_size()
    folder, part = Path(folder), Path(f"{folder}.part")
    if rank == 0:
        about = part / "made_from.json"
        if not about.exists() or data.read_json(about) != made_from:    # start over
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            data.sync_folder(part.absolute().parent)
            data.write_json(about, made_from)
    ann.barrier()
    n_passages, each = len(corpus.article), PASSAGES_PER_SHARD
    shards = np.split(np.arange(n_passages), range(each, n_passages, each))
    n_old = data.open_folder(old_folder, "memory")["n_passages"] // each if old_folder else 0
    for shard in tqdm(range(rank, len(shards), size), "memory", unit=" shards", disable=rank > 0):
        names = [f"{name}-{shard:05d}.npy" for name in ARRAYS]
        if all((part / name).exists() for name in names):
            continue
        if shard < n_old:
            for name in names:
                data.link(Path(old_folder, name), part / name)
            continue
        rows = encode_passages(encoder, corpus, shards[shard], device, dtype)
        if not (np.isfinite(rows["keys"]).all() and np.isfinite(rows["values"]).all()):
            raise data.UserError("keys or values are not finite; train batch-tome again with a "
                                 "lower --lr, or use --memory-dtype float32")
        for array, name in zip(ARRAYS, names):
            data.write_file(part / name, lambda file: np.save(file, rows[array]))
    ann.barrier()
    if rank == 0:
        names = [f"{name}-{shard:05d}.npy" for name in ARRAYS for shard in range(len(shards))]
        n = sum(len(np.load(file, "r")) for file in part.glob("entity-*.npy"))
        about.unlink()
        data.commit_folder(part, folder, names, format=data.FORMAT, made_from=made_from, n=n,
                           n_shards=len(shards), n_passages=n_passages)
    ann.barrier()

def load_memory(folder, device="cpu"):
    """(this process's part of the memory, checksums of what the memory was made from). The part
    consists of shards rank, rank + size, … Raises UserError, for example if a checksum differs."""
    rank, size = ann.rank_and_size()
    about = data.open_folder(folder, "memory",      # "keys-00012.npy" belongs to shard 12
                             lambda name: int(name[-9:-4]) % size == rank)

    def shard(name, i):         # one at a time: a file stays open as long as its array lives
        return np.load(f"{folder}/{name}-{i:05d}.npy", "r")             # unpickles nothing

    rows = {}
    with data.intact(folder, remedy="remove it to have it rebuilt"):
        shards = range(rank, about["n_shards"], size)           # a process may have no shard
        for name in ARRAYS:
            place = np.cumsum([0, *(len(shard(name, i)) for i in shards)])
            rows[name] = np.empty((place[-1], *shard(name, 0).shape[1:]), shard(name, 0).dtype)
            for i, start, end in zip(shards, place, place[1:]):
                rows[name][start:end] = shard(name, i)
        return MentionMemory(**rows, device=device), about["made_from"]
