"""The Kubernetes manifests are valid, and what they start is what the command line takes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from lightning_rl.cli import app
from lightning_rl.processes.service_keys import ADMIN_KEY, RUNNER_KEY

FOLDER = Path(__file__).parents[3] / "deploy/kubernetes"
PAGE = Path(__file__).parents[3] / "docs/kubernetes.md"
OBJECTS = [
    pytest.param(each, id=f"{each['kind']} {each['metadata']['name']}")
    for path in sorted(FOLDER.glob("*.yaml"))
    for each in yaml.safe_load_all(path.read_text())
]
PODS = [each for each in OBJECTS if "template" in each.values[0].get("spec", {})]
VERSIONS = [kubernetes_validate.latest_version(), "1.29"]


def container_of(workload: Any) -> Any:
    [container] = workload["spec"]["template"]["spec"]["containers"]
    return container


def words_of(workload: Any) -> tuple[str, dict[str, Any]]:
    """The command that it starts, and its parameters as Typer reads them. Raises what Typer does for a wrong word."""
    container = container_of(workload)
    program, *words = [*container["command"], *container["args"]]
    assert program == "lightning-rl"
    group: Any = typer.main.get_command(app)
    name, command, rest = group.resolve_command(typer.Context(group), words)
    return name, command.make_context(name, rest).params


def named(kind: str, name: str) -> Any:
    [found] = [each.values[0] for each in OBJECTS if each.values[0]["kind"] == kind and name in each.id]
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("given", OBJECTS)
def test_a_manifest_is_valid(given: dict[str, Any], version: str) -> None:
    assert kubernetes_validate.validate(given, version, strict=True) == ".".join(version.split(".")[:2])


def test_a_manifest_with_a_wrong_word_is_not() -> None:
    wrong = yaml.safe_load((FOLDER / "runner.yaml").read_text())
    wrong["spec"]["replica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def test_the_server_is_started_where_the_service_leads() -> None:
    name, words = words_of(named("Deployment", "server"))
    service = named("Service", "server")
    [port] = service["spec"]["ports"]
    url = f"http://{service['metadata']['name']}:{port['port']}"
    [listening] = container_of(named("Deployment", "server"))["ports"]
    assert (name, words["url"], words["host"], words["port"]) == ("serve", url, "0.0.0.0", listening["containerPort"])
    assert port["targetPort"] == listening["name"]
    labels = named("Deployment", "server")["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    for runner in (named("Deployment", "runner"), named("Job", "rollouts")):
        name, words = words_of(runner)
        assert (name, words["store"]) == ("runner", [url])


def test_a_pod_of_the_job_takes_one_rollout() -> None:
    _, words = words_of(named("Job", "rollouts"))
    assert (words["n"], words["max_rollouts"]) == (1, 1)


@pytest.mark.parametrize("given", PODS)
def test_a_pod_writes_only_where_a_volume_is(given: dict[str, Any]) -> None:
    container = container_of(given)
    mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
    _, words = words_of(given)
    written = [str(words[name]) for name in ("log_dir", "run_dir") if words.get(name)]
    written += [str(words["store"]).removeprefix("sqlite:///")] if "sqlite" in str(words["store"]) else []
    written += [each["value"] for each in container["env"] if each["name"] == "HOME"]
    assert written
    for place in written:
        assert any(place == mount or place.startswith(f"{mount}/") for mount in mounted), place
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert given["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"]


@pytest.mark.parametrize("given", PODS)
def test_a_pod_has_the_keys_that_it_needs_and_no_other_from_a_secret(given: dict[str, Any]) -> None:
    keys = {each["name"]: each.get("valueFrom") for each in container_of(given)["env"] if each["name"] != "HOME"}
    assert set(keys) == ({ADMIN_KEY, RUNNER_KEY} if "server" in given["metadata"]["name"] else {RUNNER_KEY})
    for source in keys.values():
        secret = source["secretKeyRef"]
        assert f"--from-literal={secret['key']}=" in PAGE.read_text()
        assert f"secret generic {secret['name']}" in PAGE.read_text()


def paths() -> Iterator[str]:
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        yield container_of(named("Deployment", "server"))[probe]["httpGet"]["path"]


def test_its_probes_ask_for_what_the_server_answers_without_a_key() -> None:
    from lightning_rl.control_plane.operations import PATHS

    assert set(paths()) == {"/healthz", "/readyz"}
    assert set(paths()) <= set(PATHS)
