"""The mention memory: a table of every linked mention of a corpus, and the attention to it (paper §2.1.2, §2.2.1).

    MemKey (N, d_K)   MemValue (N, d_V)   MemEnt (N,)   passage and mention number of each row (N,)

    MemoryAttention:  Query(m) = SpanEncodingLayer(H, (s, e))                               eq. 6
                      alpha_i  ∝ exp(Query(m) · MemKey(i)),  i in TopMem(Query(m))          eq. 7
                      Value(m) = sum_i alpha_i MemValue(i)                                  eq. 8
                      M_s      = LayerNorm(H_s + W_U Value(m))                              eq. 9

Three memories offer the same `attend`: BatchMemory holds the mentions of the batch itself and lets the gradient through
(BATCH-TOME, §2.3); MentionMemory is the frozen table of the whole corpus, of which each process holds its own rows
(TOME, §2.2); EntityTable is a baseline's, a trained row for each entity.
"""
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

import ann
import data
from data import UserError, checksum, read_json, write_file, write_json
from encoder import SpanEncodingLayer

FORMAT = 2
PASSAGES_PER_SHARD = 8192
ARRAYS = ("keys", "values", "entity", "passage", "mention")


class Retrieved(NamedTuple):
    """What a batch of M mentions found: K memories each, best first where they were searched for and in the table's own
    order where all of it is attended; scores -inf and ids -1 where there are fewer."""
    scores: torch.Tensor        # (M, K) query · key, with gradient into the query
    ids: torch.Tensor           # (M, K) memory rows
    entity: torch.Tensor        # (M, K) MemEnt
    weights: torch.Tensor = None    # (M, K) alpha of eq. 7; all zero where nothing was allowed
    value: torch.Tensor = None      # (M, d_V) eq. 8
    query: torch.Tensor = None      # (M, d_K) eq. 6, of a memory layer


def attention_weights(scores):
    """Softmax over the last dimension in which a row of nothing but -inf gives zeros instead of NaN."""
    none = scores.isneginf().all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(none, 0.0), dim=-1).masked_fill(none, 0.0)


class BatchMemory:
    """The linked mentions of a batch as a memory (§2.3), keys and values with gradient. With several processes the
    batch is that of all of them (app. A.1 makes sure that its passages are related)."""

    def __init__(self, keys, values, entity, passage):
        self.keys, self.values = ann.gather(keys), ann.gather(values)                        # (N, d_K), (N, d_V)
        self.entity, self.passage = ann.gather(entity), ann.gather(passage)                  # (N,)

    def attend(self, query, passage, k=None, k_shard=None):
        """Softmax over the whole batch memory: at this size there is nothing to search. query (M, d_K),
        passage (M,): a mention never attends to its own passage (app. A)."""
        scores = ann.dot(query, self.keys)                                                   # (M, N)
        scores = scores.masked_fill(passage[:, None] == self.passage[None, :], -torch.inf)
        weights = attention_weights(scores)
        ids = torch.arange(len(self.keys), device=query.device).expand_as(scores)
        return Retrieved(scores, ids, self.entity.expand_as(scores), weights, weights @ self.values)


class EntityTable(nn.Module):
    """Entities as Experts (Févry et al. 2020), the paper's closest baseline: a key and a value for each entity, trained
    with the model, in place of the mention memory. What it knows of an entity it has to learn; of one that training
    never names, nothing. Row 0 is no entity."""

    def __init__(self, config):
        super().__init__()
        self.keys = nn.Parameter(torch.randn(config.n_entities, config.key_dim) * 0.1)
        self.values = nn.Parameter(torch.randn(config.n_entities, config.value_dim) * 0.1)

    def retrieve(self, query, passage=None, k=None, k_shard=None):
        """All entities, scored. query (M, d_K); the rest is the mention memory's and has no meaning here."""
        scores = ann.dot(query, self.keys)                                                   # (M, E)
        ids = torch.arange(len(self.keys), device=query.device).expand_as(scores)
        return Retrieved(scores.masked_fill(ids == 0, -torch.inf), ids, ids)

    def attend(self, query, passage=None, k=None, k_shard=None):
        found = self.retrieve(query)
        weights = attention_weights(found.scores)
        return found._replace(weights=weights, value=weights @ self.values)


class MentionMemory:
    """This process's rows of the frozen table. keys (N, d_K), values (N, d_V), entity, passage, mention (N,).

    `passage` names the group of rows that a query of the same number never sees: the query's own passage in training
    ("disallowed same passage retrieval", §2.4); evaluation puts articles there to take a whole subject away."""

    def __init__(self, keys, values, entity, passage, mention, n_search=None, index=None):
        self.keys, self.values, self.entity = keys, values, entity
        self.passage, self.mention = passage, mention
        self.n_search = n_search        # None: exact search; else in so many of 4 sqrt(N) buckets (app. C.1.2)
        if index is None and n_search is not None and len(keys) > 0:
            index = ann.BucketedIndex(keys, int(4 * len(keys) ** 0.5), passage)
        self.index = index

    def __len__(self):
        return len(self.keys)

    @staticmethod
    def from_arrays(rows, device):
        """From a dictionary of ARRAYS in numpy."""
        ids = ("entity", "passage", "mention")
        return MentionMemory(*(torch.from_numpy(rows[name].astype(np.int64) if name in ids else rows[name]).to(device)
                               for name in ARRAYS))

    @torch.no_grad()
    def search(self, query, k, query_passage):
        """The best k of this process's own rows, same passage removed first: scores, ids [Q, k]."""
        if self.index is not None:
            return self.index.search(query, k, self.n_search, query_passage)
        return ann.exact_topk(query, self.keys, k, query_passage, self.passage)

    def retrieve(self, query, passage, k, k_shard):
        """TopMem (§2.2.2): the search runs without gradient, then the chosen keys are scored again with it.

        Every process offers its k_shard best (app. C.1.4: 2 of k = 128, from 128 processes); fewer processes offer more,
        so that there are always k to choose from, and one process searches exactly."""
        k_shard = max(k_shard, -(-k // ann.rank_and_size()[1]))
        _, ids = ann.sharded_topk(self.search, query.detach().float(), k, k_shard, passage, len(self))    # (M, K)
        keys, entity = ann.fetch(ids, [self.keys, self.entity])                              # (M, K, d_K), (M, K)
        scores = ann.dot(query[:, None], keys)[:, 0].masked_fill(ids < 0, -torch.inf)
        return Retrieved(scores, ids, entity)

    def attend(self, query, passage, k, k_shard):
        """Eq. 7 and 8. query (M, d_K), passage (M,) -> Retrieved with weights (M, K) and value (M, d_V)."""
        found = self.retrieve(query, passage, k, k_shard)
        values, = ann.fetch(found.ids, [self.values])                                        # (M, K, d_V)
        weights = attention_weights(found.scores)
        return found._replace(weights=weights, value=torch.einsum("mk,mkv->mv", weights, values.float()))

    def log_sums(self, query, passage, entity):
        """Eq. 10 over the whole table of all processes, not its k best: log sum_i exp(query · MemKey(i)) of all rows i and
        of the entity's own. query (M, d_K), passage, entity (M,) -> (M, 2), finfo.min where there is no row. Holds the
        scores of everybody's queries and this process's rows, a few times over."""
        query, passage, entity, M = *(ann.gather(x) for x in (query.float(), passage, entity)), len(query)
        scores = ann.dot(query, self.keys)                                                   # (M of all, N)
        least = torch.finfo(scores.dtype).min       # -inf would leave logsumexp without a gradient
        if (passage >= 0).any():
            scores = scores.masked_fill(passage[:, None] == self.passage, least)
        m, i = (entity[:, None] == self.entity).nonzero(as_tuple=True)                       # few: a row for each m
        count = torch.bincount(m, minlength=len(query))
        own = scores.new_full((len(query), max(count.tolist(), default=0)), least)
        own = own.index_put((m, ann.ragged(count)[1]), scores[m, i])
        sums = torch.stack([scores.logsumexp(-1), own.logsumexp(-1)], dim=1).clamp(min=least)
        rank, size = ann.rank_and_size()
        if size == 1:
            return sums
        everybody = ann.gather(sums).view(size, -1, 2).logsumexp(0)                          # (M of all, 2)
        return everybody.split(ann.gather_counts(M, query.device))[rank]

    def passages_of(self, n_entities):
        """(E,): in how many passages of the memory, over all processes, each entity stands."""
        pairs = torch.unique(torch.stack([self.entity, self.passage]), dim=1)
        return ann.sum_over_processes(torch.bincount(pairs[0], minlength=n_entities), self.entity.device)

    # -- the same table, changed: another search, and the controls of the experiments

    def changed(self, **changes):
        kept = {name: getattr(self, name) for name in (*ARRAYS, "n_search", "index")}
        if changes.keys() & {"keys", "passage", "n_search"}:
            kept["index"] = None            # it holds them, in its own order
        return MentionMemory(**kept | changes)

    def bucketed(self, n_search):
        """The same rows, searched in n_search buckets; None: exactly."""
        return self.changed(n_search=n_search)

    def select(self, keep):
        """Only the rows where keep (N,) is true."""
        keep = torch.as_tensor(keep, device=self.keys.device)
        return self.changed(**{name: getattr(self, name)[keep] for name in ARRAYS})

    def sample(self, fraction, seed=0):
        """A uniform sample of the passages (§4.1 samples 38M of 150M mentions; by passage, so that what is kept of a
        passage is kept whole)."""
        if fraction >= 1:
            return self
        n = int(self.passage.max()) + 1 if len(self) else 0
        keep = np.random.default_rng([seed, 1]).random(n) < fraction
        return self.select(torch.from_numpy(keep)[self.passage.cpu()])

    def emptied(self):
        return self.select(torch.zeros(len(self), dtype=torch.bool))

    def shuffled(self, seed=0):
        """Keys stay, the values behind them are another row's: retrieval is as before, what it brings is wrong."""
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(self))).to(self.keys.device)
        return self.changed(values=self.values[order])

    def by_article(self, article):
        """The same rows, grouped by article: a query of group a sees nothing that stands in article a."""
        group = torch.from_numpy(np.array(article)).to(self.passage.device)[self.passage]
        return self.changed(passage=group.to(self.passage.dtype))


class MemoryAttention(nn.Module):
    """Eq. 6–9. H (B, T, hidden) -> M (B, T, hidden), Retrieved."""

    def __init__(self, config):
        super().__init__()
        self.k, self.k_shard = config.k, config.k_shard
        self.query = SpanEncodingLayer(config.hidden, config.key_dim)
        self.up = nn.Linear(config.value_dim, config.hidden)            # W_U, with the public code's bias
        self.norm = nn.LayerNorm(config.hidden, eps=1e-12)

    def forward(self, H, mentions, memory):
        row, start, end = mentions.row, mentions.start, mentions.end
        query = self.query(H, row, start, end)
        found = memory.attend(query, mentions.passage, self.k, self.k_shard)._replace(query=query)
        # index_put with accumulate: of two mentions that start at the same token, both updates count. A mention that
        # was allowed nothing adds nothing, not even W_U's bias.
        update = self.up(found.value) * (found.weights.sum(-1, keepdim=True) > 0)
        H = H.index_put((row, start), update.to(H.dtype), accumulate=True)
        # Eq. 9 is written for M_s. Read literally, only mention starts would be normalised twice and leave the scale
        # of their neighbours; the public code normalises everywhere, and so do we.
        return self.norm(H), found


# ---------------------------------------------------------------------------------------------------------------------
# Files: a folder of plain .npy shards and a manifest. A shard is a fixed range of passages, so that any number of
# processes writes the same files, and a build that was stopped goes on at the first one missing.


def no_rows(key_dim, value_dim, dtype):
    """ARRAYS of an empty memory."""
    ids = np.zeros(0, np.int64)
    return dict(keys=np.zeros((0, key_dim), dtype), values=np.zeros((0, value_dim), dtype), entity=ids, passage=ids, mention=ids)


@torch.no_grad()
def encode_passages(encoder, corpus, passages, device, dtype=np.float32, batch_tokens=16384, progress=None):
    """Memory rows of the linked mentions of these passages (int64, rising), from their unmasked text (§2.1.2): a
    dictionary of ARRAYS, in the order of the corpus. Passages of similar length are read together."""
    encoder.eval()
    parts = {name: [] for name in ARRAYS}
    lengths = corpus.passage_start[passages + 1] - corpus.passage_start[passages]
    order = np.argsort(lengths, kind="stable")
    passages, lengths = passages[order], lengths[order]
    while len(passages):
        # as many as fill batch_tokens; they come by length, so that the last one sets the width
        n = max(1, int(np.searchsorted(lengths * np.arange(1, len(lengths) + 1), batch_tokens, "right")))
        batch = data.make_batch(corpus, passages[:n], None, 0, 0, None)
        passages, lengths = passages[n:], lengths[n:]
        if progress is not None:
            progress.update(n)
        linked = batch.entity > 0
        batch = batch.to(device)
        spans = (batch.row[linked], batch.start[linked], batch.end[linked])
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            keys, values = encoder(batch.tokens, batch.attention_mask, *spans)
        for name, tensor in (("keys", keys), ("values", values)):
            parts[name].append(tensor.float().cpu().numpy().astype(dtype))
        for name in ("entity", "passage", "mention"):
            parts[name].append(getattr(batch, name)[linked].cpu().numpy())
    empty = no_rows(encoder.config.key_dim, encoder.config.value_dim, dtype)
    rows = {name: np.concatenate(part or [empty[name]]) for name, part in parts.items()}
    order = np.argsort(rows["mention"])
    return {name: array[order] for name, array in rows.items()}


def build_memory(encoder, corpus, folder, device, dtype=np.float32):
    """Encode every linked mention of the corpus into `folder`. The processes share the shards."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rank, size = ann.rank_and_size()
    n_passages = len(corpus.article)
    n_shards = -(-n_passages // PASSAGES_PER_SHARD)
    belongs = {"format": FORMAT, "encoder": encoder.fingerprint, "corpus": corpus.fingerprint}
    past = corpus.meta["grew_from"]                     # a shard that was full then holds the same still
    record_of = [folder / f"shard-{shard:05d}.json" for shard in range(n_shards)]

    def is_there(shard):
        full = [earlier["corpus"] for earlier in past if (shard + 1) * PASSAGES_PER_SHARD <= earlier["passages"]]
        return record_of[shard].exists() and any(read_record(record_of[shard]).items() >= (
            belongs | {"corpus": fingerprint}).items() for fingerprint in [*full, corpus.fingerprint])

    missing = {shard: np.arange(shard * PASSAGES_PER_SHARD, min((shard + 1) * PASSAGES_PER_SHARD, n_passages))
               for shard in range(rank, n_shards, size) if not is_there(shard)}
    progress = tqdm(total=sum(map(len, missing.values())), desc="memory", unit=" passages", disable=rank > 0)
    for shard, passages in missing.items():
        rows = encode_passages(encoder, corpus, passages, device, dtype, progress=progress)
        sums = {}
        for name, array in rows.items():
            path = folder / f"{name}-{shard:05d}.npy"
            write_file(path, lambda file: np.save(file, array, allow_pickle=False))
            sums[name] = checksum(path)
        write_json(record_of[shard], {**belongs, "n": len(rows["keys"]), "crc32": sums})
    progress.close()
    ann.barrier()
    if rank == 0:
        records = [read_record(path) for path in record_of]
        write_json(folder / "manifest.json",
                   {**belongs, "n": sum(r["n"] for r in records), "key_dim": encoder.config.key_dim,
                    "value_dim": encoder.config.value_dim, "dtype": np.dtype(dtype).name,
                    "shards": [{"n": r["n"], "crc32": r["crc32"]} for r in records]})
    ann.barrier()


def read_record(path):
    """What build_memory noted of a shard, or the manifest."""
    try:
        return read_json(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; build the memory first: python train.py --stage memory") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); delete it and run --stage memory again") from None


def read_manifest(folder, fingerprint=None, corpus=None):
    """The manifest, checked to belong to the Mention Encoder of that fingerprint (app. B.6: TOME has to start from the
    same BATCH-TOME that wrote the memory, it cannot learn to use another one) and to the corpus of that one."""
    path = Path(folder) / "manifest.json"
    manifest = read_record(path)
    if manifest.get("format") != FORMAT:
        raise UserError(f"{path}: format {manifest.get('format')}, this version reads {FORMAT}; remove the "
                                "folder and run --stage memory again")
    if fingerprint is not None and manifest["encoder"] != fingerprint:
        raise UserError(f"{folder} was written by another mention encoder ({manifest['encoder'][:12]}, this "
                           f"model starts from {fingerprint[:12]}): remove that folder and run --stage memory again")
    if corpus is not None and manifest["corpus"] != corpus:
        raise UserError(f"{folder} was made from another corpus: remove it and run --stage memory again")
    return manifest


def load_memory(folder, fingerprint=None, device="cpu", keep=None, corpus=None):
    """This process's part of the table: shards rank, rank + size, …; every file's checksum is checked.

    keep: a boolean array over passages; rows of the others are never copied off the disk."""
    folder = Path(folder)
    manifest = read_manifest(folder, fingerprint, corpus)
    rank, size = ann.rank_and_size()
    parts = {name: [] for name in ARRAYS}
    for i in range(rank, len(manifest["shards"]), size):
        shard, again = {}, f"delete manifest.json and shard-{i:05d}.json there, then run --stage memory again"
        for name in ARRAYS:
            path = folder / f"{name}-{i:05d}.npy"
            if not path.exists():
                raise UserError(f"{path} is missing; {again}")
            if checksum(path) != manifest["shards"][i]["crc32"][name]:
                raise UserError(f"{path} is damaged (its checksum differs); {again}")
            try:
                shard[name] = np.load(path, mmap_mode="r", allow_pickle=False)      # never unpickle a stranger's objects
            except ValueError as error:
                raise UserError(f"{path} is no array of numbers ({error}); {again}") from None
        rows = slice(None) if keep is None else keep[shard["passage"]]
        for name in ARRAYS:
            parts[name].append(np.asarray(shard[name][rows]))
    empty = no_rows(manifest["key_dim"], manifest["value_dim"], manifest["dtype"])      # of a process that gets no shard
    return MentionMemory.from_arrays({name: np.concatenate(part or [empty[name]]) for name, part in parts.items()}, device)
