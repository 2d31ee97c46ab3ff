"""The compose file keeps to the compose specification and names only files that are there."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from compose_spec import PyCompose

from tests.deploy.queries import DEPLOY

FILE = DEPLOY / "compose" / "compose.yaml"
COMPOSE: dict[str, Any] = yaml.safe_load(FILE.read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def test_keeps_to_the_compose_specification() -> None:
    compose = PyCompose.from_yaml(FILE.read_text())
    compose.validate()
    assert sorted(compose.service_names()) == ["grafana", "loadgen", "megamoe", "prometheus"]


@pytest.mark.parametrize(
    ("old", "new"),
    [("shm_size: 2gb", "shm_size: [2gb]"), ("condition: service_healthy", "condition: service_happy")],
)
def test_the_specification_is_really_applied(old: str, new: str) -> None:
    text = FILE.read_text().replace(old, new)
    assert text != FILE.read_text()
    with pytest.raises(Exception, match=r"shm_size|service_happy|condition"):
        PyCompose.from_yaml(text)


def test_dependencies_and_volumes_are_defined() -> None:
    for name, service in SERVICES.items():
        for needed in service.get("depends_on", {}):
            assert needed in SERVICES, name
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (FILE.parent / source).resolve().exists(), mount
            else:
                assert source in COMPOSE["volumes"], mount


def test_images_are_pinned_and_ports_stay_on_this_host() -> None:
    for name, service in SERVICES.items():
        tag = service["image"].rpartition(":")[2]
        assert tag not in ("", "latest", service["image"]), name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        assert service["cap_drop"] == ["ALL"], name


def test_builds_from_the_dockerfile_with_room_for_the_heap() -> None:
    build = SERVICES["megamoe"]["build"]
    context = (FILE.parent / build["context"]).resolve()
    assert context == DEPLOY.parent
    assert (context / build["dockerfile"]).is_file()
    assert SERVICES["megamoe"]["shm_size"] == "2gb"


def test_prometheus_looks_for_the_service_by_its_name() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    (discovery,) = job["http_sd_configs"]
    host = SERVICES["megamoe"]["environment"]["MEGAMOE_ADVERTISE_HOST"]
    assert discovery["url"] == f"http://{host}:9400/sd"
    assert host in SERVICES
    assert SERVICES["loadgen"]["command"][:3] == ["loadgen", "--scenario", "agentx"]
