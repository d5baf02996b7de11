"""Checks that a memory is built, saved and loaded.   python -m pytest tests/test_memory.py"""
import os
import resource
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
from memory import ARRAYS, build_memory, encode_passages, load_memory
from tome import TOME, BatchTOME

CPU = torch.device("cpu")
TINY = Config(vocab_size=500, hidden=8, n_heads=2, intermediate=12, n_initial=1, n_upper=1,
              max_positions=128, dropout=0.0, key_dim=4, value_dim=6, coref_dim=4, k=8, k_shard=8,
              precision="float32")      # in bfloat16, rounding depends on the batch width

def new_encoder(seed=0):
    torch.manual_seed(seed)
    return BatchTOME(TOME(TINY))

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
    build_memory(new_encoder(seed), corpus, folder, CPU, dtype, {"corpus": 1, "batch-tome": 2}, old)
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}

def test_a_built_memory_contains_the_encoders_rows_and_its_meta_describes_it(corpora, tmp_path):
    corpus, encoder = corpora[0], new_encoder()
    build(corpus, tmp_path / "memory")
    rows = encode_passages(encoder, corpus, np.arange(len(corpus.article)), CPU)
    table, made_from = load_memory(tmp_path / "memory")
    for name in ARRAYS:
        np.testing.assert_allclose(getattr(table, name).numpy(), rows[name], atol=1e-6)
    manifest = data.open_folder(tmp_path / "memory", "memory")
    assert made_from == {"corpus": 1, "batch-tome": 2} and manifest["n"] == len(table)
    assert (manifest["n_passages"], manifest["n_shards"]) == (len(corpus.article), -(-len(corpus.article) // 16))
    assert not list(tmp_path.glob("*.part"))

def test_a_memory_with_more_shards_than_files_may_be_open_is_loaded(corpora, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_file, "PASSAGES_PER_SHARD", 2)
    build(corpora[1], tmp_path / "memory")
    keys = [np.load(path) for path in sorted((tmp_path / "memory").glob("keys-*.npy"))]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_open = max(map(int, os.listdir("/proc/self/fd")))
    assert len(keys) > 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (n_open + 10, hard))
    try:
        table, _ = load_memory(tmp_path / "memory")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    np.testing.assert_array_equal(table.keys.numpy(), np.concatenate(keys))

def test_an_interrupted_build_continues_with_the_first_missing_shard(corpora, tmp_path, monkeypatch):
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
    next(tmp_path.glob("memory.part/keys-00001.npy")).unlink()        # a shard with a missing file
    assert build(corpora[0], tmp_path / "memory") == whole
    assert calls[:5] == [0, 16, 32, 16, 32] and len(calls) == len(set(calls)) + 2

@pytest.mark.parametrize("links", [True, False])
def test_full_shards_are_reused_after_text_was_appended(corpora, tmp_path, monkeypatch, links):
    whole, half = corpora
    expected = build(whole, tmp_path / "undisturbed")
    build(half, tmp_path / "old")
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: os.open("/nowhere", 0))
    encode, calls = encode_passages, []
    monkeypatch.setattr(memory_file, "encode_passages", lambda *a: calls.append(a[2][0]) or encode(*a))
    assert build(whole, tmp_path / "memory", tmp_path / "old") == expected
    assert calls == list(range(len(half.article) // 16 * 16, len(whole.article), 16))
    assert os.path.samefile(tmp_path / "old/keys-00000.npy", tmp_path / "memory/keys-00000.npy") == links

def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)

@pytest.mark.parametrize("name, damage, message", [
    ("values-00000.npy", Path.unlink, "values-00000.npy"), ("meta.json", Path.unlink, "meta.json"),
    ("values-00000.npy", flip_a_bit, "checksum of values-00000.npy")])
def test_a_damaged_memory_is_refused_in_one_sentence(corpora, tmp_path, name, damage, message):
    build(corpora[1], tmp_path / "memory")
    damage(tmp_path / "memory" / name)
    with pytest.raises(UserError, match=message):
        load_memory(tmp_path / "memory")

def test_values_that_are_not_finite_are_refused_with_a_remedy(corpora, tmp_path):
    for weight, dtype in ((1e6, np.float16), (np.nan, np.float32)):
        encoder = new_encoder()
        encoder.value.linear.bias.data[2] = weight
        with pytest.raises(UserError, match="not finite.*lower --lr.*--memory-dtype float32"):
            build_memory(encoder, corpora[1], tmp_path / "memory", CPU, dtype, {})
        assert not (tmp_path / "memory").exists()

def one_of_two(rank, folder, corpus_folder):
    torch.set_num_threads(1)
    memory_file.PASSAGES_PER_SHARD = 16
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    build(data.Corpus(corpus_folder), f"{folder}/by_two")
    dist.destroy_process_group()

@pytest.mark.slow
def test_two_processes_write_the_same_files_as_one(corpora, tmp_path):
    mp.spawn(one_of_two, (str(tmp_path), corpora[1].folder), 2)
    by_two = {path.name: path.read_bytes() for path in (tmp_path / "by_two").iterdir()}
    assert by_two == build(corpora[1], tmp_path / "by_one")
