"""docs/security.md is true: each line of its tables names a test that there is, and what it says of code holds."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from lightning_rl_proxy.http.limits import RequestLimits

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text()
LINES = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| what")]
SOURCES = [path for room in ("lightning_rl", "proxy", "adapters") for path in sorted((ROOT / room).glob("**/*.py"))]


@pytest.mark.parametrize("line", LINES)
def test_each_line_has_its_test(line: str) -> None:
    named = re.findall(r"\| `(tests/\S+?)::(\w+)` \|$", line)
    assert len(named) == 1, line
    [(file, test)] = named
    assert f"def {test}(" in (ROOT / file).read_text(), f"{file} has no {test}"


def test_every_table_line_is_judged() -> None:
    assert len(LINES) == len([line for line in PAGE.splitlines() if line.endswith("` |")])
    assert len(LINES) > 20


def test_every_limit_is_on_the_page_with_its_default() -> None:
    told = {name: int(number.replace(",", "")) for name, number in re.findall(r"^\| `(\w+)`, ([\d,]+)", PAGE, re.M)}
    limits = RequestLimits()
    assert told == {name: getattr(limits, name) for name in limits.__struct_fields__}


@cache
def calls_and_comparisons() -> list[tuple[str, ast.AST]]:
    """Every call and every comparison in our code, with its file."""
    parsed = [(str(path.relative_to(ROOT)), ast.parse(path.read_text())) for path in SOURCES]
    return [
        (file, node) for file, tree in parsed for node in ast.walk(tree) if isinstance(node, ast.Call | ast.Compare)
    ]


@cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """Every call in our code: its file, what is called, and the call."""
    return [
        (file, ast.unparse(node.func), node) for file, node in calls_and_comparisons() if isinstance(node, ast.Call)
    ]


def test_pickles_are_read_only_from_a_runners_own_parent() -> None:
    loads = {"pickle.loads", "pickle.load", "cloudpickle.loads", "cloudpickle.load", "joblib.load", "np.load"}
    loads.add("pickle.Unpickler")
    parts_of_it = "lightning_rl/runner/agent_pickle.py"  # which are within the agent's, or were just pickled here
    found = {file for file, called, _ in calls() if called in loads}
    assert found == {"lightning_rl/runner/process.py", parts_of_it}


def test_nothing_reads_what_torch_has_pickled() -> None:
    assert not [file for file, called, _ in calls() if called == "torch.load"]


def test_code_of_a_models_folder_is_run_in_one_place_alone() -> None:
    for file, called, call in calls():
        given = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "trust_remote_code"]
        assert set(given) <= {"config.actor_rollout_ref.model.trust_remote_code"}, file  # what vLLM is told
        assert called != "get_class_from_dynamic_module" or file == "lightning_rl/inference/model_code.py"


def test_secrets_are_compared_by_compare_digest_alone() -> None:
    """No `==` beside a name that holds one."""
    secret = re.compile(r"(^|[._])(signature|secret|admin_key|runner_key|api_key|expected_key)$")
    for file, node in calls_and_comparisons():
        if isinstance(node, ast.Compare) and any(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops):
            sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
            assert not [side for side in sides if secret.search(side)], f"{file}:{node.lineno}: {sides}"
