"""Text in, batches out: corpus, tokenizer, passages with entity markers, masking, clusters, the toy world.

The paper: §2 (notation, markers), §2.3-2.4 (what is masked and why), appendices A and A.1 (rates, clusters).

    corpus.jsonl --read_corpus--> Text --encode_text--> passages --Corpus.build--> flat arrays on disk
    Corpus[passages] --make_batch--> Batch: tokens (B, T), mentions as flat arrays (M,), masked tokens (L,)

A passage of n tokens with m mentions takes n + 2m + 2 positions:

    [CLS] the capital of [E_start] north karovia [E_end] is [E_start] port ellin [E_end] . [SEP]
      0    1     2     3     4       5      6       7    8     9       10   11     12    13  14
    mention_start = 4, 9; mention_end = 7, 12 (the positions of the markers)
"""
import argparse
import bz2
import gc
import gzip
import html
import json
import lzma
import os
import re
import shutil
import sys
import tarfile
import tempfile
import zlib
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import chain, islice
from typing import Iterator, NamedTuple
from xml.parsers import expat

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tqdm import tqdm

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[E_start]", "[E_end]"]
PAD, UNK, CLS, SEP, MASK, E_START, E_END = SPECIAL


class UserError(Exception):
    """Something is wrong with the user's data; the message is a sentence for a person."""


class Mention(NamedTuple):
    start: int              # character offsets, end exclusive
    end: int
    entity: str | None      # None: mentioned, but not linked


class Text(NamedTuple):
    title: str
    text: str
    mentions: list
    split: str | None = None    # "train" | "held_out" | None


# ---------------------------------------------------------------- files that are whole or not there

def write_file(path, write):
    """write(file) into a temporary name, then rename: a reader sees the old file or the new, never half of one.

    The name is always the same: what a process that was killed has left is overwritten by the next one."""
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as e:        # RuntimeError: what torch.save makes of a full disk
        raise UserError(f"{path}: cannot be written ({str(e).split(chr(10))[0]}); is the disk full?") from e
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def checksum(path):
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


def write_json(path, value):
    """A dictionary, and the checksum of what it says."""
    value = {**value, "checksum": zlib.crc32(json.dumps(value).encode())}
    write_file(path, lambda file: file.write((json.dumps(value, indent=1) + "\n").encode()))


def read_json(path):
    """The dictionary that write_json wrote. Raises ValueError where a bit of it has changed."""
    with open(path, "rb") as file:
        value = json.load(file)
    if not isinstance(value, dict) or value.pop("checksum", None) != zlib.crc32(json.dumps(value).encode()):
        raise ValueError("its checksum differs")
    return value


# ---------------------------------------------------------------- reading corpus and example files

def open_text(path, errors=None) -> Iterator[str]:
    """The lines of a plain or gzipped UTF-8 file, one by one. Raises UserError; errors: see read_corpus. A line
    that is not UTF-8 is empty then."""
    n = 0
    try:
        with (gzip.open if str(path).endswith(".gz") else open)(path, "rb") as file:
            for n, line in enumerate(file, 1):
                try:
                    line = line.decode("utf-8")
                except UnicodeDecodeError as e:     # decoded line by line, so that the number is right
                    message = f"{path}:{n}: not UTF-8 ({e.reason}, byte {e.start}); convert the file"
                    if errors is None:
                        raise UserError(message) from e
                    errors.append(message)
                    line = ""
                yield line
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise UserError(f"{path}:{n + 1}: not a whole gzip file ({e}); compress or copy it again") from e
    except OSError as e:
        raise UserError(f"{path}: cannot be read ({e.strerror}); check the name") from e


def _string(record, key, where=""):
    value = record.get(key)
    if not isinstance(value, str):
        raise ValueError(f'{where}"{key}" is {"not a string" if key in record else "missing"}')
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:      # JSON can spell half a surrogate pair; no tokenizer can read it
        raise ValueError(f'{where}"{key}" holds half a surrogate pair, which is not a character') from None
    return value


def _mentions(record, text) -> list:
    if not isinstance(record.get("mentions"), list):
        raise ValueError(f'"mentions" is {"not a list" if "mentions" in record else "missing"}')
    mentions = []
    for i, m in enumerate(record["mentions"]):
        where = f"mention {i}: "
        if not isinstance(m, dict):
            raise ValueError(where + "not an object")
        for key in ("start", "end"):
            if type(m.get(key)) is not int:     # a bool is an int to isinstance
                raise ValueError(f'{where}"{key}" is {"not an integer" if key in m else "missing"}')
        if "entity" not in m:
            raise ValueError(where + '"entity" is missing; null says that it is not linked')
        entity = None if m["entity"] is None else _string(m, "entity", where)
        if entity == "":
            raise ValueError(where + '"entity" is empty; null says that it is not linked')
        if not 0 <= m["start"] < m["end"] <= len(text):
            raise ValueError(f"{where}start {m['start']} and end {m['end']} do not fit the text: "
                             f"0 <= start < end <= {len(text)}")
        mentions.append(Mention(m["start"], m["end"], entity))
    return mentions


def _text(record) -> Text:
    title, text, split = _string(record, "title"), _string(record, "text"), record.get("split")
    if split not in ("train", "held_out", None):
        raise ValueError('"split" is neither "train" nor "held_out"')
    return Text(title, text, _mentions(record, text), split)


def _records(path, parse, errors=None):
    """parse(record) of each JSON line; parse raises ValueError for a bad one. errors: see read_corpus."""
    for n, line in enumerate(open_text(path, errors), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("not a JSON object")
            item = parse(record)
        except (ValueError, RecursionError) as e:
            bad_json = isinstance(e, (json.JSONDecodeError, RecursionError))
            message = f"{path}:{n}: {'not JSON, ' if bad_json else ''}{e}"
            if errors is None:
                raise UserError(message + "; correct this line or take it out") from e
            errors.append(message)
            continue
        yield item


def read_corpus(path, errors=None) -> Iterator[Text]:
    """The texts of a corpus file, as a stream. Raises UserError "FILE:LINE: what is wrong" for a bad line;
    with a list `errors`, that message is appended to it and reading goes on."""
    return _records(path, _text, errors)


CLAIM_LABELS = ("REFUTES", "SUPPORTS", "NOT ENOUGH INFO")      # the last one in FEVER only


class Example(NamedTuple):
    text: str
    mentions: list | None       # None: to be found (mention_finder)
    label: int | None           # claims: index into CLAIM_LABELS; None: not known (test files)
    answers: list               # questions: entity names, any of which is right; []: none is an entity
    info: dict                  # the other fields: subject, bridge, relations, …


def read_examples(path, task) -> list:
    """Examples of task "claims" or "qa". Raises UserError for a bad line or a file without any.

    claims: {"text": …, "mentions": […], "label": one of CLAIM_LABELS, or null}
    qa:     {"question": …, "mentions": […], "answers": [entity, …]}; mentions may be absent in both"""
    text_key, wanted = {"claims": ("text", "label"), "qa": ("question", "answers")}[task]

    def parse(record):
        text, label, answers = _string(record, text_key), None, []
        if task == "claims":
            label = record.get("label", "")
            if label not in (*CLAIM_LABELS, None):
                raise ValueError(f'"label" is none of {", ".join(CLAIM_LABELS)}; null says that it is not known')
            label = None if label is None else CLAIM_LABELS.index(label)
        else:
            answers = record.get("answers")
            if not (isinstance(answers, list) and all(a and type(a) is str for a in answers)):
                raise ValueError('"answers" is not a list of entity names')
        mentions = None if record.get("mentions") is None else _mentions(record, text)
        info = {k: v for k, v in record.items() if k not in (text_key, "mentions", wanted)}
        return Example(text, mentions, label, answers, info)

    examples = list(_records(path, parse))
    if not examples:
        raise UserError(f"{path}: holds no example; give a file with one JSON object a line")
    return examples


# ---------------------------------------------------------------- tokenizer

def _wordpiece(vocab) -> Tokenizer:
    """A WordPiece tokenizer as BERT's, lower case. [CLS] and the others are never read out of a text."""
    tokenizer = Tokenizer(models.WordPiece({t: i for i, t in enumerate(vocab)}, unk_token=UNK))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)       # "port ##o" is read as "porto"
    return tokenizer


def train_tokenizer(texts, vocab_size=30522) -> Tokenizer:
    """WordPiece vocabulary of an iterable of strings. With room for every word, each is one token."""
    tokenizer, words = _wordpiece(SPECIAL), set()
    normalizer, splitter = tokenizer.normalizer, tokenizer.pre_tokenizer    # the tokenizer locks in training

    def stream():
        for text in texts:
            if len(words) <= vocab_size:
                words.update(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
            yield text

    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=SPECIAL, limit_alphabet=1000,
                                        show_progress=False)
    tokenizer.train_from_iterator(stream(), trainer)
    # The trainer keeps every merge on the way to a word. Where all words fit, these would be dead rows of
    # the embeddings: keep the words, and the characters to spell new ones.
    chars = sorted(set("".join(words)))
    whole = list(dict.fromkeys(SPECIAL + chars + ["##" + c for c in chars if c.isalnum()] + sorted(words)))
    return _wordpiece(whole if len(whole) <= vocab_size else
                      sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get))


def load_tokenizer(path) -> Tokenizer:
    """BERT's vocab.txt, in which the markers take two [unusedN] entries, or a tokenizer.json of ours."""
    if str(path).endswith(".json"):
        if not os.path.isfile(path):
            raise UserError(f"{path}: no such file; give a vocab.txt or a tokenizer.json")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as e:      # tokenizers raises nothing more precise
            raise UserError(f"{path}: not a tokenizer ({e})") from e
    else:
        vocab = [line.rstrip("\r\n") for line in open_text(path)]
        unused = [i for i, t in enumerate(vocab) if t.startswith("[unused")]
        for marker in (E_START, E_END):
            if marker not in vocab:
                if not unused:
                    raise UserError(f"{path}: has no [unusedN] entry left for {marker}; add one")
                vocab[unused.pop(0)] = marker
        tokenizer = _wordpiece(vocab)
    special_ids(tokenizer, path)
    return tokenizer


def special_ids(tokenizer, path="the tokenizer") -> dict:
    """{"[PAD]": id, …} for the seven special tokens. Raises UserError when one is missing."""
    ids = {t: tokenizer.token_to_id(t) for t in SPECIAL}
    missing = [t for t, i in ids.items() if i is None]
    if missing:
        raise UserError(f"{path}: lacks {', '.join(missing)}; give a BERT vocab.txt or our tokenizer.json")
    return ids


# ---------------------------------------------------------------- text to passages

class Piece(NamedTuple):
    tokens: np.ndarray      # (n,) int32   [CLS] … [SEP], markers included
    start: np.ndarray       # (m,) positions of [E_start]; outer mentions before inner ones
    end: np.ndarray         # (m,) positions of [E_end]
    index: np.ndarray       # (m,) which of the text's mentions
    chars: tuple            # the piece's characters in the text: from, to


def encode_text(encoding, mentions, passage_length, max_length, special, dropped) -> list:
    """Sets markers and cuts a text into Pieces of at most passage_length tokens and max_length positions.

    encoding: tokenizer.encode(text, add_special_tokens=False); special: special_ids(tokenizer);
    dropped: a Counter of mentions that cannot be kept, by reason. A mention covers every token that it
    touches. Cuts never cross a mention: they move back to before it."""
    ids, offsets = np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2)
    n, chars = len(ids), np.array([m[:2] for m in mentions], np.int64).reshape(-1, 2)
    first = np.searchsorted(offsets[:, 1], chars[:, 0], "right")    # first token, and one past the last
    last = np.searchsorted(offsets[:, 0], chars[:, 1], "left")
    index = np.lexsort((-last, first))                              # outer before inner
    index = index[first[index] < last[index]]
    if len(index) < len(first):
        dropped["without a token"] += len(first) - len(index)
    first, last = first[index], last[index]

    while True:
        crossed = np.cumsum(np.bincount(first + 1, minlength=n + 2) - np.bincount(last, minlength=n + 2))
        allowed = np.flatnonzero(crossed[:n + 1] == 0)              # cuts that cross no mention; 0 and n too
        used = allowed + 2 * np.searchsorted(np.sort(last), allowed, "right")       # positions up to each
        cuts = [0]
        while cuts[-1] < len(allowed) - 1:
            i = cuts[-1]
            j = min(np.searchsorted(allowed, allowed[i] + passage_length, "right"),
                    np.searchsorted(used, used[i] + max_length - 2, "right")) - 1
            if j == i:
                break
            cuts.append(j)
        if cuts[-1] == len(allowed) - 1:
            break
        # What lies before the next allowed cut fits no passage: its longest mention goes, and we try again.
        inside = np.flatnonzero((first >= allowed[i]) & (last <= allowed[i + 1]))
        longest = inside[np.argmax((last - first)[inside])]
        too_long = last[longest] - first[longest] > min(passage_length, max_length - 4)
        dropped["longer than a passage" if too_long else "overlaps too many others for one passage"] += 1
        first, last, index = (np.delete(x, longest) for x in (first, last, index))

    pieces, cuts = [], allowed[cuts]
    for lo, hi in zip(cuts[:-1], cuts[1:]):
        here = slice(*np.searchsorted(first, [lo, hi]))
        m = np.arange(here.stop - here.start)
        # 2m markers by the token they stand before; ends before starts, inner ends and outer starts first
        before = np.concatenate([last[here], first[here]]) - lo
        order = np.lexsort((np.concatenate([-m, m]), np.repeat([0, 1], len(m)), before))
        at = np.empty(2 * len(m), np.int64)
        at[order] = 1 + before[order] + np.arange(2 * len(m))
        end, start = at[:len(m)], at[len(m):]
        tokens = np.empty(hi - lo + 2 * len(m) + 2, np.int32)
        free = np.ones(len(tokens), bool)
        tokens[0], tokens[-1], tokens[start], tokens[end] = (special[t] for t in (CLS, SEP, E_START, E_END))
        free[[0, -1]] = free[at] = False
        tokens[free] = ids[lo:hi]
        span = (0 if lo == 0 else int(offsets[lo, 0]), None if hi == n else int(offsets[hi, 0]))
        pieces.append(Piece(tokens, start, end, index[here], span))
    return pieces


class Corpus:
    """A tokenised corpus of P passages and M mentions: flat arrays on disk, memory-mapped.

    tokens (total,)               all passages one after the other, [CLS] … [SEP], markers included
    passage_start (P+1,)          where each passage's tokens start
    mention_first (P+1,)          where each passage's mentions start
    mention_start, _end (M,)      positions of [E_start] and [E_end] inside the passage; [CLS] is 0
    mention_entity (M,)           index into entity_names; 0 = not linked
    mention_char (M, 2)           character offsets in the passage's text
    article, held_out (P,)        index into titles; kept out of training
    text (bytes,), text_start (P+1,)    the passages' own characters in UTF-8
    entity_count (E,)             linked mentions of each entity in passages that are not held out
    special, vocab_size, meta     ids of the special tokens; counts and what was dropped
    """
    FORMAT = 2
    ARRAYS = dict(tokens=np.int32, passage_start=np.int64, mention_first=np.int64, mention_start=np.int32,
                  mention_end=np.int32, mention_entity=np.int32, mention_char=np.int32, article=np.int32,
                  held_out=np.bool_, text=np.uint8, text_start=np.int64, entity_count=np.int64)

    def __init__(self, folder):
        """Opens a tokenised corpus, each file's checksum compared. Raises UserError."""
        self.folder = folder
        try:
            self.meta = read_json(os.path.join(folder, "meta.json"))
            if self.meta.get("format") != self.FORMAT:
                raise ValueError(f"format {self.meta.get('format')}, this version reads {self.FORMAT}")
            self.fingerprint = self.meta["crc32"]       # names the very text that a memory was made from
            for name, crc32 in self.fingerprint.items():
                if checksum(os.path.join(folder, name)) != crc32:
                    raise ValueError(f"{name} is damaged: its checksum differs")
            for name in ("titles", "entity_names"):
                with open(os.path.join(folder, name + ".json"), encoding="utf-8") as file:
                    setattr(self, name, json.load(file))
            for name, dtype in self.ARRAYS.items():     # asarray: still mapped, without memmap's slow index
                setattr(self, name, np.asarray(np.memmap(self.path(name), dtype, "r")))
        except (OSError, ValueError, KeyError) as e:
            raise UserError(f"{folder}: not a whole tokenised corpus ({e}); remove it and build again") from e
        self.mention_char = self.mention_char.reshape(-1, 2)
        self.special, self.vocab_size = self.meta["special"], self.meta["vocab_size"]
        self.maskable = np.ones(self.vocab_size, bool)      # [UNK] is a word we cannot spell, hence maskable
        self.maskable[[self.special[t] for t in (PAD, CLS, SEP, MASK, E_START, E_END)]] = False
        self.words = np.setdiff1d(np.arange(self.vocab_size), list(self.special.values()))

    @property
    def trained_on(self):
        """The fingerprint that it had before any text was added."""
        return [*(past["corpus"] for past in self.meta["grew_from"]), self.fingerprint][0]

    def path(self, name):
        return os.path.join(self.folder, name + ".bin")

    @staticmethod
    def open(folder) -> "Corpus":
        return Corpus(folder)

    @staticmethod
    def build(path, folder, tokenizer, passage_length, max_length) -> "Corpus":
        """Tokenises a corpus file into `folder`, as a stream: only titles and entity names are held.

        Raises UserError for a bad line, an empty corpus, one without a linked mention, a wrong folder."""
        return Corpus._write(folder, path, tokenizer, passage_length, max_length)

    def extend(self, path, tokenizer) -> "Corpus":
        """Tokenises more text behind this corpus, in its folder: none of it is trained on, what was there keeps its
        numbers. meta["grew_from"] remembers what it was before: fingerprint, P, and the checksum of that text.
        Errors as build's."""
        return Corpus._write(self.folder, path, tokenizer, self.meta["passage_length"], self.meta["max_length"], self)

    @staticmethod
    def _write(folder, path, *args):
        if os.path.exists(folder) and not os.path.exists(os.path.join(folder, "meta.json")):
            raise UserError(f"{folder}: exists and is not a tokenised corpus; choose another folder")
        temporary = f"{os.path.normpath(folder)}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            os.makedirs(temporary)
            _write_corpus(path, temporary, *args)
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(temporary, folder)
        except OSError as e:
            raise UserError(f"{folder}: cannot be written ({e.strerror}); choose another folder") from e
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return Corpus(folder)

    @cached_property
    def entity_index(self):
        """{name: number} of the entities."""
        return {name: i for i, name in enumerate(self.entity_names)}

    @cached_property
    def article_index(self):
        """{title: number} of the articles."""
        return {title: i for i, title in enumerate(self.titles)}

    def passage_entities(self, p):
        """Entity numbers of a passage's mentions; 0 = not linked."""
        return self.mention_entity[self.mention_first[p]:self.mention_first[p + 1]]

    def passage_of(self, mentions):
        """Passage numbers of corpus mention numbers."""
        return np.searchsorted(self.mention_first, mentions, "right") - 1

    def passage_text(self, p) -> str:
        return self.text[self.text_start[p]:self.text_start[p + 1]].tobytes().decode("utf-8")

    def mention_parts(self, m):
        """(title, the passage before the mention, the mention, the passage after it) of a corpus mention number."""
        p = int(self.passage_of(m))
        text, (a, b) = self.passage_text(p), self.mention_char[m]
        return self.titles[self.article[p]], text[:a], text[a:b], text[b:]

    def show_mention(self, m, width=80) -> str:
        """One line to read: "Title: … before [mention] after …"."""
        title, left, name, right = self.mention_parts(m)
        return (f"{title}: {'…' if len(left) > width else ''}{left[-width:]}[{name}]{right[:width]}"
                f"{'…' if len(right) > width else ''}").replace("\n", " ")


def _write_corpus(path, folder, tokenizer, passage_length, max_length, base=None):
    special, titles, entities = special_ids(tokenizer), {}, {"": 0}
    sizes, counts, dropped, entity_count, grew_from = Counter(), Counter(), Counter(), Counter(), []
    if base is not None:
        titles, entities = ({name: i for i, name in enumerate(names)} for names in (base.titles, base.entity_names))
        counts, dropped = Counter(base.meta["counts"]), Counter(base.meta["dropped"])
        entity_count = Counter(dict(enumerate(base.entity_count.tolist())))
        grew_from = [*base.meta["grew_from"],
                     {"corpus": base.fingerprint, "passages": len(base.article), "file": checksum(path)}]
        for name in Corpus.ARRAYS.keys() - {"entity_count"}:
            shutil.copyfile(base.path(name), os.path.join(folder, name + ".bin"))
            sizes[name] = getattr(base, name).size
    before = counts.copy()
    with ExitStack() as stack:
        files = {name: stack.enter_context(open(os.path.join(folder, name + ".bin"), "ab"))
                 for name in Corpus.ARRAYS}

        def append(**arrays):
            for name, values in arrays.items():
                files[name].write(np.asarray(values, Corpus.ARRAYS[name]).tobytes())
                sizes[name] += len(values)

        if base is None:
            append(passage_start=[0], mention_first=[0], text_start=[0])
        texts = iter(tqdm(read_corpus(path), "tokenising", unit=" texts", leave=False, disable=None))
        while chunk := list(islice(texts, 1024)):
            encodings = tokenizer.encode_batch([t.text for t in chunk], add_special_tokens=False)
            for (title, text, mentions, split), encoding in zip(chunk, encodings):
                held_out = base is not None or split == "held_out" or split is None and zlib.crc32(title.encode()) % 20 == 0
                article = titles.setdefault(title, len(titles))
                entity = np.array([entities.setdefault(m.entity or "", len(entities)) for m in mentions], int)
                chars = np.array([m[:2] for m in mentions], int).reshape(-1, 2)
                counts.update(texts=1, mentions_read=len(mentions), texts_without_a_token=not encoding.ids)
                for piece in encode_text(encoding, mentions, passage_length, max_length, special, dropped):
                    lo, hi = piece.chars
                    own, linked = text[lo:hi], entity[piece.index][entity[piece.index] > 0].tolist()
                    append(tokens=piece.tokens, mention_start=piece.start, mention_end=piece.end,
                           mention_entity=entity[piece.index], article=[article], held_out=[held_out],
                           mention_char=np.clip(chars[piece.index] - lo, 0, len(own)).ravel(),
                           text=np.frombuffer(own.encode("utf-8"), np.uint8))
                    append(passage_start=[sizes["tokens"]], text_start=[sizes["text"]],
                           mention_first=[sizes["mention_start"]])
                    n = len(piece.start)
                    counts.update(passages=1, held_out=held_out, tokens=len(piece.tokens) - 2 * n - 2,
                                  mentions=n, linked=len(linked))
                    entity_count.update(() if held_out else linked)
        append(entity_count=[entity_count[e] for e in range(len(entities))])
    if counts["linked"] == before["linked"]:
        what = "no linked mention" if counts["passages"] > before["passages"] else "no text"
        raise UserError(f"{path}: holds {what}; a mention memory is made of linked mentions")
    counts.update(articles=len(titles), entities=len(entities) - 1)
    for name, text in dict(titles=json.dumps(list(titles)), entity_names=json.dumps(list(entities)),
                           tokenizer=tokenizer.to_str(pretty=True)).items():
        with open(os.path.join(folder, name + ".json"), "w", encoding="utf-8") as file:
            file.write(text)
    write_json(os.path.join(folder, "meta.json"), dict(
        format=Corpus.FORMAT, counts=counts, dropped=dropped, special=special, passage_length=passage_length,
        max_length=max_length, vocab_size=tokenizer.get_vocab_size(), grew_from=grew_from,
        crc32={name: checksum(os.path.join(folder, name)) for name in sorted(os.listdir(folder))}))


# ---------------------------------------------------------------- batches

@dataclass
class Batch:
    tokens: torch.Tensor            # (B, T) what the model reads: masked in training
    unmasked: torch.Tensor          # (B, T) the same before masking: the Mention Encoder reads this
    attention_mask: torch.Tensor    # (B, T) bool, True = token
    row: torch.Tensor               # (M,) flat mentions: row, and the columns of their markers
    start: torch.Tensor             # (M,)
    end: torch.Tensor               # (M,)
    entity: torch.Tensor            # (M,) 0 = not linked
    passage: torch.Tensor           # (M,) corpus passage, -1 = none (a question)
    masked: torch.Tensor            # (M,) bool: all of its tokens are to be predicted
    target_index: torch.Tensor      # (L,) masked tokens as indices into tokens.view(-1)
    target: torch.Tensor            # (L,) their original ids
    target_mention: torch.Tensor    # (L,) the mention (index into row) each belongs to, -1 = none
    mention: torch.Tensor           # (M,) corpus mention number, -1 = none
    label: torch.Tensor | None = None           # (B,) claims: index into CLAIM_LABELS, -1 = not known
    answer: torch.Tensor | None = None          # (B,) questions: entity of the first known answer, 0 = none
    answer_mention: torch.Tensor | None = None  # (B,) the mention that is masked to be answered, -1 = none

    def to(self, device) -> "Batch":
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{k: v if v is None else v.to(device, non_blocking=True) for k, v in values.items()})

    def part(self, rank, size) -> "Batch":
        """Rows rank, rank + size, … with their mentions and targets, renumbered."""
        T = self.tokens.shape[1]

        def keep(names, chosen):
            values = {k: getattr(self, k) for k in names.split()}
            return {k: v if v is None else v[chosen] for k, v in values.items()}

        ours = self.row % size == rank                                      # (M,)
        number = ours.cumsum(0) - 1                                         # (M,) new index of a mention
        rows = torch.arange(rank, len(self.tokens), size, device=self.row.device)
        part = keep("tokens unmasked attention_mask label answer answer_mention", rows)
        part |= keep("row start end entity passage masked mention", ours)
        part |= keep("target_index target target_mention", self.target_index // T % size == rank)
        part["row"] = part["row"] // size
        part["target_index"] = part["target_index"] // T // size * T + part["target_index"] % T
        for name in ("target_mention", "answer_mention"):
            if (old := part[name]) is not None and len(number):             # -1 stays -1
                part[name] = torch.where(old < 0, old, number[old])
        return Batch(**part)


def _ranges(starts, lengths):
    """The ranges [s, s + n) one after the other: which range, the offset in it, the value."""
    which = np.repeat(np.arange(len(lengths)), lengths)
    offset = np.arange(len(which)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return which, offset, starts[which] + offset


def _gather(corpus, passages):
    """tokens (B, T) of these passages and all of their mentions: number, row, start, end, each (M,)."""
    starts, mentions = corpus.passage_start[passages], corpus.mention_first[passages]
    lengths = corpus.passage_start[passages + 1] - starts
    counts = corpus.mention_first[passages + 1] - mentions
    tokens = np.full((len(passages), lengths.max()), corpus.special[PAD], np.int64)
    row, column, source = _ranges(starts, lengths)
    tokens[row, column] = corpus.tokens[source]
    row, _, mention = _ranges(mentions, counts)
    start, end = (x[mention].astype(np.int64) for x in (corpus.mention_start, corpus.mention_end))
    return tokens, mention, row, start, end


def _batch(corpus, passages, unmasked, tokens, chosen, owner, mention, row, start, end) -> Batch:
    """chosen, owner (B * T,): which tokens are to be predicted, and the mention that each belongs to."""
    T = unmasked.shape[1]
    # a mention is masked if as many of its tokens are chosen as it has: prefix sums over the flat batch
    n_chosen, n_tokens = np.cumsum(chosen), np.cumsum(corpus.maskable[unmasked])
    first, last = row * T + start, row * T + end
    masked = n_chosen[last] - n_chosen[first] == n_tokens[last] - n_tokens[first]
    target_index = np.flatnonzero(chosen)
    arrays = (tokens, unmasked, unmasked != corpus.special[PAD],
              row, start, end, corpus.mention_entity[mention].astype(np.int64), passages[row], masked,
              target_index, unmasked.ravel()[target_index], owner[target_index], mention)
    return Batch(*map(torch.from_numpy, arrays))


def make_batch(corpus, passages, rng=None, mention_rate=.2, token_rate=.1, max_mentions=24) -> Batch:
    """Passages as a masked batch (app. A): 20% of whole mentions, 10% of the tokens in no mention.

    rng: a numpy Generator; None does where both rates are 0 and no mention is left out. max_mentions:
    how many there may be a passage on average; with more, the batch keeps a uniform sample (None: all)."""
    passages = np.asarray(passages, np.int64)
    unmasked, mention, row, start, end = _gather(corpus, passages)
    B, T = unmasked.shape
    word = corpus.maskable[unmasked].ravel()                                # (B * T,)
    first, last = row * T + start, row * T + end
    depth = np.cumsum(np.bincount(first, minlength=B * T) - np.bincount(last, minlength=B * T))
    inside = depth > 0
    # Overlapping and nested mentions are a group; a group is masked whole or not at all, for a mention half
    # masked would tell its other half. Groups are numbered 1, 2, … along the flat batch.
    group = np.cumsum(inside & ~np.concatenate([[False], inside[:-1]]))
    if max_mentions is not None and len(mention) > max_mentions * B:
        kept = np.sort(rng.choice(len(mention), max_mentions * B, replace=False))
        mention, row, start, end, first = (x[kept] for x in (mention, row, start, end, first))

    chosen = np.zeros(B * T, bool)
    if token_rate:
        chosen = word & ~inside & (rng.random(B * T) < token_rate)
    if mention_rate and len(mention):
        groups, counts = np.unique(group[first], return_counts=True)
        shuffled = rng.permutation(len(groups))
        n = max(1, round(mention_rate * len(mention)))
        enough = np.searchsorted(np.cumsum(counts[shuffled]), n) + 1        # more than n by a last group
        chosen |= word & inside & np.isin(group, groups[shuffled[:enough]])
    owner = np.full(B * T, -1)
    which, _, position = _ranges(first + 1, end - start - 1)
    owner[position] = which                         # inner mentions come later: the innermost owns a token

    tokens, index = unmasked.copy(), np.flatnonzero(chosen)
    if len(index):
        fate = rng.random(len(index))               # 80% [MASK], 10% a random word, 10% left as they are
        random_words = rng.choice(corpus.words, len(index))
        tokens.ravel()[index] = np.where(fate < .8, corpus.special[MASK],
                                         np.where(fate < .9, random_words, unmasked.ravel()[index]))
    return _batch(corpus, passages, unmasked, tokens, chosen, owner, mention, row, start, end)


def eval_batch(corpus, mentions) -> Batch:
    """A row for each corpus mention: its passage, with exactly this mention replaced by [MASK] throughout."""
    passages = corpus.passage_of(mentions)
    unmasked, mention, row, start, end = _gather(corpus, passages)
    B, T = unmasked.shape
    asked = np.flatnonzero(mention == np.asarray(mentions)[row])            # (B,) one a row
    which, _, position = _ranges(row[asked] * T + start[asked] + 1, end[asked] - start[asked] - 1)
    owner, chosen = np.full(B * T, -1), np.zeros(B * T, bool)
    owner[position] = asked[which]
    chosen[position] = corpus.maskable[unmasked.ravel()[position]]
    tokens = np.where(chosen.reshape(B, T), corpus.special[MASK], unmasked)
    return _batch(corpus, passages, unmasked, tokens, chosen, owner, mention, row, start, end)


def eval_mentions(corpus, min_elsewhere=1) -> np.ndarray:
    """Numbers of the mentions in held-out passages that only a memory can fill in.

    Linked, the entity stands once in the passage, is not the article's title (which most of its passages
    name), and is linked in at least min_elsewhere other passages of the corpus, held out or not."""
    linked = np.flatnonzero(corpus.mention_entity)
    E, entity, passage = len(corpus.entity_names), corpus.mention_entity[linked], corpus.passage_of(linked)
    pairs, pair, count = np.unique(passage * E + entity, return_inverse=True, return_counts=True)
    passages_with = np.bincount(pairs % E, minlength=E)                     # (E,)
    own = np.array([corpus.entity_index.get(title, 0) for title in corpus.titles])[corpus.article[passage]]
    return linked[corpus.held_out[passage] & (count[pair] == 1) & (own != entity)
                  & (passages_with[entity] > min_elsewhere)]


def related_clusters(corpus, size, seed, passages, max_articles=500) -> list:
    """Clusters of `size` of these passages from related articles (app. A.1): int64 arrays of passage numbers.

    Each starts from the article with most unused passages; then the article joins whose entity set has the
    largest Jaccard similarity to that of the cluster, until it is full. What of an article does not fit stays
    unused. Ties are broken by seed. Entities of more than max_articles articles are left out of the sets:
    they say little about what is related, and would make every article a candidate of every other."""
    passages = np.sort(np.asarray(passages, np.int64))
    numbers, article = np.unique(corpus.article[passages], return_inverse=True)
    A, E = len(numbers), len(corpus.entity_names)
    article = np.random.default_rng(seed).permutation(A)[article]   # now ties can go to the smallest
    by_article = passages[np.argsort(article, kind="stable")]
    unused = np.bincount(article, minlength=A)                      # (A,) passages not used yet: those that
    after = np.cumsum(unused)                                       # (A,) end here in by_article
    # the pairs (article, entity), once by article and once by entity: an index in either direction
    mentions = corpus.mention_first[passages]
    which, _, mention = _ranges(mentions, corpus.mention_first[passages + 1] - mentions)
    entity = corpus.mention_entity[mention].astype(np.int64)
    pairs = np.unique((article[which] * E + entity)[entity > 0])
    pairs = pairs[np.bincount(pairs % E, minlength=E)[pairs % E] <= max_articles]
    entities, entities_of = pairs % E, np.searchsorted(pairs, np.arange(A + 1) * E)
    order = np.argsort(entities, kind="stable")
    articles, articles_of = pairs[order] // E, np.searchsorted(entities[order], np.arange(E + 1))
    n_entities = np.diff(entities_of)                               # (A,)

    shared, in_cluster = np.zeros(A, np.int64), np.zeros(E, bool)   # (A,) |entities of both|; (E,)
    clusters, first_unused = [], 0
    while unused.any():
        cluster, room, joined, candidates, a = [], size, [], np.empty(0, np.int64), unused.argmax()
        while True:
            n = min(room, unused[a])
            cluster.append(by_article[after[a] - unused[a]:][:n])
            unused[a], room = unused[a] - n, room - n
            new = entities[entities_of[a]:entities_of[a + 1]]
            new = new[~in_cluster[new]]
            in_cluster[new] = True
            joined.append(new)
            touched = articles[_ranges(articles_of[new], articles_of[new + 1] - articles_of[new])[2]]
            np.add.at(shared, touched, 1)
            candidates = np.union1d(candidates, touched)            # sorted; they share an entity
            candidates = candidates[unused[candidates] > 0]
            if not room:
                break
            if len(candidates):
                both, either = shared[candidates], n_entities[candidates] + sum(map(len, joined))
                a = candidates[(both / (either - both)).argmax()]
            else:                                                   # similarity 0 to all that are left
                while first_unused < A and not unused[first_unused]:
                    first_unused += 1
                if first_unused == A:
                    break
                a = first_unused
        clusters.append(np.concatenate(cluster))
        shared[candidates], in_cluster[np.concatenate(joined)] = 0, False
    return clusters


# ---------------------------------------------------------------- examples: claims and questions

def _name_words(name):
    return [w.group().lower() for w in re.finditer(r"\w+|[^\w\s]", name)]


def name_index(names) -> dict:
    """{"port ellin": "Port_Ellin"}: names by their words; "_" is a space, a bracket at the end goes."""
    index = {}
    for name in names:
        words = _name_words(re.sub(r"\s*\([^()]*\)$", "", name.replace("_", " ")))
        if any(w.isalnum() for w in words):
            index.setdefault(" ".join(words), name)
    return index


def find_mentions(text, names) -> list:
    """Mentions of entity names in a text: longest match first, whole words, whatever the case.

    names: entity names, or their name_index where many texts are searched."""
    index = names if isinstance(names, dict) else name_index(names)
    longest = max((name.count(" ") + 1 for name in index), default=0)
    words = [(w.start(), w.end(), w.group().lower()) for w in re.finditer(r"\w+|[^\w\s]", text)]
    mentions, i = [], 0
    while i < len(words):
        for n in range(min(longest, len(words) - i), 0, -1):
            name = index.get(" ".join(w for _, _, w in words[i:i + n]))
            if name is not None:
                mentions.append(Mention(words[i][0], words[i + n - 1][1], name))
                i += n - 1
                break
        i += 1
    return mentions


@lru_cache(1)
def _pipeline():
    try:
        import spacy
        names = [name for name in spacy.util.get_installed_models() if name.startswith("en")]
        if names:
            return spacy.load(names[0], exclude=["ner", "lemmatizer"])
    except Exception as e:              # not installed, or not fitting together, which raises anything
        raise UserError(f"noun chunks need spaCy, which does not run here: {e}") from e
    raise UserError("noun chunks need an English pipeline of spaCy, such as en_core_web_sm, and none is installed")


def noun_chunks(text) -> list:
    """The noun chunks of a text as mentions: the paper's mentions of claims and questions (app. B.1)."""
    return [Mention(c.start_char, c.end_char, None) for c in _pipeline()(text).noun_chunks]


def mention_finder(names):
    """(how, find): find(text) -> the mentions of a text that comes without. Noun chunks where spaCy and an English
    pipeline are installed, else the longest matches of these entity names."""
    try:
        _pipeline()
        return "spaCy's noun chunks", noun_chunks
    except UserError as e:
        index = name_index(names)
        return f"entity names ({e})", lambda text: find_mentions(text, index)


def example_batch(examples, task, tokenizer, entity_index, max_mentions=32, max_length=512, claim_mask=False) -> Batch:
    """Examples with mentions as a batch; a question ends in "[E_start] [MASK] [E_end]" (§4).

    task: "claims", "qa" or None. claim_mask: claims end so too. Clozes may stand among claims, with no label but one mention's
    entity as answer: that mention is masked, in place of a [MASK] at the end; a claim's answer is 0. entity_index: name ->
    entity id. A text longer than max_length positions is cut."""
    with_mask = task == "qa" or claim_mask
    special, rng = special_ids(tokenizer), np.random.default_rng(0)
    rows, mentions = [], []                     # mentions: (row, start, end, entity, is it the answer, is it to be masked)
    encodings = tokenizer.encode_batch([e.text for e in examples], add_special_tokens=False)
    for r, (example, encoding) in enumerate(zip(examples, encodings)):
        found = example.mentions
        tail = [special[t] for t in (E_START, MASK, E_END)] if with_mask else []
        room = max_length - len(tail)
        tokens, asked = [special[CLS], special[SEP]], False
        for piece in encode_text(encoding, found, room, room, special, Counter())[:1]:
            tokens = piece.tokens.tolist()
            for start, end, i in zip(piece.start, piece.end, piece.index):
                named = task == "claims" and found[i].entity in example.answers
                mentions.append((r, start, end, entity_index.get(found[i].entity, 0), named and not asked, named))
                asked |= named
        if asked:
            tail = []
        rows.append(tokens[:-1] + tail + tokens[-1:])
        if tail:
            mentions.append((r, len(tokens) - 1, len(tokens) + 1, 0, True, False))
    unmasked = np.full((len(rows), max(map(len, rows))), special[PAD], np.int64)
    for r, ids in enumerate(rows):
        unmasked[r, :len(ids)] = ids
    tokens = unmasked.copy()
    for r, start, end, *_, named in mentions:
        if named:
            words = tokens[r, start + 1:end]
            words[~np.isin(words, [special[E_START], special[E_END]])] = special[MASK]      # markers of a mention inside stay
    mentions = np.array([m[:5] for m in mentions], np.int64).reshape(-1, 5)
    if len(mentions) > max_mentions * len(rows):            # a uniform sample, but every answer
        order = np.argsort(rng.random(len(mentions)) - mentions[:, 4])
        mentions = mentions[np.sort(order[:max_mentions * len(rows)])]
    row, start, end, entity, is_answer = mentions.T.copy()
    none, empty = np.full(len(row), -1), np.empty(0, np.int64)
    batch = Batch(*map(torch.from_numpy, (tokens, unmasked, tokens != special[PAD], row, start, end, entity,
                                          none, is_answer == 1, empty, empty, empty, none)))
    if task == "claims":
        batch.label = torch.tensor([-1 if e.label is None else e.label for e in examples])
    if with_mask or any(e.answers for e in examples):
        batch.answer = torch.tensor([next((entity_index[a] for a in e.answers if a in entity_index), 0) for e in examples])
        batch.answer_mention = torch.full((len(examples),), -1)
        batch.answer_mention[row[is_answer == 1]] = torch.tensor(np.flatnonzero(is_answer))
        batch.answer[batch.answer_mention < 0] = 0          # of a cloze that was cut before it asks
    return batch


# ---------------------------------------------------------------- the toy world

# A name is a first and a last word, so that it is learnt as a pair and an unseen name is a new pair.
NAMES = {kind: [pool.split() for pool in pools] for kind, pools in dict(
    person=("""Alma Boris Clara Dario Edith Felix Greta Hugo Irene Jonas Karin Leon Marta Nils Olga Pavel
        Quinn Rosa Stefan Tilda Ulric Vera Walter Xenia Yara Zeno Agnes Bruno Celia Dmitri Elsa Fabian
        Gilda Henrik Ida Jasper Kira Lucas Mona Nestor Oskar Petra Rufus Sonja Tobias Ursula Viktor Wanda""",
        """Verran Holt Lindqvist Marek Norwood Ostrov Pellin Quist Rademaker Sorel Tarkov Ulland Varga
        Westrup Yarrow Zeller Abbott Brandt Corvin Dahl Eckhart Falk Garnier Hale Ibsen Jarvis Keller
        Lorenz Moreau Nyberg Orloff Pascal Renner Salinas Thorne Unwin Vance Weaver Adler Bishop Castell
        Draper Engel Forster Grange Hartley Irving Jansen Kovac Lambert Mercer Novak Olsen Porter Ramsey
        Sutter"""),
    city=("""Port Saint Fort Mount Lake Glen Castle Harbour Abbey High Green White Black Silver Golden
        Stone Long Bright Cold Deep Fair Kings Queens Bishops""",
        """Ellin Orla Dunmere Ashby Belcourt Carrow Dalton Elmswell Farrow Gaston Hollis Ilford Jarrow
        Kelso Lorne Melby Norham Oakley Penrith Redmond Selby Tarrant Upton Vernon Wexley Yardley Amber
        Brook"""),
    country=("North South East West New Upper Lower Inner Outer Grand Free United",
        """Karovia Maland Tessara Valdoria Lumeria Norvania Brenia Caldora Drevia Estonar Fyria Galdova
        Halvia Istrana Jorvia Kestoria"""),
    company=("""Norvik Apex Atlas Beacon Crown Delta Eagle Falcon Globe Helix Iris Jupiter Kestrel Lotus
        Meteor Nova Orion Phoenix Quartz Rocket Summit Titan Vector Zenith""",
        """Motors Steel Foods Books Airways Bank Chemicals Dairy Electric Fabrics Glass Hotels Insurance
        Jewels Kitchens Lumber Media Optics Paper Rail Shipping Textiles"""),
    film=("""Silent Broken Crimson Distant Endless Frozen Gentle Hidden Iron Jagged Lonely Midnight Narrow
        Painted Quiet Restless Savage Tender Velvet Wild Winter Burning Empty Fallen Hollow Last Lost Pale
        Scarlet Secret Sleeping Stolen Sudden Twisted Wandering Wooden""",
        """Garden Mirror River Letters Shadow Window Dancer Island Orchard Promise Station Tiger Voyage
        Whisper Anthem Bells Circus Diary Echo Feast Ghost Harvest Journey Kingdom Lantern Memory Mountain
        Night Ocean Painter Road Sailor Storm Summer Thief Tower"""),
).items()}
COUNTS = dict(person=800, city=220, country=60, company=220, film=600)


class Relation(NamedTuple):
    subject: str            # types
    object: str
    noun: str               # "{s}'s {noun}" names the object without its name
    phrases: list           # five for the corpus; {s} subject, {o} object
    claims: list
    questions: list


RELATIONS = dict(
    born_in=Relation("person", "city", "birthplace", [
        "{s} was born in {o}.", "{o} is the city where {s} was born.", "The birthplace of {s} is {o}.",
        "{s} is a native of {o}.", "In {o} stands the house where {s} was born."],
        ["{s} was born in the city of {o}.", "{o} is the birthplace of {s}."],
        ["In which city was {s} born?", "Where was {s} born?"]),
    employer=Relation("person", "company", "employer", [
        "{s} works for {o}.", "{o} is the company which employs {s}.", "The employer of {s} is {o}.",
        "{s} has a job at {o}.", "Every month {o} pays the wages of {s}."],
        ["{o} employs {s}.", "{s} has a job at the company {o}."],
        ["Which company employs {s}?", "Which company is the employer of {s}?"]),
    teacher=Relation("person", "person", "teacher", [
        "{s} was taught by {o}.", "{o} taught {s} for many years.", "The teacher of {s} was {o}.",
        "{s} learned everything from {o}.", "Long ago {o} had {s} as a pupil."],
        ["{s} was a pupil of {o}.", "{o} was the teacher who taught {s}."],
        ["Who taught {s}?", "Who was the teacher of {s}?"]),
    country=Relation("city", "country", "country", [
        "{s} is a city in {o}.", "{o} is the country where {s} lies.", "The country of {s} is {o}.",
        "{s} belongs to {o}.", "On the map {s} is a part of {o}."],
        ["{s} lies in {o}.", "{s} is a part of the country {o}."],
        ["In which country is {s}?", "{s} is a city in which country?"]),
    mayor=Relation("city", "person", "mayor", [
        "The mayor of {s} is {o}.", "{o} was chosen to be mayor by the people of {s}.", "{s} is led by {o}.",
        "Who runs the town hall of {s}? {o}.", "{o} leads the council of {s}."],
        ["{o} leads the people of {s}.", "{o} was chosen to be the mayor of {s}."],
        ["Who is the mayor of {s}?", "Who leads the people of {s}?"]),
    capital=Relation("country", "city", "capital", [
        "The capital of {s} is {o}.", "{o} is the seat of the government of {s}.",
        "{s} is governed from {o}.", "{s} has {o} as capital.", "In {o} the parliament of {s} meets."],
        ["{o} is the capital of {s}.", "The government of {s} meets in {o}."],
        ["Which city is the capital of {s}?", "In which city is the government of {s}?"]),
    home=Relation("company", "city", "home", [
        "{s} is based in {o}.", "The main office of {s} stands in {o}.", "{o} is the home of {s}.",
        "{s} is run from an office in {o}.", "In {o} stands the factory of {s}."],
        ["{s} has the main office in {o}.", "The home of {s} is in the city of {o}."],
        ["In which city is {s} based?", "Where is the main office of {s}?"]),
    founder=Relation("company", "person", "founder", [
        "{s} was founded by {o}.", "{o} started {s} in a small shop.", "The founder of {s} was {o}.",
        "{s} began as an idea of {o}.", "With little money {o} set up {s}."],
        ["{s} was started by {o}.", "{o} is the founder of {s}."],
        ["Who founded {s}?", "Who was the founder of {s}?"]),
    director=Relation("film", "person", "director", [
        "{s} was directed by {o}.", "{o} is the director of {s}.", "{o} made the film {s}.",
        "The film {s} is the work of {o}.", "With {s} the director {o} won a prize."],
        ["{o} directed {s}.", "The director of the film {s} was {o}."],
        ["Who directed {s}?", "Who was the director of {s}?"]),
    star=Relation("film", "person", "star", [
        "{o} plays the lead in {s}.", "The star of {s} is {o}.", "{s} has {o} in the main part.",
        "In {s} the hero is played by {o}.", "Who became famous as the hero of {s}? {o}."],
        ["The lead in {s} is played by {o}.", "{o} is the star of the film {s}."],
        ["Who plays the lead in {s}?", "Who is the star of {s}?"]),
    location=Relation("film", "city", "location", [
        "{s} was filmed in {o}.", "The streets of {o} can be seen in {s}.",
        "For {s} the cameras came to {o}.", "The location of {s} was {o}.",
        "{o} was chosen as the location for {s}."],
        ["{o} is the city where {s} was filmed.", "The film {s} was made in {o}."],
        ["In which city was {s} filmed?", "Where was the film {s} made?"]),
)


def _say(phrase, subject, obj="", noun=None, bridge=None):
    """A phrase filled in, and its mentions. With a noun the phrase is about "[X]'s [director]": two hops. That description
    is linked to the bridge where one is given; an object "a city" is nobody's name."""
    text, mentions = "", []

    def mention(name, entity):
        nonlocal text
        mentions.append(Mention(len(text), len(text) + len(name), entity))
        text += name

    for part in re.split(r"(\{[so]\})", phrase):
        if part in ("{s}", "{o}"):
            name = subject if part == "{s}" else obj
            if name.islower():
                text += name
            else:
                mention(name, name)
        else:
            text += part
        if part == "{s}" and noun:
            text += "'s "
            mention(noun, bridge)
    return text[0].upper() + text[1:], mentions


def _line(key, sentence, **others):
    return {key: sentence[0], "mentions": [m._asdict() for m in sentence[1]], **others}


def _facts(rng, names):
    """Facts {(subject, relation): object} drawn at random; names: {type: names}."""
    facts = {}
    for name, relation in RELATIONS.items():
        for subject in names[relation.subject]:
            one, other = rng.choice(names[relation.object], 2, replace=False).tolist()
            facts[subject, name] = other if one == subject else one
    return facts


def _chains(facts):
    """Two facts as one, {(subject, first relation, second): (bridge, object)}, without those that return."""
    return {(subject, first, second): (bridge, facts[bridge, second])
            for (subject, first), bridge in facts.items() for second in RELATIONS
            if facts.get((bridge, second), subject) not in (subject, bridge)}


def toy_world(seed=0, descriptions=0.5):
    """Corpus lines and {"claims.one_hop.train": lines, …} of a made-up world, from nothing but a seed.

    It is two worlds that share name words but no entity: one is seen in training, the other (20%) is held
    out whole. A subject has five passages; each states all of its facts, every time in another phrase, so a
    masked mention can be recovered from the other passages and from nowhere else. 5% of the passages of the
    seen world are held out too. Examples are split by fact, (subject, relation), for all tasks alike; both
    facts of a two-hop example are in its split.

    descriptions: the share of the seen world's training passages in which one fact is not stated: in place of "X was
    directed by Z." stands "X's director was born in a city.", with a link to Z on the description, as links stand in
    Wikipedia. So a model learns whom a description means, which two hops begin with. The examples do not link it."""
    rng = np.random.default_rng(seed)
    worlds = {}, {}                                         # seen, unseen: {type: names}
    for kind, (firsts, lasts) in NAMES.items():
        n = COUNTS[kind]
        pairs = rng.permutation(len(firsts) * len(lasts))[:n + n // 5]
        names = [f"{firsts[i // len(lasts)]} {lasts[i % len(lasts)]}" for i in pairs]
        worlds[0][kind], worlds[1][kind] = names[:n], names[n:]
    facts = [_facts(rng, names) for names in worlds]
    chains = [_chains(f) for f in facts]
    split = dict(zip(facts[0], rng.choice(["train", "dev", "test"], len(facts[0]), p=[.66, .15, .19])))
    split.update(dict.fromkeys(facts[1], "unseen"))

    lines, relations_of = [], {}
    for subject, relation in [*facts[0], *facts[1]]:
        relations_of.setdefault(subject, []).append(relation)
    about = {name: [other for other in RELATIONS.values() if other.subject == relation.object]
             for name, relation in RELATIONS.items()}       # what can be said of its object
    for subject, relations in relations_of.items():
        seen = split[subject, relations[0]] != "unseen"
        world, held_out = facts[not seen], rng.integers(20)     # below 5 for one in four: 5% of passages
        order = {relation: rng.permutation(5) for relation in relations}
        left_out = Counter()
        for i in range(5):
            said = {r: _say(RELATIONS[r].phrases[order[r][i]], subject, world[subject, r])
                    for r in rng.permutation(relations)}
            possible = [r for r in relations if split[subject, r] == "train" and left_out[r] < 2 and about[r]]
            if rng.random() < descriptions and i != held_out and possible:
                first = possible[rng.integers(len(possible))]
                left_out[first] += 1
                second = about[first][rng.integers(len(about[first]))]
                said[first] = _say(rng.choice(second.phrases), subject, f"a {second.object}", RELATIONS[first].noun,
                                   world[subject, first])
            text, mentions = "", []
            for sentence, found in said.values():
                text += " " if text else ""
                mentions += [Mention(m.start + len(text), m.end + len(text), m.entity) for m in found]
                text += sentence
            lines.append({"title": subject, **_line("text", (text, mentions)),
                          "split": "train" if seen and i != held_out else "held_out"})
    lines = [lines[i] for i in rng.permutation(len(lines))]

    examples = {}
    for name, limit in dict(train=8000, dev=300, test=500, unseen=500).items():
        world, chain = facts[name == "unseen"], chains[name == "unseen"]
        hops = dict(one_hop=[(s, [r], None, obj) for (s, r), obj in world.items() if split[s, r] == name],
                    two_hop=[(s, [q, r], bridge, obj) for (s, q, r), (bridge, obj) in chain.items()
                             if split[s, q] == split[bridge, r] == name])
        for hop, items in hops.items():
            qa, claims, objects = [], [], {}
            for _, relations, _, obj in items:
                objects.setdefault(relations[-1], []).append(obj)
            for i in rng.permutation(len(items))[:limit]:
                subject, relations, bridge, obj = items[i]
                relation, noun = RELATIONS[relations[-1]], RELATIONS[relations[0]].noun if bridge else None
                info = dict(subject=subject, relations=relations, object=obj, **({"bridge": bridge} if bridge else {}))
                qa.append(_line("question", _say(rng.choice(relation.questions), subject, noun=noun),
                                answers=[obj], **info))
                # A wrong object is that of another fact of this relation and split, so as frequent as right ones
                # are, and each fact is claimed rightly and wrongly: nothing but the memory tells them apart. In
                # training so in every phrase, each with another wrong object, to be harder to learn by heart.
                wrong = [o for o in objects[relations[-1]] if o not in (obj, subject, bridge)]
                if not wrong:
                    continue
                for phrase in relation.claims if name == "train" else [rng.choice(relation.claims)]:
                    for claimed, label in ((obj, "SUPPORTS"), (wrong[rng.integers(len(wrong))], "REFUTES")):
                        claims.append(_line("text", _say(phrase, subject, claimed, noun), label=label, **info))
            examples[f"qa.{hop}.{name}"] = qa
            examples[f"claims.{hop}.{name}"] = claims if name == "train" else claims[:limit]
    for key in [key for key in examples if key.endswith(("one_hop.train", "one_hop.dev"))]:     # to learn from together
        examples[key.replace("one_hop", "both")] = examples[key] + examples[key.replace("one_hop", "two_hop")]
    return lines, examples


def write_lines(path, records):
    """JSON lines, written to a temporary name and renamed."""
    write_file(path, lambda file: file.writelines(
        (json.dumps(r, ensure_ascii=False) + "\n").encode() for r in records))


def write_toy(folder, lines, examples):
    """Writes what toy_world made: corpus.jsonl, and examples by task, hops and split as claims.one_hop.train.jsonl."""
    try:
        os.makedirs(folder, exist_ok=True)
        for name, records in examples.items():
            write_lines(os.path.join(folder, name + ".jsonl"), records)
        write_lines(os.path.join(folder, "corpus.jsonl"), lines)
    except OSError as e:
        raise UserError(f"{folder}: cannot be written ({e.strerror}); choose another folder") from e


# ---------------------------------------------------------------- Wikipedia dumps

# A page becomes paragraphs in three steps, each linear in its length. First goes what holds no prose, nested
# or not. Then a link becomes \1 number \2 text \3: XML cannot hold these characters, so no page can, and what
# is done later may move a link but not confuse it. Last, other markup goes, lines become paragraphs, and
# \1 … \3 become mentions. \4 stands where something was taken out: its two sides do not grow together.

BATCH = 1 << 20             # characters of wikitext that a worker gets at once
MAX_PAGE = 1 << 25          # bytes; MediaWiki itself stops at 2 MB
NAMESPACES = {"media": -2, "special": -1, "talk": 1, "user": 2, "user talk": 3, "wikipedia": 4, "project": 4,
              "wp": 4, "wikipedia talk": 5, "file": 6, "image": 6, "mediawiki": 8, "template": 10, "help": 12,
              "category": 14, "portal": 100, "draft": 118, "module": 828}   # and those that the dump names
NO_PROSE = ("ref|references|math|chem|nowiki|gallery|timeline|imagemap|pre|source|syntaxhighlight|score|"
            "hiero|graph|mapframe|templatestyles|inputbox")
# "|}" closes a table, but in "|}}" the bar is the empty last argument of a template
TOKEN = re.compile(r"\{[{|]|\}\}|\|\}(?!\}(?!\}(?!\})))|<(?:!--|"
                   rf"(/?)((?i:{NO_PROSE}|table))\b([^<>]*)>)")
TAG_END = {tag: re.compile(rf"</{tag}\s*>", re.I) for tag in NO_PROSE.split("|")}
# the few templates that are part of a sentence: {{convert|26|mi|km}} is "26 mi", {{lang|la|homo}} is "homo"
SAYING = re.compile(r"\{\{ *(convert|cvt|lang|transl|nihongo|nowrap|small|smaller|flag|angbr) *"
                    r"\|([^{}]{0,400})\}\}", re.I)
ARGUMENT = re.compile(r"\|(?![^\[\]]*\]\])")                # a bar that is not inside a link
LINK = re.compile(r"\[\[([^\[\]|]*)"                        # target
                  r"(?:\|([^\[\]]*(?:(?:\[(?!\[)|\](?!\]))[^\[\]]*)*))?\]\]"    # text, or a [text]
                  r"([a-z]*)")                              # trail: [[dog]]s
REDIRECT = re.compile(r"\s*#\s*redirect\w*[\s:]*\[\[([^\[\]|]+)", re.I)
NO_TITLE = re.compile("[<>{}\n\1\4]")
LANGUAGE = re.compile(r"[a-z]{2,3}(-[a-z]+)*|simple")   # [[fr:Chien]] stands in the margin, not in the text
OTHER_WIKI = re.compile(r"[a-z]|wikt|wiktionary|wiki(source|books|quote|news|species|data|versity|voyage)|"
                        r"commons|voy|species|meta|mw|doi")
# English; a dump of another language needs its own words in these two
DISAMBIGUATION = re.compile(r"\{\{\s*(?:(?:[\w -]+ )?disambig(?!\w* needed)[\w -]*|dab|hndis|geodis)"
                            r"\s*[|}]|__DISAMBIG__", re.I)
NO_PROSE_SECTIONS = set("references|notes|notes and references|references and notes|footnotes|citations|"
                        "sources|works cited|bibliography|further reading|external links|see also|"
                        "gallery".split("|"))
MARKUP = [(re.compile(pattern), new) for pattern, new in (
    (r"\[(?:https?:|ftp:|mailto:|//)[^\s\[\]\1-\3]*(?:\s([^\[\]\n]*))?\]", r"\1"),          # [http://… text]
    (r"<br[^<>\1-\3]*>", " "), (r"</?[a-zA-Z][^<>\1-\3]*>", ""), (r"''+", ""), (r"__[A-Z]+__", ""))]
LITERALS = [(x, " ") for x in "\t\xa0\u2009"] + [(x, "") for x in ("[[", "]]", "{{", "}}", "{|", "|}")]
GAPS = [(re.compile(pattern), new) for pattern, new in (    # that templates leave: "Plato ( ; died 347 BC )"
    (r"  +", " "), (r"\( ?(?:[;,] ?)+", "("), (r"\( ?\) ?", ""), (r" (?=[,.;)](?: |$))", ""))]
MARK = re.compile("\1(\\d+)\2([^\3]*)\3")


class Page(NamedTuple):
    title: str
    namespace: int
    redirect: str | None    # the target as written
    text: str


def canonical(title):
    """A title as MediaWiki stores it: "_" is a space, the first letter is upper case, no "#section"."""
    title = " ".join(html.unescape(title).partition("#")[0].replace("_", " ").split())
    return title[:1].upper() + title[1:]


def read_dump(path, namespaces, description="") -> Iterator[Page]:
    """The pages of a MediaWiki XML dump, bz2 or plain, of any export version, as a stream. Raises UserError.

    namespaces: {"file": 6, …}, lower case; those in the dump's head are added."""
    page, pages, parts, depth, unfinished = {}, [], None, 0, 0

    def start(tag, attributes):
        nonlocal parts, depth
        depth += 1
        if depth > 20 or (depth == 1) != (tag == "mediawiki"):
            raise UserError(f"{path}: <{tag}> where a MediaWiki dump has none; give a pages-articles dump")
        if tag == "page":
            page.clear()
        elif tag == "redirect":
            page[tag] = attributes.get("title", "")
        elif tag == "namespace":
            page["key"] = attributes.get("key", "")
        if tag in ("title", "ns", "text", "namespace"):
            parts = []

    def characters(data):
        if parts is not None:
            parts.append(data)

    def end(tag):
        nonlocal parts, depth, unfinished
        depth, unfinished = depth - 1, 0
        if tag in ("title", "ns", "text", "namespace"):     # of several revisions the last one counts
            page[tag], parts = "".join(parts), None
        if tag == "namespace" and page[tag]:
            namespaces[page[tag].lower()] = int(page["key"])
        elif tag == "page":
            title, text, redirect = page.get("title", ""), page.get("text", ""), page.get("redirect")
            if not redirect:                                # old exports name no target, or have no such tag
                found = REDIRECT.match(text) or redirect == "" and LINK.search(text)
                redirect = found[1] if found else redirect
            prefix = title.rpartition(":")[0].partition(":")[0].lower()         # the oldest have no <ns>
            pages.append(Page(title, int(page.get("ns", namespaces.get(prefix, 0))), redirect, text))

    def doctype(*_):                                        # before an entity is defined, let alone expanded
        raise UserError(f"{path}: holds a <!DOCTYPE>, which no MediaWiki dump does; it is not read")

    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = characters, doctype
    try:
        with open(path, "rb") as raw, tqdm(total=os.path.getsize(path), desc=description, unit="B",
                                           unit_scale=True, leave=False, disable=None) as bar:
            file = bz2.open(raw) if raw.peek(3)[:3] == b"BZh" else raw
            while chunk := file.read(1 << 18):
                unfinished += len(chunk)
                parser.Parse(chunk)
                if unfinished > MAX_PAGE:
                    raise UserError(f"{path}: a page of over {MAX_PAGE:,} bytes; give a pages-articles dump")
                yield from pages
                pages.clear()
                bar.update(raw.tell() - bar.n)
            parser.Parse(b"", True)
    except expat.ExpatError as e:
        raise UserError(f"{path}:{e.lineno}: {expat.ErrorString(e.code)}; not a whole MediaWiki dump, "
                        "download it again") from e
    except ValueError as e:
        raise UserError(f"{path}: a namespace that is no number ({e}); download the dump again") from e
    except EOFError as e:
        raise UserError(f"{path}: the bz2 file is cut short; download it again") from e
    except OSError as e:
        raise UserError(f"{path}: cannot be read ({e.strerror or e}); check the file") from e


def remove_spans(text, counts) -> str:
    """Text without comments, templates, tables, references, …; counts["links", …] grows by the links in them.

    One walk with a stack, so that nesting costs nothing. What is never closed takes its line along."""
    spans, stack, n_open, never, pos = [], [], Counter(), set(), 0

    def add(start, end, kind):
        while spans and spans[-1][0] > start:               # nested in this one
            spans.pop()
        spans.append((start, end, kind))

    for m in TOKEN.finditer(text):
        start, end = m.span()
        if start < pos:                                     # inside a comment or a reference
            continue
        token, tag, closes = m[0], (m[2] or "").lower(), m[1]
        if token == "{{" or tag == "table" and not closes or \
                token == "{|" and not text[max(0, start - 20):start].rpartition("\n")[2].strip(" \t:*#"):
            stack.append(("template" if token == "{{" else "table", start))
            n_open[stack[-1][0]] += 1
        elif token in ("}}", "|}") or tag == "table":
            kind = "template" if token == "}}" else "table"
            while n_open[kind]:                             # what was opened since ends here as well
                top, begin = stack.pop()
                n_open[top] -= 1
                if top == kind:
                    add(begin, end, kind)
                    break
        elif token == "<!--":
            pos = text.find("-->", end) + 3
            pos = pos if pos > 2 else len(text)
            add(start, pos, "comment")
        elif tag and m[3].endswith("/"):
            add(start, end, "reference")
        elif tag and not closes and tag not in never:
            closing = TAG_END[tag].search(text, end)
            if closing:
                pos = closing.end()
                add(start, pos, "reference" if tag.startswith("ref") else f"<{tag}>")
            else:
                never.add(tag)                              # a thousand of them are not a thousand searches
    pos = 0
    for kind, start in stack:
        if start >= pos:                                    # else its line is gone already
            pos = text.find("\n", start) % (len(text) + 1)  # -1, no further line, is the end
            spans.append((start, pos, kind))
            counts["unclosed"] += 1
    out, pos = [], 0
    for start, end, kind in sorted(spans):
        if end > pos:
            out.append(text[pos:start])
            counts["links", f"in a {kind}"] += text.count("[[", max(start, pos), end)
            pos = end
    return "\4".join(out + [text[pos:]])


class Wikitext:
    """Turns pages into lines of the corpus; holds what it must know of the rest of the dump.

    redirects: title -> article, "" where it leads to none. disambiguations: set of titles."""

    def __init__(self, redirects, disambiguations, namespaces, extend=True, zipped=False):
        self.redirects, self.disambiguations, self.namespaces = redirects, disambiguations, namespaces
        self.extend, self.zipped = extend, zipped
        self.target = lru_cache(1 << 16)(self.target)

    def target(self, written):
        """(entity or None, why it is none, whether the link's text is hidden) of a link's target."""
        name = written.strip(" _:")
        if ":" in name:
            prefix = name.partition(":")[0]
            hidden = not written.lstrip().startswith(":")   # [[Category:…]] is hidden, [[:Category:…]] is not
            namespace = self.namespaces.get(prefix.strip().replace("_", " ").lower())
            if namespace in (6, 14):
                return None, "to a file" if namespace == 6 else "to a category", hidden
            if namespace:
                return None, "to another namespace", False
            if OTHER_WIKI.fullmatch(prefix):
                return None, "to another wiki", False
            if LANGUAGE.fullmatch(prefix):
                return None, "to another language", hidden
        name = canonical(name)
        if not name and "#" in written:
            return None, "to a section of its page", False
        if not name or NO_TITLE.search(name):
            return None, "broken", False
        name = self.redirects.get(name, name)
        if not name:
            return None, "to a redirect that leads to no article", False
        if name in self.disambiguations or name.endswith(" (disambiguation)"):
            return None, "to a disambiguation page", False
        return name, None, False

    def paragraphs(self, text, counts) -> list:
        """[(text, mentions)] of a page's wikitext."""
        entities, paragraphs, lines, skipped = [], [], [], 7

        def say(m):
            arguments = [a for a in ARGUMENT.split(m[2]) if "=" not in a] or [""]
            if m[1].lower() in ("convert", "cvt"):          # {{convert|10|to|12|km|mi}}
                said = " ".join(arguments[:4 if arguments[1:2] in (["to"], ["-"], ["and"]) else 2])
            else:
                said = arguments[-1 if m[1].lower() in ("lang", "transl") else 0]
            counts["links", "in a template"] += m[0].count("[[") - said.count("[[")
            return said

        def link(m):
            written, text, trail = m.groups()
            entity, why, hidden = self.target(written)
            if hidden:
                counts["links", why] += 1
                counts["links", "in a caption"] += m[0].count("\1")
                return "\4" + trail
            text = text.rpartition("|")[2] if text and text.strip(" \4") else written.strip(" :#")
            text = text.replace("\n", " ")                  # paragraphs are made of whole lines
            if why or "\1" in text:                         # a link inside a link: the inner one counts
                counts["links", why or "broken"] += 1
                counts["links", "broken"] += m[0].count("\1") - text.count("\1")
                return text + trail
            entities.append(entity)
            return f"\1{len(entities) - 1}\2{text}{trail}\3"

        text = remove_spans(SAYING.sub(say, text), counts)
        for _ in range(8):                                  # innermost first, as in captions
            text, n = LINK.subn(link, text)
            if not n:
                break
        counts["links", "broken"] += text.count("[[")
        text = text.replace("\4", "")
        for pattern, new in MARKUP:
            text = pattern.sub(new, text)
        text = html.unescape(text)
        for old, new in LITERALS:                           # thrice as fast as one pattern
            text = text.replace(old, new)
        for pattern, new in GAPS:
            text = pattern.sub(new, text)
        for line in chain(text.split("\n"), [""]):
            line = line.strip()
            if line.startswith("="):
                level = len(line) - len(line.lstrip("="))
                if level <= skipped:
                    skipped = level if line.strip("= ").lower() in NO_PROSE_SECTIONS else 7
                counts["links", "in a heading"] += line.count("\1")
            elif skipped < 7:
                counts["links", "in a section of references"] += line.count("\1")
            elif line.startswith("|"):                      # of a table or template that nobody opened
                counts["links", "in a table"] += line.count("\1")
            elif line.strip("-*#:; "):
                lines.append(line.lstrip("*#:; ") if line[0] in "*#:;" else line)
                continue
            if lines:
                paragraph, mentions = self.unmark("\n".join(lines), entities, counts)
                kept = any(c.isalnum() for c in paragraph)
                paragraphs += [(paragraph, mentions)] * kept
                counts["links", "kept" if kept else "without a text"] += len(mentions)
                lines = []
        return paragraphs

    def unmark(self, marked, entities, counts):
        parts = MARK.split(marked)                          # plain, number, shown, plain, …, plain
        text, offset, mentions = [parts[0]], len(parts[0]), []
        for number, shown, plain in zip(parts[1::3], parts[2::3], parts[3::3]):
            start, end = offset + len(shown) - len(shown.lstrip()), offset + len(shown.rstrip())
            if start < end:
                mentions.append(Mention(start, end, entities[int(number)]))
            else:
                counts["links", "without a text"] += 1
            text += [shown, plain]
            offset += len(shown) + len(plain)
        return "".join(text), mentions

    def page(self, page, counts) -> list:
        """The corpus lines of one page, as JSON; counts says what became of it and of each of its links."""
        title, n = canonical(page.title), page.text.count("[[")
        kind = ("other namespace" if page.namespace else "redirect" if page.redirect is not None else
                "disambiguation page" if title in self.disambiguations else
                "article" if page.text.strip() else "empty page")
        counts["pages", kind] += 1
        counts["links"] += n
        if kind != "article":
            counts["links", f"on a page left out ({kind})"] += n
            return []
        paragraphs = self.paragraphs(page.text, counts)
        if self.extend:
            counts["added"] -= sum(len(mentions) for _, mentions in paragraphs)
            paragraphs = extend_mentions(title, paragraphs)
            counts["added"] += sum(len(mentions) for _, mentions in paragraphs)
        counts["texts"] += len(paragraphs)
        quote = json.JSONEncoder(ensure_ascii=False).encode     # of strings alone: half the time of whole lines
        return [f'{{"title": {quote(title)}, "text": {quote(text)}, "mentions": [' + ", ".join(
                    [f'{{"start": {start}, "end": {end}, "entity": {quote(entity)}}}' for start, end, entity in mentions])
                + "]}\n" for text, mentions in paragraphs]

    def batch(self, packed):
        """(bytes of the output, counts). Zipped alone, so that any number of workers writes the same file."""
        counts = Counter()
        lines = chain.from_iterable(self.page(Page(*page), counts) for page in json.loads(zlib.decompress(packed)))
        data = "".join(lines).encode()
        return gzip.compress(data, 2, mtime=0) if self.zipped and data else data, counts


# "?" is also what stands for a letter that is not in Latin-1: it parts words, in a text and in a name alike
SPACES = bytes.maketrans(b",.;:()[]\"'-/?\xa0", b" " * 14)


def _words(text) -> list:
    return text.encode("latin-1", "replace").translate(SPACES).split()      # in bytes: twice as fast as any other way


def _strings_for(shown, entity) -> list:
    """[(first word, string, only at a sentence's start)] that mean an entity where a link to it read `shown`.

    Its title without a bracket, and what was shown if the title ends in it ("Einstein", but not "population"
    for "Demographics of Albania"). What is linked in lower case has its capital where a sentence starts."""
    base = entity.rpartition(" (")[0] or entity if entity[-1] == ")" else entity
    common = shown[0].islower()
    name = base[0].lower() + base[1:] if common else base
    if len(name) < 3 or not name[0].isalnum() or common and base != entity and " " not in name:
        return []                                           # after [[state (polity)|state]]: the verb?
    strings = [(name, False)]
    if common:
        strings.append((name[0].upper() + name[1:], True))
        if shown == name + "s":
            strings += [(string + "s", at_start) for string, at_start in strings]
    elif base.endswith(" " + shown) and " of " not in base and base.istitle():
        strings.append((shown, False))
    return [(words[0], string, at_start) for string, at_start in strings if (words := _words(string))]


def _stands_alone(text, start, end, at_start) -> bool:
    before, after = text[max(0, start - 40):start], text[end:end + 2]
    if before[-1:].isalnum() or before[-1:] == "-" or after[:1].isalnum() or \
            after[:1] == "-" and after[1:].isalnum():
        return False
    opening = before.rstrip("\"'( ")
    starts_sentence = not opening or opening[-1] in ".!?\n:;"
    if at_start or not text[start].isupper():
        return starts_sentence or not at_start
    word_before = before[:-1].rpartition(" ")[2] if before[-1:] == " " and not starts_sentence else ""
    return not word_before[:1].isupper() and not (after[:1] == " " and after[1:].isupper())


def extend_mentions(title, paragraphs) -> list:
    """Links what repeats the page's title or an earlier link of the page: Wikipedia links the first only.

    The longest known string wins. A name inside a longer name (a capitalised word beside it) or a compound (a
    hyphen) is left alone."""
    known, by_word = {}, {}     # string -> (only at a start, entity); first word -> strings, known or not yet
    result = []

    def learn(strings, entity):
        for _, string, at_start in strings:
            if known.get(string, ("", ""))[1] != title:     # [[Alabama (people)|Alabama]] on Alabama's page
                known[string] = at_start, entity

    own = _strings_for(title, title)
    if title[1:].islower():                                 # "Anarchism": a name or a common noun
        own += _strings_for(title.lower(), title)[:1]
    learn(own, title)
    for text, mentions in paragraphs:
        strings = [_strings_for(text[m.start:m.end], m.entity) for m in mentions]
        for first, string, _ in chain(own, *strings):
            if len(by_word.setdefault(first, set())) < 100:         # a page of thousands of "List of …"
                by_word[first].add(string)
        places = [(len(text), 0, "")]
        for word in by_word.keys() & _words(text):
            for string in by_word[word]:
                at = text.find(string)
                while at >= 0:
                    places.append((at, -len(string), string))       # so that the longest comes first
                    at = text.find(string, at + 1)
        found, n, pos, limit = [], 0, 0, mentions[0].start if mentions else len(text)
        for start, length, string in sorted(places):
            while limit <= start and n < len(mentions):     # a mention is known from its own end on
                learn(strings[n], mentions[n].entity)
                found.append(mentions[n])
                pos, n = mentions[n].end, n + 1
                limit = mentions[n].start if n < len(mentions) else len(text)
            if start < pos or string not in known:
                continue
            (at_start, entity), end = known[string], start - length
            if length < -4 and text[end:end + 1] == "s" and (at_start or string[0].islower()):
                end += 1                                    # a plural
            if end <= limit and _stands_alone(text, start, end, at_start):
                found.append(Mention(start, end, entity))
                pos = end
        result.append((text, found))
    return result


def _packed(pages):
    """Batches of pages, packed: what Wikitext.batch reads."""
    def pack(batch):
        return zlib.compress(json.dumps(batch, ensure_ascii=False).encode(), 1)

    batch, size = [], 0
    for page in pages:
        batch.append(page)
        size += len(page.text)
        if size >= BATCH:
            yield pack(batch)
            batch, size = [], 0
    if batch:
        yield pack(batch)


def _start_worker(*arguments):
    global _wikitext
    gc.disable()                                            # nothing makes cycles; to look for them took an eighth
    _wikitext = Wikitext(*arguments)


def _wikitext_batch(packed):
    return _wikitext.batch(packed)


def _in_order(batches, workers, arguments):
    if workers <= 1:
        yield from map(Wikitext(*arguments).batch, batches)
        return
    with ProcessPoolExecutor(workers, initializer=_start_worker, initargs=arguments) as pool:
        waiting = deque()                                   # short, or the reader fills the memory
        for batch in batches:
            waiting.append(pool.submit(_wikitext_batch, batch))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()


def write_wiki(path, out, extend=True, workers=1) -> Counter:
    """Writes the corpus of a dump, gzipped if `out` ends in .gz, and returns the counts. Raises UserError.

    A redirect may stand after the links that go through it, so pages wait in a temporary file beside `out` until
    the whole dump is read: about half its text's size, and less than half the time of unpacking the bz2 again.
    Memory holds a few batches and the redirects, about 200 bytes each."""
    namespaces, redirects, disambiguations, counts = dict(NAMESPACES), {}, set(), Counter()

    def pages():
        wikitext = Wikitext({}, set(), namespaces)
        for page in read_dump(path, namespaces, "pages"):
            if page.namespace == 0 and page.redirect is not None:
                redirects[canonical(page.title)] = wikitext.target(page.redirect)[0] or ""
            elif page.title.endswith(" (disambiguation)") or DISAMBIGUATION.search(page.text[-5000:]):
                disambiguations.add(canonical(page.title))
            yield page

    try:
        with tempfile.TemporaryFile(dir=os.path.dirname(os.path.abspath(out))) as waiting, \
                open(f"{out}.tmp", "wb") as file:
            sizes = [waiting.write(packed) for packed in _packed(pages())]
            if not sizes:
                raise UserError(f"{path}: holds no page; give a pages-articles dump")
            for title, target in redirects.items():
                seen = {title}
                while target in redirects and target not in seen:
                    seen.add(target)
                    target = redirects[target]
                redirects.update(dict.fromkeys(seen, "" if target in seen else target))
            waiting.seek(0)
            batches = (waiting.read(n) for n in tqdm(sizes, "articles", unit=" batches", leave=False, disable=None))
            arguments = redirects, disambiguations, namespaces, extend, str(out).endswith(".gz")
            for data, some in _in_order(batches, workers, arguments):
                file.write(data)
                counts.update(some)
        os.replace(f"{out}.tmp", out)
    except BrokenProcessPool as e:
        raise UserError(f"{path}: a worker has died, perhaps for want of memory; take fewer --workers") from e
    except OSError as e:
        raise UserError(f"{out}: cannot be written ({e.strerror or e}); choose another name") from e
    finally:
        if os.path.exists(f"{out}.tmp"):
            os.remove(f"{out}.tmp")
    return counts


def wiki(path, out, extend=True, workers=1):
    """`data.py wiki`: writes the corpus of a dump and prints what became of each page and of each link."""
    gc.disable()                                            # as in _start_worker
    counts = write_wiki(path, out, extend, workers)
    counts["pages"] = sum(n for key, n in counts.items() if key[0] == "pages")
    for group in ("pages", "links"):
        print(f"{group:<46}{counts[group]:>12,}")
        for key, n in counts.most_common():
            if key[0] == group and n:
                print(f"  {key[1]:<44}{n:>12,}")
    print(f"{'mentions added':<46}{counts['added']:>12,}\n{'texts written':<46}{counts['texts']:>12,}")
    print(f"{'templates and tables that are not closed':<46}{counts['unclosed']:>12,}")


# ---------------------------------------------------------------- the published task files

# No gold evidence is taken from any of them (§4.3). HoVer says the same two labels in other words. FEVER's
# third, NOT ENOUGH INFO, stays: the paper's FEVER is three-way (RAG's 72.5 beside it is a three-way figure).
LABELS = {"SUPPORTS": "SUPPORTS", "SUPPORTED": "SUPPORTS", "REFUTES": "REFUTES", "NOT_SUPPORTED": "REFUTES",
          "NOT ENOUGH INFO": "NOT ENOUGH INFO", None: None}         # test files have none
CLAIMS = {"fever": "claim", "hover": "claim", "fm2": "text"}
QUESTIONS = {           # the field of the question; the names of its answers, best first, [] in test files
    "triviaqa": ("Question", lambda r: [r["Answer"]["Value"]] + r["Answer"].get("Aliases", [])
                 if "Answer" in r else []),
    "complexwebquestions": ("question", lambda r: [name for a in r.get("answers", [])
                                                   for name in [a["answer"]] + a.get("aliases", []) if name]),
    "entityquestions": ("question", lambda r: r.get("answers", []) + [])}


def task_records(path):
    """("FILE: record 3" or "FILE:3", record) of a JSON list, {"Data": list}, JSON lines or a tar of these."""
    if ".tar" in os.path.basename(path):
        try:
            with tarfile.open(path) as archive:             # each is read from it; nothing is unpacked
                files = [(f"{path}/{m.name}", archive.extractfile(m).read().decode("utf-8"))
                         for m in archive if m.isfile() and m.name.endswith((".json", ".jsonl"))]
        except (OSError, EOFError, ValueError, tarfile.TarError, lzma.LZMAError, zlib.error) as e:
            raise UserError(f"{path}: not a whole archive of UTF-8 files ({e}); download it again") from e
    else:
        files = [(path, "".join(open_text(path)))]
    for name, text in files:
        try:
            records = json.loads(text)
        except (ValueError, RecursionError) as e:           # JSON lines, then
            if text.lstrip()[:1] == "[":
                raise UserError(f"{name}:{getattr(e, 'lineno', 1)}: not JSON, {e}; download it again") from e
            for n, line in enumerate(text.split("\n"), 1):
                try:
                    if line.strip():
                        yield f"{name}:{n}", json.loads(line)
                except (ValueError, RecursionError) as e:
                    raise UserError(f"{name}:{n}: not JSON, {e}; correct this line or take it out") from e
            continue
        records = records.get("Data", [records]) if isinstance(records, dict) else records
        for n, record in enumerate(records if isinstance(records, list) else [records], 1):
            yield f"{name}: record {n}", record


def task_example(name, record) -> dict:
    """A line of a file of examples, as read_examples reads it, from a record of task `name`. Raises ValueError."""
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    if name in CLAIMS:
        label = record.get("label")
        if not isinstance(label, str | None) or label not in LABELS:
            raise ValueError(f'"label" is {label!r}')
        example = {"text": _string(record, CLAIMS[name]), "label": LABELS[label]}
    else:
        key, names = QUESTIONS[name]
        try:
            answers = list(dict.fromkeys(names(record)))
        except (KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"its answers are not in the published form ({type(e).__name__}: {e})") from e
        if not all(isinstance(a, str) for a in answers):
            raise ValueError("an answer is not a string")
        example = {"question": _string(record, key), "answer_text": answers}
    if record.get("mentions") is not None:                  # else they are found when the example is used
        text = example["text" if name in CLAIMS else "question"]
        example["mentions"] = [m._asdict() for m in _mentions(record, text)]
    return example


def answer_key(name):
    """What is compared: lower case, no punctuation, "_" or article: "The_Black_Sea" becomes "black sea"."""
    words = re.findall(r"\w+", name.replace("_", " ").lower())
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def answer_entities(wanted, corpus=None, entities=None) -> dict:
    """answer_key -> entity for the keys in `wanted`: the entity of that title, else of that title but for a
    bracket at its end, else the one that the corpus most often calls so. Of several, the most frequent."""
    found = {}                                              # (how, key) -> Counter of entities

    @lru_cache(1 << 20)
    def keys(entity, shown):
        return answer_key(entity), answer_key(re.sub(r"[ _]\([^()]*\)$", "", entity)), answer_key(shown)

    if corpus:
        named = ((m.entity, text.text[m.start:m.end])
                 for text in read_corpus(corpus) for m in text.mentions if m.entity)
    else:
        named = ((line.strip(), "") for line in open_text(entities))
    for entity, shown in named:
        for how, key in enumerate(keys(entity, shown)):
            if key in wanted:
                found.setdefault((how, key), Counter())[entity] += 1
    return {key: found[how, key].most_common(1)[0][0] for how, key in sorted(found, reverse=True)}


def task(name, paths, out, corpus=None, entities=None):
    """`data.py task`: published files as examples. Raises UserError.

    A question keeps its answers as "answer_text"; "answers" are the entities among them. With none it counts
    as wrong (§4.4)."""
    if name in QUESTIONS and not (corpus or entities):
        raise UserError(f"{name}: answers are mapped to entities; give them with --corpus or --entities")
    examples = []
    for where, record in chain.from_iterable(map(task_records, paths)):
        try:
            examples.append(task_example(name, record))
        except ValueError as e:
            raise UserError(f"{where}: {e}; is this a file of {name}, as published?") from e
    if not examples:
        raise UserError(f"{paths[0]}: holds no record; give the file as published")
    if name in CLAIMS:
        labels = Counter(e["label"] or "without a label" for e in examples)
        print(f"{len(examples):,} claims:", ", ".join(f"{n:,} {label}" for label, n in labels.most_common()))
    else:
        wanted = {answer_key(answer) for e in examples for answer in e["answer_text"]} - {""}
        known = answer_entities(wanted, corpus, entities)
        for e in examples:
            keys = map(answer_key, e["answer_text"])
            e["answers"] = list(dict.fromkeys(known[key] for key in keys if key in known))
        n, mapped = (sum(bool(e[key]) for e in examples) for key in ("answer_text", "answers"))
        print(f"{len(examples):,} questions, {n:,} with answers; for {mapped:,} an answer is an entity "
              f"({mapped / max(n, 1):.1%})")
    try:
        write_lines(out, examples)
    except OSError as e:
        raise UserError(f"{out}: cannot be written ({e.strerror}); choose another name") from e


# ---------------------------------------------------------------- command line

def check(path, vocab=None) -> int:
    """Prints the counts of a corpus file, or its first ten errors. Returns the exit code."""
    errors = []
    for _ in read_corpus(path, errors):
        if len(errors) >= 10:
            break
    if errors:
        print("\n".join(errors[:10]))
        return 1
    tokenizer = load_tokenizer(vocab) if vocab else train_tokenizer(t.text for t in read_corpus(path))
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus.build(path, folder + "/corpus", tokenizer, passage_length=128, max_length=512)
        counts, dropped, each = corpus.meta["counts"], corpus.meta["dropped"], np.diff(corpus.mention_first)
    for name in "texts articles passages tokens mentions_read mentions linked entities".split():
        print(f"{name.replace('_', ' '):<24}{counts[name]:>12,}")
    print(f"{'mentions a passage':<24}{each.min()} to {each.max()}, {each.mean():.2f} on average")
    print(f"{'texts without a token':<24}{counts['texts_without_a_token']:>12,}")
    print(f"{'mentions dropped':<24}{sum(dropped.values()):>12,}")
    for reason, n in dropped.items():
        print(f"  {reason}: {n:,}")
    return 0


def main():
    parser = argparse.ArgumentParser(description="Corpora and examples: make, check, read.")
    commands = parser.add_subparsers(dest="command", required=True)
    toy = commands.add_parser("toy", help="write corpus.jsonl and examples of a made-up world")
    toy.add_argument("--out", required=True)
    toy.add_argument("--seed", type=int, default=0)
    checked = commands.add_parser("check", help="count what a corpus file holds, or report its errors")
    checked.add_argument("file")
    checked.add_argument("--vocab", help="a BERT vocab.txt or a tokenizer.json of ours (default: trained)")
    dump = commands.add_parser("wiki", help="turn a Wikipedia dump (pages-articles, XML or bz2) into a corpus file")
    dump.add_argument("file")
    dump.add_argument("--out", required=True, help="corpus.jsonl or corpus.jsonl.gz")
    dump.add_argument("--no-extend", action="store_true", help="leave further mentions of a page's links unlinked")
    dump.add_argument("--workers", type=int, default=1)
    published = commands.add_parser("task", help="turn the published files of a task into examples")
    published.add_argument("name", choices=[*CLAIMS, *QUESTIONS])
    published.add_argument("files", nargs="+")
    published.add_argument("--out", required=True)
    named = published.add_mutually_exclusive_group()
    named.add_argument("--corpus", help="questions: map answers to the entities of this corpus file")
    named.add_argument("--entities", help="questions: map answers to the names in this file, one a line")
    args = parser.parse_args()
    try:
        if args.command == "toy":
            write_toy(args.out, *toy_world(args.seed))
        elif args.command == "wiki":
            wiki(args.file, args.out, not args.no_extend, args.workers)
        elif args.command == "task":
            task(args.name, args.files, args.out, args.corpus, args.entities)
        else:
            return check(args.file, args.vocab)
    except UserError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
