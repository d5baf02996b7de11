"""TOME, BATCH-TOME and their losses (paper §2.2–2.4, app. A, app. B).

    H0 = InitialTransformerBlock(TokenEmbedding(x))                                          eq. 4
    M  = MemoryAttention(H),   H' = TransformerBlock(M)          a TOMEBlock                 eq. 2, 3
    Hl = TOMEBlock_l(Hl-1),    l = 1 … L                         TOME-1: L = 1, TOME-2: L = 2        eq. 5

The Mention Encoder is the same Transformer read without its memory layers, and two SpanEncodingLayers on top, for key
and value (§2.1.1). BATCH-TOME trains it: the batch is read twice, first by the Mention Encoder, whose mentions become
the batch memory, then by TOME attending to it (§2.3). TOME then continues from BATCH-TOME's weights, over the frozen
memory of the whole corpus (§2.4), and answers with the entity that its last retrieval names (eq. 10).
"""
import hashlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import ann
from encoder import Embeddings, MLMHead, SpanEncodingLayer, TransformerBlock, init_weights
from memory import BatchMemory, EntityTable, MemoryAttention, attention_weights


class TOMEBlock(nn.Module):
    """Eq. 2 and 3. With no memory at all it is its TransformerBlock alone: so the Mention Encoder reads."""

    def __init__(self, config, n_layers):
        super().__init__()
        self.memory_attention = MemoryAttention(config) if config.memory != "none" else None
        self.transformer = TransformerBlock(config, n_layers)

    def forward(self, H, attention_mask, mentions, memory):
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
        self.blocks = nn.ModuleList(TOMEBlock(config, config.layers_a_block) for _ in range(config.n_blocks))
        self.mlm = MLMHead(config)
        self.answer = SpanEncodingLayer(config.hidden, config.key_dim)      # z_m of entity prediction, eq. 10
        self.claim = nn.Linear(config.hidden, 3)                            # data.CLAIM_LABELS (train.claim_logits)
        self.entities = EntityTable(config) if config.n_entities else None
        self.apply(lambda module: init_weights(module, config.init_std))

    def read_initial(self, tokens, attention_mask):
        """H0 (B, T, hidden), eq. 4."""
        return self.initial(self.embeddings(tokens), attention_mask)

    def read_blocks(self, H, attention_mask, mentions=None, memory=None):
        """H_L (B, T, hidden), and what each memory layer retrieved. mentions: a Batch (row, start, end, passage)."""
        found = []
        for block in self.blocks:
            H, retrieved = block(H, attention_mask, mentions, memory)
            found.append(retrieved)
        return H, found

    def forward(self, tokens, attention_mask, mentions=None, memory=None):
        return self.read_blocks(self.read_initial(tokens, attention_mask), attention_mask, mentions, memory)

    def mlm_logits(self, H, target_index):
        """Logits (L, vocab) at the masked tokens only: most of a vocabulary softmax would be thrown away."""
        return self.mlm(H.flatten(0, 1)[target_index], self.embeddings.word.weight)


class MentionEncoder(nn.Module):
    """Tokens and mentions -> key (M, d_K) and value (M, d_V) mention encodings (§2.1.1)."""

    def __init__(self, tome):
        super().__init__()
        self.config = tome.config
        self.tome = tome                                                    # shared with BATCH-TOME (§4.1)
        self.key = SpanEncodingLayer(tome.config.hidden, tome.config.key_dim)
        self.value = SpanEncodingLayer(tome.config.hidden, tome.config.value_dim)
        self.key.apply(lambda module: init_weights(module, tome.config.init_std))
        self.value.apply(lambda module: init_weights(module, tome.config.init_std))

    def encode(self, H, row, start, end):
        return self.key(H, row, start, end), self.value(H, row, start, end)

    def forward(self, tokens, attention_mask, row, start, end):
        return self.encode(self.tome(tokens, attention_mask)[0], row, start, end)

    @property
    def fingerprint(self):
        """Names this encoder by its weights: a memory belongs to the one that wrote it (app. B.6)."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()


class BatchTOME(nn.Module):
    """Reads a batch twice (§2.3): the Mention Encoder fills the batch memory, TOME attends to it."""

    def __init__(self, tome):
        super().__init__()
        self.config = tome.config
        self.encoder = MentionEncoder(tome)
        self.coref = SpanEncodingLayer(tome.config.hidden, tome.config.coref_dim)      # z_m of app. A.2
        self.coref.apply(lambda module: init_weights(module, tome.config.init_std))

    @property
    def tome(self):
        return self.encoder.tome

    def forward(self, batch, use_memory=True):
        """H (B, T, hidden) of the second read, what its memory layers retrieved."""
        H0 = self.tome.read_initial(batch.tokens, batch.attention_mask)
        if not use_memory:
            return self.tome.read_blocks(H0, batch.attention_mask)
        # The memory holds what the text says, not what is left of it after masking; same-passage entries are never
        # attended, so that nothing leaks. Of an unmasked text (the golden arrays) both are one read.
        first = H0 if batch.unmasked is batch.tokens else self.tome.read_initial(batch.unmasked, batch.attention_mask)
        first, _ = self.tome.read_blocks(first, batch.attention_mask)
        linked = batch.entity > 0
        keys, values = self.encoder.encode(first, batch.row[linked], batch.start[linked], batch.end[linked])
        memory = BatchMemory(keys, values, batch.entity[linked], batch.passage[linked])
        return self.tome.read_blocks(H0, batch.attention_mask, batch, memory)


# ---------------------------------------------------------------------------------------------------------------------
# Initial weights

@torch.no_grad()
def start_positions(model):
    """Positions begin as sinusoids of the size of the other embeddings (Vaswani et al. 2017), and are learnt from there:
    from random ones the toy model needs two and a half times as many steps."""
    position = model.tome.embeddings.position.weight                                     # (positions, hidden)
    n, hidden = position.shape
    angle = torch.arange(n)[:, None] / 10000 ** (torch.arange(0, hidden, 2) / hidden)
    position.copy_(torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1) * model.config.init_std * 2 ** 0.5)


def start_like_keys(model, layers):
    """Only those of the keys' dimension: the paper's coreference layer has another."""
    for layer in layers:
        if layer.linear.weight.shape == model.encoder.key.linear.weight.shape:
            layer.load_state_dict(model.encoder.key.state_dict())


def share_out(state, config):
    """TOME's initial weights from BATCH-TOME's, which has one memory layer. For TOME-2 the Transformer layers above it are
    shared out to the blocks, or copied where there is one alone; its second memory layer starts as a copy of the first.
    Layers that BATCH-TOME lacks (config.n_block_batch) go on top of each block and add nothing at first.

    With two memory layers from the first step, toy BATCH-TOME's second one never found a use: where one retrieval is
    enough, the first layer learns it. With more layers above the memory it learns more slowly."""
    first, n = "blocks.0.", config.n_block_batch or config.n_block
    each = max(1, n // config.n_blocks)                         # of a block, from BATCH-TOME
    shared = {name: tensor for name, tensor in state.items() if not name.startswith(first)}
    for block in range(config.n_blocks):
        for name, tensor in state.items():
            if name.startswith(first + "memory_attention."):
                shared[name.replace("0", str(block), 1)] = tensor
        for i in range(config.layers_a_block):
            source, target = (f"blocks.{b}.transformer.layers.{layer}." for b, layer in
                              ((0, (block * each + min(i, each - 1)) % n), (block, i)))
            layer = {name.removeprefix(source): t for name, t in state.items() if name.startswith(source)}
            if i >= each:
                layer = {name: torch.ones_like(t) if name.endswith("norm.weight") else torch.zeros_like(t)
                         if name.startswith(("attention.out.", "down.")) or name.endswith("norm.bias") else t
                         for name, t in layer.items()}
            shared |= {target + name: tensor for name, tensor in layer.items()}
    return shared


@torch.no_grad()
def fit_retrieval(model, batches, self_score=20.0):
    """Initial weights of key and query layers over a pretrained BERT, from linked mentions of a few batches.

    Two layers of a BERT do not speak the same language, and most of what they say is the same for every mention: a
    random projection of either retrieves nothing. So a key starts as the whitened principal components of a mention's
    encoding [H_s; H_e] (eq. 1), and each memory layer's query as the linear map that finds a mention's own key from what
    that layer reads (ridge regression; no label). self_score: the mean score of a mention's query and its own key."""
    tome, key = model.tome, model.encoder.key.linear
    inputs, outputs = [[] for _ in tome.blocks], []                         # [H_s; H_e] of each mention, (M, 2 hidden)
    for batch in batches:
        linked = batch.entity > 0
        row, start, end = batch.row[linked], batch.start[linked], batch.end[linked]
        H = tome.read_initial(batch.tokens, batch.attention_mask)
        for block, seen in zip(tome.blocks, inputs):
            seen.append(torch.cat([H[row, start], H[row, end]], dim=1).double())
            H, _ = block(H, batch.attention_mask, None, None)
        outputs.append(torch.cat([H[row, start], H[row, end]], dim=1).double())
    Y = torch.cat(outputs)
    if len(Y) < 2:
        return
    mean = Y.mean(0)
    variance, direction = torch.linalg.eigh((Y - mean).T @ (Y - mean) / len(Y))             # rising
    n = min(len(key.weight), len(variance))
    spread = (variance[-n:] + 1e-3 * variance[-1]).sqrt()
    W_key = torch.zeros_like(key.weight, dtype=torch.double)                                # (d_K, 2 hidden)
    W_key[:n] = (direction[:, -n:] / spread).T * (self_score / n) ** 0.5
    keys = (Y - mean) @ W_key.T
    key.weight.copy_(W_key)
    key.bias.copy_(-W_key @ mean)
    for block, seen in zip(tome.blocks, inputs):
        X = torch.cat(seen)
        X_mean, X = X.mean(0), X - X.mean(0)
        gram = X.T @ X
        ridge = 0.1 * gram.diag().mean().clamp(min=1e-6)
        W_query = torch.linalg.solve(gram + ridge * torch.eye(len(gram), device=X.device), X.T @ keys).T
        W_query *= self_score / (X @ W_query.T * keys).sum(1).mean().clamp(min=1e-6)
        query = block.memory_attention.query.linear
        query.weight.copy_(W_query)
        query.bias.copy_(-W_query @ X_mean)
    start_like_keys(model, [tome.answer])


# ---------------------------------------------------------------------------------------------------------------------
# Losses. Each is this process's share of a mean over all processes: a sum over its own items, divided by the number
# of items everywhere. The shares add up to the loss, and their gradients to its gradient, as of one big batch.


def share_of_mean(losses):
    """losses (n,) of this process -> its share of the mean over all processes; 0 where there is no item at all."""
    return losses.sum() / ann.sum_over_processes(losses.numel(), losses.device).clamp(min=1)


def mlm_loss(logits, target):
    """Masked language modelling: mean cross-entropy over the masked tokens. logits (L, vocab), target (L,)."""
    return share_of_mean(F.cross_entropy(logits.float(), target, reduction="none"))


def coreference_loss(z, entity, passage):
    """App. A.2: is that linked mention of another passage the same entity? z (M, d_C), entity (M,) 0 = not linked,
    passage (M,) -> scalar.

    For each mention, the mean over its positives of the cross-entropy of that positive against all negatives (the
    appendix's formula has the mean outside the logarithm; its text and the public code say this); then the mean over
    the mentions that have a positive. Mentions of the same passage are neither. Candidates come from all processes."""
    linked = entity > 0
    z, entity, passage = z[linked].float(), entity[linked], passage[linked]
    all_z, all_entity, all_passage = ann.gather(z), ann.gather(entity), ann.gather(passage)              # (N, …)
    scores = ann.dot(z, all_z)                                                                           # (M, N)
    elsewhere = passage[:, None] != all_passage[None, :]
    same = entity[:, None] == all_entity[None, :]
    negatives = scores.masked_fill(~(elsewhere & ~same), torch.finfo(scores.dtype).min).logsumexp(-1)    # (M,)
    mention, positive = (elsewhere & same).nonzero(as_tuple=True)                                        # pairs
    losses = F.softplus(negatives[mention] - scores[mention, positive])     # -log(e^p / (e^p + sum e^n))
    n_positive = (elsewhere & same).sum(-1)
    per_mention = torch.zeros_like(negatives).index_add(0, mention, losses) / n_positive.clamp(min=1)
    return share_of_mean(per_mention[n_positive > 0])


def entity_prediction_loss(scores, memory_entity, entity):
    """§2.4: -log EntProb(m, Ent(m)), the mean over linked mentions of which a memory of the same entity was retrieved.

    scores (M, K) z · key of the retrieved memories (-inf: none), memory_entity (M, K), entity (M,) 0 = not linked."""
    same = (memory_entity == entity[:, None]) & ~scores.isneginf()
    counted = (entity > 0) & same.any(-1)
    scores, same = scores[counted], same[counted]                           # only rows where no logsumexp is of nothing
    return share_of_mean(scores.logsumexp(-1) - scores.masked_fill(~same, -torch.inf).logsumexp(-1))


def whole_memory_loss(log_sums):
    """entity_prediction_loss with the sums of eq. 10 over the whole memory: MentionMemory.log_sums (M, 2)."""
    everything, same = log_sums[log_sums[:, 1] > torch.finfo(log_sums.dtype).min / 2].unbind(1)
    return share_of_mean(everything - same)


class Answer(NamedTuple):
    entity: torch.Tensor            # (M,) argmax_j EntProb(m, j); 0 where nothing was retrieved
    probability: torch.Tensor       # (M,) its EntProb


def predict_entity(scores, memory_entity):
    """Eq. 10 and its argmax: the entity with the largest sum of attention weights. scores, memory_entity (M, K)."""
    weights = attention_weights(scores)                                                      # (M, K)
    entity, order = memory_entity.sort(dim=-1)
    first = torch.ones_like(entity, dtype=torch.bool)
    first[:, 1:] = entity[:, 1:] != entity[:, :-1]
    group = first.long().cumsum(-1) - 1                                     # (M, K) equal entities stand together
    sums = torch.zeros_like(weights).scatter_add(1, group, weights.gather(1, order))         # EntProb of each group
    probability, best = sums.max(dim=-1)
    where = (group == best[:, None]).long().argmax(-1)                      # a memory of the best group
    best_entity = entity.gather(1, where[:, None]).squeeze(1)
    return Answer(torch.where(probability > 0, best_entity, 0), probability)


# ---------------------------------------------------------------------------------------------------------------------
# The heads of claims and questions (§4.3, §4.4)


def claim_logits(tome, H, batch):
    """(B, 3), data.CLAIM_LABELS: from the mean of the mentions' [E_start] encodings, where what was retrieved stands.

    The paper does not name its head. Read off [CLS], toy claims stayed at chance for 300 steps; so, they are learnt."""
    B = len(batch.tokens)
    n_mentions = torch.bincount(batch.row, minlength=B).clamp(min=1)
    mean = H.new_zeros(B, H.shape[-1]).index_add(0, batch.row, H[batch.row, batch.start]) / n_mentions[:, None]
    return tome.claim(mean)


def answer_query(tome, H, batch, at):
    """z (n, d_K) of the mentions `at` (n,)."""
    return tome.answer(H, batch.row[at], batch.start[at], batch.end[at])


def answer_question(tome, H, batch, memory):
    """What the question's [MASK] mention retrieves: Retrieved of (B, K)."""
    at = batch.answer_mention
    return memory.retrieve(answer_query(tome, H, batch, at), batch.passage[at], tome.config.k_answer,
                           tome.config.k_answer_shard)


def answer_loss(tome, memory, query, batch, whole_softmax=False):
    """Entity prediction at the masked mentions of the n rows that have an answer. query (n, d_K) of each."""
    asked = batch.answer > 0
    passage, answer = batch.passage[batch.answer_mention[asked]], batch.answer[asked]
    if whole_softmax and tome.config.memory == "mentions":
        return whole_memory_loss(memory.log_sums(query, passage, answer))
    found = memory.retrieve(query, passage, tome.config.k_answer, tome.config.k_answer_shard)
    return entity_prediction_loss(found.scores, found.entity, answer)
