"""The comparison of adapters with vLLM's: its servers, its requests, and the table of ratios."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import lora_peers
import pytest
from lora_peers import OURS, THEIRS, server_of, table
from tokenizers import Tokenizer

SLOW, QUICK = [20.0, 10.0], [10.0, 5.0]


def test_both_engines_get_the_same_places_for_adapters(tmp_path: Path) -> None:
    argv = server_of(THEIRS, tmp_path, adapters=True).argv
    theirs = dict(itertools.pairwise(argv))
    ours_argv = server_of(OURS, tmp_path, adapters=True).argv
    ours = json.loads(Path(ours_argv[ours_argv.index("--settings") + 1]).read_text())
    engine = ours["engine"]
    assert (engine["enable_lora"], ours["server"]["enable_lora_routes"]) == (True, True)
    names = {"--max-loras": "max_loras", "--max-lora-rank": "max_lora_rank", "--max-cpu-loras": "max_cpu_loras",
             "--max-model-len": "max_model_len", "--max-num-seqs": "max_num_seqs"}  # fmt: skip
    assert {option: int(theirs[option]) for option in names} == {option: engine[key] for option, key in names.items()}
    assert "--enable-lora" in argv
    assert "--enable-lora" not in server_of(THEIRS, tmp_path, adapters=False).argv


def test_ratios_are_those_of_pairs_and_say_how_many_times_better_ours_is() -> None:
    decodes = {
        OURS: {"alone": SLOW, "none": SLOW, "active": [40.0, 20.0]},
        THEIRS: {"alone": SLOW, "none": [25.0, 12.5], "active": [200.0, 50.0]},
    }
    zipf = {OURS: {"adapters tokens/s": QUICK}, THEIRS: {"adapters tokens/s": SLOW}}
    rows = {row[0]: row[1:] for row in table({"decodes": decodes, "zipf": zipf})}
    assert rows["decodes: alone"] == [15.0, 15.0, 1.0]
    assert rows["decodes: speed, none"] == [1.0, 0.8, 1.25]
    assert rows["decodes: speed, active"] == pytest.approx([0.5, 0.15, 0.5 / 0.15])
    assert rows["zipf: adapters tokens/s"] == [7.5, 15.0, 0.5]
    alone = {row[0]: row[1:] for row in table({"decodes": {OURS: decodes[OURS]}})}
    assert alone["decodes: active"] == [30.0, None, None]


def test_the_vocabulary_has_a_text_for_each_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_peers, "VOCAB", 49_500)
    lora_peers.write_vocabulary(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49_500
    assert tokenizer.decode([49_499]) == " word49499"


def test_adapters_are_in_their_places_by_what_was_asked_for_last() -> None:
    """The adapters of a round that are on the host have lost their slots to later ones, and no other is on the host."""
    warm = [*lora_peers.ON_HOST, *lora_peers.IN_SLOT]
    in_slots, kept = warm[-lora_peers.ACTIVE :], lora_peers.KEPT
    for turn in range(lora_peers.SINGLE):
        asked = lora_peers.ON_HOST[turn]
        assert asked not in in_slots
        in_slots = [*in_slots[1:], asked]
    assert len(warm) + lora_peers.SINGLE <= kept
