"""BERT, and the layer that turns a mention into a vector (paper §2.1.1, §4.1; Devlin et al. 2019).

    tokens (B, T) -> Embeddings -> (B, T, hidden) -> TransformerBlock -> H (B, T, hidden)
    SpanEncodingLayer(H, row, start, end) = W [H_start; H_end]                    (M, dim)     eq. 1
    MLMHead(H at the masked positions)                                            (L, vocab)

B passages, T tokens of the longest one, L masked tokens. M mentions of the whole batch stand in
flat arrays (row, start, end), so that no padding mention is computed. BERT is post-LN: each
sublayer is LayerNorm(x + f(x)). Names here and in the paper: s = start, e = end; d_K = key_dim,
d_V = value_dim, d_C = coref_dim.
"""
import json
import struct
from dataclasses import dataclass, replace
from functools import partial
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
    max_positions: int = 512
    dropout: float = 0.1
    gelu: str = "tanh"          # "none" is the exact GELU; a loaded checkpoint decides
    init_std: float = 0.02
    # Layers: n_initial below the first memory layer, n_block above it, shared out to n_blocks
    # TOMEBlocks: 1 (TOME-1: one of 8) or 2 (TOME-2: two of 4). Each block has at least one layer.
    n_initial: int = 4
    n_block: int = 8
    n_blocks: int = 1
    n_block_batch: int = 0      # so many of n_block are trained by BATCH-TOME already; 0: all
    # The memory: sizes of keys, values and coreference encodings; memories that a mention attends
    # to, and that are summed for an answer (eq. 10). Of each k, every process offers k_shard.
    key_dim: int = 128
    value_dim: int = 512
    coref_dim: int = 512
    k: int = 128
    k_shard: int = 2
    k_answer: int = 4096
    k_answer_shard: int = 32
    # What stands in the memory's place: "mentions" is TOME; the baselines are "entities", a trained
    # EntityTable of n_entities rows, and "none", no memory layers.
    memory: str = "mentions"
    n_entities: int = 0         # in "none" too, where the table only answers questions

    @property
    def layers_a_block(self):
        return max(1, self.n_block // self.n_blocks)

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
        T, limit = tokens.shape[1], self.position.num_embeddings
        if T > limit:
            raise ValueError(f"{T} tokens in a passage, but the model has {limit} positions")
        x = self.word(tokens) + self.position.weight[:T] + self.segment.weight[0]
        return self.dropout(self.norm(x))                                         # (B, T, hidden)

# No padding is computed. A layer reads the n tokens of the whole batch as rows, x (n, hidden). Only
# its attention knows the passages: `at` (n,) is each token's place in the flat batch. On short
# passages that saves a quarter of a step.

def spread(x, at, attention_mask):
    """Tokens (n, C) back at their places in the batch: (B, T, C), zero at the padding."""
    flat = x.new_zeros(attention_mask.numel(), x.shape[-1]).index_copy(0, at, x)
    return flat.unflatten(0, attention_mask.shape)

class SelfAttention(nn.Module):
    """x (n, hidden) -> (n, hidden); a token attends to those of its own passage."""

    def __init__(self, config):
        super().__init__()
        self.n_heads, self.dropout = config.n_heads, config.dropout
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x, at, attention_mask):
        qkv = spread(self.qkv(x), at, attention_mask).unflatten(-1, (3, self.n_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                              # each (B, heads, T, hd)
        scores = q * q.shape[-1] ** -0.5 @ k.mT                           # (B, heads, T, T)
        scores = scores.masked_fill(~attention_mask[:, None, None, :], -torch.inf)
        y = F.dropout(scores.softmax(-1), self.dropout, self.training) @ v
        return self.out(y.transpose(1, 2).flatten(2).flatten(0, 1)[at])   # (B T, hidden)[at]

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
    """Several layers. x (B, T, hidden), attention_mask (B, T) True = token -> (B, T, hidden), zero
    at the padding."""

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
    """Eq. 1: W [H_s; H_e], s and e the positions of [E_start] and [E_end]. H (B, T, hidden) ->
    (M, dim).

    The paper writes no bias, its code has one. We keep it, so that its weights can be loaded."""

    def __init__(self, hidden, dim):
        super().__init__()
        self.linear = nn.Linear(2 * hidden, dim)

    def forward(self, H, row, start, end):
        return self.linear(torch.cat([H[row, start], H[row, end]], dim=-1))

class MLMHead(nn.Module):
    """BERT's masked-language-model head, tied to the word embeddings. (L, hidden) -> (L, vocab)."""

    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.hidden, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.gelu = config.gelu

    def forward(self, h, word_embedding):
        h = self.norm(F.gelu(self.dense(h), approximate=self.gelu))
        return F.linear(h, word_embedding, self.bias)

def init_weights(module, std):
    """BERT's initialisation: normal weights, zero biases. For nn.Module.apply."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=std)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)

# ---- Reading a published BERT checkpoint

SAFETENSORS_DTYPE = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I64": np.int64}
GELU = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}    # its name -> torch's
# Our names -> the published ones. What has several is their concatenation.
EMBEDDINGS = {"word": ["word_embeddings"], "position": ["position_embeddings"],
              "segment": ["token_type_embeddings"], "norm": ["LayerNorm"]}
LAYER = {"attention.qkv": [f"attention.self.{name}" for name in ("query", "key", "value")],
         "attention.out": ["attention.output.dense"], "norm": ["output.LayerNorm"],
         "attention_norm": ["attention.output.LayerNorm"], "up": ["intermediate.dense"],
         "down": ["output.dense"]}
MLM = {"dense": ["transform.dense"], "norm": ["transform.LayerNorm"], "": [""]}

class CheckpointError(Exception):
    """A checkpoint that cannot be used: one sentence that says why."""

def read_safetensors(path):
    """{name: tensor}: eight bytes of header length, a JSON header, the numbers."""
    data = Path(path).read_bytes()
    length, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    numbers, tensors = memoryview(data)[8 + length:], {}
    for name in header.keys() - {"__metadata__"}:
        dtype, (begin, end) = header[name]["dtype"], header[name]["data_offsets"]
        if dtype not in SAFETENSORS_DTYPE:
            raise ValueError(f"tensor {name} has type {dtype}, which is not supported")
        array = np.frombuffer(numbers[begin:end], SAFETENSORS_DTYPE[dtype])
        tensors[name] = torch.from_numpy(array.reshape(header[name]["shape"]).copy())
    return tensors

def bert_config(folder, config):
    """`config` with the dimensions of the BERT in that folder (config.json, vocab.txt). Its layers
    are divided as the paper's, 4 of 12 below the first memory layer (§4.1). Raises
    CheckpointError."""
    try:
        bert = json.loads((Path(folder) / "config.json").read_text())
        vocab = (Path(folder) / "vocab.txt").read_text(encoding="utf-8")
        n_layers, kind = bert["num_hidden_layers"], bert.get("model_type", "bert")
        # TOME-2 wants two blocks of the same depth.
        n_block = (n_layers - n_layers // 3) // config.n_blocks * config.n_blocks
        if kind != "bert":                  # RoBERTa's names are the same, its positions are not
            raise ValueError(f"it is that of a {kind} model")
        if vocab.count("\n") + (not vocab.endswith("\n")) != bert["vocab_size"]:
            raise ValueError(f"vocab.txt has not the {bert['vocab_size']} entries it says")
        if n_block == 0:
            raise ValueError(f"{n_layers} layers are too few for {config.n_blocks} blocks")
        return replace(config, vocab_size=bert["vocab_size"], hidden=bert["hidden_size"],
                       n_heads=bert["num_attention_heads"], intermediate=bert["intermediate_size"],
                       max_positions=bert["max_position_embeddings"], n_block_batch=0,
                       n_initial=n_layers - n_block, n_block=n_block,
                       gelu=GELU[bert.get("hidden_act", "gelu")])
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read; --init wants a BERT's folder: "
                              "config.json, vocab.txt and model.safetensors or pytorch_model.bin"
                              ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder}/config.json is not a BERT's that can be used: "
                              f"{type(error).__name__}, {error}") from None

def take_state(file, raw, source, module, names, prefix):
    """The state dictionary of `module`, taken out of `raw` {published name: tensor}, its shapes
    checked. names: ours -> published, below `prefix`. source: what implies the shapes."""
    found = {}
    for name, ours in module.state_dict().items():
        stem, _, end = name.rpartition(".")
        parts = []
        for theirs in names[stem]:
            theirs = f"{prefix}{theirs}.{end}".replace("..", ".")
            shape = (len(ours) // len(names[stem]), *ours.shape[1:])
            if theirs not in raw:
                raise CheckpointError(f"{file}: no tensor {theirs}; it is of another kind of model")
            if raw[theirs].shape != shape:
                raise CheckpointError(f"{file}: {theirs} is {tuple(raw[theirs].shape)}, "
                                      f"{source} implies {shape}")
            parts.append(raw.pop(theirs).float())
        found[name] = torch.cat(parts)
    return found

def load_bert(folder, config):
    """Read a BERT folder: bert_config's files, and weights whose names may begin with `bert.`.

    Returns (config, embeddings, layers, mlm): config as bert_config's, then state dictionaries of
    Embeddings, of each TransformerLayer and of MLMHead (None where there is none). Raises
    CheckpointError. Runs no code of a stranger's file: weights_only."""
    config, file = bert_config(folder, config), Path(folder) / "model.safetensors"
    try:
        if file.exists():
            raw = read_safetensors(file)
        else:
            file = Path(folder) / "pytorch_model.bin"
            raw = torch.load(file, map_location="cpu", weights_only=True)
        # Older files say gamma and beta.
        raw = {name.removeprefix("bert.").replace(".gamma", ".weight").replace(".beta", ".bias"):
               tensor for name, tensor in raw.items()}
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{file} cannot be read ({reason}); download it again") from None

    with torch.device("meta"):              # modules without numbers: only names and shapes
        state = partial(take_state, file, raw, "config.json")
        embeddings = state(Embeddings(config), EMBEDDINGS, "embeddings.")
        layers = [state(TransformerLayer(config), LAYER, f"encoder.layer.{i}.")
                  for i in range(config.n_initial + config.n_block)]
        mlm = None
        if "cls.predictions.transform.dense.weight" in raw:
            mlm = state(MLMHead(config), MLM, "cls.predictions.")
    return config, embeddings, layers, mlm

# ---- Reading a checkpoint of the paper's own code (flax)

# Our names -> those of its tree, as above.
FLAX_EMBEDDINGS = {"word": ["embedder.embedders_token_ids"], "norm": ["embeddings_layer_norm"],
                   "position": ["embedder.embedders_position_ids"],
                   "segment": ["embedder.embedders_segment_ids"]}
FLAX_LAYER = {"attention.qkv": [f"attention_block.attention_layer.{name}"
                                for name in ("query", "key", "value")],
              "attention.out": ["attention_block.attention_layer.out"],
              "attention_norm": ["attention_block.layer_norm"], "up": ["mlp_block.mlp"],
              "down": ["mlp_block.dense"], "norm": ["mlp_block.layer_norm"]}
FLAX_MEMORY = {"query.linear": ["query_projector"], "up": ["update_layer.retrieval_projector"],
               "norm": ["update_layer.layer_norm"]}
FLAX_MLM = {"dense": ["dense"], "norm": ["layer_norm"], "": [""]}
FLAX_CONFIG = {"dropout_rate": "dropout", "k_top_device": "k", "final_k_top_device": "k_answer"}

def is_flax(path):
    """Whether a file begins as a flax checkpoint does. A .pt file begins with P or with 0x80."""
    with open(path, "rb") as file:
        return file.read(1) > b"\x80"

def beside(path, name):
    """The file of that name in the folder `path`, or beside the file `path` or one folder above
    it; None where there is none."""
    path = Path(path).absolute()
    found = [folder / name for folder in (path, *path.parents[:2]) if (folder / name).is_file()]
    return found[0] if found else None

def read_flax(path):
    """{name: array} of a message pack: maps, and as leaves extension 1, [shape, type, bytes].

    `weights/step<N>` is the encoder's tree; in `checkpoint_<N>` heads stand beside it, and around
    it an optimizer's state, which is not read. No object is made but these: no code runs."""
    try:
        import msgpack
    except ImportError:
        raise CheckpointError(f"{path} is a flax checkpoint: pip install msgpack") from None
    try:
        tree = msgpack.unpackb(Path(path).read_bytes())
    except msgpack.StackError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(tree, dict) or not isinstance(tree.get("params", {}), dict):
        raise ValueError("it is no tree of arrays")
    tree = tree.get("params", tree)
    arrays, left = {}, list(tree.items() if "encoder" in tree else [("encoder", tree)])
    while left:
        name, node = left.pop()
        if isinstance(node, dict):
            left += [(f"{name}.{key}", child) for key, child in node.items()]
        elif isinstance(node, msgpack.ExtType) and node.code == 1:
            shape, dtype, numbers = msgpack.unpackb(node.data)
            if dtype not in ("float32", "float16", "float64"):
                raise ValueError(f"{name} has type {dtype}, which is not supported")
            arrays[name] = np.frombuffer(numbers, dtype).reshape(shape).astype(np.float32)
            if not np.isfinite(arrays[name]).all():
                raise ValueError(f"a number of {name} is not finite")
    return arrays

def flax_config(path, arrays, config):
    """`config` with the dimensions of these arrays, and with what config.json, where it lies beside
    the file or one folder above, says of dropout and of the number of retrieved memories."""
    def size(name):
        return arrays[f"encoder.{name}"].shape[0]

    def n_layers(block):
        return sum(name.startswith(f"encoder.{block}_encoder.") and name.endswith(".mlp.bias")
                   for name in arrays)

    n_blocks = 2 if n_layers("intermediate") else 1
    if n_blocks == 2 and n_layers("intermediate") != n_layers("final"):
        raise ValueError("its two blocks are not equally deep")
    if any(name.startswith("encoder.second_") for name in arrays):
        raise ValueError("its two reads have each their own encoder")
    memory = "final_memory_attention_layer" if n_blocks == 2 else "memory_attention_layer"
    layer = "initial_encoder.layer_sequence.layers_0"
    config = replace(
        config, vocab_size=size("embedder.embedders_token_ids.embedding"), gelu="tanh",
        max_positions=size("embedder.embedders_position_ids.embedding"),
        hidden=size("embeddings_layer_norm.bias"), intermediate=size(f"{layer}.mlp_block.mlp.bias"),
        n_heads=size(f"{layer}.attention_block.attention_layer.query.bias"), n_block_batch=0,
        n_initial=n_layers("initial"), n_block=n_blocks * n_layers("final"), n_blocks=n_blocks,
        key_dim=size(f"{memory}.query_projector.bias"),
        value_dim=size(f"{memory}.update_layer.retrieval_projector.kernel"))
    if "encoder.mention_projector.bias" in arrays:
        config = replace(config, coref_dim=size("mention_projector.bias"))
    file = beside(path, "config.json")
    said = json.loads(file.read_text()).get("model_config", {}) if file else {}
    for name, ours in FLAX_CONFIG.items():
        value = said.get("encoder_config", {}).get(name)
        if value is not None:
            config = replace(config, **{ours: type(getattr(config, ours))(value)})
    return config

def load_flax(path, config):
    """Read a BATCH-TOME or TOME that the paper's own code wrote; read_flax says which files.

    Returns (config, state, unused): flax_config's; a state dictionary of what the file holds, in
    BatchTOME's names; the groups of arrays that were passed over. With a final retrieval it is a
    TOME: its memory_extraction_layer, as a TOME-2's memory_attention_layer, is left over from the
    BATCH-TOME that it began as. Raises CheckpointError. Needs the package msgpack."""
    raw, state = {}, {}
    try:
        arrays = read_flax(path)
        config = flax_config(path, arrays, config)
        for name, array in arrays.items():
            stem, _, end = name.rpartition(".")
            if end == "kernel" and f"{stem}.bias" in arrays:    # [in, out], or heads x size of one
                array = array.reshape(-1, arrays[f"{stem}.bias"].size).T
            end = "bias" if end == "bias" else "weight"
            raw[f"{stem}.{end}"] = torch.from_numpy(array.ravel() if end == "bias" else array)
    except CheckpointError:
        raise
    except Exception as error:
        reason = f"it has no array {error}" if isinstance(error, KeyError) else str(error)
        reason = " ".join(reason.split())[:150] or type(error).__name__
        raise CheckpointError(f"{path} cannot be read as a TOME's weights ({reason})") from None

    def take(ours, module, names, theirs):
        found = take_state(path, raw, "the rest of it", module, names, theirs)
        state.update({f"{ours}.{name}": tensor for name, tensor in found.items()})

    hidden, tome = config.hidden, "encoder.tome"
    names = [""] if config.n_blocks == 1 else ["intermediate_", "final_"]
    blocks = {f"{tome}.initial": ("initial_", config.n_initial)}
    with torch.device("meta"):
        take(f"{tome}.embeddings", Embeddings(config), FLAX_EMBEDDINGS, "encoder.")
        for b, name in enumerate(names):
            ours = f"{tome}.blocks.{b}"
            blocks[f"{ours}.transformer"] = (name or "final_", config.layers_a_block)
            module = nn.ModuleDict({"query": SpanEncodingLayer(hidden, config.key_dim),
                                    "up": nn.Linear(config.value_dim, hidden),
                                    "norm": nn.LayerNorm(hidden)})
            take(f"{ours}.memory_attention", module, FLAX_MEMORY,
                 f"encoder.{name}memory_attention_layer.")
        for ours, (name, n_layers) in blocks.items():
            for i in range(n_layers):
                take(f"{ours}.layers.{i}", TransformerLayer(config), FLAX_LAYER,
                     f"encoder.{name}encoder.layer_sequence.layers_{i}.")
        if "mlm_layer.bias" in raw:
            take(f"{tome}.mlm", MLMHead(config), FLAX_MLM, "mlm_layer.")
        is_tome = "encoder.final_query_projector.bias" in raw
        if is_tome or "encoder.mention_projector.bias" in raw:
            take("coref", SpanEncodingLayer(hidden, config.coref_dim),
                 {"linear": ["mention_projector"]}, "encoder.")
        if is_tome:
            take("query", nn.Linear(config.coref_dim, config.key_dim),
                 {"": ["final_query_projector"]}, "encoder.")
        elif "encoder.memory_extraction_layer.key_projector.bias" in raw:
            for name, dim in (("key", config.key_dim), ("value", config.value_dim)):
                take(f"encoder.{name}", SpanEncodingLayer(hidden, dim),
                     {"linear": [f"{name}_projector"]}, "encoder.memory_extraction_layer.")
    if is_tome:         # their z of eq. 10 is two linear maps, one after the other: ours is one
        W, b = state.pop("query.weight").double(), state.pop("query.bias").double()
        W_first, b_first = state.pop("coref.linear.weight"), state.pop("coref.linear.bias")
        state[f"{tome}.answer.linear.weight"] = (W @ W_first.double()).float()
        state[f"{tome}.answer.linear.bias"] = (W @ b_first.double() + b).float()
    unused = {name.removeprefix("encoder.").split(".")[0] for name in raw}
    return config, state, sorted(unused)
