"""Checks of names: ports, pages, pods, services and metrics that files of deploy/ refer to exist."""

import re

import rendered
from objects import labels, name, pod, selects, workloads

# Pages that a probe or a monitor may name. tests/tests/deploy.rs checks that they are served.
PAGES = {"/live", "/ready", "/rollout", "/metrics"}


def names():
    """Probes, services, policies and budgets refer to ports, pages and pods that exist, and every pod has a policy."""
    for result, objects in rendered.all_of_them().items():
        try:
            names_of(objects)
        except AssertionError as error:
            raise AssertionError(f"{result}: {error}") from None


def names_of(objects):
    pods = workloads(objects)
    for workload in pods:
        if workload["kind"] == "CronJob":
            guarded(workload, objects)
            continue
        assert selects(workload["spec"]["selector"], labels(workload)), name(workload)
        for container in pod(workload)["containers"]:
            probes_of(container)
        guarded(workload, objects)
    for thing in objects:
        spec = thing.get("spec", {})
        if thing["kind"] == "Service":
            behind = [one for one in pods if selects({"matchLabels": spec["selector"]}, labels(one))]
            # Prefill nodes of several processes have workloads of their own behind one Service.
            alike = {one["spec"]["serviceName"] if "serviceName" in one["spec"] else name(one) for one in behind}
            assert len(alike) == 1, f"{name(thing)} has {len(behind)} workloads: {alike}"
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
                    backend_of(objects, backend)
        if thing["kind"] == "GRPCRoute":
            for backend in (backend for rule in spec["rules"] for backend in rule["backendRefs"]):
                serves(objects, backend["name"], backend["port"])
        if thing["kind"] == "InferencePool":
            behind = [one for one in pods if selects(spec["selector"], labels(one))]
            assert [one["metadata"]["name"] for one in behind] == [thing["metadata"]["name"]], name(thing)
            assert [port["number"] for port in spec["targetPorts"]] == [ports_of(behind[0])["http"]], spec["targetPorts"]
        if thing["kind"] == "ServiceMonitor":
            monitored(objects, thing)


def ports_of(workload):
    return {port["name"]: port["containerPort"] for container in pod(workload)["containers"] for port in container.get("ports", [])}


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
    """A policy selects existing pods, opens only ports on which they listen, and admin ports only to monitors. A range of
    ports is one that the pod's kernel chooses from, for processes of the same node."""
    own = [one for one in pods if selects(spec["podSelector"], labels(one))]
    assert own, which
    listening = {port: called for one in own for called, port in ports_of(one).items()}
    for rule in spec.get("ingress") or []:
        assert rule.get("ports"), f"{which} opens every port"
        for port in rule["ports"]:
            if "endPort" in port:
                assert not set(range(port["port"], port["endPort"] + 1)) & set(listening), f"{which} opens {listening}"
                assert "baton/group" in spec["podSelector"]["matchLabels"], which
                assert rule["from"] == [{"podSelector": spec["podSelector"]}], f"{which}: {rule}"
                continue
            assert port["port"] in listening, f"{which} opens {port}, they listen on {listening}"
            if "admin" in listening[port["port"]]:
                assert all(map(monitors, rule.get("from") or [{}])), f"{which} opens a port on which nodes are put to sleep"


def monitors(source):
    """Whether a source is the namespace of monitors only."""
    return source.get("namespaceSelector", {}).get("matchLabels") == {"kubernetes.io/metadata.name": "monitoring"}


def guarded(workload, objects):
    """At least one policy restricts connections to a workload."""
    policies = [thing["spec"] for thing in objects if thing["kind"] == "NetworkPolicy"]
    ours = [spec for spec in policies if selects(spec["podSelector"], labels(workload))]
    assert any("Ingress" in spec["policyTypes"] for spec in ours), f"no NetworkPolicy restricts connections to {name(workload)}"


def backend_of(objects, backend):
    """A route goes to a port of a Service, or to an InferencePool."""
    if backend.get("kind") == "InferencePool":
        assert any(name(thing) == f"InferencePool {backend['name']}" for thing in objects), backend
    else:
        serves(objects, backend["name"], backend["port"])


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


def reachable():
    """NetworkPolicies let routers reach all nodes, KV pass from each sender to each receiver, and a model be fetched."""
    for result, objects in rendered.all_of_them().items():
        pods = {labels(one)["app.kubernetes.io/component"]: one for one in workloads(objects)}
        senders = [of for of in pods if of in ("prefill", "prefill-head", "prefill-rank", "pool")]
        receivers = [of for of in pods if of in ("decode", "decode-head", "decode-rank", "pool")]
        nodes = [of for of in senders + receivers if not of.endswith("-rank")]
        pairs = [("router", of, "grpc") for of in nodes] + [(of, to, "transfer") for of in senders for to in receivers if of != to]
        pairs += [("router", "box", f"{role}-grpc") for role in ("prefill", "decode") if "box" in pods]
        assert pairs or "upstream" in result, result
        for of, to, port in pairs:
            number = ports_of(pods[to])[port]
            opened = allowed(objects, pods[of], "egress", "to", pods[to], number) and allowed(objects, pods[to], "ingress", "from", pods[of], number)
            assert opened, f"{result}: {of} does not reach {to} at {number}"
    for url, port in [("https://x/m.tar", 443), ("http://x/m.tar", 80), ("http://store.models:9000/m.tar", 9000)]:
        objects = rendered.chart([], {"model": {"path": "/models/x", "fetch": {"url": url}}})
        (fetch,) = [thing["spec"] for thing in objects if name(thing) == "NetworkPolicy baton-model-fetch"]
        assert {"protocol": "TCP", "port": port} in fetch["egress"][0]["ports"], (url, fetch)


def allowed(objects, own, direction, other_end, other, port):
    """Whether the policies of a pod allow a connection with another one."""
    policies = [thing["spec"] for thing in objects if thing["kind"] == "NetworkPolicy"]
    ours = [spec for spec in policies if direction.capitalize() in spec["policyTypes"] and selects(spec["podSelector"], labels(own))]
    rules = [rule for spec in ours for rule in spec.get(direction) or []]
    right_port = [rule for rule in rules if port in [one["port"] for one in rule.get("ports", [])] or "ports" not in rule]
    peers = [peer for rule in right_port for peer in rule.get(other_end, [{"podSelector": {}}])]
    return not ours or any("podSelector" in peer and selects(peer["podSelector"], labels(other)) for peer in peers)


def metrics():
    """Every metric named in deploy/ is documented. Another test checks that documented metrics exist."""
    documented = (rendered.DEPLOY.parent / "docs" / "metrics.md").read_text()
    for file in sorted(rendered.DEPLOY.rglob("*")):
        if file.is_file():
            for metric in re.findall(r"\bbaton_[a-z_]+\b", file.read_text()):
                metric = re.sub(r"_(sum|count|bucket)$", "", metric)
                assert f"`{metric}`" in documented, f"{file}: {metric}"
