"""What is wrong with rendered manifests, a sentence each: what schemas see, and what no schema does."""

import asyncio
import functools
import json
import re
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import kubernetes_validate
import typer.main
import yaml
from ray.scripts.scripts import start
from ray.serve.schema import ServeDeploySchema

from cluster import app
from cluster.app import STOP_S
from cluster.checking import problems
from cluster.command import app as commands
from cluster.configuration import ClusterConfig, Replicas, parse
from cluster.manifest import manifest
from cluster.planning import Node, refusals
from services.gateway.app import router
from services.types.errors import WealdError
from tests.k8s.rendering import ROOT, Object, Pods, amount, one, pods, serve_config

KUBERNETES = "1.33"
SECRETS = {
    "weald-redis": {"password", "url"},
    "weald-api-keys": {"keys", "scrape"},
    "weald-hub": {"token"},
}
"""Those that the user makes, and their keys."""
RAY = ("head", "draft", "verify")
CARDS = {"NVIDIA-H100-80GB-HBM3": "H100 SXM", "NVIDIA-L40S": "L40S"}
"""As GPU feature discovery labels nodes, and as the plan calls cards."""
CARD_BYTES = 0.9 * 80e9
"""Of a GPU's memory, for weights and pages, as the plan has it."""
RAY_ENDS_S = 10.0
DROPPED = {"drop": ["ALL"]}
PROXY = "/-/healthz"
"""Where Serve's proxy says that it is up, which it is after the first replica."""
NOT_OURS = {"model", "speculative_model", "store", "gateway.api_key_file"}
"""Keys whose problems are those of this machine, which has not what the cluster will have."""


@dataclass(frozen=True)
class Overlay:
    """What an overlay says, in its files and rendered."""

    name: str
    values: Object
    """Of its weald.yaml."""
    objects: Sequence[Object]

    @property
    def config(self) -> ClusterConfig:
        return parse(self.values)

    @property
    def pods(self) -> list[Pods]:
        return list(pods(self.objects))

    def kind(self, *kinds: str) -> list[Object]:
        """All objects of these kinds."""
        return [each for each in self.objects if each["kind"] in kinds]


def wrong(overlay: Overlay, crds: Path | None) -> list[str]:
    """All that is wrong with it."""
    return [f"{check.__name__}: {told}" for check in CHECKS for told in check(overlay)] + [
        f"schemas: {told}" for told in misshapen(overlay.objects, crds)
    ]


def misshapen(objects: Sequence[Object], crds: Path | None) -> Iterator[str]:
    """What the schemas refuse: of Kubernetes' own kinds, and of those that there are definitions of."""
    defined = definitions(crds)
    for each in objects:
        name = f"{each['kind']} {each['metadata']['name']}"
        if schema := defined.get((each["apiVersion"], each["kind"])):
            for error in jsonschema.Draft202012Validator(schema).iter_errors(each):
                yield f"{name}: {'.'.join(map(str, error.absolute_path))}: {error.message[:200]}"
        elif is_built_in(each):
            try:
                kubernetes_validate.validate(each, KUBERNETES, strict=True)
            except kubernetes_validate.ValidationError as error:
                yield f"{name}: {'.'.join(map(str, error.path))}: {error.message[:200]}"


def is_built_in(each: Object) -> bool:
    """Whether a kind is Kubernetes' own."""
    group = each["apiVersion"].rpartition("/")[0]
    return "." not in group or group.endswith(".k8s.io")


@functools.cache
def definitions(crds: Path | None) -> dict[tuple[str, str], Any]:
    """Schemas by version and kind, that refuse what they do not name."""
    found = {}
    for file in sorted(crds.glob("*.yaml")) if crds else ():
        for each in yaml.load_all(file.read_text(), yaml.CSafeLoader):
            for version in each["spec"]["versions"]:
                schema = _closed(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {"type": "object"}
                found[f"{each['spec']['group']}/{version['name']}", each["spec"]["names"]["kind"]] = schema
    return found


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    closed = {key: _closed(value) for key, value in schema.items()}
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and not open_ended:
        closed["additionalProperties"] = False
    return closed


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a selector of labels means these; an empty one means all."""
    wanted = selector.get("matchLabels", {})
    among = selector.get("matchExpressions", ())
    assert all(each["operator"] == "In" for each in among)
    return wanted.items() <= labels.items() and all(labels.get(e["key"]) in e["values"] for e in among)


def port(of: Pods, named: str | int) -> int | None:
    """The number of a container's port, by its name or number; None when there is none."""
    declared = {each["name"]: each["containerPort"] for each in of.container.get("ports", ())}
    return declared.get(named) if isinstance(named, str) else named


def names_and_ports(overlay: Overlay) -> Iterator[str]:
    """Selectors that mean no pod, and ports that nobody has."""
    every = overlay.pods
    for service in overlay.kind("Service"):
        name = f"Service {service['metadata']['name']}"
        meant = [each for each in every if selects({"matchLabels": service["spec"]["selector"]}, each.labels)]
        if len(meant) != 1:
            yield f"{name} means {[each.name for each in meant]}"
        for each in service["spec"]["ports"]:
            if any(port(of, each["targetPort"]) is None for of in meant):
                yield f"{name}: nobody has the port {each['targetPort']}"
    for budget in overlay.kind("PodDisruptionBudget"):
        meant = [each for each in every if selects(budget["spec"]["selector"], each.labels)]
        if any(of.group for of in meant) and not isinstance(budget["spec"].get("minAvailable"), int):
            yield f"PodDisruptionBudget {budget['metadata']['name']}: of pods of Ray only a number can stay"
        if len(meant) != 1:
            yield f"PodDisruptionBudget {budget['metadata']['name']} means no pod, or pods of several kinds"
    for workload in overlay.kind("Deployment", "StatefulSet"):
        if not selects(workload["spec"]["selector"], workload["spec"]["template"]["metadata"]["labels"]):
            yield f"{workload['kind']} {workload['metadata']['name']} does not select its own pods"
    for policy in overlay.kind("NetworkPolicy"):
        yield from _policy(policy, every)
    for monitor in overlay.kind("PodMonitor"):
        meant = [each for each in every if selects(monitor["spec"]["selector"], each.labels)]
        if {each.name for each in meant} != set(RAY):
            yield f"PodMonitor {monitor['metadata']['name']} means {[each.name for each in meant]}"
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            if any(port(of, endpoint["port"]) is None for of in meant):
                yield f"PodMonitor {monitor['metadata']['name']}: nobody has the port {endpoint['port']}"
    for scrape in overlay.kind("ScrapeConfig"):
        for found in scrape["spec"]["httpSDConfigs"]:
            yield from _reached(overlay, found["url"], {route.path for route in router.routes})  # type: ignore[attr-defined]
    for of in every:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = of.container.get(probe, {}).get("httpGet", {}).get("port")
            if asked is not None and port(of, asked) is None:
                yield f"{of.name}: its {probe} asks at {asked}, which is no port of it"


def _policy(policy: Object, every: Sequence[Pods]) -> Iterator[str]:
    name, spec = f"NetworkPolicy {policy['metadata']['name']}", policy["spec"]
    here = [each for each in every if selects(spec["podSelector"], each.labels)]
    if not here:
        yield f"{name} is for no pod"
    for direction, side in (("ingress", "from"), ("egress", "to")):
        for rule in spec.get(direction, ()):
            there: list[Pods] = []
            for peer in rule.get(side, ()):
                meant = [e for e in every if "podSelector" in peer and selects(peer["podSelector"], e.labels)]
                if "namespaceSelector" not in peer and not meant:
                    yield f"{name}: {direction} {side} {peer} is no pod's"
                there += meant
            for asked in rule.get("ports", ()):
                targets = here if direction == "ingress" else there
                if isinstance(asked["port"], str) and any(port(of, asked["port"]) is None for of in targets):
                    yield f"{name}: {asked['port']} is not a port of all of {[of.name for of in targets]}"


def _reached(overlay: Overlay, url: str, paths: set[str] | None = None) -> Iterator[str]:
    """Whether a URL is one of a service that there is."""
    parts = urlsplit(url)
    ports = {
        service["metadata"]["name"]: {each["port"] for each in service["spec"]["ports"]}
        for service in overlay.kind("Service")
    }
    name, _, within = (parts.hostname or "").partition(".")
    if (parts.port or 80) not in ports.get(name, ()) or within not in ("", "weald.svc"):
        yield f"{url} is no service's"
    if paths is not None and parts.path not in paths:
        yield f"{url}: a gateway has no such path"


@dataclass(frozen=True)
class Flow:
    """Traffic from pods to a port of others."""

    source: str
    target: str
    port: str | int
    """Its name, or any number."""


NEEDED = (
    *(Flow(source, target, 40_000) for source in RAY for target in RAY),
    *(Flow(source, "redis", "redis") for source in RAY),
    *(Flow(source, "otel-collector", "otlp-grpc") for source in RAY),
)
REFUSED = (
    Flow("redis", "head", "dashboard"),
    Flow("redis", "draft", "http"),
    Flow("otel-collector", "verify", 40_000),
    Flow("otel-collector", "redis", "redis"),
)


def traffic(overlay: Overlay) -> Iterator[str]:
    """What must pass and does not, and what must not pass and does, by the network policies."""
    by_name = {each.name: each for each in overlay.pods}
    for flow in (*NEEDED, *REFUSED):
        source, target = by_name[flow.source], by_name[flow.target]
        passes = _passes(overlay, "egress", source, target, flow.port) and _passes(
            overlay, "ingress", target, source, flow.port
        )
        if passes != (flow in NEEDED):
            yield f"{flow.source} {'reaches' if passes else 'does not reach'} {flow.target} at {flow.port}"


def _passes(overlay: Overlay, direction: str, here: Pods, there: Pods, at: str | int) -> bool:
    side = "from" if direction == "ingress" else "to"
    for policy in overlay.kind("NetworkPolicy"):
        if not selects(policy["spec"]["podSelector"], here.labels):
            continue
        for rule in policy["spec"].get(direction, ()):
            peers = [peer for peer in rule.get(side, ()) if "namespaceSelector" not in peer]
            if side in rule and not any(selects(peer["podSelector"], there.labels) for peer in peers):
                continue
            if "ports" not in rule or any(each["port"] == at for each in rule["ports"]):
                return True
    return False


def references(overlay: Overlay) -> Iterator[str]:
    """What is named and is not there."""
    maps = {each["metadata"]["name"]: set(each["data"]) for each in overlay.kind("ConfigMap")}
    claims = {each["metadata"]["name"] for each in overlay.kind("PersistentVolumeClaim")}
    issued = {
        each["spec"]["secretName"]: {"tls.crt", "tls.key", "ca.crt"} for each in overlay.kind("Certificate")
    }
    secrets = SECRETS | issued
    for of in overlay.pods:
        made = {each["name"] for each in of.spec.get("volumes", ())}
        templates = [
            claim["metadata"]["name"]
            for each in overlay.kind("StatefulSet")
            for claim in each["spec"]["volumeClaimTemplates"]
        ]
        for mount in of.container.get("volumeMounts", ()):
            if mount["name"] not in made | set(templates):
                yield f"{of.name} mounts {mount['name']}, which is no volume of it"
        for volume in of.spec.get("volumes", ()):
            if volume["name"] not in {mount["name"] for mount in of.container["volumeMounts"]}:
                yield f"{of.name} does not mount its volume {volume['name']}"
            if "configMap" in volume and volume["configMap"]["name"] not in maps:
                yield f"{of.name}: there is no ConfigMap {volume['configMap']['name']}"
            if (
                "persistentVolumeClaim" in volume
                and volume["persistentVolumeClaim"]["claimName"] not in claims
            ):
                yield f"{of.name}: there is no claim {volume['persistentVolumeClaim']['claimName']}"
            if secret := volume.get("secret"):
                asked = {item["key"] for item in secret.get("items", ())}
                yield from _keys(of.name, secret["secretName"], asked, secrets)
        for variable in of.container.get("env", ()):
            source = variable.get("valueFrom", {})
            if reference := source.get("secretKeyRef"):
                yield from _keys(of.name, reference["name"], {reference["key"]}, secrets)
            if reference := source.get("configMapKeyRef"):
                yield from _keys(of.name, reference["name"], {reference["key"]}, maps)
        if of.spec["serviceAccountName"] not in {
            e["metadata"]["name"] for e in overlay.kind("ServiceAccount")
        }:
            yield f"{of.name}: there is no account {of.spec['serviceAccountName']}"
    ray = one(overlay.objects, "RayService", "weald")["spec"]["rayClusterConfig"]
    if kept := ray.get("gcsFaultToleranceOptions"):
        reference = kept["redisPassword"]["valueFrom"]["secretKeyRef"]
        yield from _keys("gcsFaultToleranceOptions", reference["name"], {reference["key"]}, secrets)
        yield from _reached(overlay, f"redis://{kept['redisAddress']}")
    for scrape in overlay.kind("ScrapeConfig"):
        for found in scrape["spec"]["httpSDConfigs"]:
            reference = found["authorization"]["credentials"]
            yield from _keys("ScrapeConfig", reference["name"], {reference["key"]}, secrets)
    if made_here := overlay.kind("Secret"):
        yield f"there are secrets in the tree: {[each['metadata']['name'] for each in made_here]}"


def _keys(who: str, name: str, asked: set[str], there: Mapping[str, set[str]]) -> Iterator[str]:
    if name not in there:
        yield f"{who}: nobody makes {name}"
    elif unknown := asked - there[name]:
        yield f"{who}: {name} has no {sorted(unknown)}"


def flags_and_variables(overlay: Overlay) -> Iterator[str]:
    """What a program is given and does not read."""
    known = {option.lstrip("-") for each in start.params for option in each.opts}
    for of in overlay.pods:
        for flag in (of.group or {}).get("rayStartParams", {}):
            if flag not in known:
                yield f"{of.name}: ray start has no --{flag}"
        hook = of.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        if hook:
            yield from _refused(hook)
        shell = " ".join((*of.container.get("command", ()), *of.container.get("args", ())))
        for variable in of.container.get("env", ()):
            name = variable["name"]
            if f"${name}" not in shell and name not in _read("huggingface_hub") | _read("ray"):
                yield f"{of.name}: nothing reads {name}"
        for program in re.findall(r"\b(hf|weald|redis-server|redis-cli)\b", shell):
            scripts = {
                each.name for d in ("huggingface_hub", "weald") for each in distribution(d).entry_points
            }
            if not program.startswith("redis") and program not in scripts:
                yield f"{of.name}: the image has no {program}"


def _refused(command: Sequence[str]) -> Iterator[str]:
    """What `weald` would say of its arguments."""
    program, name, *arguments = command
    group: Any = typer.main.get_command(commands)
    if program != "weald" or name not in group.commands:
        yield f"{shlex.join(command)} is no command of weald"
        return
    try:
        group.commands[name].make_context(name, list(arguments))
    except Exception as error:  # of any kind that typer has
        yield f"{shlex.join(command)}: {error}"


@functools.cache
def _read(package: str) -> frozenset[str]:
    """The variables that a package reads."""
    (root,) = (find_spec(package) or _absent(package)).submodule_search_locations or ()
    found: set[str] = set()
    for file in Path(root).rglob("*.py"):
        if file.stat().st_size < 400_000:
            found.update(re.findall(r"""["']((?:HF|RAY)_[A-Za-z_]+)["']""", file.read_text(errors="ignore")))
    return frozenset(found)


def _absent(package: str) -> Any:
    raise ModuleNotFoundError(package)


def configuration(overlay: Overlay) -> Iterator[str]:
    """Where what Serve is told is not what weald.yaml says, or names what its pods have not."""
    told = one(overlay.objects, "RayService", "weald")["spec"]
    try:
        written = yaml.safe_load(manifest(overlay.values))
        config = overlay.config
    except WealdError as error:
        yield error.message
        return
    served = serve_config(overlay.objects)
    if served != written:
        yield "serve.yaml is not what `weald manifest` makes of weald.yaml; write it anew"
    with warnings.catch_warnings():
        # It would have the interval of reports in the environment of every node.
        warnings.simplefilter("ignore", DeprecationWarning)
        ServeDeploySchema.model_validate(served)
    for application in served["applications"]:
        module, _, builder = application["import_path"].partition(":")
        built = getattr(app, builder, None) if module == "cluster.app" else None
        if built is None:
            yield f"{application['import_path']} is nothing"
            continue
        deployments = {each["name"] for each in application["deployments"]}
        if {built(application["args"])._bound_deployment.name} != deployments:
            yield f"{application['name']}: {application['import_path']} has no {deployments}"
    by_name = {each.name: each for each in overlay.pods}
    if port(by_name["draft"], "http") != served["http_options"]["port"]:
        yield f"Serve listens at {served['http_options']['port']}, the draft pods say otherwise"
    if config.gateway.host != "0.0.0.0":
        yield f"gateway.host is {config.gateway.host}: nobody outside of its pod reaches it"
    pinned = re.search(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if not pinned or told["rayClusterConfig"]["rayVersion"] != pinned[1]:
        yield f"rayVersion is {told['rayClusterConfig']['rayVersion']}, the image has another"
    yield from _files(config, by_name)
    if endpoint := config.telemetry.otlp_traces_endpoint:
        yield from _reached(overlay, endpoint)
    for kind, section in (("verify", config.verify), ("draft", config.draft), ("gateway", config.gateway)):
        if not _hosts(section.resources.labels, by_name):
            yield f"{kind}: no group has the labels {dict(section.resources.labels)}"
    if bool(config.tls) != ("tlsOptions" in told["rayClusterConfig"]):
        yield "the component mutual-tls and `tls` in weald.yaml go together"
    bounds = (config.draft.replicas, config.verify.replicas)
    scales = told["rayClusterConfig"].get("enableInTreeAutoscaling", False)
    for of, replicas in zip((by_name["draft"], by_name["verify"]), bounds, strict=True):
        if of.least != of.most and not scales:
            yield f"{of.name}: without the component autoscaling its pods stay {of.least}"
        if of.least == of.most and replicas.min != replicas.max and scales:
            yield f"{of.name}: replicas come and go, its pods do not"


def _hosts(labels: Mapping[str, str], by_name: Mapping[str, Pods]) -> list[Pods]:
    """The groups that Ray may place on."""
    return [
        each for each in by_name.values() if labels.items() <= (each.group or {}).get("labels", {}).items()
    ]


def _files(config: ClusterConfig, by_name: Mapping[str, Pods]) -> Iterator[str]:
    tls = [config.tls.certificate, config.tls.key, config.tls.authority] if config.tls else []
    needed: dict[str, list[Any]] = {
        "head": [urlsplit(config.store).path, *tls],
        "verify": [urlsplit(config.store).path, config.model, *tls],
        "draft": [
            urlsplit(config.store).path,
            config.model,
            config.speculative_model,
            config.gateway.api_key_file,
            *tls,
        ],
    }
    for name, paths in needed.items():
        of = by_name[name]
        volumes = {each["name"]: each for each in of.spec["volumes"]}
        for path in (Path(each) for each in paths if each and str(each).startswith("/")):
            mount = next(
                (m for m in of.container["volumeMounts"] if Path(m["mountPath"]) in path.parents), None
            )
            if mount is None:
                yield f"{name}: nothing is mounted where {path} should be"
                continue
            items = volumes[mount["name"]].get("secret", {}).get("items")
            if items and path.name not in {each["path"] for each in items}:
                yield f"{name}: {mount['mountPath']} has no {path.name}"


def nodes(overlay: Overlay, *, most: bool) -> list[Node]:
    """As Ray lists the pods, all of them at least or at most."""
    found = []
    for of in overlay.pods:
        if of.name not in RAY:
            continue
        group, limits = of.group or {}, of.container["resources"]["limits"]
        params = group["rayStartParams"]
        stored = float(params["object-store-memory"])
        resources = {
            "CPU": float(params.get("num-cpus", int(amount(limits["cpu"])))),
            "GPU": float(limits.get("nvidia.com/gpu", 0)),
            "memory": amount(limits["memory"]) - stored,
            "object_store_memory": stored,
        }
        count = (of.most if most else of.least) * of.hosts
        found += [Node(f"{of.name}-{i}", resources, group.get("labels", {})) for i in range(count)]
    return found


def room(overlay: Overlay) -> Iterator[str]:
    """What the planner does not find room for, with the least and the most of pods; and pods to spare."""
    config = overlay.config
    for most in (False, True):
        there = nodes(overlay, most=most)
        for told in asyncio.run(problems(_bounded(config, most=most), there, running=True)):
            if told.partition(":")[0] not in NOT_OURS:
                yield told
        for group in ("draft", "verify"):
            hosts = next(of for of in overlay.pods if of.name == group).hosts
            mine = [each for each in there if each.name.startswith(group)]
            fewer = [each for each in there if each not in mine[:hosts]]
            if len(mine) > hosts and not refusals(_bounded(config, most=most), fewer):
                yield f"{group}: {len(mine)} pods are more than weald.yaml asks for"


def _bounded(config: ClusterConfig, *, most: bool) -> ClusterConfig:
    def fixed(replicas: Replicas) -> Replicas:
        number = replicas.max if most else replicas.min
        return Replicas(min=number, max=number)

    return config.model_copy(
        update={
            key: section.model_copy(update={"replicas": fixed(section.replicas)})
            for key, section in (("verify", config.verify), ("draft", config.draft))
        }
    )


def plan(overlay: Overlay) -> Iterator[str]:
    """Where cards do not hold what they are given, or are not what the plan on paper finds sufficient."""
    config = overlay.config
    verify, draft = (next(of for of in overlay.pods if of.name == name) for name in ("verify", "draft"))
    if not config.verify.resources.num_gpus:
        return
    gpus = verify.hosts * int(verify.container["resources"]["limits"]["nvidia.com/gpu"])
    if gpus != config.verify.tensor_parallel_size:
        yield f"a verify replica has {gpus} GPUs for {config.verify.tensor_parallel_size} ranks"
    figures = json.loads((ROOT / "docs/figures/paper.json").read_text())
    target = str(config.gateway.served_model_name).removesuffix("-Instruct")
    (rank,) = [each for each in figures["ranks"] if each["target"] == target]
    if rank["ranks"] != config.verify.tensor_parallel_size:
        yield f"the plan has {rank['ranks']} ranks for {target}"
    if (filled := rank["weights_of_a_rank"] + config.verify.kv_cache_memory) > CARD_BYTES:
        yield f"a verify rank fills {filled / 1e9:.1f} GB, a card has {CARD_BYTES / 1e9:.0f} GB for it"
    for of, serves in ((verify, "verify"), (draft, "draft")):
        product = of.spec.get("nodeSelector", {}).get("nvidia.com/gpu.product")
        if product not in CARDS:
            yield f"{serves}: the plan does not know {product}"
        elif serves == "draft":
            tried = [
                e["×_plain"] for e in figures["cards"] if (e["target"], e["card"]) == (target, CARDS[product])
            ]
            if max(tried) <= 1:
                yield f"draft: by the plan {product} is too slow for {target}"


def grace(overlay: Overlay) -> Iterator[str]:
    """Pods that are killed before their sessions have left, and models that are before they are loaded."""
    within = overlay.config.drain + STOP_S
    for of in overlay.pods:
        if of.name not in ("draft", "verify"):
            continue
        command = of.container["lifecycle"]["preStop"]["exec"]["command"]
        given = float(command[command.index("--within") + 1])
        if given < within:
            yield f"{of.name}: its sessions have {given:g} s to leave, weald.yaml wants {within:g}"
        if of.spec["terminationGracePeriodSeconds"] < given + RAY_ENDS_S:
            yield f"{of.name}: it is killed too early"
        if of.container["livenessProbe"]["httpGet"]["path"] == PROXY:
            yield f"{of.name}: it is killed while its model loads"


def policies(overlay: Overlay) -> Iterator[str]:
    """What no pod may be or leave open; more of it is checkov's."""
    for of in overlay.pods:
        container, pod = of.container, of.spec["securityContext"]
        secured = container.get("securityContext", {})
        if not pod.get("runAsNonRoot") or not pod.get("runAsUser"):
            yield f"{of.name} may run as root"
        if not secured.get("readOnlyRootFilesystem"):
            yield f"{of.name} may write to its root"
        if secured.get("allowPrivilegeEscalation") is not False or secured["capabilities"] != {
            "drop": ["ALL"]
        }:
            yield f"{of.name} may gain rights"
        needs_token = of.name == "head" and overlay.kind("RayService")[0]["spec"]["rayClusterConfig"].get(
            "enableInTreeAutoscaling"
        )
        if of.spec.get("automountServiceAccountToken") is not bool(needs_token):
            yield f"{of.name}: none but the autoscaler calls Kubernetes, with a token"
        image, asked, most = (
            container["image"],
            container["resources"]["requests"],
            container["resources"]["limits"],
        )
        if not re.search(r"@sha256:[0-9a-f]{64}$|:\d[\w.-]*$", image):
            yield f"{of.name}: {image} is not pinned"
        if image.startswith("weald") and "@sha256:" not in image:
            yield f"{of.name}: {image} has no digest"
        for resource in ("cpu", "memory", "ephemeral-storage"):
            if (
                resource not in asked
                or resource not in most
                or amount(asked[resource]) > amount(most[resource])
            ):
                yield f"{of.name} asks for more {resource} than it may have, or does not say how much"
        shared = sum(
            amount(each["emptyDir"]["sizeLimit"])
            for each in of.spec.get("volumes", ())
            if each.get("emptyDir", {}).get("medium") == "Memory"
        )
        if shared > amount(most["memory"]) / 2:
            yield f"{of.name}: {shared / 2**30:.3g} GiB of volumes in memory leave its processes too little"


def metrics(overlay: Overlay) -> Iterator[str]:
    """Metrics that dashboards and alerts ask for, and nobody tells."""
    known = known_metrics()
    for each in overlay.kind("ConfigMap", "PrometheusRule"):
        text = json.dumps(each.get("data", each.get("spec")))
        asked = set(re.findall(r"\bweald_[a-z0-9_]+", text))
        for name in sorted(asked - known):
            yield f"{each['kind']} {each['metadata']['name']} asks for {name}, which nobody tells"


@functools.cache
def known_metrics() -> frozenset[str]:
    """All that gateways, draft and verify replicas tell."""
    from services.gateway.metrics import Metrics
    from services.telemetry import names

    told = {name for family in Metrics().registry.collect() for name in _samples(family.name, family.type)}
    for each in vars(names).values():
        if isinstance(each, names.Metric):
            told.add(f"{each.name}_total" if each.counts else each.name)
    return frozenset(told)


def _samples(name: str, kind: str) -> list[str]:
    ends = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
    return [f"{name}{end}" for end in ends.get(kind, [""])]


CHECKS: tuple[Callable[[Overlay], Iterator[str]], ...] = (
    names_and_ports,
    traffic,
    references,
    flags_and_variables,
    configuration,
    room,
    plan,
    grace,
    policies,
    metrics,
)
