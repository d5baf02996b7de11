"""Checks data.py on Wikipedia dumps, KILT's knowledge source and task files.   pytest tests/test_wiki.py

Most tests write their own dumps. Real dumps are used if $TOME_DATA, by default ../shared/data, contains them.
"""
import bz2
import gzip
import importlib.util
import json
import multiprocessing
import os
import random
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from xml.sax.saxutils import escape

import pytest

import data
from data import UserError

REAL = Path(os.environ.get("TOME_DATA", Path(__file__).parents[2] / "shared" / "data"))
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="no real data: set TOME_DATA to its folder")
DUMP = REAL / "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"

def page(title, text, ns=0, redirect=None):
    redirect = f'<redirect title="{redirect}" />' if redirect else ""
    return (f"<page><title>{escape(title)}</title><ns>{ns}</ns><id>1</id>{redirect}<revision><id>2</id>"
            f'<text xml:space="preserve">{escape(text)}</text></revision></page>\n')

def dump(path, *pages):
    """Writes a dump. Skips the test if the wikitext parser is not installed."""
    pytest.importorskip("mwparserfromhell")
    xml = ('<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/" version="0.10">'
           '<siteinfo><namespaces><namespace key="0" case="first-letter" /></namespaces></siteinfo>\n'
           + "".join(pages) + "</mediawiki>")
    path.write_bytes(bz2.compress(xml.encode()) if path.suffix == ".bz2" else xml.encode())
    return path

def lines_of(path):
    with (gzip.open if str(path).endswith(".gz") else open)(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]

needs_parser = pytest.mark.skipif(importlib.util.find_spec("mwparserfromhell") is None,
                                  reason="mwparserfromhell is not installed")

def accounted(counts):
    """Whether each page and each [[ in the dump is counted exactly once."""
    return min(counts.values()) >= 0 and all(
        counts[group] == sum(n for what, n in counts.items() if what.startswith(group + ": "))
        for group in ("pages", "links"))

def read(tmp_path, text, *others, title="Page"):
    """(texts, [(shown, entity)], counts) of one article whose wikitext is `text`."""
    out = tmp_path / "corpus.jsonl"
    counts = data.wiki(dump(tmp_path / "d.xml", page(title, text), *others), out)
    lines = [line for line in lines_of(out) if line["title"] == title]
    assert accounted(counts), counts
    shown = [(line["text"][m["start"]:m["end"]], m["entity"]) for line in lines for m in line["mentions"]]
    return [line["text"] for line in lines], shown, counts

# ---------------------------------------------------------------- links

@pytest.mark.parametrize("wikitext, text, shown, entity", [
    ("a [[dog]] b", "a dog b", "dog", "Dog"),
    ("a [[Dog|hound]] b", "a hound b", "hound", "Dog"),
    ("many [[dog]]s, [[Cat|kitten]]s", "many dogs, kittens", "dogs", "Dog"),
    ("[[bus]]es", "buses", "buses", "Bus"),
    ("[[Rome#History|past]]", "past", "past", "Rome"),
    ("[[ new_york  city ]]", "new_york city", "new_york city", "New york city"),
    ("a [[Rome|city {{x}}]] b", "a city b", "city", "Rome"),
    ("[[:Rome]]", "Rome", "Rome", "Rome"),
    ("[[AT&amp;T]]", "AT&T", "AT&T", "AT&T"),
    ("'''[[Rome|''Roma'']]'''", "Roma", "Roma", "Rome"),
    ("[[Rome|the <b>city</b>]]", "the city", "the city", "Rome"),
    ("[[Foo|a [b] c]]", "a [b] c", "a [b] c", "Foo"),
    ("[[iPod]]", "iPod", "iPod", "IPod"),
    ("[[Foo|bar\nbaz]]", "bar baz", "bar baz", "Foo"),
    ("letter [[ß]]", "letter ß", "ß", "ß"),
    ("''[[Iliad]]'''s end", "Iliad's end", "Iliad", "Iliad"),
    ("the anime [[Re:Zero]]", "the anime Re:Zero", "Re:Zero", "Re:Zero"),
    ("[[Alien: Resurrection]]", "Alien: Resurrection", "Alien: Resurrection", "Alien: Resurrection")])
def test_links_become_mentions(tmp_path, wikitext, text, shown, entity):
    texts, mentions, _ = read(tmp_path, wikitext)
    assert texts == [text] and mentions[0] == (shown, entity)

NO_ARTICLE, HIDDEN = "to no article", "outside the prose"

@pytest.mark.parametrize("wikitext, text, why", [
    ("x[[File:a.jpg|thumb|A dog.]]y", "xy", HIDDEN),
    ("x[[Image:a.jpg]]y", "xy", HIDDEN),
    ("x[[Category:Dogs|*]]", "x", HIDDEN),
    ("x [[:Category:Dogs|kinds]]", "x kinds", NO_ARTICLE),
    ("x[[fr:Chien]]", "x", HIDDEN),
    ("x[[zh-min-nan:Káu]]", "x", HIDDEN),
    ("x[[simple:Dog]]", "x", HIDDEN),
    ("in [[doi:10.1/2|a paper]]", "in a paper", NO_ARTICLE),
    ("x[[Foo|({{x}})]]", "x", HIDDEN),
    ("a &#1;Evil&#2;[[fr:x]]shown&#3; b", "a Evil shown b", HIDDEN),
    ("x [[:fr:Chien|chien]]", "x chien", NO_ARTICLE),
    ("a [[wikt:dog|dog]]", "a dog", NO_ARTICLE),
    ("a [[Help:Dog|dog]]", "a dog", NO_ARTICLE),
    ("[[#Past|past]]", "past", NO_ARTICLE),
    ("see [[Old dog]]", "see Old dog", NO_ARTICLE),
    ("a [[dog\nb", "b", HIDDEN),
    ("is [[Pet]]", "is Pet", NO_ARTICLE),
    ("is [[X (disambiguation)|X]]", "is X", NO_ARTICLE),
    ("a [[{{x}}|dog]]", "a dog", NO_ARTICLE),
    ("a <!-- [[dog]] --> b", "a b", HIDDEN),
    ("a<ref name=x>[[dog]] {{</ref> b", "a b", HIDDEN),
    ("b {{b|{{c|[[dog]]}}}} d", "b d", HIDDEN),
    ("a\n{|\n|-\n|[[dog]]\n{|\n|x\n|}\n|}\nb", "a", HIDDEN),
    ("a\n:{|\n|[[dog]]\n|}", "a", HIDDEN),
    ("a\n<table><tr><td>[[dog]]<table></table></td></tr></table>", "a", HIDDEN),
    ("a <math>[[dog]]</math> b", "a b", HIDDEN),
    ("a\nb <nowiki>[[dog]]</nowiki> b", "a", HIDDEN),
    ("a\n==[[Dog]]==\nb", "a", HIDDEN),
    ("a\n==See also==\n===x===\n*[[Dog]]\n== B ==\nb", "a", HIDDEN)])
def test_links_that_are_not_mentions_are_counted_by_reason(tmp_path, wikitext, text, why):
    others = (page("Old dog", "", redirect="Older dog"), page("Older dog", "", redirect="Old dog"),
              page("Pet", "'''Pet''' may be:\n* Dog\n{{disambiguation}}"))
    texts, mentions, counts = read(tmp_path, wikitext, *others)
    assert texts[0] == text and mentions == [] and counts["links: " + why] == 1
    assert counts["links: kept"] == 0 and counts["pages: redirect"] == 2

def test_redirects_are_followed_wherever_they_are(tmp_path):
    chain = [page("USA", "", redirect="U.S.A.#Top"), page("U.S.A.", "", redirect="United_States"),
             page("Loop", "", redirect="Loop 2"), page("Loop 2", "", redirect="Loop"),
             page("Self", "", redirect="Self"), page("Shortcut", "", redirect="Wikipedia:Help")]
    text = "[[USA]] [[uSA|us]] [[Loop]] [[loop 2]] [[Self]] [[Shortcut]] [[United States]]"
    for pages in (chain, chain[::-1]):
        _, mentions, counts = read(tmp_path, text, *pages)
        assert [shown for shown, _ in mentions] == ["USA", "us", "United States"]
        assert {entity for _, entity in mentions} == {"United States"}
        assert counts["links: to no article"] == 4

# ---------------------------------------------------------------- markup

@pytest.mark.parametrize("wikitext, texts", [
    ("'''A''' is ''b''.\n\n\nC.", ["A is b.", "C."]),
    ("a [http://x.org the site] b [https://y.org] c", ["a the site b c"]),
    ("a<br />b <small>c</small> &mdash;&nbsp;d\n__NOTOC__", ["a b c — d"]),
    ("* a\n** b\n# c\n: d", ["a\nb\nc\nd"]),
    ("== H ==\na\n=== I ===\nb\n----\nc", ["a", "b", "c"]),
    ("a\n== H ==<ref>x</ref>\nb", ["a", "b"]),
    ("A ({{lang-el|x}}; 384) is.", ["A (384) is."]),
    ("A ({{IPA|x}}) is long{{cn}}.", ["A is long."]),
    ("{{Infobox\n| a = [[b]]\n| c = {{d|}}\n|}}\nText.", ["Text."]),
    ("a <ref name=\"x/y\" /> b <ref>c</ref> d < e", ["a b d < e"]),
    ("{{x|\n{|\n| y\n|}}}\nz", ["z"]),
    ("a {{b\nc\n\nd", ["c", "d"]),
    ("{| x\n| y\n|-\nz", ["z"]),
    ("a }} b\n\nc |} d\n\ne ]] f\n\ng", ["g"]),
    ("x\nsee [[A|a [[link]] in a link]]", ["x"]),
    ("x\ny <!-- never closed [[a]]", ["x"])])
def test_markup_is_removed(tmp_path, wikitext, texts):
    assert read(tmp_path, wikitext)[0] == texts

def test_further_mentions_are_linked(tmp_path):
    text = ("'''Karovia''' has a king, [[Leon Holt]]. Leon Holt likes [[dog]]s. Dogs like Leon Holt."
            "\n\nLeon Holt Junior, Karovia-based, of North Karovia saw a dog, hotdogs, "
            "[[Rome (city)|Rome]].\n\nRome and Karovia's [[Demographics of Karovia|population]]; "
            "the population of Rome.")
    _, mentions, counts = read(tmp_path, text, title="Karovia")
    assert mentions == [
        ("Karovia", "Karovia"), ("Leon Holt", "Leon Holt"), ("Leon Holt", "Leon Holt"),
        ("dogs", "Dog"), ("Dogs", "Dog"), ("Leon Holt", "Leon Holt"), ("dog", "Dog"),
        ("Rome", "Rome (city)"), ("Rome", "Rome (city)"), ("Karovia", "Karovia"),
        ("population", "Demographics of Karovia"), ("Rome", "Rome (city)")]
    assert counts["mentions"] == len(mentions) == counts["links: kept"] + 8 == 12

@pytest.mark.parametrize("text, links, found", [
    ("York lies near New York City. New York City is not York: York is older.", {"New York City": "New York City"},
     [("New York City", "New York City")] * 2),
    ("York of old, a Yorkist city. Yes, Ýork and a Yorkist.", {"Yorkist": "Yorkist"}, [("Yorkist", "Yorkist")] * 2),
    ("Łódź, Šešelj: of Łódź’s men—Šešelj—none? Who but Šešelj? A robot of robots, robotics.",
     {"Łódź": "Łódź", "Šešelj": "Šešelj", "robot": "Robot"},
     [*((name, name) for name in "Łódź Šešelj Łódź Šešelj Šešelj".split()), ("robot", "Robot"), ("robots", "Robot")])])
def test_a_target_is_linked_only_after_its_link_by_the_longest_name_in_any_letters_and_plural(text, links, found):
    mentions = [data.Mention(text.index(link), text.index(link) + len(link), links[link]) for link in links]
    [(_, extended)] = data.extend_mentions("Page", [(text, mentions)])
    assert [(text[m.start:m.end], m.entity) for m in extended] == found

def test_a_page_of_many_similar_names_does_not_take_quadratic_time():
    paragraphs = [(f"Foo {i} is Foo {i}.", [data.Mention(0, len(f"Foo {i}"), f"Foo {i}")]) for i in range(3000)]
    start = time.process_time()
    list(data.extend_mentions("Page", paragraphs))
    assert time.process_time() - start < 5

# ---------------------------------------------------------------- the dump

def test_pages_that_are_not_articles_are_counted(tmp_path):
    path = dump(tmp_path / "d.xml.bz2", page("A", "text [[B]]"), page("Talk:A", "[[C]]", ns=1),
                page("E", " "), page("B", "", redirect="A"), page("A (disambiguation)", "[[A]]"),
                page("F", "x {{School disambiguation}}"), page("G", "g {{disambiguation needed}}"),
                page("H", "x {{other uses|H (disambiguation)}}"))
    counts = data.wiki(path, tmp_path / "out.jsonl.gz")
    assert {what: n for what, n in counts.items() if what.startswith("pages: ")} == {
        "pages: article": 4, "pages: other namespace": 1, "pages: redirect": 1, "pages: disambiguation page": 2}
    assert [line["title"] for line in lines_of(tmp_path / "out.jsonl.gz")] == ["A", "G", "H"]
    assert accounted(counts) and not list(tmp_path.glob("*.tmp"))

def kill_worker(page):
    os._exit(9)

def test_a_killed_worker_is_one_sentence_and_no_file(tmp_path, monkeypatch, capsys):
    if multiprocessing.get_start_method() != "fork":
        pytest.skip("only a forked worker has the patched function")
    monkeypatch.setattr(data, "read_article", kill_worker)
    path = dump(tmp_path / "d.xml", page("A", "text [[B]]"))
    assert data.main(["wiki", str(path), "--out", str(tmp_path / "out.jsonl")]) == 1
    assert "fewer --workers" in capsys.readouterr().err and not (tmp_path / "out.jsonl").exists()

def test_any_number_of_workers_writes_the_same_file(tmp_path):
    pages = (page(f"P{i}", f"text {i} [[P{i * 7 % 50}]] and [[R]] " * 9) for i in range(150))
    path = dump(tmp_path / "d.xml", *pages, page("R", "", redirect="P1"), page("S", "{{" * 999))
    one = data.wiki(path, tmp_path / "one.jsonl.gz")
    two = data.wiki(path, tmp_path / "two.jsonl.gz", workers=2)
    assert (tmp_path / "one.jsonl.gz").read_bytes() == (tmp_path / "two.jsonl.gz").read_bytes()
    assert one == two and one["sections left out"] == 1
    assert [line["title"] for line in lines_of(tmp_path / "two.jsonl.gz")] == [f"P{i}" for i in range(150)]
    assert sum(1 for _ in data.read_corpus(tmp_path / "two.jsonl.gz")) == 150

ENTITIES = "".join(f'<!ENTITY {y} "{10 * f"&{x};"}">' for x, y in zip("abcdefgh", "bcdefghi"))
BOMB = (f'<!DOCTYPE m [<!ENTITY a "aaaaaaaaaa">{ENTITIES}]>'
        "<mediawiki><page><title>T</title><text>&i;</text></page></mediawiki>")
CUT = "not a complete MediaWiki dump"
NO_DUMP = CUT + " (ValueError: it does not begin like one)"

@needs_parser
@pytest.mark.parametrize("content, said", [
    (bz2.compress(random.Random(0).randbytes(40000))[:20000], CUT), (b"BZh9 and no bz2", CUT),
    (b"", NO_DUMP), (b"<!DOCTYPE html><html></html>", NO_DUMP), (b"plain text", NO_DUMP),
    (b"PK\3\4 a zip archive", NO_DUMP), (gzip.compress(b"<mediawiki/>", mtime=0), NO_DUMP),
    (b"\xfd7zXZ\0", NO_DUMP), (b"7z\xbc\xaf", NO_DUMP),
    (BOMB.encode(), NO_DUMP), (BOMB.encode("utf-16"), NO_DUMP), (b" " * (1 << 19) + BOMB.encode(), NO_DUMP),
    (b"<mediawiki><!DOCTYPE a></mediawiki>", CUT),
    (b'<mediawiki xmlns="x"><page><title>T</title></page></mediawiki>', "no <ns>"),
    (b"<mediawiki><page><title>T</title>", CUT), (b"<mediawiki>" + b"<page>" * 1000, CUT),
    (b"<mediawiki><page><title>a & b</title></page></mediawiki>", CUT),
    (b"<mediawiki><page><title>&bomb;</title></page></mediawiki>", CUT)])
def test_a_file_that_is_not_a_whole_dump_gets_one_sentence_and_leaves_no_output(tmp_path, content, said):
    (tmp_path / "d.xml").write_bytes(content)
    start = time.time()
    with pytest.raises(UserError, match=re.escape(said)) as e:
        data.wiki(tmp_path / "d.xml", tmp_path / "out.jsonl")
    assert "d.xml" in str(e.value) and "\n" not in str(e.value) and time.time() - start < 10
    assert [p.name for p in tmp_path.iterdir()] == ["d.xml"]

def test_a_wrong_request_gets_one_sentence(tmp_path, monkeypatch, capsys):
    path, out = dump(tmp_path / "d.xml", page("A", "a")), tmp_path / "out.jsonl"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: not a regular file"):
        data.wiki(tmp_path / "pipe", out)
    with pytest.raises(UserError, match="No such file.*check the folder"):
        data.wiki(tmp_path / "none.xml", tmp_path / "no folder" / "out.jsonl")     # before the dump is read
    path.write_text(path.read_text().replace("<mediawiki ", '<mediawiki xml:lang="de" '))
    data.wiki(path, out)
    assert capsys.readouterr().err.count("only English") == 1 and len(lines_of(out)) == 1
    monkeypatch.setitem(sys.modules, "mwparserfromhell", None)
    monkeypatch.setattr(sys, "argv", ["data.py", "wiki", str(path), "--out", str(out)])
    assert data.main() == 1 and "mwparserfromhell" in capsys.readouterr().err

@needs_parser
@pytest.mark.parametrize("text", [
    "{{", "{|\n", "[[", "[[a|", "<ref>", "<!--", "<a ", "[http:x ", "[[x|[a", "{{convert||", "<div>",
    "{{a|<ref>[[b|", "{{{a|{{b|", "<ref name=\"", "==a", "\n==", "}}[[a|]]{{", " :*#", "(;(", "a ''b"])
def test_no_markup_keeps_the_parser_busy_for_minutes(text):
    start = time.process_time()
    for length in (data.MAX_SECTION, 2 * data.MAX_SECTION):
        data.read_article(("A", "article", text * (length // len(text))))
    assert time.process_time() - start < 30

@pytest.mark.parametrize("section", ["{{a" * 300, "x " * 400_000])
def test_a_section_that_would_take_minutes_is_left_out_and_counted(tmp_path, section):
    texts, _, counts = read(tmp_path, f"x\n== H ==\n{section}\n== I ==\ny")
    assert counts["sections left out"] == 1 and texts == ["x", "y"]

@needs_real
@needs_parser
def test_the_real_dump_is_accounted_for(tmp_path):
    counts = data.wiki(DUMP, tmp_path / "out.jsonl.gz")
    kinds = {"article": 98, "disambiguation page": 8, "redirect": 99, "other namespace": 1}
    assert all(counts["pages: " + kind] == n for kind, n in kinds.items()) and counts["pages"] == 206
    assert counts["links: kept"] == 21386 and counts["texts"] == 5073
    with bz2.open(DUMP, "rt", encoding="utf-8") as file:
        pages = re.findall(r"<page>.*?</page>", file.read(), re.S)
    links = [re.search("<text.*?</text>", p, re.S)[0].count("[[") for p in pages if "<redirect" not in p]
    assert 32_009 == counts["links"] < sum(links)         # the rest: disambiguation pages
    assert accounted(counts) and counts["sections left out"] == 0
    texts = list(data.read_corpus(tmp_path / "out.jsonl.gz"))
    assert len(texts) == counts["texts"]
    assert sum(len(t.mentions) for t in texts) == counts["mentions"]
    debris = re.compile(r"\[\[|\]\]|[{}|]|''|</?[a-z]+>|[\x00-\x08]")
    assert not [t for t in texts if debris.search(t.text)]
    for t in texts:
        assert all(t.text[m.start:m.end] == t.text[m.start:m.end].strip() != "" for m in t.mentions)
        assert all(a.end <= b.start for a, b in zip(t.mentions, t.mentions[1:]))

@needs_real
@needs_parser
def test_the_tables_of_a_real_dump_are_removed(tmp_path):
    counts = data.wiki(REAL / "enwiki-table-markup.xml.bz2", tmp_path / "out.jsonl")
    assert accounted(counts) and counts["pages: article"] == 5 and counts["links: outside the prose"] > 2000
    debris = re.compile(r"\[\[|[{}|<>]|\]\]")
    assert not [line for line in lines_of(tmp_path / "out.jsonl") if debris.search(line["text"])]

# ---------------------------------------------------------------- KILT

def test_kilts_knowledge_source_is_read_with_its_offsets(tmp_path):
    path, out = tmp_path / "k.jsonl", tmp_path / "out.jsonl.gz"
    text = ["Karovia\n", "Karovia has a king, Leon Holt, of Ruvia.\n", "Section::::History.\n",
            "BULLET::::12. a list\n"]

    def anchor(i, shown, **target):
        start = text[i].index(shown)
        return {"text": shown, "paragraph_id": i, "start": start, "end": start + len(shown), **target}

    record = {"_id": "1", "wikipedia_id": "1", "wikipedia_title": "Karovia", "text": text, "anchors": [
        anchor(1, "Ruvia", href="Ruvia%20%28state%29%23Wars"), anchor(1, "king", href="King"),
        anchor(1, "Leon Holt", href="Leon", wikipedia_title="Leon Holt", wikipedia_id="2"),
        anchor(2, "History", href="History"), anchor(3, "list", href="List")], "categories": "", "history": {}}
    record["anchors"] += [anchor(1, "Ruvia", href="X") | wrong for wrong in (
        {"start": 3, "end": 3}, {"start": 20, "end": 500}, {"start": -3, "end": 2}, {"paragraph_id": -1})]
    path.write_text(json.dumps(record) + "\n\n")
    counts = data.kilt(path, out)
    lines = lines_of(out)
    assert [line["text"] for line in lines] == text[1:2]
    assert [[(line["text"][m["start"]:m["end"]], m["entity"]) for m in line["mentions"]] for line in lines] == [
        [("Karovia", "Karovia"), ("king", "King"), ("Leon Holt", "Leon Holt"), ("Ruvia", "Ruvia (state)")]]
    assert counts["links"] == 9 and counts["links: kept"] == 3
    path.write_text(json.dumps({"wikipedia_title": "", "text": ["A", "b"], "anchors": []}))
    data.kilt(path, out)                                                    # a page without a title
    assert [line["text"] for line in lines_of(out)] == ["b"]
    path.write_bytes(json.dumps(record, ensure_ascii=False).replace("king", "k\xf6nig").encode("latin-1"))
    with pytest.raises(UserError, match="k.jsonl:1: not UTF-8|k.jsonl:1: .*in UTF-8"):
        data.kilt(path, out)

@pytest.mark.parametrize("line", ["[1]", "{", '{"wikipedia_title": "A", "text": ["a"]}',
                                  '{"wikipedia_title": "A", "text": ["A", 3], "anchors": []}',
                                  '{"wikipedia_title": "A", "text": "AB", "anchors": []}',
                                  '{"wikipedia_title": "A", "text": ["A", "a"], "anchors": [{"paragraph_id": 1, '
                                  '"start": 0.0, "end": 1, "wikipedia_title": "B"}]}',
                                  '{"id": 1, "title": "A", "text": "a"}'])
def test_a_file_that_is_not_from_kilt_is_refused(tmp_path, line):
    (tmp_path / "k.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match="k.jsonl:1: ") as e:
        data.kilt(tmp_path / "k.jsonl", tmp_path / "out.jsonl")
    assert "\n" not in str(e.value) and not (tmp_path / "out.jsonl").exists()

def test_an_empty_corpus_or_file_of_examples_is_not_written(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    for convert in (lambda: data.kilt(tmp_path / "empty.jsonl", tmp_path / "out.jsonl"),
                    lambda: data.task("fever", [tmp_path / "empty.jsonl"], tmp_path / "out.jsonl")):
        with pytest.raises(UserError, match="no article found|empty.jsonl: no records found"):
            convert()
    assert [p.name for p in tmp_path.iterdir()] == ["empty.jsonl"]

# ---------------------------------------------------------------- task files

MENTIONS = [("the French capital", "Paris"), ("Paris", "Paris"), ("Mercury", "Mercury_(planet)"),
            ("United States of America", "United_States"), ("America", "United_States")]

@pytest.fixture
def corpus(tmp_path):
    data.write_lines(tmp_path / "corpus.jsonl", [
        {"title": entity, "text": f"{shown} is", "mentions": [{"start": 0, "end": len(shown), "entity": entity}]}
        for shown, entity in MENTIONS])
    return tmp_path / "corpus.jsonl"

def run(tmp_path, name, content, **options):
    """The examples in a published file. content: its text, or an object to write as JSON or JSON lines."""
    path = tmp_path / "published.json"
    if not isinstance(content, str):
        is_lines = name in ("fever", "fm2")
        content = "\n".join(map(json.dumps, content)) if is_lines else json.dumps(content, indent=1)
    path.write_text(content)
    data.task(name, [path], tmp_path / "examples.jsonl", **options)
    return lines_of(tmp_path / "examples.jsonl")

def test_claims(tmp_path, capsys):
    fever = [{"id": 1, "label": label, "claim": f"c {label}", "evidence": [[[1, 2, "Gold", 0]]]}
             for label in ("SUPPORTS", "REFUTES", "NOT ENOUGH INFO")]
    assert run(tmp_path, "fever", fever) == [
        {"text": f"c {label}", "label": label} for label in ("SUPPORTS", "REFUTES", "NOT ENOUGH INFO")]
    assert "3 examples, 3 with a label" in capsys.readouterr().out
    hover = [{"uid": "a", "claim": "c", "label": "SUPPORTED", "supporting_facts": [["Gold", 1]]},
             {"uid": "b", "claim": "d", "label": "NOT_SUPPORTED"}]
    assert [e["label"] for e in run(tmp_path, "hover", hover)] == ["SUPPORTS", "REFUTES"]
    fm2 = [{"text": "c", "label": "REFUTES", "gold_evidence": [{"text": "Gold"}]}]
    assert run(tmp_path, "fm2", fm2) == [{"text": "c", "label": "REFUTES"}]

def test_answers_are_mapped_by_title_alias_and_normalised_text(tmp_path, corpus, capsys):
    trivia = {"Domain": "unfiltered", "Data": [
        {"Question": "q1", "QuestionId": "a", "EntityPages": [], "SearchResults": [],
         "Answer": {"Value": "City of Light", "Aliases": ["the paris", "City of Light"], "Type": "x"}},
        {"Question": "q2", "Answer": {"Value": "mercury", "Aliases": []}},
        {"Question": "q3", "Answer": {"Value": "blue", "Aliases": ["azure"]}}]}
    examples = run(tmp_path, "triviaqa", trivia, corpus=corpus)
    assert [e["answers"] for e in examples] == [["Paris"], ["Mercury_(planet)"], []]
    assert examples[0]["answer_text"] == ["City of Light", "the paris"]
    assert set(examples[0]) == {"question", "answer_text", "answers"}
    assert "3 examples, 2 with a label or an answer that is an entity" in capsys.readouterr().out
    answers = [{"answer_id": "m.1", "answer": "U.S.A.", "aliases": ["united_states of America!"]},
               {"answer_id": "m.2", "answer": None, "aliases": ["PARIS"]}]
    cwq = [{"ID": "x", "question": "q", "answers": answers, "sparql": ""}]
    examples = run(tmp_path, "complexwebquestions", cwq, corpus=corpus)
    assert [e["answers"] for e in examples] == [["United_States", "Paris"]]
    key = data.answer_key
    assert key("The The") == key("The") == "the" and key("%") != key("!!!")
    assert key("the Vitamin A") == key("Vitamin_A.") == "vitamin a" != key("Vitamin")
    assert key("Cafe\u0301") == key("Café") != key("Cafe")
    entity = [{"question": "q", "answers": ["United States of America"]}]
    assert run(tmp_path, "entityquestions", entity, corpus=corpus)[0]["answers"] == ["United_States"]

def test_questions_need_a_corpus(tmp_path):
    with pytest.raises(UserError, match="--corpus"):
        run(tmp_path, "entityquestions", [{"question": "q", "answers": ["a"]}])

BAD_RECORDS = {
    "complexwebquestions": [
        {"question": "q", "answer": "Germany"}, {"ID": "x", "question": "q", "answer": "Germany"},
        {"id": "a9011ddf", "question": "q", "answer": {"mention": "Germany"}},          # Mintaka
        {"url": "u", "question": "q", "answers": ["Germany"]}],
    "entityquestions": [
        {"question": "q", "answer": "Germany"}, {"question": "q", "answers": "Paris"},
        {"url": "u", "utterance": "q", "targetValue": "(list)"},                        # WebQuestions
        {"question": "q", "answers": [1]}, {"question": None, "answers": []}],
    "triviaqa": [
        {"Question": "q"}, {"question": "q", "answer": {"value": "Germany"}},
        {"Question": "q", "Answer": {"Aliases": []}},
        {"Question": "q", "Answer": {"Value": "a", "Aliases": "b"}}],
    "fever": [
        {"claim": "c"}, {"label": "SUPPORTS"}, {"id": 1, "claim": "c", "verdict": "true"},
        {"id": 1, "claim": "c", "label": "SUPPORTED"}],
    "fm2": [{"text": "c"}, {"text": "c", "label": 1}],
    "hover": [
        3, {"id": 1, "claim": "c"}, {"uid": "a", "claim": "c", "label": "SUPPORTS"},
        {"claim": "c", "label": ["SUPPORTED"]}]}

@pytest.mark.parametrize("name, content, n", [
    *((name, [record], 1) for name, records in BAD_RECORDS.items() for record in records),
    ("fever", [{"claim": "a", "label": "SUPPORTS"}, {"claim": 3, "label": "SUPPORTS"}], 2),
    ("fever", '{"claim": "a", "label": "SUPPORTS"}\n{"cla', 2),
    ("fever", "[" * 9999, 0), ("hover", '[{"claim": "a"', 1), ("triviaqa", {"Data": [{"Question": "q"}]}, 1)])
def test_a_bad_record_or_a_file_of_another_task_is_refused_with_its_number(tmp_path, corpus, name, content, n):
    with pytest.raises(UserError, match=f"published.json: record {n}: .*is this a labelled {name} file") as e:
        run(tmp_path, name, content, corpus=corpus)
    assert "\n" not in str(e.value) and not (tmp_path / "examples.jsonl").exists()

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
def test_the_real_questions_agree_with_the_given_pairing(tmp_path):
    data.task("entityquestions", [REAL / "paired" / "entityquestions_train.jsonl"], tmp_path / "out.jsonl",
              corpus=REAL / "wikispeedia_linked.jsonl.gz")
    pairs = [(set(line["answers"]), set(record["corpus_answers"])) for line, record in
             zip(lines_of(tmp_path / "out.jsonl"), lines_of(REAL / "paired" / "entityquestions_train.jsonl"))]
    assert len(pairs) == 420 and sum(bool(ours) for ours, _ in pairs) > 340     # the other questions need aliases
    assert all(ours <= theirs for ours, theirs in pairs)

# ---------------------------------------------------------------- noun chunks

def test_noun_chunks_are_mentions_if_spacy_is_installed(monkeypatch):
    found = SimpleNamespace(noun_chunks=[SimpleNamespace(start_char=0, end_char=8)])
    spacy = SimpleNamespace(load=lambda name, exclude: {"en_core_web_sm": lambda text: found}[name])
    for module, how, start in ((spacy, "spaCy's noun chunks", 0), (None, "entity names (spaCy with en_core_web_sm could not be loaded)", 13)):
        monkeypatch.setitem(sys.modules, "spacy", module)
        said, find = data.mention_finder(["Hungry"])
        assert said.startswith(how) and [mention.start for mention in find("The song was Hungry.")] == [start]
