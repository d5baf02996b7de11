"""data.py: Wikipedia dumps and the published task files.   pytest tests/test_wiki.py

The dumps are written here by hand; the real ones are used where they are: in $TOME_DATA, else ../shared/data.
"""
import bz2
import gzip
import io
import json
import os
import re
import sys
import tarfile
import time
import types
from pathlib import Path

import pytest

import data
from data import UserError

REAL = Path(os.environ.get("TOME_DATA", Path(__file__).parents[2] / "shared" / "data"))
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="no real data: set TOME_DATA to its folder")
DUMP = REAL / "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"


def escape(text):
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def page(title, text, ns=0, redirect=None):
    ns = "" if ns is None else f"<ns>{ns}</ns>"
    redirect = "" if redirect is None else f'<redirect title="{redirect}" />'
    return (f"<page><title>{escape(title)}</title>{ns}<id>1</id>{redirect}<revision><id>2</id>"
            f'<text xml:space="preserve">{escape(text)}</text></revision></page>\n')


def dump(path, *pages, head="", version="0.10"):
    xml = (f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-{version}/" version="{version}">'
           f'<siteinfo><namespaces>{head}<namespace key="0" case="first-letter" /></namespaces></siteinfo>\n'
           + "".join(pages) + "</mediawiki>")
    path.write_bytes(bz2.compress(xml.encode()) if path.suffix == ".bz2" else xml.encode())
    return path


def lines_of(path):
    with (gzip.open if str(path).endswith(".gz") else open)(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def accounted(counts):
    """Every [[ of the dump has one fate."""
    return sum(n for key, n in counts.items() if key[0] == "links") == counts["links"]


def read(tmp_path, text, *others, title="Page", extend=False):
    """(texts, [(shown, entity)], counts) of one article whose wikitext is `text`."""
    out = tmp_path / "corpus.jsonl"
    counts = data.write_wiki(dump(tmp_path / "d.xml", page(title, text), *others), out, extend)
    lines = [line for line in lines_of(out) if line["title"] == title]
    assert accounted(counts), counts
    shown = [(line["text"][m["start"]:m["end"]], m["entity"]) for line in lines for m in line["mentions"]]
    return [line["text"] for line in lines], shown, counts


# ---------------------------------------------------------------- links

@pytest.mark.parametrize("wikitext, text, shown, entity", [
    ("a [[dog]] b", "a dog b", "dog", "Dog"),
    ("a [[Dog|hound]] b", "a hound b", "hound", "Dog"),
    ("many [[dog]]s, [[Cat|kitten]]s", "many dogs, kittens", "dogs", "Dog"),
    ("[[Rome#History|past]]", "past", "past", "Rome"),
    ("[[ new_york  city ]]", "new_york city", "new_york city", "New york city"),
    ("[[:Rome]]", "Rome", "Rome", "Rome"),
    ("[[Mercury (planet)|]]", "Mercury (planet)", "Mercury (planet)", "Mercury (planet)"),
    ("[[AT&amp;T]]", "AT&T", "AT&T", "AT&T"),
    ("'''[[Rome|''Roma'']]'''", "Roma", "Roma", "Rome"),
    ("[[Dog]]<nowiki/>s", "Dogs", "Dog", "Dog"),
    ("[[Rome|the {{nowrap|city}}]]", "the city", "the city", "Rome"),
    ("[[Foo|a [b] c]]", "a [b] c", "a [b] c", "Foo"),
    ("[[iPod]]", "iPod", "iPod", "IPod"),
    ("[[Alien: Resurrection]]", "Alien: Resurrection", "Alien: Resurrection", "Alien: Resurrection")])
def test_links_become_mentions(tmp_path, wikitext, text, shown, entity):
    texts, mentions, _ = read(tmp_path, wikitext)
    assert texts == [text] and mentions[0] == (shown, entity)


@pytest.mark.parametrize("wikitext, text, why", [
    ("x[[File:a.jpg|thumb|A [[dog]] and [[a|a [[cat]]]].]]y", "xy", "to a file"),
    ("x[[Image:a.jpg]]y", "xy", "to a file"),
    ("x[[Category:Dogs|*]]", "x", "to a category"),
    ("x [[:Category:Dogs|kinds]]", "x kinds", "to a category"),
    ("x[[fr:Chien]]", "x", "to another language"),
    ("x [[:fr:Chien|chien]]", "x chien", "to another language"),
    ("a [[wikt:dog|dog]]", "a dog", "to another wiki"),
    ("a [[Help:Dog|dog]]", "a dog", "to another namespace"),
    ("[[#Past|past]]", "past", "to a section of its page"),
    ("see [[Old dog]]", "see Old dog", "to a redirect that leads to no article"),
    ("a [[dog", "a dog", "broken"),
    ("is [[Pet]]", "is Pet", "to a disambiguation page"),
    ("is [[X (disambiguation)|X]]", "is X", "to a disambiguation page"),
    ("a [[{{x}}|dog]]", "a dog", "broken"),
    ("a <!-- [[dog]] --> b", "a b", "in a comment"),
    ("a<ref name=x>[[dog]] {{</ref> b", "a b", "in a reference"),
    ("a {{b|{{c|[[dog]]}}}} d", "a d", "in a template"),
    ("a\n{|\n|-\n|[[dog]]\n{|\n|x\n|}\n|}\nb", "a", "in a table"),
    ("a\n<table><tr><td>[[dog]]<table></table></td></tr></table>", "a", "in a table"),
    ("a <math>[[dog]]</math> b", "a b", "in a <math>"),
    ("a <nowiki>[[dog]]</nowiki> b", "a b", "in a <nowiki>"),
    ("a\n==[[Dog]]==\nb", "a", "in a heading"),
    ("a\n==See also==\n===x===\n*[[Dog]]\n== B ==\nb", "a", "in a section of references"),
    ("a [[ ]] b", "a b", "broken")])
def test_links_that_are_no_mentions_are_counted_by_reason(tmp_path, wikitext, text, why):
    others = (page("Old dog", "", redirect="Older dog"), page("Older dog", "", redirect="Old dog"),
              page("Pet", "'''Pet''' may be:\n* [[Dog]]\n{{disambiguation}}"))
    texts, mentions, counts = read(tmp_path, wikitext, *others)
    assert texts[0] == text and mentions == [] and counts["links", why] == 1
    assert counts["links", "kept"] == 0 and counts["pages", "redirect"] == 2


def test_a_link_inside_a_link_counts_and_the_outer_does_not(tmp_path):
    texts, mentions, counts = read(tmp_path, "[[A|x [[B|y]] z]]")
    assert texts == ["x y z"] and mentions == [("y", "B")] and counts["links", "broken"] == 1


def test_redirects_are_followed_wherever_they_stand(tmp_path):
    chain = [page("USA", "", redirect="U.S.A.#Top"), page("U.S.A.", "#REDIRECT [[United_States]]"),
             page("Loop", "#redirect: [[Loop 2]]"), page("Loop 2", "", redirect="Loop"),
             page("Self", "#REDIRECT [[Self]]"), page("Shortcut", "#REDIRECT [[Wikipedia:Help]]")]
    text = "[[USA]] [[uSA|us]] [[Loop]] [[loop 2]] [[Self]] [[Shortcut]] [[United States]]"
    for pages in (chain, chain[::-1]):
        _, mentions, counts = read(tmp_path, text, *pages)
        assert [shown for shown, _ in mentions] == ["USA", "us", "United States"]
        assert {entity for _, entity in mentions} == {"United States"}
        assert counts["links", "to a redirect that leads to no article"] == 4


# ---------------------------------------------------------------- markup

@pytest.mark.parametrize("wikitext, texts", [
    ("'''A''' is ''b''.\n\n\nC.", ["A is b.", "C."]),
    ("a [http://x.org the site] b [https://y.org] c", ["a the site b c"]),
    ("a<br />b <small>c</small> __NOTOC__ &mdash;&nbsp;d", ["a b c — d"]),
    ("* a\n** b\n# c\n: d", ["a\nb\nc\nd"]),
    ("== H ==\na\n=== I ===\nb\n----\nc", ["a", "b", "c"]),
    ("A ({{lang-el|x}}; 384) is.", ["A (384) is."]),
    ("A ({{IPA|x}}) is {{convert|26|mi|km}} long{{cn}}.", ["A is 26 mi long."]),
    ("{{Infobox\n| a = [[b]]\n| c = {{d|}}\n|}}\nText {{lang|la|homo}}.", ["Text homo."]),
    ("a <ref name=\"x/y\" /> b <ref>c <ref /> d", ["a b c d"]),
    ("{{x|\n{|\n| y\n|}}}\nz", ["z"]),
    ("{| style\n| a {{b}}\n|}\nc", ["c"]),
    ("a {{b\nc\n\nd", ["a\nc", "d"]),
    ("{| x\n| y\n|-\nz", ["z"]),
    ("a }} b |} c ]] d", ["a b c d"]),
    ("<gallery>\nFile:a.jpg|[[b]]\n</gallery>\nc", ["c"]),
    ("x <!-- never closed [[a]]", ["x"])])
def test_markup_goes(tmp_path, wikitext, texts):
    assert read(tmp_path, wikitext)[0] == texts


def test_further_mentions_are_linked(tmp_path):
    text = ("'''Karovia''' has a king, [[Leon Holt]]. Leon Holt likes [[dog]]s. Dogs like Leon Holt.\n\n"
            "Leon Holt Junior, Karovia-based, of North Karovia saw a dog, hotdogs, [[Rome (city)|Rome]].\n\n"
            "Rome and Karovia's [[Demographics of Karovia|population]]; the population of Rome.")
    _, mentions, counts = read(tmp_path, text, title="Karovia", extend=True)
    assert mentions == [
        ("Karovia", "Karovia"), ("Leon Holt", "Leon Holt"), ("Leon Holt", "Leon Holt"), ("dogs", "Dog"),
        ("Dogs", "Dog"), ("Leon Holt", "Leon Holt"), ("dog", "Dog"), ("Rome", "Rome (city)"),
        ("Rome", "Rome (city)"),
        ("Karovia", "Karovia"), ("population", "Demographics of Karovia"), ("Rome", "Rome (city)")]
    assert counts["added"] == len(mentions) - counts["links", "kept"] == 8
    assert len(read(tmp_path, text, title="Karovia", extend=False)[1]) == counts["links", "kept"] == 4


def test_a_target_is_linked_after_its_link_only_and_the_longest_wins(tmp_path):
    text = "York lies near [[York]]. York and [[New York City]]: New York City is not York."
    _, mentions, _ = read(tmp_path, text, extend=True)
    assert [entity for _, entity in mentions] == ["York", "York", "New York City", "New York City", "York"]


def test_names_beyond_latin_1_and_beside_its_other_signs_are_linked_again(tmp_path):
    text = "[[Łódź]], [[Šešelj]]: of Łódź’s men—Šešelj—none? Who but Šešelj?"
    _, mentions, _ = read(tmp_path, text, extend=True)
    assert [name for name, _ in mentions] == ["Łódź", "Šešelj", "Łódź", "Šešelj", "Šešelj"]


# ---------------------------------------------------------------- the dump

def test_pages_that_are_no_articles_are_counted(tmp_path):
    path = dump(tmp_path / "d.xml.bz2", page("A", "text [[B]]"), page("Talk:A", "[[C]]", ns=1),
                page("E", " "), page("B", "", redirect="A"), page("A (disambiguation)", "[[A]]"),
                page("F", "x {{School disambiguation}}"), page("G", "a {{disambiguation needed}}"),
                page("H", "x {{other uses|H (disambiguation)}}"))
    counts = data.write_wiki(path, tmp_path / "out.jsonl.gz")
    assert {key[1]: n for key, n in counts.items() if key[0] == "pages"} == {
        "article": 3, "other namespace": 1, "empty page": 1, "redirect": 1, "disambiguation page": 2}
    assert [line["title"] for line in lines_of(tmp_path / "out.jsonl.gz")] == ["A", "G", "H"]
    assert accounted(counts) and not list(tmp_path.glob("*.tmp"))


def test_old_exports_and_names_of_namespaces_of_other_languages(tmp_path):
    head = '<namespace key="6">Datei</namespace><namespace key="100">Portal</namespace>'
    pages = {"A": "a [[Datei:x.jpg|mini]] [[b]]", "Portal:A": "b", "2001: A film": "c",
             "B": "#REDIRECT [[A]]"}
    path = dump(tmp_path / "d.xml", *(page(title, text, ns=None) for title, text in pages.items()), head=head,
                version="0.3")
    counts = data.write_wiki(path, tmp_path / "out.jsonl")
    assert [counts["pages", kind] for kind in ("article", "other namespace", "redirect")] == [2, 1, 1]
    assert lines_of(tmp_path / "out.jsonl")[0]["mentions"] == [{"start": 2, "end": 3, "entity": "A"}]


def test_any_number_of_workers_writes_the_same_file(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "BATCH", 2000)
    pages = (page(f"P{i}", f"text {i} [[P{i * 7 % 50}]] and [[R]] " * 9) for i in range(50))
    path = dump(tmp_path / "d.xml", *pages, page("R", "", redirect="P1"))
    one = data.write_wiki(path, tmp_path / "one.jsonl.gz")
    two = data.write_wiki(path, tmp_path / "two.jsonl.gz", workers=2)
    assert (tmp_path / "one.jsonl.gz").read_bytes() == (tmp_path / "two.jsonl.gz").read_bytes() and one == two
    assert [line["title"] for line in lines_of(tmp_path / "two.jsonl.gz")] == [f"P{i}" for i in range(50)]
    assert sum(1 for _ in data.read_corpus(tmp_path / "two.jsonl.gz")) == 50


ENTITIES = "".join(f'<!ENTITY {y} "{10 * f"&{x};"}">' for x, y in zip("abcdefgh", "bcdefghi"))
BOMB = (f'<!DOCTYPE m [<!ENTITY a "aaaaaaaaaa">{ENTITIES}]>'
        "<mediawiki><page><title>T</title><text>&i;</text></page></mediawiki>")


@pytest.mark.parametrize("content, said", [
    (bz2.compress(os.urandom(40000))[:20000], "cut short"), (b"BZh9 and no bz2", "cannot be read"),
    (b"", "not a whole MediaWiki dump"), (b"<html></html>", "where a MediaWiki dump has none"),
    (b"plain text", "not a whole MediaWiki dump"), (b"<mediawiki></mediawiki>", "holds no page"),
    (b"<mediawiki><page><title>T</title>", "not a whole MediaWiki dump"), (BOMB.encode(), "<!DOCTYPE>"),
    (b"<mediawiki>" + b"<page>" * 1000, "where a MediaWiki dump has none"),
    (b"<mediawiki><page><title>a & b</title></page></mediawiki>", "not a whole MediaWiki dump"),
    (b"<mediawiki><page><ns>x</ns><title>a</title></page></mediawiki>", "no number"),
    (bz2.compress(b"<mediawiki><page><text>" + b"a " * (1 << 24)), "a page of over")])
def test_a_file_that_is_no_whole_dump_gets_one_sentence_and_leaves_nothing(tmp_path, content, said):
    (tmp_path / "d.xml").write_bytes(content)
    start = time.time()
    with pytest.raises(UserError, match=re.escape(said)) as e:
        data.write_wiki(tmp_path / "d.xml", tmp_path / "out.jsonl")
    assert "d.xml" in str(e.value) and "\n" not in str(e.value) and time.time() - start < 5
    assert [p.name for p in tmp_path.iterdir()] == ["d.xml"]


def test_a_dump_that_is_missing_and_an_output_that_cannot_be_written(tmp_path):
    with pytest.raises(UserError, match="none.xml: cannot be read"):
        data.write_wiki(tmp_path / "none.xml", tmp_path / "out.jsonl")
    with pytest.raises(UserError, match="cannot be written"):
        data.write_wiki(dump(tmp_path / "d.xml", page("A", "a")), tmp_path / "no folder" / "out.jsonl")


@pytest.mark.parametrize("text", [
    "{{" * 20000, "{|\n" * 20000, "[[" * 20000, "[[a|" * 10000, "<ref>" * 9000, "<!--" * 9000, "<a " * 20000,
    "[[" * 9000 + "x" + "]]" * 9000, "{{" * 9000 + "}}" * 9000, "[[File:x|" * 9000 + "]]" * 9000,
    "[http:x " * 9000, "[http:" + "a" * 40000, "[http:x" + " " * 40000, "[[x|" + "[a" * 20000,
    "{{convert|" + "|" * 40000, "#redirect" + " " * 40000,
    "".join(f"[[Foo {i}]] Foo {i}.\n\n" for i in range(2000))], ids=lambda text: text[:12].strip())
def test_no_markup_takes_more_than_linear_time(tmp_path, text):
    start = time.process_time()
    _, _, counts = read(tmp_path, text, extend=True)
    assert time.process_time() - start < 3 and counts["pages", "article"] + counts["pages", "redirect"] == 1


def test_pages_are_read_as_a_stream(tmp_path):
    pages = (page(f"P{i}", "word " * 20000) for i in range(20))
    stream = data.read_dump(dump(tmp_path / "d.xml.bz2", *pages), {})
    first = next(stream)
    assert first.title == "P0" and len(list(stream)) == 19


@needs_real
def test_the_real_dump_is_accounted_for(tmp_path):
    counts = data.write_wiki(DUMP, tmp_path / "out.jsonl.gz")
    pages = {key[1]: n for key, n in counts.items() if key[0] == "pages"}
    assert pages == {"article": 98, "disambiguation page": 8, "redirect": 99, "other namespace": 1}
    with bz2.open(DUMP, "rt", encoding="utf-8") as file:        # all [[ but the one in an edit's comment
        texts = re.findall(r"<text.*?</text>", file.read(), re.S)
    assert counts["links"] == sum(t.count("[[") for t in texts) == 32475
    assert accounted(counts) and counts["links", "broken"] == counts["unclosed"] == 0
    texts = list(data.read_corpus(tmp_path / "out.jsonl.gz"))
    assert len(texts) == counts["texts"]
    assert sum(len(t.mentions) for t in texts) == counts["links", "kept"] + counts["added"]
    debris = re.compile(r"\[\[|\]\]|\{\{|\}\}|\{\||\|\}|''|</?[a-z]+>|[\x00-\x08]")
    assert not [t for t in texts if debris.search(t.text)]
    assert sum(t.text.count("|") for t in texts) == 3           # two are meant, one is an editor's slip
    for t in texts:
        assert all(t.text[m.start:m.end] == t.text[m.start:m.end].strip() != "" for m in t.mentions)
        assert all(a.end <= b.start for a, b in zip(t.mentions, t.mentions[1:]))


@needs_real
def test_the_real_tables_go(tmp_path):
    counts = data.write_wiki(REAL / "enwiki-table-markup.xml.bz2", tmp_path / "out.jsonl")
    assert accounted(counts) and counts["pages", "article"] == 5 and counts["links", "in a table"] > 2000
    debris = re.compile(r"\[\[|[{}|<>]|\]\]")
    assert not [line for line in lines_of(tmp_path / "out.jsonl") if debris.search(line["text"])]


# ---------------------------------------------------------------- task files

MENTIONS = [("the French capital", "Paris"), ("Paris", "Paris"), ("Mercury", "Mercury_(planet)"),
            ("United States of America", "United_States"), ("America", "United_States")]


@pytest.fixture
def corpus(tmp_path):
    with open(tmp_path / "corpus.jsonl", "w") as file:
        for shown, entity in MENTIONS:
            file.write(json.dumps({"title": entity, "text": f"{shown} is", "mentions": [
                {"start": 0, "end": len(shown), "entity": entity}]}) + "\n")
    return tmp_path / "corpus.jsonl"


def run(tmp_path, name, content, suffix="json", **options):
    path = tmp_path / f"published.{suffix}"
    if not isinstance(content, str):
        lines = [json.dumps(r) for r in content] if suffix == "jsonl" else [json.dumps(content, indent=1)]
        content = "\n".join(lines)
    path.write_text(content)
    data.task(name, [path], tmp_path / "examples.jsonl", **options)
    return lines_of(tmp_path / "examples.jsonl")


def test_claims(tmp_path, capsys):
    fever = [{"id": 1, "label": label, "claim": f"c {label}", "evidence": [[[1, 2, "Gold", 0]]]}
             for label in ("SUPPORTS", "REFUTES", "NOT ENOUGH INFO")] + [{"id": 4, "claim": "test"}]
    assert run(tmp_path, "fever", fever, "jsonl") == [
        {"text": f"c {label}", "label": label} for label in ("SUPPORTS", "REFUTES", "NOT ENOUGH INFO")
    ] + [{"text": "test", "label": None}]
    assert "1 without a label" in capsys.readouterr().out
    hover = [{"uid": "a", "claim": "c", "label": "SUPPORTED", "supporting_facts": [["Gold", 1]]},
             {"uid": "b", "claim": "d", "label": "NOT_SUPPORTED"}]
    assert [e["label"] for e in run(tmp_path, "hover", hover)] == ["SUPPORTS", "REFUTES"]
    fm2 = [{"text": "c", "label": "REFUTES", "gold_evidence": [{"text": "Gold"}],
            "mentions": [{"start": 0, "end": 1, "entity": None}]}]
    examples = run(tmp_path, "fm2", fm2, "jsonl")
    assert examples == [{key: fm2[0][key] for key in ("text", "label", "mentions")}]


def test_answers_are_mapped_by_title_alias_and_normalised_text(tmp_path, corpus, capsys):
    trivia = {"Domain": "unfiltered", "Data": [
        {"Question": "q1", "QuestionId": "a", "EntityPages": [], "SearchResults": [],
         "Answer": {"Value": "City of Light", "Aliases": ["the paris", "City of Light"], "Type": "x"}},
        {"Question": "q2", "Answer": {"Value": "mercury", "Aliases": []}},
        {"Question": "q3", "Answer": {"Value": "blue", "Aliases": ["azure"]}}, {"Question": "test"}]}
    examples = run(tmp_path, "triviaqa", trivia, corpus=corpus)
    assert [e["answers"] for e in examples] == [["Paris"], ["Mercury_(planet)"], [], []]
    assert examples[0]["answer_text"] == ["City of Light", "the paris"] and set(examples[0]) == {
        "question", "answer_text", "answers"}
    assert "4 questions, 3 with answers; for 2 an answer is an entity (66.7%)" in capsys.readouterr().out
    answers = [{"answer_id": "m.1", "answer": "U.S.A.", "aliases": ["united_states of America!"]},
               {"answer_id": "m.2", "answer": None, "aliases": ["PARIS"]}]
    cwq = [{"ID": "x", "question": "q", "answers": answers, "sparql": ""}, {"question": "test"}]
    examples = run(tmp_path, "complexwebquestions", cwq, corpus=corpus)
    assert [e["answers"] for e in examples] == [["United_States", "Paris"], []]
    entity = [{"question": "q", "answers": ["United States of America"]}]
    assert run(tmp_path, "entityquestions", entity, corpus=corpus)[0]["answers"] == ["United_States"]


def test_answers_are_mapped_to_a_list_of_entities(tmp_path):
    (tmp_path / "names.txt").write_text("The_Black_Sea\nMercury_(planet)\nMercury\n\n")
    examples = run(tmp_path, "entityquestions", [{"question": "q", "answers": ["black sea", "mercury"]}],
                   entities=tmp_path / "names.txt")
    assert examples[0]["answers"] == ["The_Black_Sea", "Mercury"]       # before Mercury_(planet)
    with pytest.raises(UserError, match="--corpus or --entities"):
        run(tmp_path, "entityquestions", [{"question": "q", "answers": ["a"]}])


def test_an_archive_is_read_as_it_is(tmp_path, corpus):
    with tarfile.open(tmp_path / "train.tar.xz", "w:xz") as archive:
        for name in ("train/P1.json", "train/P2.json", "train/README.md"):
            content = json.dumps([{"question": name, "answers": ["Paris"]}]).encode()
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    data.task("entityquestions", [tmp_path / "train.tar.xz"], tmp_path / "out.jsonl", corpus=corpus)
    assert [e["question"] for e in lines_of(tmp_path / "out.jsonl")] == ["train/P1.json", "train/P2.json"]
    whole = (tmp_path / "train.tar.xz").read_bytes()
    (tmp_path / "train.tar.xz").write_bytes(whole[:len(whole) // 2])
    with pytest.raises(UserError, match="train.tar.xz: not a whole archive"):
        data.task("entityquestions", [tmp_path / "train.tar.xz"], tmp_path / "out.jsonl", corpus=corpus)


@pytest.mark.parametrize("name, content, suffix, said", [
    ("fever", [{"claim": "a", "label": "SUPPORTS"}, {"claim": 3, "label": "SUPPORTS"}], "jsonl",
     'jsonl:2: "claim" is not a str'),
    ("fever", [{"label": "SUPPORTS"}], "jsonl", '"claim" is missing'),
    ("fm2", [{"text": "a", "label": 1}], "jsonl", '"label" is 1'),
    ("hover", [{"claim": "a", "label": ["SUPPORTED"]}], "json", "json: record 1: "),
    ("hover", '[{"claim": "a"', "json", "not JSON"),
    ("fever", '{"claim": "a", "label": "SUPPORTS"}\n{"cla', "jsonl", "jsonl:2: not JSON"),
    ("hover", [3], "json", "not a JSON object"),
    ("hover", "[]", "json", "holds no record"),
    ("fever", "", "jsonl", "holds no record"),
    ("fever", "[" * 9999, "json", "not JSON"),
    ("triviaqa", {"Data": [{"Question": "q", "Answer": {"Aliases": []}}]}, "json", "record 1: its answers"),
    ("triviaqa", {"Data": [{"Question": "q", "Answer": {"Value": "a", "Aliases": "b"}}]}, "json",
     "its answers"),
    ("complexwebquestions", [{"question": "q", "answers": ["Paris"]}], "json", "its answers"),
    ("entityquestions", [{"question": "q", "answers": "Paris"}], "json", "its answers"),
    ("entityquestions", [{"question": "q", "answers": [1]}], "json", "an answer is not a string"),
    ("entityquestions", [{"question": None, "answers": []}], "json", '"question" is not a string')])
def test_a_bad_record_is_named(tmp_path, corpus, name, content, suffix, said):
    with pytest.raises(UserError, match=re.escape(said)) as e:
        run(tmp_path, name, content, suffix, corpus=corpus)
    assert "published." in str(e.value) and "\n" not in str(e.value)


@needs_real
@pytest.mark.parametrize("name, file, counts", [
    ("fever", "fever/paper_dev.jsonl", {"SUPPORTS": 3333, "REFUTES": 3333, "NOT ENOUGH INFO": 3333}),
    ("hover", "hover/hover_dev_release_v1.1.json", {"SUPPORTS": 2000, "REFUTES": 2000}),
    ("fm2", "fm2/dev.jsonl", {"SUPPORTS": 596, "REFUTES": 573})])
def test_the_real_claims(tmp_path, name, file, counts):
    data.task(name, [REAL / file], tmp_path / "out.jsonl")
    labels = [line["label"] for line in lines_of(tmp_path / "out.jsonl")]
    assert {label: labels.count(label) for label in set(labels)} == counts


@pytest.mark.slow
@needs_real
def test_the_real_questions_agree_with_the_pairing_that_comes_with_them(tmp_path):
    names = {line.split('"title": "')[1].split('"')[0]
             for line in gzip.open(REAL / "wikispeedia_linked.jsonl.gz", "rt", encoding="utf-8")}
    (tmp_path / "names.txt").write_text("\n".join(sorted(names)), "utf-8")
    data.task("entityquestions", [REAL / "paired" / "entityquestions_train.jsonl"], tmp_path / "out.jsonl",
              entities=tmp_path / "names.txt")
    pairs = [(set(line["answers"]), set(record["corpus_answers"])) for line, record in
             zip(lines_of(tmp_path / "out.jsonl"), lines_of(REAL / "paired" / "entityquestions_train.jsonl"))]
    assert len(pairs) == 420 and sum(bool(ours) for ours, _ in pairs) > 340     # the others need aliases
    assert all(ours <= theirs for ours, theirs in pairs)


# ---------------------------------------------------------------- noun chunks

def test_noun_chunks_without_spacy_are_one_sentence(monkeypatch):
    data._pipeline.cache_clear()
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises(UserError, match="spaCy"):
        data.noun_chunks("The song was Hungry.")


def test_noun_chunks_are_mentions(monkeypatch):
    some = types.SimpleNamespace
    found = some(noun_chunks=[some(start_char=0, end_char=8)])
    spacy = some(util=some(get_installed_models=lambda: ["de_x", "en_x"]),
                 load=lambda name, exclude: {"en_x": lambda text: found}[name])
    monkeypatch.setitem(sys.modules, "spacy", spacy)
    data._pipeline.cache_clear()
    assert data.noun_chunks("The song was Hungry.") == [data.Mention(0, 8, None)]
    data._pipeline.cache_clear()
