"""Document lengths: the shipped sets, the default batch, and what the command line may pass."""

import json

import pytest

from refimpl.errors import SpecError
from refimpl.lengths import MAX_TOKENS, default_lengths, document_sets, parse_lengths


def test_shipped_sets_are_the_ones_their_readme_describes():
    sets = document_sets()
    summary = {name: (len(lengths), min(lengths), max(lengths), sum(lengths)) for name, lengths in sets.items()}
    assert summary == {
        "gsm8k_test": (1319, 161, 1619, 704499),
        "cpython311_stdlib": (799, 0, 757011, 12602225),
    }


def test_default_batch_is_large_varied_and_the_same_every_time():
    lengths = default_lengths()
    assert lengths == default_lengths()
    assert 8192 <= sum(lengths) <= 8192 + 1280
    assert 0 in lengths
    assert max(lengths) > 10 * min(n for n in lengths if n)
    known = {n for members in document_sets().values() for n in members}
    assert set(lengths) <= known


def test_lists_files_and_names(tmp_path):
    assert parse_lengths("5,0,7") == [5, 0, 7]
    assert parse_lengths(" 5, 6 ") == [5, 6]
    assert parse_lengths("gsm8k_test") == document_sets()["gsm8k_test"]
    (tmp_path / "list.json").write_text("[3, 4]")
    (tmp_path / "object.json").write_text(json.dumps({"lengths": [9], "source": "mine"}))
    assert parse_lengths(str(tmp_path / "list.json")) == [3, 4]
    assert parse_lengths(str(tmp_path / "object.json")) == [9]


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        (b"{not json", "usage", "not JSON"),
        (b"\xff\xfe", "usage", "not JSON"),
        (b"[" * 100_000, "usage", "not JSON"),
        (b'"text"', "usage", "expected a JSON list"),
        (b'{"tokens": [1]}', "usage", "expected a JSON list"),
        (b"[1, 2.5]", "usage", "entry 1 is 2.5"),
        (b"[true]", "usage", "entry 0 is True"),
        (b"[4, -2]", "lengths", "entry 1 is -2"),
        (b"[]", "usage", "no document has any token"),
        (b"[0, 0]", "usage", "no document has any token"),
        (b"[99999999999]", "usage", str(MAX_TOKENS)),
    ],
)
def test_unusable_files_are_refused_by_name(tmp_path, content, code, says):
    path = tmp_path / "lengths.json"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=r"lengths\.json") as caught:
        parse_lengths(str(path))
    assert caught.value.code == code
    assert says in caught.value.message


def test_missing_file_and_folder_are_refused(tmp_path):
    for path in (tmp_path / "nothing.json", tmp_path):
        with pytest.raises(SpecError, match=path.name) as caught:
            parse_lengths(str(path))
        assert caught.value.code == "usage"


def test_negative_entry_of_a_list_is_refused():
    with pytest.raises(SpecError, match="entry 1 is -3"):
        parse_lengths("5,-3")
