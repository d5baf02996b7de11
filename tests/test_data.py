"""data.py: corpus files, tokens and markers, masking, batches, clusters, the toy world.

Every expected value comes from a plain loop in this file.   pytest tests/test_data.py
"""
import bz2
import gzip
import io
import json
import lzma
import os
import re
import signal
import subprocess
import sys
import zlib
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data
from data import CLS, E_END, E_START, MASK, PAD, SEP, SPECIAL, UNK, UserError, Mention

ROOT = Path(data.__file__).resolve().parent
WORDS = "ash birch cedar elm fir hazel larch maple oak pine rowan spruce willow yew".split()

def line(text, *mentions, title="T", **others):
    return {"title": title, "text": text,
            "mentions": [dict(start=s, end=e, entity=n) for s, e, n in mentions], **others}

def write(path, records):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), "utf-8")
    return path

def build(tmp_path, records, passage_length=16, max_length=64, name="c", tokenizer=None, **options):
    path = write(tmp_path / f"{name}.jsonl", records)
    tokenizer = tokenizer or data.train_tokenizer((t.text for t in data.read_corpus(path)), 5000)
    return data.Corpus.build(path, tmp_path / name, tokenizer, passage_length, max_length, **options), tokenizer

def random_texts(seed, n, longest=60, n_mentions=12, n_articles=20):
    """Texts of random words with random mentions, which can overlap and nest. Some titles are entities."""
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(n):
        words = rng.choice(WORDS, rng.integers(1, longest)).tolist()
        starts = np.cumsum([0] + [len(w) + 1 for w in words])
        mentions = []
        for _ in range(rng.integers(0, n_mentions)):
            a = int(rng.integers(len(words)))
            b = min(a + int(rng.integers(1, 5)), len(words))
            entity = None if rng.random() < .2 else f"E{rng.integers(15)}"
            mentions.append((int(starts[a]), int(starts[b]) - 1, entity))
        texts.append(line(" ".join(words), *mentions, title=f"E{rng.integers(n_articles)}"))
    return texts

@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return build(tmp_path_factory.mktemp("random"), random_texts(0, 300, n_articles=60), unseen=.1)[0]

@pytest.fixture(scope="module")
def toy():
    return data.toy_world(seed=3)

# ---------------------------------------------------------------- files

GOOD = line("Rome is old", (0, 4, "Rome"))
BAD_LINES = {
    "{": "not JSON", '{"title": "a"} {}': "not JSON", "7": "the record: must be a JSON object", "null": "must be a JSON object",
    "[1]": "must be a JSON object", "<html>": "write one object per line",
    '{"a":' * 100_000: "not JSON", "[" * 100_000: "not JSON",
    '{"text": "a", "mentions": []}': "title: must be a string, but is missing (the record has text, mentions)",
    '{"title": 3, "text": "a", "mentions": []}': "title: must be a string, not 3",
    '{"title": "a", "mentions": []}': "text: must be a string, but is missing",
    '{"title": "a", "text": null, "mentions": []}': "text: must be a string, not None",
    '{"title": "a", "text": "b", "mentions": {}}': "mentions: must be a list, not {}",
    '{"title": "a", "text": "b", "mentions": [1]}': "mentions[0]: must be a JSON object",
    '{"title": "a", "text": "\\ud800", "mentions": []}': "surrogate",
    '{"title": "a", "text": "b", "mentions": [], "split": "dev"}':
        "split: must be 'train' or 'held_out' or null, not 'dev'",
    '{"title": "a", "text": "b", "mention": []}':
        "mentions: must be a list, but is missing (the record has title, text, mention)",
    '{"title": "a", "text": "b"}': "mentions: must be a list, but is missing",
}
BAD_MENTIONS = {
    '"end": 1, "entity": "x"': ".start: must be a whole number, but is missing",
    '"start": 0, "entity": "x"': ".end: must be a whole number",
    '"start": true, "end": 1, "entity": "x"': ".start: must be a whole number, not True",
    '"start": 0.0, "end": 1, "entity": "x"': ".start: must be a whole number, not 0.0",
    '"start": -1, "end": 1, "entity": "x"': "start -1 and end 1 must satisfy 0 <= start < end <= 4",
    '"start": 0, "end": 5, "entity": "x"': "start 0 and end 5 must satisfy 0 <= start < end <= 4",
    '"start": 2, "end": 2, "entity": "x"': "start 2 and end 2 must satisfy 0 <= start < end <= 4",
    '"start": 2, "end": 1, "entity": "x"': "start 2 and end 1 must satisfy 0 <= start < end <= 4",
    '"start": 0, "end": 1, "entity": 5': ".entity: must be a string or null, not 5",
    '"start": 0, "end": 1, "entity": ""': ".entity: missing or empty",
    '"start": 0, "end": 1, "entity": " "': ".entity: missing or empty",
    '"start": 0, "end": 1, "entitty": "x"': ".entity: missing or empty",
}
BAD_LINES |= {'{"title": "a", "text": "four", "mentions": [{%s}]}' % mention: what
              for mention, what in BAD_MENTIONS.items()}

@pytest.mark.parametrize("bad", BAD_LINES, ids=lambda bad: bad[:70])
def test_a_bad_line_is_reported_with_file_and_line(tmp_path, bad):
    path = write(tmp_path / "c.jsonl", [GOOD, "", bad, GOOD])
    with pytest.raises(UserError) as e:
        list(data.read_corpus(path))
    assert str(e.value).startswith(f"{path}:3: ") and "\n" not in str(e.value)
    assert BAD_LINES[bad] in str(e.value)
    assert ("mentions[0]" in str(e.value)) == ("mentions[0]" in BAD_LINES[bad] or "four" in bad)

def test_an_unreadable_file_gets_one_sentence_that_says_what_to_do(tmp_path):
    good = json.dumps(GOOD).encode() + b"\n"
    cut, other = "cannot be read to its end", ":1: not JSON in UTF-8.* one object per line, plain or gzipped"
    os.mkfifo(tmp_path / "pipe")
    for name, content, what in (
            ("latin.jsonl", good + b"\xe9\n", ":2: not JSON in UTF-8"),
            ("half.jsonl", good + b'{"title": "\xed\xa0\x80"}\n', ":2: not JSON in UTF-8.*surrogates"),
            ("cut.jsonl.gz", gzip.compress(good * 99)[:-12], cut), ("cut.jsonl", gzip.compress(good * 99)[:-12], cut),
            ("c.zip", b"PK\3\4" + good, other), ("c.jsonl", lzma.compress(good), other),
            ("c.bz2", bz2.compress(good), other), ("c.7z", b"7z\xbc\xaf\x27\x1c", other),
            (".", None, "read twice, not a folder or a pipe"), ("pipe", None, "not a folder or a pipe")):
        if content:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=what):
            list(data.read_corpus(tmp_path / name))

def test_plain_and_gzipped_files_of_any_name_give_the_same_texts_without_unknown_fields(tmp_path):
    records = [line("Rome is old", (0, 4, "Rome"), (8, 11, None), para=3, split="held_out"), GOOD]
    plain = write(tmp_path / "c.jsonl", records).read_bytes()
    marked = b"\xef\xbb\xbf" + plain                            # a byte-order mark is skipped
    for name, content in {"c.jsonl": plain, "c.jsonl.gz": gzip.compress(plain), "bom.jsonl": marked,
                          "named.jsonl": gzip.compress(plain), "not.gz": plain,
                          "both.gz": gzip.compress(marked)}.items():
        (tmp_path / name).write_bytes(content)
        assert list(data.read_corpus(tmp_path / name)) == [
            ("T", "Rome is old", [(0, 4, "Rome"), (8, 11, None)], "held_out"),
            ("T", "Rome is old", [(0, 4, "Rome")], None)]

@pytest.fixture
def run(capsys):
    def run(*arguments):
        returncode = data.main([str(argument) for argument in arguments])
        stdout, stderr = capsys.readouterr()
        return SimpleNamespace(returncode=returncode, stdout=stdout, stderr=stderr)
    return run

def test_an_input_file_is_never_overwritten(tmp_path, run):
    names = "corpus.jsonl", "claims.jsonl", "new.jsonl.tmp"     # write_file's temporary name for new.jsonl
    corpus, claims, temporary = inputs = [write(tmp_path / name, [GOOD]) for name in names]
    (tmp_path / "other.jsonl").symlink_to(claims)
    before = [path.read_bytes() for path in inputs]
    for command, out in ((["task", "fever", claims, "--corpus", corpus], claims), (["kilt", claims], claims),
                         (["task", "fever", claims, "--corpus", corpus], tmp_path / "other.jsonl"),
                         (["task", "entityquestions", claims, "--corpus", corpus], corpus),
                         (["task", "fever", temporary], tmp_path / "new.jsonl")):
        done = run(*command, "--out", out)
        assert done.returncode == 1 and "overwrite an input file" in done.stderr
        assert [path.read_bytes() for path in inputs] == before

def test_check_counts_every_mention_or_shows_ten_errors(tmp_path, run, monkeypatch):
    mentions = (0, 4, "Rome"), (4, 5, "X"), (6, 8, None)
    done = run("check", write(tmp_path / "good.jsonl", [line("Rome  is old", *mentions)]))
    counts = dict(re.split("  +|: ", row)[:2] for row in done.stdout.splitlines()[:12])
    assert done.returncode == 0
    assert counts == {"texts": "1", "articles": "1", "passages": "1", "tokens": "3",
                      "mentions read": "3", "mentions": "2", "linked": "1", "entities": "2",
                      "texts without a token": "0", "mentions dropped, without a token": "1",
                      "passages held out": "0", "mentions to evaluate on": "0"}
    bad = write(tmp_path / "bad.jsonl", [GOOD, *["{"] * 12])
    done = run("check", bad)
    assert done.returncode == 1 and not done.stdout
    rows = done.stderr.removeprefix("data.py: ").splitlines()
    assert [row.split(" ")[0] for row in rows] == [f"{bad}:{n}:" for n in range(2, 12)]
    for path in (tmp_path / "none.jsonl", write(tmp_path / "empty.jsonl", []), tmp_path):
        done = run("check", path)
        assert done.returncode == 1 and done.stderr.count("\n") == 1
        assert done.stderr.startswith(f"data.py: {path}")
    with monkeypatch.context() as patch:                        # Ctrl-C
        patch.setattr(data.Corpus, "build", lambda *_, **__: signal.raise_signal(signal.SIGINT))
        done = run("check", tmp_path / "good.jsonl")
    assert done.returncode == 130 and done.stderr == "data.py: stopped; no file was left half-written\n"

def test_check_shows_mentions_in_context_as_written_and_warns_of_nothing_to_evaluate(tmp_path, run, monkeypatch):
    records = [line(f"In {i} ROME was o\x1bld", (5, 9, "Rome"), title=f"T{i}", split="train") for i in range(8)]
    done = run("check", write(tmp_path / "a.jsonl", records))
    assert "nothing to evaluate" in done.stdout and done.stdout.count("-> Rome") == 8
    assert "T3: In 3 [ROME] was o\\x1bld -> Rome" in done.stdout
    held_out = [{**record, "split": "held_out"} for record in records[:2]]
    done = run("check", write(tmp_path / "b.jsonl", held_out + records[2:]))
    assert "There is nothing" not in done.stdout
    assert re.search("passages held out +2\n", done.stdout)
    assert re.search("mentions to evaluate on +2\n", done.stdout)
    done = run("check", write(tmp_path / "c.jsonl", [{**record, "split": "held_out"} for record in records]))
    assert "nothing to train on" in done.stdout
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))     # not UTF-8
    assert run("check", write(tmp_path / "c.jsonl", [line("Zürich", (0, 6, "Zürich"))])).returncode == 0

def test_check_applies_the_limits_of_the_preset(tmp_path, run):
    words = " ".join(f"w{i}" for i in range(100))
    path = write(tmp_path / "c.jsonl", [line(words, (0, len(words), "All"), (0, 2, "First"))])
    for preset, dropped in {"toy": True, "mini": True, "base": False}.items():
        said = run("check", path, "--preset", preset).stdout
        assert bool(re.search("mentions dropped, longer than a passage +1\n", said)) == dropped

def test_an_impossible_number_of_workers_is_refused(tmp_path, run):
    path = write(tmp_path / "c.jsonl", [GOOD])
    for workers in ("0", "-1", "two"):
        with pytest.raises(SystemExit):
            run("wiki", path, "--out", tmp_path / "out", "--workers", workers)

def test_a_corpus_without_text_or_linked_mention_and_a_wrong_folder_are_refused(tmp_path):
    (tmp_path / "full").mkdir()
    letter = write(tmp_path / "full" / "letter.txt", ["dear"])
    for name, records, what, tokenizer in (
            ("a", [], "no text", None), ("b", [line("  ")], "no text", None),
            ("c", [line("Rome", (0, 4, None))], "no linked mention", None),
            ("full", [GOOD], "not empty", None),
            ("bad", [GOOD, "{"], "bad.jsonl:2", data.train_tokenizer(["Rome"], 99))):
        with pytest.raises((UserError, OSError), match=what):
            build(tmp_path, records, name=name, tokenizer=tokenizer)
    assert letter.read_text() == "dear\n" and not list(tmp_path.glob("*.part"))
    build(tmp_path, [GOOD, GOOD], name="again")
    with open(tmp_path / "again" / "tokens.bin", "ab") as file:
        file.write(b"1234")
    for folder in ("again", "nowhere"):
        with pytest.raises(UserError, match="missing or damaged: not a complete tokenised corpus"):
            data.Corpus(tmp_path / folder)

def test_appended_text_is_held_out_and_can_replace_the_old_passages_of_its_titles(tmp_path):
    first, more = random_texts(7, 30), random_texts(8, 20)
    old, tokenizer = build(tmp_path, first, name="old")
    new, _ = build(tmp_path, more, name="new", tokenizer=tokenizer, old=old, made="here")
    whole, _ = build(tmp_path, first + more, name="whole", tokenizer=tokenizer)
    for name in data.Corpus.ARRAYS.keys() - {"held_out"}:
        assert (getattr(new, name) == getattr(whole, name)).all(), name
    assert (new.titles, new.entity_names) == (whole.titles, whole.entity_names)
    n, known = len(old.article), len(old.entity_names)
    assert n < len(new.article) and not new.replaced.any()
    assert (new.held_out[:n] == old.held_out).all() and new.held_out[n:].all()
    assert new.meta["made"] == "here"
    assert (new.entity_count[:known] == old.entity_count).all() and not new.entity_count[known:].any()
    for key in ("texts", "mentions", "linked", "tokens", "articles", "entities"):
        assert new.meta["counts"][key] == whole.meta["counts"][key], key
    more = [first[3] | {"text": first[3]["text"] + "!"}, first[5] | {"title": "Elsewhere"}]
    new, _ = build(tmp_path, more, name="replacing", tokenizer=tokenizer, old=old, replace=True)
    expected = [i < n and new.titles[article] == first[3]["title"] for i, article in enumerate(new.article)]
    assert new.replaced.tolist() == expected and any(expected)

@pytest.mark.parametrize("links", [True, False])
def test_a_file_is_linked_or_copied_over_what_a_killed_command_left(tmp_path, monkeypatch, links):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("whole")
    target.write_text("wh")
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: os.stat(tmp_path / "nowhere"))
    for _ in range(2):                      # the second time, over a complete target
        data.link(source, target)
        assert target.read_text() == source.read_text() == "whole"
        assert target.samefile(source) == links

def test_a_missing_source_or_an_unwritable_output_is_named_in_one_sentence(tmp_path, run):
    claims = write(tmp_path / "claims.jsonl", [{"claim": "Rome", "label": "SUPPORTS"}])
    none = tmp_path / "none"
    for command, named, why in ((["kilt", none, "--out", tmp_path / "out"], none, "No such file"),
                                (["kilt", none, "--out", none / "out"], none / "out", "No such file"),
                                (["task", "fever", claims, "--out", tmp_path], tmp_path, "Is a directory")):
        done = run(*command)
        assert done.returncode == 1 and done.stderr.startswith(f"data.py: {named}")
        assert why in done.stderr and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [claims]

def test_control_characters_are_printed_as_escapes():
    assert data.printable("a\x1b[31m\x07\r\u202e\u2066\x9b\ud800") == r"a\x1b[31m\x07\r\u202e\u2066\x9b\ud800"
    assert data.printable("Zürich\t東京\n😀…") == "Zürich\t東京\n😀…"

# ---------------------------------------------------------------- tokenizer

def test_a_small_corpus_keeps_each_word_whole_and_spells_new_ones():
    tokenizer = data.train_tokenizer(["Port Ellin lies in Maland."], 500)
    assert tokenizer.encode("port Maland.", add_special_tokens=False).tokens == ["port", "maland", "."]
    assert tokenizer.encode("mal", add_special_tokens=False).tokens == ["m", "##a", "##l"]
    signs = data.train_tokenizer(["राम गया 20€ 5"], 500)               # a vowel sign, a symbol inside a word
    assert signs.encode("गाम 5€", add_special_tokens=False).tokens == ["ग", "##ा", "##म", "5", "##€"]
    assert [tokenizer.id_to_token(i) for i in range(7)] == SPECIAL
    assert MASK not in tokenizer.encode("[MASK] [E_start] [SEP]", add_special_tokens=False).tokens
    many = " ".join(one + other for one in WORDS for other in WORDS)
    assert data.train_tokenizer([many], 200).get_vocab_size() <= 200                # no room for every word
    han = [chr(0x4e00 + n) for n in range(1500)]                                    # each is a word
    several = data.train_tokenizer([" ".join(han), many], 1800)                     # no room for every word of `many`
    assert several.get_vocab_size() <= 1800 and UNK not in several.encode("".join(han)).tokens
    assert data.train_tokenizer(["x" * 300_000, "Rome"], 500).get_vocab().keys() >= {"rome"}       # quickly

SCRIPTS = {"greek": (0x3b1, 24), "russian": (0x430, 32), "arabic": (0x627, 30), "hindi": (0x905, 50),
           "chinese": (0x4e00, 900), "korean": (0xac00, 700), "latin": (0x61, 20)}
TRAIN = f"""
import json, numpy, data
for start, n in {[*SCRIPTS.values()]}:
    rng = numpy.random.default_rng(0)
    texts = ["".join(map(chr, start + rng.integers(0, n, 7))) + "\u00b7" for _ in range(3000)]
    print(json.dumps(sorted(data.train_tokenizer(texts, 500).get_vocab().items())))"""

def test_every_process_makes_the_same_vocabulary_from_the_same_texts():
    """The library's own trainer numbers its merges in a different order each time."""
    made = [subprocess.run([sys.executable, "-c", TRAIN], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                           check=True).stdout.splitlines() for _ in range(3)]
    for script, first, *others in zip(SCRIPTS, *made, strict=True):
        assert others == [first, first] and len(json.loads(first)) <= 500, script

def test_a_bert_vocabulary_gives_two_unused_entries_to_the_markers(tmp_path):
    vocab = [PAD, "[unused0]", "[unused1]", "[unused2]", UNK, CLS, SEP, MASK, "rome", "##s"]
    tokenizer = data.load_tokenizer(write(tmp_path / "vocab.txt", vocab))
    assert tokenizer.get_vocab_size() == len(vocab)
    assert [tokenizer.token_to_id(t) for t in (E_START, E_END, "rome")] == [1, 2, 8]
    number = tokenizer.get_vocab()
    again = data.load_tokenizer(write(tmp_path / "again.txt", sorted(number, key=number.get)))
    assert again.encode("Romes", add_special_tokens=False).ids == [8, 9]
    few, none = [PAD, UNK, CLS, SEP, MASK, "[unused0]"], ["[unused0]", "[unused1]", "rome"]
    for bad, what in ((few, "unusedN"), (none, "lacks")):
        with pytest.raises(UserError, match=what):
            data.load_tokenizer(write(tmp_path / "bad.txt", bad))

# ---------------------------------------------------------------- passages

SHARES = "shares a token with another mention"

def pieces_of(text, mentions, passage_length=16, max_length=64):
    tokenizer = data.train_tokenizer([text], 5000)
    dropped = Counter()
    pieces = data.encode_text(tokenizer.encode(text, add_special_tokens=False), mentions, passage_length,
                              max_length, data.special_ids(tokenizer), dropped)
    return [" ".join(tokenizer.id_to_token(i) for i in p.tokens) for p in pieces], pieces, dropped

@pytest.mark.parametrize("mentions, expected, kept", [
    (((0, 1), (2, 3)), "( a ) ( b ) c d e", [0, 1]),                    # adjacent
    (((8, 9), (0, 1)), "( a ) b c d ( e )", [1, 0]),                    # not in text order; the first and last words
    (((0, 5), (2, 3)), "( a b c ) d e", [0]),                           # nested: the outer one
    (((0, 1), (0, 3), (0, 5)), "( a b c ) d e", [2]),                   # same start: the longest
    (((4, 5), (2, 5), (0, 5)), "( a b c ) d e", [2]),                   # same end: the longest
    (((2, 5), (2, 5)), "a ( b c ) d e", [0]),                           # the same span twice
    (((2, 7), (0, 5)), "( a b c ) d e", [1]),                           # crossing: the one that starts first
    (((0, 3), (2, 7), (6, 9)), "( a b ) c ( d e )", [0, 2]),            # overlaps only a dropped mention: kept
    (((0, 5, None), (2, 3), (4, 9, None)), "a ( b ) ( c d e )", [1, 2]),        # linked mention inside an unlinked one
])
def test_markers_surround_their_mention_and_a_mention_that_overlaps_an_earlier_one_is_dropped(mentions, expected, kept):
    texts, pieces, dropped = pieces_of("a b c d e", [Mention(a, b, *(entity or "x")) for a, b, *entity in mentions])
    assert texts == [f"[CLS] {expected} [SEP]".replace("(", E_START).replace(")", E_END)]
    n_dropped = len(mentions) - len(kept)
    assert dropped == ({SHARES: n_dropped} if n_dropped else {})
    assert pieces[0].index == kept

def test_a_mention_covers_the_words_it_touches_and_needs_one():
    texts, pieces, dropped = pieces_of("Österreich, non-stop  é", [
        Mention(0, 3, "x"), Mention(20, 22, "space"), Mention(16, 23, "y")], 3, 64)
    assert texts == ["[CLS] [E_start] osterreich [E_end] , non [SEP]",
                     "[CLS] - [E_start] stop e [E_end] [SEP]"]
    assert dropped == {"without a token": 1}

def naive_keep(spans, linked, passage_length, max_length):
    """({reason: number of mentions dropped}, the mentions kept). Tries linked mentions first, then earlier starts, then
    longer spans. Keeps a mention if it fits into a passage and shares no token with a mention already kept."""
    dropped, left = Counter(), []
    for i in sorted(range(len(spans)), key=lambda i: (not linked[i], spans[i][0], -spans[i][1])):
        a, b = spans[i]
        if b - a > passage_length or b - a + 4 > max_length:
            dropped["longer than a passage"] += 1
        elif any(a < spans[j][1] and spans[j][0] < b for j in left):
            dropped[SHARES] += 1
        else:
            left.append(i)
    return dropped, sorted(left, key=lambda i: spans[i])

def naive_cut(n, spans, passage_length, max_length):
    """(start, end) of each passage, which ends as late as possible without cutting a mention. spans: token ranges."""
    cuts, start = [], 0
    while start < n:
        fits = [end for end in range(start + 1, n + 1)
                if not any(a < end < b for a, b in spans) and end - start <= passage_length
                and end - start + 2 * sum(start <= a and b <= end for a, b in spans) + 2 <= max_length]
        cuts.append((start, fits[-1]))
        start = fits[-1]
    return cuts

@pytest.mark.parametrize("lengths", [(8, 20), (8, 14), (12, 11)])       # passage_length, max_length
def test_passages_are_cut_and_dropped_mentions_are_counted_as_by_a_naive_loop(lengths):
    rng, n_overlap, n_long = np.random.default_rng(1), 0, 0
    for _ in range(200):
        n = int(rng.integers(1, 40))
        text = " ".join(f"w{i}" for i in range(n))
        at = np.cumsum([0] + [len(f"w{i}") + 1 for i in range(n)])
        firsts = rng.integers(0, n, rng.integers(0, 20)).tolist()
        longest = rng.choice([1, 10])
        spans = [(a, min(a + int(rng.integers(1, longest + 1)), n)) for a in firsts]
        linked = rng.random(len(spans)) < .6
        mentions = [Mention(int(at[a]), int(at[b]) - 1, "x" if known else None) for (a, b), known in zip(spans, linked)]
        texts, pieces, dropped = pieces_of(text, mentions, *lengths)
        expected, left = naive_keep(spans, linked, *lengths)
        assert dropped == expected and [i for p in pieces for i in p.index] == left
        n_overlap += dropped[SHARES]
        n_long += dropped["longer than a passage"]
        words = [[w for w in t.split() if w not in SPECIAL] for t in texts]
        assert sum(words, []) == text.split()                           # no word is lost
        assert all(len(w) <= lengths[0] and len(t.split()) <= lengths[1] for w, t in zip(words, texts))
        for t, piece in zip(texts, pieces):
            at_markers = ([i for i, token in enumerate(t.split()) if token == marker] for marker in (E_START, E_END))
            for start, end, i in zip(*at_markers, piece.index):
                assert t.split()[start + 1:end] == text.split()[spans[i][0]:spans[i][1]]
        cuts = naive_cut(n, [spans[i] for i in left], *lengths)
        assert [len(w) for w in words] == [b - a for a, b in cuts]
    assert n_overlap > 200 and n_long > 50

def test_a_corpus_holds_what_plain_loops_find_and_holds_out_by_split_title_or_unseen_entity(tmp_path):
    records = random_texts(5, 80) + [line("Zürich – über alles", (0, 6, "Zürich"), (9, 13, None), title="Ü")]
    for i, split in enumerate((None, "train", "held_out") * 27):
        records[i]["split"] = split
    corpus, tokenizer = build(tmp_path, records, unseen=.1)
    unseen = {name for name in corpus.entity_names if zlib.crc32(name.encode()) < .1 * 2 ** 32} - {""}
    words, mentions, counted, reasons = defaultdict(list), Counter(), Counter(), set()
    for p in range(len(corpus.article)):
        title, (a, b) = corpus.titles[corpus.article[p]], corpus.text_at[p]
        text = corpus.text[a:b].tobytes().decode()
        ids = corpus.tokens[corpus.passage_start[p]:corpus.passage_start[p + 1]]
        tokens = [tokenizer.id_to_token(i) for i in ids.tolist()]
        assert tokens[0] == CLS and tokens[-1] == SEP and UNK not in tokens
        words[title, text, a] += [t for t in tokens if t not in SPECIAL]
        of_title = "held_out" if zlib.crc32(title.encode()) % 20 == 0 else "train"
        split = records[len(words) - 1]["split"] or of_title
        names_unseen = not unseen.isdisjoint(corpus.entity_names[e] for e in corpus.passage_entities(p))
        assert corpus.held_out[p] == (split == "held_out" or names_unseen)
        reasons.add((split, names_unseen))
        for m in range(corpus.mention_first[p], corpus.mention_first[p + 1]):
            a, b = corpus.mention_char[m]
            start, end = spans_of(corpus, p)[m - corpus.mention_first[p]]
            entity = corpus.entity_names[corpus.mention_entity[m]]
            assert tokens[start + 1:end] == tokenizer.encode(text[a:b], add_special_tokens=False).tokens
            shown = corpus.show_mention(m)
            assert f"[{text[a:b]}]" in shown and shown.startswith(f"{title}: ")
            assert set(re.findall(r"\S+", re.sub(r"[][…]", " ", corpus.show_mention(m, 20)))) <= \
                set(re.findall(r"\S+", re.sub(r"[][…]", " ", f"{title}: {text[:a]} {text[a:b]} {text[b:]}")))
            mentions[title, text[a:b], entity] += 1
            counted[entity] += bool(entity) and not corpus.held_out[p]
    expected, n_read = Counter(), 0
    for r in records:
        spans = [(m["start"], m["end"]) for m in r["mentions"]]         # no mention is longer than a passage
        n_read += len(spans)
        expected.update((r["title"], r["text"][slice(*spans[i])], r["mentions"][i]["entity"] or "")
                        for i in naive_keep(spans, [m["entity"] for m in r["mentions"]], 999, 999)[1])
    assert mentions == expected and len(reasons) == 4
    assert corpus.meta["dropped"] == {SHARES: n_read - expected.total()}
    assert [(title, text) for title, text, _ in words] == [(r["title"], r["text"]) for r in records]
    for (_, text, _), found in words.items():
        assert found == tokenizer.encode(text, add_special_tokens=False).tokens
    assert corpus.entity_count.tolist() == [counted[e] for e in corpus.entity_names]
    for key, n in dict(texts=81, mentions_read=n_read, mentions=len(corpus.mention_entity),
                       linked=np.count_nonzero(corpus.mention_entity), passages=len(corpus.article)).items():
        assert corpus.meta["counts"][key] == n

# ---------------------------------------------------------------- masking and batches

def spans_of(corpus, p):
    """(start, end) of each mention in a passage: its markers' positions."""
    ids = corpus.tokens[corpus.passage_start[p]:corpus.passage_start[p + 1]].tolist()
    return list(zip(*([i for i, t in enumerate(ids) if t == corpus.special[marker]] for marker in (E_START, E_END))))

def naive_rows(corpus, passages):
    """The token ids of each passage, and the mentions of each passage as (start, end, entity, number)."""
    rows = [corpus.tokens[corpus.passage_start[p]:corpus.passage_start[p + 1]].tolist() for p in passages]
    return rows, [[(*span, corpus.mention_entity[m], m)
                   for m, span in enumerate(spans_of(corpus, p), corpus.mention_first[p])] for p in passages]

def owners(batch):
    """For each token to predict, the index of the mention that contains it, or -1."""
    mentions = list(zip(batch.row.tolist(), batch.start.tolist(), batch.end.tolist()))
    return [next((m for m, (row, start, end) in enumerate(mentions) if row == r and start < c < end), -1)
            for r, c in batch.is_target.nonzero().tolist()]

def test_a_batch_is_what_plain_loops_collect(corpus):
    passages = np.random.default_rng(0).choice(len(corpus.article), 40)
    rows, mentions = naive_rows(corpus, passages)
    batch = data.corpus_batch(corpus, passages)
    T = max(map(len, rows))
    assert batch.tokens.tolist() == [r + [corpus.special[PAD]] * (T - len(r)) for r in rows]
    assert batch.attention_mask.tolist() == [[True] * len(r) + [False] * (T - len(r)) for r in rows]
    flat = [(r, s, e, entity, p, m) for r, (p, ms) in enumerate(zip(passages, mentions)) for s, e, entity, m in ms]
    found = zip(*(getattr(batch, k).tolist() for k in "row start end entity passage mention".split()))
    assert list(found) == flat
    assert torch.equal(batch.tokens, batch.unmasked) and not batch.is_target.any()
    numbers = "tokens unmasked row start end entity passage mention answer label"
    assert all(getattr(batch, k).dtype == torch.int64 for k in numbers.split())

def test_mentions_are_masked_whole_or_not_at_all_and_markers_never(corpus):
    rng, special = np.random.default_rng(1), set(corpus.special.values()) - {corpus.special[UNK]}
    for _ in range(40):
        passages = rng.choice(len(corpus.article), 16)
        rows, mentions = naive_rows(corpus, passages)
        batch = data.mask_batch(data.corpus_batch(corpus, passages), corpus, rng)
        flat = [(r, *m) for r, ms in enumerate(mentions) for m in ms]
        masked = 0
        for r, s, e, *_ in flat:
            assert not special & set(rows[r][s + 1:e])
            hit = batch.is_target[r, s + 1:e].tolist()
            assert all(hit) or not any(hit)
            masked += all(hit)
        assert masked == max(1, round(.2 * len(flat)))
        for r, c in batch.is_target.nonzero().tolist():
            assert batch.unmasked[r, c] == rows[r][c] and rows[r][c] not in special
        assert batch.is_target[batch.tokens != batch.unmasked].all()

def test_masking_rates_and_replacements_and_the_option_to_mask_all_mentions_of_an_entity_in_the_passage(tmp_path):
    words = " ".join(WORDS[i % 14] for i in range(30))
    mentions = (0, 3, "x"), (4, 15, "y"), (16, 19, "x"), (24, 29, None), (30, 35, None)
    corpus, _ = build(tmp_path, [line(words, *mentions)] * 50, 32)
    every = data.corpus_batch(corpus, np.arange(50))
    plain = data.mask_batch(every, corpus, np.random.default_rng(2))
    found = data.mask_batch(every, corpus, np.random.default_rng(2), all_of_entity=True)
    masked, also = ({m for m in owners(batch) if m >= 0} for batch in (plain, found))
    mentioned = list(zip(plain.row.tolist(), plain.entity.tolist()))
    chosen = {mentioned[m] for m in masked if plain.entity[m] > 0}
    assert also == masked | {m for m, key in enumerate(mentioned) if key in chosen} > masked
    rng, n = np.random.default_rng(2), Counter()
    for _ in range(30):
        batch = data.mask_batch(every, corpus, rng)
        in_mention = torch.tensor(owners(batch)) >= 0
        assert len(set(owners(batch)) - {-1}) == 50                         # exactly 20% of 250
        got, was = batch.tokens[batch.is_target], batch.unmasked[batch.is_target]
        n.update(masks=int((got == corpus.special[MASK]).sum()), same=int((got == was).sum()), all=len(was),
                 other=int((~in_mention).sum()))
        assert not set(got.tolist()) & set(corpus.special.values()) - {corpus.special[MASK]}
    outside = 30 - 6                                                        # 6 of the 30 words are in mentions
    assert abs(n["other"] / (30 * 50 * outside) - .1) < .006
    assert abs(n["masks"] / n["all"] - .8) < .02
    assert abs(n["same"] / n["all"] - (.1 + .1 / len(corpus.words))) < .015
    one = data.mask_batch(data.corpus_batch(corpus, np.arange(1)), corpus, rng, .01)
    assert len(set(owners(one)) - {-1}) == 1                                # at least one mention, if there is any

def test_mentions_beyond_the_limit_are_sampled_out_over_the_batch_and_keep_their_markers(corpus):
    passages = np.arange(60)
    every = data.corpus_batch(corpus, passages)
    counts, rng = Counter(), np.random.default_rng(3)
    for _ in range(200):
        batch = data.sample_mentions(every, 1, rng)
        assert len(batch.row) == 60 and torch.equal(batch.tokens, every.tokens)
        kept = torch.isin(every.mention, batch.mention)         # in text order
        assert all(torch.equal(getattr(batch, name), getattr(every, name)[kept]) for name in data.MENTIONS)
        counts.update(batch.mention.tolist())
    share = 200 * 60 / len(every.row)
    assert set(counts) == set(every.mention.tolist())
    assert all(abs(c - share) < 5 * share ** .5 for c in counts.values())
    assert torch.equal(data.sample_mentions(every, 99, rng).mention, every.mention)
    masked = data.mask_batch(data.sample_mentions(every, 1, rng), corpus, rng, .5)
    assert len(set(owners(masked)) - {-1}) == 30
    spans = zip(every.row.tolist(), every.start.tolist(), every.end.tolist())
    inside = {(row, c) for row, start, end in spans for c in range(start + 1, end)}
    single = {(r, c) for (r, c), m in zip(masked.is_target.nonzero().tolist(), owners(masked)) if m < 0}
    assert single and not single & inside                   # no token of a sampled-out mention is masked

def test_parts_of_a_batch_hold_its_rows_renumbered(corpus):
    batch = data.mask_batch(data.corpus_batch(corpus, np.arange(21)), corpus, np.random.default_rng(4))
    batch.label = torch.arange(21)
    for size in (1, 2, 4):
        parts = [batch.part(rank, size) for rank in range(size)]
        assert sum(len(p.row) for p in parts) == len(batch.row)
        assert sum(int(p.is_target.sum()) for p in parts) == int(batch.is_target.sum()) > 0
        for rank, part in enumerate(parts):
            assert torch.equal(part.label, torch.arange(rank, 21, size))
            assert torch.equal(part.tokens, batch.tokens[rank::size])
            mine = [i for i in range(len(batch.row)) if batch.row[i] % size == rank]
            assert part.row.tolist() == [int(batch.row[i]) // size for i in mine]
            for name in set(data.MENTIONS) - {"row"}:
                assert torch.equal(getattr(part, name), getattr(batch, name)[mine]), name
            theirs = [batch.unmasked[r, c] for r, c in batch.is_target.nonzero().tolist() if r % size == rank]
            assert part.unmasked[part.is_target].tolist() == theirs

def test_an_evaluation_row_hides_one_mention_and_nothing_else(corpus):
    linked = np.flatnonzero(corpus.mention_entity)[:60]      # some are in the same passage
    batch = data.eval_batch(corpus, linked)
    for r, m in enumerate(linked):
        p = max(p for p in range(len(corpus.article)) if corpus.mention_first[p] <= m)
        row = corpus.tokens[corpus.passage_start[p]:corpus.passage_start[p + 1]].tolist()
        start, end = spans_of(corpus, p)[m - corpus.mention_first[p]]
        hidden = list(range(start + 1, end))
        expected = [corpus.special[MASK] if c in hidden else t for c, t in enumerate(row)]
        assert batch.tokens[r, :len(row)].tolist() == expected
        assert batch.is_target[r].nonzero().flatten().tolist() == hidden
        assert batch.unmasked[r, hidden].tolist() == [row[c] for c in hidden]

def test_evaluation_mentions_are_linked_elsewhere_only_once_in_their_passage_and_not_to_its_article(corpus):
    mentions = [(p, m, int(corpus.mention_entity[m])) for p in range(len(corpus.article))
                for m in range(corpus.mention_first[p], corpus.mention_first[p + 1]) if corpus.mention_entity[m]]
    inside = Counter((p, e) for p, _, e in mentions)
    passages_with = Counter(e for _, e in inside)
    allowed = [(p, m, e) for p, m, e in mentions
               if corpus.held_out[p] and inside[p, e] == 1 and passages_with[e] > 1]
    expected = [m for p, m, e in allowed if corpus.entity_names[e] != corpus.titles[corpus.article[p]]]
    assert data.eval_mentions(corpus).tolist() == expected and 0 < len(expected) < len(allowed)

# ---------------------------------------------------------------- clusters (app. A.1)

@pytest.mark.parametrize("size, seed", [(7, 0), (7, 1), (16, 0), (50, 2)])
def test_clusters_follow_the_naive_greedy_of_the_appendix(tmp_path, size, seed):
    rng = np.random.default_rng(seed)
    records = [line("a b c", *[(i, i + 1, f"E{rng.integers(12) + 6 * (a % 5)}") for i in (0, 2, 4) if a % 8],
                    title=f"A{a} B{a % 7}" if a % 3 else f"A{a}") for a in rng.integers(0, 25, 160)]
    corpus, _ = build(tmp_path, records)
    allowed = np.flatnonzero(rng.random(len(corpus.article)) < .9)
    clusters = data.related_clusters(corpus, size, seed, allowed)
    assert sorted(np.concatenate(clusters).tolist()) == allowed.tolist()    # each passage once
    assert [len(c) for c in clusters[:-1]] == [size] * (len(clusters) - 1) and 0 < len(clusters[-1]) <= size
    sets, left, n_unrelated = defaultdict(set), defaultdict(list), 0
    for p in allowed:
        left[corpus.article[p]].append(p)
        sets[corpus.article[p]] |= set(corpus.passage_entities(p).tolist()) - {0}
    for cluster in clusters:                                                # each choice is one of the best
        joined, order = set(), list(dict.fromkeys(corpus.article[cluster].tolist()))
        assert len(left[order[0]]) == max(map(len, left.values()))
        for i, article in enumerate(order):
            if i:
                jaccard = {a: len(sets[a] & joined) / max(1, len(sets[a] | joined)) for a in left if left[a]}
                best = {a for a in jaccard if jaccard[a] == max(jaccard.values())}
                met = {word for a in order[:i] for word in corpus.titles[a].split()}
                alike = {a for a in best if met & set(corpus.titles[a].split())}
                assert article in (alike or best) or not max(jaccard.values())
                n_unrelated += not max(jaccard.values())            # unrelated articles still fill the cluster
            mine = [p for p in cluster if corpus.article[p] == article]
            assert mine == left[article][:len(mine)]
            left[article] = left[article][len(mine):]
            assert not left[article] or article == order[-1]                # only the last may be split
            joined |= sets[article]
    assert n_unrelated
    again = data.related_clusters(corpus, size, seed, allowed)
    assert all(np.array_equal(a, b) for a, b in zip(clusters, again))
    other = data.related_clusters(corpus, size, seed + 9, allowed)
    assert any(not np.array_equal(a, b) for a, b in zip(clusters, other))   # ties are broken differently

def test_ties_between_related_articles_go_to_a_title_that_shares_a_word_with_the_cluster(tmp_path):
    """Twelve articles link the same entity. Each first word, F0 to F3, is shared by three titles."""
    records = [line("a", (0, 1, "E"), title=f"F{a % 4} L{a}") for a in range(12)]
    corpus, _ = build(tmp_path, records)
    for seed in range(3):
        clusters = data.related_clusters(corpus, 3, seed, np.arange(12))
        assert sorted(sorted(a % 4 for a in c.tolist()) for c in clusters) == [[n] * 3 for n in range(4)]

def test_articles_beyond_one_pool_form_random_pools_and_unfilled_clusters_are_pooled_again(tmp_path, monkeypatch):
    """Pools have at most 20 of 50 articles. Each article has 3 passages, and ten articles link each entity."""
    corpus, _ = build(tmp_path, [line(text, (0, 1, f"E{a % 5}"), title=f"A{a}") for a in range(50) for text in "abc"])
    monkeypatch.setattr(data, "POOL", 20)
    found = [data.related_clusters(corpus, 8, seed, np.arange(150)) for seed in (0, 0, 1)]
    for clusters in found:
        assert sorted(np.concatenate(clusters).tolist()) == list(range(150))
        assert [len(c) for c in clusters] == [8] * 18 + [6]
    # Clusters consist of related articles. In a random cluster, 1.6 of 8 passages would link a given entity.
    assert np.mean([np.bincount(corpus.article[c] % 5).max() for c in found[0]]) > 5
    same, other = ([np.array_equal(a, b) for a, b in zip(found[0], clusters)] for clusters in found[1:])
    assert all(same) and not any(other)

@pytest.mark.slow
def test_clusters_do_not_take_quadratic_time(tmp_path):
    rng = np.random.default_rng(0)
    corpus, _ = build(tmp_path, [line("a b c", *[(i, i + 1, f"E{rng.integers(3000)}") for i in (0, 2, 4)],
                                      title=f"A{a // 2}") for a in range(8000)])

    def seconds(n):
        start = time.process_time()
        data.related_clusters(corpus, 64, 0, np.arange(n))
        return time.process_time() - start

    assert min(seconds(8000) for _ in range(3)) < 32 * min(seconds(1000) for _ in range(3))  # quadratic: 64

# ---------------------------------------------------------------- examples

def test_examples_are_read_and_bad_ones_reported(tmp_path):
    claims = write(tmp_path / "claims.jsonl", [
        {"text": "Rome is old", "mentions": [{"start": 0, "end": 4, "entity": "Rome"}], "label": "SUPPORTS",
         "subject": "Rome"}, {"text": "Rome", "label": "REFUTES"}, {"text": "Roma", "label": "NOT ENOUGH INFO"},
        {"text": "Roma", "label": None}])
    examples = data.read_examples(claims, "claims")
    assert [e[:4] for e in examples] == [("Rome is old", [(0, 4, "Rome")], 1, []), ("Rome", None, 0, []),
                                         ("Roma", None, 2, []), ("Roma", None, None, [])]   # FEVER's third label; none
    assert examples[0].info["subject"] == "Rome"
    qa = write(tmp_path / "qa.jsonl", [{"question": "What is old?", "answers": ["Rome", "Roma"], "hops": 1},
                                       {"question": "Who?", "answers": []}])
    assert [e[:4] for e in data.read_examples(qa, "qa")] == [
        ("What is old?", None, None, ["Rome", "Roma"]), ("Who?", None, None, [])]
    for task, bad in (("claims", {"text": "a", "label": "TRUE"}), ("claims", {"label": "REFUTES"}),
                      ("claims", {"text": "a", "label": ["REFUTES"]}), ("qa", {"question": "a"}),
                      *(("qa", {"question": "a", "answers": answers}) for answers in (None, [["b"]], [True], "b")),
                      ("qa", {"question": "a", "answers": ["b"], "mentions": [{"start": 0, "end": 2}]})):
        with pytest.raises(UserError, match="bad.jsonl:1: "):
            data.read_examples(write(tmp_path / "bad.jsonl", [bad]), task)
    with pytest.raises(UserError, match="no example"):
        data.read_examples(write(tmp_path / "empty.jsonl", []), "qa")

NAMES = ["New_York", "New_York_City", "York", "St._John's", "Mercury_(planet)", "Mercury_(element)", "Île_de_France"]
SIGNS = [("O’Brien", "O'Brien"), ("O'Brien", "O’Brien"), ("Oʼbrien", "O‘Brien"), ("jean‑paul", "Jean-Paul"),
         ("Jean–Paul", "Jean‐Paul"), ("Hawaiʻi", "Hawai'i"), ("“Heroes”", '"Heroes"'), ("Karo\u00advia", "Karovia"),
         ("Port_Ellin", "Port Ellin")]

@pytest.mark.parametrize("marked, names, found", [
    ("In [new york city], not New Yorkers; [York]. [st. john's] [Mercury] and [ÎLE DE FRANCE]", NAMES,
     ["New_York_City", "York", "St._John's", "Mercury_(planet)", "Île_de_France"]),
    ("on [Mercury]", ["Mercury_(planet)", "Mercury", "mercury"], ["Mercury"]),              # the first without (…)
    ("[İzmir], 4", ["İzmir"], ["İzmir"]), ("to [Ob_1]", ["Ob_1"], ["Ob_1"]), ("[राम]", ["राम"], ["राम"]),
    ("[Zoe\u0308] sang", ["Zo\u00eb"], ["Zo\u00eb"]), ("a [Cafe\u0301]", ["Cafe\u0301"], ["Cafe\u0301"]),
    ("Cafe\u0301s", ["Cafe"], []), ("रामायण", ["राम"], []), ("nothing", [], []), ("", NAMES, []),
    ("彼は[東京タワー]と[京都]へ行った。[OpenAI]の[東京]支社", ["東京", "東京タワー", "京都", "OpenAI"],
     ["東京タワー", "京都", "OpenAI", "東京"]),
    *((f"Who is [{written}], then?", [name], [name]) for written, name in SIGNS)])
def test_names_are_found_by_longest_match_on_whole_words_in_any_script_and_with_any_signs(marked, names, found):
    text = re.sub(r"[][]", "", marked)
    mentions = data.find_mentions(text, data.name_index(names))
    assert [m.entity for m in mentions] == found
    for start, end, _ in reversed(mentions):
        text = f"{text[:start]}[{text[start:end]}]{text[end:]}"
    assert text == marked

def test_a_long_name_is_found_in_linear_time():
    words = [f"w{i}" for i in range(1000)]
    names = data.name_index([" ".join(words), *(" ".join(words[i:i + 3]) for i in range(990))])
    start = time.process_time()
    found = data.find_mentions(" ".join(words[:999] + ["x"] + words), names)
    assert time.process_time() - start < 2                  # an earlier version took 17 s
    assert len(found) == 330 + 1 and found[-1].entity == " ".join(words)

@pytest.mark.parametrize("text", [
    "the cat sat. on a mat, " * 50_000, "東京タワー" * 200_000, "cat " + "x" * 900_000, " " * 800_000 + "a cat",
    "กขค" * 200_000, "cat\x01 " * 200_000, "ca\u0301t" * 9 + " cat" * 90_000])
def test_a_long_example_is_cut_before_it_is_tokenised_without_changing_its_passage(text):
    tokenizer = data.train_tokenizer(["the cat sat. on a mat, 東京タワー"], 500)
    at, n = max(text.find("cat"), 0), len(text)
    mentions = [Mention(0, 40, None), Mention(at, at + 3, "C"), Mention(30, n, "D"), Mention(n - 3, n, "E")]
    example = data.Example(text, mentions, None, [], {})
    special, whole = data.special_ids(tokenizer), tokenizer.encode(text, add_special_tokens=False)
    for room in (16, 64):
        expected = data.encode_text(whole, mentions, room, room, special, Counter())[0]
        assert next(data.example_passages([example], "claims", tokenizer, room)) == expected

def test_an_example_of_ten_megabytes_does_not_take_minutes():
    tokenizer = data.train_tokenizer(["the cat sat."], 500)
    for text in ("the cat sat. " * 800_000, "x" * 10_000_000, "東" * 10_000_000):
        start = time.process_time()
        [passage] = data.example_passages([data.Example(text, [], None, ["x"], {})], "qa", tokenizer, 512)
        assert time.process_time() - start < 10 and len(passage.tokens) <= 512

def example(text, mentions=(), answers=(), label=None):
    return data.Example(text, [Mention(*mention) for mention in mentions], label, list(answers), {})

def batch_and_words(examples, task, **options):
    """The batch of the examples, and its rows as text, where "(" and ")" are the markers."""
    tokenizer = data.train_tokenizer(["where was alma verran born ?"], 99)
    index = {"": 0, "Alma Verran": 1, "Port Ellin": 2}
    batch = data.example_batch(examples, task, tokenizer, index, **options)
    rows = [" ".join(tokenizer.id_to_token(i) for i in row[mask].tolist())
            for row, mask in zip(batch.tokens, batch.attention_mask)]
    return batch, [row.replace(E_START, "(").replace(E_END, ")") for row in rows]

QUESTION = example("Where was Alma Verran born?", [(10, 21, "Alma Verran")], ["Elsewhere", "Port Ellin"])

def test_a_question_ends_in_a_masked_mention_that_asks_for_its_first_known_answer():
    batch, words = batch_and_words([QUESTION, example("Born?", [(0, 4, "Nobody")], ["Elsewhere"])], "qa")
    assert words == ["[CLS] where was ( alma verran ) born ? ( [MASK] ) [SEP]",
                     "[CLS] ( born ) ? ( [MASK] ) [SEP]"]
    assert batch.row.tolist() == [0, 0, 1, 1] and batch.entity.tolist() == [1, 0, 0, 0]
    assert batch.answer.tolist() == [-1, 2, -1, 0] and batch.label.tolist() == [-1, -1]
    assert batch.start.tolist() == [3, 9, 1, 5] and batch.end.tolist() == [6, 11, 3, 7]
    assert batch.passage.tolist() == [-1] * 4 and batch.mention.tolist() == [0, -1, 0, -1]
    same = QUESTION._replace(answers=["Alma Verran"])               # a question does not depend on its answer
    assert batch_and_words([same], "qa")[1] == words[:1]

def test_mentions_of_a_question_beyond_max_length_or_32_are_dropped():      # 32: app. B.1
    many = example("born " * 40, [(5 * i, 5 * i + 4, "Nobody") for i in range(40)])
    batch, _ = batch_and_words([many, QUESTION], "qa")
    assert batch.mention.tolist() == [*range(32), -1, 0, -1]
    assert (batch.answer >= 0).nonzero().flatten().tolist() == [32, 34]
    for max_length, n in ((32, 9), (14, 3), (9, 1)):
        batch, words = batch_and_words([many] * 2, "qa", max_length=max_length)
        assert batch.mention.tolist() == [*range(n), -1] * 2 and batch.tokens.shape[1] <= max_length
        assert all(row.endswith("( [MASK] ) [SEP]") for row in words)

def test_a_claim_has_its_label_and_a_cloze_hides_every_mention_of_its_answer():
    twice = [(0, 11, "Alma Verran"), (16, 22, "Alma Verran"), (5, 11, None)]
    examples = [example("", label=1), example("Alma"),
                example("Alma Verran was Verran?", twice, ["Alma Verran"]),
                QUESTION, QUESTION._replace(answers=["Alma Verran"])]
    batch, words = batch_and_words(examples, "claims")
    assert words == ["[CLS] [SEP]",
                     "[CLS] alma [SEP]",
                     "[CLS] ( [MASK] [MASK] ) was ( [MASK] ) ? [SEP]",
                     "[CLS] where was ( alma verran ) born ? [SEP]",
                     "[CLS] where was ( [MASK] [MASK] ) born ? [SEP]"]
    assert batch.label.tolist() == [1, -1, -1, -1, -1] and batch.row.tolist() == [2, 2, 3, 4]
    assert batch.answer.tolist() == [1, -1, -1, 1] and batch.mention.tolist() == [0, 1, 0, 0]
    assert batch.unmasked[2, [2, 3]].tolist() == batch.tokens[3, [4, 5]].tolist()
    assert batch_and_words(examples[-1:], "claims", max_length=4)[0].answer.tolist() == []
    assert len(batch_and_words(examples[:2], "claims")[0].row) == 0

# ---------------------------------------------------------------- the toy world

def facts_of(toy):
    """{(subject, relation): {object: passages that state it}}, parsed from the sentences. A sentence about a
    description states no fact."""
    patterns = [(name, re.compile(re.sub(r"\b[SO]\b", lambda m: f"(?P<{m[0].lower()}>[A-Z][a-z]+ [A-Z][a-z]+)",
                                         re.escape(phrase))))
                for name, relation in data.RELATIONS.items() for phrase in relation.phrases]
    facts = defaultdict(lambda: defaultdict(list))
    for passage in toy[0]:
        for sentence in re.findall(r"[^.?]+(?:\? [A-Z][a-z]+ [A-Z][a-z]+\.|[.?])", passage["text"]):
            found = [(name, m) for name, pattern in patterns if (m := pattern.fullmatch(sentence.strip()))]
            if not found:
                assert "'s " in sentence, sentence
                continue
            assert len(found) == 1, sentence
            facts[found[0][1]["s"], found[0][0]][found[0][1]["o"]].append(passage)
    return facts

def test_the_toy_world_has_its_expected_size(toy):
    lines, examples = toy
    assert 17_000 <= len(lines) <= 17_500 and 70_000 <= sum(len(p["mentions"]) for p in lines) <= 75_000
    assert max(len(p["text"].replace(".", " .").split()) for p in lines) <= 40
    tokenizer = data.train_tokenizer((p["text"] for p in lines), 2000)
    assert 400 <= tokenizer.get_vocab_size() <= 600
    texts = [e.get("text") or e["question"] for records in examples.values() for e in records]
    pieces = {piece for encoding in tokenizer.encode_batch(texts) for piece in encoding.tokens}
    assert UNK not in pieces and not any(p.startswith("##") for p in pieces)    # every word is in the vocabulary

def test_each_fact_is_stated_in_several_passages_of_its_subject_in_different_phrases(toy):
    facts = facts_of(toy)
    assert 9000 <= len(facts) <= 9500
    for (subject, _), objects in facts.items():
        (obj, passages), = objects.items()                  # one object, so a question has one answer
        assert len(passages) >= 3 and {p["title"] for p in passages} == {subject} and obj != subject
        assert len({p["text"] for p in passages}) == len(passages)
        splits = Counter(p["split"] for p in passages)
        assert splits["train"] >= 2 or splits["train"] == 0
    for passage in toy[0]:
        names = [passage["text"][m["start"]:m["end"]] for m in passage["mentions"]]
        assert all(name == m["entity"] or name.islower() for name, m in zip(names, passage["mentions"]))
        assert passage["title"] in names

def test_seen_and_held_out_worlds_share_words_but_no_entity(toy):
    lines, _ = toy
    train = {p["title"] for p in lines if p["split"] == "train"}
    seen = [p for p in lines if p["title"] in train]
    unseen = [p for p in lines if p["title"] not in train]
    names = [{m["entity"] for p in part for m in p["mentions"]} for part in (seen, unseen)]
    assert not names[0] & names[1] and len(names[0]) == 2875 and len(names[1]) == 575
    assert {w for n in names[1] for w in n.split()} <= {w for n in names[0] for w in n.split()}
    assert abs(sum(p["split"] == "held_out" for p in seen) / len(seen) - .05) < .01
    assert all(p["split"] == "held_out" for p in unseen)

def test_toy_examples_are_true_to_the_facts_and_their_splits_share_none(toy):
    lines, examples = toy
    facts = {key: next(iter(objects)) for key, objects in facts_of(toy).items()}
    kind = {s: data.RELATIONS[r].subject for s, r in facts}
    train_subjects = {p["title"] for p in lines if p["split"] == "train"}
    used = defaultdict(set)
    for name, records in examples.items():
        task, hops, split = name.split(".")
        if hops == "both":
            assert records == examples[f"{task}.one_hop.{split}"] + examples[f"{task}.two_hop.{split}"]
            continue
        assert len(records) >= {"train": 3000, "dev": 150, "test": 300, "unseen": 500}[split]
        for e in records:
            relations = e["relations"]
            keys = list(zip([e["subject"], e.get("bridge")], relations))
            assert len(keys) == 1 + (hops == "two_hop")
            used[split].update(keys)
            answer = facts[keys[-1]]
            assert hops == "one_hop" and "bridge" not in e or facts[keys[0]] == e["bridge"]
            assert (e["subject"] not in train_subjects) == (split == "unseen")
            text = e.get("text") or e["question"]
            entities = [m["entity"] for m in e["mentions"]]
            assert all(m["entity"] in (None, text[m["start"]:m["end"]]) for m in e["mentions"])
            assert entities.count(None) == (hops == "two_hop") and e["subject"] in entities
            assert hops == "one_hop" or e["bridge"] not in text
            if task == "qa":
                assert e["answers"] == [answer] and answer not in text
            else:
                claimed = next(x for x in entities if x not in (None, e["subject"]))
                assert (claimed == answer) == (e["label"] == "SUPPORTS") and kind[claimed] == kind[answer]
        if task == "claims":
            assert 2 * sum(e["label"] == "SUPPORTS" for e in records) == len(records)
        said = Counter((e["subject"], *e["relations"]) for e in records)    # train has both phrases of each
        assert set(said.values()) == {(2 if split == "train" else 1) * (2 if task == "claims" else 1)}
        different = {(e.get("text") or e["question"], e["mentions"][-1]["entity"]) for e in records}
        assert len(different) > .95 * len(records)
    splits = list(used)
    assert not any(used[a] & used[b] for i, a in enumerate(splits) for b in splits[:i])
    corpus_phrases = {p for r in data.RELATIONS.values() for p in r.phrases}
    assert not corpus_phrases & {p for r in data.RELATIONS.values() for p in r.claims + r.questions}

def test_the_object_of_a_claim_does_not_give_away_its_label(toy):
    """The best guess from the object (or subject) alone, learned on train, is near chance on test."""
    for clue in (lambda e: e["subject"],
                 lambda e: next(m["entity"] for m in e["mentions"] if m["entity"] != e["subject"])):
        seen, test = defaultdict(Counter), toy[1]["claims.one_hop.test"]
        for e in toy[1]["claims.one_hop.train"]:
            seen[clue(e)][e["label"]] += 1
        right = sum((seen[clue(e)].most_common(1) or [("SUPPORTS", 0)])[0][0] == e["label"] for e in test)
        assert abs(right / len(test) - .5) < .08

def test_descriptions_are_linked_in_training_passages_that_do_not_state_their_fact(toy):
    lines, examples = toy
    facts, nouns = facts_of(toy), {relation.noun: name for name, relation in data.RELATIONS.items()}
    described = Counter()
    for p in lines:
        for m in p["mentions"]:
            name = p["text"][m["start"]:m["end"]]
            if name != m["entity"]:
                described[p["title"], nouns[name]] += 1
                (obj, stated), = facts[p["title"], nouns[name]].items()
                assert p["split"] == "train" and obj == m["entity"] and p not in stated
    asked = {(e.get("bridge", e["subject"]), e["relations"][-1]) for name, records in examples.items()
             if "both" not in name for e in records}
    assert not asked & set(described)                       # otherwise a description would give away an answer
    train = {(e["subject"], *e["relations"]) for e in examples["qa.one_hop.train"]}
    assert .48 < len(described) / len(set(described) | train) < .52
    bridges = Counter((e["subject"], e["relations"][0]) in described for e in examples["qa.two_hop.train"])
    assert .45 < bridges[True] / bridges.total() < .55
    assert not any((e["subject"], e["relations"][0]) in described for name, records in examples.items()
                   if "train" not in name for e in records)
    assert set(described.values()) == {1}
    assert {p["title"] for p in data.toy_world(4)[0]} != {p["title"] for p in lines}

@pytest.mark.slow
def test_the_command_writes_the_same_world_for_the_same_seed(tmp_path, toy, run):
    assert run("toy", "--out", tmp_path / "a", "--seed", 3).returncode == 0
    names = {f"{task}.{hops}.{split}.jsonl" for task in ("claims", "qa") for hops in ("one_hop", "two_hop")
             for split in ("train", "dev", "test", "unseen")} | {"corpus.jsonl"}
    names |= {f"{task}.both.{split}.jsonl" for task in ("claims", "qa") for split in ("train", "dev")}
    assert {p.name for p in (tmp_path / "a").iterdir()} == names
    texts = list(data.read_corpus(tmp_path / "a" / "corpus.jsonl"))
    assert [t.text for t in texts] == [p["text"] for p in toy[0]]
    for name in names - {"corpus.jsonl"}:
        assert data.read_examples(tmp_path / "a" / name, name.split(".")[0])
    write(tmp_path / "file", [])
    before = {path: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    done = run("toy", "--out", tmp_path / "a")
    assert done.returncode == 1 and "a is not empty; give a new folder" in done.stderr
    assert before == {path: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    done = run("toy", "--out", tmp_path / "file")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "file: File exists" in done.stderr
