"""TOME, BATCH-TOME, their losses and the heads of the tasks (paper §2.2-2.4, §4, app. A, B).

    H0 = InitialTransformerBlock(TokenEmbedding(x))                                     eq. 4
    M  = MemoryAttention(H),   H' = TransformerBlock(M)          a TOMEBlock            eq. 2, 3
    Hl = TOMEBlock_l(Hl-1),    l = 1 ... L        TOME-1: L = 1, TOME-2: L = 2          eq. 5

The Mention Encoder is the same Transformer without its memory layers; two SpanEncodingLayers on top
of it give keys and values (§2.1.1). BATCH-TOME trains this encoder with two forward passes over a
batch: the Mention Encoder's, then TOME's, which attends to the mentions encoded by the first pass
(§2.3). TOME then starts from BATCH-TOME's weights and attends to the frozen memory of the whole
corpus. A last retrieval predicts the entity of a mention, or the answer to a question (eq. 10).

Shapes: a batch has B passages of T tokens, M mentions (not eq. 2's matrix M) and L masked tokens
(not eq. 5's L). Each mention retrieves K memories. z is the paper's z_m. `scores` are
Query(m) · MemKey(i), or z · MemKey(i) in eq. 10, and `weights` are alpha."""
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import ann
import data
from encoder import (Embeddings, MLMHead, SpanEncodingLayer, TransformerBlock, beside,
                     check_tokenizer, init_weights, read_weights)
from memory import BatchMemory, EntityTable, MemoryAttention, OwnValues, attention_weights

class TOMEBlock(nn.Module):
    """Eq. 2 and 3. Without a memory, as in the Mention Encoder, only the TransformerBlock runs."""
    def __init__(self, config, n_layers):
        super().__init__()
        self.memory_attention = MemoryAttention(config) if config.memory != "none" else None
        self.transformer = TransformerBlock(config, n_layers)

    def forward(self, H, attention_mask, mentions, memory, is_used=None):
        """H_l-1 (B, T, hidden) -> H_l, and a Retrieved (None without a memory). With --memory none,
        `memory` is a table that only eq. 10 uses, so no block attends to it."""
        found = None
        if memory is not None and self.memory_attention is not None:
            H, found = self.memory_attention(H, mentions, memory)
        return self.transformer(H, attention_mask, is_used), found

class TOME(nn.Module):
    """Eq. 4 and 5, and the heads."""
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.initial = TransformerBlock(config, config.n_initial)
        self.blocks = nn.ModuleList(TOMEBlock(config, config.layers_per_block)
                                    for _ in range(config.n_blocks))
        self.mlm = MLMHead(config)
        # Makes z of eq. 10, which is compared with keys, so its size is d_K (A.2's z: d_C). The
        # layer is random until stage tome, unless fit_retrieval or train.with_published has set it.
        self.entity_query = SpanEncodingLayer(config.hidden, config.key_dim)
        self.claim = nn.Linear(config.hidden, 3)                            # labels of a claim
        self.entities = EntityTable(config) if config.n_entities else None  # baselines only
        self.apply(lambda module: init_weights(module, config.init_std))

    def forward_initial(self, tokens, attention_mask):
        """tokens, attention_mask (B, T) -> H0 (B, T, hidden), eq. 4."""
        return self.initial(self.embeddings(tokens), attention_mask)

    def forward_blocks(self, H, attention_mask, mentions=None, memory=None, is_used=None):
        """H0 -> H_L (B, T, hidden), and what each block retrieved (a list), eq. 5. mentions: a
        Batch, or anything with row, start, end, passage (M,). is_used (B, T): if given, H_L is zero
        where it is false, which saves time (encoder.TransformerBlock)."""
        retrieved = []
        for block in self.blocks:
            used = is_used if block is self.blocks[-1] else None
            H, found = block(H, attention_mask, mentions, memory, used)
            retrieved.append(found)
        return H, retrieved

    def forward(self, tokens, attention_mask, mentions=None, memory=None, is_used=None):
        """forward_initial, then forward_blocks (see there for the arguments). Without a memory,
        this is a plain Transformer."""
        H0 = self.forward_initial(tokens, attention_mask)
        return self.forward_blocks(H0, attention_mask, mentions, memory, is_used)

    def mlm_logits(self, H, is_target):
        """Logits (L, vocab) of the masked tokens, where is_target (B, T) is true."""
        return self.mlm(H[is_target], self.embeddings.word.weight)

class BatchTOME(nn.Module):
    """The Mention Encoder and TOME over the batch's mentions (§2.3). They share weights (§4.1)."""
    def __init__(self, tome):
        super().__init__()
        self.config = config = tome.config
        self.tome = tome
        self.key = SpanEncodingLayer(config.hidden, config.key_dim)
        self.value = SpanEncodingLayer(config.hidden, config.value_dim)
        self.coref = SpanEncodingLayer(config.hidden, config.coref_dim)             # z of app. A.2
        for layer in (self.key, self.value, self.coref):
            init_weights(layer.linear, config.init_std)

    def encode_mentions(self, tokens, attention_mask, row, start, end):
        """The Mention Encoder (§2.1.1): keys (M, d_K) and values (M, d_V) of the mentions at row,
        start, end (M,). For the mention memory (stage memory), tokens are unmasked."""
        H, _ = self.tome(tokens, attention_mask)
        return self.key(H, row, start, end), self.value(H, row, start, end)

    def forward(self, batch, attends_to="batch memory", is_used=None):
        """(H0, H without memory, H with memory, what each block retrieved). H is (B, T, hidden). If
        is_used (B, T) is given, H (but not H0) is zero where it is false.

        The memory contains the linked mentions that are not masked, encoded in the masked text by
        the pass without a memory. (The encoding of a masked mention lacks its name. The public code
        keeps masked mentions; the paper does not mention this case.) If attends_to is "own values",
        OwnValues takes the place of this memory. If it is "nothing", H with memory is H without."""
        tome, mask = self.tome, batch.attention_mask
        H0 = tome.forward_initial(batch.tokens, mask)           # the same in both passes
        alone, _ = tome.forward_blocks(H0, mask, is_used=is_used)
        if attends_to == "nothing":
            return H0, alone, alone, []
        if attends_to == "own values":
            with torch.no_grad():               # saves time; self.value still gets a gradient
                unmasked, _ = tome(batch.unmasked, mask, is_used=is_used)
            attended = OwnValues(self.value(unmasked, batch.row, batch.start, batch.end))
        else:
            # data.mask_batch masks all tokens of a mention or none, so checking one is enough.
            is_masked = batch.is_target[batch.row, batch.start + 1]
            is_kept = (batch.entity > 0) & ~is_masked
            spans = batch.row[is_kept], batch.start[is_kept], batch.end[is_kept]
            attended = BatchMemory(self.key(alone, *spans), self.value(alone, *spans),
                                   batch.entity[is_kept], batch.passage[is_kept])
        return H0, alone, *tome.forward_blocks(H0, mask, batch, attended, is_used)

# ---- Losses --------------------------------------------------------------------------------------
# Each loss is this process's share of a mean over all processes: the sum over the process's own
# items, divided by the number of items in all processes. The shares of all processes add up to the
# loss of one large batch, and their gradients to its gradient.

def share_of_mean(losses):
    """losses (n,) of this process -> its share of the mean over all processes (0 if n is 0)."""
    n = ann.sum_over_processes(losses.numel(), losses.device)
    return losses.sum() / n.clamp(min=1)

def mlm_loss(logits, target):
    """Mean cross-entropy over the masked tokens. logits (L, vocab), target (L,) -> scalar."""
    return share_of_mean(F.cross_entropy(logits.float(), target, reduction="none"))

def coreference_loss(z, entity, passage):
    """App. A.2: z should be similar for two mentions of the same entity, and otherwise dissimilar.

    z (M, d_C), entity (M,) 0 = not linked, passage (M,) -> scalar. Each linked mention is compared
    with the linked mentions in other passages of all processes. Mentions of the same entity are
    its positives, mentions of other entities its negatives. Its loss is the mean, over positives,
    of the cross-entropy of a positive against all negatives; the result is the mean over mentions
    with a positive. (The public code and A.2's text say so; A.2's formula sums inside the log.)"""
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
    total = torch.zeros_like(negatives).index_add(0, mention, losses)
    n_positive = positive.sum(-1)
    mean = total / n_positive.clamp(min=1)
    return share_of_mean(mean[n_positive > 0])

def entity_prediction_loss(scores, memory_entity, entity):
    """-log EntProb(m, Ent(m)) of eq. 10, averaged over the linked mentions that retrieved a memory
    of their entity (§2.4). scores (M, K) z · MemKey (-inf: no memory), memory_entity (M, K),
    entity (M,) 0 = not linked -> scalar."""
    same = (memory_entity == entity[:, None]) & ~scores.isneginf()
    counted = (entity > 0) & same.any(-1)               # otherwise the loss is -log 0
    scores, same = scores[counted], same[counted]
    own = scores.masked_fill(~same, -torch.inf)
    return share_of_mean(scores.logsumexp(-1) - own.logsumexp(-1))

def predict_entity(scores, memory_entity):
    """The entity with the largest sum of attention weights, eq. 10; 0 if nothing was retrieved.
    scores, memory_entity (M, K) -> (M,)."""
    weights = attention_weights(scores)                                         # (M, K)
    entities, which = memory_entity.unique(return_inverse=True)                 # (n,), (M, K)
    sums = weights.new_zeros(len(weights), len(entities)).scatter_add(1, which, weights)
    probability, best = sums.max(dim=-1)                                        # (M,)
    return torch.where(probability > 0, entities[best], 0)

# ---- The heads of claims and questions (§4.3, §4.4) ----------------------------------------------

def claim_logits(tome, H, batch):
    """Logits (B, 3) in the order of data.CLAIM_LABELS, from the MLM head's hidden layer at
    [E_start] (where eq. 9 added the memory's values), averaged over the claim's mentions. The paper
    does not describe its claims head. With [CLS] instead, as in the public code, accuracy on toy
    claims stayed at chance."""
    n_mentions = torch.bincount(batch.row, minlength=len(batch.tokens)).clamp(min=1)    # (B,)
    h = tome.mlm.transform(H[batch.row, batch.start])                           # (M, hidden)
    total = h.new_zeros(len(n_mentions), h.shape[-1]).index_add(0, batch.row, h)
    return tome.claim(total / n_mentions[:, None])

def retrieve_entities(tome, H, batch, memory, asked):
    """The Retrieved (n, K) of the n mentions where `asked` (M,) is true, with z of eq. 10 as query.
    In stage tome these are linked mentions (§2.4); in fine-tuning, the final [MASK] of a question
    (§4.4) or the masked entity of a cloze (a true claim with one entity masked)."""
    z = tome.entity_query(H, batch.row[asked], batch.start[asked], batch.end[asked])
    k, k_shard = tome.config.k_answer, tome.config.k_answer_shard
    return memory.retrieve(z, batch.passage[asked], k, k_shard)

# ==== Set apart: initial weights ==================================================================
# fit_retrieval is the second of the three parts of batch-tome (see train.BatchTOMEStage).

@torch.no_grad()
def sinusoidal_positions(model):
    """Sets the position embeddings to sinusoids (Vaswani et al. 2017), scaled like the other
    embeddings and trainable. The toy model starts to learn later if they are random instead."""
    position = model.tome.embeddings.position.weight                    # (positions, hidden)
    n, hidden = position.shape
    angle = torch.arange(n)[:, None] / 10000 ** (torch.arange(0, hidden, 2) / hidden)
    waves = torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1)   # (positions, hidden)
    position.copy_(waves * model.config.init_std * 2 ** 0.5)    # mean of sin^2 and cos^2: 1/2

@torch.no_grad()
def fit_retrieval(model, batches, self_score=20.0):
    """Sets the layers of keys, queries and z of eq. 10 in closed form, from batches in which half
    of the mentions are masked. The query and z of a mention in the masked text are fitted to its
    key in the unmasked text, so no labels are used. This key is never retrieved, since it is from
    the same passage. But keys of the same entity are near it, since the coreference loss has made
    mentions of an entity similar. self_score: the mean score of a query with its target, and an
    upper bound on the mean score of a key with itself. Other keys score 0 on average, and e^20
    outweighs thousands of e^0. (Random layers find nothing, since all [H_s; H_e] are similar.)"""
    of_queries, of_answers, of_keys = linked_spans(model, batches)
    if len(of_keys) < 2:
        return
    keys = fit_keys(model.key.linear, of_keys, self_score)                      # (m, d_K)
    query = model.tome.blocks[0].memory_attention.query         # BATCH-TOME's only memory layer
    fit_linear(query.linear, of_queries, keys, self_score)
    fit_linear(model.tome.entity_query.linear, of_answers, keys, self_score)

def linked_spans(model, batches):
    """[H_s; H_e] of the m linked mentions, (m, 2 hidden) each, from three sources: H0 (for queries)
    and H (for z) of the masked text, and H of the unmasked text (for keys). All are made without a
    memory, since retrieval is not useful yet; stage tome later trains z on H with a memory."""
    rows = []
    for batch in batches:
        H0 = model.tome.forward_initial(batch.tokens, batch.attention_mask)
        H, _ = model.tome.forward_blocks(H0, batch.attention_mask)
        whole, _ = model.tome(batch.unmasked, batch.attention_mask)
        linked = batch.entity > 0
        row, start, end = batch.row[linked], batch.start[linked], batch.end[linked]
        spans = (torch.cat([x[row, start], x[row, end]], 1) for x in (H0, H, whole))
        rows.append([x.cpu().double() for x in spans])
    return map(torch.cat, zip(*rows))

def fit_keys(layer, X, self_score):
    """Sets `layer` so that keys are the first n <= d_K principal components of X (m, 2 hidden),
    each scaled to a variance of self_score / n. Returns the keys of X (m, d_K)."""
    mean = X.mean(0)
    covariance = (X - mean).T @ (X - mean) / len(X)
    variance, direction = torch.linalg.eigh(covariance)                         # ascending
    n = min(len(layer.weight), len(variance))
    # The added term keeps directions with almost no variance from being scaled up.
    deviation = (variance[-n:] + 1e-3 * variance[-1]).clamp(min=1e-12).sqrt()
    W = X.new_zeros(layer.weight.shape)                                         # (d_K, 2 hidden)
    W[:n] = (direction[:, -n:] / deviation).T * (self_score / n) ** 0.5
    layer.weight.copy_(W)
    layer.bias.copy_(-W @ mean)
    return (X - mean) @ W.T

def fit_linear(layer, X, target, score):
    """Sets `layer` by ridge regression from X (m, 2 hidden) to `target` (m, d_K), whose mean is 0,
    and scales it so that the mean dot product of its output and the target is `score`."""
    mean = X.mean(0)
    X = X - mean
    gram = X.T @ X
    ridge = 0.1 * gram.diag().mean().clamp(min=1e-6) * torch.eye(len(gram), device=X.device)
    W = torch.linalg.solve(gram + ridge, X.T @ target).T                        # (d_K, 2 hidden)
    W *= score / (X @ W.T * target).sum(1).mean().clamp(min=1e-6)
    layer.weight.copy_(W)
    layer.bias.copy_(-W @ mean)

def split_into_blocks(state, config):
    """TOME's initial weights from those of BATCH-TOME's Transformer (both state dictionaries).

    BATCH-TOME has one memory layer, because with two it never used the second. Each block of TOME
    gets a copy of the memory layer (whose query reads H0; stage tome adapts the second copy to H1)
    and an equal share of the Transformer layers above it, in order.
    If there is one such layer for two blocks, each gets a copy of it, with an idle layer on top."""
    weights = {name: tensor for name, tensor in state.items() if not name.startswith("blocks.")}
    memory_attention = part_of(state, "blocks.0.memory_attention.")
    layers = [part_of(state, f"blocks.0.transformer.layers.{i}.") for i in range(config.n_upper)]
    if len(layers) < config.n_blocks:
        layers = config.n_blocks * [layers[0], idle_layer(layers[0])]
    for i, layer in enumerate(layers):
        block, place = divmod(i, config.layers_per_block)
        for name, tensor in memory_attention.items():
            weights[f"blocks.{block}.memory_attention.{name}"] = tensor
        for name, tensor in layer.items():
            weights[f"blocks.{block}.transformer.layers.{place}.{name}"] = tensor
    return weights

def idle_layer(layer):
    """A layer that only normalises its input again, because its output maps are zero. Its inner
    maps are copied from `layer`; if they were zero as well, the idle layer would never learn."""
    return {name: tensor if name.startswith(("attention.qkv.", "up."))
            else torch.full_like(tensor, 1.0 if name.endswith("norm.weight") else 0.0)
            for name, tensor in layer.items()}

def part_of(state, prefix):
    """The entries of a state dictionary below a prefix, without the prefix."""
    return {name.removeprefix(prefix): tensor
            for name, tensor in state.items() if name.startswith(prefix)}

# ==== Set apart: published weights ================================================================

def read_published(path, config):
    """(config, state, lacks, unused) from a BERT folder or a file made by the paper's own code.

    config: `config` with the published sizes (a BERT has one block). state: weights for BatchTOME.
    lacks: the parts of BatchTOME without published weights. unused: published parts and tensors
    that BatchTOME does not have. Raises UserError."""
    with data.intact(path, "cannot be read as a BERT or as weights of the paper's own code",
                     "give another file"):
        try:
            config, found = read_weights(path, config)
            with torch.device("meta"):                          # shapes without numbers
                model = BatchTOME(TOME(config))
            names = {name.removeprefix("tome."): name for name in model.state_dict()}
            ours, theirs = dict.fromkeys(map(part_name, names)), {*map(part_name, found)}
            # A part may be missing as a whole, but not only some of its tensors.
            state = {names[name]: found[name] for name in names if part_name(name) in theirs}
            model.load_state_dict(state, strict=False, assign=True)     # raises if a shape differs
        except KeyError as error:
            raise ValueError(f"it has no {error}") from error
        vocab = beside(path, "vocab.txt")
        if Path(path).is_dir() and vocab is not None:
            check_tokenizer(Path(path), data.load_tokenizer(vocab))
    lacks = [part for part in ours if part not in theirs]
    unused = {part_name(name) if part_name(name) not in ours else name
              for name in found.keys() - names.keys()}
    return config, state, lacks, sorted(unused)

def part_name(name):
    """The part of BatchTOME to which a tensor belongs: "mlm", "blocks.0.memory_attention", …"""
    return re.match(r"(blocks\.\d\.)?[^.]*", name)[0]
