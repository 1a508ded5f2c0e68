"""Holds deploy/ to the Kubernetes API and to the executable. One check per name: check.py NAME…

TEST_EXECUTABLE is the path of baton.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml

import executable
import kubelet
import rendered
from objects import baton_containers, labels, mounted_files, name, pod, selects, workloads

KUBERNETES = "1.37"
CRDS = Path(__file__).resolve().parent / "crds"
# Pages that a probe or a monitor may name. That they are served is tests/tests/deploy.rs's to show.
PAGES = {"/live", "/ready", "/rollout", "/metrics"}
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
    for thing in rendered.all_of_them()["chart with everything on"]:
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
    """Every overlay is what the chart gives. With UPDATE_DOCS=1 it is written anew."""
    for overlay in rendered.OVERLAYS:
        file = rendered.K8S / "overlays" / overlay / "objects.yaml"
        expected = rendered.objects_file(overlay)
        if os.environ.get("UPDATE_DOCS"):
            file.write_text(expected)
        found = list(yaml.safe_load_all(file.read_text()))
        charts = list(yaml.safe_load_all(expected))
        assert list(map(name, found)) == list(map(name, charts)), (overlay, REMAKE)
        for one, other in zip(found, charts):
            assert one == other, f"{overlay}, {name(one)}: {first_difference(one, other)}; {REMAKE}"
        kustomized = rendered.kustomize(file.parent)
        (model,), (chart_model,) = (list(filter(rendered.is_model, all)) for all in (kustomized, rendered.overlay_chart(overlay)))
        assert model["data"] == chart_model["data"], (overlay, model)
        assert {name(thing) for thing in kustomized if thing is not model} == set(map(name, charts)), overlay


REMAKE = "UPDATE_DOCS=1 python tests/python/deploy/check.py same writes the overlays anew"


def models():
    """Operators of GPU overlays name the model, in one place, and nothing serves the bundled one instead."""
    for overlay in ["gpu", "gpu-rdma", "gpu-box"]:
        objects = rendered.kustomize(rendered.K8S / "overlays" / overlay)
        assert '"demo"' not in json.dumps(objects), overlay
        for workload, container in computing(objects):
            env = executable.environment(objects, container)
            assert env["BATON_MODEL__PATH"] == "/models/NAME-THE-MODEL", (overlay, env)
            claims = [volume.get("persistentVolumeClaim") for volume in pod(workload)["volumes"]]
            assert {"claimName": "baton-models", "readOnly": True} in claims, claims
            text = config_of(objects, workload, container)
            if container["name"] != "router":
                assert tomllib.loads(text)["model"]["kv_memory"] == "auto", overlay
            reason = executable.fails_to_start(text, container["args"][0], env)
            assert "/models/NAME-THE-MODEL" in reason, reason
        (before,) = filter(rendered.is_model, objects)
        own = rendered.own_overlay(overlay, OWN_MODEL)
        for workload, container in computing(own):
            env = executable.environment(own, container)
            assert env["BATON_MODEL__PATH"] == "/models/qwen3-8b", (overlay, env)
            (reference,) = [entry for entry in container["env"] if entry["name"] == "BATON_MODEL__PATH"]
            # Pods are rolled when the model is another.
            assert reference["valueFrom"]["configMapKeyRef"]["name"] != before["metadata"]["name"], reference
    for values in [{}, {"model": {"path": "/models/x"}}, {"model": {**rendered.NAMED["model"], "fetch": {"url": "https://x"}}}]:
        try:
            rendered.chart([], values)
        except Exception as error:
            assert "model." in f"{error}{getattr(error, 'stderr', '')}", error
        else:
            raise AssertionError(f"the chart accepts {values}")


# As deploy/k8s/README.md says it.
OWN_MODEL = """
resources: [OVERLAY]
configMapGenerator:
  - name: baton-model
    namespace: baton
    behavior: merge
    literals: [path=/models/qwen3-8b]
"""


def computing(objects):
    """The containers that need a model."""
    return [(workload, container) for workload, container in baton_containers(objects) if container["name"] != "pool"]


def config_of(objects, workload, container):
    args = container["args"]
    return mounted_files(objects, workload, container)[args[args.index("--config") + 1]]


def deadlines():
    """A router drains as long as a request may take, a pod is given longer than its drain, and so is a gateway."""
    found = set()
    for result, objects in rendered.all_of_them().items():
        for workload, container in baton_containers(objects):
            config = tomllib.loads(config_of(objects, workload, container))
            section = config.get("router") or config["node"]
            before = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            grace = pod(workload)["terminationGracePeriodSeconds"]
            assert grace >= before + section["drain_ms"] / 1000 + 10, (result, name(workload), grace)
            if "router" in config:
                assert drains_long_enough(section), (result, section)
                found.add(section["deadline_ms"])
                for route in (thing for thing in objects if thing["kind"] == "HTTPRoute"):
                    for rule in route["spec"]["rules"]:
                        timeout = int(rule["timeouts"]["request"].removesuffix("s"))
                        assert timeout * 1000 > section["deadline_ms"], (result, timeout)
    assert found == {600_000, 3_600_000}, found


def drains_long_enough(router):
    """Whether a request that is taken in the first moments of the drain may take all its time."""
    deadline = router["deadline_max_ms"]
    return router["deadline_ms"] == deadline and router["drain_ms"] >= deadline + router.get("notice_ms", 3_000)


def external_etcd():
    """An etcd outside: its URL comes from a Secret, its certificates are mounted, and the policies let processes reach it."""
    for result in ["chart with an external etcd", "chart with a box and an external etcd"]:
        objects = rendered.all_of_them()[result]
        assert not any("etcd" in name(thing) for thing in objects), result
        for workload, container in baton_containers(objects):
            (url,) = [entry for entry in container["env"] if entry["name"] == "BATON_REGISTRY__URL"]
            assert url["valueFrom"] == {"secretKeyRef": {"name": "etcd-access", "key": "url"}}, (result, url)
            assert "url" not in tomllib.loads(config_of(objects, workload, container)).get("registry", {}), result
            (mount,) = [one for one in container["volumeMounts"] if one["mountPath"] == "/etc/baton-etcd"]
            (volume,) = [one for one in pod(workload)["volumes"] if one["name"] == mount["name"]]
            assert volume["secret"] == {"secretName": "etcd-certificates"} and mount["readOnly"], (result, volume)
            opened = {"ports": [{"protocol": "TCP", "port": 2390}], "to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}]}
            policies = [thing["spec"] for thing in objects if thing["kind"] == "NetworkPolicy"]
            ours = [spec for spec in policies if selects(spec["podSelector"], labels(workload))]
            assert any(opened in spec.get("egress", []) for spec in ours), (result, name(workload))
    try:
        rendered.chart([], rendered.NAMED, {"etcd": {"enabled": False}})
    except Exception as error:
        assert "etcd.external.urlSecret.name" in f"{error}{getattr(error, 'stderr', '')}", error
    else:
        raise AssertionError("the chart accepts an external etcd without a URL")


def rdma():
    """Nodes of `gpu-rdma` use RDMA with a device and a network of their own, and no right that a container may not have."""
    objects = rendered.kustomize(rendered.K8S / "overlays" / "gpu-rdma")
    nodes = [(workload, container) for workload, container in computing(objects) if container["name"] != "router"]
    assert len(nodes) == 2, nodes
    for workload, container in nodes:
        config = tomllib.loads(config_of(objects, workload, container))
        transfer = config["transfer"]
        assert transfer["connectors"][0] == "rdma", transfer
        assert container["resources"]["limits"]["rdma/hca_shared_devices_a"] == 1, container["resources"]
        annotations = workload["spec"]["template"]["metadata"]["annotations"]
        assert annotations["k8s.v1.cni.cncf.io/networks"] == "baton-rdma", annotations
        # A capability that is added reaches no process that is not root.
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, container["securityContext"]
        port = int(config["expert"]["transfer"]["rdma_listen"].rsplit(":", 1)[1])
        policies = [thing["spec"] for thing in objects if thing["kind"] == "NetworkPolicy"]
        ours = [spec for spec in policies if selects(spec["podSelector"], labels(workload))]
        opened = [one["port"] for spec in ours for rule in spec.get("ingress", []) for one in rule["ports"]]
        assert port in opened, opened


def values():
    """A value that the chart does not know is refused wherever it stands, with its name, and so is one of a wrong kind."""
    chart = yaml.safe_load((rendered.CHART / "values.yaml").read_text())
    schema = json.loads((rendered.CHART / "values.schema.json").read_text())
    refuses = jsonschema.Draft7Validator(schema)
    refuses.validate(chart)
    places = [place for place in tables_of(chart) if place[-1:] not in FREE]
    assert len(places) > 25, places
    for place in places:
        broken = json.loads(json.dumps(chart))
        at(broken, place)["nosuchvalue"] = 1
        assert any("nosuchvalue" in error.message for error in refuses.iter_errors(broken)), place
    # Helm itself reads the schema.
    for wrong in [{"routr": {}}, {"pools": {"decode": {"replicas": "two"}}}, {"etcd": {"replicas": 2}}]:
        refused(wrong, "values don't meet the specifications of the schema")


# What Kubernetes defines, not the chart.
FREE = [(key,) for key in ("labels", "annotations", "nodeSelector", "affinity", "requests", "limits")]


def tables_of(values, place=()):
    yield place
    for key, value in values.items():
        if isinstance(value, dict):
            yield from tables_of(value, (*place, key))


def at(values, place):
    for key in place:
        values = values[key]
    return values


def refused(values, reason):
    try:
        rendered.chart([], rendered.NAMED, values)
    except Exception as error:
        assert reason in f"{error}{getattr(error, 'stderr', '')}", error
    else:
        raise AssertionError(f"the chart accepts {values}")


def pods():
    """What operators add to all pods, and to the pods of one workload, is there, and the chart's own is too."""
    def extra(of):
        return {
            "labels": {f"team-{of}": of},
            "annotations": {f"note-{of}": of},
            "env": [{"name": f"OWN_{of.upper()}", "value": of}],
            "volumes": [{"name": of, "emptyDir": {}}],
            "volumeMounts": [{"name": of, "mountPath": f"/{of}"}],
            "nodeSelector": {f"disk-{of}": "fast"},
            "tolerations": [{"key": of, "operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "priorityClassName": of,
        }
    own = {"router": extra("own"), "pool": extra("own"), "etcd": extra("own")}
    own["pools"] = {"prefill": extra("own"), "decode": extra("own")}
    for values, files, n_workloads in [(own, [], 5), ({"box": extra("own")}, ["gpu-box.yaml"], 3)]:
        before = rendered.chart(files, rendered.NAMED, {"pool": {"enabled": not files}})
        after = rendered.chart(files, rendered.NAMED, {"pool": {"enabled": not files}}, {"pods": extra("all")}, values)
        assert len(workloads(after)) == n_workloads, list(map(name, workloads(after)))
        for was, now in zip(workloads(before), workloads(after)):
            for thing in after:
                validate(thing)
            has_own = "box" not in values or name(now) == "Deployment baton-box"
            for of in ["all"] + ["own"] * has_own:
                added_to(was, now, of)
            assert pod(now)["priorityClassName"] == ("own" if has_own else "all"), name(now)
            assert pod(now)["affinity"] == {"nodeAffinity": {}}, name(now)


def added_to(was, now, of):
    template, was_template = now["spec"]["template"]["metadata"], was["spec"]["template"]["metadata"]
    assert template["labels"].items() >= {**was_template["labels"], f"team-{of}": of}.items(), name(now)
    assert template["annotations"].items() >= {**was_template.get("annotations", {}), f"note-{of}": of}.items(), name(now)
    assert pod(now)["nodeSelector"][f"disk-{of}"] == "fast", name(now)
    assert {"key": of, "operator": "Exists"} in pod(now)["tolerations"], name(now)
    assert {"name": of, "emptyDir": {}} in pod(now)["volumes"], name(now)
    for container, was_container in zip(pod(now)["containers"], pod(was)["containers"]):
        assert {"name": of, "mountPath": f"/{of}"} in container["volumeMounts"], name(now)
        assert {"name": f"OWN_{of.upper()}", "value": of} in container["env"], name(now)
        assert all(one in container["env"] for one in was_container["env"]), name(now)


def autoscaling():
    """Prefill and decode nodes are scaled each by numbers of its own, and then the chart does not set how many there are."""
    objects = rendered.all_of_them()["chart with everything on"]
    scaled = {thing["metadata"]["name"]: thing["spec"] for thing in objects if thing["kind"] == "ScaledObject"}
    assert sorted(scaled) == ["baton-decode", "baton-prefill"], sorted(scaled)
    deployments = {thing["metadata"]["name"]: thing["spec"] for thing in objects if thing["kind"] == "Deployment"}
    for which, spec in scaled.items():
        assert spec["scaleTargetRef"]["name"] == which and "replicas" not in deployments[which], which
        assert spec["fallback"]["replicas"] == 2, spec["fallback"]
        queries = [trigger["metadata"]["query"] for trigger in spec["triggers"]]
        role = which.removeprefix("baton-")
        assert any(f"baton_{role}_" in query for query in queries), queries
        assert all('namespace="baton"' in query for query in queries), queries
        # Missing numbers are not idleness: no query makes 0 of them, and KEDA takes them for an error.
        assert all(trigger["metadata"]["ignoreNullValues"] == "false" for trigger in spec["triggers"]), spec["triggers"]
        assert not any(re.search(r"\b(vector|absent)\b", query) for query in queries), queries
    plain = {thing["metadata"]["name"]: thing["spec"] for thing in rendered.chart([], rendered.NAMED) if thing["kind"] == "Deployment"}
    assert plain["baton-decode"]["replicas"] == 2, plain["baton-decode"]
    on = {"autoscaling": {"enabled": True}}
    refused({"pools": {"decode": on}}, "prometheus.url is needed")
    refused({"pools": {"decode": {"autoscaling": {"enabled": True, "min": 3, "max": 2}}}}, "max is below min")


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
    executable.accepts(files[file], args, executable.environment(objects, container).items())
    listens = executable.ports(files[file])
    declared = {port["containerPort"] for port in container["ports"]}
    assert declared == set(listens.values()), f"declares {declared}, listens on {listens}"
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"], security
    assert pod(workload)["securityContext"]["runAsNonRoot"]


def service_links():
    """No pod asks for variables of Services, and every container starts with those that kubelet would add."""
    results = rendered.all_of_them() | rendered.under_another_name()
    for result, objects in results.items():
        for workload in workloads(objects):
            assert pod(workload).get("enableServiceLinks") is False, f"{result}, {name(workload)}"
    tried = set()
    for result, objects in results.items():
        for workload, container in baton_containers(objects):
            # Also where a patch has dropped the setting from the pod.
            env = kubelet.variables(objects) | executable.environment(objects, container)
            args, text = container["args"], config_of(objects, workload, container)
            start = (tuple(args), text, tuple(sorted(env.items())))
            if start in tried:
                continue
            tried.add(start)
            try:
                executable.accepts(text, args, env.items())
            except AssertionError as error:
                raise AssertionError(f"{result}, {name(workload)}, {container['name']}: {error}") from None
    assert len(tried) > 5, len(tried)


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
                removed = [filter["requestHeaderModifier"]["remove"] for filter in rule["filters"]]
                assert ["x-baton-tenant", "x-baton-priority"] in removed, name(thing)
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
    expected = {"etcd": "/readyz", "router": "/ready"}.get(container["name"], "/rollout")
    assert container["readinessProbe"]["httpGet"]["path"] == expected, container["name"]
    assert container["startupProbe"]["httpGet"]["path"] != "/rollout", "a rollout that waits restarts nothing"


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
    assert any("Ingress" in spec["policyTypes"] for spec in ours), f"no NetworkPolicy restricts connections to {name(workload)}"


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
        executable.accepts(text, about["command"], about.get("environment", {}).items())
        config = tomllib.loads(text)
        section = config.get("router") or config["node"]
        assert service != "router" or drains_long_enough(section), (service, section)
        assert int(about["stop_grace_period"].removesuffix("s")) * 1000 > section.get("drain_ms", 30_000), service
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
            executable.accepts(f"[{section}]\n", [role, "--config", ""], [(variable, value)])
    exposed = {int(port) for port in re.findall(r"^EXPOSE (.*)$", text, re.MULTILINE)[0].split()}
    base = rendered.kustomize(rendered.K8S / "overlays" / "cpu-demo")
    listened = {port for workload, _ in baton_containers(base) for port in ports_of(workload).values()}
    assert exposed == listened, (exposed, listened)


def stripped():
    """The image's executable has no line tables. With those of the image `debug` beside it, a backtrace has lines."""
    text = (rendered.DEPLOY / "Dockerfile").read_text()
    assert "deploy/split-debug.sh target/release/baton /out/baton" in text
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    assert [stage.split("\n")[0] for stage in stages] == ["${RUST} AS build", "${RUNTIME} AS runtime", "runtime AS debug", "runtime"]
    assert ["/out/baton.debug /usr" in stage for stage in stages] == [False, False, True, False]
    with tempfile.TemporaryDirectory() as folder:
        built, out = Path(folder) / "built", Path(folder) / "out"
        source = Path(folder) / "probe.rs"
        source.write_text("#[inline(never)]\nfn gives_up() { panic!(\"so\") }\nfn main() { gives_up() }\n")
        subprocess.run(["rustc", "-Cdebuginfo=line-tables-only", "-o", built, source], check=True)
        subprocess.run([rendered.DEPLOY / "split-debug.sh", built, out], check=True)
        with_lines = backtrace(out)
        assert "gives_up" in with_lines and "probe.rs:2" in with_lines.split("stack backtrace")[1], with_lines
        Path(f"{out}.debug").unlink()
        without = backtrace(out)
        assert "gives_up" not in without, without
        assert out.stat().st_size < built.stat().st_size / 2, (out.stat().st_size, built.stat().st_size)


def backtrace(executable):
    done = subprocess.run([executable], capture_output=True, text=True, env={"RUST_BACKTRACE": "1"})
    assert done.returncode == 101, done
    return done.stderr


def metrics():
    """Every metric that a file of deploy/ names is documented; that the documented ones exist is shown elsewhere."""
    documented = (rendered.DEPLOY.parent / "docs" / "metrics.md").read_text()
    for file in sorted(rendered.DEPLOY.rglob("*")):
        if file.is_file():
            for metric in re.findall(r"\bbaton_[a-z_]+\b", file.read_text()):
                metric = re.sub(r"_(sum|count|bucket)$", "", metric)
                generic = re.sub(r"^baton_(prefill|decode|both|pool)_", "baton_<role>_", metric)
                assert f"`{generic}`" in documented, f"{file}: {metric}"


CHECKS = [
    schemas, schemas_refuse, same, models, values, pods, autoscaling, deadlines, external_etcd, rdma, configs, service_links,
    names, compose, dockerfile, stripped, metrics,
]

if __name__ == "__main__":
    for check in CHECKS:
        if len(sys.argv) < 2 or check.__name__ in sys.argv[1:]:
            check()
            print(check.__name__, "ok")
