"""The example pod fits the Pod Security Standard "restricted" and agrees with the image and the command line."""

from __future__ import annotations

from typing import Any

import yaml  # type: ignore[import-untyped]
from tests.support.source import ROOT

Node = dict[str, Any]

VOLUMES_ALLOWED = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def _pod() -> Node:
    pod: Node = yaml.safe_load((ROOT / "deploy" / "pod.yaml").read_text())
    return pod


def _containers() -> list[Node]:
    spec = _pod()["spec"]
    return [*spec["initContainers"], *spec["containers"]]


def test_the_pod_runs_as_nobody_special() -> None:
    spec = _pod()["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] != 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)


def test_each_container_is_locked_down() -> None:
    for container in _containers():
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False, container["name"]
        assert context["readOnlyRootFilesystem"] is True, container["name"]
        assert context["capabilities"] == {"drop": ["ALL"]}, container["name"]
        assert not any("hostPort" in port for port in container.get("ports", ())), container["name"]


def test_only_harmless_kinds_of_volume_are_used() -> None:
    kinds = {kind for volume in _pod()["spec"]["volumes"] for kind in volume if kind != "name"}
    assert kinds <= VOLUMES_ALLOWED


def test_the_sidecar_starts_before_the_trainer_and_outlives_it() -> None:
    (sidecar,) = _pod()["spec"]["initContainers"]
    assert sidecar["restartPolicy"] == "Always"
    assert "startupProbe" in sidecar


def test_trainer_and_sidecar_see_the_slots_under_the_same_path() -> None:
    paths = [
        {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in {"memory", "run"}}
        for container in _containers()
    ]
    assert paths[0] == paths[1]


def test_the_image_runs_as_the_user_of_the_pod_and_installs_no_torch() -> None:
    lines = (ROOT / "deploy" / "Containerfile").read_text().splitlines()
    user = _pod()["spec"]["securityContext"]["runAsUser"]
    assert f"USER {user}:{user}" in lines
    assert not any("torch" in line for line in lines if not line.startswith("#"))
