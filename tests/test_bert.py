"""Reading published BERT checkpoints, and starting training from one.   python -m pytest tests/test_bert.py

    TOME_BERT=FOLDER python -m pytest tests/test_bert.py      # compares a real BERT with transformers, if installed
"""
import io
import json
import math
import os
import pickle
import shutil
import struct
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F

import bench
import data
import train
from encoder import Config
from tome import TOME, BatchTOME, part_of, read_published

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]", *LETTERS, *("##" + c for c in LETTERS)]
BIN = "pytorch_model.bin"
DIMS = {"vocab_size": len(VOCAB), "hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 3,
        "intermediate_size": 20, "max_position_embeddings": 256, "type_vocab_size": 2, "hidden_act": "gelu",
        "model_type": "bert"}

# ---------------------------------------------------------------- a second implementation of BERT

def random_bert(dims=DIMS, mlm=True, seed=0):
    """{published name without prefix: random tensor}. Half precision represents the values exactly."""
    g, d, f, v = torch.Generator().manual_seed(seed), dims["hidden_size"], dims["intermediate_size"], dims["vocab_size"]
    shapes = {"embeddings.LayerNorm": (d,), "pooler.dense": (d, d)}         # the pooler is published but not used
    for i in range(dims["num_hidden_layers"]):
        p = f"encoder.layer.{i}."
        shapes |= {f"{p}attention.self.{name}": (d, d) for name in ("query", "key", "value")}
        shapes |= {p + "attention.output.dense": (d, d), p + "attention.output.LayerNorm": (d,),
                   p + "intermediate.dense": (f, d), p + "output.dense": (d, f), p + "output.LayerNorm": (d,)}
    if mlm:
        shapes |= {"cls.predictions.transform.dense": (d, d), "cls.predictions.transform.LayerNorm": (d,)}
    w = {f"embeddings.{name}_embeddings.weight": torch.randn(n, d, generator=g)
         for name, n in (("word", v), ("position", dims["max_position_embeddings"]), ("token_type", 2))}
    for name, shape in shapes.items():
        mean = 1 if "LayerNorm" in name else 0
        w[name + ".weight"] = mean + torch.randn(shape, generator=g) / shape[-1] ** 0.5
        w[name + ".bias"] = torch.randn(shape[0], generator=g) * 0.1
    if mlm:
        w["cls.predictions.bias"] = torch.randn(v, generator=g)
    return {name: tensor.half().float() for name, tensor in w.items()}

def bert_forward(w, tokens, mask, dims=DIMS):
    """(hidden states after the embeddings and each layer, MLM logits or None), by PyTorch's own layers."""
    d, n_heads, n_inner = (dims[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
    gelu = torch.nn.GELU("tanh" if dims["hidden_act"] == "gelu_new" else "none")
    published = {"self_attn.out_proj": "attention.output.dense", "norm1": "attention.output.LayerNorm",
                 "linear1": "intermediate.dense", "linear2": "output.dense", "norm2": "output.LayerNorm"}

    def norm(x, name):
        return F.layer_norm(x, (d,), w[name + ".LayerNorm.weight"], w[name + ".LayerNorm.bias"], 1e-12)

    word, position, segment = (w[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type"))
    states = [norm(word[tokens] + position[:tokens.shape[1]] + segment[0], "embeddings")]
    for i in range(dims["num_hidden_layers"]):
        layer = torch.nn.TransformerEncoderLayer(d, n_heads, n_inner, 0, gelu, 1e-12, batch_first=True)
        state, p = {}, f"encoder.layer.{i}."
        for end in ("weight", "bias"):
            state |= {f"{name}.{end}": w[f"{p}{theirs}.{end}"] for name, theirs in published.items()}
            parts = [w[f"{p}attention.self.{part}.{end}"] for part in ("query", "key", "value")]
            state[f"self_attn.in_proj_{end}"] = torch.cat(parts)
        layer.load_state_dict(state)
        states.append(layer(states[-1], src_key_padding_mask=~mask))
    if "cls.predictions.bias" not in w:
        return states, None
    x = F.linear(states[-1], *(w[f"cls.predictions.transform.dense.{end}"] for end in ("weight", "bias")))
    return states, F.linear(norm(gelu(x), "cls.predictions.transform"), word, w["cls.predictions.bias"])

def write_bert(folder, tensors=None, dims=DIMS, kind="bin", prefix="bert.", old_names=False):
    """Writes a BERT to a folder in a published layout."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dims))
    (folder / "vocab.txt").write_text("\n".join(VOCAB) + "\n")
    tensors = random_bert(dims) if tensors is None else tensors
    published = {(name if name.startswith("cls.") else prefix + name): tensor for name, tensor in tensors.items()}
    published[prefix + "embeddings.position_ids"] = torch.arange(dims["max_position_embeddings"])[None]
    if old_names:
        published = {name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"):
                     tensor for name, tensor in published.items()}
    if kind == "safetensors":
        safetensors = pytest.importorskip("safetensors.torch", reason="pip install safetensors")
        safetensors.save_file(published, folder / "model.safetensors", {"format": "pt"})
    else:
        torch.save(published, folder / BIN)
    return folder

def write_corpus(path):
    """Writes 48 texts of random letters, each with three mentions."""
    rng, lines = np.random.default_rng(0), []
    for i in range(48):
        words = ["".join(rng.choice(list(LETTERS), 3)) for _ in range(6)]
        words += [f"place{c}" for c in rng.choice(list("abcdef"), 3, replace=False)]
        text = " ".join(words)
        mentions = [{"start": text.index(word), "end": text.index(word) + len(word), "entity": word}
                    for word in words[6:]]
        lines.append({"title": f"article {i}", "text": text, "mentions": mentions,
                      "split": "train" if i < 40 else "held_out"})
    data.write_lines(path, lines)
    return path

def command_from_bert(tmp_path, *words, **bert):
    """Arguments of train.py that end in --init FOLDER. Also writes the corpus and the BERT that they name."""
    corpus, folder = write_corpus(tmp_path / "corpus.jsonl"), write_bert(tmp_path / "bert", **bert)
    return [*words, "--corpus", str(corpus), "--out", str(tmp_path / "run"), "--init", str(folder)]

def read(folder):
    """(TOME with the weights in the folder, the parts of BATCH-TOME that the folder lacks)."""
    config, state, lacks, _ = read_published(folder, Config(dropout=0.0, n_upper=2))
    tome = TOME(config)
    tome.load_state_dict(part_of(state, "tome."), strict=False)
    return tome, lacks

def difference(tome, states, tokens, mask):
    """The largest differences from a BERT's hidden states after the embeddings, the lower and the upper layers."""
    H0 = tome.forward_initial(tokens, mask)
    ours = tome.embeddings(tokens), H0, tome.forward_blocks(H0, mask)[0]
    theirs = states[0], states[tome.config.n_initial], states[-1]
    return [float((a - b)[mask].abs().max()) for a, b in zip(ours, theirs)]

def padded_passages():
    mask = torch.arange(9) < torch.tensor([[9], [6], [1]])
    return torch.randint(5, len(VOCAB), mask.shape, generator=torch.Generator().manual_seed(5)) * mask, mask

# ---------------------------------------------------------------- the layouts

@pytest.mark.parametrize("old_names", [False, True], ids=["weight-bias", "gamma-beta"])
@pytest.mark.parametrize("mlm", [True, False], ids=["mlm", "no-mlm"])
@pytest.mark.parametrize("prefix", ["bert.", ""], ids=["prefix", "no-prefix"])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@torch.no_grad()
def test_a_checkpoint_of_any_published_layout_gives_berts_hidden_states(tmp_path, kind, prefix, mlm, old_names):
    dims = {**DIMS, "hidden_act": "gelu" if mlm else "gelu_new"}
    tensors = random_bert(dims, mlm)
    tome, lacks = read(write_bert(tmp_path, tensors, dims, kind, prefix, old_names))
    tokens, mask = padded_passages()
    states, logits = bert_forward(tensors, tokens, mask, dims)
    assert max(difference(tome, states, tokens, mask)) < 1e-5
    assert ("mlm" in lacks) == (not mlm)
    if mlm:
        H, _ = tome(tokens, mask)
        torch.testing.assert_close(tome.mlm_logits(H, mask), logits[mask], atol=2e-5, rtol=0)

class Malicious:
    """An object that creates a folder when it is unpickled."""
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)

def change(**values):
    return lambda folder: (folder / "config.json").write_text(json.dumps({**DIMS, **values}))

def without(key):
    return lambda folder: (folder / "config.json").write_text(json.dumps({k: v for k, v in DIMS.items() if k != key}))

def write(name, content):
    return lambda folder: (folder / name).write_bytes(content(folder) if callable(content) else content)

def remove(name):
    return lambda folder: (folder / name).unlink()

def saved(value):
    """The bytes that torch.save writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()

def in_two(folder):
    """Splits the folder's pytorch_model.bin into two files and an index, as large models are published."""
    tensors, names = torch.load(folder / BIN), [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    for i, name in enumerate(names):
        torch.save({key: tensors[key] for key in [*tensors][i::2]}, folder / name)
    index = {"weight_map": {key: names[i % 2] for i, key in enumerate(tensors)}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (folder / BIN).unlink()

def edit_bin(change):
    """An edit that replaces the tensors in a folder's pytorch_model.bin with change(tensors)."""
    return lambda folder: torch.save(change(torch.load(folder / BIN)), folder / BIN)

def having(name, tensor):
    return edit_bin(lambda tensors: tensors | {"bert." + name: tensor})

def lacking(part):
    """An edit that removes the tensors whose names contain `part`."""
    return edit_bin(lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name})

def rename(change):
    return edit_bin(lambda tensors: {change(name): tensor for name, tensor in tensors.items()})

def sparse(tensors):
    return {name: x.to_sparse() if "output.dense.weight" in name else x for name, x in tensors.items()}

def with_copies(tensors):
    """Stores the MLM head as some versions of transformers do: the tied embeddings are copied, the bias is renamed."""
    bias = tensors.pop("cls.predictions.bias")
    return tensors | {"cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"],
                      "cls.predictions.decoder.bias": bias}

WRITTEN_OTHERWISE = {
    "module.": rename(lambda name: "module." + name), "_orig_mod.": rename(lambda name: "_orig_mod." + name),
    "both": rename(lambda name: "module._orig_mod." + name),
    "inside": rename(lambda name: name.replace("layer.1.", "layer.1._checkpoint_wrapped_module.")),
    "in two files": in_two,
    "in a checkpoint of a training": edit_bin(lambda tensors: {"epoch": 3, "state_dict": tensors}),
    "in half precision": edit_bin(lambda tensors: {name: x.half() for name, x in tensors.items()}),
    "sparse": edit_bin(sparse), "with copies": edit_bin(with_copies),
    "a config in UTF-8": change(id2label={"0": "\u00dcberraschung"}), "gelu_python": change(hidden_act="gelu_python"),
}

@pytest.mark.parametrize("otherwise", WRITTEN_OTHERWISE.values(), ids=WRITTEN_OTHERWISE)
def test_a_bert_stored_in_another_form_gives_the_same_weights(tmp_path, otherwise):
    folder = write_bert(tmp_path)
    config, state, lacks, unused = read_published(folder, Config(n_upper=2))
    otherwise(folder)
    again = read_published(folder, Config(n_upper=2))
    assert (again[0], *again[2:]) == (config, lacks, unused) and unused == ["pooler"]
    assert state.keys() == again[1].keys()
    for name, tensor in state.items():
        torch.testing.assert_close(again[1][name], tensor, atol=0, rtol=0)      # also checks the dtype, float32

def test_unused_tensors_are_named(tmp_path):
    folder = write_bert(tmp_path)
    more = {"bert.encoder.layer.1.attention.self.distance_embedding.weight": torch.ones(3, 3),
            "cls.seq_relationship.bias": torch.ones(2), "cls.predictions.decoder.weight": torch.ones(len(VOCAB), 12)}
    edit_bin(lambda tensors: tensors | more)(folder)
    unused = read_published(folder, Config(n_upper=2))[3]
    assert unused == ["blocks.0.transformer.layers.0.attention.self.distance_embedding.weight", "cls", "mlm.weight",
                      "pooler"]

def test_a_berts_files_are_read_as_utf_8_in_any_locale(tmp_path):
    folder = write_bert(tmp_path)
    config = json.dumps({**DIMS, "id2label": {"0": "\u00dcberraschung"}}, ensure_ascii=False)
    (folder / "config.json").write_text(config, "utf-8")
    (folder / "tokenizer_config.json").write_text('{"name_or_path": "\u00fc"}', "utf-8")
    program = ("import sys, locale, tome, encoder\nassert 'utf' not in locale.getpreferredencoding(False).lower()\n"
               "tome.read_published(sys.argv[1], encoder.Config(n_upper=2))")
    plain = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    assert subprocess.run([sys.executable, "-c", program, str(folder)], env=plain, cwd=root).returncode == 0

# ---------------------------------------------------------------- tokenisation

CASED = [c.upper() for c in LETTERS] + ["Paris", "##S"]
ACCENTS = ["\u00fc", "z\u00fcrich", "##\u00e9"]

def vocabulary(folder, *words):
    (folder / "vocab.txt").write_text("\n".join([*VOCAB, *words]) + "\n", "utf-8")
    return data.load_tokenizer(folder / "vocab.txt")

def tokens(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).tokens

def test_the_vocabulary_decides_whether_capitals_and_accents_are_kept(tmp_path):
    text = "Paris Z\u00fcrich ab"
    spelled = ["z", "##u", "##r", "##i", "##c", "##h"]
    plain = tokens(vocabulary(tmp_path), text)
    assert plain == ["p", "##a", "##r", "##i", "##s", *spelled, "a", "##b"]
    assert tokens(vocabulary(tmp_path, *CASED), text) == ["Paris", "[UNK]", "a", "##b"]        # no entry contains ü
    assert tokens(vocabulary(tmp_path, *ACCENTS), text) == ["p", "##a", "##r", "##i", "##s", "z\u00fcrich", "a", "##b"]
    assert tokens(vocabulary(tmp_path, *CASED, *ACCENTS, "Z\u00fcrich"), text) == ["Paris", "Z\u00fcrich", "a", "##b"]
    stray = vocabulary(tmp_path, *(f"w{i}" for i in range(2000)), "I", "\u00fc")              # as in the Chinese BERT
    assert tokens(stray, text) == plain

def test_a_vocabulary_trained_here_is_read_back_as_lower_case_without_accents(tmp_path):
    """Covers Greek, Russian, Turkish, Hindi, Arabic, Korean, Vietnamese, and letters that have no lower case."""
    texts = ["\u1f08\u03b8\u03ae\u03bd\u03b1\u03b9 \u0419\u043e\u0448\u043a\u0430\u0440 \u0130stanbul "
             "\u0939\u093f\u0902\u0926\u0940 \u0645\u064e\u0643\u0651\u0629 \ud55c\uad6d Vi\u1ec7t \u10d7\u10d1 "
             "\u2160 \u212b \u1e9e \u01c5"]
    trained = data.train_tokenizer(texts, 500)
    number = trained.get_vocab()
    (tmp_path / "vocab.txt").write_text("\n".join(sorted(number, key=number.get)), "utf-8")
    again = data.load_tokenizer(tmp_path / "vocab.txt")
    assert tokens(again, texts[0]) == tokens(trained, texts[0]) and "[UNK]" not in tokens(trained, texts[0])

def test_empty_and_repeated_lines_of_a_vocabulary_keep_their_numbers_and_the_last_repeat_wins(tmp_path):
    tokenizer = vocabulary(tmp_path, "ab", "", "cd", "ab", "")
    assert tokenizer.get_vocab_size() == len(VOCAB) + 5
    assert tokenizer.encode("ab cd", add_special_tokens=False).ids == [len(VOCAB) + 3, len(VOCAB) + 2]
    corpus = data.Corpus.build(write_corpus(tmp_path / "corpus.jsonl"), tmp_path / "corpus", tokenizer, 64, 128)
    assert corpus.vocab_size == len(VOCAB) + 5 and corpus.tokenizer.get_vocab() == tokenizer.get_vocab()

def fast(folder, edit=lambda tokenizer: None, words=VOCAB, **normalizer):
    """Writes the folder's tokenizer.json as the library `tokenizers` saves it for a BERT."""
    numbers = {word: i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(numbers, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(**normalizer)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens([word for word in words if word.startswith("[") and "unused" not in word])
    tokenizer.enable_padding(length=128)
    edit(tokenizer)
    tokenizer.save(str(folder / "tokenizer.json"))

def spaces(tokenizer):
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()

def says(**values):
    return write("tokenizer_config.json", json.dumps(values).encode())

AGREE = {
    "nothing": ([], lambda folder: None), "uncased": ([], says(do_lower_case=True, strip_accents=None)),
    "strips": ([], says(strip_accents=True)), "cased": (CASED, says(do_lower_case=False)),
    "keeps": (ACCENTS, says(do_lower_case=True, strip_accents=False)),
    "keeps, unsaid": (ACCENTS, says(do_lower_case=True)),
    "fast": ([], fast), "fast, said again": ([], lambda folder: fast(folder, strip_accents=True)),
    "fast, cased": (CASED, lambda folder: fast(folder, words=[*VOCAB, *CASED], lowercase=False)),
    "fast, keeps": (ACCENTS, lambda folder: fast(folder, words=[*VOCAB, *ACCENTS], strip_accents=False))}
DIFFER = {
    "cased": ([], says(do_lower_case=False), "says that do_lower_case is False, but"),
    "uncased": (CASED, says(do_lower_case=True), "says that do_lower_case is True, but"),
    "keeps": ([], says(strip_accents=False), "says that strip_accents is False, but"),
    "strips": (ACCENTS, says(strip_accents=True), "says that strip_accents is True, but"),
    "signs": ([], says(tokenize_chinese_chars=False), "says that tokenize_chinese_chars is False, but"),
    "Japanese": ([], says(word_tokenizer_type="mecab"), "says that word_tokenizer_type is mecab, but"),
    "fast, cased": ([], lambda folder: fast(folder, lowercase=False), "tokenizer.json tokenises"),
    "fast, uncased": (CASED, lambda folder: fast(folder, words=[*VOCAB, *CASED]), "tokenizer.json tokenises"),
    "fast, keeps": ([], lambda folder: fast(folder, strip_accents=False), "tokenizer.json tokenises"),
    "fast, signs": ([], lambda folder: fast(folder, handle_chinese_chars=False), "tokenizer.json tokenises"),
    "fast, spaces": ([], lambda folder: fast(folder, spaces), "tokenizer.json tokenises"),
    "fast, other words": ([], lambda folder: fast(folder, words=VOCAB[:7] + VOCAB[:6:-1]), "tokenizer.json tokenises"),
    "fast, no JSON": ([], write("tokenizer.json", b"{"), "cannot be read as a BERT")}

@pytest.mark.parametrize("words, edit", AGREE.values(), ids=AGREE)
def test_a_bert_whose_files_agree_on_tokenisation_is_read(tmp_path, words, edit):
    vocabulary(write_bert(tmp_path), *words)
    edit(tmp_path)
    read_published(tmp_path, Config(n_upper=2))

@pytest.mark.parametrize("words, edit, message", DIFFER.values(), ids=DIFFER)
def test_a_bert_whose_files_disagree_on_tokenisation_is_refused(tmp_path, words, edit, message):
    vocabulary(write_bert(tmp_path), *words)
    edit(tmp_path)
    with pytest.raises(data.UserError, match=message) as error:
        read_published(tmp_path, Config(n_upper=2))
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)

@pytest.mark.parametrize("n_layers, n_upper, below", [(12, 8, 4), (6, 1, 5)])
def test_the_preset_decides_how_many_of_berts_layers_are_above_the_memory(tmp_path, n_layers, n_upper, below):
    write_bert(tmp_path, random_bert({**DIMS, "num_hidden_layers": n_layers}))
    config, _, _, _ = read_published(tmp_path, Config(n_upper=n_upper, n_blocks=2))
    assert (config.n_initial, config.n_upper, config.n_blocks) == (below, n_upper, 1)

def test_a_bert_first_learns_markers_without_the_memory_and_is_then_fitted_once(tmp_path, monkeypatch):
    """Four steps with memory_from .5, interrupted and resumed after the third. The memory is used from the third step
    on, and fit_retrieval sets the query and key layers just before that step."""
    monkeypatch.setitem(train.PRESETS, "toy", {**train.PRESETS["toy"], "memory_from": 0.5, "cluster": 8, "log_every": 9,
                                               "save_every": 1, "eval_mentions": 4})
    command = command_from_bert(tmp_path, "--stage", "batch-tome", "--steps", "4", "--batch", "8")
    asked, fitted = [], []          # coreference runs twice per step before the fit, then once
    coref, fit, save = train.coreference_loss, train.fit_retrieval, torch.save

    def watched_coref(*args):
        asked.append(1)
        return coref(*args)

    def watched_fit(model, *rest):
        keys = model.key.linear.weight.clone()
        fit(model, *rest)
        fitted.append((len(asked), not torch.equal(keys, model.key.linear.weight)))

    def stop_after_the_third(values, file):
        if json.loads(values["about"])["step"] == 4:
            raise KeyboardInterrupt
        save(values, file)

    monkeypatch.setattr(train, "coreference_loss", watched_coref)
    monkeypatch.setattr(train, "fit_retrieval", watched_fit)
    monkeypatch.setattr(torch, "save", stop_after_the_third)
    assert train.main(command) == 130
    monkeypatch.setattr(torch, "save", save)
    assert train.main(command) == 0
    assert len(asked) == 2 + 2 + 3 and fitted == [(4, True)]      # the fourth step is repeated

def test_a_corpus_cannot_be_rebuilt_without_the_vocabulary_of_its_bert(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(train.PRESETS, "toy", train.PRESETS["toy"] | {"cluster": 8, "log_every": 9, "eval_mentions": 4})
    command = command_from_bert(tmp_path, "--stage", "batch-tome", "--steps", "1", "--batch", "8")
    assert train.main(command) == 0
    (tmp_path / "bert").rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "run" / "corpus")
    capsys.readouterr()
    assert train.main(command[:-2]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"{tmp_path / 'bert'}: No such file" in error

# ---------------------------------------------------------------- errors

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:68d45e\nsize 440449768\n"
DAMAGES = {
    "no config.json": (remove("config.json"), r"No such file.*config.json"),
    "no weights": (remove(BIN), "contains neither model.safetensors nor pytorch_model.bin"),
    "config.json is not JSON": (write("config.json", b"{"), "cannot be read as a BERT"),
    "config.json is a list": (write("config.json", b"[]"), "cannot be read as a BERT"),
    "config.json without heads": (without("num_attention_heads"), "it has no 'num_attention_heads'"),
    "another kind of model": (change(model_type="roberta"), "its model_type is roberta, not bert"),
    "relative positions": (change(position_embedding_type="relative_key"),
                           "its position_embedding_type is relative_key"),
    "another epsilon": (change(layer_norm_eps=0.1), "its layer_norm_eps is 0.1, not 1e-12"),
    "another activation": (change(hidden_act="relu"), "its hidden_act is relu, not gelu or .*gelu_new"),
    "a number of heads that is not a number": (change(num_attention_heads="many"), "cannot be read as a BERT"),
    "heads that do not divide the size": (change(num_attention_heads=5), "hidden size 12 is not a multiple of 5 heads"),
    "too few layers": (lacking("encoder.layer.2.intermediate.dense.bias"),
                       "it has only 2 layers; --n-upper 2 needs at least 3"),
    "a wrong shape": (having("encoder.layer.0.output.dense.bias", torch.zeros(3)),
                      "size mismatch for tome.initial.layers.0.down.bias"),
    "another hidden size": (having("embeddings.position_embeddings.weight", torch.ones(9, 5)),
                            "size mismatch for tome.embeddings.position.weight"),
    "a missing layer": (rename(lambda name: name.replace("layer.1.", "layer.3.")),
                        "it has no 'blocks.0.transformer.layers.0"),
    "a missing tensor": (lacking("encoder.layer.1.output.dense.bias"),
                         "it has no 'blocks.0.transformer.layers.0.down.bias'"),
    "no keys of attention": (lacking("layer.0.attention.self.key.bias"),
                             "it has no 'initial.layers.0.attention.key.bias'"),
    "no word embeddings": (lacking("word_embeddings"), "it has no 'embeddings.word.weight'"),
    "half an MLM head": (lacking("cls.predictions.bias"), "it has no 'mlm.bias'"),
    "whole numbers": (having("encoder.layer.1.output.dense.weight", torch.ones(12, 20).char()),
                      "down.weight contains a value that is not a finite float"),
    "NaN": (having("embeddings.word_embeddings.weight", torch.full((len(VOCAB), 12), math.nan)),
            "embeddings.word.weight contains a value that is not a finite"),
    "a sparse tensor beyond its shape": (
        having("embeddings.word_embeddings.weight", torch.sparse_coo_tensor(
            [[0], [10 ** 9]], [1.0], (len(VOCAB), 12), check_invariants=False)), "cannot be read as a BERT"),
    **{f"a .bin of {content}": (write(BIN, content), f"{BIN} is not a PyTorch file; it begins with {begin}")
       for content, begin in ((b"not a checkpoint", "b'not a check"), (b"<!DOCTYPE html>", "b'<!DOCTYPE html>'"),
                              (b"", "b''"))},
    "a truncated .bin": (write(BIN, saved(random_bert())[:5000]), "cannot be read as a BERT"),
    "a .bin of a list": (write(BIN, saved([1])), "cannot be read as a BERT"),
    "a malicious .bin": (write(BIN, lambda folder: pickle.dumps(Malicious(folder / "harm"), protocol=2)),
                         "contains a Python object, posix.mkdir; only tensors are read"),
    "a malicious zipped .bin": (write(BIN, lambda folder: saved({"embeddings": Malicious(folder / "harm")})),
                                "contains a Python object, posix.mkdir; only tensors are read"),
    "a whole model in a .bin": (write(BIN, lambda folder: saved(torch.nn.Linear(2, 2))),
                                "contains a Python object, torch.nn.modules.linear.Linear; only tensors"),
    "one file of two missing": (lambda folder: (in_two(folder), (folder / "pytorch_model-00002-of-00002.bin").unlink()),
                                "it has no '|it has only [12] layers; --n-upper 2"),
    **{f"a pointer of Git LFS, {name}": (write(name, LFS), f"{name} is a Git LFS pointer; run git lfs pull")
       for name in (BIN, "config.json", "vocab.txt", "tokenizer.json", "tokenizer_config.json")},
}

@pytest.mark.parametrize("damage, message", DAMAGES.values(), ids=DAMAGES)
def test_an_unusable_checkpoint_is_refused_in_one_sentence(tmp_path, damage, message):
    damage(write_bert(tmp_path / "bert"))
    with pytest.raises(data.UserError, match=message) as error:
        read_published(tmp_path / "bert", Config(n_upper=2))
    assert "\n" not in str(error.value) and str(tmp_path / "bert") in str(error.value)
    assert not (tmp_path / "bert" / "harm").exists()

def test_a_truncated_safetensors_file_is_refused_in_one_sentence(tmp_path):
    write_bert(tmp_path, kind="safetensors")
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    header, = struct.unpack("<Q", whole[:8])
    for length in [0, 1, 7, 8, 9, 8 + header // 2, 7 + header, 8 + header, 9 + header,
                   (8 + header + len(whole)) // 2, len(whole) - 1]:
        file.write_bytes(whole[:length])
        with pytest.raises(data.UserError, match="cannot be read as a BERT") as error:
            read_published(tmp_path, Config(n_upper=2))
        assert "\n" not in str(error.value), length
    file.write_bytes(whole)
    read_published(tmp_path, Config(n_upper=2))

# ---------------------------------------------------------------- --init, a real checkpoint, and the paper's size

@pytest.mark.parametrize("blocks", [1, 2])
def test_init_starts_batch_tome_from_a_bert_with_its_vocabulary(tmp_path, blocks, capsys):
    """At step 0, TOME without a memory gives the BERT's hidden states. With two blocks, the BERT has no MLM head."""
    out, tensors = tmp_path / "run", random_bert(mlm=blocks == 1)
    words = "--stage batch-tome --preset mini --steps 2 --device cpu".split()
    assert train.main(command_from_bert(tmp_path, *words, tensors=tensors)) == 0
    lacks, = (line for line in capsys.readouterr().out.splitlines() if "has no weights for" in line)
    assert "blocks.0.memory_attention" in lacks and ("mlm" in lacks) == (blocks == 2)
    model = torch.load(out / "batch-tome.pt", weights_only=True)["model"]
    assert model["tome.embeddings.word.weight"].shape == (len(VOCAB), 12)
    tokenizer = data.load_tokenizer(out / "corpus" / "vocab.txt")
    assert [tokenizer.token_to_id(t) for t in ("[MASK]", "[E_start]", "[E_end]", "a", "##a")] == [4, 5, 6, 7, 33]
    run, (tokens, mask) = train.read_run(out, blocks).open(), padded_passages()
    with torch.no_grad():
        tome = train.new_batch_tome(run, run.seed).tome.eval()
        assert max(difference(tome, bert_forward(tensors, tokens, mask)[0], tokens, mask)) < 1e-5
    (tmp_path / "bert" / "config.json").unlink()             # a finished stage no longer needs the folder
    run = train.read_run(out, blocks).open()
    train.load_model(run, "batch-tome")
    assert (run.config.n_initial, run.config.n_upper, run.config.n_blocks) == (1, 2, blocks)

def test_a_dimension_set_by_the_bert_cannot_be_changed(tmp_path, capsys):
    command = command_from_bert(tmp_path, "--stage", "memory")
    assert train.main([*command, "--hidden", "24"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--hidden" in error and "12" in error
    assert not (tmp_path / "run").exists()
    run, _ = train.settle(train.parse_arguments([*command, "--clip", "2"]))
    (tmp_path / "run").mkdir()
    data.write_json(tmp_path / "run" / "run.json", run.saved)
    run, _ = train.settle(train.parse_arguments(["--stage", "tome", "--out", str(tmp_path / "run")]))
    assert (run.config.hidden, run.settings.clip) == (12, 2)

SENTENCES = ["The Eiffel Tower stands in Paris.", "Yes.", "Marie Curie, born in Warsaw, shared the 1903 Nobel Prize in "
             "Physics with her husband Pierre and with Henri Becquerel."]

@torch.no_grad()
def test_a_real_bert_gives_the_hidden_states_of_transformers_on_padded_sentences():
    folder = os.environ.get("TOME_BERT")
    if not folder:
        pytest.skip("set TOME_BERT to the folder of a BERT checkpoint")
    transformers = pytest.importorskip("transformers", reason="needs transformers to compare with")
    tokenizer = data.load_tokenizer(os.path.join(folder, "vocab.txt"))
    cls, sep = (data.special_ids(tokenizer)[token] for token in (data.CLS, data.SEP))
    ids = [[cls, *tokenizer.encode(sentence, add_special_tokens=False).ids, sep] for sentence in SENTENCES]
    assert ids == transformers.AutoTokenizer.from_pretrained(folder)(SENTENCES)["input_ids"]
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(x) for x in ids], batch_first=True)
    mask = torch.arange(tokens.shape[1]) < torch.tensor([[len(x)] for x in ids])
    theirs = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()(
        tokens, mask.long(), output_hidden_states=True).hidden_states
    largest = difference(read(folder)[0], theirs, tokens, mask)
    print("largest difference after the embeddings, lower and upper layers:", " ".join(f"{x:.1e}" for x in largest))
    assert max(largest) < 1e-4

def n_parameters(*modules):
    return sum(p.numel() for module in modules for p in module.parameters())

@pytest.mark.slow
@pytest.mark.parametrize("n_blocks", [1, 2])
def test_the_base_preset_has_the_papers_220_million_parameters_and_takes_a_training_step(n_blocks, tmp_path):
    run, _ = train.settle(train.parse_arguments(["--stage", "tome", "--preset", "base", "--blocks", str(n_blocks),
                                                 "--out", str(tmp_path / "run")]))
    config = run.config
    model = BatchTOME(TOME(config))
    tome, encoder = model.tome, model
    assert [len(block.transformer.layers) for block in tome.blocks] == [[8], [4, 4]][n_blocks - 1]
    # "Consistent with retrieve-and-read, we count the parameters of the Mention Encoder and TOME, but not the size of
    # the non-trainable and sparsely accessed Mention Memory" (§4.2). After BATCH-TOME the Mention Encoder is frozen and
    # TOME keeps training, so each has its own BERT. The encoder adds two span layers. TOME adds its memory layers, the
    # MLM head and the span layer for entity prediction. Tied embeddings count once, and task heads do not count.
    in_encoder = n_parameters(tome.embeddings, tome.initial, *(block.transformer for block in tome.blocks),
                              encoder.key, encoder.value)
    in_tome = n_parameters(tome) - n_parameters(tome.claim)
    print(f"TOME-{n_blocks}: Mention Encoder {in_encoder / 1e6:.1f}M + TOME {in_tome / 1e6:.1f}M "
          f"= {(in_encoder + in_tome) / 1e6:.1f}M parameters")
    assert 109e6 < in_encoder < 111e6 and 109e6 < in_tome < 112e6
    assert round((in_encoder + in_tome) / 1e6, -1) == 220

    optimizer = train.optimizer_for(SimpleNamespace(settings=run.settings, init=None), model, "batch-tome")
    before = [p.detach().clone() for p in model.parameters()]
    bench.batch_tome_step(model.train(), bench.random_batch(config, 2, 32, 4, 1, 3, "cpu"))
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
    unmoved = {name for (name, p), old in zip(model.named_parameters(), before) if torch.equal(p, old)}
    assert unmoved == {name for name, _ in model.named_parameters() if "entity_query" in name or "claim" in name}

@pytest.mark.parametrize("init, kind, lower", [(None, "batch-tome", 1), (None, "tome", 1), ("BERT", "tome", .25),
                                              (None, "qa", .25), (None, "claims", .25)])
def test_layers_below_the_memory_learn_more_slowly_if_they_were_already_trained(init, kind, lower):
    model = TOME(Config(vocab_size=50, hidden=12, n_heads=3, intermediate=20, n_initial=2, n_upper=2))
    run = SimpleNamespace(settings=train.Settings(lower_lr_scale=.25), init=init)
    groups = train.optimizer_for(run, model, kind).param_groups
    scale_of = {id(p): group["scale"] for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        is_lower = name.startswith(("embeddings.", "initial."))
        assert scale_of[id(parameter)] == (lower if is_lower else 1), name
