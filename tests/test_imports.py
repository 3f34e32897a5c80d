import ast
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import hf_dsde
from hf_dsde.utils.lazy_names import lazy_names

ROOT = Path(hf_dsde.__file__).parents[1]
HEAVY = (
    "IPython",
    "accelerate",
    "datasets",
    "evaluate",
    "matplotlib",
    "pandas",
    "platformdirs",
    "pyarrow",
    "rich",
    "sklearn",
    "tqdm",
    "triton",
    "typer",
)

SCRIPT = """
import json, sys, threading
HEAVY = {heavy!r}

def loaded():
    return [name for name in HEAVY if name in sys.modules]

report = {{}}
import hf_dsde
report["by import"] = sorted(name for name in ("torch", "transformers", "numpy", *HEAVY) if name in sys.modules)
report["listed"] = dir(hf_dsde)

import torch
from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM
theirs = loaded()  # what transformers itself imports

statements = [f"from hf_dsde import {{name}}" for name in ("enable", "SpeculationConfig", "register", "load_draft")]
statements += ["from hf_dsde.policies import GoodputPolicy", "from hf_dsde.config import SpeculationConfig"]
statements += ["import hf_dsde; hf_dsde.policies.StaticPolicy", "from hf_dsde import release_memory"]
barrier, failures = threading.Barrier(len(statements)), []

def run(statement):
    barrier.wait()
    try:
        exec(statement, {{}})
    except BaseException as error:
        failures.append(f"{{statement}}: {{error!r}}")

sys.setswitchinterval(1e-5)  # threads meet more often
threads = [threading.Thread(target=run, args=(statement,), daemon=True) for statement in statements]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(60)
sys.setswitchinterval(0.005)
report["failures"] = failures + [str(thread) for thread in threads if thread.is_alive()]

shape = dict(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
model = hf_dsde.enable(LlamaForCausalLM(LlamaConfig(**shape, pad_token_id=0, eos_token_id=None)))
prompts = torch.tensor([[3, 4, 5], [6, 7, 8]])
arguments = dict(speculation_policy="dsde", do_sample=False, max_new_tokens=6)
report["shape"] = list(model.generate(prompts, assistant_model=model, **arguments).shape)
report["by generate"] = [name for name in loaded() if name not in theirs]

hf_dsde.BatchGenerator
report["by all names"] = [name for name in loaded() if name not in theirs]
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def fresh():
    """What a fresh process finds after each step."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", SCRIPT.format(heavy=HEAVY)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_importing_the_package_loads_none_of_its_dependencies(fresh):
    assert fresh["by import"] == []


def test_a_call_of_generate_loads_nothing_heavy_beyond_what_transformers_does(fresh):
    assert fresh["shape"] == [2, 9]
    assert fresh["by generate"] == []


def test_no_public_name_loads_what_only_files_and_terminals_need(fresh):
    assert fresh["by all names"] == []


def test_threads_that_import_at_once_all_succeed(fresh):
    assert fresh["failures"] == []


def test_public_names_are_listed_before_they_are_used(fresh):
    assert set(hf_dsde.__all__) <= set(fresh["listed"])


def test_every_public_name_is_reachable_in_every_way():
    starred = {}
    exec("from hf_dsde import *", starred)  # noqa: S102
    for name in hf_dsde.__all__:
        value = getattr(hf_dsde, name)
        assert value.__name__ == name
        assert starred[name] is value
        assert pickle.loads(pickle.dumps(value)) is value  # noqa: S301


def test_type_checkers_see_the_names_from_the_modules_that_give_them():
    tree = ast.parse(Path(hf_dsde.__file__).read_text(encoding="utf-8"))
    (checking,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {alias.name: node.module for node in checking.body for alias in node.names}
    assert sorted(imported) == sorted(hf_dsde.__all__)
    (table,) = (node for part in checking.orelse for node in ast.walk(part) if isinstance(node, ast.Dict))
    assert ast.literal_eval(table) == imported


def test_modules_are_attributes_of_the_package():
    assert hf_dsde.policies is sys.modules["hf_dsde.policies"]
    assert hf_dsde.execution.spans is sys.modules["hf_dsde.execution.spans"]


def test_an_unknown_name_is_an_attribute_error_that_names_it():
    assert not hasattr(hf_dsde, "enabel")
    with pytest.raises(AttributeError, match="module 'hf_dsde' has no attribute 'enabel'") as raised:
        hf_dsde.enabel  # noqa: B018
    assert raised.value.name == "enabel"
    with pytest.raises(ImportError, match="enabel"):
        exec("from hf_dsde import enabel")  # noqa: S102


def test_a_module_that_lacks_a_dependency_says_so_instead_of_being_unknown(tmp_path, monkeypatch):
    package = tmp_path / "lazy_example"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "plots.py").write_text("import a_package_that_is_not_there\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    get, names = lazy_names("lazy_example", {"__name__": "lazy_example"}, {"draw": "lazy_example.plots"})
    assert names() == ["__name__", "draw"]
    for name in ("plots", "draw"):
        with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
            get(name)


def test_no_module_asks_for_a_lazy_name_while_it_is_imported():
    """It would wait for the lock of lazy names with its own import lock held."""
    asking = []
    for file in (ROOT / "hf_dsde").rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module == "hf_dsde":
                asking += [f"{file.name}: {alias.name}" for alias in node.names if alias.name in hf_dsde.__all__]
    assert asking == []
