"""Checks that checkpoints in the format of the paper's own (flax) code give that code's outputs and work in
--init and --start, and that damaged files are refused.

    python -m pytest tests/test_flax.py -s          # -s prints the largest difference for each model

../shared/golden/flax contains checkpoints written by that code (its README says how). Without them, the tests
that read them are skipped. The other tests write their own files, from that code's weights in tests/golden.
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
from test_golden import CONFIG, golden, linear, mlm_head, tome_state
from test_golden import batch_of, memory_of, same_forward, targets_of
from test_golden import print_the_largest_differences  # noqa: F401 (a fixture)
from tome import TOME, BatchTOME, read_published

msgpack = pytest.importorskip("msgpack", reason="pip install msgpack")

SHARED = Path(os.environ.get("TOME_DATA", Path(__file__).parents[2] / "shared" / "data")).parent
FLAX = SHARED / "golden" / "flax"
needs_files = pytest.mark.skipif(not FLAX.is_dir(), reason=f"no checkpoints in {FLAX}")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCAB = ["[PAD]", "[unused0]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *("##" + c for c in LETTERS)]
VOCAB += [f"[unused{i}]" for i in range(2, 2 + 97 - len(VOCAB))]

# ---- Writing files in the public code's format

def pack(arrays):
    """The MessagePack bytes of {path: array}, where "/" separates the parts of a path. A flax leaf is extension
    type 1 and contains [shape, type, row-major bytes]."""
    tree = {}
    for path, array in arrays.items():
        *groups, last = path.split("/")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[last] = msgpack.ExtType(1, msgpack.packb([list(array.shape), array.dtype.name, array.tobytes()]))
    return msgpack.packb(tree)

def published(name, **depths):
    """{path: array} of an encoder in tests/golden. depths: for each of these blocks, the number of copies
    of its first layer that replace its layers."""
    start = "param/encoder/"
    arrays = {path.removeprefix(start): x.numpy()
              for path, x in golden(name).items() if path.startswith(start)}
    for block, depth in depths.items():
        layers = {path: arrays.pop(path) for path in [*arrays] if path.startswith(block)}
        for path, x in layers.items():
            if "layers_0" in path:
                arrays |= {path.replace("layers_0", f"layers_{i}"): x for i in range(depth)}
    return arrays

def write_flax(path, arrays):
    """Writes a file and returns its path as a command-line argument."""
    path.write_bytes(pack(arrays))
    return str(path)

def translated(arrays):
    """{our name: tensor} of a BatchTOME: these arrays, translated and reshaped by functions of test_golden.py."""
    z = {path: x for path, x in golden("tome1").items() if "mlm_layer" in path}     # tome_state needs an MLM head
    z |= {f"param/encoder/{path}": torch.from_numpy(x) for path, x in arrays.items()}
    blocks = 2 if any(path.startswith("intermediate_encoder") for path in arrays) else 1
    state = {f"tome.{name}": x for name, x in tome_state(z, blocks).items() if not name.startswith("mlm")}
    if "final_query_projector/bias" in arrays:              # two successive maps, which are one here
        first = linear(z, "param/encoder/mention_projector", "")
        second = linear(z, "param/encoder/final_query_projector", "")
        state["tome.entity_query.linear.weight"] = second[".weight"] @ first[".weight"]
        state["tome.entity_query.linear.bias"] = second[".weight"] @ first[".bias"] + second[".bias"]
        return state
    state |= linear(z, "param/encoder/memory_extraction_layer/key_projector", "key.linear")
    state |= linear(z, "param/encoder/memory_extraction_layer/value_projector", "value.linear")
    return state | linear(z, "param/encoder/mention_projector", "coref.linear")

BATCH_TOME, TOME_1, TOME_2 = published("batch_tome1"), published("tome1"), published("tome2", final_encoder=1)

# ---- Outputs

def arrays_of(name):
    with np.load(FLAX / f"{name}.npz", allow_pickle=False) as file:
        return {key: torch.from_numpy(file[key]) for key in file.files if key != "config_json"}

def model_of(file, arrays):
    """(BatchTOME, config, unused, missing), with the weights of the file. The MLM head comes from the arrays
    if the file, like weights/step<N>, has none. missing: the parameters that neither contains."""
    config, state, _, unused = read_published(FLAX / file, Config(k=8, k_answer=16, dropout=0.0))
    model = BatchTOME(TOME(config)).eval()
    state = mlm_head(arrays, "param/mlm_layer/", "tome.mlm.") | state
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    return model, config, unused, missing

class AnyPassage(BatchMemory):
    """The public code's mode `allow`: a mention may attend to its own passage."""

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
    same_forward("BATCH-TOME", first[mask], z["allow/final_encoding_first"][mask])
    keys, values = model.encode_mentions(batch.tokens, mask, *spans)
    same_forward("BATCH-TOME", keys, z["allow/memory_keys"][targets])
    same_forward("BATCH-TOME", values, z["allow/memory_values"][targets])
    batch.is_target[:] = False          # the public code's batch memory also contains masked mentions
    for case, memory in (("allow", AnyPassage), ("disallow_fixed", BatchMemory)):
        monkeypatch.setattr("tome.BatchMemory", memory)
        _, _, H, (found,) = model(replace(batch, is_target=torch.zeros_like(batch.is_target)))
        same_forward("BATCH-TOME", found.weights, z[f"{case}/memory_attention_weights"][real][:, targets])
        assert torch.equal(found.entity, z[f"{case}/top_entity_ids"][real][:, targets].long())
        same_forward("BATCH-TOME", H[mask], z[f"{case}/encoding"][mask])
        logits = model.tome.mlm_logits(H, targets_of(z)[0])
        same_forward("BATCH-TOME", logits, z[f"{case}/mlm_logits"][z["in/mlm_target_weights"] > 0])
        same_forward("BATCH-TOME", model.coref(H, *spans), z[f"{case}/target_mention_encodings"][targets])

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
    batch.passage = torch.full_like(batch.passage, -1)              # allow: no row comes from passage -1
    asked = []
    for block in tome.blocks:
        block.memory_attention.query.register_forward_hook(lambda layer, inputs, query: asked.append(query))
    H, found = tome(batch.tokens, mask, batch, memory)
    for prefix, layer, query in zip(("", "second_"), found, asked, strict=False):
        assert torch.equal(layer.ids, z[f"allow/{prefix}top_memory_ids"][real].long())
        assert torch.equal(layer.entity, z[f"allow/{prefix}top_entity_ids"][real].long())
        same_forward(name, layer.weights, z[f"allow/{prefix}memory_attention_weights"][real])
        same_forward(name, query, z[f"allow/{prefix}memory_attention_mention_encodings"][real])
    same_forward(name, H[mask], z["allow/encoding"][mask])
    logits = tome.mlm_logits(H, targets_of(z)[0])
    same_forward(name, logits, z["allow/mlm_logits"][z["in/mlm_target_weights"] > 0])
    query = tome.entity_query(H, batch.row[linked], batch.start[linked], batch.end[linked])
    answer = memory.retrieve(query, batch.passage[linked], 16, 16)
    assert torch.equal(answer.ids, z["allow/final_top_memory_ids"][targets].long())
    same_forward(name, attention_weights(answer.scores), z["allow/final_memory_attention_weights"][targets])

# ---- Reading

@pytest.mark.parametrize("arrays, blocks", [(BATCH_TOME, 1), (TOME_1, 1), (TOME_2, 2)],
                         ids=["BATCH-TOME", "TOME-1", "TOME-2"])
def test_names_shapes_and_sizes_are_read_as_test_golden_translates_them(arrays, blocks, tmp_path):
    file = write_flax(tmp_path / "step1", arrays)
    config, state, _, unused = read_published(file, Config(k=8, k_shard=8, k_answer=16, dropout=0.0))
    assert config == replace(CONFIG, n_blocks=blocks) and not unused
    expected = translated(arrays)
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)

def test_a_training_checkpoint_with_heads_and_optimizer_state_is_read(tmp_path):
    z = {path: x for path, x in golden("batch_tome1").items() if path.startswith("param/")}
    arrays = {path.replace("param/", "params/"): x.numpy() for path, x in z.items()}
    arrays["params/linear_classifier/bias"] = np.zeros(3, np.float32)
    arrays["opt_state/0/count"] = arrays["step"] = np.array(4, np.int32)
    _, state, _, unused = read_published(write_flax(tmp_path / "checkpoint_3", arrays), Config())
    expected = translated(BATCH_TOME) | mlm_head(z, "param/mlm_layer/", "tome.mlm.")
    assert unused == ["linear_classifier"] and state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)

@pytest.mark.parametrize("depths", [(1, 2), (2, 1), (2, 0), (1, 3)])
def test_a_tome_2_with_blocks_of_different_depths_is_refused_with_both_depths(depths, tmp_path):
    """The public code's own test uses blocks of 1 and 2 layers."""
    arrays = published("tome2", intermediate_encoder=depths[0], final_encoder=depths[1])
    with pytest.raises(data.UserError, match="two blocks have {} and {} layers".format(*depths)):
        read_published(write_flax(tmp_path / "tome", arrays), Config())

def test_every_unused_published_tensor_is_named(tmp_path):
    one = np.ones(3, np.float32)
    more = {"final_encoder/layer_sequence/layers_0/mlp_block/gate/kernel": np.ones((3, 3), np.float32),
            "memory_attention_layer/temperature": one, "embeddings_layer_norm/other": one,
            "mention_projector/extra/bias": one, "new_head/bias": one}
    _, state, _, unused = read_published(write_flax(tmp_path / "step1", BATCH_TOME | more), Config())
    assert state.keys() == translated(BATCH_TOME).keys()
    assert unused == ["blocks.0.memory_attention.temperature", "blocks.0.transformer.layers.0.mlp_block.gate.kernel",
                      "embeddings.norm.other", "mention_projector", "new_head"]

# ---- Errors

def changed(**values):
    """The bytes of a BATCH-TOME file in which these arrays are replaced. None removes an array."""
    arrays = BATCH_TOME | {name.replace("__", "/"): x for name, x in values.items()}
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

def command_with_init(tmp_path, stage):
    """A command whose --init is a BATCH-TOME file with its vocab.txt beside it."""
    (tmp_path / "init").mkdir()
    (tmp_path / "init" / "vocab.txt").write_text("\n".join(VOCAB) + "\n")
    init, corpus = write_flax(tmp_path / "init" / "btome", BATCH_TOME), write_corpus(tmp_path / "corpus.jsonl")
    return ["--stage", stage, "--preset", "mini", "--init", init, "--corpus", corpus, "--out", str(tmp_path / "run"),
            *SMALL]

def run(*words):
    assert train.main([*words, "--device", "cpu"]) == 0

@pytest.mark.parametrize("blocks, tome", [(1, TOME_1), (2, TOME_2)], ids=["TOME-1", "TOME-2"])
def test_published_files_give_a_memory_and_a_fine_tuned_model_without_pretraining(tmp_path, blocks, tome, capsys):
    left_over = {"memory_extraction_layer/key_projector/bias": np.zeros(8, np.float32)}
    start, out = write_flax(tmp_path / "tome", tome | left_over), tmp_path / "run"
    run(*command_with_init(tmp_path, "memory"))
    said = capsys.readouterr().out
    assert "has no weights for mlm, entity_query, claim; this run initialises them" in said
    assert "loaded, without training" in said
    saved = train.read_checkpoint(out / "batch-tome.pt")
    assert saved["plan"].steps == 0 and saved["about"]["finished"]
    for name, x in translated(BATCH_TOME).items():
        assert torch.equal(saved["model"][name], x), name
    assert data.read_json(out / "memory" / "meta.json")["n"] == 24 and not (out / "log.jsonl").exists()

    run("--stage", "tome", "--start", start, "--steps", "0", "--out", str(out), "--blocks", str(blocks), "--quiet")
    said = capsys.readouterr().out
    assert "has no weights for mlm, claim; this run initialises them" in said
    assert "not used: memory_extraction_layer" in said
    saved = train.read_checkpoint(out / f"tome-{blocks}.pt")
    assert saved["plan"].steps == 0
    for name, x in translated(tome).items():
        assert torch.equal(saved["model"][name.removeprefix("tome.")], x), name
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
    assert "loaded, without training" not in capsys.readouterr().out    # all results already exist

def test_a_published_tome_is_trained_further_for_the_given_number_of_steps(tmp_path):
    command, start = command_with_init(tmp_path, "tome"), write_flax(tmp_path / "tome", TOME_1)
    run(*command, "--start", start, "--steps", "2", "--batch", "8", "--quiet")
    saved = train.read_checkpoint(tmp_path / "run" / "tome-1.pt")
    assert saved["plan"].steps == 2 and saved["about"]["finished"]

def test_a_published_file_determines_only_the_settings_that_its_shapes_tell(tmp_path):
    """For example, the public code's k_top_device describes a device, and dropout describes a training run."""
    command = command_with_init(tmp_path, "memory")
    (tmp_path / "init" / "config.json").write_text('{"model_config": {"encoder_config": {"k_top_device": 2}}}')
    config = train.settle(train.parse_arguments([*command, "--dropout", "0.3"]))[0].config
    assert (config.k, config.dropout, config.key_dim) == (256, 0.3, 8)
    assert train.settle(train.parse_arguments([*command, "--k", "5"]))[0].config.k == 5
    with pytest.raises(data.UserError, match="--key-dim 16: --init has 8; omit the flag"):
        train.settle(train.parse_arguments([*command, "--key-dim", "16"]))

WRONG_INITS = {
    "a TOME": (lambda file: write_flax(file, TOME_1), "give a TOME to --stage tome --start"),
    "no vocab.txt": (lambda file: (file.parent / "vocab.txt").unlink(), "put the vocab.txt"),
    "another vocab.txt": (lambda file: (file.parent / "vocab.txt").write_text("\n".join(VOCAB[:-1])), "has 96 entries"),
    "a cut file": (lambda file: file.write_bytes(file.read_bytes()[:1000]), "cannot be read"),
    "a pickle": (lambda file: file.write_bytes(b"\x80\x04."), "cannot be read"),
    "nothing there": (Path.unlink, "cannot be read"),
}

@pytest.mark.parametrize("damage, message", WRONG_INITS.values(), ids=WRONG_INITS)
def test_an_unusable_init_is_refused_before_anything_is_written(tmp_path, damage, message, capsys):
    command = command_with_init(tmp_path, "memory")
    damage(tmp_path / "init" / "btome")
    assert train.main(command) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error
    assert not (tmp_path / "run").exists()

@pytest.mark.parametrize("wrong, message", [(BATCH_TOME, "give it to --init"), ("scratch", "leave --start out"),
                                            (TOME_2, "contains no TOME with the run's dimensions")])
def test_a_start_file_of_the_wrong_kind_is_refused_in_one_sentence(tmp_path, wrong, message, capsys):
    start = write_flax(tmp_path / "start", wrong) if isinstance(wrong, dict) else wrong
    assert train.main([*command_with_init(tmp_path, "tome"), "--start", start]) == 1
    assert message in capsys.readouterr().err.splitlines()[-1]
