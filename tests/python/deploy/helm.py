"""Renders a chart with Helm itself: the one in PATH, or else the library that the package helm-sdkpy brings.

The library has no `template`, only `install`. So it installs into a puppet of the Kubernetes API that accepts
everything, and what it would have created is what was rendered. The package's own Python wants 3.12 or newer;
its library is called here directly, whatever the Python.
"""

import ctypes
import hashlib
import http.server
import json
import platform
import re
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import yaml

CACHE = Path(__file__).resolve().parents[3] / ".cache" / "helm"
RENDERED = CACHE.parent / "rendered"
RELEASE, NAMESPACE = "baton", "baton"


def render(chart, values_files=(), values=None, release=RELEASE):
    """The objects of a release in the namespace `baton`."""
    merged = {}
    for file in values_files:
        merge(merged, yaml.safe_load(Path(file).read_text()) or {})
    merge(merged, values or {})
    kept = RENDERED / f"{key_of(chart, merged, release)}.json"
    if not kept.exists():
        with_helm = with_executable if shutil.which("helm") else with_library
        objects = with_helm(chart, merged, release)
        RENDERED.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=RENDERED, delete=False) as file:
            json.dump(objects, file)
        Path(file.name).rename(kept)
    return json.loads(kept.read_text())


def key_of(chart, values, release):
    """Equal for the same chart, the same values and the same way to render: every check is a process, and Helm is slow."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for file in sorted(path for path in Path(chart).rglob("*") if path.is_file()):
        digest.update(str(file).encode() + file.read_bytes())
    digest.update(json.dumps([release, values], sort_keys=True).encode())
    return digest.hexdigest()


def documents(text):
    """The documents of a YAML text, read by libyaml: PyYAML's own reader takes ten times as long."""
    return [document for document in yaml.load_all(text, Loader=yaml.CSafeLoader) if document]


def merge(into, values):
    """Merges values as Helm does: maps by key, other values as a whole."""
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = json.loads(json.dumps(value))


def with_executable(chart, values, release):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(values, file)
        file.flush()
        command = ["helm", "template", release, str(chart), "--namespace", NAMESPACE, "--values", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return documents(text)


class Failed(Exception):
    """Helm refused the values. The message is Helm's."""


def with_library(chart, values, release):
    with PuppetApi() as api, tempfile.TemporaryDirectory() as folder:
        kubeconfig = Path(folder) / "kubeconfig"
        kubeconfig.write_text(json.dumps(api.kubeconfig()))
        installed = install(library(), kubeconfig, chart, values, release)
    return documents(installed["manifest"])


def library():
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    path = CACHE / "helm_sdkpy" / "_lib" / f"linux-{machine}" / "libhelm_sdkpy.so"
    if not path.exists():
        raise Failed(f"neither helm nor {path} is there: ./test.sh installs it")
    return ctypes.CDLL(str(path))


def install(helm, kubeconfig, chart, values, release):
    helm.helm_sdkpy_last_error.restype = ctypes.c_char_p
    text = lambda value: ctypes.c_char_p(str(value).encode())

    def checked(code):
        if code != 0:
            raise Failed(helm.helm_sdkpy_last_error().decode())

    handle, result = ctypes.c_ulonglong(), ctypes.c_char_p()
    checked(helm.helm_sdkpy_config_create(text(NAMESPACE), text(kubeconfig), None, text("{}"), ctypes.byref(handle)))
    try:
        options = {"wait": False, "server_side_apply": "false", "disable_openapi_validation": True, "timeout_seconds": 30}
        checked(
            helm.helm_sdkpy_install(
                handle, text(release), text(chart), text(json.dumps(values)), text(""), text(json.dumps(options)),
                ctypes.byref(result),
            )
        )
        return json.loads(result.value.decode())
    finally:
        helm.helm_sdkpy_config_destroy(handle)


# Kinds that the chart may make: group and version, plural, and whether objects have a namespace.
KINDS = {
    "ConfigMap": ("v1", "configmaps"),
    "Secret": ("v1", "secrets"),
    "Service": ("v1", "services"),
    "ServiceAccount": ("v1", "serviceaccounts"),
    "Deployment": ("apps/v1", "deployments"),
    "StatefulSet": ("apps/v1", "statefulsets"),
    "CronJob": ("batch/v1", "cronjobs"),
    "Role": ("rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": ("rbac.authorization.k8s.io/v1", "rolebindings"),
    "HorizontalPodAutoscaler": ("autoscaling/v2", "horizontalpodautoscalers"),
    "PodDisruptionBudget": ("policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": ("networking.k8s.io/v1", "networkpolicies"),
    "ResourceClaimTemplate": ("resource.k8s.io/v1", "resourceclaimtemplates"),
    "HTTPRoute": ("gateway.networking.k8s.io/v1", "httproutes"),
    "ServiceMonitor": ("monitoring.coreos.com/v1", "servicemonitors"),
    "ScaledObject": ("keda.sh/v1alpha1", "scaledobjects"),
    "Certificate": ("cert-manager.io/v1", "certificates"),
    "InferencePool": ("inference.networking.k8s.io/v1", "inferencepools"),
    "GRPCRoute": ("gateway.networking.k8s.io/v1", "grpcroutes"),
}
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


class PuppetApi:
    """A Kubernetes API without objects that accepts every object."""

    def __enter__(self):
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), PuppetHandler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def kubeconfig(self):
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "puppet",
            "contexts": [{"name": "puppet", "context": {"cluster": "puppet", "user": "puppet"}}],
            "clusters": [{"name": "puppet", "cluster": {"server": f"http://127.0.0.1:{self.server.server_port}"}}],
            "users": [{"name": "puppet", "user": {}}],
        }


class PuppetHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # The head and the body of an answer are two writes: the second one would wait 40 ms for the client's acknowledgement.
    disable_nagle_algorithm = True

    def do_GET(self):
        path = self.path.split("?")[0].rstrip("/")
        if path == "/version":
            return self.say(200, {"major": "1", "minor": "34", "gitVersion": "v1.34.0"})
        if path == "/api":
            return self.say(200, {"kind": "APIVersions", "versions": ["v1"]})
        if path == "/apis":
            return self.say(200, groups())
        if group := re.fullmatch(r"/(?:api|apis)/((?:[\w.-]+/)?v\d\w*)", path):
            return self.say(200, resources(group[1]))
        if path.endswith("/secrets"):
            return self.say(200, {"kind": "SecretList", "apiVersion": "v1", "metadata": {}, "items": []})
        return self.say(404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404})

    def do_POST(self):
        length = int(self.headers.get("content-length", 0))
        body = self.rfile.read(length)
        # Releases are stored as protobuf or JSON, and not read again.
        self.say(201, json.loads(body) if body.startswith(b"{") else {"kind": "Secret", "apiVersion": "v1"})

    do_PUT = do_PATCH = do_POST

    def say(self, status, body):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


def groups():
    versions = sorted({version for version, _ in KINDS.values() if "/" in version})
    def group(version):
        entry = {"groupVersion": version, "version": version.split("/")[1]}
        return {"name": version.split("/")[0], "versions": [entry], "preferredVersion": entry}
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group(version) for version in versions]}


def resources(version):
    listed = [
        {"name": plural, "singularName": "", "namespaced": True, "kind": kind, "verbs": VERBS}
        for kind, (of, plural) in KINDS.items()
        if of == version
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": listed}
