"""Checks of autoscaling, of the job that notes the work of nodes, and of the components made from the chart."""

import http.server
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import urllib.parse
from pathlib import Path

import helm
import rendered
from chart import REMAKE, first_difference, refused
from objects import labels, name, pod, selects, workloads


def autoscaling():
    """Prefill and decode nodes are scaled by metrics of their own role, and the chart then sets no number of replicas."""
    objects = rendered.all_of_them()["chart with everything on"]
    scaled = {thing["metadata"]["name"]: thing["spec"] for thing in objects if thing["kind"] == "ScaledObject"}
    assert sorted(scaled) == ["baton-decode", "baton-prefill"], sorted(scaled)
    deployments = {thing["metadata"]["name"]: thing["spec"] for thing in objects if thing["kind"] == "Deployment"}
    for which, spec in scaled.items():
        assert spec["scaleTargetRef"]["name"] == which and "replicas" not in deployments[which], which
        assert spec["fallback"]["replicas"] == 2, spec["fallback"]
        queries = [trigger["metadata"]["query"] for trigger in spec["triggers"]]
        role = which.removeprefix("baton-")
        assert any("baton_node_" in query and f'role="{role}"' in query for query in queries), queries
        assert all('namespace="baton"' in query for query in queries), queries
        # Missing numbers are not idleness: no query turns them into 0, and KEDA takes them for an error.
        assert all(trigger["metadata"]["ignoreNullValues"] == "false" for trigger in spec["triggers"]), spec["triggers"]
        assert not any(re.search(r"\b(vector|absent)\b", query) for query in queries), queries
    plain = {thing["metadata"]["name"]: thing["spec"] for thing in rendered.chart([], rendered.NAMED) if thing["kind"] == "Deployment"}
    assert plain["baton-decode"]["replicas"] == 2, plain["baton-decode"]
    on = {"autoscaling": {"enabled": True}}
    refused({"pools": {"decode": on}}, "prometheus.url is needed")
    few = {"pools": {"decode": {"autoscaling": {"enabled": True, "min": 3, "max": 2}}}}
    refused(few | {"prometheus": rendered.EVERYTHING_ON["prometheus"]}, "max is below min")
    refused({"gateway": {"inferencePool": {"enabled": True}}}, "gateway.inferencePool needs gateway.enabled")


def deletion_cost():
    """The job gives the nodes with less work a lower `pod-deletion-cost`, with the rights that its Role has."""
    objects = rendered.all_of_them()["chart with everything on"]
    (job,) = [thing for thing in objects if thing["kind"] == "CronJob"]
    assert not any(thing["kind"] == "CronJob" for thing in rendered.chart([], rendered.NAMED))
    rights_of(job, objects)
    pods = [
        {"metadata": {"name": "decode-idle"}},
        {"metadata": {"name": "decode-busy", "annotations": {COST: "1", "other": "kept"}}},
        {"metadata": {"name": "decode-same", "annotations": {COST: "3"}}},
        {"metadata": {"name": "decode-gone"}},
        {"metadata": {"name": "decode-leaves", "deletionTimestamp": "2026-01-01T00:00:00Z"}},
        {"metadata": {"name": "prefill-new", "annotations": {COST: "7"}}},
    ]
    blocks = {"decode-idle": 0, "decode-busy": 900, "decode-same": 5, "decode-gone": 1, "decode-leaves": 2, "stranger": 9}
    with Double(pods, blocks) as double:
        done = run(job, objects, double)
        assert done.returncode == 0, done.stderr
    assert double.patches == {"decode-idle": "0", "decode-busy": "10", "decode-gone": "1"}, double.patches
    assert done.stdout.splitlines() == ["pod decode-idle holds 0 KV blocks: cost 0", "pod decode-busy holds 900 KV blocks: cost 10"]
    selector = dict(urllib.parse.parse_qsl(double.listed))["labelSelector"]
    assert selector == "app.kubernetes.io/name=baton,app.kubernetes.io/component in (prefill,decode)", selector
    assert 'namespace="baton"' in double.query and 'state="leased"' in double.query, double.query
    # Without numbers no cost changes, and the job fails.
    with Double(pods, {}) as double:
        done = run(job, objects, double)
        assert done.returncode == 1 and "no numbers of nodes" in done.stderr and not double.patches, done
    with Double(pods, blocks, refuses=True) as double:
        done = run(job, objects, double)
        assert done.returncode == 1 and "403" in done.stderr, done


COST = "controller.kubernetes.io/pod-deletion-cost"
TOKEN = "token of a ServiceAccount"


def rights_of(job, objects):
    """The job alone has a token, may list and patch pods, and reaches Prometheus and the API."""
    account = pod(job)["serviceAccountName"]
    named = {name(thing): thing for thing in objects}
    assert f"ServiceAccount {account}" in named
    (binding,) = [thing for thing in objects if thing["kind"] == "RoleBinding"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "baton"}], binding
    role = named[f"Role {binding['roleRef']['name']}"]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "patch"]}], role
    for workload in workloads(objects):
        own = workload is job
        assert pod(workload)["automountServiceAccountToken"] is own, name(workload)
        assert own or pod(workload)["serviceAccountName"] != account, name(workload)
    egress = [thing["spec"] for thing in objects if thing["kind"] == "NetworkPolicy" and "Egress" in thing["spec"]["policyTypes"]]
    rules = [rule for spec in egress if selects(spec["podSelector"], labels(job)) for rule in spec["egress"]]
    assert {9090, 443} <= {port["port"] for rule in rules if "to" not in rule for port in rule["ports"]}, rules
    # No other policy or Service counts the job as a node.
    assert labels(job)["app.kubernetes.io/component"] not in ("router", "prefill", "decode", "pool", "box", "etcd")


def run(job, objects, double):
    """The container's command, with the script of the ConfigMap."""
    (container,) = pod(job)["containers"]
    (script,) = [thing["data"] for thing in objects if name(thing) == f"ConfigMap {job['metadata']['name']}"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "token").write_text(f"{TOKEN}\n")
        for file, text in script.items():
            (Path(folder) / file).write_text(text)
        replaced = {
            "/etc/deletion-cost": folder,
            "/var/run/secrets/kubernetes.io/serviceaccount": folder,
            "https://kubernetes.default.svc": double.url,
            rendered.EVERYTHING_ON["prometheus"]["url"]: double.url,
        }
        words = container["command"] + container["args"]
        for text, other in replaced.items():
            assert any(text in word for word in words), (text, words)
            words = [word.replace(text, other) for word in words]
        assert words[0] == "python3", words
        return subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, timeout=30)


class Double:
    """Prometheus and the Kubernetes API. It records the costs that pods got."""

    def __init__(self, pods, blocks, refuses=False):
        self.pods, self.blocks, self.refuses = pods, blocks, refuses
        self.patches, self.query, self.listed = {}, "", ""

    def __enter__(self):
        double = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.say(*double.get(self.path, self.headers))

            def do_PATCH(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                self.say(*double.patch(self.path, self.headers, body))

            def say(self, status, body):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def get(self, path, headers):
        path, _, query = path.partition("?")
        if path == "/api/v1/query":
            assert "authorization" not in headers, "the token goes to Prometheus"
            self.query = dict(urllib.parse.parse_qsl(query))["query"]
            series = [{"metric": {"pod": which}, "value": [0, str(count)]} for which, count in self.blocks.items()]
            return 200, {"status": "success", "data": {"resultType": "vector", "result": series}}
        if path != "/api/v1/namespaces/baton/pods" or headers["authorization"] != f"Bearer {TOKEN}" or self.refuses:
            return 403, {"kind": "Status", "code": 403}
        self.listed = query
        return 200, {"kind": "PodList", "items": self.pods}

    def patch(self, path, headers, body):
        which = path.removeprefix("/api/v1/namespaces/baton/pods/")
        allowed = headers["authorization"] == f"Bearer {TOKEN}"
        if not allowed or headers["content-type"] != "application/merge-patch+json":
            return 403, {"kind": "Status", "code": 403}
        assert list(body) == ["metadata"] and list(body["metadata"]) == ["annotations"], body
        ((annotation, cost),) = body["metadata"]["annotations"].items()
        assert annotation == COST, annotation
        self.patches[which] = cost
        return (404, {"kind": "Status", "code": 404}) if which == "decode-gone" else (200, {})


def components():
    """Every component equals what the chart adds with the same values, over each overlay. UPDATE_DOCS=1 writes it again."""
    for component, (values, overlays) in rendered.COMPONENTS.items():
        file = rendered.K8S / "components" / component / "objects.yaml"
        expected = rendered.component_file(component)
        if os.environ.get("UPDATE_DOCS"):
            file.write_text(expected)
        assert helm.documents(file.read_text()) == helm.documents(expected), (component, REMAKE)
        for overlay in overlays:
            with_it = rendered.own_overlay(overlay, WITH_COMPONENT.replace("COMPONENT", component))
            charts = {name(thing): thing for thing in rendered.overlay_chart(overlay, component)}
            without_model = [thing for thing in with_it if not rendered.is_model(thing) and thing["kind"] != "Namespace"]
            assert len(without_model) == len(charts) - 1, (component, overlay, sorted(charts))
            for thing in without_model:
                chart = rendered.without_helm(charts[name(thing)])
                difference = first_difference(*map(without_names, (thing, chart)))
                assert without_names(thing) == without_names(chart), f"{component}, {overlay}, {name(thing)}: {difference}"


# The example in deploy/k8s/README.md.
WITH_COMPONENT = """
namespace: baton
resources: [OVERLAY]
components: [../components/COMPONENT]
"""


def without_names(thing):
    """Without the namespace, and without the suffix of the generated ConfigMap's name, both of kustomize's."""
    text = re.sub(r'"baton-model-\w+"', '"baton-model"', json.dumps(thing))
    plain = json.loads(text)
    plain["metadata"].pop("namespace", None)
    return plain
