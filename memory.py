"""The mention memory: a table of the linked mentions of a corpus, and the attention to it
(paper §2.1.2, §2.2.1).

    MemKey (N, d_K)   MemValue (N, d_V)   MemEnt (N,)         keys, values, entity
    passage and mention: where each row stands in the corpus (N,)

    Query(m) = SpanEncodingLayer(H, (s, e))                                           eq. 6
    alpha_i  ∝ exp(Query(m) · MemKey(i)),  i in TopMem(Query(m))                      eq. 7
    Value(m) = sum_i alpha_i MemValue(i)                                              eq. 8
    M_s      = LayerNorm(H_s + W_U Value(m))                                          eq. 9

Three memories offer the same `attend`. BatchMemory holds the mentions of the batch itself and lets
the gradient through (BATCH-TOME, §2.3). MentionMemory is the frozen table of the whole corpus, of
which each process holds its own rows (TOME, §2.2). EntityTable is a baseline: a trained row for
each entity. M is the number of mentions that ask, N that of memories, K that of retrieved ones.
"""
import copy
import os
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

import ann
import data
from data import UserError, checksum, commit_folder, read_json, write_file, write_json
from encoder import SpanEncodingLayer

FORMAT = 3
PASSAGES_PER_SHARD = 8192
BATCH_TOKENS = 16384            # tokens that are encoded at a time
IDS = ("entity", "passage", "mention")
ARRAYS = ("keys", "values", *IDS)

class Retrieved(NamedTuple):
    """What M mentions found: K memories each, best first where they were searched for, in the
    table's order where all of it is attended. Where there are fewer: scores -inf, ids -1."""
    scores: torch.Tensor            # (M, K) query · key, with gradient into the query
    ids: torch.Tensor               # (M, K) memory rows
    entity: torch.Tensor            # (M, K) MemEnt
    weights: torch.Tensor = None    # (M, K) alpha of eq. 7; all zero where nothing was allowed
    value: torch.Tensor = None      # (M, d_V) eq. 8
    query: torch.Tensor = None      # (M, d_K) eq. 6, of a memory layer

def attention_weights(scores):
    """Softmax over the last dimension. A row of nothing but -inf gives zeros instead of NaN."""
    none = scores.isneginf().all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(none, 0.0), dim=-1).masked_fill(none, 0.0)

def attend_to_all(scores, entity, values):
    """Eq. 7 and 8 over all N rows of a table that is too small to search.

    scores (M, N), entity (N,), values (N, d_V) -> Retrieved of N memories for each mention."""
    weights = attention_weights(scores)
    ids = torch.arange(len(entity), device=scores.device).expand_as(scores)
    return Retrieved(scores, ids, entity.expand_as(scores), weights, weights @ values)

class BatchMemory:
    """The linked mentions of a batch as a memory (§2.3), keys and values with gradient. The batch
    is that of all processes; its passages are related (app. A.1)."""

    def __init__(self, keys, values, entity, passage):
        self.keys, self.values = ann.gather(keys), ann.gather(values)           # (N, d_K), (N, d_V)
        self.entity, self.passage = ann.gather(entity), ann.gather(passage)     # (N,)

    def attend(self, query, passage, k=None, k_shard=None):
        """Softmax over the whole batch memory: it is too small to search. query (M, d_K), passage
        (M,): a mention never attends to its own passage (app. A)."""
        scores = ann.dot(query, self.keys)                                      # (M, N)
        scores = scores.masked_fill(passage[:, None] == self.passage[None, :], -torch.inf)
        return attend_to_all(scores, self.entity, self.values)

class EntityTable(nn.Module):
    """Entities as Experts (Févry et al. 2020), the paper's closest baseline: a key and a value for
    each entity, trained with the model in place of the mention memory. It knows nothing of an
    entity that training never names. Row 0 is no entity."""

    def __init__(self, config):
        super().__init__()
        self.keys = nn.Parameter(torch.randn(config.n_entities, config.key_dim) * 0.1)
        self.values = nn.Parameter(torch.randn(config.n_entities, config.value_dim) * 0.1)

    def attend(self, query, passage=None, k=None, k_shard=None):
        """All entities. query (M, d_K); the other arguments are the mention memory's."""
        scores = ann.dot(query, self.keys)                                      # (M, E)
        entity = torch.arange(len(self.keys), device=query.device)
        return attend_to_all(scores.masked_fill(entity == 0, -torch.inf), entity, self.values)

    retrieve = attend           # all of them are retrieved; who only wants scores takes only these

class MentionMemory:
    """This process's rows of the frozen table. keys (N, d_K), values (N, d_V), entity, passage,
    mention (N,).

    A query never sees rows of its own `passage`: in training its own text ("disallowed same passage
    retrieval", §2.4). Evaluation puts articles there, to take a whole subject away."""

    def __init__(self, keys, values, entity, passage, mention):
        self.keys, self.values, self.entity = keys, values, entity
        self.passage, self.mention = passage, mention
        self.n_search = self.index = None               # None: the search is exact

    def __len__(self):
        return len(self.keys)

    @staticmethod
    def from_arrays(rows, device):
        """From a dictionary of ARRAYS in numpy."""
        rows = rows | {name: rows[name].astype(np.int64) for name in IDS}
        return MentionMemory(*(torch.from_numpy(rows[name]).to(device) for name in ARRAYS))

    @torch.no_grad()
    def search(self, query, k, query_passage):
        """The k best of this process's rows, same passage removed first: scores, ids [Q, k]."""
        if self.index is not None:
            return self.index.search(query, k, self.n_search, query_passage)
        return ann.exact_topk(query, self.keys, k, query_passage, self.passage)

    def retrieve(self, query, passage, k, k_shard):
        """TopMem (§2.2.2): the search is without gradient, then the found keys are scored with it.

        Every process offers its k_shard best (app. C.1.4: 2 of k = 128, from 128 processes). Fewer
        processes offer more, so that there are k to choose from; one process searches exactly."""
        k_shard = max(k_shard, -(-k // ann.rank_and_size()[1]))
        _, ids = ann.sharded_topk(self.search, query.detach().float(), k, k_shard, passage,
                                  len(self))                                    # (M, K)
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

    def log_sums(self, query, passage, entity):
        """Eq. 10 over all rows of all processes, not the k best: log sum_i exp(query · MemKey(i))
        of all rows i, and of the entity's own. query (M, d_K), passage, entity (M,) -> (M, 2),
        finfo.min where there is no row. Holds the scores of everybody's queries and its rows."""
        n_own = len(query)
        query, passage, entity = ann.gather(query.float()), ann.gather(passage), ann.gather(entity)
        scores = ann.dot(query, self.keys)                                      # (M of all, N)
        least = torch.finfo(scores.dtype).min       # -inf would leave logsumexp without a gradient
        if (passage >= 0).any():
            scores = scores.masked_fill(passage[:, None] == self.passage, least)
        m, i = (entity[:, None] == self.entity).nonzero(as_tuple=True)          # few rows of each m
        count = torch.bincount(m, minlength=len(query))
        same = scores.new_full((len(query), max(count.tolist(), default=0)), least)
        same = same.index_put((m, ann.ragged(count)[1]), scores[m, i])
        sums = torch.stack([scores.logsumexp(-1), same.logsumexp(-1)], dim=1).clamp(min=least)
        rank, size = ann.rank_and_size()
        if size == 1:
            return sums
        sums = ann.gather(sums).view(size, -1, 2).logsumexp(0)                  # (M of all, 2)
        return sums.split(ann.gather_counts(n_own, query.device))[rank]

    def passages_of(self, n_entities):
        """(E,): in how many passages of the memory, over all processes, each entity stands."""
        pairs = torch.unique(torch.stack([self.entity, self.passage]), dim=1)
        count = torch.bincount(pairs[0], minlength=n_entities)
        return ann.sum_over_processes(count, self.entity.device)

    # The same table, changed: another search, and the controls of the experiments.

    def changed(self, **arrays):
        """A copy with other arrays in place of those named."""
        other = copy.copy(self)
        vars(other).update(arrays)
        if self.index is not None and arrays.keys() & {"keys", "passage"}:     # it holds them
            return other.bucketed(self.n_search)
        return other

    def bucketed(self, n_search):
        """The same rows, searched in n_search of 4 sqrt(N) buckets (app. C.1.2); None: exactly."""
        other = copy.copy(self)
        other.n_search, other.index = n_search, None
        if n_search is not None and len(self) > 0:
            other.index = ann.BucketedIndex(self.keys, int(4 * len(self) ** 0.5), self.passage)
        return other

    def select(self, keep):
        """Only the rows where keep (N,) is true."""
        keep = torch.as_tensor(keep, device=self.keys.device)
        return self.changed(**{name: getattr(self, name)[keep] for name in ARRAYS})

    def sample(self, fraction, seed=0):
        """A uniform sample (§4.1: 38M of 150M mentions) by passage: each is whole or left out."""
        if fraction >= 1:
            return self
        n = int(self.passage.max()) + 1 if len(self) else 0
        keep = np.random.default_rng([seed, 1]).random(n) < fraction
        return self.select(torch.from_numpy(keep)[self.passage.cpu()])

    def emptied(self):
        return self.select(torch.zeros(len(self), dtype=torch.bool))

    def shuffled(self, seed=0):
        """Keys stay, values are another row's: it retrieves as before, what it gives is wrong."""
        order = np.random.default_rng(seed).permutation(len(self))
        return self.changed(values=self.values[torch.from_numpy(order).to(self.keys.device)])

    def by_article(self, article):
        """The same rows, grouped by article: a query of group a sees nothing of article a."""
        group = torch.from_numpy(np.array(article)).to(self.passage.device)[self.passage]
        return self.changed(passage=group.to(self.passage.dtype))

class MemoryAttention(nn.Module):
    """Eq. 6–9. H (B, T, hidden) -> M (B, T, hidden), Retrieved."""

    def __init__(self, config):
        super().__init__()
        self.k, self.k_shard = config.k, config.k_shard
        self.query = SpanEncodingLayer(config.hidden, config.key_dim)
        self.up = nn.Linear(config.value_dim, config.hidden)       # W_U, and the public code's bias
        self.norm = nn.LayerNorm(config.hidden, eps=1e-12)

    def forward(self, H, mentions, memory):
        row, start = mentions.row, mentions.start
        query = self.query(H, row, start, mentions.end)
        found = memory.attend(query, mentions.passage, self.k, self.k_shard)._replace(query=query)
        # accumulate: of two mentions that start at the same token, both updates count. A mention
        # that was allowed nothing adds nothing, not even W_U's bias.
        update = self.up(found.value) * (found.weights.sum(-1, keepdim=True) > 0)
        H = H.index_put((row, start), update.to(H.dtype), accumulate=True)
        # Eq. 9 is written for M_s. Read literally, only mention starts would be normalised twice
        # and leave the scale of their neighbours. The public code normalises all, and so do we.
        return self.norm(H), found

# ---- Files: plain .npy arrays by shard, and manifest.json. A shard is a fixed range of passages,
# so that any number of processes writes the same files. Its record (its passages, its rows, the
# checksums of its arrays) is a file of its own while the memory is built; manifest.json repeats all
# of them.

def array_file(folder, shard, name):
    return Path(folder) / f"{name}-{shard:05d}.npy"

def again(folder):
    return f"remove {folder} and run --stage memory again"

@contextmanager
def intact(path, remedy):
    """Whatever goes wrong with a file is one sentence: what is wrong with it, and what to do."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        state = "missing" if isinstance(error, FileNotFoundError) else "damaged"
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is {state} ({reason:.99}); {remedy}") from None

def no_rows(key_dim, value_dim, dtype):
    """{name: [an empty array]} of ARRAYS, for others to be appended."""
    rows = {name: [np.zeros(0, np.int64)] for name in IDS}
    rows["keys"], rows["values"] = ([np.zeros((0, dim), dtype)] for dim in (key_dim, value_dim))
    return rows

@torch.no_grad()
def encode_passages(encoder, corpus, passages, device, dtype=np.float32, progress=None):
    """Memory rows of the linked mentions of these passages (int64, rising), from their unmasked
    text (§2.1.2): a dictionary of ARRAYS in the order of the corpus."""
    encoder.eval()
    parts = no_rows(encoder.config.key_dim, encoder.config.value_dim, dtype)
    # Passages of similar length are read together: the last one sets the width of a batch.
    lengths = corpus.passage_start[passages + 1] - corpus.passage_start[passages]
    order = np.argsort(lengths, kind="stable")
    passages, lengths = passages[order], lengths[order]
    while len(passages):
        n_tokens = lengths * np.arange(1, len(lengths) + 1)
        n = max(1, int(np.searchsorted(n_tokens, BATCH_TOKENS, "right")))
        batch = data.make_batch(corpus, passages[:n], None, 0, 0, None).to(device)
        passages, lengths = passages[n:], lengths[n:]
        linked = batch.entity > 0
        spans = (batch.row[linked], batch.start[linked], batch.end[linked])
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            keys, values = encoder(batch.tokens, batch.attention_mask, *spans)
        with np.errstate(over="ignore"):                # check_finite says it in a sentence
            parts["keys"].append(keys.float().cpu().numpy().astype(dtype))
            parts["values"].append(values.float().cpu().numpy().astype(dtype))
        for name in IDS:
            parts[name].append(getattr(batch, name)[linked].cpu().numpy())
        if progress is not None:
            progress.update(n)
    rows = {name: np.concatenate(part) for name, part in parts.items()}
    order = np.argsort(rows["mention"])
    return {name: array[order] for name, array in rows.items()}

def check_finite(rows, corpus):
    """Raises UserError where a key or a value is not a finite number."""
    for name in ("keys", "values"):
        bad = ~np.isfinite(rows[name]).all(1)
        if bad.any():
            p = int(rows["passage"][bad.argmax()])
            title = corpus.titles[corpus.article[p]]
            raise UserError(f"passage {p:,} ({title!r}): a number of its {name} is not "
                            f"finite in {rows[name].dtype}; train batch-tome again with a "
                            "lower --lr, or in float16 use --set memory_dtype=float32")

def take_over(old, part, shard, crc32):
    """Links an old memory's arrays of this shard into `part`. False where they are not whole."""
    for name in ARRAYS:
        source, target = array_file(old, shard, name), array_file(part, shard, name)
        target.unlink(missing_ok=True)
        if not source.exists() or checksum(source) != crc32[name]:
            return False
        try:
            os.link(source, target)
        except OSError:                                 # another disk, or one without links
            shutil.copyfile(source, target)
    return True

def build_memory(encoder, corpus, folder, device, dtype, recipe, old=None):
    """Writes the memory of the corpus's linked mentions to `folder`, which must not exist.

    All processes call it and share the shards. They write to `folder`.part, where a build that was
    cut off goes on, and which is renamed at the end. recipe: a plain dictionary that the manifest
    keeps. old: folder of a memory, of a corpus with which this one begins; if it is of the same
    encoder, its shards of the same passages are linked. Raises UserError."""
    part, (rank, size) = Path(f"{folder}.part"), ann.rank_and_size()
    part.mkdir(parents=True, exist_ok=True)
    n_passages = len(corpus.article)
    manifest = {"format": FORMAT, "recipe": recipe, "encoder": encoder.fingerprint,
                "dtype": np.dtype(dtype).name, "key_dim": encoder.config.key_dim,
                "value_dim": encoder.config.value_dim}
    theirs = read_manifest(old) if old is not None else {"encoder": None}
    can_link = all(theirs[name] == manifest[name] for name in ("encoder", "dtype"))
    old_records = dict(enumerate(theirs["shards"])) if can_link else {}
    firsts = range(0, n_passages, PASSAGES_PER_SHARD)
    paths = [part / f"shard-{shard:05d}.json" for shard in range(len(firsts))]
    progress = tqdm(total=n_passages // size, desc="memory", unit=" passages", disable=rank > 0)
    for shard in range(rank, len(firsts), size):
        passages = np.arange(n_passages)[firsts[shard]:][:PASSAGES_PER_SHARD]
        holds = {"first": firsts[shard], "passages": len(passages)}
        with suppress(OSError, ValueError):
            if read_json(paths[shard]).items() >= holds.items():
                progress.update(len(passages))
                continue                    # a record is written last: its arrays are whole
        record = old_records.get(shard, {})
        if not (record.items() >= holds.items() and take_over(old, part, shard, record["crc32"])):
            rows = encode_passages(encoder, corpus, passages, device, dtype, progress)
            check_finite(rows, corpus)
            record = holds | {"n": len(rows["keys"]), "crc32": {}}
            for name, array in rows.items():
                path = array_file(part, shard, name)
                write_file(path, lambda file: np.save(file, array, allow_pickle=False))
                record["crc32"][name] = checksum(path)
        write_json(paths[shard], record)
    progress.close()
    ann.barrier()
    if rank == 0:
        shards = [read_json(path) for path in paths]
        n = sum(shard["n"] for shard in shards)
        write_json(part / "manifest.json", manifest | {"n": n, "shards": shards})
        commit_folder(part, folder)
    ann.barrier()

def read_manifest(folder):
    """manifest.json, a dictionary. Raises UserError where it or one of its arrays is missing."""
    path = Path(folder) / "manifest.json"
    with intact(path, again(folder)):
        manifest = read_json(path)
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']}, this version reads {FORMAT}")
        arrays = [array_file(folder, shard, name)
                  for shard in range(len(manifest["shards"])) for name in ARRAYS]
    for path in arrays:
        with intact(path, again(folder)):
            os.stat(path)
    return manifest

def load_memory(folder, encoder=None, device="cpu"):
    """This process's part of the table: shards rank, rank + size, … encoder: the fingerprint of the
    Mention Encoder that wrote it (app. B.6: TOME cannot learn to use another one's). Raises
    UserError, also where a file's checksum differs."""
    manifest, (rank, size) = read_manifest(folder), ann.rank_and_size()
    if encoder not in (None, manifest["encoder"]):
        raise UserError(f"{folder} was written by another mention encoder; {again(folder)}")
    parts = no_rows(manifest["key_dim"], manifest["value_dim"], manifest["dtype"])
    for shard in range(rank, len(manifest["shards"]), size):
        for name in ARRAYS:
            path = array_file(folder, shard, name)
            with intact(path, again(folder)):
                if checksum(path) != manifest["shards"][shard]["crc32"][name]:
                    raise ValueError("its checksum differs")
                # never unpickle a stranger's objects
                parts[name].append(np.load(path, mmap_mode="r", allow_pickle=False))
    rows = {name: np.concatenate(part) for name, part in parts.items()}
    return MentionMemory.from_arrays(rows, device)
