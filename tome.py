"""TOME, BATCH-TOME, their losses and the heads of the tasks (paper §2.2-2.4, §4, app. A, B).

    H0 = InitialTransformerBlock(TokenEmbedding(x))                                     eq. 4
    M  = MemoryAttention(H),   H' = TransformerBlock(M)          a TOMEBlock            eq. 2, 3
    Hl = TOMEBlock_l(Hl-1),    l = 1 ... L        TOME-1: L = 1, TOME-2: L = 2          eq. 5

The Mention Encoder is the same Transformer without its memory layers; two SpanEncodingLayers on top
give keys and values (§2.1.1). BATCH-TOME trains this encoder: a batch is read with it, then again
as TOME, which attends to the mentions of the first read (§2.3). TOME goes on from its weights
over the frozen memory of the whole corpus (§2, §2.3). A last retrieval names the answer (eq. 10).

In shapes: B passages of T tokens, M mentions of the whole batch (not the matrix M of eq. 2), K
retrieved memories of each, L masked tokens (not the L of eq. 5). z is the paper's z_m, `scores`
are Query(m) · MemKey(i), `weights` are alpha."""
import hashlib
import re

import torch
import torch.nn.functional as F
from torch import nn

import ann
import data
from encoder import (Embeddings, MLMHead, SpanEncodingLayer, TransformerBlock,
                     init_weights, read_weights)
from memory import BatchMemory, EntityTable, MemoryAttention, attention_weights

class TOMEBlock(nn.Module):
    """Eq. 2 and 3. Without a memory, as the Mention Encoder runs it, only its TransformerBlock."""
    def __init__(self, config, n_layers):
        super().__init__()
        self.memory_attention = MemoryAttention(config) if config.memory != "none" else None
        self.transformer = TransformerBlock(config, n_layers)

    def forward(self, H, attention_mask, mentions, memory):
        """H of block l - 1 -> H of block l, and Retrieved, or None where there is no memory."""
        found = None
        if memory is not None and self.memory_attention is not None:
            H, found = self.memory_attention(H, mentions, memory)
        return self.transformer(H, attention_mask), found

class TOME(nn.Module):
    """Eq. 4 and 5, and the heads of its tasks."""
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.initial = TransformerBlock(config, config.n_initial)
        self.blocks = nn.ModuleList(TOMEBlock(config, config.layers_per_block)
                                    for _ in range(config.n_blocks))
        self.mlm = MLMHead(config)
        # W of z_m, eq. 10 (app. A.2's z is BatchTOME.coref): set by fit_retrieval, if that is run,
        # trained from stage tome on.
        self.answer = SpanEncodingLayer(config.hidden, config.key_dim)
        self.claim = nn.Linear(config.hidden, 3)                            # labels of a claim
        self.entities = EntityTable(config) if config.n_entities else None  # in the baselines
        self.apply(lambda module: init_weights(module, config.init_std))

    def read_initial(self, tokens, attention_mask):
        """tokens, attention_mask (B, T) -> H0 (B, T, hidden), eq. 4."""
        return self.initial(self.embeddings(tokens), attention_mask)

    def read_blocks(self, H, attention_mask, mentions=None, memory=None):
        """H0 -> H_L (B, T, hidden), and a list of each block's Retrieved, or None (eq. 5).
        mentions: a Batch, or anything with row, start, end, passage (M,)."""
        retrieved = []
        for block in self.blocks:
            H, found = block(H, attention_mask, mentions, memory)
            retrieved.append(found)
        return H, retrieved

    def forward(self, tokens, attention_mask, mentions=None, memory=None):
        """tokens (B, T) -> as read_blocks. Without a memory it is a plain Transformer."""
        H0 = self.read_initial(tokens, attention_mask)
        return self.read_blocks(H0, attention_mask, mentions, memory)

    def mlm_logits(self, H, is_target):
        """Logits (L, vocab) at the masked tokens; the rest of them would be thrown away."""
        return self.mlm(H[is_target], self.embeddings.word.weight)

class MentionEncoder(nn.Module):
    """Tokens and mentions -> key (M, d_K) and value (M, d_V) mention encodings (§2.1.1)."""
    def __init__(self, tome):
        super().__init__()
        self.config = config = tome.config
        self.tome = tome                                        # shared with BATCH-TOME (§4.1)
        self.key = SpanEncodingLayer(config.hidden, config.key_dim)
        self.value = SpanEncodingLayer(config.hidden, config.value_dim)
        init_weights(self.key.linear, config.init_std)
        init_weights(self.value.linear, config.init_std)

    def forward(self, tokens, attention_mask, row, start, end):
        """row, start, end (M,): where the mentions stand. Nothing is masked, no memory is read."""
        H, _ = self.tome(tokens, attention_mask)
        return self.key(H, row, start, end), self.value(H, row, start, end)

    @property
    def fingerprint(self):
        """Names this encoder by its weights: a memory belongs to the one that wrote it."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(name.encode() + tensor.cpu().numpy().tobytes())
        return digest.hexdigest()

class BatchTOME(nn.Module):
    """Reads a batch twice (§2.3): the Mention Encoder fills the batch memory, TOME attends to it.
    Both are the same Transformer, self.tome."""
    def __init__(self, tome):
        super().__init__()
        self.config = tome.config
        self.encoder = MentionEncoder(tome)
        self.coref = SpanEncodingLayer(tome.config.hidden, tome.config.coref_dim)   # z of app. A.2
        init_weights(self.coref.linear, tome.config.init_std)

    @property
    def tome(self):                 # an attribute would be saved a second time
        return self.encoder.tome

    def forward(self, batch):
        """H (B, T, hidden) of the second read, and what its memory layers retrieved."""
        mask = batch.attention_mask
        # The memory is made from the unmasked text (our choice; the paper does not say, its code
        # reads the masked one). A passage never attends to its own mentions, so nothing leaks.
        linked = batch.entity > 0
        spans = batch.row[linked], batch.start[linked], batch.end[linked]
        keys, values = self.encoder(batch.unmasked, mask, *spans)
        memory = BatchMemory(keys, values, batch.entity[linked], batch.passage[linked])
        return self.tome(batch.tokens, mask, batch, memory)

# ---- Losses --------------------------------------------------------------------------------------
# Each is this process's part of a mean over all processes: a sum over its own items, divided by the
# number of items everywhere. The parts add up to the loss of one big batch, their gradients to its.

def share_of_mean(losses):
    """losses (n,) of this process -> its part of the mean over all processes; 0 of no item."""
    n = ann.sum_over_processes(losses.numel(), losses.device)
    return losses.sum() / n.clamp(min=1)

def mlm_loss(logits, target):
    """Mean cross-entropy over the masked tokens. logits (L, vocab), target (L,) -> scalar."""
    return share_of_mean(F.cross_entropy(logits.float(), target, reduction="none"))

def coreference_loss(z, entity, passage):
    """App. A.2: mentions of one entity should have similar z, mentions of different ones not.

    z (M, d_C), entity (M,) 0 = not linked, passage (M,) -> scalar. A linked mention is compared
    with the linked mentions of all other passages, of all processes. Those of its entity are its
    positives, the others its negatives. Its loss is the mean over its positives of the
    cross-entropy of that one against all negatives. (So say the appendix's text and the public
    code; the appendix's formula sums inside the logarithm.) The result is the mean over the
    mentions that have a positive."""
    linked = entity > 0
    z, entity, passage = z[linked].float(), entity[linked], passage[linked]
    all_z, all_entity, all_passage = ann.gather(z), ann.gather(entity), ann.gather(passage)
    scores = ann.dot(z, all_z)                                                  # (M, N)
    elsewhere = passage[:, None] != all_passage
    same = entity[:, None] == all_entity
    positive = elsewhere & same
    negatives = scores.masked_fill(~(elsewhere & ~same), -torch.inf).logsumexp(-1)      # (M,)
    mention, other = positive.nonzero(as_tuple=True)                            # (pairs,)
    # -log(e^p / (e^p + sum e^n)) = log(1 + e^(log sum e^n - p))
    losses = F.softplus(negatives[mention] - scores[mention, other])
    n_positive = positive.sum(-1)
    total = torch.zeros_like(negatives).index_add(0, mention, losses)
    mean = total / n_positive.clamp(min=1)
    return share_of_mean(mean[n_positive > 0])

def entity_prediction_loss(scores, memory_entity, entity):
    """-log EntProb(m, Ent(m)) of eq. 10, the mean over linked mentions that retrieved a memory of
    their entity (§2.4). scores (M, K) z . MemKey (-inf: none), memory_entity (M, K), entity (M,)
    0 = not linked -> scalar."""
    same = (memory_entity == entity[:, None]) & ~scores.isneginf()
    counted = (entity > 0) & same.any(-1)           # without a memory of its entity: log 0
    scores, same = scores[counted], same[counted]
    own = scores.masked_fill(~same, -torch.inf)
    return share_of_mean(scores.logsumexp(-1) - own.logsumexp(-1))

def predict_entity(scores, memory_entity):
    """Eq. 10 and its argmax, the entity with the largest sum of attention weights; 0 where nothing
    was retrieved. scores, memory_entity (M, K) -> (M,)."""
    weights = attention_weights(scores)                                         # (M, K)
    entities, which = memory_entity.unique(return_inverse=True)                 # (n,), (M, K)
    sums = weights.new_zeros(len(weights), len(entities)).scatter_add(1, which, weights)
    probability, best = sums.max(dim=-1)                                        # (M,)
    return torch.where(probability > 0, entities[best], 0)

# ---- The heads of claims and questions (§4.3, §4.4) ----------------------------------------------

def claim_logits(tome, H, batch):
    """(B, 3), in the order of data.CLAIM_LABELS, from the mean of the [E_start] encodings of a
    claim's mentions: to these positions the memory's values were added (eq. 9). Each goes through
    the MLM head's layer first. The paper does not name its head. The public code's reads [CLS], off
    which toy claims stayed at chance, and may have a layer of its own."""
    B = len(batch.tokens)
    n_mentions = torch.bincount(batch.row, minlength=B).clamp(min=1)
    h = tome.mlm.transform(H[batch.row, batch.start])                           # (M, hidden)
    total = h.new_zeros(B, h.shape[-1]).index_add(0, batch.row, h)
    return tome.claim(total / n_mentions[:, None])

def retrieve_answer(tome, H, batch, memory, asked):
    """What the n mentions of the mask `asked` (M,) retrieve with z of eq. 10 as query: Retrieved of
    (n, K); weights and value are not used."""
    z = tome.answer(H, batch.row[asked], batch.start[asked], batch.end[asked])
    k, k_shard = tome.config.k_answer, tome.config.k_answer_shard
    return memory.retrieve(z, batch.passage[asked], k, k_shard)

# ---- Initial weights -----------------------------------------------------------------------------
# The model learns to use the memory only once retrieval finds something useful (app. B.6). So in
# presets toy and mini BATCH-TOME is first trained with the memory off, until [E_start] and [E_end]
# encode their mention. Then fit_retrieval makes queries find keys of their entity, and the memory
# is switched on. In base, with the paper's million steps, it is on from the first.

@torch.no_grad()
def start_positions(model):
    """Positions begin as sinusoids (Vaswani et al. 2017) of the size of the other embeddings, and
    are learnt from there: from random ones the toy model learns to read later."""
    position = model.tome.embeddings.position.weight                    # (positions, hidden)
    n, hidden = position.shape
    angle = torch.arange(n)[:, None] / 10000 ** (torch.arange(0, hidden, 2) / hidden)
    waves = torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1)   # (positions, hidden)
    position.copy_(waves * model.config.init_std * 2 ** 0.5)

@torch.no_grad()
def fit_retrieval(model, batches, self_score=20.0):
    """Sets the key, query and answer layers in closed form, from a few batches in which half of the
    mentions are masked. Random layers find nothing: [H_s; H_e] is much the same for all mentions.

    Keys: the first n <= d_K principal components of [H_s; H_e] in unmasked text, whitened, each of
    variance self_score / n, weak ones of less. So a key's mean score with itself is self_score at
    most; at 20 the softmax prefers it among thousands. Queries, and z of eq. 10: a linear map from
    [H_s; H_e] in masked text (queries: of H0, z: of the last layer) to the mean key of the
    mention's entity. On real text masked mentions then give 10% of their attention to their entity;
    with their own key as target only 1%, since queries then look for the form of a name."""
    tome, rows = model.tome, []
    for batch in batches:
        H0 = tome.read_initial(batch.tokens, batch.attention_mask)
        H, _ = tome.read_blocks(H0, batch.attention_mask)
        whole, _ = tome(batch.unmasked, batch.attention_mask)
        linked = batch.entity > 0
        row, start, end = batch.row[linked], batch.start[linked], batch.end[linked]
        # [H_s; H_e], (m, 2 hidden) each: what queries, answers and keys are made from.
        spans = [torch.cat([x[row, start], x[row, end]], 1).double() for x in (H0, H, whole)]
        rows.append((*spans, batch.entity[linked]))
    # (m, 2 hidden) each, and (m,)
    of_queries, of_answers, of_keys, entity = map(torch.cat, zip(*rows))
    if len(of_keys) < 2:
        return
    key, mean = model.encoder.key.linear, of_keys.mean(0)
    covariance = (of_keys - mean).T @ (of_keys - mean) / len(of_keys)
    variance, direction = torch.linalg.eigh(covariance)                         # rising
    n = min(len(key.weight), len(variance))
    # What is added keeps directions of almost no variance from being blown up.
    deviation = (variance[-n:] + 1e-3 * variance[-1]).clamp(min=1e-12).sqrt()
    W = torch.zeros_like(key.weight, dtype=torch.double)                        # (d_K, 2 hidden)
    W[:n] = (direction[:, -n:] / deviation).T * (self_score / n) ** 0.5
    key.weight.copy_(W)
    key.bias.copy_(-W @ mean)
    keys = (of_keys - mean) @ W.T                                               # (m, d_K)
    _, which, count = entity.unique(return_inverse=True, return_counts=True)
    total = keys.new_zeros(len(count), keys.shape[1]).index_add(0, which, keys)
    wanted = (total / count[:, None])[which]                                    # (m, d_K)
    fit_linear(tome.blocks[0].memory_attention.query.linear, of_queries, wanted, self_score)
    fit_linear(tome.answer.linear, of_answers, wanted, self_score)

def fit_linear(layer, X, wanted, score):
    """Ridge regression from X (m, 2 hidden) to `wanted` (m, d_K), whose mean is 0. Then W is
    scaled, so that the mean dot product of its output with `wanted` is `score`."""
    mean = X.mean(0)
    X = X - mean
    gram = X.T @ X
    ridge = 0.1 * gram.diag().mean().clamp(min=1e-6) * torch.eye(len(gram), device=X.device)
    W = torch.linalg.solve(gram + ridge, X.T @ wanted).T                        # (d_K, 2 hidden)
    W *= score / (X @ W.T * wanted).sum(1).mean().clamp(min=1e-6)
    layer.weight.copy_(W)
    layer.bias.copy_(-W @ mean)

def split_into_blocks(state, config):
    """TOME's initial weights from BATCH-TOME's (a state dictionary), which has one memory layer.

    The Transformer layers above it are divided among TOME's blocks in their order, and the memory
    layer is copied to each. Trained with two memory layers from the first step, the second one was
    never used. A single Transformer layer is copied to both blocks, with one more layer above it
    that at first only normalises its input again: its maps to the output begin at zero, those
    inside as copies (were they zero, too, nothing would be learnt)."""
    weights = {name: tensor for name, tensor in state.items() if not name.startswith("blocks.")}
    for block in range(config.n_blocks):
        for name, tensor in part_of(state, "blocks.0.memory_attention.").items():
            weights[f"blocks.{block}.memory_attention.{name}"] = tensor
        for i in range(config.layers_per_block):
            number = min(block * config.layers_per_block + i, config.n_upper - 1)
            for name, tensor in part_of(state, f"blocks.0.transformer.layers.{number}.").items():
                if i >= config.n_upper and not name.startswith(("attention.qkv.", "up.")):
                    is_scale = name.endswith("norm.weight")
                    tensor = torch.full_like(tensor, 1.0 if is_scale else 0.0)
                weights[f"blocks.{block}.transformer.layers.{i}.{name}"] = tensor
    return weights

def part_of(state, prefix):
    """The entries of a state dictionary below a prefix, named without it."""
    return {name.removeprefix(prefix): tensor
            for name, tensor in state.items() if name.startswith(prefix)}

# ==== Set apart: published weights ================================================================

def read_published(path, config):
    """(config, state, lacks, unused) of a BERT's folder, or of a file of the paper's own code.

    config: `config` with their sizes, in one block if a BERT; state: a state dictionary of parts of
    BatchTOME; lacks: the parts of BatchTOME that are not in it; unused: its parts that BatchTOME
    does not have. Raises UserError."""
    with data.intact(path, "cannot be read as a BERT or as weights of the paper's own code",
                     "give another file"):
        config, found = read_weights(path, config)
        with torch.device("meta"):                              # shapes without numbers
            model = BatchTOME(TOME(config))
        names = {name.removeprefix("encoder.").removeprefix("tome."): name
                 for name in model.state_dict()}
        ours, theirs = dict.fromkeys(map(part_name, names)), {*map(part_name, found)}
        # A part may be missing as a whole. If some of its tensors are there, found[name] raises.
        state = {names[name]: found[name] for name in names if part_name(name) in theirs}
        model.load_state_dict(state, strict=False, assign=True)     # refuses another shape
    lacks = [part for part in ours if part not in theirs]
    return config, state, lacks, sorted(theirs - ours.keys())

def part_name(name):
    """Of a tensor's name the part that it belongs to: "mlm", "blocks.0.memory_attention", …"""
    return re.match(r"(blocks\.\d\.)?[^.]*", name)[0]
