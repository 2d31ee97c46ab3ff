"""The manifests validate against Kubernetes' own schemas, and hold what one group of ranks needs.

RayCluster is KubeRay's kind, which no library carries a schema of; its pod template is validated as the Pod it becomes.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.queries import DEPLOY

DOCUMENTS: list[dict[str, Any]] = list(
    yaml.safe_load_all((DEPLOY / "kubernetes" / "raycluster.yaml").read_text())
)
CLUSTER = next(document for document in DOCUMENTS if document["kind"] == "RayCluster")
TEMPLATE: dict[str, Any] = CLUSTER["spec"]["headGroupSpec"]["template"]
(HEAD,) = TEMPLATE["spec"]["containers"]


def head_pod() -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "megamoe-head", **copy.deepcopy(TEMPLATE["metadata"])},
        "spec": copy.deepcopy(TEMPLATE["spec"]),
    }


def validate(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_core_kinds_keep_to_their_schemas() -> None:
    core = [document for document in DOCUMENTS if document["kind"] != "RayCluster"]
    assert {document["kind"] for document in core} == {"Service", "PodDisruptionBudget"}
    for document in core:
        validate(document)


def test_the_head_is_a_valid_pod() -> None:
    validate(head_pod())


def test_the_schemas_are_really_applied() -> None:
    pod = head_pod()
    pod["spec"]["containers"][0]["readinessProbe"]["periodSecond"] = 5
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(pod)


def test_the_cluster_has_the_fields_that_kuberay_knows() -> None:
    assert CLUSTER["apiVersion"] == "ray.io/v1"
    assert set(CLUSTER["spec"]) == {"rayVersion", "headGroupSpec"}
    assert set(CLUSTER["spec"]["headGroupSpec"]) == {"serviceType", "rayStartParams", "template"}
    assert all(
        isinstance(value, str) for value in CLUSTER["spec"]["headGroupSpec"]["rayStartParams"].values()
    )


def test_all_ranks_share_the_head_pod() -> None:
    """Expert parallelism across hosts is refused at start, so there must be no workers to place ranks on."""
    assert "workerGroupSpecs" not in CLUSTER["spec"]


def test_ray_is_the_pinned_version() -> None:
    pins = (DEPLOY.parent / "constraints" / "cpu.txt").read_text()
    assert f"\nray=={CLUSTER['spec']['rayVersion']}\n" in pins


def test_shared_memory_is_a_sized_volume_within_the_memory_limit() -> None:
    (mount,) = [mount for mount in HEAD["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    (volume,) = [volume for volume in TEMPLATE["spec"]["volumes"] if volume["name"] == mount["name"]]
    assert volume["emptyDir"]["medium"] == "Memory"
    assert gib(volume["emptyDir"]["sizeLimit"]) < gib(HEAD["resources"]["limits"]["memory"])


def gib(quantity: str) -> int:
    match = re.fullmatch(r"(\d+)Gi", quantity)
    assert match, f"{quantity} must be whole Gi"
    return int(match[1])


def test_readiness_asks_for_progress_and_liveness_for_the_supervisor() -> None:
    ports = {port["name"]: port["containerPort"] for port in HEAD["ports"]}
    assert HEAD["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert HEAD["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert HEAD["startupProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert ports == {"grpc": 50051, "http": 9400, "gcs": 6379}


def test_is_not_root_and_gets_no_variables_of_services() -> None:
    """A Service called megamoe would otherwise inject MEGAMOE_PORT, which the service refuses as a setting."""
    assert TEMPLATE["spec"]["enableServiceLinks"] is False
    assert TEMPLATE["spec"]["securityContext"]["runAsNonRoot"] is True
    assert HEAD["securityContext"]["allowPrivilegeEscalation"] is False


def test_service_and_budget_select_the_head() -> None:
    labels = TEMPLATE["metadata"]["labels"] | {"ray.io/node-type": "head"}  # KubeRay adds the second
    for document in DOCUMENTS:
        spec = document["spec"]
        selector = spec["selector"].get("matchLabels", spec["selector"]) if "selector" in spec else {}
        assert selector.items() <= labels.items()
