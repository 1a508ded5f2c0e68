"""Reads rendered objects."""

import re


def name(thing):
    return f"{thing['kind']} {thing['metadata']['name']}"


def workloads(objects):
    return [thing for thing in objects if thing["kind"] in ("Deployment", "StatefulSet", "CronJob")]


def template(workload):
    """The template of a workload's pods."""
    spec = workload["spec"]
    return spec["jobTemplate"]["spec"]["template"] if workload["kind"] == "CronJob" else spec["template"]


def pod(workload):
    return template(workload)["spec"]


def labels(workload):
    return template(workload)["metadata"]["labels"]


def selects(selector, pod_labels):
    """Whether a label selector selects a pod."""
    for key, value in (selector.get("matchLabels") or {}).items():
        if pod_labels.get(key) != value:
            return False
    for term in selector.get("matchExpressions") or []:
        assert term["operator"] == "In", term
        if pod_labels.get(term["key"]) not in term["values"]:
            return False
    return True


def baton_containers(objects):
    """(workload, container) for every container that runs the executable."""
    return [
        (workload, container)
        for workload in workloads(objects)
        for container in pod(workload)["containers"]
        if re.match(r"baton(:|$)", container["image"])
    ]


def mounted_files(objects, workload, container):
    """The files of every ConfigMap that is mounted in a container, by path."""
    maps = {thing["metadata"]["name"]: thing["data"] for thing in objects if thing["kind"] == "ConfigMap"}
    volumes = {volume["name"]: volume for volume in pod(workload).get("volumes") or []}
    files = {}
    for mount in container.get("volumeMounts") or []:
        source = volumes[mount["name"]].get("configMap")
        if source:
            for file, text in maps[source["name"]].items():
                files[f"{mount['mountPath']}/{file}"] = text
    return files
