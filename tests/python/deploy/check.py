"""Holds deploy/ to the Kubernetes API and to the executable. One check per name: check.py NAME…

TEST_EXECUTABLE is the path of baton.
"""

import json
import re
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml

import executable
import rendered
from objects import baton_containers, labels, mounted_files, name, pod, selects, without_hash, workloads

KUBERNETES = "1.37"
CRDS = Path(__file__).resolve().parent / "crds"
# Pages that a probe or a monitor may name. That they are served is tests/tests/deploy.rs's to show.
PAGES = {"/live", "/ready", "/metrics"}
ETCD_PORTS = {2379, 2380}


def schemas():
    """Every object of every result is what the Kubernetes API takes, and nothing more."""
    for result, objects in rendered.all_of_them().items():
        assert len(objects) > 10, result
        for thing in objects:
            try:
                validate(thing)
            except Exception as error:
                raise AssertionError(f"{result}, {name(thing)}: {error}") from None


def validate(thing):
    own = CRDS / f"{thing['kind']}.json"
    if own.exists():
        jsonschema.validate(thing, json.loads(own.read_text()))
    else:
        kubernetes_validate.validate(thing, KUBERNETES, strict=True)


def schemas_refuse():
    """The check itself: a field that does not exist, and a value of the wrong type, are refused in every kind."""
    for thing in rendered.with_component("gateway") + rendered.with_component("monitoring"):
        for break_it in (lambda spec: spec.update(nosuchfield=1), lambda spec: spec.update(selector=7, rules=7)):
            broken = json.loads(json.dumps(thing))
            if "spec" not in broken:
                continue
            break_it(broken["spec"])
            try:
                validate(broken)
            except Exception:
                continue
            raise AssertionError(f"a broken {name(thing)} is accepted: {broken['spec']}")


def same():
    """The chart with an overlay's values gives the overlay's objects, and so it does with the pool."""
    pairs = {one: (rendered.kustomize(rendered.K8S / "overlays" / one), rendered.chart(one)) for one in rendered.CHARTS}
    pairs["a pool"] = (rendered.with_component("pool"), rendered.pooled_chart())
    for overlay, (kustomized, chart) in pairs.items():
        ours = {name(thing): thing for thing in map(comparable, kustomized)}
        charts = {name(thing): thing for thing in map(comparable, chart)}
        ours.pop("Namespace baton")
        assert ours.keys() == charts.keys(), (overlay, ours.keys() ^ charts.keys())
        for key in ours:
            assert ours[key] == charts[key], f"{overlay}, {key}:\n{first_difference(ours[key], charts[key])}"


def comparable(thing):
    """Without what only one of the two writes: hashes in names, checksums, who made it."""
    text = json.dumps(thing)
    for config_map in set(re.findall(r'"(baton-\w+-[0-9a-z]{10})"', text)):
        text = text.replace(f'"{config_map}"', f'"{without_hash(config_map)}"')
    thing = pruned(json.loads(text))
    thing["metadata"].pop("namespace", None)
    thing["metadata"].pop("labels", None)
    template = thing.get("spec", {}).get("template", {})
    template.get("metadata", {}).pop("annotations", None)
    template.get("metadata", {}).get("labels", {}).pop("app.kubernetes.io/part-of", None)
    for container in template.get("spec", {}).get("containers", []):
        container.pop("imagePullPolicy", None)
        container.get("env", []).sort(key=lambda one: one["name"])
    for kind in ("volumes", "tolerations"):
        if kind in template.get("spec", {}):
            template["spec"][kind].sort(key=lambda one: json.dumps(one, sort_keys=True))
    return thing


def pruned(value):
    """Without empty lists, which say the same as none at all."""
    if isinstance(value, dict):
        return {key: pruned(inner) for key, inner in value.items() if inner != []}
    if isinstance(value, list):
        return [pruned(inner) for inner in value]
    return value


def first_difference(left, right, where=""):
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted(left.keys() | right.keys()):
            if left.get(key) != right.get(key):
                return first_difference(left.get(key), right.get(key), f"{where}/{key}")
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for at, (one, other) in enumerate(zip(left, right)):
            if one != other:
                return first_difference(one, other, f"{where}/{at}")
    return f"{where}: {left!r} and {right!r}"


def configs():
    """Every process is given a file that it accepts, with the environment it is given, and the flags exist."""
    n_containers = 0
    for result, objects in rendered.all_of_them().items():
        for workload, container in baton_containers(objects):
            n_containers += 1
            try:
                process_of(objects, workload, container)
            except AssertionError as error:
                raise AssertionError(f"{result}, {name(workload)}, {container['name']}: {error}") from None
    assert n_containers > 20, n_containers


def process_of(objects, workload, container):
    args = container["args"]
    executable.knows_command(args)
    files = mounted_files(objects, workload, container)
    file = args[args.index("--config") + 1]
    assert file in files, f"{file} is not mounted, only {sorted(files)}"
    executable.accepts(files[file], args[0], own_variables(container).items())
    listens = executable.ports(files[file])
    declared = {port["containerPort"] for port in container["ports"]}
    assert declared == set(listens.values()), f"declares {declared}, listens on {listens}"
    grace = pod(workload)["terminationGracePeriodSeconds"]
    before = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    drain = executable.drain_s(files[file])
    assert grace >= drain + before + 5, f"{grace} s of grace, {before} s before, {drain} s of drain"
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"], security
    assert pod(workload)["securityContext"]["runAsNonRoot"]


# Names that an installation, or a stranger in the namespace, may give to Services.
OTHER_NAMES = ["baton", "baton-x", "baton-blue-router", "baton-2"]


def service_links():
    """No pod asks for variables of Services, and every container starts with those that kubelet would add."""
    for result, objects in rendered.all_of_them().items():
        for workload in workloads(objects):
            assert pod(workload).get("enableServiceLinks") is False, f"{result}, {name(workload)}"
    tried = set()
    for result, objects in rendered.all_of_them().items():
        for workload, container in baton_containers(objects):
            # Also where a patch has dropped the setting from the pod.
            env = kubelet_variables(objects) | own_variables(container)
            args = container["args"]
            text = mounted_files(objects, workload, container)[args[args.index("--config") + 1]]
            start = (args[0], text, tuple(sorted(env.items())))
            if start in tried:
                continue
            tried.add(start)
            try:
                executable.accepts(text, args[0], env.items())
            except AssertionError as error:
                raise AssertionError(f"{result}, {name(workload)}, {container['name']}: {error}") from None
    assert len(tried) > 5, len(tried)


def own_variables(container):
    return {entry["name"]: entry.get("value", "10.0.0.5") for entry in container.get("env") or []}


def kubelet_variables(objects):
    """What kubelet adds for the Services of a namespace: those of the result, and others with names like ours."""
    variables = {}
    services = [thing for thing in objects if thing["kind"] == "Service" and thing["spec"].get("clusterIP") != "None"]
    for service in services:
        variables |= links_of(service["metadata"]["name"], service["spec"]["ports"])
        for other in OTHER_NAMES:
            variables |= links_of(other, service["spec"]["ports"])
    assert "BATON_X_SERVICE_HOST" in variables
    return variables


def links_of(service, ports, address="10.96.0.7"):
    """As kubelet's envvars.FromServices makes them."""
    prefix = service.upper().replace("-", "_")
    first = ports[0]["port"]
    links = {f"{prefix}_SERVICE_HOST": address, f"{prefix}_SERVICE_PORT": str(first)}
    links[f"{prefix}_PORT"] = f"tcp://{address}:{first}"
    for port in ports:
        number, protocol = port["port"], port.get("protocol", "TCP")
        if "name" in port:
            links[f"{prefix}_SERVICE_PORT_{port['name'].upper().replace('-', '_')}"] = str(number)
        stem = f"{prefix}_PORT_{number}_{protocol}"
        links |= {
            stem: f"{protocol.lower()}://{address}:{number}",
            f"{stem}_PROTO": protocol.lower(),
            f"{stem}_PORT": str(number),
            f"{stem}_ADDR": address,
        }
    return links


def names():
    """Probes, services, policies and budgets speak of ports, pages and pods that exist, and every pod has a policy."""
    for result, objects in rendered.all_of_them().items():
        try:
            names_of(objects)
        except AssertionError as error:
            raise AssertionError(f"{result}: {error}") from None


def names_of(objects):
    pods = workloads(objects)
    for workload in pods:
        assert selects(workload["spec"]["selector"], labels(workload)), name(workload)
        for container in pod(workload)["containers"]:
            probes_of(container)
        guarded(workload, objects)
    for thing in objects:
        spec = thing.get("spec", {})
        if thing["kind"] == "Service":
            behind = [one for one in pods if selects({"matchLabels": spec["selector"]}, labels(one))]
            assert len(behind) == 1, f"{name(thing)} has {len(behind)} workloads"
            for port in spec["ports"]:
                assert port["targetPort"] in ports_of(behind[0]), f"{name(thing)}: {port}"
        if thing["kind"] == "PodDisruptionBudget":
            assert any(selects(spec["selector"], labels(one)) for one in pods), name(thing)
        if thing["kind"] == "NetworkPolicy":
            policy(name(thing), spec, pods)
        if thing["kind"] == "HorizontalPodAutoscaler":
            target = spec["scaleTargetRef"]
            scaled = [one for one in pods if one["metadata"]["name"] == target["name"]]
            assert len(scaled) == 1 and "replicas" not in scaled[0]["spec"], name(thing)
        if thing["kind"] == "HTTPRoute":
            for rule in spec["rules"]:
                for backend in rule["backendRefs"]:
                    serves(objects, backend["name"], backend["port"])
        if thing["kind"] == "ServiceMonitor":
            monitored(objects, thing)


def ports_of(workload):
    return {port["name"]: port["containerPort"] for container in pod(workload)["containers"] for port in container["ports"]}


def probes_of(container):
    ports = {port["name"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["port"] in ports, f"{container['name']}, {probe}: {asked}"
        pages = {"/livez", "/readyz"} if container["name"] == "etcd" else PAGES
        assert asked["path"] in pages, f"{container['name']}, {probe}: {asked}"
    assert container["livenessProbe"]["httpGet"]["path"].startswith("/live"), container["name"]
    assert container["readinessProbe"]["httpGet"]["path"].startswith("/ready"), container["name"]


def policy(which, spec, pods):
    """Whom it is for exists, and every port that it opens to ours is one that they listen on; admin ports for monitors alone."""
    own = [one for one in pods if selects(spec["podSelector"], labels(one))]
    assert own, which
    listening = {port: called for one in own for called, port in ports_of(one).items()}
    for rule in spec.get("ingress") or []:
        assert rule.get("ports"), f"{which} opens every port"
        for port in rule["ports"]:
            assert port["port"] in listening, f"{which} opens {port}, they listen on {listening}"
            if "admin" in listening[port["port"]]:
                assert all(map(monitors, rule.get("from") or [{}])), f"{which} opens a port on which nodes are put to sleep"


def monitors(source):
    """Whether only those who scrape metrics are meant."""
    return source.get("namespaceSelector", {}).get("matchLabels") == {"kubernetes.io/metadata.name": "monitoring"}


def guarded(workload, objects):
    """What no policy opens is closed: one at least says who may connect."""
    policies = [thing["spec"] for thing in objects if thing["kind"] == "NetworkPolicy"]
    ours = [spec for spec in policies if selects(spec["podSelector"], labels(workload))]
    assert any("Ingress" in spec["policyTypes"] for spec in ours), f"anybody may connect to {name(workload)}"


def serves(objects, service, port):
    found = [thing for thing in objects if thing["kind"] == "Service" and thing["metadata"]["name"] == service]
    assert found and port in {one["port"] for one in found[0]["spec"]["ports"]}, f"{service}:{port}"


def monitored(objects, monitor):
    spec = monitor["spec"]
    services = [thing for thing in objects if thing["kind"] == "Service" and selects(spec["selector"], thing["metadata"]["labels"])]
    assert services, name(monitor)
    for endpoint in spec["endpoints"]:
        assert endpoint["path"] in PAGES, endpoint
        for service in services:
            assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}, f"{name(monitor)}: {endpoint}"


def compose():
    """The same of compose.yaml: commands, files, health checks, hosts."""
    composed = yaml.safe_load((rendered.DEPLOY / "compose.yaml").read_text())
    services = composed["services"]
    ours = {service: about for service, about in services.items() if about["image"].startswith("baton")}
    assert sorted(ours) == ["decode-0", "decode-1", "pool-0", "prefill-0", "prefill-1", "router"], sorted(ours)
    for service, about in ours.items():
        executable.knows_command(about["command"])
        mounts = dict(volume.split(":")[1::-1] for volume in about["volumes"])
        text = (rendered.DEPLOY / mounts[about["command"][2]]).read_text()
        executable.accepts(text, about["command"][0], about.get("environment", {}).items())
        assert about["read_only"] and about["cap_drop"] == ["ALL"] and about["user"] != "0", service
        _, program, *health = about["healthcheck"]["test"]
        assert program == "/usr/local/bin/baton", health
        executable.knows_command(health)
        port = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/\w+)", health[1])
        assert int(port[1]) in executable.ports(text).values() and port[2] in PAGES, health
        hosts = re.findall(r"etcd://([\w-]+):(\d+)/", text)
        assert hosts and all(host in services and int(port) in ETCD_PORTS for host, port in hosts), hosts
        assert about.get("environment", {}).get("BATON_NODE__ADVERTISE", service) == service


def dockerfile():
    """The image's command, ports and variables are the executable's."""
    text = (rendered.DEPLOY / "Dockerfile").read_text()
    (command,) = re.findall(r'^CMD \["(\w+)"\]$', text, re.MULTILINE)
    executable.knows_command([command])
    executable.knows_command(["health"])
    assert '"/usr/local/bin/baton", "health"' in text
    (user,) = re.findall(r"^USER (\d+):\d+$", text, re.MULTILINE)
    assert int(user) > 0
    for variable, value in re.findall(r"^ENV (BATON_\w+)=(\S+)$", text, re.MULTILINE):
        for role, section in (("router", "router"), ("decode", "node")):
            executable.accepts(f"[{section}]\n", role, [(variable, value)])
    exposed = {int(port) for port in re.findall(r"^EXPOSE (.*)$", text, re.MULTILINE)[0].split()}
    base = rendered.kustomize(rendered.K8S / "overlays" / "cpu-demo")
    listened = {port for workload, _ in baton_containers(base) for port in ports_of(workload).values()}
    assert exposed == listened, (exposed, listened)


def metrics():
    """Every metric that a file of deploy/ names is documented; that the documented ones exist is shown elsewhere."""
    documented = (rendered.DEPLOY.parent / "docs" / "metrics.md").read_text()
    for file in sorted(rendered.DEPLOY.rglob("*")):
        if file.is_file():
            for metric in re.findall(r"\bbaton_[a-z_]+\b", file.read_text()):
                generic = re.sub(r"^baton_(prefill|decode|both|pool)_", "baton_<role>_", metric)
                assert f"`{generic}`" in documented, f"{file}: {metric}"


CHECKS = [schemas, schemas_refuse, same, configs, service_links, names, compose, dockerfile, metrics]

if __name__ == "__main__":
    for check in CHECKS:
        if len(sys.argv) < 2 or check.__name__ in sys.argv[1:]:
            check()
            print(check.__name__, "ok")
