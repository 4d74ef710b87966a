"""The deployment files, checked against the published schema of each format."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from tests import journals, tools

from kvledger.exporters.sidecar.follower import Follower

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "dashboards" / "deploy"
COMPONENT = DEPLOY / "kubernetes" / "component"
EXAMPLE = DEPLOY / "kubernetes" / "example"
KUBERNETES = "1.29"  # the first in which native sidecars are on


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def merged(base: Any, patch: Any) -> Any:
    """A strategic merge for pods: lists of named items are merged by name.

    https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/
    """
    if isinstance(base, dict) and isinstance(patch, dict):
        result = copy.deepcopy(base)
        for key, value in patch.items():
            result[key] = merged(base[key], value) if key in base else copy.deepcopy(value)
        return result
    if isinstance(base, list) and isinstance(patch, list) and _named(base) and _named(patch):
        by_name = {item["name"]: item for item in base}
        for item in patch:
            by_name[item["name"]] = merged(by_name.get(item["name"], {}), item)
        return list(by_name.values())
    return copy.deepcopy(patch)


def _named(items: list[Any]) -> bool:
    return all(isinstance(item, dict) and "name" in item for item in items)


@pytest.fixture
def deployment() -> dict[str, Any]:
    """The engine's Deployment with the component's patch, as kustomize builds it."""
    patch = read(COMPONENT / "sidecar.yaml")
    patch["metadata"].pop("name")
    patched: dict[str, Any] = merged(read(EXAMPLE / "vllm.yaml"), patch)
    return patched


def pod(deployment: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


def containers(deployment: dict[str, Any]) -> dict[str, Any]:
    spec = pod(deployment)
    return {container["name"]: container for container in (*spec["initContainers"], *spec["containers"])}


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container["env"]}


def test_the_patched_deployment_is_valid(deployment: dict[str, Any]) -> None:
    kubernetes_validate.validate(deployment, KUBERNETES, strict=True)


def test_a_wrong_deployment_is_refused(deployment: dict[str, Any]) -> None:
    containers(deployment)["kvledger"]["restartpolicy"] = "Always"

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, KUBERNETES, strict=True)


def test_the_patch_keeps_the_engines_own_settings(deployment: dict[str, Any]) -> None:
    before = read(EXAMPLE / "vllm.yaml")["spec"]["template"]["spec"]["containers"][0]

    assert before.items() <= containers(deployment)["vllm"].items()


def test_engine_and_sidecar_share_the_plugin_and_the_journal(deployment: dict[str, Any]) -> None:
    by_name = containers(deployment)
    engine, sidecar = by_name["vllm"], by_name["kvledger"]
    mounts = {mount["name"]: mount["mountPath"] for mount in engine["volumeMounts"]}

    assert environment(engine)["PYTHONPATH"] == mounts["kvledger-plugin"]
    assert environment(engine)["KVLEDGER_DIR"] == mounts["kvledger-journal"]
    assert sidecar["args"][1] == sidecar["volumeMounts"][0]["mountPath"] == mounts["kvledger-journal"]


def test_journals_stay_well_below_the_volumes_limit(deployment: dict[str, Any]) -> None:
    volumes = {volume["name"]: volume for volume in pod(deployment)["volumes"]}
    engine = environment(containers(deployment)["vllm"])

    assert "1Gi" == volumes["kvledger-journal"]["emptyDir"]["sizeLimit"]
    assert 2 * int(engine["KVLEDGER_TOTAL_BYTES"]) <= 1 << 30
    assert 2 * int(engine["KVLEDGER_JOURNAL_BYTES"]) <= int(engine["KVLEDGER_TOTAL_BYTES"])


@pytest.mark.parametrize("name", ["kvledger", "kvledger-plugin"])
def test_kvledger_containers_are_unprivileged(deployment: dict[str, Any], name: str) -> None:
    context = containers(deployment)[name]["securityContext"]

    assert context["runAsNonRoot"] and context["readOnlyRootFilesystem"]
    assert not context["allowPrivilegeEscalation"]
    assert ["ALL"] == context["capabilities"]["drop"]


def test_the_sidecar_is_native(deployment: dict[str, Any]) -> None:
    """The sidecar starts before the engine, keeps no job from ending, and ends after the engine."""
    names = [container["name"] for container in pod(deployment)["initContainers"]]

    assert "Always" == containers(deployment)["kvledger"]["restartPolicy"]
    assert ["kvledger-plugin", "kvledger"] == names


def test_nothing_in_the_sidecar_makes_the_pod_unready(deployment: dict[str, Any]) -> None:
    """A pod whose container fails a probe is not ready, or is restarted, and leaves its Service."""
    sidecar = containers(deployment)["kvledger"]

    assert not {"readinessProbe", "livenessProbe", "startupProbe"} & sidecar.keys()


def test_the_sidecars_container_goes_on_when_the_sidecar_ends(
    deployment: dict[str, Any], tmp_path: Path
) -> None:
    """With a wrong option, for example. At SIGTERM the sidecar gets it too, and the container ends with 0."""
    sidecar = containers(deployment)["kvledger"]
    calls = tmp_path / "calls"
    script = '#!/bin/sh\necho "$@" >> calls\n[ "$(wc -l < calls)" -gt 1 ] || exit 2\n'
    script += "trap 'echo stopped >> calls; exit 0' TERM\n/bin/sleep 60 2>&- & wait\n"
    for name, text in (("kvledger", script), ("sleep", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    process = subprocess.Popen(
        [*sidecar["command"], *sidecar["args"]],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while not calls.exists() or len(calls.read_text().splitlines()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.2)
    process.terminate()
    _, stderr = process.communicate(timeout=30)

    assert 0 == process.returncode
    assert "kvledger ended with 2 and is started again in 5 seconds\n" == stderr
    assert [" ".join(sidecar["args"])] * 2 + ["stopped"] == calls.read_text().splitlines()


def test_the_component_patches_labelled_deployments(deployment: dict[str, Any]) -> None:
    component = read(COMPONENT / "kustomization.yaml")
    key, _, value = component["patches"][0]["target"]["labelSelector"].partition("=")

    assert "Component" == component["kind"]
    assert value == deployment["metadata"]["labels"][key]


def test_every_named_file_exists() -> None:
    component = read(COMPONENT / "kustomization.yaml")
    example = read(EXAMPLE / "kustomization.yaml")
    patches = [patch["path"] for patch in component["patches"]]

    assert all((COMPONENT / name).exists() for name in (*component["resources"], *patches))
    assert all((EXAMPLE / name).exists() for name in (*example["resources"], *example["components"]))


@pytest.mark.programs
def test_the_podmonitor_is_valid_and_selects_the_pod(deployment: dict[str, Any]) -> None:
    """Checked with the operator's own schema, as published on npm."""
    monitor = read(COMPONENT / "podmonitor.yaml")
    modules = tools.npm(ROOT / "constraints" / "prometheus-operator.json")
    script = (
        "import { PodMonitor } from '@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1';"
        "new PodMonitor(JSON.parse(process.argv[1])).validate();"
    )
    done = subprocess.run(
        ["node", "--input-type=module", "-e", script, json.dumps(monitor)],
        cwd=modules.parent,
        capture_output=True,
        text=True,
    )

    assert 0 == done.returncode, done.stderr
    wanted = monitor["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    ports = {port["name"] for port in containers(deployment)["kvledger"]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= ports


@pytest.mark.programs
def test_the_compose_file_is_valid() -> None:
    """Checked with the schema of the Compose specification in Docker's last Python release."""
    with tools.wheel("docker-compose", "1.29.2").open("compose/config/compose_spec.json") as schema:
        checker = jsonschema.Draft7Validator(json.load(schema))

    assert [] == [error.message for error in checker.iter_errors(read(DEPLOY / "compose" / "compose.yaml"))]


def test_the_composed_sidecar_has_a_user_and_a_volume_of_its_own() -> None:
    services = read(DEPLOY / "compose" / "compose.yaml")["services"]
    sidecar, engine = services["kvledger"], services["vllm"]
    mounts = dict(volume.split(":", 1) for volume in sidecar["volumes"])

    assert "2000:2000" == sidecar["user"]
    assert f"{sidecar['command'][1]}:ro" == mounts["journal"]
    assert sidecar["command"][-2:] == ["--state", mounts["state"]]
    assert not any(volume.startswith("state:") for volume in engine["volumes"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs processes of two users")
def test_the_composed_sidecar_reads_what_an_engine_of_root_writes() -> None:
    """The volumes are folders here. Other users than the sidecar's read no journal."""
    services = read(DEPLOY / "compose" / "compose.yaml")["services"]
    (script,) = services["plugin"]["command"]
    user, group = map(int, services["kvledger"]["user"].split(":"))

    def follows(folder: Path, user: int, group: int) -> bool:
        """Whether a process of this user reads the journal and saves a checkpoint."""
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                os.setgroups([])
                os.setgid(group)
                os.setuid(user)
                follower = Follower(folder / "journal", folder / "state")
                follower.catch_up()
                os._exit(0 if len(follower.audits) == 1 and not follower.problems else 1)
            os._exit(2)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for volume in ("plugin", "journal", "state"):
            (folder / volume).mkdir()
            script = script.replace(f" /{volume}", f" {folder / volume}")
        script = script.replace("/opt/kvledger/.", str(COMPONENT / "."))
        subprocess.run(["sh", "-c", script], check=True)
        before = os.umask(0o022)
        try:
            journals.clean(folder / "journal" / "engine-0")
        finally:
            os.umask(before)

        assert follows(folder, user, group)
        assert (folder / "state" / "checkpoint").stat().st_uid == user
        assert not follows(folder, user + 1, group + 1)


@pytest.mark.programs
def test_promtool_accepts_the_compose_configuration(tmp_path: Path) -> None:
    promtool = tools.debian("prometheus", "promtool")
    (tmp_path / "prometheus.yml").write_text((DEPLOY / "compose" / "prometheus.yaml").read_text())
    rules = ROOT / "dashboards" / "kvledger-rules.yaml"
    (tmp_path / rules.name).write_text(rules.read_text())

    done = subprocess.run(
        [promtool, "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True
    )

    assert 0 == done.returncode, done.stderr


def test_systemd_accepts_the_unit() -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd is not on this machine")
    unit = DEPLOY / "systemd" / "kvledger.service"

    done = subprocess.run([analyze, "verify", unit], capture_output=True, text=True)

    assert (0, "") == (done.returncode, done.stderr)
