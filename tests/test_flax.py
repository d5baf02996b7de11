"""Checkpoints written by the paper's own (flax) code: read, compared with what that code computed
with the same weights, written back, damaged, and used in --init and --start.

    python -m pytest tests/test_flax.py -s          # -s: prints the largest difference of each file

The files are in ../shared/golden/flax (its README says how they were made). Without them, the tests
that compare with them are skipped.
"""
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import train
import data
from encoder import Config
from memory import BatchMemory, attention_weights
from test_golden import batch_of, memory_of, targets_of
from tome import TOME, BatchTOME, read_published

msgpack = pytest.importorskip("msgpack", reason="pip install msgpack")

SHARED = Path(os.environ.get("TOME_DATA", Path(__file__).parents[2] / "shared" / "data")).parent
FLAX = SHARED / "golden" / "flax"
needs_files = pytest.mark.skipif(not FLAX.is_dir(), reason=f"no checkpoints in {FLAX}")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCAB = ["[PAD]", "[unused0]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *("##" + c for c in LETTERS)]
VOCAB += [f"[unused{i}]" for i in range(2, 2 + 97 - len(VOCAB))]

# ---- A second implementation of their file format and names

def pack(arrays):
    """The MessagePack of {path: array}, where "/" separates the parts of a path. A flax leaf is extension 1,
    [shape, type, row-major bytes]."""
    tree = {}
    for path, array in arrays.items():
        *groups, last = path.split("/")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[last] = msgpack.ExtType(1, msgpack.packb([list(array.shape), array.dtype.name, array.tobytes()]))
    return msgpack.packb(tree)

def unpack(content):
    """{path: array} of a MessagePack."""
    arrays = {}

    def walk(path, node):
        if isinstance(node, dict):
            for key, child in node.items():
                walk(f"{path}/{key}" if path else key, child)
        else:
            shape, dtype, numbers = msgpack.unpackb(node.data)
            arrays[path] = np.frombuffer(numbers, dtype).reshape(shape)

    walk("", msgpack.unpackb(content))
    return arrays

def exported(state, config):
    """{path: array} of the encoder's tree, as their code reads it, from the state of a BatchTOME. z
    of eq. 10 is one map here and two there: ours, then the identity."""
    arrays, state = {}, {name: tensor.numpy() for name, tensor in state.items()}
    dims = (config.n_heads, config.hidden // config.n_heads)

    def linear(ours, theirs, n_in=None, n_out=None):
        W, b = state[f"{ours}.weight"], state[f"{ours}.bias"]
        n_in, n_out = n_in or (W.shape[1],), n_out or (W.shape[0],)
        arrays[f"{theirs}/kernel"] = W.T.reshape(*n_in, *n_out)
        arrays[f"{theirs}/bias"] = b.reshape(n_out)

    def norm(ours, theirs):
        arrays[f"{theirs}/scale"] = state[f"{ours}.weight"]
        arrays[f"{theirs}/bias"] = state[f"{ours}.bias"]

    tome = "tome."
    for ours, theirs in (("word", "token"), ("position", "position"), ("segment", "segment")):
        arrays[f"embedder/embedders_{theirs}_ids/embedding"] = state[f"{tome}embeddings.{ours}.weight"]
    norm(f"{tome}embeddings.norm", "embeddings_layer_norm")
    blocks = {"initial": "initial_encoder", "blocks.0.transformer": "final_encoder"}
    memory = ["memory_attention_layer"]
    if config.n_blocks == 2:
        blocks = {"initial": "initial_encoder", "blocks.0.transformer": "intermediate_encoder",
                  "blocks.1.transformer": "final_encoder"}
        memory = ["intermediate_memory_attention_layer", "final_memory_attention_layer"]
    for ours, theirs in blocks.items():
        n = sum(name.startswith(f"{tome}{ours}.layers.") and name.endswith(".up.weight") for name in state)
        for i in range(n):
            a, b = f"{tome}{ours}.layers.{i}", f"{theirs}/layer_sequence/layers_{i}"
            for j, part in enumerate(("query", "key", "value")):
                rows = slice(j * config.hidden, (j + 1) * config.hidden)
                for end in ("weight", "bias"):
                    state[f"{part}.{end}"] = state[f"{a}.attention.qkv.{end}"][rows]
                linear(part, f"{b}/attention_block/attention_layer/{part}", n_out=dims)
            linear(f"{a}.attention.out", f"{b}/attention_block/attention_layer/out", n_in=dims)
            norm(f"{a}.attention_norm", f"{b}/attention_block/layer_norm")
            linear(f"{a}.up", f"{b}/mlp_block/mlp")
            linear(f"{a}.down", f"{b}/mlp_block/dense")
            norm(f"{a}.norm", f"{b}/mlp_block/layer_norm")
    for i, theirs in enumerate(memory):
        ours = f"{tome}blocks.{i}.memory_attention"
        linear(f"{ours}.query.linear", f"{theirs}/query_projector")
        linear(f"{ours}.up", f"{theirs}/update_layer/retrieval_projector")
        norm(f"{ours}.norm", f"{theirs}/update_layer/layer_norm")
    if "key.linear.weight" in state:
        linear("key.linear", "memory_extraction_layer/key_projector")
        linear("value.linear", "memory_extraction_layer/value_projector")
        linear("coref.linear", "mention_projector")
    else:
        more = config.coref_dim - config.key_dim
        W, b = (state[f"{tome}entity_query.linear.{end}"] for end in ("weight", "bias"))
        state["first.weight"] = np.pad(W, ((0, more), (0, 0)))
        state["first.bias"] = np.pad(b, (0, more))
        linear("first", "mention_projector")
        arrays["final_query_projector/kernel"] = np.eye(config.coref_dim, config.key_dim, dtype=np.float32)
        arrays["final_query_projector/bias"] = np.zeros(config.key_dim, np.float32)
    return arrays

def random_batch_tome(n_upper=2):
    """(config, state) of a small BatchTOME, without what the encoder's tree lacks."""
    torch.manual_seed(0)
    config = Config(vocab_size=97, hidden=32, n_heads=4, intermediate=64, max_positions=24, k=8,
                    n_initial=2, n_upper=n_upper, key_dim=8, value_dim=16, coref_dim=16, dropout=0.0, init_std=0.2)
    state = BatchTOME(TOME(config)).state_dict()
    return config, {name: tensor for name, tensor in state.items()
                    if not name.startswith(("tome.mlm", "tome.claim", "tome.entity_query"))}

def random_tome(n_blocks, n_upper=4):
    config, _ = random_batch_tome(n_upper)
    config.n_blocks = n_blocks
    state = TOME(config).state_dict()
    return config, {f"tome.{name}": tensor for name, tensor in state.items() if not name.startswith(("mlm", "claim"))}

def write_flax(path, config, state, more={}):
    """Writes the encoder's tree and more arrays; returns the path as a word of a command."""
    path.write_bytes(pack(exported(state, config) | more))
    return str(path)

# ---- Outputs

LARGEST = {}

def close(name, ours, theirs):
    assert ours.shape == theirs.shape
    difference = (ours - theirs).abs()
    LARGEST[name] = max(LARGEST.get(name, 0.0), float(difference.max()))
    assert (difference <= 1e-5 * theirs.abs().clamp(min=1)).all(), (name, difference.max())

@pytest.fixture(scope="module", autouse=True)
def print_the_largest_differences():
    yield
    for name, difference in LARGEST.items():
        print(f"\n{name}: largest difference {difference:.1e}", end="")

def arrays_of(name):
    with np.load(FLAX / f"{name}.npz", allow_pickle=False) as file:
        return {key: torch.from_numpy(file[key]) for key in file.files if key != "config_json"}

def model_of(file, arrays):
    """(BatchTOME, config, unused, missing): the weights of the file, and the MLM head of the
    arrays, since no weights file has one. missing: parameters that are in neither."""
    config, state, _, unused = read_published(FLAX / file, Config(k=8, k_answer=16, dropout=0.0))
    model = BatchTOME(TOME(config)).eval()
    head = "param/mlm_layer/"
    state = {"tome.mlm.dense.weight": arrays[head + "dense/kernel"].T,
             "tome.mlm.dense.bias": arrays[head + "dense/bias"],
             "tome.mlm.norm.weight": arrays[head + "layer_norm/scale"],
             "tome.mlm.norm.bias": arrays[head + "layer_norm/bias"],
             "tome.mlm.bias": arrays[head + "bias"]} | state
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    return model, config, unused, missing

class AnyPassage(BatchMemory):
    """Their `allow`: a mention may attend to its own passage."""

    def attend(self, query, passage, k=None, k_shard=None):
        return super().attend(query, torch.full_like(passage, -1))

@needs_files
@pytest.mark.parametrize("file", ["batch_tome/weights/step3", "batch_tome/checkpoint_3"])
@torch.no_grad()
def test_their_batch_tome_gives_their_hidden_states_keys_values_and_attention(file, monkeypatch):
    z = arrays_of("batch_tome")
    model, config, unused, missing = model_of(file, z)
    assert not unused and (config.n_blocks, config.n_initial, config.n_upper) == (1, 2, 2)
    assert {name.split(".")[1] for name in missing} == {"claim", "entity_query"}
    batch, targets = batch_of(z), z["in/mention_target_weights"] > 0
    mask, linked, real = batch.attention_mask, batch.entity > 0, z["in/mention_mask"] > 0
    spans = batch.row[linked], batch.start[linked], batch.end[linked]
    first, _ = model.tome(batch.tokens, mask)
    close("BATCH-TOME", first[mask], z["allow/final_encoding_first"][mask])
    keys, values = model.encode_mentions(batch.tokens, mask, *spans)
    close("BATCH-TOME", keys, z["allow/memory_keys"][targets])
    close("BATCH-TOME", values, z["allow/memory_values"][targets])
    batch.is_target[:] = False          # their batch memory also contains masked mentions
    for case, memory in (("allow", AnyPassage), ("disallow_fixed", BatchMemory)):
        monkeypatch.setattr("tome.BatchMemory", memory)
        _, _, H, (found,) = model(replace(batch, is_target=torch.zeros_like(batch.is_target)))
        close("BATCH-TOME", found.weights, z[f"{case}/memory_attention_weights"][real][:, targets])
        assert torch.equal(found.entity, z[f"{case}/top_entity_ids"][real][:, targets].long())
        close("BATCH-TOME", H[mask], z[f"{case}/encoding"][mask])
        logits = model.tome.mlm_logits(H, targets_of(z)[0])
        close("BATCH-TOME", logits, z[f"{case}/mlm_logits"][z["in/mlm_target_weights"] > 0])
        close("BATCH-TOME", model.coref(H, *spans), z[f"{case}/target_mention_encodings"][targets])

@needs_files
@pytest.mark.parametrize("blocks", [1, 2])
@torch.no_grad()
def test_their_tome_gives_their_hidden_states_and_retrieval(blocks):
    name = f"tome{blocks}"
    z = arrays_of(name)
    model, config, unused, missing = model_of(f"{name}/weights/step3", z)
    left_over = ["memory_attention_layer", "memory_extraction_layer"] if blocks == 2 else []
    assert unused == left_over and not any("entity_query" in name for name in missing)
    assert (config.n_blocks, config.n_initial, config.n_upper) == (blocks, 2, 2 * blocks)
    tome, batch, memory = model.tome, batch_of(z), memory_of(z)
    mask, linked, real = batch.attention_mask, batch.entity > 0, z["in/mention_mask"] > 0
    targets = z["in/mention_target_weights"] > 0
    batch.passage = torch.full_like(batch.passage, -1)              # allow: no row has this passage
    asked = []
    for block in tome.blocks:
        block.memory_attention.query.register_forward_hook(lambda layer, inputs, query: asked.append(query))
    H, found = tome(batch.tokens, mask, batch, memory)
    for prefix, layer, query in zip(("", "second_"), found, asked, strict=False):
        assert torch.equal(layer.ids, z[f"allow/{prefix}top_memory_ids"][real].long())
        assert torch.equal(layer.entity, z[f"allow/{prefix}top_entity_ids"][real].long())
        close(name, layer.weights, z[f"allow/{prefix}memory_attention_weights"][real])
        close(name, query, z[f"allow/{prefix}memory_attention_mention_encodings"][real])
    close(name, H[mask], z["allow/encoding"][mask])
    logits = tome.mlm_logits(H, targets_of(z)[0])
    close(name, logits, z["allow/mlm_logits"][z["in/mlm_target_weights"] > 0])
    query = tome.entity_query(H, batch.row[linked], batch.start[linked], batch.end[linked])
    answer = memory.retrieve(query, batch.passage[linked], 16, 16)
    assert torch.equal(answer.ids, z["allow/final_top_memory_ids"][targets].long())
    close(name, attention_weights(answer.scores), z["allow/final_memory_attention_weights"][targets])

# ---- Written and read again

@needs_files
@pytest.mark.parametrize("name", ["batch_tome", "tome1", "tome2"])
def test_their_weights_exported_and_read_again_are_bit_identical(name, tmp_path):
    config, state, _, unused = read_published(FLAX / name / "weights/step3", Config())
    original = unpack((FLAX / name / "weights/step3").read_bytes())
    written = exported(state, config)
    folded = ("mention_projector", "final_query_projector") if "tome" == name[:4] else ()
    same = {path for path in original if not path.startswith((*unused, *folded))}
    assert same <= written.keys() <= original.keys()
    for path in same:
        assert written[path].shape == original[path].shape
        assert written[path].tobytes() == original[path].tobytes(), path
    (tmp_path / "back").write_bytes(pack(written))
    again, state_again, _, nothing = read_published(tmp_path / "back", config)
    assert again == config and nothing == [] and state_again.keys() == state.keys()
    assert all(torch.equal(state[key], state_again[key]) for key in state)

@pytest.mark.parametrize("blocks", [0, 1, 2], ids=["BATCH-TOME", "TOME-1", "TOME-2"])
def test_our_weights_written_in_their_format_are_read_bit_identically(blocks, tmp_path):
    config, state = random_tome(blocks) if blocks else random_batch_tome()
    write_flax(tmp_path / "step1", config, state)
    read, again, _, unused = read_published(tmp_path / "step1", Config(k=8, dropout=0.0, init_std=0.2))
    assert read == config and not unused and again.keys() == state.keys()
    assert all(torch.equal(state[key], again[key]) for key in state)

def test_a_training_checkpoint_with_heads_and_optimizer_state_is_read(tmp_path):
    config, state = random_batch_tome()
    arrays = {f"params/encoder/{path}": array for path, array in exported(state, config).items()}
    rng = np.random.default_rng(0)
    head = {"dense/kernel": (32, 32), "dense/bias": (32,), "layer_norm/scale": (32,), "layer_norm/bias": (32,),
            "bias": (97,)}
    for path, shape in head.items():
        arrays[f"params/mlm_layer/{path}"] = rng.normal(size=shape).astype(np.float32)
    arrays["params/linear_classifier/bias"] = np.zeros(3, np.float32)
    arrays["opt_state/0/count"] = arrays["step"] = np.array(4, np.int32)
    (tmp_path / "checkpoint_3").write_bytes(pack(arrays))
    _, again, _, unused = read_published(tmp_path / "checkpoint_3", config)
    assert unused == ["linear_classifier"]
    assert np.array_equal(again["tome.mlm.dense.weight"].numpy(), arrays["params/mlm_layer/dense/kernel"].T)

@pytest.mark.parametrize("depths", [(1, 2), (2, 1), (2, 0), (1, 3)])
def test_a_tome_2_with_blocks_of_different_depths_is_refused_with_both_depths(depths, tmp_path):
    """The public code's own test has blocks of 1 and 2 layers."""
    config, state = random_tome(2, 2 * max(depths))
    cut = tuple(f"tome.blocks.{block}.transformer.layers.{i}." for block, depth in enumerate(depths)
                for i in range(depth, max(depths)))
    write_flax(tmp_path / "tome", config, {name: x for name, x in state.items() if not name.startswith(cut)})
    with pytest.raises(data.UserError, match="two blocks have {} and {} layers".format(*depths)):
        read_published(tmp_path / "tome", Config())

def test_every_unused_published_tensor_is_named(tmp_path):
    config, state = random_batch_tome()
    one = np.ones(3, np.float32)
    more = {"final_encoder/layer_sequence/layers_0/mlp_block/gate/kernel": np.ones((3, 3), np.float32),
            "memory_attention_layer/temperature": one, "embeddings_layer_norm/other": one,
            "mention_projector/extra/bias": one, "new_head/bias": one}
    write_flax(tmp_path / "step1", config, state, more)
    _, again, _, unused = read_published(tmp_path / "step1", config)
    assert again.keys() == state.keys()
    assert unused == ["blocks.0.memory_attention.temperature", "blocks.0.transformer.layers.0.mlp_block.gate.kernel",
                      "embeddings.norm.other", "mention_projector", "new_head"]

# ---- Errors

def changed(**values):
    """A BATCH-TOME's file with these arrays replaced; None removes one."""
    config, state = random_batch_tome()
    arrays = exported(state, config) | {name.replace("__", "/"): x for name, x in values.items()}
    return pack({path: array for path, array in arrays.items() if array is not None})

def nested(depth):
    return b"\x81\xa1x" * depth + b"\x80"

TOKENS = "embedder__embedders_token_ids__embedding"
BIAS = "mention_projector__bias"
DAMAGES = {
    "empty": b"", "text": b"hello", "a list": msgpack.packb([1]), "no arrays": b"\x81\xa1a\x01",
    "a pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:68\nsize 9\n",
    "a foreign tree": pack({"dense/kernel": np.ones((2, 2), np.float32)}),
    "too deep": nested(100_000), "deep enough for Python's own limit": nested(1020),
    "a bomb of lists": b"\x91" * 100_000, "a map said to be huge": b"\xdf\xff\xff\xff\xff",
    "a cut extension": b"\x81\xa1x\xc9\x7f\xff\xff\xff\x01ab",
    "no token embeddings": changed(**{TOKENS: None}),
    "no bias": changed(embeddings_layer_norm__bias=None),
    "no bias of a kernel": changed(memory_extraction_layer__value_projector__bias=None),
    "a final retrieval of nothing": changed(
        mention_projector__bias=None, mention_projector__kernel=None,
        final_query_projector__bias=np.zeros(8, np.float32),
        final_query_projector__kernel=np.zeros((16, 8), np.float32)),
    "a wrong shape": changed(**{BIAS: np.zeros(3, np.float32)}),
    "embeddings of one dimension": changed(**{TOKENS: np.zeros(97, np.float32)}),
    "objects": pack({"x": np.zeros(1, np.float32)}).replace(b"float32", b"object\x20"),
}

@pytest.mark.parametrize("content", DAMAGES.values(), ids=DAMAGES)
def test_an_unusable_file_is_refused_in_one_sentence(content, tmp_path):
    path = tmp_path / "step1"
    path.write_bytes(content)
    with pytest.raises(data.UserError) as error:
        read_published(path, Config())
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    assert len(str(error.value)) < 300 + len(str(path))

def test_a_truncated_file_is_refused_in_one_sentence(tmp_path):
    whole, path = changed(), tmp_path / "step1"
    for length in [*range(0, 60), *np.linspace(60, len(whole) - 1, 40).astype(int)]:
        path.write_bytes(whole[:length])
        with pytest.raises(data.UserError):
            read_published(path, Config())
    path.write_bytes(whole)
    read_published(path, Config())

def test_a_file_with_a_changed_byte_is_read_or_refused_in_one_sentence(tmp_path):
    whole, path, rng = changed(), tmp_path / "step1", np.random.default_rng(0)
    for at in [*range(80), *rng.integers(0, len(whole), 150)]:
        damaged = bytearray(whole)
        damaged[at] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            read_published(path, Config())
        except data.UserError as error:
            assert "\n" not in str(error)

def test_if_msgpack_is_missing_one_sentence_names_it(tmp_path, monkeypatch):
    (tmp_path / "step1").write_bytes(changed())
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(data.UserError, match="msgpack"):
        read_published(tmp_path / "step1", Config())

# ---- --init and --start

def write_corpus(path):
    rng, lines = np.random.default_rng(0), []
    for i in range(24):
        text = "".join(rng.choice(list(LETTERS), 4)) + " " + rng.choice(list("pqr")) + "x"
        lines.append({"title": f"a{i}", "text": text, "split": "train" if i < 20 else "held_out",
                      "mentions": [{"start": 5, "end": 7, "entity": text[5:]}]})
    data.write_lines(path, lines)
    return str(path)

SMALL = ("--passage-length 16 --max-length 20 --eval-mentions 4 --k-answer 8 --cluster 8 "
         "--save-every 1 --log-every 1").split()

def command_with_init(tmp_path, stage, n_upper=2):
    """(a command that starts from a BATCH-TOME's file beside its vocab.txt, the state in that file)."""
    (tmp_path / "init").mkdir()
    (tmp_path / "init" / "vocab.txt").write_text("\n".join(VOCAB) + "\n")
    config, state = random_batch_tome(n_upper)
    init, corpus = write_flax(tmp_path / "init" / "btome", config, state), write_corpus(tmp_path / "corpus.jsonl")
    return ["--stage", stage, "--preset", "mini", "--init", init, "--corpus", corpus, "--out", str(tmp_path / "run"),
            *SMALL], state

def run(*words):
    assert train.main([*words, "--device", "cpu"]) == 0

@pytest.mark.parametrize("blocks", [1, 2])
def test_published_files_give_a_memory_and_a_fine_tuned_model_without_pretraining(tmp_path, blocks, capsys):
    command, state = command_with_init(tmp_path, "memory", n_upper=4)
    config, tome = random_tome(blocks)
    left_over = {"memory_extraction_layer/key_projector/bias": np.zeros(8, np.float32)}
    start, out = write_flax(tmp_path / "tome", config, tome, left_over), tmp_path / "run"
    run(*command)
    said = capsys.readouterr().out
    assert "has no weights for mlm, entity_query, claim; these are newly initialised" in said
    assert "loaded, without training" in said
    saved = train.read_checkpoint(out / "batch-tome.pt")
    assert saved["plan"].steps == 0 and saved["about"]["finished"]
    assert all(torch.equal(saved["model"][name], state[name]) for name in state)
    assert data.read_json(out / "memory" / "meta.json")["n"] == 24 and not (out / "log.jsonl").exists()

    run("--stage", "tome", "--start", start, "--steps", "0", "--out", str(out), "--blocks", str(blocks), "--quiet")
    said = capsys.readouterr().out
    assert "has no weights for mlm, claim; these are newly initialised" in said
    assert "not used: memory_extraction_layer" in said
    saved = train.read_checkpoint(out / f"tome-{blocks}.pt")
    assert saved["plan"].steps == 0
    assert all(torch.equal(saved["model"][name.removeprefix("tome.")], tensor) for name, tensor in tome.items())
    shutil.rmtree(tmp_path / "init")                            # no longer needed
    (tmp_path / "tome").unlink()
    data.write_lines(tmp_path / "qa.jsonl", [
        {"question": f"{c}bcd qx", "answers": ["px"], "mentions": [{"start": 5, "end": 7, "entity": "qx"}]}
        for c in LETTERS])
    run("--stage", "finetune", "--task", "qa", "--examples", str(tmp_path / "qa.jsonl"), "--out", str(out),
        "--blocks", str(blocks), "--steps", "2", "--batch", "4", "--quiet")
    saved = train.read_checkpoint(out / f"qa-{blocks}.pt")
    assert saved["plan"].steps == 2 and saved["about"]["finished"]
    capsys.readouterr()
    run("--stage", "memory", "--out", str(out))
    assert "loaded, without training" not in capsys.readouterr().out    # everything is there already

def test_a_published_tome_is_trained_further_for_the_given_number_of_steps(tmp_path):
    command, _ = command_with_init(tmp_path, "tome", n_upper=4)
    start = write_flax(tmp_path / "tome", *random_tome(1))
    run(*command, "--start", start, "--steps", "2", "--batch", "8", "--quiet")
    saved = train.read_checkpoint(tmp_path / "run" / "tome-1.pt")
    assert saved["plan"].steps == 2 and saved["about"]["finished"]

def test_a_published_file_determines_only_the_settings_that_its_shapes_tell(tmp_path):
    """Their k_top_device, for example, describes a device, and dropout a training."""
    command, _ = command_with_init(tmp_path, "memory")
    (tmp_path / "init" / "config.json").write_text('{"model_config": {"encoder_config": {"k_top_device": 2}}}')
    config = train.settle(train.parse_arguments([*command, "--dropout", "0.3"]))[0].config
    assert (config.k, config.dropout, config.key_dim) == (256, 0.3, 8)
    assert train.settle(train.parse_arguments([*command, "--k", "5"]))[0].config.k == 5
    with pytest.raises(data.UserError, match="--key-dim 16: --init has 8; omit the flag"):
        train.settle(train.parse_arguments([*command, "--key-dim", "16"]))

WRONG_INITS = {
    "a TOME": (lambda file: write_flax(file, *random_tome(1)), "give a TOME to --stage tome --start"),
    "no vocab.txt": (lambda file: (file.parent / "vocab.txt").unlink(), "put the vocab.txt"),
    "another vocab.txt": (lambda file: (file.parent / "vocab.txt").write_text("\n".join(VOCAB[:-1])), "has 96 entries"),
    "a cut file": (lambda file: file.write_bytes(file.read_bytes()[:1000]), "cannot be read"),
    "a pickle": (lambda file: file.write_bytes(b"\x80\x04."), "cannot be read"),
    "nothing there": (Path.unlink, "cannot be read"),
}

@pytest.mark.parametrize("damage, message", WRONG_INITS.values(), ids=WRONG_INITS)
def test_an_unusable_init_is_refused_before_anything_is_written(tmp_path, damage, message, capsys):
    command, _ = command_with_init(tmp_path, "memory")
    damage(tmp_path / "init" / "btome")
    assert train.main(command) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error
    assert not (tmp_path / "run").exists()

@pytest.mark.parametrize("wrong, message", [("a BATCH-TOME", "give it to --init"),
                                            ("a TOME-2", "contains no TOME with the run's dimensions"),
                                            ("scratch", "leave --start out")])
def test_a_start_file_of_the_wrong_kind_is_refused_in_one_sentence(tmp_path, wrong, message, capsys):
    command, _ = command_with_init(tmp_path, "tome", n_upper=4)
    start = write_flax(tmp_path / "start", *(random_tome(2) if wrong == "a TOME-2" else random_batch_tome(4)))
    assert train.main([*command, "--start", "scratch" if wrong == "scratch" else start]) == 1
    assert message in capsys.readouterr().err.splitlines()[-1]
