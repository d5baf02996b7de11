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
import re
from contextlib import contextmanager
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
    max_positions: int = 512
    dropout: float = 0.1
    gelu: str = "tanh"          # "none" is the exact GELU; a loaded checkpoint decides
    init_std: float = 0.02
    # Layers: n_initial below the first memory layer, n_block above it, shared out to n_blocks
    # TOMEBlocks: 1 (TOME-1: one of 8) or 2 (TOME-2: two of 4). Each block has at least one layer.
    n_initial: int = 4
    n_block: int = 8
    n_blocks: int = 1
    # The memory: sizes of keys, values and coreference encodings; memories that a mention attends
    # to, and that are summed for an answer (eq. 10). Every process offers at least k_shard.
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
    n_entities: int = 0         # rows of that table; with "none", only eq. 10 reads it
    precision: str = "bfloat16" # of products in training and encoding, see low_precision

    @property
    def layers_a_block(self):
        return max(1, self.n_block // self.n_blocks)

def low_precision(config, device):
    """A context in which matrix products are made of bfloat16 numbers, if the config says so and
    the device is fast at it: GPUs, and processors with AVX512-BF16, four times as fast as in
    float32. Losses, scores and weights stay in float32."""
    is_fast = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
    return torch.autocast(device.type, torch.bfloat16, is_fast and config.precision == "bfloat16")

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
        with torch.no_grad():       # padding gets weight 0, hence gradient 0: no copy is needed
            scores.masked_fill_(~attention_mask[:, None, None, :], -torch.inf)
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

# ---- Published weights ---------------------------------------------------------------------------
# Two readers: of a BERT as it is published, and of a BATCH-TOME or TOME as the paper's own code
# writes it. Both return a Config and a state dictionary in the names of tome.BatchTOME, which rules
# (regular expression, replacement) make of theirs. tome.read_published checks that all fits.

GELU = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}    # its name -> torch's
DTYPES = {"F16": np.float16, "F32": np.float32, "F64": np.float64, "I64": np.int64,
          "float32": np.float32}                                            # the last is flax's
BERT_SIZES = {"vocab_size": "vocab_size", "hidden": "hidden_size", "n_heads": "num_attention_heads",
              "intermediate": "intermediate_size", "max_positions": "max_position_embeddings"}
BERT_NAMES = [
    (r"^bert\.", ""), (r"gamma$", "weight"), (r"beta$", "bias"),            # of older files
    (r"token_type_embeddings", "segment"), (r"_embeddings", ""), (r"LayerNorm", "norm"),
    (r"attention\.self", "attention"), (r"attention\.output\.dense", "attention.out"),
    (r"attention\.output\.norm", "attention_norm"), (r"intermediate\.dense", "up"),
    (r"output\.dense", "down"), (r"output\.norm", "norm"),
    (r"^cls\.predictions\.transform", "mlm"), (r"^cls\.predictions\.bias", "mlm.bias")]
FLAX_NAMES = [
    (r"^encoder\.", "encoder.tome."), (r"^mlm_layer\.", "encoder.tome.mlm."),
    (r"(kernel|scale|embedding)$", "weight"), (r"layer_norm", "norm"),
    (r"embedder\.embedders_token_ids", "embeddings.word"), (r"embeddings_norm", "embeddings.norm"),
    (r"embedder\.embedders_(position|segment)_ids", r"embeddings.\1"),
    (r"initial_encoder", "initial"), (r"layer_sequence\.layers_", "layers."),
    (r"attention_block\.attention_layer", "attention"), (r"mlp_block\.dense", "down"),
    (r"attention_block\.norm", "attention_norm"), (r"(mlp_block|update_layer)\.norm", "norm"),
    (r"mlp_block\.mlp|update_layer\.retrieval_projector", "up"),
    (r"\.query_projector", ".query.linear"), (r"final_query_projector", "answer.linear"),
    (r".*\.mention_projector", "coref.linear")]
FLAX_BLOCKS = {     # by the number of blocks: the memory layers, and the layers above each
    1: [(r"\.memory_attention_layer", ".blocks.0.memory_attention"),
        (r"final_encoder", "blocks.0.transformer")],
    2: [(r"intermediate_memory_attention_layer", "blocks.0.memory_attention"),
        (r"intermediate_encoder", "blocks.0.transformer"),
        (r"final_memory_attention_layer", "blocks.1.memory_attention"),
        (r"final_encoder", "blocks.1.transformer")]}

class CheckpointError(Exception):
    """A published checkpoint that cannot be used: one sentence that says why."""

@contextmanager
def readable(path, what):
    """Whatever goes wrong with a stranger's file becomes a CheckpointError that names it."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        reason = " ".join(reason.split())[:150] or type(error).__name__
        raise CheckpointError(f"{path} cannot be read as {what} ({reason})") from None

def beside(path, name):
    """The file of that name in the folder `path`, or beside the file `path`, or one folder above
    it; None where there is none."""
    path = Path(path).absolute()
    found = [folder / name for folder in (path, *path.parents[:2]) if (folder / name).is_file()]
    return found[0] if found else None

def tensor_of(numbers, dtype, shape):
    """Of bytes, a name in DTYPES and a list of sizes."""
    return torch.from_numpy(np.frombuffer(numbers, DTYPES[dtype]).reshape(shape).copy())

def renamed(raw, rules):
    """The tensors {published name: tensor} under our names."""
    state = {}
    for name, tensor in raw.items():
        for pattern, ours in rules:
            name = re.sub(pattern, ours, name)
        state[name] = tensor.float()
    # Ours has one matrix for the queries, keys and values of self-attention.
    for name in [name for name in state if ".attention.query." in name]:
        parts = [state.pop(name.replace("query", part)) for part in ("query", "key", "value")]
        state[name.replace("query", "qkv")] = torch.cat(parts)
    return state

def bert_config(folder, config):
    """`config` with the dimensions of the BERT in that folder: its n_block last layers stand above
    the first memory layer (§4.1: 8 of 12). Raises CheckpointError."""
    with readable(f"{folder}/config.json", "that of a BERT, whose folder --init wants"):
        bert = json.loads((Path(folder) / "config.json").read_text())
        kind = bert.get("model_type", "bert")
        if kind != "bert":                  # RoBERTa's names are the same, its positions are not
            raise ValueError(f"it is that of a {kind} model")
        sizes = {ours: bert[theirs] for ours, theirs in BERT_SIZES.items()}
        n_initial = bert["num_hidden_layers"] - config.n_block
        if n_initial < 1:
            raise ValueError(f"of its layers none is left below the {config.n_block} of n_block")
        return replace(config, **sizes, gelu=GELU[bert["hidden_act"]], n_initial=n_initial)

def read_safetensors(path):
    """{name: tensor}: eight bytes of header length, a JSON header, the numbers."""
    content = Path(path).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header, tensors = json.loads(content[8:start]), {}
    for name in header.keys() - {"__metadata__"}:
        begin, end = header[name]["data_offsets"]
        numbers = content[start + begin:start + end]
        tensors[name] = tensor_of(numbers, header[name]["dtype"], header[name]["shape"])
    return tensors

def load_bert(folder, config):
    """(config, state) of a BERT's folder: config.json, and model.safetensors or pytorch_model.bin.

    config: bert_config's, but in one block. state: what BERT has of BATCH-TOME, with an MLM head
    where it has one. A stranger's file runs no code (weights_only)."""
    config = replace(bert_config(folder, config), n_blocks=1)

    def place(match):
        i = int(match[1])
        above = f"blocks.0.transformer.layers.{i - config.n_initial}"
        return f"initial.layers.{i}" if i < config.n_initial else above

    file = Path(folder) / "model.safetensors"
    if not file.exists():
        file = file.with_name("pytorch_model.bin")
    with readable(file, "a BERT's weights; download it again"):
        if file.suffix == ".safetensors":
            raw = read_safetensors(file)
        else:
            raw = torch.load(file, map_location="cpu", weights_only=True)
        return config, renamed(raw, [*BERT_NAMES, (r"^encoder\.layer\.(\d+)", place),
                                     (r"^", "encoder.tome.")])

def read_flax(path):
    """{name: tensor} of a message pack: maps whose leaves are extensions, [shape, type, bytes].

    `weights/step<N>` is the encoder's tree. In `checkpoint_<N>` the heads stand beside it, and
    around both an optimizer's state, which is not read. No object is made but these."""
    import msgpack              # optional: readable() says where it is missing
    tree = msgpack.unpackb(Path(path).read_bytes())
    tree = tree.get("params", tree)
    if "encoder" not in tree:
        tree = {"encoder": tree}
    tensors, left = {}, list(tree.items())
    while left:
        name, node = left.pop()
        if isinstance(node, dict):
            left += [(f"{name}.{key}", child) for key, child in node.items()]
        else:
            shape, dtype, numbers = msgpack.unpackb(node.data)
            tensors[name] = tensor_of(numbers, dtype, shape)
    return tensors

def flax_config(path, state, config):
    """`config` with the dimensions of these weights, and with what config.json, where there is one,
    says of dropout and of the number of retrieved memories."""
    shape = {name.removeprefix("encoder.tome."): tensor.shape for name, tensor in state.items()}
    layers = [name for name in shape if ".layers." in name and name.endswith(".up.bias")]
    n_initial = sum(name.startswith("initial") for name in layers)
    hidden, value_dim = shape["blocks.0.memory_attention.up.weight"]
    config = replace(
        config, gelu="tanh", vocab_size=shape["embeddings.word.weight"][0], hidden=hidden,
        max_positions=shape["embeddings.position.weight"][0], value_dim=value_dim,
        intermediate=shape["initial.layers.0.up.bias"][0], n_initial=n_initial,
        n_block=len(layers) - n_initial, coref_dim=value_dim,       # their two are one projection
        key_dim=shape["blocks.0.memory_attention.query.linear.bias"][0])
    file = beside(path, "config.json")
    said = json.loads(file.read_text()).get("model_config", {}) if file else {}
    for theirs, ours, kind in (("dropout_rate", "dropout", float), ("k_top_device", "k", int),
                               ("final_k_top_device", "k_answer", int)):
        value = said.get("encoder_config", {}).get(theirs)
        if value is not None:
            setattr(config, ours, kind(value))
    return config

def load_flax(path, config):
    """(config, state) of a BATCH-TOME or a TOME that the paper's own code wrote; read_flax says
    which files. With a final retrieval it is a TOME. What such a file still holds of the BATCH-TOME
    that it began as keeps its name."""
    tensors, flat = read_flax(path), {}
    is_tome = "encoder.final_query_projector.bias" in tensors
    n_blocks = 2 if any(name.startswith("encoder.intermediate_encoder") for name in tensors) else 1
    rules = FLAX_NAMES + FLAX_BLOCKS[n_blocks]
    if not is_tome:
        rules.append((r".*\.memory_extraction_layer\.(key|value)_projector", r"encoder.\1.linear"))
    for name, tensor in tensors.items():
        module, _, end = name.rpartition(".")
        if end == "kernel":                 # [in, out]; of attention [in, heads, size] or the like
            tensor = tensor.reshape(-1, tensors[f"{module}.bias"].numel()).T
        flat[name] = tensor.flatten() if end == "bias" else tensor
    state = renamed(flat, rules)
    first = "encoder.initial_encoder.layer_sequence.layers_0.attention_block.attention_layer"
    n_heads = len(tensors[f"{first}.query.bias"])
    config = flax_config(path, state, replace(config, n_blocks=n_blocks, n_heads=n_heads))
    if is_tome:         # their z of eq. 10 is two linear maps, one after the other; ours is one
        answer = "encoder.tome.answer.linear"
        W, b = (state[f"{answer}.{end}"].double() for end in ("weight", "bias"))
        W_first, b_first = (state.pop(f"coref.linear.{end}").double() for end in ("weight", "bias"))
        state[f"{answer}.weight"] = (W @ W_first).float()
        state[f"{answer}.bias"] = (W @ b_first + b).float()
    return config, state
