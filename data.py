"""Text in, batches out: mentions, markers, masking, related passages, examples, the toy world.

The paper: section 2 (notation, markers), 2.3-2.4 (what is masked and why), app. A (rates), A.1
(related passages), B.1 (claims and questions). The toy world and all file formats come last.

    corpus.jsonl --read_corpus--> Text --encode_text--> Passage --Corpus.build--> arrays on disk
    Corpus, passage numbers --corpus_batch--> Batch --mask_batch--> masked Batch

Shapes: a batch has B passages (rows) of T tokens; L of the B * T tokens are to be predicted. The M
mentions of the whole batch are stored in flat arrays. The corpus has E entities, counting entity 0,
which means "none". A passage of n tokens with m mentions takes n + 2m + 2 positions:

    [CLS] the capital of [E_start] north karovia [E_end] is [E_start] port ellin [E_end] . [SEP]
      0    1     2     3     4       5      6       7    8     9       10   11     12    13  14
    start = 4, 9 and end = 7, 12: the positions of the markers, s and e in the paper"""
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import Iterator, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[E_start]", "[E_end]"]
PAD, UNK, CLS, SEP, MASK, E_START, E_END = SPECIAL
CLAIM_LABELS = ("REFUTES", "SUPPORTS", "NOT ENOUGH INFO")       # only FEVER has the last one

# ---------------------------------------------------------------- mentions, markers, passages

class Mention(NamedTuple):
    """A mention in a text, as in the files of corpora and examples."""
    start: int              # character offsets, end exclusive
    end: int
    entity: str | None      # the entity that it is linked to (refers to); None: it is not linked

class Text(NamedTuple):
    """A line of a corpus file. All texts with the same title form one article."""
    title: str
    text: str
    mentions: list
    split: str | None = None    # "train" or "held_out"; None: a checksum of the title decides

class Passage(NamedTuple):
    """A part of a text as the model reads it: n tokens and m mentions."""
    tokens: list | np.ndarray   # (n + 2m + 2,) [CLS] … [SEP], with markers around the mentions
    index: list | range         # (m,) number of each mention in the text, or in the corpus

def encode_text(encoding, mentions, passage_length, max_length, special, dropped) -> list:
    """Cuts a text into Passages of at most passage_length tokens (128 in app. A) and at most
    max_length positions (tokens, markers, [CLS] and [SEP]).

    Each passage is as long as these limits allow, but never ends inside a mention. A mention covers
    every token with which it shares a character. Two mentions never share a token, since masking
    one would hide part of the other. So mentions are placed one by one, and a mention that shares a
    token with a mention already placed is dropped. Linked mentions are placed before unlinked ones.
    Within each group, they are sorted by first token and, if this is the same, from long to short.

    encoding: tokenizer.encode(text, add_special_tokens=False); special: special_ids(tokenizer).
    dropped: a Counter of the reasons for dropping mentions, to which this function adds."""
    token_start, token_end = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    char_start, char_end = np.array([m[:2] for m in mentions], np.int64).reshape(-1, 2).T
    first = np.searchsorted(token_end, char_start, "right")     # each mention's first token
    stop = np.searchsorted(token_start, char_end)               # the token after its last
    unlinked = [m.entity is None for m in mentions]
    ids, taken = encoding.ids, np.zeros(len(encoding.ids), bool)
    # pieces[a] begins at token a and is never cut: (ids, [its mention] or [], the token after it).
    pieces = [([token], [], i + 1) for i, token in enumerate(ids)]
    for i in np.lexsort((-stop, first, unlinked)).tolist():     # the last key counts most
        a, b = int(first[i]), int(stop[i])
        if a >= b:
            dropped["without a token"] += 1
        elif b - a > passage_length or b - a + 4 > max_length:  # [CLS], [SEP], two markers
            dropped["longer than a passage"] += 1
        elif taken[a:b].any():
            dropped["shares a token with another mention"] += 1
        else:
            pieces[a] = ([special[E_START], *ids[a:b], special[E_END]], [i], b)
            taken[a:b] = True

    passages, a = [], 0                                         # a passage contains ids[a:b]
    while a < len(ids):
        tokens, index, b = [special[CLS]], [], a
        while b < len(ids):
            piece, which, end = pieces[b]
            if end - a > passage_length or len(tokens) + len(piece) + 1 > max_length:
                break
            tokens += piece
            index += which
            b = end
        passages.append(Passage([*tokens, special[SEP]], index))
        a = b
    return passages

# ---------------------------------------------------------------- batches

# A Corpus (the class is below, after "Set apart") has P passages and M mentions (in this list, M is
# for the corpus, not for a batch). passage(p) returns a Passage, whose `index` contains the corpus
# numbers of its mentions. passage_entities(p) returns the entity numbers of these mentions.
# passage_of(mentions) maps the corpus numbers of mentions to the numbers of their passages.
#
#   tokens (total,)             all passages, one after the other: [CLS] … [SEP], with markers
#   passage_start, mention_first (P+1,)     first token and mention of each passage, then the totals
#   mention_entity (M,)         index into entity_names; 0 = not linked
#   mention_char (M, 2)         character offsets in the text
#   article, held_out (P,)      index into titles; whether the passage is kept out of training
#   replaced (P,)               True: an appended article replaces this one (--append --replace)
#   text (bytes,), text_at (P, 2)       all texts in UTF-8; bounds of the text a passage is cut from
#   entity_index, article_index     {name: number} of entity_names, {title: number} of titles
#   entity_count (E,)           number of linked mentions of each entity in training passages
#   tokenizer, special, vocab_size      tokenizer; {special token: id}; size of the vocabulary
#   maskable (vocab_size,), words   which tokens may be masked; ids that may randomly replace them
#   meta                        counts, also of dropped mentions; what the corpus was made from
#
# The fields of a Batch with one entry per mention. The other fields have one entry per row.
MENTIONS = ("row", "start", "end", "entity", "passage", "mention", "answer")

@dataclass
class Batch:
    """B rows of T tokens; L tokens to predict and M mentions in all rows together."""
    tokens: torch.Tensor            # (B, T) what the model reads, after any masking
    unmasked: torch.Tensor          # (B, T) the same tokens before masking
    attention_mask: torch.Tensor    # (B, T) bool, True = token, False = padding
    is_target: torch.Tensor         # (B, T) bool, True = one of the L tokens to predict
    label: torch.Tensor             # (B,) claims: index into CLAIM_LABELS, -1 = none
    row: torch.Tensor               # (M,) the mention's row …
    start: torch.Tensor             # (M,) … and the columns of its markers
    end: torch.Tensor               # (M,)
    entity: torch.Tensor            # (M,) index into entity_names; 0 = not linked, or unknown
    passage: torch.Tensor           # (M,) number in the corpus, -1 = none (an example)
    mention: torch.Tensor           # (M,) number in the corpus or in its example; -1 = the mention
                                    # [E_start] [MASK] [E_end] at the end of a question
    answer: torch.Tensor            # (M,) the entity that is asked for here: the first answer that
                                    # is a known entity; 0 = none is known; -1 = nothing is asked

    @property
    def is_used(self):
        """(B, T) bool, True = the losses use the output here: a token to predict, or a marker."""
        used = self.is_target.clone()
        used[self.row, self.start] = used[self.row, self.end] = True
        return used

    def to(self, device) -> "Batch":
        return Batch(**{name: tensor.to(device) for name, tensor in vars(self).items()})

    def part(self, rank, size) -> "Batch":
        """Rows rank, rank + size, … with their mentions: the part of process `rank` of `size`."""
        ours = self.row % size == rank                              # (M,)
        part = {name: tensor[ours] if name in MENTIONS else tensor[rank::size]
                for name, tensor in vars(self).items()}
        return Batch(**part | {"row": part["row"] // size})

def collate(passages, special) -> Batch:
    """Passages as the rows of a Batch. No token is masked and no mention is linked yet."""
    rows = [torch.from_numpy(np.array(passage.tokens, np.int64)) for passage in passages]
    tokens = pad_sequence(rows, batch_first=True, padding_value=special[PAD])
    row, start = (tokens == special[E_START]).nonzero(as_tuple=True)
    _, end = (tokens == special[E_END]).nonzero(as_tuple=True)
    index = torch.tensor([i for passage in passages for i in passage.index], dtype=torch.int64)
    return Batch(tokens=tokens, unmasked=tokens, attention_mask=tokens != special[PAD],
                 is_target=torch.zeros_like(tokens, dtype=torch.bool), mention=index,
                 label=torch.full((len(tokens),), -1), row=row, start=start, end=end,
                 entity=torch.zeros_like(row), passage=torch.full_like(row, -1),
                 answer=torch.full_like(row, -1))

def corpus_batch(corpus, passages) -> Batch:
    """Passages of the corpus, given by number, with all of their mentions."""
    batch = collate([corpus.passage(p) for p in passages], corpus.special)
    batch.entity = torch.from_numpy(corpus.mention_entity[batch.mention.numpy()]).long()
    batch.passage = torch.from_numpy(np.asarray(passages, np.int64))[batch.row]
    return batch

def sample_mentions(batch, n, rng) -> Batch:
    """The batch with a uniform sample of its mentions, at most n per row on average (app. A: 24).
    The other mentions keep their markers in the text, but they are neither masked nor used."""
    n *= len(batch.tokens)
    if len(batch.row) <= n:
        return batch
    kept = np.sort(rng.choice(len(batch.row), n, replace=False))
    return replace(batch, **{name: getattr(batch, name)[kept] for name in MENTIONS})

# ---------------------------------------------------------------- masking

def inside_mentions(batch) -> np.ndarray:
    """(B, T) index of the mention whose markers enclose each token, -1 = none."""
    owner = np.full(batch.tokens.shape, -1)
    mentions = zip(batch.row.tolist(), batch.start.tolist(), batch.end.tolist())
    for m, (row, start, end) in enumerate(mentions):
        owner[row, start + 1:end] = m
    return owner

def mask_batch(batch, corpus, rng, mention_rate=.2, token_rate=.1, all_of_entity=False) -> Batch:
    """The batch with tokens to predict (app. A): all tokens of a fraction mention_rate of its
    mentions (at least one mention, unless the rate is 0), and a random fraction token_rate of the
    maskable tokens outside all mentions.

    rng: a numpy Generator. all_of_entity: if a linked mention is masked, all mentions of its entity
    in the same passage are also masked."""
    tokens = batch.unmasked.numpy()                                                 # (B, T)
    opened, closed = (np.cumsum(tokens == corpus.special[marker], 1) for marker in (E_START, E_END))
    is_outside = opened == closed           # outside all mentions, sampled or not
    is_target = corpus.maskable[tokens] & is_outside & (rng.random(tokens.shape) < token_rate)
    if mention_rate:
        chosen = rng.permutation(len(batch.row))[:max(1, round(mention_rate * len(batch.row)))]
        if all_of_entity:
            pair = (batch.row * len(corpus.entity_names) + batch.entity).numpy()    # row and entity
            also = np.isin(pair, pair[chosen]) & (batch.entity.numpy() > 0)
            chosen = np.union1d(chosen, np.flatnonzero(also))
        is_target |= np.isin(inside_mentions(batch), chosen)
    # As in BERT, a token to predict becomes [MASK] (80%) or a random token (10%), or is kept (10%).
    fate = rng.random(is_target.sum())
    other = np.where(fate < .9, rng.choice(corpus.words, len(fate)), tokens[is_target])
    read = tokens.copy()
    read[is_target] = np.where(fate < .8, corpus.special[MASK], other)
    return replace(batch, tokens=torch.from_numpy(read), is_target=torch.from_numpy(is_target))

def eval_batch(corpus, mentions) -> Batch:
    """One row per corpus mention: its passage, with all tokens of this mention set to [MASK]."""
    batch = corpus_batch(corpus, corpus.passage_of(mentions))
    asked = batch.mention.numpy() == np.asarray(mentions)[batch.row.numpy()]    # (M,) B are true
    is_target = torch.from_numpy(np.isin(inside_mentions(batch), np.flatnonzero(asked)))
    tokens = batch.unmasked.masked_fill(is_target, corpus.special[MASK])
    return replace(batch, tokens=tokens, is_target=is_target)

def eval_mentions(corpus) -> np.ndarray:
    """Numbers of held-out mentions that can be filled in from the memory, not from their passage.

    The entity of such a mention is linked in another passage, held out or not, but nowhere else in
    the mention's own passage. Replaced articles are ignored. A mention whose entity is the title of
    its article is left out: filling it in means recognising the article, not knowing a fact."""
    linked = np.flatnonzero(corpus.mention_entity)
    linked = linked[~corpus.replaced[corpus.passage_of(linked)]]
    entity, passage = corpus.mention_entity[linked], corpus.passage_of(linked)
    E = len(corpus.entity_names)        # passage * E + entity is a different number for each pair
    pairs, pair, count = np.unique(passage * E + entity, return_inverse=True, return_counts=True)
    n_passages = np.bincount(pairs % E, minlength=E)            # passages that link each entity
    is_elsewhere = n_passages[entity] > 1
    titles = np.array([corpus.entity_index.get(title, 0) for title in corpus.titles])
    is_title = titles[corpus.article[passage]] == entity
    return linked[corpus.held_out[passage] & (count[pair] == 1) & is_elsewhere & ~is_title]

# ---------------------------------------------------------------- related passages (app. A.1)

POOL = 2 ** 15          # maximum number of articles that are compared with each other

def related_clusters(corpus, size, seed, passages) -> list:
    """Clusters of `size` passages from related articles, as arrays of passage numbers.

    Only the last cluster can be smaller. Clustering takes quadratic time. So if there are more than
    n = max(POOL, 2 * size) articles, they are divided into random pools, clustered separately. A
    pool gets at least n / 2 articles, and so at least `size` passages. It fills every cluster
    except perhaps its last. The passages of unfilled clusters are clustered again."""
    passages = np.sort(passages)
    articles, article = np.unique(corpus.article[passages], return_inverse=True)
    n_pools = -(-len(articles) // max(POOL, 2 * size))
    if n_pools <= 1:
        return greedy_clusters(corpus, size, seed, passages)
    pool = np.random.default_rng(seed).permutation(len(articles)) % n_pools         # per article
    found = [cluster for n in range(n_pools)
             for cluster in greedy_clusters(corpus, size, seed, passages[pool[article] == n])]
    filled = [cluster for cluster in found if len(cluster) == size]
    others = [p for cluster in found if len(cluster) < size for p in cluster.tolist()]
    return filled + related_clusters(corpus, size, seed, np.array(others, np.int64))

def articles_with(features) -> dict:
    """{feature: array of the articles that have it}. features: a set for each article."""
    found = defaultdict(list)
    for article, own in enumerate(features):
        for feature in own:
            found[feature].append(article)
    return {feature: np.array(articles) for feature, articles in found.items()}

def greedy_clusters(corpus, size, seed, passages) -> list:
    """Clusters of `size` passages, made by greedily adding the most related article.

    A cluster starts from the article with the most unused passages. Until it is full, the article
    whose set of entities has the largest Jaccard similarity to the cluster's set is added. Ties
    between related articles are broken in favour of an article whose title shares a word with a
    title in the cluster, then at random. The rule about titles is our addition. Without it, names
    in a batch rarely look alike, and the model learns to read only one word of each name."""
    numbers, article = np.unique(corpus.article[passages], return_inverse=True)
    # Articles are renumbered at random, because argmax takes the first of equal values.
    place = np.random.default_rng(seed).permutation(len(numbers))
    article, numbers = place[article], numbers[place.argsort()]
    words = [{*corpus.titles[number].split()} for number in numbers]            # of each title
    unused, entities = [[] for _ in numbers], [set() for _ in numbers]
    for p, a in zip(passages.tolist(), article.tolist()):
        unused[a].append(p)
        entities[a].update({*corpus.passage_entities(p).tolist()} - {0})        # 0 = not linked
    with_entity, with_word = articles_with(entities), articles_with(words)
    n_entities = np.array([len(own) for own in entities])
    n_unused = np.array([len(own) for own in unused])

    clusters = []
    while n_unused.any():
        cluster, joined = [], set()         # joined: the entities of the cluster's articles
        n_shared = np.zeros(len(numbers))   # per article: number of its entities in `joined`
        is_alike = np.zeros(len(numbers))   # 1 = its title shares a word with the cluster's titles
        a = n_unused.argmax()
        while True:
            room = size - len(cluster)
            cluster += unused[a][:room]
            unused[a] = unused[a][room:]
            n_unused[a] = len(unused[a])
            if len(cluster) == size or not n_unused.any():
                break
            for entity in entities[a] - joined:
                n_shared[with_entity[entity]] += 1
            for word in words[a]:
                is_alike[with_word[word]] = 1
            joined |= entities[a]
            jaccard = n_shared / (n_entities + len(joined) - n_shared).clip(1) * (n_unused > 0)
            score = jaccard * (1 + 1e-9 * is_alike)
            # If no remaining article shares an entity with the cluster, the first one is taken.
            a = score.argmax() if score.any() else (n_unused > 0).argmax()
        clusters.append(np.array(cluster))
    return clusters

# ---------------------------------------------------------------- examples: claims and questions

class Example(NamedTuple):
    """A claim, a question, or a cloze (a claim with one entity hidden; see example_batch)."""
    text: str
    mentions: list | None       # None: to be found by mention_finder
    label: int | None           # index into CLAIM_LABELS; None: unknown, or not a claim
    answers: list               # names of entities, each a correct answer; empty for a claim
    info: dict                  # the whole record. In the toy world it also has subject, relations
                                # (one or two), object, bridge (the entity between two facts)

def example_passages(examples, task, tokenizer, max_length, max_mentions=32):
    """Yields one Passage per example: as much of the start of its text as fits into max_length
    positions. Only the first max_mentions of the example's mentions are used (32 in app. B.1).

    A question (task "qa") ends with one more mention, [E_start] [MASK] [E_end], with index -1
    (§4.4)."""
    special = special_ids(tokenizer)
    answer = [special[token] for token in (E_START, MASK, E_END)] if task == "qa" else []
    room = max_length - len(answer)
    for example in examples:
        # Tokenises at most a million characters, to save time. A passage hardly ever needs more.
        encoding = tokenizer.encode(example.text[:1_000_000], add_special_tokens=False)
        mentions = example.mentions[:max_mentions]
        passages = encode_text(encoding, mentions, room, room, special, Counter())
        tokens, index = passages[0] if passages else ([special[CLS], special[SEP]], [])
        if answer:
            tokens, index = [*tokens[:-1], *answer, special[SEP]], [*index, -1]
        yield Passage(tokens, index)

def example_batch(examples, task, tokenizer, entity_index, max_length=512) -> Batch:
    """A Batch of examples whose mentions are given. task: "claims", "qa", or None for plain texts.
    entity_index: {name: number}.

    Claims can come with clozes: true claims in which one entity is hidden. A cloze has this entity
    as its answer instead of a label. All mentions of the entity become [MASK], and `answer` asks
    for the entity at the first of them."""
    special = special_ids(tokenizer)
    batch = collate([*example_passages(examples, task, tokenizer, max_length)], special)
    batch.tokens = batch.unmasked.clone()
    batch.label = torch.tensor([-1 if e.label is None else e.label for e in examples])
    asked = set()                                               # rows that ask for an entity
    for m, (row, i) in enumerate(zip(batch.row.tolist(), batch.mention.tolist())):
        example = examples[row]
        name = example.mentions[i].entity if i >= 0 else None
        batch.entity[m] = entity_index.get(name, 0)
        is_cloze = task == "claims" and name in example.answers
        if is_cloze:
            batch.tokens[row, batch.start[m] + 1:batch.end[m]] = special[MASK]
        if (is_cloze or i < 0) and row not in asked:
            asked.add(row)
            known = (entity_index[a] for a in example.answers if a in entity_index)
            batch.answer[m] = next(known, 0)
    return batch

# ==== Set apart: the toy world ====================================================================

# A made-up world of people, cities, countries, companies and films, small enough to train on in
# minutes. A fact is a subject, a relation and an object: the film Silent Garden (subject) has the
# director (relation) Alma Verran (object). Objects are drawn at random. So a fact cannot be
# guessed, only looked up or memorised.
#
# Each subject has five passages of one to three sentences. Passages of one sentence teach the model
#     to find facts in short passages as well. Each fact is in four of the five (a subject's only
#     fact is in all five), each time in different words. Even if one of the four is held out and
#     another only describes the fact (see below), two training passages still state it.
# There are two worlds. Their names consist of the same words, but no entity is in both. The model
#     is trained on one world. In the other, a fifth as large, all entities are new, so memorised
#     facts are no help.
# Some facts are described. For half of the facts in split "train" (see toy_world), one of the
#     passages that would state the fact instead says, for example, "Silent Garden's director is
#     well known.", where "director" is linked to Alma Verran. This teaches the model to resolve
#     such a description, which is the first hop of the question "Where was Silent Garden's
#     director born?". In questions and claims, "director" is not linked.
# Claims come in pairs, a true and a false one about the same fact. The false object is drawn from
#     other facts with this relation. So an object is about as frequent in false claims as in true
#     ones, and a claim by itself does not show whether it is true.

class Relation(NamedTuple):
    """A relation. In sentences, S stands for the subject, O for the object and N for the noun."""
    subject: str            # the kind of its subjects: "film"
    object: str             # the kind of its objects: "person"
    noun: str               # "S's N" describes O: "director"
    phrases: list           # for the five passages: "S was directed by O.", …
    claims: list            # two sentences that are in no passage: "O directed S.", …
    questions: list         # two: "Who directed S?", …

def toy_world(seed=0) -> tuple:
    """The lines of the corpus, and the lines of every file of examples: {"qa.one_hop.train": …}.

    Each fact is in one split of the examples ("train", "dev", "test", "unseen") for all tasks; the
    corpus states all facts. An example about two facts takes both from the same split."""
    rng = np.random.default_rng(seed)
    names, unseen_names = toy_names(rng)
    facts, unseen_facts = toy_facts(rng, names), toy_facts(rng, unseen_names)
    splits = {"train": {}, "dev": {}, "test": {}, "unseen": unseen_facts}
    drawn = rng.choice(["train", "dev", "test"], len(facts), p=[.66, .15, .19])
    for (fact, obj), split in zip(facts.items(), drawn):
        splits[split][fact] = obj
    described = {fact for fact in splits["train"] if rng.random() < .5}
    lines = [*toy_corpus(rng, facts, described, "train"),
             *toy_corpus(rng, unseen_facts, described, "held_out")]
    lines = [lines[i] for i in rng.permutation(len(lines))]

    examples = {}
    for split, limit in {"train": None, "dev": 300, "test": 500, "unseen": 500}.items():
        # No example asks for a described fact (the first of two facts may be one). Otherwise the
        # model would use descriptions, which other splits lack (tests/README.md, "Descriptions at
        # the answer").
        plain = {fact: obj for fact, obj in splits[split].items() if fact not in described}
        one = toy_examples(rng, one_hop(plain), limit)
        two = toy_examples(rng, two_hops(splits[split], plain), limit)
        for task in ("qa", "claims"):
            examples[f"{task}.one_hop.{split}"] = one[task]
            examples[f"{task}.two_hop.{split}"] = two[task]
            if split in ("train", "dev"):                   # to learn both kinds together
                examples[f"{task}.both.{split}"] = one[task] + two[task]
    return lines, examples

def toy_names(rng) -> tuple:
    """The names {kind: list} of the training world, and those of the unseen world."""
    seen, unseen = {}, {}
    for kind, words in NAMES.items():
        firsts, lasts = (part.split() for part in words.split("/"))
        names = rng.permutation([f"{first} {last}" for first in firsts for last in lasts]).tolist()
        n = COUNTS[kind]
        seen[kind], unseen[kind] = names[:n], names[n:n + n // 5]
    return seen, unseen

def toy_facts(rng, names) -> dict:
    """Random facts {(subject, relation): object} about these names {kind: list}."""
    facts = {}
    for name, relation in RELATIONS.items():
        objects = names[relation.object]
        for subject in names[relation.subject]:
            one, other = (objects[i] for i in rng.choice(len(objects), 2, replace=False))
            facts[subject, name] = other if one == subject else one
    return facts

def toy_line(key, sentences, **others) -> dict:
    """{key: text, "mentions": its mentions, **others} for these sentences.

    Each sentence is a pair: a phrase, and {"S": (words, entity), …} for the S, O and N in it."""
    text, mentions = "", []
    for phrase, named in sentences:
        text += " " if text else ""
        for part in re.split(r"\b([SON])\b", phrase):
            if part in named:
                part, entity = named[part]
                end = len(text) + len(part)
                mentions.append({"start": len(text), "end": end, "entity": entity})
            text += part
    return {key: text, "mentions": mentions, **others}

def toy_corpus(rng, facts, described, split) -> Iterator[dict]:
    """The lines of a world, with five passages per subject (see above). The five contain, in random
    order, 1, 2, 3, 3 and 3 facts if the subject has three facts, and 1, 1, 2, 2 and 2 if it has
    two. described: facts that are each described in one passage, never in a held-out one. split: if
    "held_out", all passages are held out; if "train", about 5% of them."""
    objects = defaultdict(dict)                             # {subject: {relation: object}}
    for (subject, relation), obj in facts.items():
        objects[subject][relation] = obj
    for subject, object_of in objects.items():
        relations, n = list(object_of), len(object_of)
        held_out = rng.integers(20)                         # number of a passage; 5 or more: none
        order = {r: rng.permutation(5) for r in relations}  # which phrase in which passage
        place = rng.permutation(5)          # facts are left out of passages place[0] and place[1]
        left_out = {r: place[2 * j // n] if n > 1 else None
                    for j, r in enumerate(rng.permutation(relations).tolist())}
        described_in = {r: rng.choice([i for i in range(5) if i not in (left_out[r], held_out)])
                        for r in relations if (subject, r) in described}
        for i in range(5):
            stated = [r for r in rng.permutation(relations).tolist() if i != left_out[r]]
            sentences = []
            for r in stated:
                phrase = RELATIONS[r].phrases[order[r][i]]
                if i == described_in.get(r):
                    phrase = rng.choice(REMARKS)
                obj, noun = object_of[r], RELATIONS[r].noun
                named = {"S": (subject, subject), "O": (obj, obj), "N": (noun, obj)}
                sentences.append((phrase, named))
            own_split = "held_out" if i == held_out else split
            yield {"title": subject, **toy_line("text", sentences, split=own_split)}

def one_hop(plain) -> list:
    """What can be asked about one fact: "Who directed X?"."""
    return [{"subject": subject, "relations": [relation], "object": obj}
            for (subject, relation), obj in plain.items()]

def two_hops(facts, plain) -> list:
    """What can be asked about two facts: "Where was X's director born?". The director is the bridge
    between them. The second fact is one of `plain` (not described). X is never the answer."""
    return [{"subject": subject, "relations": [first, second], "object": plain[bridge, second],
             "bridge": bridge} for (subject, first), bridge in facts.items()
            for second in RELATIONS if plain.get((bridge, second)) not in (None, subject)]

def example_sentence(item, phrase, claimed=None) -> tuple:
    """A sentence for toy_line about an item of one_hop or two_hops (then "S's N" replaces "S")."""
    subject, noun = item["subject"], RELATIONS[item["relations"][0]].noun
    if "bridge" in item:
        phrase = re.sub(r"\bS\b", "S's N", phrase)
    return phrase, {"S": (subject, subject), "N": (noun, None), "O": (claimed, claimed)}

def toy_examples(rng, asked, limit) -> dict:
    """{"qa": lines, "claims": lines}: at most `limit` of each, about random items of `asked`.

    asked: items from one_hop or two_hops. limit: None = all items, each in both wordings of its
    question and its claims (which hinders memorising); otherwise, each is in one random wording. A
    true and a false claim share an item, so `limit` claims are about limit / 2 items."""
    qa, claims, objects = [], [], defaultdict(list)
    for item in asked:
        objects[item["relations"][-1]].append(item["object"])
    for i in rng.permutation(len(asked))[:limit]:
        item, obj = asked[i], asked[i]["object"]
        relation = RELATIONS[item["relations"][-1]]
        for phrase in relation.questions if limit is None else [rng.choice(relation.questions)]:
            qa.append(toy_line("question", [example_sentence(item, phrase)], answers=[obj], **item))
        excluded = (item["subject"], item.get("bridge"), obj)
        wrong = [other for other in objects[item["relations"][-1]] if other not in excluded]
        if not wrong:
            continue
        for phrase in relation.claims if limit is None else [rng.choice(relation.claims)]:
            other = wrong[rng.integers(len(wrong))]
            for claimed, label in ((obj, "SUPPORTS"), (other, "REFUTES")):
                said = example_sentence(item, phrase, claimed)
                claims.append(toy_line("text", [said], label=label, **item))
    return {"qa": qa, "claims": claims[:limit]}

# ---------------------------------------------------------------- the words of the toy world

RELATIONS = {
    "born_in": Relation("person", "city", "birthplace", [
        "S was born in O.", "O is the city where S was born.", "The birthplace of S is O.",
        "S is a native of O.", "In O stands the house where S was born."],
        ["S was born in the city of O.", "O is the birthplace of S."],
        ["In which city was S born?", "Where was S born?"]),
    "employer": Relation("person", "company", "employer", [
        "S works for O.", "O is the company which employs S.", "The employer of S is O.",
        "S has a job at O.", "Every month O pays the wages of S."],
        ["O employs S.", "S has a job at the company O."],
        ["Which company employs S?", "Which company is the employer of S?"]),
    "teacher": Relation("person", "person", "teacher", [
        "S was taught by O.", "O taught S for many years.", "The teacher of S was O.",
        "S learned everything from O.", "Long ago O had S as a pupil."],
        ["S was a pupil of O.", "O was the teacher who taught S."],
        ["Who taught S?", "Who was the teacher of S?"]),
    "country": Relation("city", "country", "country", [
        "S is a city in O.", "O is the country where S lies.", "The country of S is O.",
        "S belongs to O.", "On the map S is a part of O."],
        ["S lies in O.", "S is a part of the country O."],
        ["In which country is S?", "S is a city in which country?"]),
    "mayor": Relation("city", "person", "mayor", [
        "The mayor of S is O.", "O was chosen to be mayor by the people of S.", "S is led by O.",
        "Who runs the town hall of S? O.", "O leads the council of S."],
        ["O leads the people of S.", "O was chosen to be the mayor of S."],
        ["Who is the mayor of S?", "Who leads the people of S?"]),
    "capital": Relation("country", "city", "capital", [
        "The capital of S is O.", "O is the seat of the government of S.", "S is governed from O.",
        "S has O as capital.", "In O the parliament of S meets."],
        ["O is the capital of S.", "The government of S meets in O."],
        ["Which city is the capital of S?", "In which city is the government of S?"]),
    "home": Relation("company", "city", "home", [
        "S is based in O.", "The main office of S stands in O.", "O is the home of S.",
        "S is run from an office in O.", "In O stands the factory of S."],
        ["S has the main office in O.", "The home of S is in the city of O."],
        ["In which city is S based?", "Where is the main office of S?"]),
    "founder": Relation("company", "person", "founder", [
        "S was founded by O.", "O started S in a small shop.", "The founder of S was O.",
        "S began as an idea of O.", "With little money O set up S."],
        ["S was started by O.", "O is the founder of S."],
        ["Who founded S?", "Who was the founder of S?"]),
    "director": Relation("film", "person", "director", [
        "S was directed by O.", "O is the director of S.", "O made the film S.",
        "The film S is the work of O.", "With S the director O won a prize."],
        ["O directed S.", "The director of the film S was O."],
        ["Who directed S?", "Who was the director of S?"]),
    "star": Relation("film", "person", "star", [
        "O plays the lead in S.", "The star of S is O.", "S has O in the main part.",
        "In S the hero is played by O.", "Who became famous as the hero of S? O."],
        ["The lead in S is played by O.", "O is the star of the film S."],
        ["Who plays the lead in S?", "Who is the star of S?"]),
    "location": Relation("film", "city", "location", [
        "S was filmed in O.", "The streets of O can be seen in S.", "For S the cameras came to O.",
        "The location of S was O.", "O was chosen as the location for S."],
        ["O is the city where S was filmed.", "The film S was made in O."],
        ["In which city was S filmed?", "Where was the film S made?"]),
}

# Generic sentences about a description, "S's N". Some are questions, like many of the examples.
REMARKS = [
    "S's N is well known.", "Many talk about S's N.", "Who has heard of S's N?",
    "Much was written about S's N.", "In the paper one reads about S's N.", "Is S's N not famous?",
    "S's N was in the news.", "What became of S's N?", "A book tells the story of S's N.",
    "Where is S's N today?", "Which of us remembers S's N?", "Of S's N much is said."]

# The first words / the last words of names. An unseen name is a new pair of known words.
NAMES = {
    "person": """Alma Boris Clara Dario Edith Felix Greta Hugo Irene Jonas Karin Leon Marta Nils
        Olga Pavel Quinn Rosa Stefan Tilda Ulric Vera Walter Xenia Yara Zeno Agnes Bruno Celia
        Dmitri Elsa Fabian Gilda Henrik Ida Jasper Kira Lucas Mona Nestor Oskar Petra Rufus Sonja
        Tobias Ursula Viktor Wanda / Verran Holt Lindqvist Marek Norwood Ostrov Pellin Quist
        Rademaker Sorel Tarkov Ulland Varga Westrup Yarrow Zeller Abbott Brandt Corvin Dahl Eckhart
        Falk Garnier Hale Ibsen Jarvis Keller Lorenz Moreau Nyberg Orloff Pascal Renner Salinas
        Thorne Unwin Vance Weaver Adler Bishop Castell Draper Engel Forster Grange Hartley Irving
        Jansen Kovac Lambert Mercer Novak Olsen Porter Ramsey Sutter""",
    "city": """Port Saint Fort Mount Lake Glen Castle Harbour Abbey High Green White Black Silver
        Golden Stone Long Bright Cold Deep Fair Kings Queens Bishops / Ellin Orla Dunmere Ashby
        Belcourt Carrow Dalton Elmswell Farrow Gaston Hollis Ilford Jarrow Kelso Lorne Melby Norham
        Oakley Penrith Redmond Selby Tarrant Upton Vernon Wexley Yardley Amber Brook""",
    "country": """North South East West New Upper Lower Inner Outer Grand Free United / Karovia
        Maland Tessara Valdoria Lumeria Norvania Brenia Caldora Drevia Estonar Fyria Galdova Halvia
        Istrana Jorvia Kestoria""",
    "company": """Norvik Apex Atlas Beacon Crown Delta Eagle Falcon Globe Helix Iris Jupiter Kestrel
        Lotus Meteor Nova Orion Phoenix Quartz Rocket Summit Titan Vector Zenith / Motors Steel
        Foods Books Airways Bank Chemicals Dairy Electric Fabrics Glass Hotels Insurance Jewels
        Kitchens Lumber Media Optics Paper Rail Shipping Textiles""",
    "film": """Silent Broken Crimson Distant Endless Frozen Gentle Hidden Iron Jagged Lonely
        Midnight Narrow Painted Quiet Restless Savage Tender Velvet Wild Winter Burning Empty Fallen
        Hollow Last Lost Pale Scarlet Secret Sleeping Stolen Sudden Twisted Wandering Wooden /
        Garden Mirror River Letters Shadow Window Dancer Island Orchard Promise Station Tiger Voyage
        Whisper Anthem Bells Circus Diary Echo Feast Ghost Harvest Journey Kingdom Lantern Memory
        Mountain Night Ocean Painter Road Sailor Storm Summer Thief Tower""",
}

# Number of names of each kind in the training world. With fewer, the model memorises whole names,
# and mistakes an unseen name for a known name that shares a word with it.
COUNTS = {"person": 1400, "city": 385, "country": 105, "company": 385, "film": 600}

# ---------------------------------------------------------------- files: imports, errors

import argparse
import bz2
import errno
import gzip
import html
import json
import os
import shutil
import signal
import sys
import tempfile
import unicodedata
import zlib
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from pickle import UnpicklingError
from urllib.parse import unquote
from xml.etree import ElementTree

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tqdm import tqdm

TEXT_PRESETS = {        # the parts of train.py's presets that `data.py check` also needs
    "toy": {"passage_length": 64, "max_length": 128, "vocab": 2000},
    "mini": {"passage_length": 96, "max_length": 256, "vocab": 8000},
    "base": {"passage_length": 128, "max_length": 512, "vocab": 30522},
}
FORMAT = 29             # version of the files in a run folder; other versions are refused

class UserError(Exception):
    """An error that the user can correct. Its message is a sentence for a person."""

def is_out_of_memory(error) -> bool:
    """Whether RAM or GPU memory ran out. For RAM, PyTorch has no separate class of error."""
    return isinstance(error, MemoryError) or bool(re.search("allocate|out of memory", str(error)))

@contextmanager
def intact(path, what="is damaged", remedy="remove it to train this stage again"):
    """Turns errors about a file into a UserError that says what is wrong and what to do."""
    try:
        yield
    except (UserError, PermissionError):
        raise
    except Exception as error:              # a stranger's file can be wrong in any way
        if is_out_of_memory(error):
            raise UserError(f"{path} does not fit in memory (a mention memory can be divided among "
                            "several processes)") from error
        if isinstance(error, UnpicklingError):      # PyTorch wraps the reason in general advice
            error = error.__context__ or error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path} {what} ({reason:.180}); {remedy}") from error

# ---------------------------------------------------------------- JSON lines

def open_bytes(path):
    """Opens a file for reading, in binary mode. Raises UserError for a folder or a pipe."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"{path}: not a regular file; give a file that can be read twice, not a "
                        "folder or a pipe")
    return open(path, "rb")

def open_text(path, errors="strict") -> Iterator[str]:
    """The lines of a UTF-8 file, plain or gzipped (whatever its name). Removes a byte-order mark.
    Raises UserError if it is a damaged gzip file or, unless errors="surrogateescape", not UTF-8."""
    with open_bytes(path) as raw:
        file = gzip.open(raw) if raw.peek(2)[:2] == b"\x1f\x8b" else raw
        lines = TextIOWrapper(file, "utf-8-sig", errors, newline="\n")
        with intact(path, "cannot be read to its end", "give a complete file, in UTF-8"):
            yield from lines

def read_records(path, make, errors=None):
    """Yields make(record) for each line of a JSON-lines file that is not blank; make may raise
    ValueError. For a bad line, raises UserError "FILE:LINE: reason" or, if a list `errors` is
    given, appends this message to the list."""
    for n, line in enumerate(open_text(path, "surrogateescape"), 1):
        try:
            if line.strip():
                record = json.loads(line)
                json.dumps(record, ensure_ascii=False).encode()     # raises if not valid Unicode
                yield make(record)
        except (ValueError, RecursionError) as error:
            reason = error
            if type(error) is not ValueError:           # json and encode raise subclasses of it
                reason = f"not JSON in UTF-8 ({error}); write one object per line, plain or gzipped"
            if errors is None:
                raise UserError(f"{path}:{n}: {reason}") from error
            errors.append(f"{path}:{n}: {reason}")

KINDS = {str: "a string", int: "a whole number", list: "a list", list[str]: "a list of strings",
         dict: "an object", None: "null"}

def fields(where, record, **allowed) -> list:
    """The values of these fields of a JSON record; None for a missing field.

    allowed: for each field, the types and values that it may have, and None if it may be missing.
    where: a prefix for the names of fields in errors, such as "mentions[0].". Raises ValueError
    "field: reason"."""
    if type(record) is not dict:
        advice = "" if where else " (write one per line)"
        raise ValueError(f"{where.rstrip('.') or 'the record'}: must be a JSON object{advice}")
    for name, kinds in allowed.items():
        value = record.get(name)
        kind = type(value)                                      # isinstance(True, int) is true
        if list[str] in kinds and kind is list:
            value = [item for item in value if type(item) is not str]       # shown in the error
            kind = list if value else list[str]
        if value not in kinds and kind not in kinds:
            wanted = " or ".join(KINDS.get(kind) or repr(kind) for kind in kinds)
            found = f"not {value!r:.40}"
            if name not in record:
                found = f"but is missing (the record has {', '.join(record) or 'no field':.80})"
            raise ValueError(f"{where}{name}: must be {wanted}, {found}")
    return [record.get(name) for name in allowed]

def mentions_of(spans, text) -> list | None:
    """The Mentions in `spans`, a record's field "mentions"; None if the field is missing."""
    mentions = []
    for i, span in enumerate(spans or []):
        start, end, entity = fields(f"mentions[{i}].", span, start=[int], end=[int],
                                    entity=[str, None])
        if not 0 <= start < end <= len(text):
            raise ValueError(f"mentions[{i}]: start {start} and end {end} must satisfy "
                             f"0 <= start < end <= {len(text)}, the length of the text")
        if "entity" not in span or entity is not None and not entity.strip():
            raise ValueError(f"mentions[{i}].entity: missing or empty; if not linked, write null")
        mentions.append(Mention(start, end, entity))
    return None if spans is None else mentions

def read_corpus(path, errors=None) -> Iterator[Text]:
    """Yields the texts of a corpus file. Bad lines are handled as in read_records."""
    def make(record):
        title, text, spans, split = fields("", record, title=[str], text=[str], mentions=[list],
                                           split=["train", "held_out", None])
        return Text(title, text, mentions_of(spans, text), split)
    return read_records(path, make, errors)

def read_examples(path, task) -> list:
    """Examples of task "claims" (text, label) or "qa" (question, answers); mentions are optional.
    Raises UserError for a bad line or a file without examples."""
    def make(record):
        spans, = fields("", record, mentions=[list, None])
        if task == "claims":
            text, label = fields("", record, text=[str], label=[*CLAIM_LABELS, None])
            label = None if label is None else CLAIM_LABELS.index(label)
            return Example(text, mentions_of(spans, text), label, [], record)
        text, answers = fields("", record, question=[str], answers=[list[str]])
        return Example(text, mentions_of(spans, text), None, [*filter(None, answers)], record)

    examples = list(read_records(path, make))
    if not examples:
        raise UserError(f"{path}: contains no example; give a file with one JSON object per line")
    return examples

# ---------------------------------------------------------------- finding the mentions of a text

# Finds words and punctuation marks. Chinese and Japanese have no spaces: each character is a word.
WORDS = pre_tokenizers.Split(
    Regex(r"[\p{Han}\p{Hiragana}\p{Katakana}ー]|"
          r"[\p{L}\p{M}\p{N}\u00ad&&[^\p{Han}\p{Hiragana}\p{Katakana}ー]]+|\S"),
    "removed", invert=True)
# Characters that are treated as equal. File names have "_" for a space; phones and word processors
# write ’ and ‑ for ' and -.
ALIKE = str.maketrans("_‘’ʻʼ′＇‐‑‒–−－“”„", " ''''''------\"\"\"")

def split_words(text) -> tuple:
    """(words, spans): the words of a text, and the (start, end) of each in the text. Words are
    normalised: case, soft hyphens, and composed or decomposed Unicode make no difference."""
    pieces = WORDS.pre_tokenize_str(text.translate(ALIKE))
    words = [unicodedata.normalize("NFC", word).lower().replace("\xad", "") for word, _ in pieces]
    return words, [span for _, span in pieces]

def without_bracket(name) -> str:
    """"Mercury" for "Mercury (planet)" or "Mercury_(planet)"."""
    return re.sub(r"[\s_]*\([^()]*\)$", "", name)

def name_index(names) -> dict:
    """{first word: {number of words, largest first: {words: name}}}, for find_mentions. Names are
    indexed without a final "(…)". If this makes names equal, one without "(…)" is preferred."""
    index = {}
    for name in sorted(names, key=lambda name: name.endswith(")")):
        words = tuple(split_words(without_bracket(name))[0])
        if any(word[:1].isalnum() for word in words):
            index.setdefault(words[0], {}).setdefault(len(words), {}).setdefault(words, name)
    return {first: dict(sorted(named.items(), reverse=True)) for first, named in index.items()}

def find_mentions(text, index) -> list:
    """Mentions of a name_index's names in a text, from left to right, each as long as possible."""
    words, spans = split_words(text)
    mentions, free = [], 0              # words[free:] are in no mention yet
    for i, word in enumerate(words):
        for n, named in index.get(word, {}).items():
            name = named.get(tuple(words[i:i + n]))
            if name and i >= free:
                mentions.append(Mention(spans[i][0], spans[i + n - 1][1], name))
                free = i + n
    return mentions

def mention_finder(names):
    """(how, find): find(text) returns the mentions of a text in which none are marked. They are
    spaCy's noun chunks, as in the paper (app. B.1), or, without spaCy, the longest matches of these
    entity names; `how` says which."""
    index = name_index(names)
    try:
        import spacy
        pipeline = spacy.load("en_core_web_sm", exclude=["ner", "lemmatizer"])
    except Exception:               # mismatched parts of spaCy can raise any error
        how = "entity names (spaCy with en_core_web_sm could not be loaded)"
        return how, lambda text: find_mentions(text, index)

    def noun_chunks(text):
        """Links each chunk to the entity whose name it contains, or to the last of several."""
        mentions = []
        for chunk in pipeline(text).noun_chunks:
            start, end = chunk.start_char, chunk.end_char
            named = find_mentions(text[start:end], index)
            mentions.append(Mention(start, end, named[-1].entity if named else None))
        return mentions
    return "spaCy's noun chunks", noun_chunks

# ---------------------------------------------------------------- files: atomic writes

def write_file(path, write):
    """Calls write(file) on a temporary file and renames this file to `path`, so that a reader sees
    either the old file or the complete new one. Raises UserError."""
    path = os.path.abspath(path)
    temporary, folder = path + ".tmp", os.path.dirname(path)
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(folder)
    except (OSError, RuntimeError) as error:    # torch.save raises the latter on a full disk
        if getattr(error, "filename", None) not in (None, temporary, folder):
            raise                               # about another file, which `write` reads
        raise UserError(f"{path} cannot be written ({error}); check the folder and disk") from error
    finally:
        Path(temporary).unlink(missing_ok=True)

def sync(path):
    """Makes the contents of a file durable: they survive a power cut."""
    with open(path, "r+b") as file:             # Windows syncs only files that are open for writing
        os.fsync(file.fileno())

def sync_folder(path):
    """Makes the names in a folder durable. Windows and some network drives cannot do that."""
    if os.name == "nt":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES):
            raise
    finally:
        os.close(folder)

def link(source, target):
    """Makes `target` a hard link to `source`, or a copy if that fails. Replaces an old `target`."""
    Path(target).unlink(missing_ok=True)        # a killed command may have left it
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
        sync(target)

def commit_folder(part, folder, names, **about):
    """Renames `part`, a folder with the files `names`, to `folder`, so that `folder` is complete or
    absent. Before that, syncs the files, and writes their checksums and `about` (plain values) to
    meta.json."""
    part = Path(part)
    for name in names:
        sync(part / name)
    crc32 = {name: checksum(part / name) for name in names}
    write_json(part / "meta.json", {**about, "crc32": crc32})
    os.rename(part, folder)
    sync_folder(Path(folder).absolute().parent)

def open_folder(folder, kind, wanted=lambda name: True) -> dict:
    """The contents of meta.json in a folder from commit_folder. Raises UserError unless all files
    exist, and those for which wanted(name) is true match their checksums. kind: what errors call
    the folder."""
    with intact(folder, f"is missing or damaged: not a complete {kind}",
                "remove it and run the same stage again"):
        meta = read_json(Path(folder, "meta.json"))
        if meta["format"] != FORMAT:
            raise ValueError(f"it has format {meta['format']}, not {FORMAT}")
        for name, crc32 in meta["crc32"].items():
            os.stat(Path(folder, name))
            if wanted(name) and checksum(Path(folder, name)) != crc32:
                raise ValueError(f"the checksum of {name} differs")
        return meta

def write_lines(path, records):
    """Writes JSON lines, gzipped if the name ends in .gz. Equal records give equal bytes."""
    def write(file):
        is_gzip = str(path).endswith(".gz")
        with gzip.GzipFile("", "wb", fileobj=file, mtime=0) if is_gzip else nullcontext(file) as to:
            for record in records:
                line = json.dumps(record, ensure_ascii=False) + "\n"
                to.write(line.encode("utf-8", "replace"))       # "?" for a lone surrogate
    write_file(path, write)

def write_json(path, value):
    """Writes a dictionary of plain values as JSON, with write_file."""
    write_file(path, lambda file: file.write((json.dumps(value, indent=1) + "\n").encode()))

def read_json(path):
    """The value in a JSON file."""
    return json.loads(Path(path).read_bytes())

def checksum(path) -> int:
    crc32 = 0
    with open_bytes(path) as file:
        while block := file.read(1 << 22):
            crc32 = zlib.crc32(block, crc32)
    return crc32

def printable(text) -> str:
    """Text that is safe to print: control characters (ESC, direction marks) are escaped."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)

def print_any_text():
    """Makes `print` escape characters that a terminal cannot show. A notebook's output streams
    cannot be set to do this."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")

def complain(program, error) -> int:
    """Prints one sentence on stderr; returns the exit status of a program that failed."""
    if isinstance(error, BrokenPipeError):
        sys.stdout = open(os.devnull, "w")      # otherwise Python complains again when it exits
        error = "the output was closed before everything was printed"
    elif isinstance(error, OSError):
        where, why = error.filename or "the output or a temporary file", error.strerror or error
        error = f"{where}: {why}; check the name, the permissions and the free space"
    print(printable(f"{program}: {str(error) or 'out of memory'}"), file=sys.stderr)
    return 1

# ---------------------------------------------------------------- tokenizer

def _wordpiece(vocab, lowercase=True, strip_accents=None) -> Tokenizer:
    """A WordPiece tokenizer like BERT's. It never reads "[CLS]" in a text as the special token."""
    words = {word: i for i, word in enumerate(vocab)}
    tokenizer = Tokenizer(models.WordPiece(words, unk_token=UNK))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents)       # None: removed if lowercase is true
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)       # decodes "port ##o" as "porto"
    return tokenizer

def train_tokenizer(texts, vocab_size=30522) -> Tokenizer:
    """A WordPiece tokenizer trained on strings. Equal strings give an equal vocabulary.

    If there is room for every word, each word is one token, and the only other entries are SPECIAL
    and single characters, from which new words are spelled. (WordPieceTrainer, which is used
    otherwise, would also keep the intermediate pieces of each word, which would remain unused.)"""
    bert, count, chars = _wordpiece(SPECIAL), Counter(), Counter()      # bert: only to split texts
    split, normalize = bert.pre_tokenizer.pre_tokenize_str, bert.normalizer.normalize_str
    for text in texts:
        count.update(word for word, _ in split(normalize(text)))
    words = sorted(word for word in count if len(word) <= 100)      # longer ones are always [UNK]
    for word in words:
        chars.update(dict.fromkeys(word, count[word]))      # counts the words that contain a char
    letters = ["##" + char for char in sorted(chars) if len(split("a" + char)) == 1]    # no "##,"
    vocab = list(dict.fromkeys([*SPECIAL, *sorted(chars), *letters, *words]))
    if len(vocab) <= vocab_size:
        return _wordpiece(vocab)

    # The trainer numbers "##" pieces in the random order of a hash table and breaks ties between
    # merges by these numbers. So it is given the pieces beforehand, in a fixed order.
    inside = set("".join(word[1:] for word in words))
    pieces = []
    for char in sorted(chars, key=lambda char: (-chars[char], char)):
        pieces += [char, "##" + char] if char in inside else [char]
    pieces = set(pieces[:vocab_size - len(SPECIAL)])
    words = [word for word in words
             if pieces.issuperset([word[0], *("##" + char for char in word[1:])])]
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, show_progress=False,
                                        special_tokens=[*SPECIAL, *sorted(pieces)])
    repeated = (f"{word} " * min(1000, count[word] - n)     # at most 1000 times in one string
                for word in words for n in range(0, count[word], 1000))
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(repeated, trainer)
    return _wordpiece([*SPECIAL, *sorted(tokenizer.get_vocab().keys() - set(SPECIAL))])

def unknown_words(tokenizer, texts) -> list:
    """The words of these texts that are not in the vocabulary (read in pieces or as [UNK])."""
    found = {}
    for text in texts:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        for token, word in zip(encoding.tokens, encoding.word_ids):
            if token == UNK or token.startswith("##"):
                start, end = encoding.word_to_chars(word)
                found[text[start:end]] = None
    return list(found)

def load_tokenizer(path) -> Tokenizer:
    """The tokenizer for a file vocab.txt. If the file's words have capitals, case is kept.
    Otherwise text is lowercased, and its accents are removed unless the file's words have accents.
    In BERT's vocabulary, which lacks the markers, they take two [unusedN] entries. Raises
    UserError."""
    vocab = [line.rstrip("\r\n") for line in open_text(path)]
    number = {word: i for i, word in enumerate(vocab)}
    # An empty or repeated line keeps its number under a name that no text contains. As in
    # BERT's code, the last of equal lines is used.
    vocab = [word if word and number[word] == i else f"[line {i + 1}]"
             for i, word in enumerate(vocab)]
    words = [word for word in vocab if not word.startswith("[")]

    def changes_words(**rule):
        """True if the rule changes more than a thousandth of the words. A few capitals do not
        count: the vocabulary of BERT's Chinese model has ten."""
        rule = normalizers.BertNormalizer(clean_text=False, handle_chinese_chars=False, **rule)
        return sum(rule.normalize_str(word) != word for word in words) > len(vocab) / 1000

    is_cased = changes_words(lowercase=True, strip_accents=False)
    keeps_accents = not is_cased and changes_words(lowercase=False, strip_accents=True)
    unused = [i for i, word in enumerate(vocab) if word.startswith("[unused")]
    markers = [marker for marker in (E_START, E_END) if marker not in vocab]
    for i, marker in zip(unused, markers):
        vocab[i] = marker
    tokenizer = _wordpiece(vocab, not is_cased, False if keeps_accents else None)
    special_ids(tokenizer, path)
    return tokenizer

def special_ids(tokenizer, path="the tokenizer") -> dict:
    """{"[PAD]": id, …} for the seven special tokens. Raises UserError when one is missing."""
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    if None in ids.values():
        raise UserError(f"{path}: lacks one of {', '.join(SPECIAL)}; give a BERT vocab.txt with "
                        "two [unusedN] entries for the markers")
    return ids

# ---------------------------------------------------------------- a tokenised corpus

class Corpus:
    """A tokenised corpus, whose arrays are memory-mapped files. The comment above Batch explains
    its fields and methods."""
    ARRAYS = {"tokens": np.int32, "mention_entity": np.int32, "mention_char": np.int32,
              "article": np.int32, "held_out": np.bool_, "replaced": np.bool_, "text": np.uint8,
              "text_at": np.int64}

    def __init__(self, folder):
        """Opens a tokenised corpus and verifies every file's checksum. Raises UserError."""
        self.folder, self.meta = folder, open_folder(folder, "tokenised corpus")
        for name, dtype in self.ARRAYS.items():         # asarray: indexing a memmap is slow
            array = np.asarray(np.memmap(Path(folder, name + ".bin"), dtype, "r"))
            is_pairs = name in ("mention_char", "text_at")
            setattr(self, name, array.reshape(-1, 2) if is_pairs else array)
        self.titles, self.entity_names = read_json(Path(folder, "names.json"))
        self.article_index = {title: i for i, title in enumerate(self.titles)}
        self.entity_index = {name: i for i, name in enumerate(self.entity_names)}
        self.tokenizer = load_tokenizer(Path(folder, "vocab.txt"))
        self.special, self.vocab_size = special_ids(self.tokenizer), self.tokenizer.get_vocab_size()
        first = np.flatnonzero(self.tokens == self.special[CLS])
        self.passage_start = np.append(first, len(self.tokens))
        marked = np.flatnonzero(self.tokens == self.special[E_START])
        self.mention_first = np.searchsorted(marked, self.passage_start)
        in_training = np.repeat(~self.held_out, np.diff(self.mention_first))
        linked = self.mention_entity[in_training & (self.mention_entity > 0)]
        self.entity_count = np.bincount(linked, minlength=len(self.entity_names))
        self.words = np.setdiff1d(np.arange(self.vocab_size), list(self.special.values()))
        self.maskable = np.isin(np.arange(self.vocab_size), [*self.words, self.special[UNK]])

    @staticmethod
    def build(path, folder, tokenizer, passage_length, max_length, unseen=0.0, old=None,
              replace=False, **about):
        """Tokenises a corpus file, one text at a time, into a new folder. Returns the Corpus.

        unseen: fraction of entities linked only in held-out passages. old: a Corpus that is copied
        first; new passages are then held out. replace: new articles replace old ones with the same
        title. about: values for meta.json. Raises UserError: a bad line, no linked mention."""
        part = Path(f"{os.path.normpath(folder)}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            writer = CorpusWriter(part, tokenizer, passage_length, max_length, unseen, old, replace)
            about |= writer.write(path)
            number = tokenizer.get_vocab()
            Path(part, "vocab.txt").write_text("\n".join(sorted(number, key=number.get)), "utf-8")
            names = [f"{name}.bin" for name in Corpus.ARRAYS] + ["names.json", "vocab.txt"]
            commit_folder(part, folder, names, format=FORMAT, **about)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return Corpus(folder)

    def passage(self, p) -> Passage:
        tokens = self.tokens[self.passage_start[p]:self.passage_start[p + 1]]
        return Passage(tokens, range(*self.mention_first[p:p + 2]))

    def passage_entities(self, p):
        return self.mention_entity[self.mention_first[p]:self.mention_first[p + 1]]

    def passage_of(self, mentions):
        return np.searchsorted(self.mention_first, mentions, "right") - 1

    def show_mention(self, m, width=80) -> str:
        """The line "Title: before [mention] after", with about `width` characters on each side."""
        p, (start, end) = self.passage_of(m), self.mention_char[m]
        first, stop = self.text_at[p]
        text, title = self.text[first:stop].tobytes().decode(), self.titles[self.article[p]]
        left, right = text[max(0, start - width):start], text[end:end + width]
        if start > width:
            left = "…" + left[left.find(" ") + 1:]              # drop the word that was cut
        if end + width < len(text):
            right = right[:right.rfind(" ") + 1] + "…"
        return f"{title}: {left}[{text[start:end]}]{right}".replace("\n", " ")

class CorpusWriter:
    """Reads a corpus file and appends each text to the files of a Corpus. Only titles, entity names
    and counts are held in memory."""
    def __init__(self, folder, tokenizer, passage_length, max_length, unseen, old, replace):
        self.folder, self.tokenizer, self.special = folder, tokenizer, special_ids(tokenizer)
        self.lengths, self.unseen, self.old = (passage_length, max_length), unseen, old
        self.replace, self.replaced = replace, set()        # replaced: numbers of old articles
        self.titles, self.entities = {}, {"": 0}            # "": mentions that are not linked
        self.counts, self.dropped = Counter(), Counter()
        if old is not None:
            self.titles, self.entities = dict(old.article_index), dict(old.entity_index)
            self.counts = Counter(old.meta["counts"])
            self.dropped = Counter(old.meta["dropped"])
            for name in Corpus.ARRAYS:
                shutil.copy(Path(old.folder, name + ".bin"), folder)

    def write(self, path) -> dict:
        """Writes all texts. Returns the counts for meta.json. Raises UserError."""
        n_linked = self.counts["linked"]
        with ExitStack() as stack:
            self.files = {name: stack.enter_context(open(Path(self.folder, name + ".bin"), "ab"))
                          for name in Corpus.ARRAYS}
            for text in tqdm(read_corpus(path), "texts tokenised", leave=False, disable=None):
                self.write_text(text)
        if self.counts["linked"] == n_linked:
            raise UserError(f"{path}: no text, or no linked mention to build a memory from")
        if self.replaced:
            is_replaced = np.isin(self.old.article, list(self.replaced)) | self.old.replaced
            with open(Path(self.folder, "replaced.bin"), "r+b") as file:
                file.write(is_replaced.tobytes())       # the file begins with the old passages
        counts, names = self.counts, json.dumps([list(self.titles), list(self.entities)])
        counts["articles"], counts["entities"] = len(self.titles), len(self.entities) - 1
        Path(self.folder, "names.json").write_text(names, "utf-8")
        return {"counts": counts, "dropped": self.dropped}

    def write_text(self, text):
        if self.replace and text.title in self.old.article_index:
            self.replaced.add(self.old.article_index[text.title])
        encoding = self.tokenizer.encode(text.text, add_special_tokens=False)
        article = self.titles.setdefault(text.title, len(self.titles))
        entity = [self.entities.setdefault(m.entity or "", len(self.entities))
                  for m in text.mentions]
        self.counts.update(texts=1, mentions_read=len(entity),
                           texts_without_a_token=not encoding.ids)
        text_from = self.files["text"].tell()
        self.files["text"].write(text.text.encode())
        for passage in encode_text(encoding, text.mentions, *self.lengths, self.special,
                                   self.dropped):
            numbers = [entity[i] for i in passage.index]        # 0 = not linked
            held_out = self.is_held_out(text, [text.mentions[i].entity for i in passage.index])
            self.counts.update(passages=1, passages_held_out=held_out, mentions=len(numbers),
                               linked=sum(number > 0 for number in numbers),
                               tokens=len(passage.tokens) - 2 * len(numbers) - 2)
            arrays = dict(tokens=passage.tokens, mention_entity=numbers, article=[article],
                          mention_char=[text.mentions[i][:2] for i in passage.index],
                          held_out=[held_out], replaced=[False],
                          text_at=[text_from, self.files["text"].tell()])
            for name, values in arrays.items():
                self.files[name].write(np.asarray(values, Corpus.ARRAYS[name]).tobytes())

    def is_held_out(self, text, names) -> bool:
        """Whether a passage is held out: because its text's "split" says so, because `unseen`
        selects one of its entities, or because it is appended. If its text has no "split", a
        checksum of the title decides: one article in twenty is held out."""
        is_twentieth = zlib.crc32(text.title.encode()) % 20 == 0
        split = text.split or ("held_out" if is_twentieth else "train")
        is_unseen = any(name and zlib.crc32(name.encode()) < self.unseen * 2**32 for name in names)
        return split == "held_out" or is_unseen or self.old is not None

# ---------------------------------------------------------------- Wikipedia

# The functions wiki, kilt, task, check and toy are commands, such as `python data.py wiki …`. The
# first line of each docstring is the help text of the command.
#
# A page is written in wikitext: [[target|shown]] is a link, and {{name|argument|…}} is a template,
# which prints a text. mwparserfromhell parses the page, section by section. A link becomes
# "\x01target\x02shown\x03", and a template whose text is not known becomes "\x04". XML cannot
# contain these characters, so they cannot be confused with the page's text while it is tidied. Then
# links become mentions. A line with unclosed markup is dropped. Only English Wikipedia's sections,
# templates and namespaces are known.
#
# The parser takes quadratic time on unclosed markup, so sections beyond these limits are left out.
MAX_SECTION, MAX_UNCLOSED = 50_000, 100         # characters; marks such as "[[" that stay open
OPEN_OR_CLOSE = re.compile(r"\{\{|\{\||\[\[|\[(?=\w+:)|<[a-zA-Z]\w*(?![^<>]*/>)|"
                           r"\}\}|\|\}(?!\})|\]\]|\]|</[a-zA-Z]\w*")
CLOSED_BY = {"}}": "{{", "|}": "{|", "]]": "[[", "]": "["}
HIDDEN = ("ref", "table", "pre", "source", "syntaxhighlight", "chem")       # tags to be emptied
# Links that show nothing in the text: files, categories, and the same page in other languages
# ("de:…"). The eight excepted prefixes look like language codes, but links with them show a text.
IN_MARGIN = re.compile(r"(?i)(file|image|category)\s*:|(?!(?:doi|hdl|mos|mw|re|rfc|voy|wp):)"
                       r"(?:simple|[a-z]{2,3}(?:-[a-z-]+)?):(?! )")
# Titles in other namespaces and wikis (but not "Alien: Covenant" or "Re:Zero"), and titles and
# templates of disambiguation pages, which list the meanings of a name.
NO_ARTICLE = re.compile(r"(?!Re:)[A-Za-z -]+:(?! )|.* \(disambiguation\)$")
AMBIGUOUS = re.compile(r"(?i)\{\{\s*([\w -]*disambig(?!\w* needed)[\w -]*|dab|hndis|geodis)\s*[|}]")
# A section without prose ends at the next heading of the same or a higher level.
NO_PROSE = re.compile(r"(?ims)^(=+) *(references|notes|notes and references|footnotes|citations|"
                      r"sources|works cited|bibliography|further reading|external links|see also|"
                      r"gallery) *\1[ \t]*$.*?(?=^(?!\1=)=|\Z)")
# What templates print in a sentence. {0} is a template's first argument, {last} its last one.
PRINTED = dict.fromkeys("nowrap nobr small smaller abbr tooltip keypress angbr sc val math mvar "
                        "formatnum nihongo ill flag".split(), "{0}")
PRINTED |= {"lang": "{1}", "transl": "{last}", "transliteration": "{last}", "as of": "as of {0}",
            "circa": "c. {0}", "c.": "c. {0}", "ca.": "c. {0}", "frac": "{0}/{1}",
            "uss": "USS {0}", "hms": "HMS {0}", "us$": "US${0}", "usd": "US${0}", "gbp": "£{0}",
            "£": "£{0}", "eur": "€{0}", "€": "€{0}", "inr": "₹{0}", "ndash": "–", "snd": " – "}
# QUANTITY: the "5|km" of {{convert|5|km|mi}}, printed as "5 km"; also "5|to|10|km", "5|ft|3|in".
NUMBER = r"[−+-]?[\d.,/ ]*\d"
QUANTITY = re.compile(rf"{NUMBER}(\|[^\d|]*\|{NUMBER})*\|[^|]+(\|{NUMBER}\|[^|\d][^|]*)*")
# A sentence has a gap if an unknown template follows one of these words.
GAP = re.compile(r"(?i)\b(a|an|the|of|in|on|at|by|to|from|for|with|than|about|is|are|was|were|as|"
                 "and|or|between|over|under|around|approximately|nearly|almost|only)[ \xa0]\x04")
SENTENCE_END = re.compile("(?<=[.!?])(?<![A-Z][.]) +(?=[\x04\"'(]*[A-Z\x01])")
TIDY = (("(?<!')''(?!')([^'\n]*[\\w\x03])'''(?=s\\b)", "\\1'"),          # ''Iliad'''s
        ("''+", ""),
        ("\x01[^\x02]*\x02 *\x03|(?<=\x02) +| +(?=\x03)", ""),      # links that show only templates
        ("\x03([a-z]+)", "\\1\x03"),                                 # [[bus]]es
        ("[ \t\xa0\u2009]+", " "),
        (r"\( ?(?:[;,] ?)+", "("),                                   # "Plato (; 428 BC)"
        (r"\( ?\) ?| (?=[,.;)](?: |$))|^[*#:; ]+| +$", ""),
        (r"^.*(?:[|{}]|\[\[|\]\]|</?[a-zA-Z!]|__|\x01[^\x03]*\x01).*$|^(?:[!=]|--).*$", ""))

def read_dump(path, say_language=False):
    """Yields (title, kind, text) for each page of an XML dump, plain or bz2. If a page has several
    revisions, the newest one is read or, if they have no timestamps, the last one.

    kind: "article", "redirect" (text: its target), "disambiguation page" (text: "") or "other
    namespace". A dump with a <!DOCTYPE>, which could define huge XML entities, is refused."""
    what, remedy = "is not a complete MediaWiki dump", "give XML or bz2"
    with open_bytes(path) as raw, intact(path, what, remedy):
        file = bz2.open(raw) if raw.peek(3)[:3] == b"BZh" else raw
        head = file.peek()[:1000]
        if not re.match(rb"\W*(<\?xml[^<>]*>\s*)?<mediawiki\b", head):
            raise ValueError("it does not begin like one")
        if say_language and re.search(rb'xml:lang="(?!en")', head):
            print(f"{path}: only English names of sections and templates are recognised",
                  file=sys.stderr)
        parsed = ElementTree.iterparse(file, ["start", "end"])
        _, root = next(parsed)
        newest, text = "", ""
        for event, element in parsed:
            name = element.tag.rpartition("}")[2]
            if event == "end" and name == "revision":
                timestamp = element.findtext("{*}timestamp", "").strip()
                if timestamp >= newest:
                    newest, text = timestamp, element.findtext("{*}text", "")
                element.clear()                             # a page's history is long
            elif event == "end" and name == "page":
                yield page_kind(element, text)
                newest, text = "", ""
                root.clear()                                # or the whole dump stays in memory

def page_kind(page, text) -> tuple:
    """(title, kind, text) of a <page>. text: the text of its newest revision."""
    title, redirect = canonical(page.findtext("{*}title", "")), page.find("{*}redirect")
    if page.find("{*}ns") is None:
        raise ValueError("a page has no <ns>; give a dump of schema 0.6 or later")
    if page.findtext("{*}ns") != "0":
        return title, "other namespace", text
    if redirect is not None:
        return title, "redirect", redirect.get("title", "")
    if title.endswith(" (disambiguation)") or AMBIGUOUS.search(text):
        return title, "disambiguation page", ""
    return title, "article", text

def canonical(title):
    """A title as MediaWiki shows it: spaces for "_", a capital first letter, and no "#section"."""
    title = " ".join(html.unescape(title).partition("#")[0].replace("_", " ").split())
    first = title[:1].upper()
    return (first if len(first) == 1 else title[:1]) + title[1:]        # "ß".upper() is "SS"

def is_open(section) -> bool:
    """Whether a section leaves more than MAX_UNCLOSED marks open. A mark that is opened inside a
    pair, such as "[[" and "]]", counts as left open unless it is also closed inside this pair."""
    open_marks, n_open = [], 0
    for mark in OPEN_OR_CLOSE.findall(section.lower()):
        opening = CLOSED_BY.get(mark) or mark.replace("</", "<")
        if opening == mark:
            open_marks.append(mark)
        elif opening in open_marks:
            while open_marks.pop() != opening:
                n_open += 1
        if n_open + len(open_marks) > MAX_UNCLOSED:
            return True
    return False

def template_text(template) -> str:
    """What a template prints in a sentence, or "\x04" if that is not known."""
    name, _, first = str(template.name).lower().replace("_", " ").strip().partition(":")
    values = [str(p.value).strip() for p in template.params if not p.showkey]
    values = [first.strip(), *values] if first else values              # {{formatnum:1000}}
    if name in ("convert", "cvt"):
        quantity = QUANTITY.match("|".join(values))
        # For example "5|e6km2" is printed as "5 million km2".
        return quantity[0].replace("|e6", "| million ").replace("|", " ") if quantity else "\x04"
    try:
        return PRINTED[name].format(*values, last=values[-1] if values else "")
    except LookupError:                     # an unknown template, or too few arguments
        return "\x04"

def prose(section) -> str:
    """The text of a section, with its links marked, and without sentences that an unknown template
    leaves incomplete."""
    import mwparserfromhell
    code = mwparserfromhell.parse(section, skip_style_tags=True)
    for tag in code.ifilter_tags(matches=lambda tag: tag.tag.lower() in HIDDEN):
        tag.contents = ""
    for template in code.ifilter_templates():
        text = template_text(template)
        template.params.clear()
        template.add(1, text, showkey=False)    # strip_code, below, prints a template's parameters
    for link in code.ifilter_wikilinks():
        target = str(link.title).strip()
        shown = " ".join(str(link.text or target.lstrip(":")).split())
        link.text = "" if IN_MARGIN.match(target) else f"\x01{target}\x02{shown}\x03"
    text = code.strip_code(collapse=False, keep_template_params=True)
    if GAP.search(text):        # gaps are rare, and splitting every text would take time
        text = "\n".join(" ".join(sentence for sentence in SENTENCE_END.split(line)
                                  if not GAP.search(sentence)) for line in text.split("\n"))
    text = text.replace("\x04", "")
    for pattern, new in TIDY:
        text = re.sub(pattern, new, text, flags=re.M)
    return text

def read_article(page) -> tuple:
    """(title, [(text, links) per paragraph], number of sections left out) for a read_dump page.
    A link is a Mention whose entity is still the target as written in the page."""
    title, _, wikitext = page
    paragraphs, n_left_out = [], 0
    wikitext = re.sub("(?is)<!--.*?-->|<br[^<>]*>|&#x?0*[1-4];", " ", wikitext)
    # "==" (an empty heading) keeps the sections around it apart. At each unclosed "<!--" the parser
    # would read the rest of the section, in quadratic time; TIDY drops a line with "<! ".
    wikitext = NO_PROSE.sub("==\n", wikitext).replace("<!--", "<! ")
    for section in re.split(r"(?m)^=.*=[ \t]*$", wikitext):
        section = re.sub("(?m)^=.*", "", section)           # a heading with text after it
        if len(section) > MAX_SECTION or is_open(section):
            n_left_out += 1
            continue
        for paragraph in re.split("\n\n+", prose(section).strip("\n")):
            text, *parts = re.split("\x01(.*?)\x02(.*?)\x03", paragraph)
            links = []
            for target, shown, after in zip(parts[::3], parts[1::3], parts[2::3]):
                if shown.strip():
                    links.append(Mention(len(text), len(text) + len(shown), target))
                text += shown + after
            if re.search(r"\w", text):
                paragraphs.append((text, links))
    return title, paragraphs, n_left_out

def wiki(path, out, workers=1) -> Counter:
    """turn a Wikipedia dump (pages-articles) into a corpus"""
    import mwparserfromhell  # noqa: F401     (optional; if it is missing, fail before any work)
    counts, redirects = Counter(), {}

    def articles():
        """Yields every article, parsed. The dump is read twice, first for its redirects."""
        for title, kind, text in read_dump(path, say_language=True):    # a redirect may come last
            counts.update({"pages": 1, "pages: " + kind: 1})
            if kind == "article":
                counts["links"] += text.count("[[")
            elif kind != "other namespace":
                redirects[title] = canonical(text)      # "" for a disambiguation page
        pages = (page for page in read_dump(path) if page[1] == "article")
        try:
            with ProcessPoolExecutor(workers, initializer=signal.signal,    # workers ignore Ctrl-C
                                     initargs=(signal.SIGINT, signal.SIG_IGN)) as pool:
                while batch := list(islice(pages, 64 * workers)):   # a dump can exceed the memory
                    yield from pool.map(read_article, batch)
        except BrokenExecutor:
            raise UserError("a worker was killed; if memory is short, use fewer --workers")
    return write_corpus(out, articles(), counts, redirects)

def write_corpus(out, articles, counts, redirects={}) -> Counter:
    """Writes articles, in read_article's form, as a corpus with one paragraph per line. Prints and
    returns `counts` (of pages, links, mentions, …), to which the iterator `articles` also adds. In
    wiki, this iterator fills `redirects`, {title: target}, before it yields the first article."""
    def article_of(link):
        """The title of the article that a link leads to, or ""."""
        title = canonical(link.entity.lstrip(" :"))
        for _ in range(5):                                  # a longer chain is taken for a cycle
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
        if not counts["texts"]:
            raise UserError(f"{out} was not written: no article found; give another file")

    write_lines(out, lines())
    counts["links: outside the prose"] = (counts["links"] - counts["links: kept"]
                                          - counts["links: to no article"])
    counts["mentions: added"] = counts["mentions"] - counts["links: kept"]
    for what, n in sorted(counts.items()):
        print(f"{what:<46}{n:>12,}")
    return counts

# Matches a person's name, such as "John F. Kennedy" or "Ludwig van Beethoven", whose last word can
# stand for the whole name. "British Forces Germany" and "Rugby union in Ireland" do not match.
PERSON = re.compile(r"[A-Z][\w.'’-]+( [A-Z]\.)*( (van|von|de|der|del|della|di|da|al|la|le))* "
                    r"[A-Z][\w'’-]+$")

def names_for(shown, entity) -> list:
    """Names that can refer to `entity` on a page that links to it with the text `shown`."""
    base = without_bracket(entity)
    if base != entity:                          # "Mercury" may mean more than "Mercury (planet)"
        return [base] if shown == base else []
    if shown[:1].islower():                     # a common noun: add plural and capitalised forms
        noun = base[0].lower() + base[1:]
        return [noun, noun + "s", base, base + "s"]
    is_family_name = base.endswith(" " + shown) and PERSON.match(base)
    return [base, shown] if is_family_name else [base]

# Applied to the text around a name, with the name replaced by "\x01", its first letter and "\x01".
# A match means that the name may be part of a longer one: "dog-like", "North Karovia", "Karovia
# Airways". ("In Karovia" at the start of a sentence matches as well, so this mention is lost.)
PART = re.compile(r"-\x01|\x01-|\x01 [A-Z]|(?<!\S)[A-Z][^\s.!?:;]* \x01[A-Z]")

def extend_mentions(title, paragraphs) -> Iterator[tuple]:
    """Yields a page's paragraphs (text, mentions) with added mentions, since Wikipedia usually
    links an entity only once per page.

    The page's own title is linked everywhere. After a link, the names that names_for gives for it
    are linked. But a part of a title, such as "Einstein", is linked only if it never occurs before
    its link. A name that two entities share is linked only if the page is about one of them."""
    # True for "Anarchism", but also for "Karovia": a title does not show whether it is a name.
    is_noun = title[1:].islower() and "(" not in title
    own = names_for(title.lower() if is_noun else title, title) or [without_bracket(title)]
    entity_of, linked_at = dict.fromkeys(own, title), dict.fromkeys(own, (-1, 0))
    for p, (text, mentions) in enumerate(paragraphs):
        for m in mentions:
            for name in names_for(text[m.start:m.end], m.entity):
                linked_at.setdefault(name, (p, m.start))
                if entity_of.setdefault(name, m.entity) not in (m.entity, title):
                    entity_of[name] = None
    index = name_index(name for name, entity in entity_of.items()
                       if entity and len(name) > 2 and any(map(str.isalpha, name)))
    for p, (text, mentions) in enumerate(paragraphs):
        linked = {i for mention in mentions for i in range(mention.start, mention.end)}
        added = []
        for start, end, _ in find_mentions(text, index):
            name = text[start:end]
            entity = entity_of.get(name)
            around = f"{text[max(0, start - 40):start]}\x01{text[start]}\x01{text[end:end + 2]}"
            if not entity or not linked.isdisjoint(range(start, end)) or PART.search(around):
                continue
            if linked_at[name] < (p, start):
                added.append(Mention(start, end, entity))
            elif len(name) < len(entity):
                entity_of[name] = None
        yield text, sorted([*mentions, *added])

def kilt(path, out) -> Counter:
    """turn KILT's knowledge source into a corpus

    Headings and lists are left out. Each line is a page: {"wikipedia_title", "text": [title,
    paragraph, …], "anchors": [{"paragraph_id", "start", "end", "wikipedia_title" or "href"}, …]}"""
    def article(page):
        """The page in the form of read_article's result."""
        title, texts, anchors = fields("", page, wikipedia_title=[str], text=[list[str]],
                                       anchors=[list])
        paragraphs = [(text, []) for text in texts]
        for i, anchor in enumerate(anchors):
            p, start, end, target, href = fields(
                f"anchors[{i}].", anchor, paragraph_id=[int], start=[int], end=[int],
                wikipedia_title=[str, None], href=[str, None])
            if 0 <= p < len(texts) and 0 <= start < end <= len(texts[p]):
                target = target or unquote(href or "")
                paragraphs[p][1].append(Mention(start, end, canonical(target)))
        counts.update(pages=1, links=len(anchors))
        return canonical(title), [paragraph for paragraph in paragraphs[1:] if not
                                  re.match("Section::::|BULLET::::", paragraph[0])], 0

    counts = Counter()
    return write_corpus(out, read_records(path, article), counts)

# ---------------------------------------------------------------- the published task files

# A file from another task has other fields or values, so it is refused. Gold evidence is not used
# (§4.3). CLAIM_TASKS: the field with the claim, and {label in the file: one of CLAIM_LABELS}.
SAME = {label: label for label in CLAIM_LABELS}
CLAIM_TASKS = {"fever": ("claim", SAME), "fm2": ("text", SAME),
               "hover": ("claim", {"SUPPORTED": "SUPPORTS", "NOT_SUPPORTED": "REFUTES"})}
QUESTION_TASKS = ("triviaqa", "complexwebquestions", "entityquestions")

def published_example(record, name) -> dict:
    """A claim and its label, or a question and its answer texts, each before its aliases."""
    if name in CLAIM_TASKS:
        text_field, label_of = CLAIM_TASKS[name]
        text, label = fields("", record, **{text_field: [str], "label": [*label_of]})
        return {"text": text.strip(), "label": label_of[label]}
    if name == "triviaqa":
        question, answer = fields("", record, Question=[str], Answer=[dict])
        found = [fields("Answer.", answer, Value=[str], Aliases=[list[str]])]
    elif name == "entityquestions":
        question, answers = fields("", record, question=[str], answers=[list[str]])
        found = [("", answers)]
    else:
        question, answers = fields("", record, question=[str], answers=[list])
        found = [fields(f"answers[{i}].", answer, answer=[str, None], aliases=[list[str]])
                 for i, answer in enumerate(answers)]
    texts = [text for value, aliases in found for text in (value, *aliases) if text]
    if not texts:
        raise ValueError("it has no answer")
    return {"question": question.strip(), "answer_text": list(dict.fromkeys(texts))}

def published_examples(path, name) -> list:
    """The examples in a published file, which is a JSON list, {"Data": list} or JSON lines."""
    text, examples, n = "".join(open_text(path)), [], 0
    try:
        try:
            records = json.loads(text)
        except ValueError:
            records = [line for line in text.split("\n") if line.strip()]
        if isinstance(records, dict):
            records = records.get("Data", [records])    # without "Data": a single JSON line
        for n, record in enumerate(records, 1):
            record = json.loads(record) if isinstance(record, str) else record
            examples.append(published_example(record, name))
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: record {n}: {error}; is this a labelled {name} file?") from error
    return examples

def answer_key(name):
    """A name made comparable: lower case, without punctuation, "_" or a leading "a", "an" or "the".
    "The_Black_Sea" becomes "black sea", but "Vitamin A" does not become "vitamin"."""
    words = [word for word in split_words(name)[0] if word[:1].isalnum()]
    has_article = len(words) > 1 and words[0] in ("a", "an", "the")
    return " ".join(words[1:] if has_article else words) or name.strip()

def answer_entities(corpus) -> tuple:
    """({answer_key: entity}, the keys that match a title only without its final "(…)").

    corpus: the path of its file. A key refers to an entity whose title matches it, otherwise to
    one whose title without a final "(…)" matches it, otherwise to one with a mention whose text
    matches it. If several entities qualify, the key refers to the most frequent one."""
    named = Counter((m.entity, answer_key(text.text[m.start:m.end]))
                    for text in read_corpus(corpus) for m in text.mentions if m.entity)
    total = Counter(entity for entity, _ in named.elements())
    # Later items replace earlier ones, so the most frequent come last.
    entities = [entity for entity, _ in reversed(total.most_common())]
    found = {shown: entity for (entity, shown), _ in reversed(named.most_common())}
    short = {answer_key(without_bracket(entity)): entity for entity in entities}
    whole = {answer_key(entity): entity for entity in entities}
    return found | short | whole, short.keys() - whole.keys()

def task(name, paths, out, corpus=None):
    """turn the published files of a task into examples

    The "answers" of a question, possibly none, are the entities that its "answer_text" names."""
    if name in QUESTION_TASKS and corpus is None:
        raise UserError(f"{name}: give the corpus whose entities are the answers: --corpus FILE")
    examples, n_bracket = [], 0
    for path in paths:
        examples += published_examples(path, name)
    if not examples:
        raise UserError(f"{', '.join(map(str, paths))}: no records found")
    if name in QUESTION_TASKS:
        entity_of, by_bracket = answer_entities(corpus)
        for example in examples:
            keys = [answer_key(text) for text in example["answer_text"]]
            n_bracket += any(key in by_bracket for key in keys)
            found = dict.fromkeys(entity_of[key] for key in keys if key in entity_of)
            example["answers"] = list(found)
    n_answered = sum(bool(e.get("label") or e.get("answers")) for e in examples)
    print(f"{len(examples):,} examples, {n_answered:,} with a label or an answer that is an entity")
    if n_bracket:
        print(f"{n_bracket:,} examples have an answer that matches a title only without its final "
              '"(…)", as "Colima" matches "Colima (volcano)"')
    write_lines(out, examples)

# ---------------------------------------------------------------- command line

def check(path, preset="toy"):
    """count what a corpus contains, or list its first ten errors"""
    settings, errors = dict(TEXT_PRESETS[preset]), []
    texts = (text.text for text in read_corpus(path, errors))
    tokenizer = train_tokenizer(texts, settings.pop("vocab"))
    if errors:
        raise UserError("\n".join(errors[:10]))
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus.build(path, Path(folder, "corpus"), tokenizer, **settings)
    counts = dict(corpus.meta["counts"], mentions_to_evaluate_on=len(eval_mentions(corpus)))
    counts |= {f"mentions dropped, {why}": n for why, n in corpus.meta["dropped"].items()}
    for what, n in counts.items():
        print(f"{what.replace('_', ' '):<42}{n:>12,}")
    if not corpus.entity_count.any():
        print("There is nothing to train on: all linked mentions are held out.")
    if not counts["mentions_to_evaluate_on"]:
        print("There is nothing to evaluate: no held-out passage has exactly one mention of an "
              "entity that is also linked in another passage and is not the title of the held-out "
              'passage\'s article. Mark more texts with "split": "held_out".')
    print("A sample of mentions (in brackets), and the entities they are linked to:")
    for m in np.random.default_rng(0).permutation(len(corpus.mention_entity))[:10]:
        entity = corpus.entity_names[corpus.mention_entity[m]] or "nothing"
        print(printable(f"  {corpus.show_mention(m, 40)} -> {entity}"))

def toy(out, seed=0):
    """write the corpus and the examples of a made-up world"""
    os.makedirs(out, exist_ok=True)
    if os.listdir(out):
        raise UserError(f"{out} is not empty; give a new folder")
    lines, examples = toy_world(seed)
    for name, records in {"corpus": lines, **examples}.items():
        write_lines(Path(out, name + ".jsonl"), records)

def at_least(least):
    """An argparse type: a whole number from `least` to 2 ** 63 - 1."""
    def number(text):
        if not text.isdecimal() or not least <= int(text) < 2 ** 63:
            raise argparse.ArgumentTypeError(
                f"{text} is not a whole number from {least} to 2^63 - 1")
        return int(text)
    return number

def arguments_of(arguments) -> dict:
    """The parsed command line: the command's function as "run", and its arguments by name."""
    parser = argparse.ArgumentParser(description="Make, check and convert corpora and examples.")
    commands, add = parser.add_subparsers(required=True), {}
    for run in (toy, check, wiki, kilt, task):
        command = commands.add_parser(run.__name__, help=run.__doc__.partition("\n")[0])
        command.set_defaults(run=run)
        add[run] = command.add_argument
        if run is not check:
            add[run]("--out", required=True, help="folder" if run is toy else "file to write")
        if run in (check, wiki, kilt):
            add[run]("path", metavar="FILE")
    add[toy]("--seed", type=at_least(0), default=0)
    add[check]("--preset", choices=TEXT_PRESETS, default="toy", help="as in train.py")
    add[wiki]("--workers", type=at_least(1), default=1, help="number of processes")
    add[task]("name", choices=[*CLAIM_TASKS, *QUESTION_TASKS])
    add[task]("paths", nargs="+", metavar="FILE")
    add[task]("--corpus", help="for questions: the corpus whose entities are the answers")
    return vars(parser.parse_args(arguments))

def main(arguments=None) -> int:
    """Runs a command. Returns the exit status: 0, 1 (after an error) or 130 (after Ctrl-C)."""
    options = arguments_of(arguments)
    print_any_text()
    inputs = [options.get("path"), options.get("corpus"), *options.get("paths", ())]
    try:
        out, inputs = options.get("out"), {os.path.realpath(path) for path in inputs if path}
        written = [out, out + ".tmp"] if out else []        # .tmp: write_file's temporary file
        if inputs.intersection(map(os.path.realpath, written)):
            raise UserError(f"--out {out} would overwrite an input file; give another name")
        options.pop("run")(**options)
        sys.stdout.flush()
        return 0
    except (UserError, OSError, ImportError, MemoryError) as error:
        return complain("data.py", error)
    except KeyboardInterrupt:
        complain("data.py", "stopped; no file was left half-written")
        return 130

if __name__ == "__main__":
    sys.exit(main())
