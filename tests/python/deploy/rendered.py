"""What there is to check: every overlay, every component, every way to install the chart."""

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

OVERLAYS = ["cpu-demo", "gpu", "gpu-rdma", "gpu-box"]
COMPONENTS = ["gateway", "monitoring", "model-fetch", "pool"]
# The chart's values files that give an overlay's result.
CHARTS = {
    "cpu-demo": ["cpu-demo.yaml"],
    "gpu": ["gpu.yaml"],
    "gpu-rdma": ["gpu.yaml", "gpu-rdma.yaml"],
    "gpu-box": ["gpu-box.yaml"],
}
EVERYTHING_ON = {"gateway": {"enabled": True}, "monitoring": {"enabled": True}, "pool": {"enabled": True}}


@functools.cache
def kustomize(folder):
    """The objects of a kustomization."""
    assert shutil.which("kubectl"), "kubectl is missing: https://kubernetes.io/docs/tasks/tools/"
    command = ["kubectl", "kustomize", "--load-restrictor=LoadRestrictionsNone", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{folder}: {done.stderr}"
    return [document for document in yaml.safe_load_all(done.stdout) if document]


@functools.cache
def with_component(component):
    """The demo with one component: as somebody would add it in an overlay of their own."""
    with tempfile.TemporaryDirectory(dir=K8S) as folder:
        where = {
            "resources": ["../overlays/cpu-demo"],
            "components": [f"../components/{component}"],
            # The overlay has named its own images' tag; a component may bring another workload.
            "images": [{"name": "baton", "newTag": "0.1.0"}],
        }
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(where))
        return kustomize(folder)


@functools.cache
def chart(name):
    return helm.render(CHART, [DEPLOY / "helm" / file for file in CHARTS[name]])


@functools.cache
def pooled_chart():
    """The demo with a pool."""
    return helm.render(CHART, [DEPLOY / "helm" / file for file in [*CHARTS["cpu-demo"], "pool.yaml"]])


@functools.cache
def whole_chart():
    """The defaults, with all that can be switched on."""
    return helm.render(CHART, [], EVERYTHING_ON)


@functools.cache
def monitored_box():
    """A box that is scraped."""
    values = [DEPLOY / "helm" / file for file in CHARTS["gpu-box"]]
    return helm.render(CHART, values, {"monitoring": {"enabled": True}})


def all_of_them():
    """Every result, by name."""
    results = {f"overlay {name}": kustomize(K8S / "overlays" / name) for name in OVERLAYS}
    results |= {f"component {name}": with_component(name) for name in COMPONENTS}
    results |= {f"chart {name}": chart(name) for name in CHARTS}
    results["chart with a pool"] = pooled_chart()
    results["chart with everything on"] = whole_chart()
    results["chart with a monitored box"] = monitored_box()
    return results
