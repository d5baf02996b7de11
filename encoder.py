"""BERT, and the layer that turns a mention into a vector (§2.1.1, §4.1; Devlin et al. 2019).

    tokens (B, T) -> Embeddings -> (B, T, hidden) -> TransformerBlock -> H (B, T, hidden)
    SpanEncodingLayer(H, row, start, end) = W [H_start; H_end]                    (M, dim)     eq. 1
    MLMHead(H at the masked positions)                                            (L, vocab)

A batch contains B passages, padded to the length T of the longest, and L masked tokens. Each of its
M mentions is between two marker tokens, [E_start] and [E_end]. For each mention, row (M,) contains
the index of its passage in the batch, and start and end (M,) contain the positions of its markers.
The layers are post-LN, as in BERT: LayerNorm(x + f(x)). The paper writes s and e for start and end,
and d_K, d_V and d_C for key_dim, value_dim and coref_dim."""
import json
import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError

import torch
import torch.nn.functional as F
from torch import nn

def setting(default, allowed, text, since="batch-tome"):
    """A dataclass field that is also a flag of train.py. allowed: the allowed words, or (minimum,
    maximum). text: the help text. since: the first stage that depends on the setting ("corpus" is
    the tokenisation). If the setting changes, `train.py --from` can reuse only earlier stages."""
    return field(default=default, metadata={"allowed": allowed, "help": text, "since": since})

@dataclass
class Config:
    """Sizes and variants of the model. The defaults are the paper's (§4.1, app. A, C.1.4). Fields
    without `setting` are not stored as settings of a run: vocab_size and n_entities come from the
    corpus, and n_blocks from the flag --blocks of each command."""
    vocab_size: int = 30522
    hidden: int = setting(768, (1, 10_000), "width of the Transformer")
    n_heads: int = setting(12, (1, 1000), "attention heads")
    intermediate: int = setting(3072, (1, 10**5), "width of the feed-forward layers")
    max_positions: int = setting(512, (16, 10**5), "number of position embeddings")
    dropout: float = setting(0.1, (0, 0.9), "dropout rate")
    gelu: str = setting("tanh", ("tanh", "none"), "approximation of GELU; none: exact")
    init_std: float = setting(0.02, (0, 1), "standard deviation of initial weights")
    # TOME-1 has one TOMEBlock with n_upper layers. TOME-2 has two TOMEBlocks with n_upper / 2
    # layers each (for n_upper = 1, see layers_per_block).
    n_initial: int = setting(4, (1, 100), "Transformer layers below the first memory layer")
    n_upper: int = setting(8, (1, 100), "Transformer layers above the first memory layer")
    n_blocks: int = 1
    key_dim: int = setting(128, (1, 10_000), "size of keys and queries, d_K")
    value_dim: int = setting(512, (1, 10_000), "size of values, d_V")
    coref_dim: int = setting(512, (1, 10_000), "size of coreference encodings, d_C")
    # MentionMemory.retrieve explains k_shard, and increases it if there are few processes.
    k: int = setting(128, (1, 10**6), "memories that a mention attends to", "tome")
    k_shard: int = setting(2, (1, 10**6), "candidate memories per process, for --k", "tome")
    # 4096: the paper's eq. 10 uses all candidates of its 128 processes, 32 each (app. C.1.4).
    k_answer: int = setting(4096, (1, 10**6), "memories retrieved for eq. 10", "tome")
    k_answer_shard: int = setting(32, (1, 10**6), "candidates per process, for --k-answer", "tome")
    memory: str = setting("mentions", ("mentions", "entities", "none"),
                          "mentions: TOME; entities (Entities as Experts) and none: baselines")
    # Rows of memory.EntityTable; 0 in TOME. (With memory none, only eq. 10 uses the table.)
    n_entities: int = 0
    precision: str = setting("bfloat16", ("bfloat16", "float32"),
                             "data type of matrix products; always float32 where bfloat16 is slow")

    @property
    def layers_per_block(self):
        """Transformer layers in a TOMEBlock. A single upper layer (preset toy) cannot be divided
        (1 // 2 is 0), so each block of TOME-2 gets two layers: a copy of that layer, and one that
        at first only normalises (tome.split_into_blocks). With the copy alone, TOME-2 learned
        claims about two facts less well."""
        return self.n_upper // self.n_blocks or 2

class Embeddings(nn.Module):
    """The sum of word, position and segment embeddings, normalised.
    tokens (B, T) -> (B, T, hidden)."""
    def __init__(self, config):
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.hidden)
        self.position = nn.Embedding(config.max_positions, config.hidden)
        self.segment = nn.Embedding(2, config.hidden)       # BERT has two segments; only 0 is used
        self.norm = nn.LayerNorm(config.hidden, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens):
        x = self.word(tokens) + self.position.weight[:tokens.shape[1]] + self.segment.weight[0]
        return self.dropout(self.norm(x))                                         # (B, T, hidden)

class SelfAttention(nn.Module):
    """Each token attends to the tokens of its own passage."""
    def __init__(self, config):
        super().__init__()
        self.n_heads, self.dropout = config.n_heads, config.dropout
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x, packing, used):
        """Softmax(q k^T / sqrt(d)) v per head of size d. x (n, hidden): the tokens of all passages,
        one after another. The result (n', hidden) has only the positions of `used`. Attention
        itself needs the shape (B, T, hidden), to and from which a Packing (below) converts."""
        q, k, v = (packing.unpack(part).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
                   for part in self.qkv(x).chunk(3, -1))                # (B, heads, T, d) each
        mask = packing.is_kept[:, None, None]                                         # (B, 1, 1, T)
        dropout = self.dropout if self.training else 0.0
        if not x.is_cuda:           # in bfloat16, a CPU takes more than twice as long here
            q, k, v = q.float(), k.float(), v.float()
        with torch.autocast("cpu", enabled=False):
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        return self.out(used.pack(y.transpose(1, 2).flatten(2)))

class TransformerLayer(nn.Module):
    """One layer of BERT. x (n, hidden) has a row for each token, the result (n', hidden) for each
    position that is used later. The Packings `packing` and `used` say which rows these are. They
    differ only in the last layer, in training."""
    def __init__(self, config):
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden, eps=1e-12)
        self.up = nn.Linear(config.hidden, config.intermediate)
        self.down = nn.Linear(config.intermediate, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)
        self.gelu = config.gelu

    def forward(self, x, packing, used):
        attended = self.attention(x, packing, used)                                 # (n', hidden)
        if used is not packing:
            x = used.pack(packing.unpack(x))
        x = self.attention_norm(x + self.dropout(attended))
        return self.norm(x + self.dropout(self.down(F.gelu(self.up(x), approximate=self.gelu))))

class TransformerBlock(nn.Module):
    """A stack of layers. x (B, T, hidden), attention_mask (B, T) -> (B, T, hidden). At padding, the
    mask is false and the output is zero. To save time, training passes is_used (B, T): the last
    layer then computes only the positions where it is true, and the output is zero elsewhere."""
    def __init__(self, config, n_layers):
        super().__init__()
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(n_layers))

    def forward(self, x, attention_mask, is_used=None):
        # CPUs attend fastest if T is a multiple of 16. If it is at most 7 short, padding is added.
        T = x.shape[1]
        missing = -T % 16
        added = missing if missing < 8 else 0
        packing = Packing(F.pad(attention_mask, (0, added)))
        used = packing if is_used is None else Packing(F.pad(is_used, (0, added)))
        x = packing.pack(F.pad(x, (0, 0, 0, added)))
        *lower, last = self.layers
        for layer in lower:
            x = layer(x, packing, packing)
        return used.unpack(last(x, packing, used))[:, :T]

class Packing:
    """Leaves positions out of the computation: (B, T, C) <-> (n, C). is_kept (B, T) is either the
    attention mask, so that only padding is left out, or says where the last layer's output is used.

    Only attention needs to know which passage a token belongs to. Everything else works on n rows:
    one for each position kept, and up to 127 others, whose results are ignored. They make n a
    multiple of 128 (unless B * T is smaller), because oneDNN (PyTorch's library for CPUs) compiles
    code for each new n. (With x.flatten(0, 1) and its inverse instead, the results at tokens would
    be the same, but the layers would also process all padding, often a third of a batch.)"""
    def __init__(self, is_kept):
        self.is_kept, self.n_kept = is_kept, int(is_kept.sum())
        kept_first = (~is_kept).flatten().int().argsort(stable=True)
        self.rows = kept_first[:128 * math.ceil(self.n_kept / 128)]         # (n,) indices below B*T

    def pack(self, x):
        """The rows to compute: x (B, T, C) -> (n, C)."""
        return x.flatten(0, 1).index_select(0, self.rows)

    def unpack(self, x):
        """Puts rows back at their positions: x (n, C) -> (B, T, C), zero where is_kept is false."""
        flat = x.new_zeros(self.is_kept.numel(), x.shape[-1])
        flat.index_copy_(0, self.rows[:self.n_kept], x[:self.n_kept])
        return flat.unflatten(0, self.is_kept.shape)

class SpanEncodingLayer(nn.Module):
    """Eq. 1: W [H_s; H_e], where s and e are the positions of [E_start] and [E_end].
    H (B, T, hidden), row, start, end (M,) -> (M, dim). As in the public code, there is a bias."""
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
        """The hidden layer below the output layer: h (L, hidden) -> (L, hidden)."""
        return self.norm(F.gelu(self.dense(h), approximate=self.gelu))

    def forward(self, h, word_embedding):
        return F.linear(self.transform(h), word_embedding, self.bias)

def init_weights(module, std):
    """Draws normally distributed weights (not truncated, unlike BERT's) and zeroes biases."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=std)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)

def precision_on(config, device):
    """config.precision on devices that are fast at bfloat16, otherwise "float32"."""
    if device.type == "cuda":
        is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        is_fast = torch.cpu.get_capabilities().get("avx512_bf16", False)
    return config.precision if is_fast else "float32"

def low_precision(config, device):
    """A context in which matrix products have the type precision_on(config, device). Weights,
    losses and the scores of memories stay in float32."""
    return torch.autocast(device.type, torch.bfloat16, precision_on(config, device) == "bfloat16")

# ==== Set apart: published weights ================================================================
# Published weights are a BERT folder or a file from the paper's own code (JAX, flax). read_bert and
# read_flax return tensors, and our names for layers and blocks. read_weights applies these names,
# and our names for modules (MODULES). Unusable weights raise ValueError, missing weights KeyError.

# here               in a BERT                             in the paper's code
MODULES = [row.split() for row in """
embeddings.word      embeddings.word_embeddings            embedder.embedders_token_ids
embeddings.position  embeddings.position_embeddings        embedder.embedders_position_ids
embeddings.segment   embeddings.token_type_embeddings      embedder.embedders_segment_ids
embeddings.norm      embeddings.LayerNorm                  embeddings_layer_norm
attention.query      attention.self.query                  attention_block.attention_layer.query
attention.key        attention.self.key                    attention_block.attention_layer.key
attention.value      attention.self.value                  attention_block.attention_layer.value
attention.out        attention.output.dense                attention_block.attention_layer.out
attention_norm       attention.output.LayerNorm            attention_block.layer_norm
up                   intermediate.dense                    mlp_block.mlp
down                 output.dense                          mlp_block.dense
norm                 output.LayerNorm                      mlp_block.layer_norm
mlm.dense            cls.predictions.transform.dense       mlm_layer.dense
mlm.norm             cls.predictions.transform.LayerNorm   mlm_layer.layer_norm
mlm                  cls.predictions                       mlm_layer
mlm                  cls.predictions.decoder               -
query.linear         -                                     query_projector
up                   -                                     update_layer.retrieval_projector
norm                 -                                     update_layer.layer_norm
key.linear           -                                     key_projector
value.linear         -                                     value_projector
coref.linear         -                                     mention_projector
entity_query.linear  -                                     final_query_projector
""".strip().splitlines()]
OUR_MODULE = {theirs: ours for ours, *published in MODULES for theirs in published}
PARAMETER = {"gamma": "weight", "kernel": "weight", "scale": "weight", "embedding": "weight",
             "beta": "bias"}
PLACE = {"initial_encoder.layer_sequence.layers_": "initial.layers.",
         "intermediate_encoder.layer_sequence.layers_": "blocks.0.transformer.layers.",
         "intermediate_memory_attention_layer.": "blocks.0.memory_attention.",
         "final_encoder.layer_sequence.layers_": "blocks.1.transformer.layers.",
         "final_memory_attention_layer.": "blocks.1.memory_attention."}
GELU = {"gelu": "none", "gelu_python": "none", "gelu_new": "tanh", "gelu_fast": "tanh",
        "gelu_pytorch_tanh": "tanh"}                                        # BERT's -> torch's

def beside(path, name):
    """The file `name` in the folder `path`, or up to two folders above `path` (which may be a file,
    RUN/weights/step<N>). None if there is none."""
    path = Path(path).absolute()
    files = (folder / name for folder in (path, *path.parents[:2]))
    return next(filter(Path.is_file, files), None)

def weights_files(path):
    """The files that contain the weights: one or several in a BERT folder, or `path` itself."""
    for pattern in ("model.safetensors", "model-*-of-*.safetensors", "pytorch_model.bin",
                    "pytorch_model-*-of-*.bin"):
        files = sorted(Path(path).glob(pattern))
        if files:
            return files
    return [Path(path)]

def read_weights(path, config):
    """(config, state) of weights: `config` with their sizes, and {our name: tensor}."""
    path = Path(path)
    files = weights_files(path)
    if path.is_dir() and path in files:
        raise ValueError("it contains neither model.safetensors nor pytorch_model.bin")
    if path.suffix in (".safetensors", ".bin"):
        raise ValueError("give the whole folder of a BERT, not one of its files")
    for file in (*files, *path.glob("*.json"), *path.glob("vocab.txt")):
        with open(file, "rb") as stream:
            start = stream.read(20)
        if start == b"version https://git-":
            raise ValueError(f"{file.name} is a Git LFS pointer; run git lfs pull")
        if file.suffix == ".bin" and not start.startswith((b"PK", b"\x80\x02")):
            raise ValueError(f"{file.name} is not a PyTorch file; it begins with {start}")
    config, places, tensors = (read_bert if path.is_dir() else read_flax)(path, config)
    state = {}
    for name, tensor in tensors.items():
        for theirs, ours in places.items():
            name = name.replace(theirs, ours)
        # For example "initial.layers.0." (already our name), "attention.self.query" and "weight".
        place, module, parameter = re.fullmatch(
            r"(.*layers\.\d+\.|.*memory_attention\.)?(?:(.*)\.)?(.*)", name).groups("")
        if module in OUR_MODULE:
            name = f"{place}{OUR_MODULE[module]}.{PARAMETER.get(parameter, parameter)}"
            if not (tensor.is_floating_point() and tensor.isfinite().all()):
                raise ValueError(f"{name} contains a value that is not a finite float")
        state[name] = tensor.float()
    merge_maps(state)
    set_sizes(config, state)
    return config, state

def merge_maps(state):
    """Merges tensors that are stored separately but are a single tensor here."""
    if torch.equal(state["embeddings.word.weight"], state.get("mlm.weight", torch.empty(0))):
        del state["mlm.weight"]                     # the MLM head is tied to the word embeddings
    for query in [name for name in state if ".attention.query." in name]:
        parts = [state.pop(query.replace("query", part)) for part in ("query", "key", "value")]
        state[query.replace("query", "qkv")] = torch.cat(parts)
    # The paper's code has two linear maps for the query of eq. 10; our single map is their product.
    if "entity_query.linear.weight" in state:
        second = state["entity_query.linear.weight"]
        state["entity_query.linear.weight"] = second @ state.pop("coref.linear.weight")
        state["entity_query.linear.bias"] += second @ state.pop("coref.linear.bias")

def set_sizes(config, state):
    depths = [sum(name.startswith(block) and name.endswith(".up.bias") for name in state)
              for block in ("initial.", "blocks.0.transformer.", "blocks.1.transformer.")]
    if config.n_blocks == 2 and depths[1] != depths[2]:
        raise ValueError(f"its two blocks have {depths[1]} and {depths[2]} layers, but only equal "
                         "depths are supported")
    config.n_initial, config.n_upper = depths[0], depths[1] * config.n_blocks
    config.vocab_size, config.hidden = state["embeddings.word.weight"].shape
    config.max_positions = len(state["embeddings.position.weight"])
    config.intermediate = len(state["initial.layers.0.up.bias"])
    if "blocks.0.memory_attention.up.weight" in state:              # in the paper's code d_C = d_V
        config.key_dim = len(state["blocks.0.memory_attention.query.linear.bias"])
        config.value_dim = config.coref_dim = state["blocks.0.memory_attention.up.weight"].shape[1]
    if config.hidden % config.n_heads:
        raise ValueError(f"hidden size {config.hidden} is not a multiple of {config.n_heads} heads")

def read_bert(folder, config):
    """(config, places, tensors) of a BERT. places: {BERT's name of a layer: our name}. The last
    n_upper layers go above the first memory layer (§4.1: 8 of 12)."""
    bert = json.loads((folder / "config.json").read_bytes())        # UTF-8 in any locale
    for name, known in (("model_type", ["bert"]), ("position_embedding_type", ["absolute"]),
                        ("layer_norm_eps", [1e-12]), ("hidden_act", list(GELU))):
        if bert.setdefault(name, known[0]) not in known:
            raise ValueError(f"its {name} is {bert[name]}, not {' or '.join(map(str, known))}")
    config = replace(config, n_blocks=1, gelu=GELU[bert["hidden_act"]],
                     n_heads=int(bert["num_attention_heads"]))
    tensors = {}
    for file in weights_files(folder):
        tensors |= load_tensors(file)
    # Wrappers add "module." or "_orig_mod." to names, and models with heads add "bert.".
    tensors = {re.sub(r"\b(_orig_mod|\w*module)\.", "", name).removeprefix("bert."): tensor
               for name, tensor in tensors.items() if not name.endswith("position_ids")}
    n_layers = sum(name.endswith(".intermediate.dense.bias") for name in tensors)
    n_initial = n_layers - config.n_upper
    if n_initial < 1:
        raise ValueError(f"it has only {n_layers} layers; --n-upper {config.n_upper} needs at "
                         f"least {config.n_upper + 1}")
    ours = [f"initial.layers.{i}." for i in range(n_initial)]
    ours += [f"blocks.0.transformer.layers.{i}." for i in range(config.n_upper)]
    return config, {f"encoder.layer.{i}.": place for i, place in enumerate(ours)}, tensors

def load_tensors(file):
    """{name: tensor} of a .safetensors file or a PyTorch file. Runs no code from the file."""
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file         # optional; if missing, ImportError names it
        return load_file(file)
    try:
        with torch.sparse.check_sparse_tensor_invariants():     # a forged index would crash Python
            tensors = torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError as error:                    # its message is long; keep the reason
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f"a Python object, {found[1]}" if found else "something that is not a tensor"
        raise ValueError(f"{file.name} contains {what}; only tensors are read") from error
    return {name: tensor.to_dense() for name, tensor in tensors.get("state_dict", tensors).items()
            if isinstance(tensor, torch.Tensor)}

def check_tokenizer(folder, tokenizer):
    """Raises ValueError if the tokenizer files in a BERT's folder describe a tokenisation that
    differs from that of `tokenizer`, which data.load_tokenizer made from the BERT's vocab.txt."""
    file, normalizer = folder / "tokenizer_config.json", tokenizer.normalizer
    says = json.loads(file.read_bytes()) if file.is_file() else {}
    ours = {"do_lower_case": normalizer.lowercase,
            "strip_accents": normalizer.lowercase and normalizer.strip_accents is None,
            "tokenize_chinese_chars": True, "do_basic_tokenize": True,
            "word_tokenizer_type": "basic"}
    for name, value in ours.items():
        if says.get(name) not in (None, value):
            raise ValueError(f"{file.name} says that {name} is {says[name]}, but vocab.txt needs "
                             f"{value}")
    file = folder / "tokenizer.json"
    if not file.is_file():
        return
    theirs = type(tokenizer).from_file(str(file))
    theirs.no_padding()
    words = [word for word in tokenizer.get_vocab() if word.isalpha()]
    for word in words[::len(words) // 1000 + 1]:
        # The word unchanged, in capitals, with an accent, next to other characters, and doubled.
        for text in (word, word.upper(), f"{word[0]}\u0301{word[1:]}", f"{word}.\u4e2d{word}",
                     2 * word):
            expected, found = (t.encode(text, add_special_tokens=False)
                               for t in (theirs, tokenizer))
            if expected.ids != found.ids:
                raise ValueError(f"{file.name} tokenises {text} as {expected.tokens}, but "
                                 f"vocab.txt gives {found.tokens}")

def read_flax(file, config):
    """(config, places, tensors) of a BATCH-TOME or TOME from a MessagePack file: nested maps whose
    leaves are [shape, type, bytes], packed once more. A file weights/step<N> contains no MLM head;
    checkpoint_<N> contains heads, and the optimizer's state, which is ignored."""
    import msgpack                                      # optional; if missing, ImportError names it
    tree = msgpack.unpackb(file.read_bytes())
    tree = tree.get("params", {"encoder": tree})
    tree |= tree.pop("encoder")
    config = replace(config, n_blocks=2 if "intermediate_encoder" in tree else 1, gelu="tanh")
    # A TOME's file may also contain layers of its BATCH-TOME: for keys, values and (in TOME-2)
    # memory attention. Their names are not translated, so these layers are not used.
    if config.n_blocks == 1:            # PLACE expects the first block under these names
        tree["intermediate_encoder"] = tree.pop("final_encoder")
        tree["intermediate_memory_attention_layer"] = tree.pop("memory_attention_layer")
    if "final_query_projector" not in tree:         # a BATCH-TOME
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
    return config, PLACE, tensors
