"""The configuration: every knob checked, and the same config back from every form."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_dsde import config as config_module
from hf_dsde.config import CONFIG_NAME, SpeculationConfig
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.policies import DSDEStoppingPolicy, StaticPolicy

OPTIONS = {f.name: f.type for f in fields(RuntimeOptions)}

policies = st.one_of(
    st.tuples(st.just("static"), st.fixed_dictionaries({}, optional={"num_draft_tokens": st.integers(0, 50)})),
    st.tuples(st.just("heuristic"), st.fixed_dictionaries({}, optional={"initial_length": st.integers(1, 50)})),
    st.tuples(
        st.just("confidence"),
        st.fixed_dictionaries({}, optional={"threshold": st.floats(0, 1), "adapt": st.booleans()}),
    ),
    st.tuples(
        st.just("dsde"),
        st.fixed_dictionaries(
            {},
            optional={
                "sl_max": st.integers(2, 40) | st.none(),
                "cap": st.booleans(),
                "decay": st.floats(0.1, 1),
                "kld_positions": st.sampled_from(["all", "to_first_rejection"]),
            },
        ),
    ),
)


@st.composite
def configs(draw: st.DrawFn) -> SpeculationConfig:
    policy, arguments = draw(policies)
    positive = st.integers(1, 4096)
    return SpeculationConfig(
        policy=policy,
        policy_arguments=arguments,
        max_draft_length=draw(positive),
        fill_to_batch=draw(st.booleans()),
        runner=draw(st.sampled_from([None, "eager", "graph"])),
        refresh_costs=draw(st.booleans()),
    )


class TestRoundTrip:
    @given(configs())
    def test_dict_and_json_give_the_same_config_back(self, config: SpeculationConfig) -> None:
        assert SpeculationConfig.from_dict(config.to_dict()) == config
        assert SpeculationConfig.from_json(config.to_json()) == config
        assert json.loads(config.to_json()) == config.to_dict()

    @given(configs())
    def test_copies_are_equal_and_hash_equally(self, config: SpeculationConfig) -> None:
        for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), config.replace()):  # noqa: S301
            assert other == config
            assert hash(other) == hash(config)

    def test_folder(self, tmp_path: Path) -> None:
        config = SpeculationConfig(policy="static", policy_arguments={"num_draft_tokens": 3}, runner="eager")
        config.save_pretrained(tmp_path / "made" / "on the way")
        assert (tmp_path / "made" / "on the way" / CONFIG_NAME).is_file()
        assert SpeculationConfig.from_pretrained(tmp_path / "made" / "on the way") == config
        assert SpeculationConfig.from_pretrained(tmp_path, subfolder="made/on the way") == config

    def test_every_field_but_the_options_is_saved(self) -> None:
        assert [*SpeculationConfig().to_dict(), "options"] == [f.name for f in fields(SpeculationConfig)]

    def test_options_stay_with_the_process(self, tmp_path: Path) -> None:
        config = SpeculationConfig("static", options=RuntimeOptions(prefill_chunk=7, keep_memory=False))
        config.save_pretrained(tmp_path)
        assert SpeculationConfig.from_pretrained(tmp_path) == SpeculationConfig("static")
        assert hash(config) == hash(SpeculationConfig("static"))
        assert config != SpeculationConfig("static")
        for copied in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):  # noqa: S301
            assert copied == config

    def test_absent_fields_take_their_defaults(self) -> None:
        assert SpeculationConfig.from_json("{}") == SpeculationConfig()


class TestHub:
    def test_what_is_no_folder_is_a_repository(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = SpeculationConfig(max_draft_length=7)
        config.save_pretrained(tmp_path)
        asked: list[Any] = []

        def download(repo_id: str, filename: str, **arguments: Any) -> str:
            asked.append((repo_id, filename, arguments))
            return str(tmp_path / filename)

        monkeypatch.setattr(config_module, "hf_hub_download", download)
        assert SpeculationConfig.from_pretrained("someone/a-draft", revision="v1", subfolder="x") == config
        assert asked == [("someone/a-draft", CONFIG_NAME, {"revision": "v1", "subfolder": "x"})]

    def test_folder_without_the_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"has no speculation_config\.json.*save_pretrained"):
            SpeculationConfig.from_pretrained(tmp_path)

    @pytest.mark.parametrize("text", ["{", "[]", '{"polices": "dsde"}', '{"max_draft_length": "8"}'])
    def test_a_bad_file_is_named(self, tmp_path: Path, text: str) -> None:
        (tmp_path / CONFIG_NAME).write_text(text)
        with pytest.raises(ValueError, match=r"speculation_config\.json holds no valid speculation config: ."):
            SpeculationConfig.from_pretrained(tmp_path)

    def test_a_file_that_names_no_runner_of_ours_is_told_which_there_are(self, tmp_path: Path) -> None:
        (tmp_path / CONFIG_NAME).write_text('{"runner": "compile"}')
        with pytest.raises(ValueError, match=r"speculation_config\.json holds.*'compile', but one of 'eager', 'graph'"):
            SpeculationConfig.from_pretrained(tmp_path)

    def test_saving_over_a_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(NotADirectoryError, match="which is a file"):
            SpeculationConfig().save_pretrained(tmp_path / "file")


class TestPolicy:
    def test_default_is_dsde(self) -> None:
        assert isinstance(SpeculationConfig().build_policy(), DSDEStoppingPolicy)

    def test_arguments_reach_it_and_every_build_is_new(self) -> None:
        config = SpeculationConfig(policy="static", policy_arguments={"num_draft_tokens": 2})
        first, second = config.build_policy(), config.build_policy()
        assert isinstance(first, StaticPolicy)
        assert first.num_draft_tokens == 2
        assert first is not second

    def test_the_callers_dict_stays_the_callers(self) -> None:
        arguments: dict[str, Any] = {"num_draft_tokens": 2}
        config = SpeculationConfig(policy="static", policy_arguments=arguments)
        arguments["num_draft_tokens"] = 9
        assert config.policy_arguments == {"num_draft_tokens": 2}


class TestReplace:
    def test_changes_one_field(self) -> None:
        config = SpeculationConfig(options=RuntimeOptions(view_bucket=128))
        assert config.replace(max_draft_length=4) == SpeculationConfig(max_draft_length=4, options=config.options)
        assert config.replace(options=RuntimeOptions()) == SpeculationConfig()
        assert config.max_draft_length == 32

    def test_another_policy_starts_from_its_own_defaults(self) -> None:
        config = SpeculationConfig(policy="dsde", policy_arguments={"sl_max": 8})
        assert config.replace(policy="static").policy_arguments == {}
        assert config.replace(policy="dsde").policy_arguments == {"sl_max": 8}

    def test_is_checked(self) -> None:
        with pytest.raises(ValueError, match="`max_draft_length` is 0"):
            SpeculationConfig().replace(max_draft_length=0)
        with pytest.raises(ValueError, match=r"no field `max_length`.*Did you mean `max_draft_length`"):
            SpeculationConfig().replace(max_length=3)

    def test_fields_cannot_be_set(self) -> None:
        with pytest.raises(FrozenInstanceError):
            SpeculationConfig().policy = "static"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "error", "fragments"),
    [
        ({"policy": "dsd"}, ValueError, ["There is no policy 'dsd'", "Known policies: ", "Did you mean 'dsde'?"]),
        ({"policy": None}, TypeError, ["`policy` is None", "register"]),
        ({"policy_arguments": {"sl_mx": 8}}, TypeError, ["'sl_mx'", "Its arguments are: sl_max"]),
        ({"policy_arguments": {"sl_max": 0}}, ValueError, ["`sl_max` is 0", "at least 2"]),
        ({"policy_arguments": {"decay": float("nan")}}, TypeError, ["`policy_arguments`", "JSON"]),
        ({"policy_arguments": {"decay": object()}}, TypeError, ["`policy_arguments`", "JSON"]),
        ({"policy_arguments": {1: 2}}, TypeError, ["`policy_arguments`", "argument names"]),
        ({"policy_arguments": [("sl_max", 8)]}, TypeError, ["`policy_arguments`"]),
        ({"max_draft_length": 0}, ValueError, ["`max_draft_length` is 0", "at least 1", "'static' with 0"]),
        ({"max_draft_length": True}, TypeError, ["`max_draft_length` is True", "an integer"]),
        ({"max_draft_length": 8.0}, TypeError, ["`max_draft_length` is 8.0"]),
        ({"fill_to_batch": 1}, TypeError, ["`fill_to_batch` is 1", "True or False"]),
        ({"runner": "fast"}, ValueError, ["`runner` is 'fast'", "'eager'"]),
        ({"runner": "compile"}, ValueError, ["`runner` is 'compile', but one of 'eager', 'graph'"]),
        ({"refresh_costs": None}, TypeError, ["`refresh_costs` is None", "True or False"]),
        ({"options": {"prefill_chunk": 1}}, TypeError, ["`options` is {'prefill_chunk': 1}", "RuntimeOptions"]),
    ],
)
def test_bad_values_are_named(changes: dict[str, Any], error: type[Exception], fragments: list[str]) -> None:
    with pytest.raises(error) as caught:
        SpeculationConfig(**changes)
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "error", "fragment"),
    [
        ({"view_bucket": 0}, ValueError, "`view_bucket` is 0, but an integer of at least 1"),
        ({"prefill_chunk": -1}, ValueError, "`prefill_chunk` is -1"),
        ({"max_graphs": 1.0}, TypeError, "`max_graphs` is 1.0"),
        *(
            ({name: 1}, TypeError, f"`{name}` is 1, but True or False")
            for name, kind in OPTIONS.items()
            if kind == "bool"
        ),
    ],
)
def test_bad_options_are_named(changes: dict[str, Any], error: type[Exception], fragment: str) -> None:
    for refused in (RuntimeOptions, RuntimeOptions().replace):
        with pytest.raises(error, match=fragment):
            refused(**changes)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_refused_wherever_a_configuration_is_made(name: str, tmp_path: Path) -> None:
    value = getattr(RuntimeOptions(), name)
    way_out = rf"no field `{name}`.*SpeculationConfig\(options=RuntimeOptions\({name}="
    makers: list[Callable[[], SpeculationConfig]] = [
        lambda: SpeculationConfig("static", **{name: value}),
        lambda: SpeculationConfig().replace(**{name: value}),
        lambda: SpeculationConfig.from_dict({name: value}),
    ]
    for make in makers:
        with pytest.raises(TypeError, match=way_out):
            make()
    (tmp_path / CONFIG_NAME).write_text(json.dumps({"policy": "static", name: value}))
    with pytest.raises(ValueError, match=rf"holds no valid speculation config: .*{way_out}"):
        SpeculationConfig.from_pretrained(tmp_path)


def test_a_file_with_several_options_names_all_of_them() -> None:
    with pytest.raises(TypeError, match="no field `keep_memory`, `prefill_chunk`"):
        SpeculationConfig.from_dict({"prefill_chunk": 8192, "policy": "static", "keep_memory": True})


def test_a_file_holds_no_options() -> None:
    with pytest.raises(ValueError, match="no field `options`"):
        SpeculationConfig.from_json('{"options": {"keep_memory": false}}')


def test_unknown_keys_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"no field `sl_max`.*Its fields are: policy.*`policy_arguments`"):
        SpeculationConfig.from_dict({"policy": "dsde", "sl_max": 8})
