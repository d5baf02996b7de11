"""BERT, and the layer that turns a mention into a vector (§2.1.1, §4.1; Devlin et al. 2019).

    tokens (B, T) -> Embeddings -> (B, T, hidden) -> TransformerBlock -> H (B, T, hidden)
    SpanEncodingLayer(H, row, start, end) = W [H_start; H_end]                    (M, dim)     eq. 1
    MLMHead(H at the masked positions)                                            (L, vocab)

B passages, padded to T, the length of the longest; L masked tokens. The M mentions of the whole
batch are flat arrays (row, start, end), each (M,), so no padding mention is computed. BERT is
post-LN: LayerNorm(x + f(x)). Names here and in the paper: s = start, e = end; d_K = key_dim,
d_V = value_dim, d_C = coref_dim."""
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

def setting(default, allowed, text, since="batch-tome"):
    """A dataclass field that is also a flag of train.py. allowed: (minimum, maximum), or the words
    that it may be; text: its help; since: the first stage whose result depends on it."""
    return field(default=default, metadata={"allowed": allowed, "help": text, "since": since})

@dataclass
class Config:
    """The model's sizes and variants. The defaults are the paper's, where it gives them (§4.1, app.
    A, C.1.4)."""
    vocab_size: int = 30522
    hidden: int = setting(768, (1, 10_000), "width of the Transformer")
    n_heads: int = setting(12, (1, 1000), "attention heads")
    intermediate: int = setting(3072, (1, 10**5), "width of the feed-forward layers")
    max_positions: int = setting(512, (16, 10**5), "rows of the position embeddings")
    dropout: float = setting(0.1, (0, 0.9), "dropout rate")
    gelu: str = setting("tanh", ("tanh", "none"), "approximation of GELU; none: exact")
    init_std: float = setting(0.02, (0, 1), "standard deviation of initial weights")
    # TOME-1 has one TOMEBlock of n_upper layers, TOME-2 two of half as many (n_blocks). A single
    # layer (preset toy) cannot be halved: TOME-2 then has two per block (tome.split_into_blocks).
    n_initial: int = setting(4, (1, 100), "Transformer layers below the first memory layer")
    n_upper: int = setting(8, (1, 100), "Transformer layers above the first memory layer")
    n_blocks: int = 1
    key_dim: int = setting(128, (1, 10_000), "size of keys and queries, d_K")
    value_dim: int = setting(512, (1, 10_000), "size of values, d_V")
    coref_dim: int = setting(512, (1, 10_000), "size of coreference encodings, d_C")
    k: int = setting(128, (1, 10**6), "memories that a mention attends to", "tome")
    k_shard: int = setting(2, (1, 10**6), "memories that each process offers for them", "tome")
    k_answer: int = setting(4096, (1, 10**6), "memories that eq. 10 compares", "tome")
    k_answer_shard: int = setting(32, (1, 10**6), "memories that each process offers for them",
                                  "tome")
    memory: str = setting("mentions", ("mentions", "entities", "none"), "mentions: TOME; the "
                          "baselines are entities (Entities as Experts) and none")
    n_entities: int = 0         # rows of the baselines' EntityTable
    precision: str = setting("bfloat16", ("bfloat16", "float32"), "of matrix products, on devices "
                             "that are fast at it")

    @property
    def layers_per_block(self):
        """Transformer layers of each TOMEBlock; for n_upper = 1 it is 1 in TOME-1, 2 in TOME-2."""
        return self.n_upper // self.n_blocks if self.n_upper > 1 else self.n_blocks

def precision_on(config, device):
    """What matrix products are computed in: the config's precision on a device that is fast at it
    (GPUs since Ampere; processors with AVX512-BF16), else float32."""
    is_fast = torch.cpu._is_avx512_bf16_supported()
    if device.type == "cuda":
        is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
    return config.precision if is_fast else "float32"

def low_precision(config, device):
    """A context for training and encoding, in which matrix products are computed in precision_on.
    Weights, losses and the scores of memories (ann.dot) stay in float32."""
    return torch.autocast(device.type, torch.bfloat16, precision_on(config, device) == "bfloat16")

class Embeddings(nn.Module):
    """Word + position + segment, LayerNorm. tokens (B, T) -> (B, T, hidden)."""
    def __init__(self, config):
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.hidden)
        self.position = nn.Embedding(config.max_positions, config.hidden)
        self.segment = nn.Embedding(2, config.hidden)       # as BERT's; a passage is all segment 0
        self.norm = nn.LayerNorm(config.hidden, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens):
        x = self.word(tokens) + self.position.weight[:tokens.shape[1]] + self.segment.weight[0]
        return self.dropout(self.norm(x))                                         # (B, T, hidden)

# Most of the padding is left out of the computation: on short passages that saves a quarter of a
# step. A layer sees the tokens of the whole batch as rows, x (n, hidden), and behind them so much
# padding, if there is enough, that n is a multiple of ROWS: else a tenth of a small step went into
# compiling products of ever new shapes (oneDNN). Only attention puts rows back into passages.
# `place` (n,): each row's index in the flat batch (B * T). attention_mask (B, T): True = token.
ROWS = 128

def spread(x, place, attention_mask):
    """Rows (n, C) at their places in a batch: (B, T, C), zero elsewhere."""
    flat = x.new_zeros(attention_mask.numel(), x.shape[-1]).index_copy(0, place, x)
    return flat.unflatten(0, attention_mask.shape)

class SelfAttention(nn.Module):
    """x (n, hidden) -> (n, hidden); a token attends to those of its own passage."""
    def __init__(self, config):
        super().__init__()
        self.n_heads, self.dropout = config.n_heads, config.dropout
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x, place, attention_mask):
        """place (n,), attention_mask (B, T): where the rows x stand in the batch."""
        qkv = spread(self.qkv(x), place, attention_mask).unflatten(-1, (3, self.n_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).flatten(1, 2)  # each (B * heads, T, hidden / heads)
        # -inf at padding, added to scores. F.scaled_dot_product_attention is slower on a CPU.
        bias = q.new_zeros(attention_mask.shape).masked_fill(~attention_mask, -torch.inf)
        bias = bias.repeat_interleave(self.n_heads, 0)[:, None]                 # (B * heads, 1, T)
        scores = torch.baddbmm(bias, q, k.mT, alpha=q.shape[-1] ** -0.5)        # (B * heads, T, T)
        y = F.dropout(scores.softmax(-1), self.dropout, self.training) @ v
        y = y.unflatten(0, (-1, self.n_heads)).transpose(1, 2).flatten(2)       # (B, T, hidden)
        return self.out(y.flatten(0, 1).index_select(0, place))                 # (n, hidden)

class TransformerLayer(nn.Module):
    """Post-LN, as BERT's. x (n, hidden) -> (n, hidden)."""
    def __init__(self, config):
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden, eps=1e-12)
        self.up = nn.Linear(config.hidden, config.intermediate)
        self.down = nn.Linear(config.intermediate, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)
        self.gelu = config.gelu

    def forward(self, x, place, attention_mask):
        x = self.attention_norm(x + self.dropout(self.attention(x, place, attention_mask)))
        return self.norm(x + self.dropout(self.down(F.gelu(self.up(x), approximate=self.gelu))))

class TransformerBlock(nn.Module):
    """x (B, T, hidden), attention_mask (B, T) True = token -> (B, T, hidden), zero at padding."""
    def __init__(self, config, n_layers):
        super().__init__()
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(n_layers))

    def forward(self, x, attention_mask):
        is_token = attention_mask.flatten()
        tokens, padding = is_token.nonzero()[:, 0], (~is_token).nonzero()[:, 0]
        place = torch.cat([tokens, padding[:-len(tokens) % ROWS]])
        x = x.flatten(0, 1).index_select(0, place)
        for layer in self.layers:
            x = layer(x, place, attention_mask)
        return spread(x[:len(tokens)], tokens, attention_mask)

class SpanEncodingLayer(nn.Module):
    """Eq. 1: W [H_s; H_e], s and e the positions of [E_start] and [E_end]. H (B, T, hidden),
    row, start, end (M,) -> (M, dim). The paper writes no bias, but its code has one."""
    def __init__(self, hidden, dim):
        super().__init__()
        self.linear = nn.Linear(2 * hidden, dim)

    def forward(self, H, row, start, end):
        return self.linear(torch.cat([H[row, start], H[row, end]], dim=-1))

class MLMHead(nn.Module):
    """BERT's masked-language-model head, tied to the word embeddings (vocab, hidden).
    h (L, hidden) -> (L, vocab)."""
    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.hidden, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.gelu = config.gelu

    def transform(self, h):
        """The layer before the words: h (L, hidden) -> (L, hidden)."""
        return self.norm(F.gelu(self.dense(h), approximate=self.gelu))

    def forward(self, h, word_embedding):
        return F.linear(self.transform(h), word_embedding, self.bias)

def init_weights(module, std):
    """BERT's initialisation, but not truncated: normal weights, zero biases. For Module.apply."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=std)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)

# ==== Set apart: published weights ================================================================
# They come as the folder of a BERT, or as a file of the paper's own code (JAX, flax). A reader of
# each returns tensors under the names in it. read_weights gives them those of tome.TOME.

# Columns: our name; BERT's, where it has one; the paper's code's. The last two rows are endings, of
# both. Names are replaced from top to bottom: a name stands above one that it contains.
WEIGHT_NAMES = [row.split() for row in """
embeddings.word            embeddings.word_embeddings            embedder.embedders_token_ids
embeddings.position        embeddings.position_embeddings        embedder.embedders_position_ids
embeddings.segment         embeddings.token_type_embeddings      embedder.embedders_segment_ids
embeddings.norm            embeddings.LayerNorm                  embeddings_layer_norm
attention.out              attention.output.dense                attention_block.attention_layer.out
attention_norm             attention.output.LayerNorm            attention_block.layer_norm
attention                  attention.self                        attention_block.attention_layer
up                         intermediate.dense                    mlp_block.mlp
down                       output.dense                          mlp_block.dense
norm                       output.LayerNorm                      mlp_block.layer_norm
mlm.dense                  cls.predictions.transform.dense       mlm_layer.dense
mlm.norm                   cls.predictions.transform.LayerNorm   mlm_layer.layer_norm
mlm.bias                   cls.predictions.bias                  mlm_layer.bias
initial                    initial_encoder
layers.                    layer_sequence.layers_
blocks.0.transformer       intermediate_encoder
blocks.0.memory_attention  intermediate_memory_attention_layer
blocks.1.transformer       final_encoder
blocks.1.memory_attention  final_memory_attention_layer
up                         update_layer.retrieval_projector
norm                       update_layer.layer_norm
answer.linear              final_query_projector
coref.linear               mention_projector
.linear                    _projector
.weight                    .gamma   .kernel   .scale   .embedding
.bias                      .beta
""".strip().splitlines()]
GELU = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}    # BERT's -> torch's

def beside(path, name):
    """The file of that name in the folder `path`, or in up to two folders above it; else None."""
    path = Path(path).absolute()
    files = (folder / name for folder in (path, *path.parents[:2]))
    return next(filter(Path.is_file, files), None)

def weights_file(path):
    """The file that holds the weights: a BERT's folder has it under one of two names."""
    files = Path(path), Path(path, "model.safetensors"), Path(path, "pytorch_model.bin")
    return next(filter(Path.is_file, files), files[-1])

def read_weights(path, config):
    """(config, state): `config` with the sizes of these weights, and {our name: tensor}. May raise
    any exception; tome.read_published turns it into one sentence."""
    read = read_bert if Path(path).is_dir() else read_flax
    config, tensors = read(Path(path), config)
    state = {}
    for name, tensor in tensors.items():
        for ours, *others in WEIGHT_NAMES:
            for theirs in others:
                name = name.replace(theirs, ours)
        state[name] = tensor.float()
    # Ours has one matrix for the queries, keys and values of self-attention.
    for query in [name for name in state if ".attention.query." in name]:
        parts = [state.pop(query.replace("query", part)) for part in ("query", "key", "value")]
        state[query.replace("query", "qkv")] = torch.cat(parts)
    # Their z of eq. 10 is made by two linear maps, one after the other. Ours is their product.
    if "answer.linear.weight" in state:
        second = state["answer.linear.weight"]
        state["answer.linear.weight"] = second @ state.pop("coref.linear.weight")
        state["answer.linear.bias"] += second @ state.pop("coref.linear.bias")
    layers = [name for name in state if ".layers." in name and name.endswith(".up.bias")]
    config.n_initial = sum(name.startswith("initial.") for name in layers)
    config.n_upper = len(layers) - config.n_initial
    config.vocab_size, config.hidden = state["embeddings.word.weight"].shape
    config.max_positions = len(state["embeddings.position.weight"])
    config.intermediate = len(state["initial.layers.0.up.bias"])
    if "blocks.0.memory_attention.up.weight" in state:
        config.key_dim = len(state["blocks.0.memory_attention.query.linear.bias"])
        # In the paper's code d_C = d_V.
        config.value_dim = config.coref_dim = state["blocks.0.memory_attention.up.weight"].shape[1]
    return config, state

def read_bert(folder, config):
    """Reads config.json, and model.safetensors or pytorch_model.bin (weights only: no code in it is
    run). The last n_upper layers go above the first memory layer (§4.1: 8 of 12)."""
    bert = json.loads((folder / "config.json").read_text())
    for name, ours in (("model_type", "bert"), ("position_embedding_type", "absolute"),
                       ("layer_norm_eps", 1e-12)):
        if bert.get(name, ours) != ours:                # RoBERTa's positions begin elsewhere
            raise ValueError(f"its {name} is {bert[name]}, not {ours}")
    tokenizer = folder / "tokenizer_config.json"
    if tokenizer.exists() and not json.loads(tokenizer.read_text()).get("do_lower_case", True):
        raise ValueError("its vocabulary is cased, and texts are read in lower case")
    config = replace(config, n_blocks=1, gelu=GELU[bert["hidden_act"]],
                     n_heads=int(bert["num_attention_heads"]))
    file = weights_file(folder)
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file         # optional: the error says if it is missing
        tensors = load_file(file)
    else:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    n_layers = sum(name.endswith(".intermediate.dense.bias") for name in tensors)
    places = [f"initial.layers.{i}" for i in range(n_layers - config.n_upper)]
    if not places:
        raise ValueError(f"of {n_layers} layers none is left below the {config.n_upper} of n_upper")
    places += [f"blocks.0.transformer.layers.{i}" for i in range(config.n_upper)]
    return config, {re.sub(r"encoder\.layer\.(\d+)", lambda layer: places[int(layer[1])],
                           name.removeprefix("bert.")): tensor for name, tensor in tensors.items()}

def read_flax(file, config):
    """Reads a BATCH-TOME or TOME from a message pack: nested maps whose leaves are [shape, type,
    bytes]; nothing else is decoded. A file `weights/step<N>` is the encoder's map;
    `checkpoint_<N>` has the heads beside it, and an optimizer's state, which is not read."""
    import msgpack                                      # optional: the error says if it is missing
    tree = msgpack.unpackb(file.read_bytes())
    tree = tree.get("params", {"encoder": tree})
    tree |= tree.pop("encoder")
    config = replace(config, n_blocks=2 if "intermediate_encoder" in tree else 1, gelu="tanh")
    # What a TOME still holds of its BATCH-TOME, a third memory layer, keys and values, is not used.
    if config.n_blocks == 1:
        tree["intermediate_encoder"] = tree.pop("final_encoder")
        tree["intermediate_memory_attention_layer"] = tree.pop("memory_attention_layer")
    if "final_query_projector" not in tree:
        tree |= tree.pop("memory_extraction_layer")
    tensors, left = {}, list(tree.items())
    while left:
        name, node = left.pop()
        if isinstance(node, dict):
            left += [(f"{name}.{key}", child) for key, child in node.items()]
            continue
        shape, dtype, numbers = msgpack.unpackb(node.data)
        tensor = torch.frombuffer(bytearray(numbers), dtype=getattr(torch, dtype)).reshape(shape)
        if name.endswith("attention_layer.out.kernel"):                     # [heads, size, out]
            config.n_heads = len(tensor)
            tensor = tensor.flatten(0, 1)
        if name.endswith(".kernel"):                                # [in, out], [in, heads, size]
            tensor = tensor.flatten(1).T
        tensors[name] = tensor.flatten() if name.endswith(".bias") else tensor
    return config, tensors
