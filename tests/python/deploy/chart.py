"""Checks of the chart: its objects follow the Kubernetes API, the overlays equal it, and its values are known."""

import functools
import json
import os
from pathlib import Path

import yaml

import helm
import rendered
from objects import baton_containers, labels, name, pod, template, workloads

KUBERNETES = "1.37"
CRDS = Path(__file__).resolve().parent / "crds"


def schemas():
    """Every object of every result follows the schemas of the Kubernetes API, without unknown fields."""
    for result, objects in rendered.all_of_them().items():
        assert len(objects) > 10, result
        for thing in objects:
            try:
                validate(thing)
            except Exception as error:
                raise AssertionError(f"{result}, {name(thing)}: {error}") from None


def validate(thing):
    validate_text(json.dumps(thing, sort_keys=True))


@functools.cache
def validate_text(text):
    """Objects that several results have are validated once. The imports are slow, and the other checks need none of them."""
    import jsonschema
    import kubernetes_validate

    thing = json.loads(text)
    own = CRDS / f"{thing['kind']}.json"
    if own.exists():
        jsonschema.validate(thing, json.loads(own.read_text()))
    else:
        kubernetes_validate.validate(thing, KUBERNETES, strict=True)


def schemas_refuse():
    """The schemas refuse an unknown field and a value of the wrong type in every kind of object."""
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


REMAKE = "UPDATE_DOCS=1 python tests/python/deploy/check.py same writes the overlays anew"


def same():
    """Every overlay equals the output of the chart. UPDATE_DOCS=1 writes the overlays again."""
    for overlay in rendered.OVERLAYS:
        file = rendered.K8S / "overlays" / overlay / "objects.yaml"
        expected = rendered.objects_file(overlay)
        if os.environ.get("UPDATE_DOCS"):
            file.write_text(expected)
        found, charts = helm.documents(file.read_text()), helm.documents(expected)
        assert list(map(name, found)) == list(map(name, charts)), (overlay, REMAKE)
        for one, other in zip(found, charts):
            assert one == other, f"{overlay}, {name(one)}: {first_difference(one, other)}; {REMAKE}"
        kustomized = rendered.kustomize(file.parent)
        (model,), (chart_model,) = (list(filter(rendered.is_model, all)) for all in (kustomized, rendered.overlay_chart(overlay)))
        assert model["data"] == chart_model["data"], (overlay, model)
        assert {name(thing) for thing in kustomized if thing is not model} == set(map(name, charts)), overlay


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


def values():
    """The chart refuses an unknown value in any place, by name, and a value of a wrong type."""
    import jsonschema

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


# Tables that Kubernetes defines, not the chart.
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


def refused(values, reason, files=(), release=helm.RELEASE):
    try:
        rendered.chart(files, rendered.NAMED, values, release=release)
    except Exception as error:
        assert reason in f"{error}{getattr(error, 'stderr', '')}", error
    else:
        raise AssertionError(f"the chart accepts {values}")


def release_names():
    """Kubernetes takes every name that the chart makes of the longest release's name. Other names are refused."""
    longest = "b" * 36
    for thing in rendered.chart([], rendered.NAMED, rendered.EVERYTHING_ON, release=longest):
        validate(thing)
        # A StatefulSet's name with its hash is a label, and a CronJob's name with a time is a Job's.
        more = {"StatefulSet": len("-6d4c5b7f9b"), "CronJob": 11}.get(thing["kind"], 0)
        limit = 63 if thing["kind"] in ("Service", "StatefulSet", "CronJob") else 253
        assert len(thing["metadata"]["name"]) + more <= limit, name(thing)
    for wrong in [longest + "b", "7", "7b", "true", "null", "a.b"]:
        refused({}, f'the release\'s name "{wrong}" is not possible', release=wrong)


def refusals():
    """The chart refuses clusters that cannot serve."""
    refused({"etcd": {"replicas": 3, "storage": ""}}, "etcd.storage is needed with several members")
    for of in [{"pools": {"enabled": True}}, {"pool": {"enabled": True}}, {"groups": {"decode": {"enabled": True}}}]:
        refused(of, "box.enabled is for a cluster without pools", files=["gpu-box.yaml"])
    refused({"router": {"autoscaling": {"min": 9}}}, "router.autoscaling.max is below min")
    refused({"box": {"decode": {"ports": {"grpc": 7000}}}}, "all must differ", files=["gpu-box.yaml"])
    for key in ("name", "component"):
        refused({"pool": {"enabled": True, "labels": {f"app.kubernetes.io/{key}": "mine"}}}, f"app.kubernetes.io/{key} is a label")
    for wrong in [{"gateway": {"parentRefs": []}}, {"prometheus": {"url": "prometheus:9090"}}, {"monitoring": {"interval": "15"}}]:
        refused(wrong, "values don't meet the specifications of the schema")


def monitors():
    """An operator's labels stand on every ServiceMonitor."""
    values = {"monitoring": {"labels": {"release": "prometheus", "helm.sh/chart": "other"}}}
    found = [thing for thing in rendered.chart([], rendered.NAMED, rendered.EVERYTHING_ON, values) if thing["kind"] == "ServiceMonitor"]
    assert len(found) == 8, list(map(name, found))
    for thing in found:
        validate(thing)
        labels_of = thing["metadata"]["labels"]
        assert labels_of["release"] == "prometheus" and labels_of["helm.sh/chart"].startswith("baton-"), name(thing)


def texts_like_numbers():
    """A text that YAML could read as another type stays a text."""
    network = '[{"name": "rdma", "interface": "net1"}]'
    fetched = {"model": {"fetch": {"url": "https://models.example.com/model.tar?of=: 7"}}}
    for thing in rendered.chart([], rendered.FETCHED, fetched):
        validate(thing)
    values = {"pods": {"priorityClassName": "1000"}, "rdma": {"enabled": True, "network": network}, "monitoring": {"enabled": True, "namespace": "7"}}
    for thing in rendered.chart([], rendered.NAMED, values, {"router": {"upstreamNamespaces": ["2024"]}}):
        validate(thing)


def pods():
    """Additions of operators to all pods, or to the pods of one workload, stand beside the chart's own entries."""
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
    own = {which: extra("own") for which in ("router", "pool", "etcd", "deletionCost")}
    for which in ("pools", "groups"):
        own[which] = {"prefill": extra("own"), "decode": extra("own")}
    for values, files, n_workloads in [(own, [], 10), ({"box": extra("own")}, ["gpu-box.yaml"], 3)]:
        on = {} if files else rendered.EVERYTHING_ON
        before = rendered.chart(files, rendered.FETCHED, on)
        after = rendered.chart(files, rendered.FETCHED, on, {"pods": extra("all")}, values)
        assert len(workloads(after)) == n_workloads, list(map(name, workloads(after)))
        for was, now in zip(workloads(before), workloads(after)):
            for thing in after:
                validate(thing)
            has_own = "box" not in values or name(now) == "Deployment baton-box"
            for of in ["all"] + ["own"] * has_own:
                added_to(was, now, of)
            assert pod(now)["priorityClassName"] == ("own" if has_own else "all"), name(now)
            assert pod(now)["affinity"] == {"nodeAffinity": {}}, name(now)


def certificates():
    """With cert-manager, every process has a certificate of its role, of an issuer that is there or that the operator names."""
    results = {result: objects for result, objects in rendered.all_of_them().items() if "certificates" in result}
    assert len(results) == len(rendered.OVERLAYS) + 3, list(results)
    for result, objects in results.items():
        specs = [thing["spec"] for thing in objects if thing["kind"] == "Certificate"]
        issuers = [thing["metadata"]["name"] for thing in objects if thing["kind"] == "Issuer"]
        assert all(spec["issuerRef"]["name"] in issuers or spec["issuerRef"]["kind"] == "ClusterIssuer" for spec in specs), result
        made = {spec["secretName"]: spec.get("uris") for spec in specs}
        processes = baton_containers(objects)
        assert len(processes) >= 3, result
        (grpc,) = [port for thing in objects if name(thing) == "Service baton-router" for port in thing["spec"]["ports"] if port["name"] == "grpc"]
        assert grpc["appProtocol"] == "https", (result, grpc)
        (router,) = [thing["spec"] for thing in objects if name(thing) == "Certificate baton-router-tls"]
        assert router["dnsNames"] == ["baton-router", "baton-router.baton.svc"], (result, router)
        for workload, container in processes:
            # A further process of a node has the certificate of the node.
            role = container["args"][0].replace("rank", labels(workload)["app.kubernetes.io/component"].removesuffix("-rank"))
            env = {entry["name"]: entry.get("value") for entry in container["env"]}
            (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == "/etc/baton-tls"]
            (volume,) = [volume for volume in pod(workload)["volumes"] if volume["name"] == mount["name"]]
            assert made[volume["secret"]["secretName"]] == [f"baton://baton/{role}/*"], (result, name(workload), role)
            for setting, key in (("CA", "ca.crt"), ("CERT", "tls.crt"), ("KEY", "tls.key")):
                assert env[f"BATON_TLS__{setting}"] == f"/etc/baton-tls/{key}", (result, name(workload), setting)
    refused({"tls": {"enabled": True}}, "tls.issuerRef.name is needed")


def added_to(was, now, of):
    own, before = template(now)["metadata"], template(was)["metadata"]
    assert own["labels"].items() >= {**before["labels"], f"team-{of}": of}.items(), name(now)
    assert own["annotations"].items() >= {**before.get("annotations", {}), f"note-{of}": of}.items(), name(now)
    assert pod(now)["nodeSelector"][f"disk-{of}"] == "fast", name(now)
    assert {"key": of, "operator": "Exists"} in pod(now)["tolerations"], name(now)
    assert {"name": of, "emptyDir": {}} in pod(now)["volumes"], name(now)
    containers_of = lambda thing: pod(thing).get("initContainers", []) + pod(thing)["containers"]
    for container, was_container in zip(containers_of(now), containers_of(was)):
        assert {"name": of, "mountPath": f"/{of}"} in container["volumeMounts"], name(now)
        assert {"name": f"OWN_{of.upper()}", "value": of} in container["env"], name(now)
        assert all(one in container["env"] for one in was_container.get("env", [])), name(now)
