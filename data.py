"""Text in, batches out: mentions, markers, masking, related passages, examples, the toy world.

The paper: section 2 (notation, markers), 2.3-2.4 (what is masked and why), app. A (rates), A.1
(related passages), B.1 (claims and questions). Reading and writing files is the second half.

    corpus.jsonl --read_corpus--> Text --encode_text--> Passage --Corpus.build--> arrays on disk
    Corpus, passage numbers --make_batch--> Batch

Shapes: B passages, or rows, of T tokens in a batch; M mentions and L tokens to predict in flat
arrays over the whole batch. A passage of n tokens with m mentions takes n + 2m + 2 positions:

    [CLS] the capital of [E_start] north karovia [E_end] is [E_start] port ellin [E_end] . [SEP]
      0    1     2     3     4       5      6       7    8     9       10   11     12    13  14
    start = 4, 9 and end = 7, 12: the positions s and e of the paper's markers
"""
import argparse
import bz2
import gzip
import html
import json
import os
import re
import shutil
import sys
import tempfile
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from io import TextIOWrapper
from itertools import islice, pairwise
from pathlib import Path
from typing import Callable, Iterator, NamedTuple
from urllib.parse import unquote
from xml.etree import ElementTree

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[E_start]", "[E_end]"]
PAD, UNK, CLS, SEP, MASK, E_START, E_END = SPECIAL
CLAIM_LABELS = ("REFUTES", "SUPPORTS", "NOT ENOUGH INFO")      # the last one in FEVER only
TEXT_PRESETS = {        # what each preset of train.py makes of a text; base has the paper's numbers
    "toy": {"passage_length": 64, "max_length": 128, "vocab": 2000},
    "mini": {"passage_length": 96, "max_length": 256, "vocab": 8000},
    "base": {"passage_length": 128, "max_length": 512, "vocab": 30522},
}

FORMAT = 7              # of the folders of a run (commit_folder)

class UserError(Exception):
    """Something is wrong with what the user gave; the message is a sentence for a person."""

# ---------------------------------------------------------------- mentions, markers, passages

class Mention(NamedTuple):
    start: int              # character offsets, end exclusive
    end: int
    entity: str | None      # None: mentioned, but not linked

class Text(NamedTuple):
    title: str
    text: str
    mentions: list
    split: str | None = None    # "train", "held_out" or None: by its title

class Passage(NamedTuple):
    tokens: np.ndarray      # (n + 2m + 2,) int32, [CLS] … [SEP]
    start: np.ndarray       # (m,) positions of [E_start]
    end: np.ndarray         # (m,) positions of [E_end]
    index: np.ndarray       # (m,) which of the text's mentions
    chars: tuple            # the passage's characters in the text: from, to (None: the end)

def encode_text(encoding, mentions, passage_length, max_length, special, dropped) -> list:
    """Cuts a text into Passages of at most passage_length tokens (T) and max_length positions.

    A passage ends as late as these two allow, and never inside a mention. A mention covers every
    token that it touches. Mentions that share a token: the one that starts first stays, of those
    that start together the longest, so that a mention is masked without telling half of another.

    encoding: tokenizer.encode(text, add_special_tokens=False); special: special_ids(tokenizer).
    dropped: a Counter of the reasons for which mentions were left out, added to."""
    ids, starts = encoding.ids, [start for start, _ in encoding.offsets]
    ends = [end for _, end in encoding.offsets]
    spans = []                      # first token, the token after the last, which mention
    for i, (char_start, char_end, *_) in enumerate(mentions):
        first, stop = bisect_right(ends, char_start), bisect_left(starts, char_end)
        if first >= stop:
            dropped["without a token"] += 1
        elif stop - first > passage_length or stop - first + 4 > max_length:
            dropped["longer than a passage"] += 1
        else:
            spans.append((first, stop, i))
    mention_at, taken = {}, 0       # first token -> the token after the last, which mention
    for first, stop, i in sorted(spans, key=lambda span: (span[0], -span[1])):
        if first < taken:
            dropped["overlaps another mention"] += 1
        else:
            mention_at[first] = stop, i
            taken = stop

    rows, edges = [], []            # of each passage its lists; the characters at which it begins
    lo, tokens, t = 0, [], 0        # of the last one: first token, what it holds; the next token
    while t < len(starts):          # one token, or a whole mention
        stop, i = mention_at.get(t, (t + 1, None))
        needed = stop - t + (1 if i is None else 3)             # with markers and [SEP]
        if not rows or stop - lo > passage_length or len(tokens) + needed > max_length:
            lo, tokens, start, end, index = t, [special[CLS]], [], [], []
            rows.append((tokens, start, end, index))
            edges.append(starts[lo] if lo else 0)
        if i is None:
            tokens.append(ids[t])
        else:
            index.append(i)
            start.append(len(tokens))
            tokens += [special[E_START], *ids[t:stop]]
            end.append(len(tokens))
            tokens.append(special[E_END])
        t = stop
    passages = []
    for (tokens, *columns), chars in zip(rows, pairwise([*edges, None])):
        tokens = np.array([*tokens, special[SEP]], np.int32)
        passages.append(Passage(tokens, *(np.array(c, np.int64) for c in columns), chars))
    return passages

# ---------------------------------------------------------------- batches and masking

# the fields of a Batch that have an entry a row, and those with an entry a mention
ROWS = ("tokens", "unmasked", "attention_mask", "label", "answer", "answer_mention")
MENTIONS = ("row", "start", "end", "entity", "passage", "masked", "mention")

@dataclass
class Batch:
    """B rows of T tokens; their M mentions and the L tokens to predict, flat over all rows."""
    tokens: torch.Tensor            # (B, T) what the model reads: masked in training
    unmasked: torch.Tensor          # (B, T) … before masking: the Mention Encoder reads this
    attention_mask: torch.Tensor    # (B, T) bool, True = token
    row: torch.Tensor               # (M,) the mention's row, and the columns of its markers
    start: torch.Tensor             # (M,)
    end: torch.Tensor               # (M,)
    entity: torch.Tensor            # (M,) 0 = not linked
    passage: torch.Tensor           # (M,) corpus passage, -1 = none (a question)
    masked: torch.Tensor            # (M,) bool: to be predicted; in example_batch: to be answered
    target_index: torch.Tensor      # (L,) masked tokens as indices into tokens.view(-1)
    target: torch.Tensor            # (L,) their original ids
    target_mention: torch.Tensor    # (L,) the mention (index into row) of each, -1 = none
    mention: torch.Tensor           # (M,) number in the corpus, or in its example; -1 = none
    label: torch.Tensor | None = None           # (B,) claims: CLAIM_LABELS' index, -1 = not known
    answer: torch.Tensor | None = None          # (B,) questions: first answer known, 0 = none
    answer_mention: torch.Tensor | None = None  # (B,) the mention to be answered, -1 = none

    def to(self, device) -> "Batch":
        return Batch(**{name: tensor.to(device, non_blocking=True)
                        for name, tensor in vars(self).items() if tensor is not None})

    def of_mentions(self, kept) -> dict:
        """{field: tensor} of these of the mentions."""
        return {name: getattr(self, name)[kept] for name in MENTIONS}

    def part(self, rank, size) -> "Batch":
        """Rows rank, rank + size, … with their mentions and targets, renumbered."""
        T = self.tokens.shape[1]
        ours = self.row % size == rank                              # (M,)
        targets = self.target_index // T % size == rank             # (L,)
        number = torch.full((len(ours) + 1,), -1, device=ours.device)   # new numbers; [-1] stays -1
        number[:-1] = ours.cumsum(0) - 1
        part = self.of_mentions(ours)
        part |= {name: getattr(self, name)[rank::size].contiguous() for name in ROWS
                 if getattr(self, name) is not None}
        part["row"] = part["row"] // size
        index = self.target_index[targets]
        part["target_index"] = index // T // size * T + index % T
        part["target"] = self.target[targets]
        part["target_mention"] = number[self.target_mention[targets]]
        if self.answer_mention is not None:
            part["answer_mention"] = number[part["answer_mention"]]
        return Batch(**part)

def _ranges(starts, lengths):
    """The ranges [s, s + n) one after the other: which range, the value."""
    which = np.repeat(np.arange(len(lengths)), lengths)
    offset = np.arange(len(which)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return which, starts[which] + offset

def _collate(rows, pad, **mentions) -> Batch:
    """Rows of token ids and the columns of their mentions as a Batch; nothing is masked."""
    tokens = pad_sequence([torch.from_numpy(np.asarray(row, np.int64)) for row in rows], True, pad)
    columns = {name: torch.from_numpy(np.asarray(column, np.int64))
               for name, column in mentions.items()}
    none, masked = torch.empty(0, dtype=torch.int64), torch.zeros(len(columns["row"]), dtype=bool)
    return Batch(tokens, tokens, tokens != pad, masked=masked, target_index=none, target=none,
                 target_mention=none, **columns)

def _unmasked(corpus, passages) -> Batch:
    """These passages with all of their mentions."""
    passages = np.asarray(passages, np.int64)
    first, stop = corpus.passage_start[passages], corpus.passage_start[passages + 1]
    n_mentions = corpus.mention_first[passages + 1] - corpus.mention_first[passages]
    row, mention = _ranges(corpus.mention_first[passages], n_mentions)
    return _collate([corpus.tokens[a:b] for a, b in zip(first, stop)], corpus.special[PAD], row=row,
                    start=corpus.mention_start[mention], end=corpus.mention_end[mention],
                    entity=corpus.mention_entity[mention], passage=passages[row], mention=mention)

def _owner(batch):
    """(B * T,) the mention between whose markers each token stands, -1 = none."""
    start = (batch.row * batch.tokens.shape[1] + batch.start).numpy()
    which, position = _ranges(start + 1, (batch.end - batch.start - 1).numpy())
    owner = np.full(batch.tokens.numel(), -1)
    owner[position] = which
    return owner

def _mask(batch, owner, chosen, read) -> Batch:
    """The batch with its targets. owner (B * T,): _owner's. chosen (B * T,): which tokens are to
    be predicted, all of a mention or none. read (B * T,): what the model reads."""
    targets = np.flatnonzero(chosen)
    owner = owner[targets]
    tensors = {"tokens": read.reshape(batch.tokens.shape), "target_index": targets,
               "target": batch.unmasked.numpy().ravel()[targets], "target_mention": owner,
               "masked": np.isin(np.arange(len(batch.row)), owner)}
    return replace(batch, **{name: torch.from_numpy(array) for name, array in tensors.items()})

def make_batch(corpus, passages, rng=None, mention_rate=.2, token_rate=.1,
               max_mentions=24, is_withheld=None) -> Batch:
    """Passages as a masked batch (app. A): 20% of whole mentions, 10% of the tokens in none.

    rng: a numpy Generator; None does where both rates are 0 and no mention is left out.
    max_mentions: how many there may be a passage on average; with more, the batch keeps a
    uniform sample (None: all). is_withheld (E,): entities whose mentions are never masked."""
    batch = _unmasked(corpus, passages)
    tokens = batch.unmasked.numpy().ravel()                                 # (B * T,)
    owner = _owner(batch)
    outside = owner < 0                     # of every mention, also of those left out below
    if max_mentions is not None and len(batch.row) > max_mentions * len(batch.tokens):
        n = max_mentions * len(batch.tokens)
        kept = np.sort(rng.choice(len(batch.row), n, replace=False))
        batch = replace(batch, **batch.of_mentions(kept))
        owner = _owner(batch)

    M, chosen = len(batch.row), np.zeros(len(tokens), bool)
    if token_rate:
        chosen = corpus.maskable[tokens] & outside & (rng.random(len(tokens)) < token_rate)
    if mention_rate and M:
        masked = rng.permutation(M)[:max(1, round(mention_rate * M))]
        if is_withheld is not None:
            masked = masked[~is_withheld[batch.entity[masked]]]
        chosen |= np.isin(owner, masked)

    read, index = tokens.copy(), np.flatnonzero(chosen)
    if len(index):
        fate = rng.random(len(index))       # 80% [MASK], 10% a random word, 10% left as they are
        words = rng.choice(corpus.words, len(index))
        read[index[fate < .9]] = words[fate < .9]
        read[index[fate < .8]] = corpus.special[MASK]
    return _mask(batch, owner, chosen, read)

def eval_batch(corpus, mentions) -> Batch:
    """A row for each corpus mention: its passage, with [MASK] for each token of this mention."""
    batch = _unmasked(corpus, corpus.passage_of(mentions))
    asked = np.flatnonzero(batch.mention.numpy() == np.asarray(mentions)[batch.row])    # one a row
    owner = _owner(batch)
    chosen = np.isin(owner, asked)
    read = np.where(chosen, corpus.special[MASK], batch.unmasked.ravel())
    return _mask(batch, owner, chosen, read)

def eval_mentions(corpus, min_elsewhere=1) -> np.ndarray:
    """Numbers of the mentions in held-out passages that only a memory can fill in.

    Linked, the entity stands once in the passage, is not the article's title (which most of its
    passages name), and is linked in at least min_elsewhere other passages, held out or not."""
    linked = np.flatnonzero(corpus.mention_entity)
    entity, passage = corpus.mention_entity[linked], corpus.passage_of(linked)
    E = len(corpus.entity_names)
    pairs, pair, count = np.unique(passage * E + entity, return_inverse=True, return_counts=True)
    passages_with = np.bincount(pairs % E, minlength=E)                     # (E,)
    titles = np.array([corpus.entity_index.get(title, 0) for title in corpus.titles])
    own_title = titles[corpus.article[passage]] == entity
    elsewhere = passages_with[entity] - 1
    return linked[corpus.held_out[passage] & (count[pair] == 1) & ~own_title
                  & (elsewhere >= min_elsewhere)]

# ---------------------------------------------------------------- related passages (app. A.1)

def related_clusters(corpus, size, seed, passages, max_articles=500) -> list:
    """Clusters of `size` of these passages from related articles: arrays of passage numbers.

    A cluster starts from the article with most unused passages. Then the article joins whose set
    of entities has the largest Jaccard similarity to the cluster's, until it is full; what does
    not fit stays unused. Ties are broken by seed. Entities of more than max_articles articles are
    left out of the sets: they would make every article a candidate of every other."""
    passages = np.sort(np.asarray(passages, np.int64))
    numbers, article = np.unique(corpus.article[passages], return_inverse=True)
    A, E = len(numbers), len(corpus.entity_names)
    article = np.random.default_rng(seed).permutation(A)[article]   # now ties go to the smallest
    by_article = passages[np.argsort(article, kind="stable")]
    unused = np.bincount(article, minlength=A)      # (A,) an article's last passages are unused
    after = np.cumsum(unused)                       # (A,) where they end in by_article
    # Pairs (article, entity) as one number, then an index in either direction: article a has
    # entities[entities_of[a]:entities_of[a + 1]], entity e is in articles[articles_of[e]:…].
    mentions = corpus.mention_first[passages]
    which, mention = _ranges(mentions, corpus.mention_first[passages + 1] - mentions)
    entity = corpus.mention_entity[mention].astype(np.int64)
    pairs = np.unique((article[which] * E + entity)[entity > 0])
    pairs = pairs[np.bincount(pairs % E, minlength=E)[pairs % E] <= max_articles]
    entities, entities_of = pairs % E, np.searchsorted(pairs, np.arange(A + 1) * E)
    order = np.argsort(entities, kind="stable")
    articles = pairs[order] // E
    articles_of = np.searchsorted(entities[order], np.arange(E + 1))
    n_entities = np.diff(entities_of)               # (A,)

    clusters = []
    while unused.any():
        cluster, room, joined = [], size, np.empty(0, np.int64)     # joined: its set of entities
        a = unused.argmax()
        while True:
            n = min(room, unused[a])
            cluster.append(by_article[after[a] - unused[a]:][:n])
            unused[a] -= n
            room -= n
            if not room or not unused.any():
                break
            joined = np.union1d(joined, entities[entities_of[a]:entities_of[a + 1]])
            n_articles = articles_of[joined + 1] - articles_of[joined]
            _, touched = _ranges(articles_of[joined], n_articles)
            candidates, both = np.unique(articles[touched], return_counts=True)
            left = unused[candidates] > 0
            candidates, both = candidates[left], both[left]
            a = (unused > 0).argmax()               # the first one, if nobody left shares anything
            if len(candidates):
                either = n_entities[candidates] + len(joined) - both
                a = candidates[(both / either).argmax()]
        clusters.append(np.concatenate(cluster))
    return clusters

# ---------------------------------------------------------------- examples: claims and questions

class Example(NamedTuple):
    text: str
    mentions: list | None       # None: to be found (mention_finder)
    label: int | None           # claims: index into CLAIM_LABELS; None: not known (test files)
    answers: list               # questions: entity names, any of which is right; []: none is one
    info: dict                  # the other fields: subject, bridge, relations, …

# Chinese and Japanese put no spaces between words, so that each of their characters is a word.
_CJK = "\u3005-\u3007\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+|[^\w\s]")

def add_name(index, name):
    """Adds a name to a tree of names by their words, in which "" stands at a name's end:
    {"port": {"ellin": {"": "Port_Ellin"}}}. Of names that read alike the first one counts."""
    words = _WORD.findall(re.sub(r"\s*\([^()]*\)$", "", name.replace("_", " ")).lower())
    if any(word.isalnum() for word in words):
        for word in words:
            index = index.setdefault(word, {})
        index.setdefault("", name)

def name_index(names) -> dict:
    """The tree of these names; "_" is a space, a bracket at the end goes."""
    index = {}
    for name in names:
        add_name(index, name)
    return index

def find_mentions(text, names) -> list:
    """Mentions of entity names in a text: longest match first, whole words, whatever the case.

    names: entity names, or their name_index where many texts are searched."""
    index = names if isinstance(names, dict) else name_index(names)
    words = list(_WORD.finditer(text))
    mentions, i = [], 0
    while i < len(words):
        node, longest = index, None
        for n in range(i, len(words)):
            node = node.get(words[n].group().lower())
            if node is None:
                break
            if "" in node:
                longest = n
                name = node[""]
        if longest is not None:
            mentions.append(Mention(words[i].start(), words[longest].end(), name))
            i = longest
        i += 1
    return mentions

@lru_cache(1)
def noun_chunker() -> Callable | None:
    """text -> Mentions of its noun chunks, the paper's mentions of claims and questions (app. B.1).
    None where spaCy or an English pipeline of it is not installed."""
    try:
        import spacy
        names = [name for name in spacy.util.get_installed_models() if name.startswith("en")]
        pipeline = spacy.load(names[0], exclude=["ner", "lemmatizer"])
    except Exception:               # parts of spaCy that do not fit raise anything
        return None
    return lambda text: [Mention(chunk.start_char, chunk.end_char, None)
                         for chunk in pipeline(text).noun_chunks]

def mention_finder(names):
    """(how, find): find(text) -> mentions of a text that comes without: noun chunks where spaCy
    and an English pipeline are installed, else the longest matches of these entity names."""
    chunks = noun_chunker()
    if chunks is not None:
        return "spaCy's noun chunks", chunks
    index = name_index(names)
    return "entity names (no spaCy with en_core_web_sm)", lambda text: find_mentions(text, index)

def first_passages(examples, tokenizer, room):
    """The Passage of each example's first `room` positions; what is behind them is cut off."""
    special, none = special_ids(tokenizer), np.empty(0, np.int64)
    nothing = Passage(np.array([special[CLS], special[SEP]]), none, none, none, (0, None))
    encodings = tokenizer.encode_batch([e.text for e in examples], add_special_tokens=False)
    for example, encoding in zip(examples, encodings):
        passages = encode_text(encoding, example.mentions, room, room, special, Counter())
        yield passages[0] if passages else nothing

def count_cut_mentions(examples, tokenizer, max_length) -> int:
    """How many mentions example_batch leaves out: behind max_length, or they overlap another."""
    passages = first_passages(examples, tokenizer, max_length - 3)
    return sum(len(e.mentions) - len(passage.index) for e, passage in zip(examples, passages))

def _with_question(passage, special):
    """The Passage with one more mention at its end, "[E_start] [MASK] [E_end]"; its index is -1."""
    n = len(passage.tokens)
    tokens = [*passage.tokens[:-1], *(special[t] for t in (E_START, MASK, E_END, SEP))]
    columns = zip((passage.start, passage.end, passage.index), (n - 1, n + 1, -1))
    return Passage(tokens, *(np.append(column, last) for column, last in columns), passage.chars)

def example_batch(examples, task, tokenizer, entity_index, max_mentions=32,
                  max_length=512) -> Batch:
    """Examples with mentions as a Batch; a question ends in "[E_start] [MASK] [E_end]" (§4).

    task: "claims", "qa" or None. entity_index: name -> number. Among claims there may be clozes:
    no label, but the entity of a mention as answer. Its mentions are hidden behind [MASK], and the
    first one is asked. What is behind max_length positions is cut off (count_cut_mentions)."""
    special, is_question = special_ids(tokenizer), task == "qa"
    room = max_length - 3 if is_question else max_length
    passages = list(first_passages(examples, tokenizer, room))
    if is_question:
        passages = [_with_question(passage, special) for passage in passages]
    row = np.repeat(np.arange(len(passages)), [len(p.index) for p in passages])
    start, end, number = (np.concatenate([getattr(p, name) for p in passages])
                          for name in ("start", "end", "index"))
    names = [examples[r].mentions[i].entity if i >= 0 else None for r, i in zip(row, number)]
    batch = _collate([p.tokens for p in passages], special[PAD], row=row, start=start, end=end,
                     entity=[entity_index.get(name, 0) for name in names],
                     passage=np.full(len(row), -1), mention=number)
    hidden = np.flatnonzero(number < 0)
    if task == "claims":
        is_answer = [name in examples[r].answers for r, name in zip(row, names)]
        hidden = np.flatnonzero(is_answer)
    is_hidden = torch.from_numpy(np.isin(_owner(batch), hidden)).view_as(batch.tokens)
    batch.tokens = batch.unmasked.masked_fill(is_hidden, special[MASK])
    _, first = np.unique(row[hidden], return_index=True)
    asked = hidden[first]                       # the first of each row
    batch.masked[asked] = True

    n = max_mentions * len(passages)
    if len(row) > n:                            # a uniform sample, but whatever is asked
        order = np.random.default_rng(0).random(len(row))
        order[asked] -= 1                       # these come first
        batch = replace(batch, **batch.of_mentions(np.sort(np.argsort(order)[:n])))
    if task == "claims":
        batch.label = torch.tensor([-1 if e.label is None else e.label for e in examples])
    if is_question or any(e.answers for e in examples):
        known = [[entity_index[a] for a in e.answers if a in entity_index] for e in examples]
        batch.answer = torch.tensor([answers[0] if answers else 0 for answers in known])
        batch.answer_mention = torch.full((len(examples),), -1)
        batch.answer_mention[batch.row[batch.masked]] = batch.masked.nonzero().ravel()
        batch.answer[batch.answer_mention < 0] = 0          # of a cloze that was cut before it asks
    return batch

# ---------------------------------------------------------------- the toy world

# A name is a first and a last word: it is learnt as a pair, and an unseen name is a new pair.
NAMES = {kind: tuple(pool.split() for pool in pools.split("/")) for kind, pools in {
    "person": """
        Alma Boris Clara Dario Edith Felix Greta Hugo Irene Jonas Karin Leon Marta Nils Olga Pavel
        Quinn Rosa Stefan Tilda Ulric Vera Walter Xenia Yara Zeno Agnes Bruno Celia Dmitri Elsa
        Fabian Gilda Henrik Ida Jasper Kira Lucas Mona Nestor Oskar Petra Rufus Sonja Tobias Ursula
        Viktor Wanda / Verran Holt Lindqvist Marek Norwood Ostrov Pellin Quist Rademaker Sorel
        Tarkov Ulland Varga Westrup Yarrow Zeller Abbott Brandt Corvin Dahl Eckhart Falk Garnier
        Hale Ibsen Jarvis Keller Lorenz Moreau Nyberg Orloff Pascal Renner Salinas Thorne Unwin
        Vance Weaver Adler Bishop Castell Draper Engel Forster Grange Hartley Irving Jansen Kovac
        Lambert Mercer Novak Olsen Porter Ramsey Sutter""",
    "city": """
        Port Saint Fort Mount Lake Glen Castle Harbour Abbey High Green White Black Silver Golden
        Stone Long Bright Cold Deep Fair Kings Queens Bishops / Ellin Orla Dunmere Ashby Belcourt
        Carrow Dalton Elmswell Farrow Gaston Hollis Ilford Jarrow Kelso Lorne Melby Norham Oakley
        Penrith Redmond Selby Tarrant Upton Vernon Wexley Yardley Amber Brook""",
    "country": """
        North South East West New Upper Lower Inner Outer Grand Free United / Karovia Maland
        Tessara Valdoria Lumeria Norvania Brenia Caldora Drevia Estonar Fyria Galdova Halvia
        Istrana Jorvia Kestoria""",
    "company": """
        Norvik Apex Atlas Beacon Crown Delta Eagle Falcon Globe Helix Iris Jupiter Kestrel Lotus
        Meteor Nova Orion Phoenix Quartz Rocket Summit Titan Vector Zenith / Motors Steel Foods
        Books Airways Bank Chemicals Dairy Electric Fabrics Glass Hotels Insurance Jewels Kitchens
        Lumber Media Optics Paper Rail Shipping Textiles""",
    "film": """
        Silent Broken Crimson Distant Endless Frozen Gentle Hidden Iron Jagged Lonely Midnight
        Narrow Painted Quiet Restless Savage Tender Velvet Wild Winter Burning Empty Fallen Hollow
        Last Lost Pale Scarlet Secret Sleeping Stolen Sudden Twisted Wandering Wooden / Garden
        Mirror River Letters Shadow Window Dancer Island Orchard Promise Station Tiger Voyage
        Whisper Anthem Bells Circus Diary Echo Feast Ghost Harvest Journey Kingdom Lantern Memory
        Mountain Night Ocean Painter Road Sailor Storm Summer Thief Tower""",
}.items()}
COUNTS = {"person": 800, "city": 220, "country": 60, "company": 220, "film": 600}

class Relation(NamedTuple):
    subject: str            # kinds of names
    object: str
    noun: str               # "{s}'s {noun}" describes the object without its name
    phrases: list           # for the corpus; {s} is the subject, {o} the object
    claims: list
    questions: list

def _relations(table) -> dict:
    """{name: Relation} of the table below: name, subject, object, noun; then nine phrases, five
    for the corpus, two claims, two questions. Claims say nothing in the words of the corpus."""
    relations = {}
    for entry in re.split(r"\n(?! )", table.strip()):
        head, _, phrases = entry.partition("\n")
        name, *types = head.split()
        phrases = re.sub(r"\b(S|O)\b", lambda m: "{%s}" % m[0].lower(), phrases).split("|")
        phrases = [" ".join(phrase.split()) for phrase in phrases]
        relations[name] = Relation(*types, phrases[:5], phrases[5:7], phrases[7:])
    return relations

RELATIONS = _relations("""
born_in person city birthplace
    S was born in O. | O is the city where S was born. | The birthplace of S is O. |
    S is a native of O. | In O stands the house where S was born. | S was born in the city of O. |
    O is the birthplace of S. | In which city was S born? | Where was S born?
employer person company employer
    S works for O. | O is the company which employs S. | The employer of S is O. |
    S has a job at O. | Every month O pays the wages of S. | O employs S. |
    S has a job at the company O. | Which company employs S? | Which company is the employer of S?
teacher person person teacher
    S was taught by O. | O taught S for many years. | The teacher of S was O. |
    S learned everything from O. | Long ago O had S as a pupil. | S was a pupil of O. |
    O was the teacher who taught S. | Who taught S? | Who was the teacher of S?
country city country country
    S is a city in O. | O is the country where S lies. | The country of S is O. | S belongs to O. |
    On the map S is a part of O. | S lies in O. | S is a part of the country O. |
    In which country is S? | S is a city in which country?
mayor city person mayor
    The mayor of S is O. | O was chosen to be mayor by the people of S. | S is led by O. |
    Who runs the town hall of S? O. | O leads the council of S. | O leads the people of S. |
    O was chosen to be the mayor of S. | Who is the mayor of S? | Who leads the people of S?
capital country city capital
    The capital of S is O. | O is the seat of the government of S. | S is governed from O. |
    S has O as capital. | In O the parliament of S meets. | O is the capital of S. |
    The government of S meets in O. | Which city is the capital of S? |
    In which city is the government of S?
home company city home
    S is based in O. | The main office of S stands in O. | O is the home of S. |
    S is run from an office in O. | In O stands the factory of S. | S has the main office in O. |
    The home of S is in the city of O. | In which city is S based? | Where is the main office of S?
founder company person founder
    S was founded by O. | O started S in a small shop. | The founder of S was O. |
    S began as an idea of O. | With little money O set up S. | S was started by O. |
    O is the founder of S. | Who founded S? | Who was the founder of S?
director film person director
    S was directed by O. | O is the director of S. | O made the film S. |
    The film S is the work of O. | With S the director O won a prize. | O directed S. |
    The director of the film S was O. | Who directed S? | Who was the director of S?
star film person star
    O plays the lead in S. | The star of S is O. | S has O in the main part. |
    In S the hero is played by O. | Who became famous as the hero of S? O. |
    The lead in S is played by O. | O is the star of the film S. | Who plays the lead in S? |
    Who is the star of S?
location film city location
    S was filmed in O. | The streets of O can be seen in S. | For S the cameras came to O. |
    The location of S was O. | O was chosen as the location for S. |
    O is the city where S was filmed. | The film S was made in O. | In which city was S filmed? |
    Where was the film S made?
""")

def _say(phrase, subject, obj="", noun=None, bridge=""):
    """A phrase filled in, with mentions and links: "[Alma Verran|Alma Verran] was born in [Port…".

    With a noun it is about "X's [director|]", which takes two hops; that description is linked
    where a bridge is given: "[director|Y]". An object "a city" is nobody's name."""
    about = f"[{subject}|{subject}]"
    if noun:
        about += f"'s [{noun}|{bridge}]"
    text = phrase.format(s=about, o=obj if obj.islower() else f"[{obj}|{obj}]")
    return text[0].upper() + text[1:]

def _line(key, marked, **others):
    """A line of a file; marked: what _say says."""
    text, *parts = re.split(r"\[(.*?)\|(.*?)\]", marked)
    mentions = []
    for shown, entity, after in zip(parts[::3], parts[1::3], parts[2::3]):
        end = len(text) + len(shown)
        mentions.append({"start": len(text), "end": end, "entity": entity or None})
        text += shown + after
    return {key: text, "mentions": mentions, **others}

def toy_world(seed=0, descriptions=0.5):
    """Corpus lines and {"claims.one_hop.train": lines, …} of a made-up world, from a seed alone.

    It is two worlds that share name words but no entity: one is seen in training, the other (20%)
    is held out whole. Examples are split by fact, (subject, relation), alike for all tasks; both
    facts of a two-hop example are in its split. descriptions: see _toy_passages."""
    rng = np.random.default_rng(seed)
    seen, unseen = {}, {}                                   # kind -> names
    for kind, (firsts, lasts) in NAMES.items():
        n = COUNTS[kind]
        pairs = rng.permutation(len(firsts) * len(lasts))[:n + n // 5]
        names = [f"{firsts[i // len(lasts)]} {lasts[i % len(lasts)]}" for i in pairs]
        seen[kind], unseen[kind] = names[:n], names[n:]
    facts, unseen_facts = _toy_facts(rng, seen), _toy_facts(rng, unseen)
    split = rng.choice(["train", "dev", "test"], len(facts), p=[.66, .15, .19])
    split = dict(zip(facts, split)) | dict.fromkeys(unseen_facts, "unseen")
    facts |= unseen_facts
    lines = _toy_passages(rng, facts, split, descriptions)
    lines = [lines[i] for i in rng.permutation(len(lines))]
    examples = {}
    for name, limit in {"train": 8000, "dev": 300, "test": 500, "unseen": 500}.items():
        of_split = {fact: obj for fact, obj in facts.items() if split[fact] == name}
        for hops, items in _toy_hops(of_split).items():
            qa, claims = _toy_examples(rng, items, limit, name == "train")
            examples |= {f"qa.{hops}.{name}": qa, f"claims.{hops}.{name}": claims}
    for name in ("train", "dev"):                           # both kinds, to learn from together
        for task in ("qa", "claims"):
            one, two = (examples[f"{task}.{hops}.{name}"] for hops in ("one_hop", "two_hop"))
            examples[f"{task}.both.{name}"] = one + two
    return lines, examples

def _toy_facts(rng, names):
    """Facts {(subject, relation): object} drawn at random; names: {kind: names}."""
    facts = {}
    for name, relation in RELATIONS.items():
        for subject in names[relation.subject]:
            one, other = rng.choice(names[relation.object], 2, replace=False).tolist()
            facts[subject, name] = other if one == subject else one
    return facts

def _toy_passages(rng, facts, split, descriptions):
    """Five passages a subject, each with all of its facts, every time in another phrase: a masked
    mention can be told from the other passages and from nowhere else. 5% of the passages of the
    seen world are held out.

    descriptions: the share of the seen world's training passages in which one fact is not stated:
    in place of "X was directed by Y." stands "X's director was born in a city.", with a link to Y
    on the description, as links stand in Wikipedia. From these a model learns whom a description
    means, which two hops begin with. The examples do not link it."""
    lines, relations_of = [], {}
    for subject, relation in facts:
        relations_of.setdefault(subject, []).append(relation)
    for subject, relations in relations_of.items():
        seen = split[subject, relations[0]] != "unseen"
        held_out = rng.integers(20)         # below 5, a passage of its own, for one subject in four
        order = {relation: rng.permutation(5) for relation in relations}
        left_out = Counter()
        for i in range(5):
            said = {}
            for r in rng.permutation(relations).tolist():
                said[r] = _say(RELATIONS[r].phrases[order[r][i]], subject, facts[subject, r])
            possible = [r for r in relations if split[subject, r] == "train" and left_out[r] < 2]
            if rng.random() < descriptions and i != held_out and possible:
                first = possible[rng.integers(len(possible))]
                left_out[first] += 1
                about = [r for r in RELATIONS.values() if r.subject == RELATIONS[first].object]
                second = about[rng.integers(len(about))]
                said[first] = _say(rng.choice(second.phrases), subject, f"a {second.object}",
                                   RELATIONS[first].noun, facts[subject, first])
            name = "train" if seen and i != held_out else "held_out"
            lines.append({"title": subject, **_line("text", " ".join(said.values()), split=name)})
    return lines

def _toy_hops(facts) -> dict:
    """What can be asked of these facts: "Who directed X?" and "Where was X's director born?", where
    the director is the bridge."""
    one_hop, two_hop = [], []
    for (subject, first), bridge in facts.items():
        one_hop.append({"subject": subject, "relations": [first], "object": bridge})
        for second in RELATIONS:
            obj = facts.get((bridge, second), subject)
            if obj not in (subject, bridge):
                two_hop.append({"subject": subject, "relations": [first, second], "object": obj,
                                "bridge": bridge})
    return {"one_hop": one_hop, "two_hop": two_hop}

def _toy_examples(rng, items, limit, is_train):
    """(questions, claims) about these facts, or pairs of facts.

    A wrong object is that of another fact of this relation and split, so as frequent as right
    ones, and each fact is claimed rightly and wrongly: only the memory tells them apart. In
    training so in every phrase: that is harder to learn by heart."""
    qa, claims, objects = [], [], {}
    for item in items:
        objects.setdefault(item["relations"][-1], []).append(item["object"])
    for i in rng.permutation(len(items))[:limit]:
        item = items[i]
        subject, obj, bridge = item["subject"], item["object"], item.get("bridge")
        first, last = item["relations"][0], item["relations"][-1]
        noun, relation = RELATIONS[first].noun if bridge else None, RELATIONS[last]
        question = _say(rng.choice(relation.questions), subject, noun=noun)
        qa.append(_line("question", question, answers=[obj], **item))
        wrong = [other for other in objects[last] if other not in (obj, subject, bridge)]
        if wrong:
            for phrase in relation.claims if is_train else [rng.choice(relation.claims)]:
                other = wrong[rng.integers(len(wrong))]
                for claimed, label in ((obj, "SUPPORTS"), (other, "REFUTES")):
                    claim = _say(phrase, subject, claimed, noun)
                    claims.append(_line("text", claim, label=label, **item))
    return qa, claims if is_train else claims[:limit]

def write_toy(folder, lines, examples):
    """Writes what toy_world made: corpus.jsonl, claims.one_hop.train.jsonl, …"""
    os.makedirs(folder, exist_ok=True)
    for name, records in {**examples, "corpus": lines}.items():
        write_lines(Path(folder, name + ".jsonl"), records)

# ================================================================ files: JSON lines

MAX_LINE = 1 << 24          # characters; no text of a corpus is as long

def open_text(path, max_line=-1) -> Iterator[str]:
    """The lines of a plain or gzipped UTF-8 file, whatever its name, without a byte-order mark; of
    a longer one only max_line characters. Raises UserError for what is no file or cut off.
    Bytes that are not UTF-8 become lone surrogates, which read_records refuses."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"{path}: cannot be read twice; give a file, not a folder or a pipe")
    with open(path, "rb") as raw:
        file = gzip.open(raw) if raw.peek(2)[:2] == b"\x1f\x8b" else raw
        lines = TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="\n")
        try:
            yield from iter(lambda: lines.readline(max_line), "")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{path}: not a whole gzip file ({error}); copy it again") from error

def read_records(path, make, errors=None):
    """make(record) of each line of a file of JSON lines; make raises ValueError "field: reason".

    Raises UserError "FILE:LINE: field: reason" for a bad line; with a list `errors`, that message
    is appended to it and reading goes on."""
    for n, line in enumerate(open_text(path, MAX_LINE), 1):
        if len(line) == MAX_LINE:
            raise UserError(f"{path}:{n}: over {MAX_LINE:,} characters; put one text on a line")
        try:
            if line.strip():
                record = json.loads(line)
                json.dumps(record, ensure_ascii=False).encode()     # refuses lone surrogates
                yield make(record)
        except (ValueError, RecursionError) as error:
            reason = error
            if type(error) is not ValueError:           # but one of those that json raises
                reason = f"not JSON ({error}); write one object a line in UTF-8, plain or gzipped"
            if errors is None:
                raise UserError(f"{path}:{n}: {reason}") from error
            errors.append(f"{path}:{n}: {reason}")

def field(record, name, allowed, where=""):
    """A field of a record; null where it is missing. allowed: the types or values that it may have.
    where: "mentions[0].", say, for a record inside another. Raises ValueError "field: reason"."""
    if type(record) is not dict:
        raise ValueError(f"{where.rstrip('.') or 'the line'}: not a JSON object; write one a line")
    value = record.get(name)
    if value not in allowed and type(value) not in allowed:     # not isinstance: true is no number
        names = [getattr(kind, "__name__", str(kind)) for kind in allowed]
        raise ValueError(f"{where}{name}: missing or not {' or '.join(names)}")
    return value

def read_mentions(record, text) -> list | None:
    """The Mentions of a record with that text; None where it has no such field."""
    mentions = field(record, "mentions", [list, None])
    if mentions is None:
        return None
    for i, mention in enumerate(mentions):
        where = f"mentions[{i}]."
        start, end = field(mention, "start", [int], where), field(mention, "end", [int], where)
        if not 0 <= start < end <= len(text):
            raise ValueError(f"{where}start: not 0 <= start < end <= {len(text)}")
        mentions[i] = Mention(start, end, field(mention, "entity", [str, None], where))
    return mentions

def read_corpus(path, errors=None) -> Iterator[Text]:
    """The texts of a corpus file, as a stream. Errors as read_records'."""
    def make(record):
        title, text = field(record, "title", [str]), field(record, "text", [str])
        split = field(record, "split", ["train", "held_out", None])
        return Text(title, text, read_mentions(record, text) or [], split)
    return read_records(path, make, errors)

def read_examples(path, task) -> list:
    """Examples of task "claims" (text, label) or "qa" (question, answers); mentions may be absent.

    Raises UserError for a bad line or a file without any."""
    def make(record):
        text = field(record, "question" if task == "qa" else "text", [str])
        answers = field(record, "answers", [list]) if task == "qa" else []
        label = field(record, "label", [*CLAIM_LABELS, None]) if task == "claims" else None
        if label is not None:
            label = CLAIM_LABELS.index(label)
        mentions = read_mentions(record, text)
        return Example(text, mentions, label, [str(answer) for answer in answers], record)

    examples = list(read_records(path, make))
    if not examples:
        raise UserError(f"{path}: holds no example; give a file with one JSON object a line")
    return examples

# ---------------------------------------------------------------- files: written whole

def write_file(path, write):
    """write(file) under a temporary name, then one rename: a reader sees the old file or the new
    one. No link is followed. What is no file (/dev/null, a pipe) is written to and stays."""
    path = os.path.abspath(path)
    if path.startswith("/dev/") or os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as file:
            return write(file)
    temporary = path + ".tmp"
    remove(temporary)
    try:
        with open(temporary, "xb") as file:
            write(file)
        sync(temporary)
        os.replace(temporary, path)
        sync(os.path.dirname(path))
    except (OSError, RuntimeError) as error:    # torch.save makes the latter of a full disk
        raise UserError(f"{path} cannot be written ({error}); see to the room there") from error
    finally:
        remove(temporary)

def remove(path):
    """Removes a file, a folder or a link, but not what the link points to."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        Path(path).unlink(missing_ok=True)

def sync(path):
    """Makes a file, or the names in a folder, outlast a loss of power."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)

def commit_folder(part, folder, **about):
    """Gives the folder `part` its final name, once it is durable and meta.json says what it is
    (`about`, plain values) and the checksum of each file. So `folder` is whole or not there."""
    part = Path(part)
    names = sorted(name for name in os.listdir(part) if not name.startswith("meta.json"))
    for name in names:
        sync(part / name)
    crc32 = {name: checksum(part / name) for name in names}
    write_json(part / "meta.json", {**about, "crc32": crc32})
    os.rename(part, folder)
    sync(Path(folder).absolute().parent)

def open_folder(folder, kind, wanted=lambda name: True) -> dict:
    """meta.json of a folder that commit_folder has named. Every file must be there, and those that
    are wanted(name) must have their checksums. Raises UserError."""
    try:
        meta = read_json(Path(folder, "meta.json"))
        if meta["format"] != FORMAT:
            raise ValueError(f"format {meta['format']}, this version reads {FORMAT}")
        for name, crc32 in meta["crc32"].items():
            os.stat(Path(folder, name))
            if wanted(name) and checksum(Path(folder, name)) != crc32:
                raise ValueError(f"the checksum of {name} differs")
        return meta
    except (OSError, ValueError, LookupError) as error:
        raise UserError(f"{folder} is missing or damaged: not a whole {kind} ({error}); remove it "
                        "and run the same stage again") from error

def write_lines(path, records):
    """JSON lines, by write_file; gzipped where the name ends in .gz, the same bytes each time."""
    def write(file):
        is_gzip = str(path).endswith(".gz")
        with gzip.GzipFile("", "wb", fileobj=file, mtime=0) if is_gzip else nullcontext(file) as to:
            for record in records:
                line = json.dumps(record, ensure_ascii=False) + "\n"
                to.write(line.encode("utf-8", "replace"))       # "?" for a lone surrogate
    write_file(path, write)

def write_json(path, value):
    """A dictionary of plain values, by write_file."""
    write_file(path, lambda file: file.write((json.dumps(value, indent=1) + "\n").encode()))

def read_json(path) -> dict:
    """What write_json wrote. Raises ValueError."""
    return json.loads(Path(path).read_bytes())

def checksum(path) -> int:
    """CRC-32 of a file."""
    crc32 = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            crc32 = zlib.crc32(block, crc32)
    return crc32

def printable(text) -> str:
    """Text for a terminal: what would command it (ESC, marks of direction) is shown escaped."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)

def complain(program, error) -> int:
    """One sentence on stderr; returns the exit status of a program that could not do its work."""
    if isinstance(error, OSError):
        error = f"{error.filename}: {error.strerror or error}; check the name, rights and room"
    print(printable(f"{program}: {error}"), file=sys.stderr)
    return 1

# ---------------------------------------------------------------- tokenizer

def _wordpiece(vocab) -> Tokenizer:
    """WordPiece as BERT's, lower case. [CLS] and the others are never read out of a text."""
    words = {word: i for i, word in enumerate(vocab)}
    tokenizer = Tokenizer(models.WordPiece(words, unk_token=UNK))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)       # "port ##o" is read as "porto"
    return tokenizer

def train_tokenizer(texts, vocab_size=30522) -> Tokenizer:
    """WordPiece of an iterable of strings. With room for every word, each word is one token."""
    tokenizer, words = _wordpiece(SPECIAL), set()
    normalizer, splitter = tokenizer.normalizer, tokenizer.pre_tokenizer    # training locks these

    def stream():
        for text in texts:
            if len(words) <= vocab_size:
                normal = normalizer.normalize_str(text)
                words.update(word for word, _ in splitter.pre_tokenize_str(normal))
            yield text

    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=SPECIAL,
                                        limit_alphabet=1000, show_progress=False)
    tokenizer.train_from_iterator(stream(), trainer)
    # The trainer keeps every merge on the way to a word: rows of the embeddings that nothing uses
    # where all words fit. Then keep the words, and the characters to spell new ones.
    chars = sorted(set("".join(words)))
    inner = ["##" + c for c in chars if c.isalnum()]
    vocab = list(dict.fromkeys([*SPECIAL, *chars, *inner, *sorted(words)]))
    if len(vocab) > vocab_size:
        number = tokenizer.get_vocab()
        vocab = sorted(number, key=number.get)
    return _wordpiece(vocab)

def load_tokenizer(path) -> Tokenizer:
    """BERT's vocab.txt, in which the markers take two [unusedN] entries, or our tokenizer.json."""
    if str(path).endswith(".json"):
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:      # tokenizers raises nothing more precise
            raise UserError(f"{path}: not a tokenizer ({error})") from error
    else:
        vocab = [line.rstrip("\r\n") for line in open_text(path)]
        unused = [i for i, word in enumerate(vocab) if word.startswith("[unused")]
        markers = [marker for marker in (E_START, E_END) if marker not in vocab]
        for i, marker in zip(unused, markers):
            vocab[i] = marker
        tokenizer = _wordpiece(vocab)
    special_ids(tokenizer, path)
    return tokenizer

def special_ids(tokenizer, path="the tokenizer") -> dict:
    """{"[PAD]": id, …} for the seven special tokens. Raises UserError when one is missing."""
    ids = {t: tokenizer.token_to_id(t) for t in SPECIAL}
    if None in ids.values():
        missing = ", ".join(t for t, i in ids.items() if i is None)
        raise UserError(f"{path}: lacks {missing}; give our tokenizer.json, or a BERT vocab.txt "
                        "with two [unusedN] entries for the markers")
    return ids

# ---------------------------------------------------------------- a tokenised corpus

class Corpus:
    """A tokenised corpus of P passages and M mentions: flat arrays on disk, memory-mapped.

    tokens (total,)               all passages one after the other, [CLS] … [SEP], with markers
    passage_start (P+1,)          where each passage's tokens start
    mention_first (P+1,)          where each passage's mentions start
    mention_start, _end (M,)      positions of [E_start] and [E_end] inside the passage; [CLS] is 0
    mention_entity (M,)           index into entity_names; 0 = not linked
    mention_char (M, 2)           character offsets in the passage's text
    article, held_out (P,)        index into titles; kept out of training
    text (bytes,), text_start (P+1,)    the passages' own characters in UTF-8
    entity_count (E,)             linked mentions of each entity in passages that are not held out
    special, vocab_size, meta     ids of the special tokens; counts, what was dropped, the recipe
    """
    ARRAYS = {"tokens": np.int32, "passage_start": np.int64, "mention_first": np.int64,
              "mention_start": np.int32, "mention_end": np.int32, "mention_entity": np.int32,
              "mention_char": np.int32, "article": np.int32, "held_out": np.bool_,
              "text": np.uint8, "text_start": np.int64}

    def __init__(self, folder):
        """Opens a tokenised corpus, each file's checksum compared. Raises UserError."""
        self.folder, self.meta = folder, open_folder(folder, "tokenised corpus")
        self.titles, self.entity_names = json.loads(Path(folder, "names.json").read_bytes())
        for name, dtype in self.ARRAYS.items():         # asarray: without memmap's slow index
            array = np.memmap(Path(folder, name + ".bin"), dtype, "r")
            setattr(self, name, np.asarray(array))
        self.mention_char = self.mention_char.reshape(-1, 2)
        self.special, self.vocab_size = self.meta["special"], self.meta["vocab_size"]
        self.maskable = np.ones(self.vocab_size, bool)      # [UNK] is a word that we cannot spell
        self.maskable[[self.special[t] for t in (PAD, CLS, SEP, MASK, E_START, E_END)]] = False
        self.words = np.setdiff1d(np.arange(self.vocab_size), list(self.special.values()))

    @staticmethod
    def build(path, folder, tokenizer, passage_length, max_length, recipe=None, old=None):
        """Tokenises a corpus file into a new folder, as a stream, and opens it.

        recipe: a dictionary to keep in meta.json. old: a Corpus that comes first, unchanged; then
        all that is new is held out. Raises UserError for a bad line, a file without a text or a
        linked mention."""
        part = f"{os.path.normpath(folder)}.part"
        if os.path.lexists(folder):
            raise UserError(f"{folder}: exists; choose another folder, or remove it")
        remove(part)
        os.makedirs(part)
        try:
            about = write_arrays(path, part, tokenizer, passage_length, max_length, old)
            Path(part, "tokenizer.json").write_text(tokenizer.to_str(pretty=True), "utf-8")
            commit_folder(part, folder, format=FORMAT, recipe=recipe, **about)
        finally:
            remove(part)
        return Corpus(folder)

    @cached_property
    def entity_index(self):
        """{name: number} of the entities."""
        return {name: i for i, name in enumerate(self.entity_names)}

    @cached_property
    def article_index(self):
        """{title: number} of the articles."""
        return {title: i for i, title in enumerate(self.titles)}

    @cached_property
    def entity_count(self):
        held_out = np.repeat(self.held_out, np.diff(self.mention_first))
        count = np.bincount(self.mention_entity[~held_out], minlength=len(self.entity_names))
        count[0] = 0
        return count

    def passage_entities(self, p):
        """Entity numbers of a passage's mentions; 0 = not linked."""
        return self.mention_entity[self.mention_first[p]:self.mention_first[p + 1]]

    def passage_of(self, mentions):
        """Passage numbers of corpus mention numbers."""
        return np.searchsorted(self.mention_first, mentions, "right") - 1

    def passage_text(self, p) -> str:
        return self.text[self.text_start[p]:self.text_start[p + 1]].tobytes().decode("utf-8")

    def show_mention(self, m, width=80) -> str:
        """One line to read: "Title: before [mention] after"."""
        p = int(self.passage_of(m))
        text, (start, end) = self.passage_text(p), self.mention_char[m]
        left, right = text[max(0, start - width):start], text[end:end + width]
        title = self.titles[self.article[p]]
        return f"{title}: {left}[{text[start:end]}]{right}".replace("\n", " ")

def write_arrays(path, folder, tokenizer, passage_length, max_length, old):
    """The arrays of a Corpus, appended to files as they are read; returns what its meta.json says
    of it. What is written in passing is not held."""
    special, titles, entities = special_ids(tokenizer), {}, {"": 0}
    counts, dropped, files = Counter(), Counter(), {}
    if old is not None:
        titles, entities = dict(old.article_index), dict(old.entity_index)
        counts, dropped = Counter(old.meta["counts"]), Counter(old.meta["dropped"])
        for name in Corpus.ARRAYS:
            shutil.copy(Path(old.folder, name + ".bin"), folder)
    before = counts.copy()

    def append(**arrays):
        for name, values in arrays.items():
            files[name].write(np.asarray(values, Corpus.ARRAYS[name]).tobytes())

    def end_passage():      # where the next one starts; int32 takes 4 bytes
        append(passage_start=[files["tokens"].tell() // 4], text_start=[files["text"].tell()],
               mention_first=[files["mention_start"].tell() // 4])

    with ExitStack() as stack:
        for name in Corpus.ARRAYS:
            files[name] = stack.enter_context(open(Path(folder, name + ".bin"), "ab"))
        if old is None:
            end_passage()
        for text, encoding in encodings_of(path, tokenizer):
            held_out = old is not None or text.split == "held_out"
            if old is None and text.split is None:          # one article in twenty, by its title
                held_out = zlib.crc32(text.title.encode()) % 20 == 0
            article = titles.setdefault(text.title, len(titles))
            numbers = [entities.setdefault(m.entity or "", len(entities)) for m in text.mentions]
            entity = np.array(numbers, np.int64)
            chars = np.array([m[:2] for m in text.mentions], np.int64).reshape(-1, 2)
            counts.update(texts=1, mentions_read=len(entity),
                          texts_without_a_token=not encoding.ids)
            for passage in encode_text(encoding, text.mentions, passage_length, max_length, special,
                                       dropped):
                lo, hi = passage.chars
                own, linked_to = text.text[lo:hi], entity[passage.index]
                append(tokens=passage.tokens, mention_start=passage.start, mention_end=passage.end,
                       mention_entity=linked_to, article=[article], held_out=[held_out],
                       mention_char=np.clip(chars[passage.index] - lo, 0, len(own)),
                       text=np.frombuffer(own.encode("utf-8"), np.uint8))
                end_passage()
                m = len(linked_to)
                counts.update(passages=1, passages_held_out=held_out, mentions=m,
                              linked=int(np.count_nonzero(linked_to)),
                              tokens=len(passage.tokens) - 2 * m - 2)
    if counts["linked"] == before["linked"]:
        what = "no linked mention" if counts["passages"] > before["passages"] else "no text"
        raise UserError(f"{path}: holds {what}; a mention memory is made of linked mentions")
    counts["articles"], counts["entities"] = len(titles), len(entities) - 1
    Path(folder, "names.json").write_text(json.dumps([list(titles), list(entities)]), "utf-8")
    return {"counts": counts, "dropped": dropped, "special": special,
            "vocab_size": tokenizer.get_vocab_size()}

def encodings_of(path, tokenizer):
    """(text, its encoding) of each text of a corpus file."""
    texts = iter(tqdm(read_corpus(path), "tokenising", unit=" texts", leave=False, disable=None))
    while chunk := list(islice(texts, 1024)):
        encodings = tokenizer.encode_batch([text.text for text in chunk], add_special_tokens=False)
        yield from zip(chunk, encodings)

# ---------------------------------------------------------------- Wikipedia

# mwparserfromhell parses the wikitext of a section and drops its templates. Before it does, a link
# is marked "\x01 target \x02 shown \x03", which XML cannot hold. So the text can be tidied around
# the marks, and at last they become mentions. Where an editor left markup open, its line goes.
# Only sections, templates and namespaces of English Wikipedia are known.
#
# Open markup costs the parser quadratic time: a section is left out if it is longer than this or
# leaves more "{{", "[[" and "<" open.
MAX_SECTION, MAX_UNCLOSED = 50_000, 100
HIDDEN = ("ref", "table", "pre", "source", "syntaxhighlight", "chem")       # with what is in them
IN_MARGIN = re.compile(r"(?i)(file|image|category)\s*:|[a-z]{2,3}:(?! )")   # show nothing in a text
# Other namespaces and wikis, but not "Alien: Covenant"; pages that list the meanings of a name.
NO_ARTICLE = re.compile(r"[A-Za-z ]+:(?! )|.* \(disambiguation\)$")
AMBIGUOUS = re.compile(r"(?i)\{\{\s*([\w -]*disambig(?!\w* needed)[\w -]*|dab|hndis|geodis)\s*[|}]")
# A section without prose ends at the next heading that is no deeper.
NO_PROSE = re.compile(r"(?ims)^(=+) *(references|notes|notes and references|footnotes|citations|"
                      r"sources|works cited|bibliography|further reading|external links|see also|"
                      r"gallery) *\1[ \t]*$.*?(?=^(?!\1=)=|\Z)")
TIDY = (("''+", ""),
        ("\x01[^\x02]*\x02 *\x03|(?<=\x02) +| +(?=\x03)", ""),     # what a link lost to templates
        ("\x03([a-z]+)", "\\1\x03"),                            # [[bus]]es
        ("[ \t\xa0\u2009]+", " "),
        (r"\( ?(?:[;,] ?)+", "("),                              # of templates: "Plato (; 428 BC)"
        (r"\( ?\) ?| (?=[,.;)](?: |$))|^[*#:; ]+| +$", ""),
        (r"^.*(?:[|{}]|\[\[|\]\]|</?[a-zA-Z!]|__|\x01[^\x03]*\x01).*$|^(?:[!=]|--).*$", ""))

def read_dump(path, say_language=False):
    """Streams (title, kind, text) of the pages of an XML dump, plain or bz2. Of a redirect the text
    is its target, of a disambiguation page, which leads to no article, it is "". Nothing may stand
    before <mediawiki>: a <!DOCTYPE> would define entities."""
    with open(path, "rb") as raw:
        try:
            file = bz2.open(raw) if raw.peek(3)[:3] == b"BZh" else raw
            head = file.peek()[:1000]
            if not re.match(rb"\W*(<\?xml[^<>]*>\s*)?<mediawiki\b", head):
                raise EOFError("it does not begin as one")
            if say_language and re.search(rb'xml:lang="(?!en")', head):
                print(f"{path}: only English sections and templates are known", file=sys.stderr)
            parsed = ElementTree.iterparse(file, ["start", "end"])
            _, root = next(parsed)
            for event, page in parsed:
                if event == "end" and page.tag.endswith("}page"):
                    title = canonical(page.findtext("{*}title", ""))
                    text = page.findtext("{*}revision/{*}text", "")
                    redirect, kind = page.find("{*}redirect"), "article"
                    if page.findtext("{*}ns") != "0":
                        kind = "other namespace"
                    elif redirect is not None:
                        kind, text = "redirect", redirect.get("title")
                    elif title.endswith(" (disambiguation)") or AMBIGUOUS.search(text):
                        kind, text = "disambiguation page", ""
                    yield title, kind, text
                    root.clear()                            # or the whole dump stays in memory
        except (ElementTree.ParseError, EOFError, OSError) as e:
            raise UserError(f"{path}: no whole MediaWiki dump, plain or bz2 ({e})") from e

def canonical(title):
    """A title as MediaWiki stores it: "_" is a space, the first letter a capital, no "#section"."""
    title = " ".join(html.unescape(title).partition("#")[0].replace("_", " ").split())
    return title[:1].upper() + title[1:]

def read_article(page) -> tuple:
    """(title, [(text, links)] of its paragraphs, how many sections were left out) of read_dump's
    page. A link is a Mention whose entity is still as the editor wrote it."""
    import mwparserfromhell
    title, _, wikitext = page
    paragraphs, n_left_out = [], 0
    wikitext = NO_PROSE.sub("==\n", re.sub("(?is)<!--.*?-->|<br[^<>]*>", " ", wikitext))
    for section in re.split(r"(?m)^=.*=[ \t]*$", wikitext):
        n_open = len(re.findall(r"\{\{|\[\[|<", section)) - len(re.findall(r"\}\}|\]\]|>", section))
        if len(section) > MAX_SECTION or n_open > MAX_UNCLOSED:
            n_left_out += 1
            continue
        code = mwparserfromhell.parse(section, skip_style_tags=True)
        for tag in code.ifilter_tags(matches=lambda tag: tag.tag.lower() in HIDDEN):
            tag.contents = ""
        for link in code.ifilter_wikilinks():
            target = str(link.title).strip()
            shown = str(link.text or target.lstrip(":")).strip()
            link.text = "" if IN_MARGIN.match(target) else f"\x01{target}\x02{shown}\x03"
        marked = code.strip_code(collapse=False)
        for pattern, new in TIDY:
            marked = re.sub(pattern, new, marked, flags=re.M)
        for paragraph in re.split("\n\n+", marked.strip("\n")):
            text, *parts = re.split("\x01(.*?)\x02(.*?)\x03", paragraph)
            links = []
            for target, shown, after in zip(parts[::3], parts[1::3], parts[2::3]):
                links.append(Mention(len(text), len(text) + len(shown), target))
                text += shown + after
            if re.search(r"\w", text):
                paragraphs.append((text, links))
    return title, paragraphs, n_left_out

def wiki(path, out, workers=1) -> Counter:
    """turn a Wikipedia dump (pages-articles) into a corpus"""
    import mwparserfromhell  # noqa: F401     (an optional package: its absence is said at once)
    counts, redirects = Counter(), {}
    for title, kind, text in read_dump(path, say_language=True):    # a redirect may come last
        counts.update({"pages": 1, "pages: " + kind: 1})
        if kind == "article":
            counts["links"] += text.count("[[")
        elif kind != "other namespace":
            redirects[title] = canonical(text)

    def articles():
        pages = (page for page in read_dump(path) if page[1] == "article")
        with ProcessPoolExecutor(workers) as pool:
            while batch := list(islice(pages, 64 * workers)):       # a dump is larger than memory
                yield from pool.map(read_article, batch)
    return write_corpus(out, articles(), counts, redirects)

def write_corpus(out, articles, counts, redirects={}) -> Counter:
    """Writes articles, as read_article's, as lines of a corpus. Prints the counts: every link is
    kept, or dropped for a reason."""
    def article_of(link):
        """The title of the article that a link leads to, or ""."""
        title = canonical(link.entity.lstrip(" :"))
        for _ in range(5):                                  # a longer chain is a circle
            title = redirects.get(title, title)
        if title in redirects or NO_ARTICLE.match(title):
            title = ""
        counts["links: kept" if title else "links: to no article"] += 1
        return title

    def lines():
        for title, paragraphs, n_left_out in tqdm(articles, "articles", leave=False, disable=None):
            counts["sections left out"] += n_left_out
            linked = []
            for text, links in paragraphs:
                mentions = [link._replace(entity=article_of(link)) for link in links]
                linked.append((text, [mention for mention in mentions if mention.entity]))
            for text, mentions in extend_mentions(title, linked):
                counts.update(texts=1, mentions=len(mentions))
                yield {"title": title, "text": text, "mentions": [m._asdict() for m in mentions]}

    write_lines(out, lines())
    told = counts["links: kept"] + counts["links: to no article"]
    counts["links: outside the prose"] = counts["links"] - told
    for what, n in sorted(counts.items()):
        print(f"{what:<46}{n:>12,}")
    return counts

def names_for(shown, entity) -> list:
    """What means `entity` on a page with a link to it: its title without a bracket, and what the
    link shows if the title ends in that ("Einstein"). A name in small letters is a common noun: it
    has a plural, and a capital in places; with a bracket, as "state (polity)", it is no name."""
    base = re.sub(r" \([^()]*\)$", "", entity)
    if shown[0].islower():
        noun = base[0].lower() + base[1:]
        return [noun, noun + "s", base, base + "s"] if base == entity else []
    ends_in_it = base.endswith(" " + shown) and " of " not in base
    return [base, shown] if ends_in_it else [base]

# Around a name between two \x01: it is a part of "dog-like", "North Karovia" or "Karovia Airways".
PART = re.compile(r"-\x01|\x01-|\x01 [A-Z]|(?<!\S)[A-Z][^\s.!?:;]* \x01[A-Z]")

def extend_mentions(title, paragraphs) -> list:
    """Links what else on a page repeats its title or a link: Wikipedia links only the first.
    paragraphs: [(text, mentions)], as is the result. A name of two entities means neither."""
    links = [(text[m.start:m.end], m.entity) for text, mentions in paragraphs for m in mentions]
    is_noun = title[1:].islower() and "(" not in title      # "Anarchism", but not "Karovia Airways"
    entity_of = {}                                          # each name as it is written
    for shown, entity in [(title.lower() if is_noun else title, title), *links]:
        for name in names_for(shown, entity):
            if entity_of.setdefault(name, entity) not in (entity, title):
                entity_of[name] = None
    index = name_index(name for name, entity in entity_of.items() if entity and len(name) > 2)
    result = []
    for text, mentions in paragraphs:
        linked = {i for mention in mentions for i in range(mention.start, mention.end)}
        more = []
        for start, end, _ in find_mentions(text, index):
            entity = entity_of.get(text[start:end])
            around = f"{text[max(0, start - 40):start]}\x01{text[start]}\x01{text[end:end + 2]}"
            if entity and linked.isdisjoint(range(start, end)) and not PART.search(around):
                more.append(Mention(start, end, entity))
        result.append((text, sorted([*mentions, *more])))
    return result

def kilt(path, out) -> Counter:
    """turn KILT's knowledge source into a corpus

    A line is a page: {"wikipedia_title", "text": [title, paragraph, …], "anchors":
    [{"paragraph_id", "start", "end", "wikipedia_title" or "href"}, …]}. Lists are left out."""
    def articles():
        for n, line in enumerate(open_text(path), 1):
            try:
                page = json.loads(line)
                paragraphs = [(text, []) for text in page["text"]]
                for a in page["anchors"]:
                    target = a.get("wikipedia_title") or unquote(a["href"])
                    paragraphs[a["paragraph_id"]][1].append(Mention(a["start"], a["end"], target))
                counts.update(pages=1, links=len(page["anchors"]))
                prose = [p for p in paragraphs[1:] if not re.match("Section::::|BULLET::::", p[0])]
                yield page["wikipedia_title"], prose, 0
            except (ValueError, LookupError, TypeError, AttributeError) as e:
                raise UserError(f"{path}:{n}: no page of KILT's knowledge source ({e!r})") from e

    counts = Counter()
    return write_corpus(out, articles(), counts)

# ---------------------------------------------------------------- the published task files

# The example of a published record; answer_text: the answers, the best one first. A file of
# another task has other fields, which is an error. No gold evidence is taken (§4.3).
SAME = {label: label for label in CLAIM_LABELS}
HOVER = {"SUPPORTED": "SUPPORTS", "NOT_SUPPORTED": "REFUTES"}
CLAIM_TASKS = {"fever": lambda r: {"text": r["claim"].strip(), "label": SAME[r["label"]]},
               "hover": lambda r: {"text": r["claim"].strip(), "label": HOVER[r["label"]]},
               "fm2": lambda r: {"text": r["text"].strip(), "label": SAME[r["label"]]}}
QUESTION_TASKS = {
    "triviaqa": lambda r: {"question": r["Question"].strip(),
                           "answer_text": [r["Answer"]["Value"]] + r["Answer"]["Aliases"]},
    "complexwebquestions": lambda r: {
        "question": r["question"].strip(),
        "answer_text": sum(([a["answer"]] + a["aliases"] for a in r["answers"]), [])},
    "entityquestions": lambda r: {"question": r["question"].strip(),
                                  "answer_text": r["answers"] + []}}

def task_records(path):
    """The records of a JSON list, of {"Data": list} or of JSON lines."""
    text = "".join(open_text(path))
    try:
        whole = json.loads(text)
    except ValueError:
        return map(json.loads, text.strip().split("\n"))
    return whole.get("Data", [whole]) if isinstance(whole, dict) else whole

def answer_key(name):
    """What is compared: lower case, no punctuation, "_" or "the": The_Black_Sea is "black sea"."""
    words = re.findall(r"\w+", name.replace("_", " ").lower())
    return " ".join(word for word in words if word not in ("a", "an", "the"))

def answer_entities(corpus) -> dict:
    """answer_key -> the entity of that title, else of that title but for a bracket, else the one
    that the corpus calls so. Of several the most frequent."""
    named = Counter((m.entity, answer_key(text.text[m.start:m.end]))
                    for text in read_corpus(corpus) for m in text.mentions if m.entity)
    named = [pair for pair, _ in reversed(named.most_common())]     # what comes later counts
    found = {shown: entity for entity, shown in named}
    found |= {answer_key(re.sub(r"[ _]\([^()]*\)$", "", entity)): entity for entity, _ in named}
    return found | {answer_key(entity): entity for entity, _ in named}

def task(name, paths, out, corpus=None):
    """turn the published files of a task into examples

    A question's "answers" are the entities in its "answer_text"; with none it is wrong (§4.4)."""
    if name in QUESTION_TASKS and corpus is None:
        raise UserError(f"{name}: give the corpus whose entities are the answers: --corpus FILE")
    entity_of = answer_entities(corpus) if name in QUESTION_TASKS else {}
    examples, n = [], 0
    for path in paths:
        try:
            for n, record in enumerate(task_records(path), 1):
                example = (CLAIM_TASKS | QUESTION_TASKS)[name](record)
                if name in QUESTION_TASKS:
                    texts = list(dict.fromkeys(filter(None, example["answer_text"])))
                    found = dict.fromkeys(entity_of.get(answer_key(text)) for text in texts)
                    example |= {"answer_text": texts, "answers": [*filter(None, found)]}
                examples.append(example)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
            raise UserError(f"{path}: record {n}: {e!r}; is this a file of {name}?") from e
    n_answered = sum(bool(e.get("label") or e.get("answers")) for e in examples)
    print(f"{len(examples):,} examples, {n_answered:,} with a label or an answer that is an entity")
    write_lines(out, examples)

# ---------------------------------------------------------------- command line

def check(path, preset="toy"):
    """count what a corpus holds, or list its first ten errors"""
    errors = []
    for _ in read_corpus(path, errors):         # to the end: errors are found on the way
        pass
    if errors:
        raise UserError("\n".join(errors[:10]))
    settings = dict(TEXT_PRESETS[preset])
    tokenizer = train_tokenizer((text.text for text in read_corpus(path)), settings.pop("vocab"))
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus.build(path, Path(folder, "corpus"), tokenizer, **settings)
    counts = dict(corpus.meta["counts"], mentions_to_evaluate_on=len(eval_mentions(corpus)))
    counts |= {f"mentions dropped, {why}": n for why, n in corpus.meta["dropped"].items()}
    for what, n in counts.items():
        print(f"{what.replace('_', ' '):<42}{n:>12,}")
    if not counts["mentions_to_evaluate_on"]:
        print("Nothing can be evaluated: no held-out passage names an entity that another passage "
              'names too; mark more texts with "split": "held_out".')
    print("Some mentions in brackets, and what they are linked to:")
    for m in np.random.default_rng(0).permutation(len(corpus.mention_entity))[:10]:
        entity = corpus.entity_names[corpus.mention_entity[m]] or "nothing"
        print(printable(f"  {corpus.show_mention(m, 40)} -> {entity}"))

def toy(out, seed):
    """write corpus.jsonl and examples of a made-up world"""
    write_toy(out, *toy_world(seed))

def at_least(least):
    """An argparse type: a whole number of at least that."""
    def number(text):
        if not text.isdecimal() or not least <= int(text) < 2 ** 63:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {least}")
        return int(text)
    return number

def main() -> int:
    parser = argparse.ArgumentParser(description="Corpora and examples: make, check, convert.")
    commands, add = parser.add_subparsers(required=True), {}
    for run in (toy, check, wiki, kilt, task):
        command = commands.add_parser(run.__name__, help=run.__doc__.partition("\n")[0])
        command.set_defaults(run=run)
        add[run] = command.add_argument         # the arguments have the names of run's
        if run is not check:
            add[run]("--out", required=True)
        if run in (check, wiki, kilt):
            add[run]("path", metavar="FILE")
    add[toy]("--seed", type=at_least(0), default=0)
    add[check]("--preset", choices=TEXT_PRESETS, default="toy", help="as train.py's")
    add[wiki]("--workers", type=at_least(1), default=1, help="processes")
    add[task]("name", choices=[*CLAIM_TASKS, *QUESTION_TASKS])
    add[task]("paths", nargs="+", metavar="FILE")
    add[task]("--corpus", help="of questions: its entities are the answers")
    options = vars(parser.parse_args())
    sys.stdout.reconfigure(errors="backslashreplace")       # for a terminal that is not UTF-8
    try:
        options.pop("run")(**options)
        return 0
    except (UserError, OSError, ImportError) as error:
        return complain("data.py", error)
    except KeyboardInterrupt:
        return complain("data.py", "stopped; nothing half-written is left")

if __name__ == "__main__":
    sys.exit(main())
