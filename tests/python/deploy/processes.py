"""Checks of the processes in rendered objects: each gets a configuration that the executable accepts."""

import itertools
import json
import tomllib

import executable
import kubelet
import rendered
from objects import baton_containers, labels, mounted_files, name, pod, selects, template, workloads

# One of the ports that Linux gives to a socket without a port.
NCCL_PORT = 40000


def models():
    """In GPU overlays the operator names the model in one place, and no process serves the bundled one."""
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
            # Another model starts new pods.
            assert reference["valueFrom"]["configMapKeyRef"]["name"] != before["metadata"]["name"], reference
    for values in [{}, {"model": {"path": "/models/x"}}, {"model": {**rendered.NAMED["model"], "fetch": {"url": "https://x"}}}]:
        try:
            rendered.chart([], values)
        except Exception as error:
            assert "model." in f"{error}{getattr(error, 'stderr', '')}", error
        else:
            raise AssertionError(f"the chart accepts {values}")


# The example in deploy/k8s/README.md.
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
    """A router drains for the longest deadline. A pod's grace period and a gateway's timeout are longer."""
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
    """Whether a request accepted at the start of the drain can use its whole deadline."""
    deadline = router["deadline_max_ms"]
    return router["deadline_ms"] == deadline and router["drain_ms"] >= deadline + router.get("notice_ms", 3_000)


def external_etcd():
    """External etcd: the URL comes from a Secret, the certificates are mounted, and policies let processes connect."""
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
    """Nodes of `gpu-rdma` use RDMA with their own device and network, and without capabilities."""
    objects = rendered.kustomize(rendered.K8S / "overlays" / "gpu-rdma")
    nodes = [(workload, container) for workload, container in computing(objects) if container["name"] != "router"]
    assert len(nodes) == 2, nodes
    for workload, container in nodes:
        config = tomllib.loads(config_of(objects, workload, container))
        transfer = config["transfer"]
        assert transfer["connectors"][0] == "rdma", transfer
        assert container["resources"]["limits"]["rdma/hca_shared_devices_a"] == 1, container["resources"]
        annotations = template(workload)["metadata"]["annotations"]
        assert annotations["k8s.v1.cni.cncf.io/networks"] == "baton-rdma", annotations
        # An added capability has no effect for a process that is not root.
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, container["securityContext"]
        port = int(config["expert"]["transfer"]["rdma_listen"].rsplit(":", 1)[1])
        policies = [thing["spec"] for thing in objects if thing["kind"] == "NetworkPolicy"]
        ours = [spec for spec in policies if selects(spec["podSelector"], labels(workload))]
        opened = [one["port"] for spec in ours for rule in spec.get("ingress", []) for one in rule["ports"]]
        assert port in opened, opened
    unlimited = {"pools": {role: {"resources": {"limits": None}} for role in ("prefill", "decode")}}
    for _, container in computing(rendered.chart(["gpu.yaml", "gpu-rdma.yaml"], rendered.NAMED, unlimited)):
        assert container["name"] == "router" or container["resources"]["limits"] == {"rdma/hca_shared_devices_a": 1}, container["resources"]


def upstream():
    """Only routers before upstream pools get a token. It may read the EndpointSlices of these namespaces, and nothing else."""
    for result, objects in rendered.all_of_them().items():
        has_pools = result == "chart with upstream pools"
        for workload, container in baton_containers(objects):
            is_ours = has_pools and container["name"] == "router"
            spec = pod(workload)
            assert spec["automountServiceAccountToken"] is is_ours, (result, name(workload))
            assert spec["serviceAccountName"] == ("baton-router" if is_ours else "baton"), (result, name(workload))
        of_routers = [thing for thing in objects if thing["metadata"]["name"].startswith("baton-router")]
        roles = {thing["metadata"]["namespace"]: thing["rules"] for thing in of_routers if thing["kind"] == "Role"}
        rule = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
        assert roles == ({"prod": [rule], "lab": [rule]} if has_pools else {}), (result, roles)
        bound = [thing for thing in of_routers if thing["kind"] == "RoleBinding"]
        assert [thing["metadata"]["namespace"] for thing in bound] == list(roles), result
        for thing in bound:
            assert thing["roleRef"]["name"] == "baton-router", thing
            assert thing["subjects"] == [{"kind": "ServiceAccount", "name": "baton-router", "namespace": "baton"}], thing
    (router,) = [one for one in workloads(objects_with_upstream()) if name(one) == "Deployment baton-router"]
    policies = [thing["spec"] for thing in objects_with_upstream() if thing["kind"] == "NetworkPolicy"]
    rules = [rule for spec in policies if selects(spec["podSelector"], labels(router)) for rule in spec.get("egress", [])]
    opened = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": one}}} for one in ("prod", "lab")]
    assert {"to": opened} in rules, rules
    assert {"ports": [{"protocol": "TCP", "port": 443}, {"protocol": "TCP", "port": 6443}]} in rules, rules


def objects_with_upstream():
    return rendered.all_of_them()["chart with upstream pools"]


def configs():
    """Every process accepts its file with its environment, and its flags exist."""
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
    if args[0] == "rank":
        # It dials its head and the nodes that its KV goes to. Processes of decode nodes also take KV.
        takes_kv = "decode" in name(workload)
        listens = {setting: port for setting, port in listens.items() if setting == "node.admin" or takes_kv and setting == "transfer.listen"}
    declared = {port["containerPort"] for port in container["ports"]}
    assert declared == set(listens.values()), f"declares {declared}, listens on {listens}"
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"], security
    assert pod(workload)["securityContext"]["runAsNonRoot"]


def service_links():
    """No pod asks for variables of Services, and every container also starts with them."""
    results = rendered.all_of_them() | rendered.under_another_name()
    for result, objects in results.items():
        for workload in workloads(objects):
            assert pod(workload).get("enableServiceLinks") is False, f"{result}, {name(workload)}"
    tried = set()
    for result, objects in results.items():
        for workload, container in baton_containers(objects):
            # A patch may have removed the setting from the pod.
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


def groups():
    """Nodes of several processes: each stage but the last has a pod that finds its head, and policies let it."""
    objects = rendered.all_of_them()["chart with several groups"]
    sets = {thing["metadata"]["name"]: thing for thing in objects if thing["kind"] == "StatefulSet" and "etcd" not in name(thing)}
    parts = [f"{role}-{place}-{group}" for role in ["decode", "prefill"] for place in ["head", "rank"] for group in ["0", "1"]]
    assert sorted(sets) == [f"baton-{part}" for part in parts], sorted(sets)
    services = {thing["metadata"]["name"]: thing["spec"] for thing in objects if thing["kind"] == "Service"}
    pools = {name(thing): thing for thing in workloads(objects)}
    for role, group in itertools.product(["prefill", "decode"], ["0", "1"]):
        head, rank = sets[f"baton-{role}-head-{group}"], sets[f"baton-{role}-rank-{group}"]
        assert (head["spec"]["replicas"], rank["spec"]["replicas"]) == (1, 3), (role, group)
        (of_rank,) = pod(rank)["containers"]
        (of_head,) = pod(head)["containers"]
        assert (of_head["args"][0], of_rank["args"][0]) == (role, "rank")
        config = tomllib.loads(config_of(objects, head, of_head))
        assert config == tomllib.loads(config_of(objects, rank, of_rank)), "a follower with other settings is refused"
        assert config["expert"]["model"]["processes"] == 4, config
        service, port = head["spec"]["serviceName"], config["expert"]["model"]["join"].rsplit(":", 1)[1]
        env = {entry["name"]: entry for entry in of_rank["env"]}
        assert env["BATON_RANK_OF"]["value"] == f"baton-{role}-head-{group}-0.{service}:{port}", env["BATON_RANK_OF"]
        assert services[service]["publishNotReadyAddresses"], "a follower looks for a head that is not ready yet"
        field = env["BATON_RANK_PLACE"]["valueFrom"]["fieldRef"]["fieldPath"]
        assert field == "metadata.labels['apps.kubernetes.io/pod-index']", field
        for part in [head, rank]:
            assert part["spec"]["podManagementPolicy"] == "Parallel" and part["spec"]["updateStrategy"] == {"type": "OnDelete"}, name(part)
            budgets = [thing for thing in objects if thing["kind"] == "PodDisruptionBudget" and selects(thing["spec"]["selector"], labels(part))]
            assert len(budgets) == 1, name(part)
        reaches(objects, rank, head, int(port))
        router = pools["Deployment baton-router"]
        reaches(objects, router, head, 7000)
        assert not is_open(objects, router, head, 7004), "only followers join"
        # Only GPUs need NCCL.
        for source, target in itertools.permutations([head, rank]):
            assert is_open(objects, source, target, NCCL_PORT) == (role == "decode"), name(target)
        of_other = sets[f"baton-{role}-rank-{1 - int(group)}"]
        assert not is_open(objects, of_other, rank, NCCL_PORT), "of another node"
    prefill, decode = (
        [pools[f"Deployment baton-{role}"], *(sets[part] for part in sets if part.startswith(f"baton-{role}"))] for role in ["prefill", "decode"]
    )
    for sender, receiver in itertools.product(prefill, decode):
        reaches(objects, sender, receiver, 7002)
    assert not is_open(objects, sets["baton-decode-rank-0"], sets["baton-prefill-head-0"], 7004), "of another node"


def reaches(objects, source, target, port):
    assert is_open(objects, source, target, port), f"{name(source)} does not reach port {port} of {name(target)}"


def is_open(objects, source, target, port):
    """Whether a policy lets one workload connect to a port of another."""
    policies = [thing["spec"] for thing in objects if thing["kind"] == "NetworkPolicy"]
    rules = [rule for spec in policies if selects(spec["podSelector"], labels(target)) for rule in spec.get("ingress", [])]
    open_to = [rule.get("from") for rule in rules if any(one["port"] <= port <= one.get("endPort", one["port"]) for one in rule["ports"])]
    return any("podSelector" in one and selects(one["podSelector"], labels(source)) for sources in open_to for one in sources or [])
