"""Text in, batches out: corpus, tokenizer, passages with entity markers, masking, clusters, the toy world.

The paper: §2 (notation, markers), §2.4-2.5 (what is masked and why), appendices A and A.1 (rates, clusters).

    corpus.jsonl --read_corpus--> Text --encode_text--> passages --Corpus.build--> flat arrays on disk
    Corpus[passages] --make_batch--> Batch: tokens (B, T), mentions as flat arrays (M,), masked tokens (L,)

A passage of n tokens with m mentions takes n + 2m + 2 positions:

    [CLS] the capital of [E_start] north karovia [E_end] is [E_start] port ellin [E_end] . [SEP]
      0    1     2     3     4       5      6       7    8     9       10   11     12    13  14
    mention_start = 4, 9; mention_end = 7, 12 (the positions of the markers)
"""
import argparse
import gzip
import json
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Iterator, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from tqdm import tqdm

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[E_start]", "[E_end]"]
PAD, UNK, CLS, SEP, MASK, E_START, E_END = SPECIAL


class DataError(Exception):
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


# ---------------------------------------------------------------- reading corpus and example files

def open_text(path) -> Iterator[str]:
    """The lines of a plain or gzipped UTF-8 file, one by one. Raises DataError."""
    n = 0
    try:
        with (gzip.open if str(path).endswith(".gz") else open)(path, "rb") as file:
            for n, line in enumerate(file, 1):
                yield line.decode("utf-8")
    except UnicodeDecodeError as e:     # decoded line by line, so that the number is right
        raise DataError(f"{path}:{n}: not UTF-8 ({e.reason}, byte {e.start}); convert the file") from e
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise DataError(f"{path}:{n + 1}: not a whole gzip file ({e}); compress or copy it again") from e
    except OSError as e:
        raise DataError(f"{path}: cannot be read ({e.strerror}); check the name") from e


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
    for n, line in enumerate(open_text(path), 1):
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
                raise DataError(message + "; correct this line or take it out") from e
            errors.append(message)
            continue
        yield item


def read_corpus(path, errors=None) -> Iterator[Text]:
    """The texts of a corpus file, as a stream. Raises DataError "FILE:LINE: what is wrong" for a bad line;
    with a list `errors`, that message is appended to it and reading goes on."""
    return _records(path, _text, errors)


class Example(NamedTuple):
    text: str
    mentions: list | None       # None: to be found (find_mentions)
    label: int | None           # claims: 1 = SUPPORTS, 0 = REFUTES
    answers: list               # questions: entity names, any of which is right
    info: dict                  # the other fields: subject, bridge, relations, …


def read_examples(path, task) -> list:
    """Examples of task "claims" or "qa". Raises DataError for a bad line or a file without any.

    claims: {"text": …, "mentions": […], "label": "SUPPORTS" | "REFUTES"}
    qa:     {"question": …, "mentions": […], "answers": [entity, …]}; mentions may be absent in both"""
    text_key, wanted = {"claims": ("text", "label"), "qa": ("question", "answers")}[task]

    def parse(record):
        text, label, answers = _string(record, text_key), None, []
        if task == "claims":
            if record.get("label") not in ("SUPPORTS", "REFUTES"):
                raise ValueError('"label" is neither "SUPPORTS" nor "REFUTES"')
            label = int(record["label"] == "SUPPORTS")
        else:
            answers = record.get("answers")
            if not (isinstance(answers, list) and answers and all(a and type(a) is str for a in answers)):
                raise ValueError('"answers" is not a list of at least one entity name')
        mentions = None if record.get("mentions") is None else _mentions(record, text)
        info = {k: v for k, v in record.items() if k not in (text_key, "mentions", wanted)}
        return Example(text, mentions, label, answers, info)

    examples = list(_records(path, parse))
    if not examples:
        raise DataError(f"{path}: holds no example; give a file with one JSON object a line")
    return examples


# ---------------------------------------------------------------- tokenizer

def _wordpiece(vocab) -> Tokenizer:
    """A WordPiece tokenizer as BERT's, lower case. [CLS] and the others are never read out of a text."""
    tokenizer = Tokenizer(models.WordPiece({t: i for i, t in enumerate(vocab)}, unk_token=UNK))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
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
            raise DataError(f"{path}: no such file; give a vocab.txt or a tokenizer.json")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as e:      # tokenizers raises nothing more precise
            raise DataError(f"{path}: not a tokenizer ({e})") from e
    else:
        vocab = [line.rstrip("\r\n") for line in open_text(path)]
        unused = [i for i, t in enumerate(vocab) if t.startswith("[unused")]
        for marker in (E_START, E_END):
            if marker not in vocab:
                if not unused:
                    raise DataError(f"{path}: has no [unusedN] entry left for {marker}; add one")
                vocab[unused.pop(0)] = marker
        tokenizer = _wordpiece(vocab)
    special_ids(tokenizer, path)
    return tokenizer


def special_ids(tokenizer, path="the tokenizer") -> dict:
    """{"[PAD]": id, …} for the seven special tokens. Raises DataError when one is missing."""
    ids = {t: tokenizer.token_to_id(t) for t in SPECIAL}
    missing = [t for t, i in ids.items() if i is None]
    if missing:
        raise DataError(f"{path}: lacks {', '.join(missing)}; give a BERT vocab.txt or our tokenizer.json")
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
    ARRAYS = dict(tokens=np.int32, passage_start=np.int64, mention_first=np.int64, mention_start=np.int32,
                  mention_end=np.int32, mention_entity=np.int32, mention_char=np.int32, article=np.int32,
                  held_out=np.bool_, text=np.uint8, text_start=np.int64, entity_count=np.int64)

    def __init__(self, folder):
        """Opens a tokenised corpus. Raises DataError."""
        try:
            for name in ("meta", "titles", "entity_names"):
                with open(os.path.join(folder, name + ".json"), encoding="utf-8") as file:
                    setattr(self, name, json.load(file))
            for name, dtype in self.ARRAYS.items():     # asarray: still mapped, without memmap's slow index
                setattr(self, name, np.asarray(np.memmap(os.path.join(folder, name + ".bin"), dtype, "r")))
            for name, size in self.meta["sizes"].items():
                if len(getattr(self, name)) != size:
                    raise ValueError(f"{name}.bin holds {len(getattr(self, name))} values, not {size}")
            self.fingerprint = self.meta["crc32"]       # names the very text that a memory was made from
        except (OSError, ValueError, KeyError) as e:
            raise DataError(f"{folder}: not a whole tokenised corpus ({e}); remove it and build again") from e
        self.mention_char = self.mention_char.reshape(-1, 2)
        self.special, self.vocab_size = self.meta["special"], self.meta["vocab_size"]
        self.maskable = np.ones(self.vocab_size, bool)      # [UNK] is a word we cannot spell, hence maskable
        self.maskable[[self.special[t] for t in (PAD, CLS, SEP, MASK, E_START, E_END)]] = False
        self.words = np.setdiff1d(np.arange(self.vocab_size), list(self.special.values()))

    @staticmethod
    def open(folder) -> "Corpus":
        return Corpus(folder)

    @staticmethod
    def build(path, folder, tokenizer, passage_length, max_length) -> "Corpus":
        """Tokenises a corpus file into `folder`, as a stream: only titles and entity names are held.

        Raises DataError for a bad line, an empty corpus, one without a linked mention, a wrong folder."""
        if os.path.exists(folder) and not os.path.exists(os.path.join(folder, "meta.json")):
            raise DataError(f"{folder}: exists and is not a tokenised corpus; choose another folder")
        temporary = f"{os.path.normpath(folder)}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            os.makedirs(temporary)
            _write_corpus(path, temporary, tokenizer, passage_length, max_length)
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(temporary, folder)
        except OSError as e:
            raise DataError(f"{folder}: cannot be written ({e.strerror}); choose another folder") from e
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return Corpus(folder)

    def passage_of(self, mentions):
        """Passage numbers of corpus mention numbers."""
        return np.searchsorted(self.mention_first, mentions, "right") - 1

    def passage_text(self, p) -> str:
        return self.text[self.text_start[p]:self.text_start[p + 1]].tobytes().decode("utf-8")

    def show_mention(self, m, width=80) -> str:
        """One line to read: "Title: … before [mention] after …"."""
        p = int(self.passage_of(m))
        text, (a, b) = self.passage_text(p), self.mention_char[m]
        left, right = text[max(0, a - width):a], text[b:b + width]
        return (f"{self.titles[self.article[p]]}: {'…' if a > width else ''}{left}[{text[a:b]}]{right}"
                f"{'…' if b + width < len(text) else ''}").replace("\n", " ")


def _write_corpus(path, folder, tokenizer, passage_length, max_length):
    special, titles, entities = special_ids(tokenizer), {}, {"": 0}
    sizes, counts, dropped, entity_count, crc32 = Counter(), Counter(), Counter(), Counter(), Counter()
    with ExitStack() as stack:
        files = {name: stack.enter_context(open(os.path.join(folder, name + ".bin"), "wb"))
                 for name in Corpus.ARRAYS}

        def append(**arrays):
            for name, values in arrays.items():
                raw = np.asarray(values, Corpus.ARRAYS[name]).tobytes()
                files[name].write(raw)
                crc32[name] = zlib.crc32(raw, crc32[name])
                sizes[name] += len(values)

        append(passage_start=[0], mention_first=[0], text_start=[0])
        texts = iter(tqdm(read_corpus(path), "tokenising", unit=" texts", leave=False, disable=None))
        while chunk := list(islice(texts, 1024)):
            encodings = tokenizer.encode_batch([t.text for t in chunk], add_special_tokens=False)
            for (title, text, mentions, split), encoding in zip(chunk, encodings):
                held_out = split == "held_out" or split is None and zlib.crc32(title.encode()) % 20 == 0
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
    if not counts["linked"]:
        what = "no linked mention" if counts["passages"] else "no text"
        raise DataError(f"{path}: holds {what}; a mention memory is made of linked mentions")
    counts.update(articles=len(titles), entities=len(entities) - 1)
    meta = dict(counts=counts, dropped=dropped, sizes=sizes, crc32=crc32, special=special,
                passage_length=passage_length, max_length=max_length, vocab_size=tokenizer.get_vocab_size())
    for name, values in dict(titles=list(titles), entity_names=list(entities), meta=meta).items():
        with open(os.path.join(folder, name + ".json"), "w", encoding="utf-8") as file:
            json.dump(values, file)
    tokenizer.save(os.path.join(folder, "tokenizer.json"))


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
    label: torch.Tensor | None = None           # (B,) claims: 1 = SUPPORTS
    answer: torch.Tensor | None = None          # (B,) questions: entity of the first known answer, 0 = none
    answer_mention: torch.Tensor | None = None  # (B,) questions: the mention that is the appended [MASK]

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
        owner = part["target_mention"]                                      # -1 stays -1
        part["target_mention"] = torch.where(owner < 0, owner, number[owner]) if len(number) else owner
        if self.answer_mention is not None:
            part["answer_mention"] = number[part["answer_mention"]]
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


def eval_mentions(corpus, n, seed, min_elsewhere=1) -> np.ndarray:
    """At most n mention numbers of held-out passages that only a memory can fill in.

    Linked, the entity stands once in the passage, is not the article's title (which most of its passages
    name), and is linked in at least min_elsewhere other passages of the corpus, held out or not."""
    linked = np.flatnonzero(corpus.mention_entity)
    E, entity, passage = len(corpus.entity_names), corpus.mention_entity[linked], corpus.passage_of(linked)
    pairs, pair, count = np.unique(passage * E + entity, return_inverse=True, return_counts=True)
    passages_with = np.bincount(pairs % E, minlength=E)                     # (E,)
    number = {name: i for i, name in enumerate(corpus.entity_names)}
    own = np.array([number.get(title, 0) for title in corpus.titles])[corpus.article[passage]]
    good = linked[corpus.held_out[passage] & (count[pair] == 1) & (own != entity)
                  & (passages_with[entity] > min_elsewhere)]
    return np.sort(np.random.default_rng(seed).permutation(good)[:n])


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


def example_batch(examples, tokenizer, entity_index, max_mentions=32, max_length=512, names=None) -> Batch:
    """Claims or questions as an unmasked batch; a question ends in "[E_start] [MASK] [E_end]" (§4).

    entity_index: name -> entity id. names: the name_index to search where mentions are absent (default: of
    entity_index; give it where there are many batches). A text longer than max_length positions is cut."""
    special, rng = special_ids(tokenizer), np.random.default_rng(0)
    rows, mentions = [], []                     # mentions: (row, start, end, entity, is it the answer)
    encodings = tokenizer.encode_batch([e.text for e in examples], add_special_tokens=False)
    for r, (example, encoding) in enumerate(zip(examples, encodings)):
        found = example.mentions
        if found is None:
            names = name_index(entity_index) if names is None else names
            found = find_mentions(example.text, names)
        tail = [special[t] for t in (E_START, MASK, E_END)] if example.label is None else []
        room = max_length - len(tail)
        tokens = [special[CLS], special[SEP]]
        for piece in encode_text(encoding, found, room, room, special, Counter())[:1]:
            tokens = piece.tokens.tolist()
            mentions += [(r, start, end, entity_index.get(found[i].entity, 0), 0)
                         for start, end, i in zip(piece.start, piece.end, piece.index)]
        rows.append(tokens[:-1] + tail + tokens[-1:])
        if tail:
            mentions.append((r, len(tokens) - 1, len(tokens) + 1, 0, 1))
    tokens = np.full((len(rows), max(map(len, rows))), special[PAD], np.int64)
    for r, ids in enumerate(rows):
        tokens[r, :len(ids)] = ids
    mentions = np.array(mentions, np.int64).reshape(-1, 5)
    if len(mentions) > max_mentions * len(rows):            # a uniform sample, but every answer
        order = np.argsort(rng.random(len(mentions)) - mentions[:, 4])
        mentions = mentions[np.sort(order[:max_mentions * len(rows)])]
    row, start, end, entity, is_answer = mentions.T.copy()
    none, empty = np.full(len(row), -1), np.empty(0, np.int64)
    batch = Batch(*map(torch.from_numpy, (tokens, tokens, tokens != special[PAD], row, start, end, entity,
                                          none, is_answer == 1, empty, empty, empty, none)))
    if examples[0].label is not None:
        return replace(batch, label=torch.tensor([e.label for e in examples]))
    answer = [next((entity_index[a] for a in e.answers if a in entity_index), 0) for e in examples]
    return replace(batch, answer=torch.tensor(answer), answer_mention=torch.tensor(np.flatnonzero(is_answer)))


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
    noun: str               # "the {noun} of {s}" names the object without its name
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
        "{s} has a job at {o}.", "The company {o} pays the wages of {s}."],
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


def _say(phrase, subject, obj="", noun=None):
    """A phrase filled in, and its mentions. With a noun the subject is "[the director] of [X]": two hops."""
    text, mentions = "", []

    def mention(name, entity):
        nonlocal text
        mentions.append(Mention(len(text), len(text) + len(name), entity))
        text += name

    for part in re.split(r"(\{[so]\})", phrase):
        if part == "{s}" and noun:
            mention(f"the {noun}", None)
            text += " of "
        if part in ("{s}", "{o}"):
            name = subject if part == "{s}" else obj
            mention(name, name)
        else:
            text += part
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


def toy_world(seed=0, bridge_sentences=0.0):
    """Corpus lines and {"claims.one_hop.train": lines, …} of a made-up world, from nothing but a seed.

    It is two worlds that share name words but no entity: one is seen in training, the other (20%) is held
    out whole. A subject has five passages; each states all of its facts, every time in another phrase, so a
    masked mention can be recovered from the other passages and from nowhere else. 5% of the passages of the
    seen world are held out too. Examples are split by fact, (subject, relation), for all tasks alike; both
    facts of a two-hop example are in its split.

    bridge_sentences: the share of the seen world's passages that hold, in place of a third sentence, a
    two-hop fact of the train split without the bridge's name (at most about a quarter). It stands there and
    nowhere else, neither in another passage nor in an example: only two hops recover it."""
    rng = np.random.default_rng(seed)
    worlds = {}, {}                                         # seen, unseen: {type: names}
    for kind, (firsts, lasts) in NAMES.items():
        n = COUNTS[kind]
        pairs = rng.permutation(len(firsts) * len(lasts))[:n + n // 5]
        names = [f"{firsts[i // len(lasts)]} {lasts[i % len(lasts)]}" for i in pairs]
        worlds[0][kind], worlds[1][kind] = names[:n], names[n:]
    facts = [_facts(rng, names) for names in worlds]
    chains = [_chains(f) for f in facts]
    split = dict(zip(facts[0], rng.choice(["train", "dev", "test"], len(facts[0]), p=[.62, .17, .21])))
    split.update(dict.fromkeys(facts[1], "unseen"))

    lines, told, relations_of, chains_of = [], set(), {}, {}    # told: chains in a bridge sentence
    for subject, relation in [*facts[0], *facts[1]]:
        relations_of.setdefault(subject, []).append(relation)
    for (subject, first, second), (bridge, obj) in chains[0].items():
        if split[subject, first] == split[bridge, second] == "train" and rng.random() < .5:     # not all
            chains_of.setdefault(subject, []).append((first, second, obj))
    for subject, relations in relations_of.items():
        seen = split[subject, relations[0]] != "unseen"
        world, held_out = facts[not seen], rng.integers(20)     # below 5 for one in four: 5% of passages
        order = {relation: rng.permutation(5) for relation in relations}
        for i in range(5):
            said = {r: _say(RELATIONS[r].phrases[order[r][i]], subject, world[subject, r])
                    for r in rng.permutation(relations)}
            if rng.random() < bridge_sentences and chains_of.get(subject):
                first, second, obj = chains_of[subject].pop(rng.integers(len(chains_of[subject])))
                noun = RELATIONS[first].noun
                told.add((subject, first, second))
                if len(said) == 3:
                    del said[relations[i % 3]]              # so that no fact is left out of more than two
                said["bridge"] = _say(rng.choice(RELATIONS[second].phrases), subject, obj, noun)
            text, mentions = "", []
            for sentence, found in said.values():
                text += " " if text else ""
                mentions += [Mention(m.start + len(text), m.end + len(text), m.entity) for m in found]
                text += sentence
            lines.append({"title": subject, **_line("text", (text, mentions)),
                          "split": "train" if seen and i != held_out else "held_out"})
    lines = [lines[i] for i in rng.permutation(len(lines))]

    examples = {}
    for name, limit in dict(train=4000, dev=300, test=500, unseen=500).items():
        world, chain = facts[name == "unseen"], chains[name == "unseen"]
        objects = {r: [obj for (_, other), obj in world.items() if other == r] for r in RELATIONS}
        hops = dict(one_hop=[(s, [r], None, obj) for (s, r), obj in world.items() if split[s, r] == name],
                    two_hop=[(s, [q, r], bridge, obj) for (s, q, r), (bridge, obj) in chain.items()
                             if split[s, q] == split[bridge, r] == name and (s, q, r) not in told])
        for hop, items in hops.items():
            qa, claims = [], []
            for i in rng.permutation(len(items))[:limit]:
                subject, relations, bridge, obj = items[i]
                relation, noun = RELATIONS[relations[-1]], RELATIONS[relations[0]].noun if bridge else None
                info = dict(subject=subject, relations=relations, **({"bridge": bridge} if bridge else {}))
                qa.append(_line("question", _say(rng.choice(relation.questions), subject, noun=noun),
                                answers=[obj], **info))
                # A wrong object is that of another fact of this relation, so as frequent as right ones are,
                # and each fact is claimed rightly and wrongly: nothing but the memory tells them apart.
                wrong = obj
                while wrong in (obj, subject, bridge):
                    wrong = objects[relations[-1]][rng.integers(len(objects[relations[-1]]))]
                for claimed, label in ((obj, "SUPPORTS"), (wrong, "REFUTES")):
                    claim = _say(rng.choice(relation.claims), subject, claimed, noun)
                    claims.append(_line("text", claim, label=label, **info))
            examples[f"qa.{hop}.{name}"] = qa
            examples[f"claims.{hop}.{name}"] = claims if name == "train" else claims[:limit]
    return lines, examples


def write_lines(path, records):
    """JSON lines, written to a temporary name and renamed."""
    with open(f"{path}.tmp", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
    os.replace(f"{path}.tmp", path)


def write_toy(folder, seed=0, bridge_sentences=0.0):
    """Writes corpus.jsonl and the examples by task, hops and split, such as claims.one_hop.train.jsonl."""
    lines, examples = toy_world(seed, bridge_sentences)
    try:
        os.makedirs(folder, exist_ok=True)
        for name, records in examples.items():
            write_lines(os.path.join(folder, name + ".jsonl"), records)
        write_lines(os.path.join(folder, "corpus.jsonl"), lines)
    except OSError as e:
        raise DataError(f"{folder}: cannot be written ({e.strerror}); choose another folder") from e


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
    parser = argparse.ArgumentParser(description="Make the toy world, or check a corpus file.")
    commands = parser.add_subparsers(dest="command", required=True)
    toy = commands.add_parser("toy", help="write corpus.jsonl and examples of a made-up world")
    toy.add_argument("--out", required=True)
    toy.add_argument("--seed", type=int, default=0)
    checked = commands.add_parser("check", help="count what a corpus file holds, or report its errors")
    checked.add_argument("file")
    checked.add_argument("--vocab", help="a BERT vocab.txt or a tokenizer.json of ours (default: trained)")
    args = parser.parse_args()
    try:
        if args.command == "toy":
            write_toy(args.out, args.seed)
        else:
            return check(args.file, args.vocab)
    except DataError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
