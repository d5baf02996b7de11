"""Compares the model's layers and losses with plain loops.   python -m pytest tests/test_model.py"""
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from encoder import Config, Packing, TransformerBlock
from memory import BatchMemory, EntityTable, GivenMemory, MemoryAttention, MentionMemory
from tome import (TOME, BatchTOME, coreference_loss, entity_prediction_loss, fit_retrieval, mlm_loss,
                  sinusoidal_positions, split_into_blocks)

TINY = Config(vocab_size=40, hidden=16, n_heads=2, intermediate=24, n_initial=1, n_upper=2, n_blocks=2, max_positions=12,
              dropout=0.0, key_dim=4, value_dim=6, coref_dim=4, k=5, k_answer=5, init_std=0.3)

class Mentions:
    """The flat mention arrays of a batch of 3 passages; mentions 1 and 2 start at the same token."""
    row = torch.tensor([0, 0, 0, 1, 2, 2])
    start = torch.tensor([1, 3, 3, 0, 2, 4])
    end = torch.tensor([2, 7, 5, 4, 3, 6])
    passage = torch.tensor([7, 7, 7, 8, 9, 9])
    entity = torch.tensor([1, 2, 3, 1, 2, 0])

def memory_of(n=30, seed=0):
    g = torch.Generator().manual_seed(seed)
    return MentionMemory(torch.randn(n, 4, generator=g), torch.randn(n, 6, generator=g),
                         torch.randint(1, 6, (n,), generator=g), torch.arange(n) // 3, torch.arange(n))

def layer_norm(x, norm):
    return (x - x.mean()) / math.sqrt(x.var(unbiased=False) + 1e-12) * norm.weight + norm.bias

def batch_memory(table):
    return BatchMemory(table.keys, table.values, table.entity, table.passage)

def attention_by_hand(H, layer, memory, k):
    """Eq. 1 and 6-9, for one mention and one memory at a time."""
    M, keys, values, passages = H.clone(), memory.keys, memory.values, memory.passage
    for row, s, e, p in zip(Mentions.row, Mentions.start, Mentions.end, Mentions.passage):
        query = layer.query.linear.weight @ torch.cat([H[row, s], H[row, e]]) + layer.query.linear.bias
        scores = sorted(((float(query @ keys[i]), i) for i in range(len(keys)) if passages[i] != p), reverse=True)[:k]
        if not scores:
            continue
        total = sum(math.exp(score) for score, _ in scores)
        value = sum(math.exp(score) / total * values[i] for score, i in scores)
        M[row, s] += layer.up.weight @ value + layer.up.bias
    return torch.stack([torch.stack([layer_norm(x, layer.norm) for x in row]) for row in M])

def same_weights(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))

@pytest.mark.parametrize("n_upper, sources", [(1, [[0], [0]]), (2, [[0], [1]]), (4, [[0, 1], [2, 3]])])
def test_tome_2_starts_with_batch_tomes_layers_in_order_and_two_copies_of_its_memory_layer(n_upper, sources):
    one = TOME(replace(TINY, n_upper=n_upper, n_blocks=1))
    two = TOME(replace(TINY, n_upper=n_upper))
    two.load_state_dict(split_into_blocks(one.state_dict(), two.config))
    layers, memory = one.blocks[0].transformer.layers, one.blocks[0].memory_attention
    x = torch.nn.functional.layer_norm(torch.randn(6, TINY.hidden), (TINY.hidden,), eps=1e-12)
    for block, numbers in zip(two.blocks, sources, strict=True):
        for added in block.transformer.layers[len(numbers):]:       # an idle layer above a single layer
            whole = Packing(torch.ones(1, 6, dtype=torch.bool))
            torch.testing.assert_close(added(x, whole, whole), x)
        assert len(block.transformer.layers) == (2 if n_upper == 1 else len(numbers))
        for mine, number in zip(block.transformer.layers, numbers):
            assert same_weights(mine, layers[number])
        assert same_weights(block.memory_attention, memory)
    for name, tensor in one.state_dict().items():
        assert name.startswith("blocks.") or torch.equal(tensor, two.state_dict()[name])
    same = split_into_blocks(one.state_dict(), one.config)
    assert same.keys() == one.state_dict().keys() and all(torch.equal(t, same[n]) for n, t in one.state_dict().items())

@torch.no_grad()
def test_the_fit_whitens_keys_and_regresses_queries_onto_their_own_keys():
    torch.manual_seed(5)
    model = BatchTOME(TOME(replace(TINY, max_positions=40)))
    tome, batches = model.tome, [read_batch(seed) for seed in range(40)]
    fit_retrieval(model, batches, self_score=20.0)
    spans = {"key": [], "query": [], "answer": []}
    for batch in batches:
        mask, columns = batch.attention_mask, (batch.row, batch.start, batch.end, batch.entity)
        H0 = tome.initial(tome.embeddings(batch.tokens), mask)
        H = {"query": H0, "answer": H0, "key": tome.initial(tome.embeddings(batch.unmasked), mask)}
        for block in tome.blocks:
            H["answer"], H["key"] = block.transformer(H["answer"], mask), block.transformer(H["key"], mask)
        for r, s, e, entity in zip(*(column.tolist() for column in columns)):
            if entity:
                for name in spans:
                    spans[name].append(torch.cat([H[name][r, s], H[name][r, e]]))
    spans = {name: torch.stack(rows) for name, rows in spans.items()}
    keys = model.key.linear(spans["key"]).double().numpy()
    np.testing.assert_allclose(np.cov(keys.T, bias=True), 20 / 4 * np.eye(4), atol=0.05)
    for name, layer in (("query", tome.blocks[0].memory_attention.query), ("answer", tome.entity_query)):
        X = spans[name].double().numpy()
        X = X - X.mean(0)
        ridge = np.sqrt(0.1 * np.mean(np.sum(X ** 2, axis=0))) * np.eye(X.shape[1])
        W = np.linalg.lstsq(np.vstack([X, ridge]), np.vstack([keys, np.zeros((X.shape[1], 4))]), rcond=None)[0]
        expected = X @ W
        expected *= 20 / (expected * keys).sum(1).mean()
        np.testing.assert_allclose(layer.linear(spans[name]).double().numpy(), expected, atol=1e-3 * np.abs(expected).max())

@pytest.mark.parametrize("attends_to", ["own values", "nothing"])
def test_before_the_fit_a_mention_gets_its_own_value_from_the_unmasked_text_or_nothing(attends_to):
    torch.manual_seed(3)
    model = BatchTOME(TOME(replace(TINY, n_blocks=1, max_positions=40))).eval()
    batch = read_batch(0)
    _, _, H, found = model(batch, attends_to)
    unmasked, _ = model.tome(batch.unmasked, batch.attention_mask)
    values = model.value(unmasked.detach(), batch.row, batch.start, batch.end)
    if attends_to == "own values":
        torch.testing.assert_close(found[0].value, values)
    else:
        assert found == []
    layer = model.tome.blocks[0].memory_attention
    H0 = model.tome.forward_initial(batch.tokens, batch.attention_mask).clone()
    for m, (row, start) in enumerate(zip(batch.row.tolist(), batch.start.tolist())):
        if attends_to == "own values":
            H0[row, start] = H0[row, start] + layer.up(values[m])
    expected = model.tome.blocks[0].transformer(layer.norm(H0), batch.attention_mask)
    torch.testing.assert_close(H, expected, atol=1e-5, rtol=1e-5)

def test_position_embeddings_start_as_sinusoids_scaled_like_the_other_embeddings():
    model = BatchTOME(TOME(TINY))
    sinusoidal_positions(model)
    position, std = model.tome.embeddings.position.weight.detach(), TINY.init_std
    for p in range(TINY.max_positions):
        for i in range(0, TINY.hidden, 2):
            angle = p / 10000 ** (i / TINY.hidden)
            assert position[p, i].item() == pytest.approx(std * math.sqrt(2) * math.sin(angle), abs=1e-5)
            assert position[p, i + 1].item() == pytest.approx(std * math.sqrt(2) * math.cos(angle), abs=1e-5)
    assert position.square().mean().sqrt().item() == pytest.approx(std, rel=1e-3)

def read_batch(seed, n_mentions=6):
    """A batch of random tokens with mentions at random places; the third mention is not linked."""
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(0, 8, (n_mentions,), generator=g)
    tokens = torch.randint(0, 40, (3, 12), generator=g)
    masked = tokens.masked_fill(torch.rand(3, 12, generator=g) < 0.3, 4)
    row, entity = torch.arange(n_mentions) % 3, torch.arange(n_mentions) + 1
    entity[2] = 0
    return SimpleNamespace(tokens=masked, unmasked=tokens, attention_mask=torch.ones(3, 12, dtype=bool), row=row,
                           passage=row, start=start, end=start + 2, entity=entity)

MEMORIES = {"whole corpus": memory_of(), "all buckets": memory_of().changed(n_search=99),
            "batch": batch_memory(memory_of()),
            "only the passage of mentions 0, 1, 2": memory_of(4).changed(passage=torch.full((4,), 7)),
            "emptied": memory_of().sample(0), "emptied buckets": memory_of().changed(n_search=2).sample(0)}

@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
@torch.no_grad()
def test_memory_attention_follows_eq_1_and_6_to_9_and_excludes_the_mentions_own_passage(memory):
    """A mention without an allowed memory gets no update."""
    torch.manual_seed(1)
    H, layer = torch.randn(3, 8, 16), MemoryAttention(TINY)
    M, found = layer(H, Mentions, memory)
    k = 30 if isinstance(memory, BatchMemory) else 5            # the whole batch, or the 5 best
    torch.testing.assert_close(M, attention_by_hand(H, layer, memory, k), atol=1e-5, rtol=1e-5)
    has_any = (Mentions.passage[:, None] != memory.passage).any(1)
    assert torch.allclose(found.weights.sum(-1), has_any.float()) and not found.value[~has_any].any()

@pytest.mark.parametrize("others_search", [False, True])
def test_given_memories_have_the_wanted_entity_and_another_passage_and_other_mentions_may_search(others_search):
    torch.manual_seed(1)
    H, layer, table = torch.randn(3, 8, 16), MemoryAttention(TINY), memory_of()
    given = GivenMemory(table, 50)
    own = table.entity[table.passage == 7]                      # the passage of mentions 0, 1, 2
    given.wanted = torch.tensor([int(own[0]), 0, 49, int(table.entity[20]), int(table.entity[25]), 0])  # no row has 49
    given.others_search = others_search
    _, found = layer(H, Mentions, given)
    _, searched = layer(H, Mentions, table)
    query = layer.query(H, Mentions.row, Mentions.start, Mentions.end).detach()
    for m, wanted in enumerate(given.wanted.tolist()):
        ids = [i for i in found.ids[m].tolist() if i >= 0]
        if wanted == 49 or wanted == 0 and not others_search:
            assert not ids
        elif wanted:
            assert all(table.entity[i] == wanted and table.passage[i] != Mentions.passage[m] for i in ids)
        else:
            assert ids == [i for i in searched.ids[m].tolist() if i >= 0]
        expected, total = torch.zeros(table.values.shape[1]), 0.0
        for i in ids:
            weight = math.exp(float(query[m] @ table.keys[i]))
            expected, total = expected + weight * table.values[i], total + weight
        torch.testing.assert_close(found.value[m], expected / max(total, 1e-9), atol=1e-5, rtol=1e-5)
    assert (found.ids[3:5] >= 0).any()
    assert found.value.requires_grad == others_search           # queries get a gradient only from a search
    if others_search:
        assert (given.found.ids == searched.ids).all() and given.found.scores.requires_grad
        for is_searched in (False, True):
            found.value[(given.wanted == 0) == is_searched].sum().backward(retain_graph=True)
            assert layer.query.linear.weight.grad.any() == is_searched

@pytest.mark.parametrize("n_search", [0, 99])           # 99: all buckets
def test_scores_are_float32_under_bfloat16_autocast(n_search):
    """bfloat16 would drop digits that matter in the exponentials of eq. 7."""
    torch.manual_seed(0)
    keys, query, ids = 1 + torch.randn(500, 16), 1 + torch.randn(40, 16), torch.arange(500)
    table = MentionMemory(keys, keys, ids % 7, ids // 5, ids).changed(n_search=n_search)
    with torch.autocast("cpu", torch.bfloat16):
        assert (query @ keys.T).dtype == torch.bfloat16         # the type without ann.dot
        found = table.retrieve(query, ids[:40], 7, 7)
        scored = batch_memory(table).attend(query, ids[:40]).scores
        loss = coreference_loss(keys, table.entity, table.passage)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, coreference_loss(keys, table.entity, table.passage))
    scores = (query.double() @ keys.double().T).masked_fill(ids[:40, None] == table.passage, -torch.inf)
    torch.testing.assert_close(scored.double(), scores, atol=1e-5, rtol=1e-6)
    assert torch.equal(found.ids, scores.argsort(1, descending=True)[:, :7])
    torch.testing.assert_close(found.scores.double(), scores.gather(1, found.ids), atol=1e-5, rtol=1e-6)

def test_the_entity_table_is_attended_to_as_a_whole_except_row_0():
    table = EntityTable(replace(TINY, n_entities=4))
    query = torch.randn(2, 4, generator=torch.Generator().manual_seed(3))
    found = table.attend(query)
    for m in range(2):
        scores = [(query[m] @ table.keys[e]).item() for e in (1, 2, 3)]         # row 0 is no entity
        weights = [math.exp(score) / sum(map(math.exp, scores)) for score in scores]
        torch.testing.assert_close(found.weights[m], torch.tensor([0.0, *weights]))
        torch.testing.assert_close(found.value[m], sum(w * table.values[e] for e, w in enumerate(weights, 1)))
    found.value.sum().backward()
    assert table.keys.grad.abs().sum() > 0 and table.values.grad.abs().sum() > 0

@torch.no_grad()
def test_what_a_passage_retrieves_and_its_output_do_not_depend_on_the_other_passages_of_its_batch():
    torch.manual_seed(3)
    tome, table = TOME(TINY), memory_of()
    tokens, lengths = torch.randint(1, 40, (3, 9)), [9, 5, 7]
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    together, _ = tome(tokens, mask, Mentions, table)
    for row, n in enumerate(lengths):
        own = Mentions.row == row
        mentions = SimpleNamespace(row=Mentions.row[own] - row, start=Mentions.start[own], end=Mentions.end[own],
                                   passage=Mentions.passage[own])
        alone, _ = tome(tokens[row:row + 1, :n], torch.ones(1, n, dtype=torch.bool), mentions, table)
        torch.testing.assert_close(together[row, :n], alone[0], atol=1e-5, rtol=0)
        assert not together[row, n:].any()

def test_a_block_gives_each_passage_of_a_batch_the_output_and_gradients_that_it_has_alone():
    """encoder.Packing also computes 26 of the 190 padding positions."""
    torch.manual_seed(0)
    block = TransformerBlock(TINY, 2).eval()
    mask = torch.arange(21) < torch.arange(2, 22)[:, None]
    x = torch.randn(20, 21, TINY.hidden)
    together = block(x, mask)
    together.square().sum().backward()
    gradients = [p.grad.clone() for p in block.parameters()]
    block.zero_grad()
    for row, n, read in zip(x, mask.sum(1).tolist(), together):
        alone = block(row[None, :n], torch.ones(1, n, dtype=torch.bool))[0]
        torch.testing.assert_close(read[:n], alone, atol=1e-5, rtol=1e-5)
        assert read[n:].count_nonzero() == 0
        alone.square().sum().backward()
    for gradient, p in zip(gradients, block.parameters()):
        torch.testing.assert_close(gradient, p.grad, atol=1e-3, rtol=1e-3)

@pytest.mark.parametrize("entity", [[1, 1, 2, 2, 1, 3, 0, 0, 4, 2, 1, 4], [9] + 11 * [7]],
                         ids=["", "some without a negative"])
def test_coreference_loss_is_the_mean_cross_entropy_over_positives_app_a2(entity):
    """A mention with a positive but no negative has loss 0 and counts in the mean."""
    torch.manual_seed(0)
    z, passage = torch.randn(12, 4, requires_grad=True), [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 2]
    losses = []
    for m in range(12):
        if entity[m] == 0:
            continue
        others = [i for i in range(12) if entity[i] > 0 and passage[i] != passage[m]]
        positive = [i for i in others if entity[i] == entity[m]]
        negative = sum(torch.exp(z[m] @ z[i]) for i in others if entity[i] != entity[m])
        if positive:
            losses.append(sum(-torch.log(torch.exp(z[m] @ z[i]) / (torch.exp(z[m] @ z[i]) + negative))
                              for i in positive) / len(positive))
    by_hand = sum(losses) / len(losses)
    loss = coreference_loss(z, torch.tensor(entity), torch.tensor(passage))
    torch.testing.assert_close(loss, by_hand)
    torch.testing.assert_close(torch.autograd.grad(loss, z)[0], torch.autograd.grad(by_hand, z)[0])

@pytest.mark.parametrize("entity, passage", [([0, 0, 0], [1, 2, 3]), ([1, 1, 1], [1, 1, 1]), ([1, 2, 3], [1, 2, 3]),
                                             ([1, 1, 1], [1, 2, 3]), ([], [])],
                         ids=["none linked", "one passage", "no positive", "no negative", "no mention"])
def test_coreference_loss_of_degenerate_batches_is_zero_and_finite(entity, passage):
    z = torch.randn(len(entity), 4, requires_grad=True)
    loss = coreference_loss(z, torch.tensor(entity, dtype=torch.long), torch.tensor(passage, dtype=torch.long))
    loss.backward()
    assert loss == 0 and not z.grad.any()

def test_entity_prediction_is_minus_log_of_eq_10_over_mentions_with_a_retrieved_memory():
    scores = torch.tensor([[2., 1., 0., -1.], [1., 1., -torch.inf, -torch.inf], [3., 2., 1., 0.], [-torch.inf] * 4,
                           [1., 2., 3., 4.]], requires_grad=True)
    memory_entity = torch.tensor([[5, 6, 5, 7], [6, 6, 0, 0], [1, 2, 3, 4], [0, 0, 0, 0], [9, 9, 9, 9]])
    entity = torch.tensor([5, 6, 9, 5, 0])             # 2: entity not retrieved, 3: nothing retrieved, 4: not linked
    losses = []
    for m in (0, 1):
        e = [math.exp(s) for s in scores[m].tolist()]
        losses.append(-math.log(sum(x for x, j in zip(e, memory_entity[m]) if j == entity[m]) / sum(e)))
    loss = entity_prediction_loss(scores, memory_entity, entity)
    assert loss.item() == pytest.approx(sum(losses) / 2, abs=1e-6)
    nothing = entity_prediction_loss(scores[2:], memory_entity[2:], entity[2:])
    assert nothing == 0
    (loss + nothing).backward()
    assert torch.isfinite(scores.grad).all() and (scores.grad[2:] == 0).all()

def test_mlm_loss_is_zero_if_no_token_is_masked():
    assert mlm_loss(torch.empty(0, 7), torch.empty(0, dtype=torch.long)) == 0

def test_buckets_are_rebuilt_only_if_keys_or_passages_change():
    memory = memory_of().changed(n_search=2)
    memory.search(memory.keys[:1], 1, None)                                 # builds the buckets
    assert memory.shuffled().index is memory.index                          # only the values have moved
    assert memory.changed(n_search=3).index is memory.index                 # the same buckets, more of them searched
    for changed in (memory.select(torch.arange(30) > 3), memory.by_article(np.arange(10))):
        assert changed.index is None is not memory.index and changed.n_search == 2

def test_sample_shuffled_and_by_article_change_only_what_they_should():
    table = memory_of()
    assert len(table.sample(0)) == 0
    half = table.sample(0.5)
    assert 0 < len(half) < 30 and all((half.passage == p).sum() == 3 for p in half.passage)
    shuffled = table.shuffled()
    assert torch.equal(shuffled.keys, table.keys) and not torch.equal(shuffled.values, table.values)
    assert torch.equal(shuffled.values.sort(0).values, table.values.sort(0).values)
    grouped = table.by_article(np.arange(10) // 2)
    assert grouped.passage.tolist() == [i // 6 for i in range(30)]

@torch.no_grad()
def test_a_block_with_is_used_computes_the_same_there_and_zero_elsewhere():
    """The last layer must compute 150 rows. Packing adds other rows, even padding, to reach 256.
    TransformerBlock adds 3 columns of padding to the 45."""
    torch.manual_seed(8)
    block = TransformerBlock(TINY, 2).eval()
    x, length = torch.randn(12, 45, TINY.hidden), torch.randint(5, 46, (12,))
    mask = torch.arange(45) < length[:, None]
    is_used = torch.zeros_like(mask).flatten()
    is_used[mask.flatten().nonzero()[:, 0][torch.randperm(int(mask.sum()))[:150]]] = True
    is_used = is_used.view_as(mask)
    whole, ours = block(x, mask), block(x, mask, is_used)
    torch.testing.assert_close(ours[is_used], whole[is_used], atol=1e-5, rtol=1e-5)
    assert not ours[~is_used].any() and whole[mask & ~is_used].any()
