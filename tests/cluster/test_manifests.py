"""The manifests for clusters of one's own are valid, and ask for a token."""

import tomllib
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.support.paths import ROOT

KUBERNETES = "1.31"


@pytest.fixture
def kuberay() -> Any:
    return yaml.safe_load((ROOT / "tasks/cluster/kuberay.yaml").read_text())


def test_ray_reads_the_ray_cluster(kuberay: dict[str, Any]) -> None:
    """Ray's own reader finds the pods' cores and GPUs; the version is the one of the lock, and a token is asked for."""
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    read = _derive_autoscaling_config_from_ray_cr(kuberay)["available_node_types"]
    shapes = {name: (node["resources"].get("CPU"), node["resources"].get("GPU", 0)) for name, node in read.items()}
    assert shapes == {"headgroup": (8, 0), "gpus": (64, 8)}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["ray"] == [f"ray=={kuberay['spec']['rayVersion']}"]
    assert kuberay["spec"]["authOptions"] == {"mode": "token"}
    for pod in templates(kuberay):
        assert {"name": "RAY_enable_metrics_collection", "value": "0"} in pod["spec"]["containers"][0]["env"]


def test_pods_fit_the_schema_of_kubernetes(kuberay: dict[str, Any]) -> None:
    meta = {"metadata": {"name": "pod", "namespace": kuberay["metadata"]["namespace"]}}
    for template in templates(kuberay):
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **meta, **template}, KUBERNETES, strict=True)


def templates(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the operator makes pods from, one of each group."""
    return [each["template"] for each in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"])]


def test_ray_up_reads_its_file() -> None:
    """Ray's schema holds, each host gets the token, and no Ray is started without it."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((ROOT / "tasks/cluster/ray-up.yaml").read_text())
    prepared = prepare_config(config)
    validate_config(prepared)
    assert prepared["max_workers"] == len(config["provider"]["worker_ips"])
    assert "~/.ray/auth_token" in config["file_mounts"]
    starts = [line for who in ("head", "worker") for line in config[f"{who}_start_ray_commands"] if "ray start" in line]
    assert ["RAY_AUTH_MODE=token RAY_enable_metrics_collection=0" in line for line in starts] == [True] * 2
