"""The objects to check: every way to install the chart, and the overlays made from it."""

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import yaml

import helm

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
K8S = DEPLOY / "k8s"
CHART = DEPLOY / "helm" / "baton"

# Placeholders that operators of a GPU overlay replace. The model does not exist, nor the claim until they create it.
UNNAMED = {"model": {"path": "/models/NAME-THE-MODEL", "claim": "baton-models"}}
NAMED = {"model": {"path": "/models/qwen3-8b", "claim": "models"}}
# The chart's values files and values of each overlay.
# kustomize makes no random values. Operators create this Secret (deploy/k8s/README.md).
IDENTITY = {"identity": {"existingSecret": "baton-identity"}}
OVERLAYS = {
    "cpu-demo": (["cpu-demo.yaml"], IDENTITY),
    "gpu": (["gpu.yaml"], UNNAMED | IDENTITY),
    "gpu-rdma": (["gpu.yaml", "gpu-rdma.yaml"], UNNAMED | IDENTITY),
    "gpu-box": (["gpu-box.yaml"], UNNAMED | IDENTITY),
}
EVERYTHING_ON = {
    "gateway": {"enabled": True, "grpc": True, "inferencePool": {"enabled": True}},
    "monitoring": {"enabled": True},
    "pool": {"enabled": True},
    "groups": {"prefill": {"enabled": True}, "decode": {"enabled": True}},
    "pools": {"prefill": {"autoscaling": {"enabled": True}}, "decode": {"autoscaling": {"enabled": True}}},
    "prometheus": {"url": "http://prometheus.monitoring:9090"},
}
# The values of each component in deploy/k8s/components that is made from the chart, and its overlays.
COMPONENTS = {
    "autoscaling": (
        {
            "monitoring": {"enabled": True},
            "pools": {"prefill": {"autoscaling": {"enabled": True}}, "decode": {"autoscaling": {"enabled": True}}},
            # The Service that the Prometheus Operator makes for every Prometheus.
            "prometheus": {"url": "http://prometheus-operated.monitoring:9090"},
        },
        ["cpu-demo", "gpu", "gpu-rdma"],
    ),
    "groups": ({"groups": EVERYTHING_ON["groups"]}, ["cpu-demo"]),
    "inference-extension": ({"gateway": EVERYTHING_ON["gateway"]}, list(OVERLAYS)),
}
TLS = {"tls": {"enabled": True, "issuerRef": {"name": "baton-ca", "kind": "ClusterIssuer"}}}
EXTERNAL_ETCD = {
    "enabled": False,
    "external": {
        "urlSecret": {"name": "etcd-access"},
        "certificatesSecret": "etcd-certificates",
        "port": 2390,
        "cidrs": ["10.1.0.0/16"],
    },
}
# Routers before pools of vLLM servers in two namespaces, whose endpoints Kubernetes lists.
UPSTREAM = {
    "pools": {"enabled": False},
    "router": {
        "upstreamNamespaces": ["prod", "lab"],
        "env": [
            {"name": "BATON_EXPERT__UPSTREAM__KIND", "value": "vllm"},
            {"name": "BATON_EXPERT__UPSTREAM__PREFILL", "value": '["kubernetes://vllm-prefill.prod:8000"]'},
            {"name": "BATON_EXPERT__UPSTREAM__DECODE", "value": '["kubernetes://vllm-decode.lab:http"]'},
        ],
    },
}
FETCHED = {"model": {"path": "/models/qwen3-8b", "fetch": {"url": "https://models.example.com/model.tar"}}}


def chart(files=(), *values, release=helm.RELEASE):
    """The chart's objects with these values files and values."""
    merged = {}
    for one in values:
        helm.merge(merged, one)
    return helm.render(CHART, [DEPLOY / "helm" / file for file in files], merged, release)


@functools.cache
def overlay_chart(name, component=None):
    """The chart's objects of an overlay, with the values of a component."""
    files, values = OVERLAYS[name]
    return chart(files, values, COMPONENTS[component][0] if component else {})


class Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, and no references."""

    def ignore_aliases(self, _):
        return True


def text_node(dumper, text):
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Dumper.add_representer(str, text_node)


def objects_file(name):
    """The expected `objects.yaml` of an overlay: a namespace, and the chart's objects without the parts for Helm.

    The ConfigMap `baton-model` is made by the kustomization, so that its name changes with the model and pods are rolled.
    """
    namespace = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": "baton", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
    }
    objects = [namespace, *(without_helm(thing) for thing in overlay_chart(name) if not is_model(thing))]
    text = yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, width=1000)
    return "# Made from the chart: deploy/k8s/README.md. Do not edit.\n" + text


def component_file(component):
    """The expected `objects.yaml` of a component: what the chart has more with its values."""
    overlay = COMPONENTS[component][1][0]
    before = {(thing["kind"], thing["metadata"]["name"]) for thing in overlay_chart(overlay)}
    added = [thing for thing in overlay_chart(overlay, component) if (thing["kind"], thing["metadata"]["name"]) not in before]
    text = yaml.dump_all(map(without_helm, added), Dumper=Dumper, sort_keys=False, width=1000)
    return "# Made from the chart: deploy/k8s/README.md. Do not edit.\n" + text


def is_model(thing):
    return thing["kind"] == "ConfigMap" and thing["metadata"]["name"].startswith("baton-model")


def without_helm(thing):
    labels = thing["metadata"].get("labels", {})
    kept = {key: value for key, value in labels.items() if key not in ("app.kubernetes.io/managed-by", "helm.sh/chart")}
    metadata = {key: value for key, value in thing["metadata"].items() if key != "labels"}
    return thing | {"metadata": metadata | ({"labels": kept} if kept else {})}


@functools.cache
def kustomize(folder):
    """The objects of a kustomization."""
    assert shutil.which("kubectl"), "kubectl is missing: https://kubernetes.io/docs/tasks/tools/"
    command = ["kubectl", "kustomize", "--load-restrictor=LoadRestrictionsNone", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{folder}: {done.stderr}"
    return helm.documents(done.stdout)


# The example in deploy/k8s/README.md.
WITH_CERTIFICATES = """
namespace: baton
resources: [OVERLAY]
components: [../components/cert-manager]
"""
WITH_GROUPS_AND_CERTIFICATES = WITH_CERTIFICATES.replace("[../", "[../components/groups, ../")


@functools.cache
def with_certificates(name):
    """An overlay with the component for cert-manager."""
    return own_overlay(name, WITH_CERTIFICATES)


def own_overlay(name, text):
    """An operator's overlay over one of ours."""
    with tempfile.TemporaryDirectory(dir=K8S) as folder:
        (Path(folder) / "kustomization.yaml").write_text(text.replace("OVERLAY", f"../overlays/{name}"))
        return kustomize(folder)


@functools.cache
def all_of_them():
    """All results, by name."""
    results = {f"overlay {name}": kustomize(K8S / "overlays" / name) for name in OVERLAYS}
    results |= {f"chart {name}": overlay_chart(name) for name in OVERLAYS}
    results |= {f"overlay {name} with certificates": with_certificates(name) for name in OVERLAYS}
    results["overlay with groups and certificates"] = own_overlay("cpu-demo", WITH_GROUPS_AND_CERTIFICATES)
    results["chart with certificates"] = chart([], NAMED, {"pool": {"enabled": True}, "groups": EVERYTHING_ON["groups"]}, TLS)
    results["chart with a box and certificates"] = chart(["gpu-box.yaml"], NAMED, TLS)
    results["chart with a pool"] = chart(["cpu-demo.yaml", "pool.yaml"])
    groups = {role: {"enabled": True, "replicas": 2, "processes": 4} for role in ("prefill", "decode")}
    groups["decode"]["resources"] = {"limits": {"nvidia.com/gpu": 1}}
    results["chart with several groups"] = chart(["cpu-demo.yaml"], {"groups": groups})
    results["chart with everything on"] = chart([], NAMED, EVERYTHING_ON)
    results["chart with a monitored box"] = chart(["gpu-box.yaml"], NAMED, {"monitoring": {"enabled": True}})
    results["chart with an external etcd"] = chart([], NAMED, EVERYTHING_ON, {"etcd": EXTERNAL_ETCD})
    results["chart with a box and an external etcd"] = chart(["gpu-box.yaml"], NAMED, {"etcd": EXTERNAL_ETCD})
    results["chart with a fetched model"] = chart([], FETCHED)
    results["chart with groups and a pool"] = chart(["cpu-demo.yaml"], {"pools": {"enabled": False}, "pool": {"enabled": True}, "groups": EVERYTHING_ON["groups"]})
    results["chart with a box at other ports"] = chart(["gpu-box.yaml"], NAMED, {"box": {"decode": {"ports": {"grpc": 7020, "admin": 7021, "transfer": 7022}}}})
    results["chart with upstream pools"] = chart([], NAMED, UPSTREAM)
    results["chart with a long deadline"] = chart([], NAMED, {"router": {"deadlineSeconds": 3600}, "gateway": {"enabled": True}})
    return results


@functools.cache
def under_another_name():
    """Some of the results, of releases that operators gave other names."""
    pooled = chart(["cpu-demo.yaml", "pool.yaml"], release="baton-blue")
    return {"release baton-blue": pooled, "release x": chart([], NAMED, EVERYTHING_ON, release="x")}
