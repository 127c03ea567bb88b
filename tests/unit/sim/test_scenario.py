"""Scenario files: what is read, what is refused, and how that is said."""

from pathlib import Path

import msgspec
import pytest

from headrace.core.errors import InvalidInput
from headrace.sim.arrivals import Poisson
from headrace.sim.lengths import Fixed, Uniform
from headrace.sim.scenario import Scenario, TenantLoad, check_scenario, read_scenario, written_lengths

pytestmark = pytest.mark.unit

EXAMPLES = sorted((Path(__file__).parents[3] / "examples/scenarios").glob("*.toml"))
PLAIN = 'duration_s = 1.0\n[[tenants]]\nname = "a"\narrivals = { kind = "poisson", rate = 2.0 }\n'


def written(folder: Path, text: str, name: str = "s.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_sound(path: Path) -> None:
    assert read_scenario(path).name == path.stem


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 4


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    scenario = read_scenario(written(tmp_path, PLAIN))
    same = read_scenario(written(tmp_path, msgspec.json.encode(scenario).decode(), "s.json"))
    assert same == scenario
    assert scenario.tenants[0].arrivals == Poisson(2.0)


def test_a_trace_is_found_beside_its_scenario(tmp_path: Path) -> None:
    assert read_scenario(written(tmp_path, 'trace = "t.jsonl"')).trace == str(tmp_path / "t.jsonl")


def test_lengths_may_be_written_either_way() -> None:
    assert written_lengths(25, "x") == Fixed(25)
    assert written_lengths("uniform:1:9", "x") == written_lengths(Uniform(1, 9), "x")


def test_tenants_become_the_engines_entitlements(tmp_path: Path) -> None:
    text = PLAIN + 'weight = 3.0\ntier = "free"\nmax_slots = 4\nreserved_blocks = 8\n'
    (tenant,) = read_scenario(written(tmp_path, text)).engine_config().tenants
    assert (tenant.weight, tenant.tier, tenant.max_slots, tenant.reserved_blocks) == (3.0, "free", 4, 8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PLAIN.replace("2.0", "-2.0"), r"tenants\[0\].arrivals.rate"),
        (PLAIN.replace("2.0", "nan"), r"tenants\[0\].arrivals.rate"),
        (PLAIN.replace("poisson", "tidal"), r"tenants\[0\].arrivals.kind.*possible are .*poisson"),
        (PLAIN.replace("duration_s = 1.0", ""), r"tenants\[0\].*never end.*duration_s"),
        (PLAIN.replace("duration_s = 1.0", "duration_s = 'long'"), r"duration_s"),
        (PLAIN + 'prompt = "lognormal:1"\n', r"tenants\[0\].prompt"),
        (PLAIN + 'output = { kind = "uniform", low = 9, high = 1 }\n', r"tenants\[0\].output"),
        (PLAIN + 'tier = "gold"\n', r"tenants\[0\].tier"),
        (PLAIN + "slots = 3\n", r"slots.*tenants\[0\].*max_slots"),
        (PLAIN + "cancels = { share = 0.5 }\n", r"tenants\[0\].cancels"),
        (PLAIN + 'cancels = { share = 0.5, after_tokens = "x:1" }\n', r"tenants\[0\].cancels.after_tokens"),
        (PLAIN + "[engine]\nslots = 0\n", r"engine.slots"),
        (PLAIN + "[engine]\nslots = 2_000_000_000\nmax_step_tokens = 2_000_000_000\n", r"engine.slots"),
        (PLAIN + "[engine]\nblocks = 134_217_729\n", r"engine.blocks × engine.block_size"),
        (PLAIN + "[engine]\nblocks = 100_000_000\n", r"engine.blocks.*GiB"),
        (PLAIN + "[engine]\ncontext_len = 2_147_483_647\n", r"engine.context_len.*GiB"),
        (PLAIN + "[engine]\nvocab_size = 2_147_483_647\n", r"engine.vocab_size.*GiB"),
        (PLAIN + "[engine]\nvocab_size = 1" + "0" * 400 + "\n", r"engine.vocab_size"),
        (PLAIN + f"[engine]\neos_ids = {[1] * 2000}\n", r"engine.eos_ids: their number"),
        (PLAIN + "[engine]\neos_ids = [0, 1_099_511_627_776]\n", r"engine.eos_ids\[1\]"),
        ("workers = 100_001\n" + PLAIN, r"workers"),
        ("workers = 257\n" + PLAIN + "[engine]\nslots = 65_536\n", r"workers × engine.slots"),
        ("workers = 65_537\n" + PLAIN, r"workers × engine.blocks"),
        ("workers = 60_000\n" + PLAIN, r"workers.*GiB"),
        (PLAIN + "[device]\nc_kv_s = 1e6\n", r"device.c_kv_s"),
        (PLAIN + "[device]\n[engine.profile]\nc_att_s = 1e6\n", r"engine.profile.c_att_s"),
        (PLAIN + '[[happenings]]\nkind = "drift"\nat_s = 0.1\nfactor = 1000.0\n' * 3, r"happenings"),
        (PLAIN + "slow_readers = { share = 1.0, tokens_per_s = 5e-324 }\n", r"tenants\[0\].slow_readers"),
        (PLAIN.replace("poisson", "bursty").replace("2.0", "2.0, on_s = 1e7"), r"tenants\[0\].arrivals"),
        (PLAIN.replace("poisson", "diurnal").replace("2.0", f"2.0, points = {[5e-324] * 24}"), r"arrivals.points"),
        (PLAIN + "[engine]\nprofile = { c0_s = -1.0 }\n", r"engine.profile.c0_s"),
        (PLAIN + '[[engine.tenants]]\nname = "a"\n', r"engine.tenants"),
        (PLAIN + "[device]\nc_in_s = inf\n", r"device.c_in_s"),
        (PLAIN + "reserved_slots = 99\n", r"reserved_slots"),
        (PLAIN + '[[tenants]]\nname = "a"\n', r"tenants\[1\].name: 'a' is taken"),
        (PLAIN + '[[happenings]]\nkind = "death"\nat_s = 1.0\nworker = 1\n', r"happenings\[0\].worker"),
        (PLAIN + '[[happenings]]\nkind = "flood"\nat_s = 1.0\n', r"happenings\[0\].kind"),
        (PLAIN + '[[happenings]]\nkind = "slow"\nat_s = 1.0\nfactor = 0.0\n', r"happenings\[0\].factor"),
        ("duration_s = 1.0", r"tenants: none has arrivals"),
        ("duration_s = ", r"s.toml"),
        ("workers = 1.5", r"workers"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_its_field(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as caught:
        read_scenario(written(tmp_path, text))
    assert "\n" not in caught.value.message


def test_malformed_json_and_missing_files_are_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"s\.json"):
        read_scenario(written(tmp_path, "{", "s.json"))
    with pytest.raises(InvalidInput, match="No such file"):
        read_scenario(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match="bytes"):
        read_scenario(tmp_path / "bytes.toml")


def test_a_scenario_built_in_code_is_checked_like_a_file() -> None:
    with pytest.raises(InvalidInput, match=r"tenants\[0\].arrivals.rate"):
        check_scenario(Scenario(duration_s=1.0, tenants=(TenantLoad("a", Poisson(-1.0)),)))
