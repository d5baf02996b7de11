"""BERT, and the layer that turns a mention into a vector (paper §2.1.1, §4.1; Devlin et al. 2019).

    tokens (B, T) -> Embeddings -> (B, T, hidden) -> TransformerBlock -> H (B, T, hidden)
    SpanEncodingLayer(H, row, start, end) = W [H_start; H_end]                    (M, dim)       eq. 1
    MLMHead(H at the masked positions)                                            (L, vocab)

B passages, T tokens of the longest one, M mentions of the whole batch in flat arrays (row, start, end), so that no
padding mention is ever computed; L masked tokens. BERT is post-LN: each sublayer is LayerNorm(x + f(x)).
"""
import json
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    """Every dimension of the model; the defaults are the paper's (§4.1, app. A, app. C.1.4)."""
    vocab_size: int = 30522
    hidden: int = 768
    n_heads: int = 12
    intermediate: int = 3072
    n_initial: int = 4          # layers of the InitialTransformerBlock
    n_block: int = 8            # layers of all TOMEBlocks together: TOME-1 has one block of 8, TOME-2 two of 4 (at
                                # least one each: with n_block 1 TOME-2 has a layer more than TOME-1)
    n_block_batch: int = 0      # … of which BATCH-TOME has so many; 0: all (tome.share_out)
    n_blocks: int = 1           # 1: TOME-1, 2: TOME-2
    max_positions: int = 512
    dropout: float = 0.1
    gelu: str = "tanh"          # "none" is the exact GELU; a loaded checkpoint decides
    init_std: float = 0.02
    key_dim: int = 128          # d_K
    value_dim: int = 512        # d_V
    coref_dim: int = 512        # d_C
    k: int = 128                # memories a mention attends to
    k_shard: int = 2            # … of which each process offers so many (app. C.1.4), or k / processes if that is more
    k_answer: int = 4096        # memories in the sum of eq. 10
    k_answer_shard: int = 32    # … likewise: 32 from each of the paper's 128 processes
    memory: str = "mentions"    # baselines: "entities", a trained EntityTable in its place; "none", no memory layers
    n_entities: int = 0         # … and the rows of that table, with which both answer questions

    @property
    def layers_a_block(self):
        return max(1, self.n_block // self.n_blocks)


class Embeddings(nn.Module):
    """Word + position + segment, LayerNorm. tokens (B, T) -> (B, T, hidden)."""

    def __init__(self, config):
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.hidden)
        self.position = nn.Embedding(config.max_positions, config.hidden)
        self.segment = nn.Embedding(2, config.hidden)       # one passage is always segment 0; kept for BERT's sake
        self.norm = nn.LayerNorm(config.hidden, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens):
        T = tokens.shape[1]
        if T > self.position.num_embeddings:
            raise ValueError(f"{T} tokens in a passage, but the model has {self.position.num_embeddings} positions")
        x = self.word(tokens) + self.position.weight[:T] + self.segment.weight[0]            # (B, T, hidden)
        return self.dropout(self.norm(x))


# No padding is computed: a layer reads the n tokens of the whole batch as rows, x (n, hidden), and only its attention
# knows which passage each stands in, by `at` (n,), its place in the flat batch. On short passages that is a quarter of
# a step.


def spread(x, at, attention_mask):
    """Tokens (n, C) back at their places in the batch: (B, T, C), zero at the padding."""
    return x.new_zeros(attention_mask.numel(), x.shape[-1]).index_copy(0, at, x).unflatten(0, attention_mask.shape)


class SelfAttention(nn.Module):
    """x (n, hidden) -> (n, hidden); a token attends to those of its own passage."""

    def __init__(self, config):
        super().__init__()
        self.n_heads, self.dropout = config.n_heads, config.dropout
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x, at, attention_mask):
        qkv = spread(self.qkv(x), at, attention_mask).unflatten(-1, (3, self.n_heads, -1))   # (B, T, 3, nh, hd)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                                                 # each (B, nh, T, hd)
        scores = q * q.shape[-1] ** -0.5 @ k.mT                                              # (B, nh, T, T)
        scores = scores.masked_fill(~attention_mask[:, None, None, :], -torch.inf)
        y = F.dropout(scores.softmax(-1), self.dropout, self.training) @ v                   # (B, nh, T, hd)
        return self.out(y.transpose(1, 2).flatten(2).flatten(0, 1)[at])                      # (B T, hidden)[at]


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

    def forward(self, x, at, attention_mask):
        x = self.attention_norm(x + self.dropout(self.attention(x, at, attention_mask)))
        return self.norm(x + self.dropout(self.down(F.gelu(self.up(x), approximate=self.gelu))))


class TransformerBlock(nn.Module):
    """Several layers. x (B, T, hidden), attention_mask (B, T) True = token -> (B, T, hidden), zero at the padding."""

    def __init__(self, config, n_layers):
        super().__init__()
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(n_layers))

    def forward(self, x, attention_mask):
        at = attention_mask.flatten().nonzero()[:, 0]
        x = x.flatten(0, 1)[at]
        for layer in self.layers:
            x = layer(x, at, attention_mask)
        return spread(x, at, attention_mask)


class SpanEncodingLayer(nn.Module):
    """Eq. 1: W [H_s; H_e], s and e the positions of [E_start] and [E_end]. H (B, T, hidden) -> (M, dim).

    The paper writes no bias, its code has one; we keep it, so that its weights can be loaded."""

    def __init__(self, hidden, dim):
        super().__init__()
        self.linear = nn.Linear(2 * hidden, dim)

    def forward(self, H, row, start, end):
        return self.linear(torch.cat([H[row, start], H[row, end]], dim=-1))


class MLMHead(nn.Module):
    """BERT's masked-language-model head, tied to the word embeddings. (L, hidden) -> logits (L, vocab)."""

    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.hidden, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.gelu = config.gelu

    def forward(self, h, word_embedding):
        return F.linear(self.norm(F.gelu(self.dense(h), approximate=self.gelu)), word_embedding, self.bias)


def init_weights(module, std):
    """BERT's initialisation: normal weights, zero biases. For nn.Module.apply."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=std)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


# ---------------------------------------------------------------------------------------------------------------------
# Reading a published BERT checkpoint

SAFETENSORS_DTYPE = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I64": np.int64}
GELU = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}        # config.json's name -> torch's


class CheckpointError(Exception):
    """A checkpoint that cannot be used: one sentence that says why."""


def read_safetensors(path):
    """Tensors of a .safetensors file: eight bytes of header length, a JSON header, raw bytes."""
    data = Path(path).read_bytes()
    try:
        length, = struct.unpack("<Q", data[:8])
        header = json.loads(data[8:8 + length])
        tensors = {}
        for name, info in header.items():
            if name == "__metadata__":
                continue
            begin, end = info["data_offsets"]
            dtype = SAFETENSORS_DTYPE.get(info["dtype"])
            if dtype is None:
                raise CheckpointError(f"{path}: tensor {name} has type {info['dtype']}, which is not supported")
            if not 0 <= begin <= end <= len(data) - 8 - length:
                raise ValueError(f"{name} reaches beyond the end of the file")
            array = np.frombuffer(data, dtype, (end - begin) // np.dtype(dtype).itemsize, 8 + length + begin)
            tensors[name] = torch.from_numpy(array.reshape(info["shape"]).copy())
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error}); download it again") from error
    return tensors


def bert_config(folder, config):
    """`config` with the dimensions of the BERT in that folder (config.json, vocab.txt). Its layers are divided as the
    paper's are, 4 of 12 below the first memory layer (§4.1). Raises CheckpointError."""
    folder = Path(folder)
    try:
        bert = json.loads((folder / "config.json").read_text())
        with open(folder / "vocab.txt", encoding="utf-8") as file:
            n_words = sum(1 for _ in file)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{error.filename} is missing; --init wants the folder of a BERT checkpoint, with "
                              "config.json, vocab.txt and model.safetensors or pytorch_model.bin") from None
    except ValueError as error:
        raise CheckpointError(f"{folder}: config.json or vocab.txt cannot be read ({error})") from None
    try:
        n_layers = bert["num_hidden_layers"]
        # TOME-2 wants two blocks of the same depth
        n_block = (n_layers - n_layers // 3) // config.n_blocks * config.n_blocks
        config = replace(config, vocab_size=bert["vocab_size"], hidden=bert["hidden_size"],
                         n_heads=bert["num_attention_heads"], intermediate=bert["intermediate_size"],
                         max_positions=bert["max_position_embeddings"], n_initial=n_layers - n_block, n_block=n_block,
                         n_block_batch=0, gelu=GELU.get(bert.get("hidden_act", "gelu")))
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}/config.json has no {error}; is it a BERT model?") from None
    if bert.get("model_type", "bert") != "bert":        # RoBERTa's names are the same, its positions are not
        raise CheckpointError(f"{folder}/config.json is that of a {bert['model_type']} model; --init wants a BERT")
    if config.gelu is None:
        raise CheckpointError(f"{folder}/config.json: hidden_act {bert['hidden_act']} is none of {', '.join(GELU)}")
    if n_words != config.vocab_size:
        raise CheckpointError(f"{folder}/vocab.txt has {n_words} entries, config.json says {config.vocab_size}")
    if n_block == 0:
        raise CheckpointError(f"{folder}: {n_layers} layers are too few for {config.n_blocks} blocks")
    return config


def load_bert(folder, config):
    """Read a BERT folder: bert_config's files, and weights whose names may or may not begin with `bert.`.

    Returns (config, embeddings, layers, mlm): config as bert_config's, then state dictionaries of Embeddings, of each
    TransformerLayer and of MLMHead (None where the checkpoint has no MLM head). Raises CheckpointError."""
    folder, config = Path(folder), bert_config(folder, config)
    if (folder / "model.safetensors").exists():
        file = folder / "model.safetensors"
        raw = read_safetensors(file)
    elif (folder / "pytorch_model.bin").exists():
        file = folder / "pytorch_model.bin"
        try:
            raw = torch.load(file, map_location="cpu", weights_only=True)    # never unpickle a stranger's objects
            raw = {name: tensor for name, tensor in raw.items() if isinstance(tensor, torch.Tensor)}
        except Exception as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise CheckpointError(f"{file} cannot be read ({reason})") from None
    else:
        raise CheckpointError(f"{folder}: neither model.safetensors nor pytorch_model.bin there")
    raw = {name.removeprefix("bert."): tensor.float() for name, tensor in raw.items() if tensor.is_floating_point()}

    def take(name, *shape):
        """The tensor of that name (older files say gamma and beta), its shape checked."""
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        tensor = raw.get(name, raw.get(old))
        if tensor is None:
            raise CheckpointError(f"{file}: no tensor {name}; is it a BERT model?")
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{file}: {name} is {tuple(tensor.shape)}, config.json implies {shape}")
        return tensor

    def both(prefix, out, n_out, *n_in):
        return {f"{out}.weight": take(f"{prefix}.weight", n_out, *n_in), f"{out}.bias": take(f"{prefix}.bias", n_out)}

    d, f, v = config.hidden, config.intermediate, config.vocab_size
    embeddings = {"word.weight": take("embeddings.word_embeddings.weight", v, d),
                  "position.weight": take("embeddings.position_embeddings.weight", config.max_positions, d),
                  "segment.weight": take("embeddings.token_type_embeddings.weight", 2, d),
                  **both("embeddings.LayerNorm", "norm", d)}
    layers = []
    for i in range(config.n_initial + config.n_block):
        p = f"encoder.layer.{i}."
        qkv = [both(f"{p}attention.self.{name}", "", d, d) for name in ("query", "key", "value")]
        layer = {"attention.qkv" + end: torch.cat([part[end] for part in qkv]) for end in (".weight", ".bias")}
        layers.append({**layer, **both(p + "attention.output.dense", "attention.out", d, d),
                       **both(p + "attention.output.LayerNorm", "attention_norm", d),
                       **both(p + "intermediate.dense", "up", f, d), **both(p + "output.dense", "down", d, f),
                       **both(p + "output.LayerNorm", "norm", d)})
    mlm = None
    if "cls.predictions.transform.dense.weight" in raw:
        mlm = {**both("cls.predictions.transform.dense", "dense", d, d),
               **both("cls.predictions.transform.LayerNorm", "norm", d), "bias": take("cls.predictions.bias", v)}
    return config, embeddings, layers, mlm
