"""The memory's files and what is refused.   python -m pytest tests/test_memory.py"""
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import data
import memory as memory_file
from data import UserError
from encoder import Config
from memory import ARRAYS, MentionMemory, build_memory, encode_passages, load_memory, read_manifest
from tome import TOME, BatchTOME

CPU = torch.device("cpu")
TINY = Config(vocab_size=500, hidden=8, n_heads=2, intermediate=12, n_initial=1, n_block=1,
              max_positions=128, dropout=0.0, key_dim=4, value_dim=6, coref_dim=4, k=8, k_shard=8)

def new_encoder(seed=0):
    torch.manual_seed(seed)
    return BatchTOME(TOME(TINY)).encoder

@pytest.fixture(scope="module")
def corpora(small_world, tmp_path_factory):
    """Two corpora: the whole small world, and its first half."""
    folder = tmp_path_factory.mktemp("corpora")
    lines = small_world.read_text().splitlines(keepends=True)
    (folder / "half.jsonl").write_text("".join(lines[:len(lines) // 2]))
    texts = (text.text for text in data.read_corpus(small_world))
    tokenizer = data.train_tokenizer(texts, TINY.vocab_size)
    return [data.Corpus.build(path, str(folder / name), tokenizer, 48, 96)
            for path, name in ((small_world, "whole"), (folder / "half.jsonl", "half"))]

@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(memory_file, "PASSAGES_PER_SHARD", 16)

def build(corpus, folder, old=None, seed=0, dtype=np.float32):
    build_memory(new_encoder(seed), corpus, folder, CPU, dtype, {"kind": "memory"}, old)
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}

def test_a_memory_is_what_the_encoder_says_and_its_manifest_says_so(corpora, tmp_path):
    corpus, encoder = corpora[0], new_encoder()
    build(corpus, tmp_path / "memory")
    rows = encode_passages(encoder, corpus, np.arange(len(corpus.article)), CPU)
    table = load_memory(tmp_path / "memory", encoder.fingerprint)
    for name in ARRAYS:
        np.testing.assert_allclose(getattr(table, name).numpy(), rows[name], atol=1e-6)
    manifest = read_manifest(tmp_path / "memory")
    assert manifest["recipe"] == {"kind": "memory"} and manifest["n"] == len(table)
    assert manifest["encoder"] == encoder.fingerprint and manifest["dtype"] == "float32"
    assert sum(shard["passages"] for shard in manifest["shards"]) == len(corpus.article)
    assert not (tmp_path / "memory.part").exists()
    with pytest.raises(UserError, match="another mention encoder"):
        load_memory(tmp_path / "memory", new_encoder(1).fingerprint)

def test_a_build_that_was_cut_off_goes_on_at_the_first_shard_missing(corpora, tmp_path, monkeypatch):
    whole = build(corpora[0], tmp_path / "undisturbed")
    encode, calls = memory_file.encode_passages, []

    def counted(*arguments):
        calls.append(arguments[2][0])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(*arguments)

    monkeypatch.setattr(memory_file, "encode_passages", counted)
    with pytest.raises(KeyboardInterrupt):
        build(corpora[0], tmp_path / "memory")
    assert not (tmp_path / "memory").exists()
    # a shard copied over another, with its record, is not taken for the other
    part = tmp_path / "memory.part"
    for name in [*(f"{name}-%05d.npy" for name in ARRAYS), "shard-%05d.json"]:
        (part / (name % 1)).write_bytes((part / (name % 0)).read_bytes())
    assert build(corpora[0], tmp_path / "memory") == whole
    assert calls[:4] == [0, 16, 32, 16] and len(calls) == len(set(calls)) + 2

@pytest.mark.parametrize("links", [True, False])
def test_full_shards_of_a_grown_corpus_are_taken_over(corpora, tmp_path, monkeypatch, links):
    whole, half = corpora
    expected = build(whole, tmp_path / "undisturbed")
    build(half, tmp_path / "old")
    (tmp_path / "old" / "keys-00001.npy").write_bytes(b"damaged")       # computed anew
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: os.open("/nowhere", 0))
    encode, calls = memory_file.encode_passages, []
    monkeypatch.setattr(memory_file, "encode_passages",
                        lambda *arguments: calls.append(arguments[2][0]) or encode(*arguments))
    assert build(whole, tmp_path / "memory", tmp_path / "old") == expected
    full = len(half.article) // 16
    assert calls == [16, *range(16 * full, len(whole.article), 16)]
    same = os.path.samefile(tmp_path / "old/keys-00000.npy", tmp_path / "memory/keys-00000.npy")
    assert same == links
    calls.clear()
    build(whole, tmp_path / "other", tmp_path / "old", seed=1)          # another encoder's: none
    assert calls == list(range(0, len(whole.article), 16))

@pytest.mark.parametrize("damage, message", [
    ("missing", "No such file"), ("cut", "checksum"), ("bit", "checksum"), ("copied", "checksum"),
    ("manifest", "checksum differs"), ("no manifest", "No such file"), ("format", "format 2")])
def test_what_is_not_whole_is_refused_in_one_sentence(corpora, tmp_path, damage, message):
    folder = tmp_path / "memory"
    build(corpora[1], folder)
    file, other = folder / "values-00000.npy", folder / "values-00001.npy"
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
        with pytest.raises(UserError, match="values-00000.npy"):
            read_manifest(folder)
    elif damage == "copied":
        file.write_bytes(other.read_bytes())
    elif damage == "cut":
        file.write_bytes(content[:-5])
    elif damage == "bit":
        file.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    elif damage == "format":
        data.write_json(folder / "manifest.json", {"format": 2})
    elif damage == "manifest":
        text = (folder / "manifest.json").read_text()
        (folder / "manifest.json").write_text(text.replace('"first": 16', '"first": 17'))
    else:
        (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match=message) as error:
        load_memory(folder)
    assert "\n" not in str(error.value) and "--stage memory" in str(error.value)

def test_numbers_that_are_not_finite_are_refused_with_passage_and_remedy(corpora, tmp_path):
    for weight, dtype, remedy in ((1e6, np.float16, "memory_dtype=float32"),
                                  (np.nan, np.float32, "lower --lr")):
        encoder = new_encoder()
        encoder.value.linear.bias.data[2] = weight
        with pytest.raises(UserError, match=f"passage 0 .*values is not finite.*{remedy}"):
            build_memory(encoder, corpora[1], tmp_path / "memory", CPU, dtype, {})
        assert not (tmp_path / "memory").exists()

def one_of_two(rank, folder, corpus_folder):
    torch.set_num_threads(1)
    memory_file.PASSAGES_PER_SHARD = 16
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    build(data.Corpus(corpus_folder), f"{folder}/by_two")
    dist.destroy_process_group()

@pytest.mark.slow
def test_two_processes_write_the_files_of_one(corpora, tmp_path):
    mp.spawn(one_of_two, (str(tmp_path), corpora[1].folder), 2)
    by_two = {path.name: path.read_bytes() for path in (tmp_path / "by_two").iterdir()}
    assert by_two == build(corpora[1], tmp_path / "by_one")

def test_a_changed_memory_shares_what_stayed_and_searches_what_changed():
    g = torch.Generator().manual_seed(0)
    table = MentionMemory(torch.randn(60, 4, generator=g), torch.randn(60, 6, generator=g),
                          torch.arange(60) % 7, torch.arange(60) // 3, torch.arange(60)).bucketed(99)
    query, passage = torch.randn(5, 4, generator=g), torch.arange(5)
    kept = table.select(torch.arange(60) >= 30)
    exact = kept.bucketed(None)
    assert exact.index is None and kept.index is not table.index
    assert torch.equal(kept.attend(query, passage, 9, 9).ids, exact.attend(query, passage, 9, 9).ids)
    assert table.shuffled().index is table.index and len(table.emptied()) == 0
