"""Checks of the image and of compose.yaml."""

import json
import re
import subprocess
import tempfile
import tomllib
from pathlib import Path

import yaml

import executable
import rendered
from objects import baton_containers, pod, workloads
from processes import drains_long_enough
from references import PAGES, ports_of

ETCD_PORTS = {2379, 2380}
BY_DIGEST = re.compile(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}")


def digests():
    """Every image of others is named by its digest: bases of ours, services of compose.yaml, and containers of the chart."""
    text = (rendered.DEPLOY / "Dockerfile").read_text()
    images = re.findall(r"^ARG (?:RUST|RUNTIME)=(\S+)$", text, re.MULTILINE)
    services = yaml.safe_load((rendered.DEPLOY / "compose.yaml").read_text())["services"]
    images += [about["image"] for about in services.values()]
    for objects in rendered.all_of_them().values():
        for spec in map(pod, workloads(objects)):
            images += [container["image"] for container in spec["containers"] + spec.get("initContainers", [])]
    others = {image for image in images if not re.match(r"baton(:|$)", image)}
    assert len(others) >= 7, sorted(others)
    assert all(map(BY_DIGEST.fullmatch, others)), sorted(others)


def sbom():
    """The bill of materials follows the schema of CycloneDX and lists the crates of the executable, with licences."""
    # Slow to import, and the other checks need none of it.
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = (rendered.DEPLOY / "Dockerfile").read_text()
    assert "/out/sbom.cdx.json /usr/share/baton/sbom.cdx.json" in text
    (features,) = re.findall(r'^ARG FEATURES="([\w,]+)"$', text, re.MULTILINE)
    made = subprocess.run([rendered.DEPLOY / "sbom.py", "--features", features], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(made.stdout)
    assert error is None, error
    bill = json.loads(made.stdout)
    names = {one["name"] for one in bill["components"]}
    assert {"tokio", "rustls", "tonic", "tokenizers", "baton-router"} <= names, sorted(names)
    # Crates of tests, of build scripts, and of features that only tests use.
    assert not {"proptest", "criterion", "etcd-bin-vendored", "baton-tests", "protox", "x509-parser"} & names, sorted(names)
    refs = {one["bom-ref"] for one in [*bill["components"], bill["metadata"]["component"]]}
    assert {one["ref"] for one in bill["dependencies"]} == refs, "every crate has its dependencies"
    foreign = [one for one in bill["components"] if not one["name"].startswith("baton-")]
    assert len(foreign) > 100 and all(one["hashes"] and one["licenses"] for one in foreign), len(foreign)


def compose():
    """The commands, files, health checks and hosts in compose.yaml exist."""
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
    monitored(services, ours)


def monitored(services, ours):
    """Prometheus scrapes every process of ours, and the files of Prometheus and Grafana are mounted where they look."""
    monitoring = rendered.DEPLOY / "monitoring"
    config = yaml.safe_load((monitoring / "prometheus.yaml").read_text())
    (job,) = config["scrape_configs"]
    targets = [target for static in job["static_configs"] for target in static["targets"]]
    assert sorted(target.split(":")[0] for target in targets) == sorted(ours), targets
    for target in targets:
        service, port = target.split(":")
        about = ours[service]
        mounts = dict(volume.split(":")[1::-1] for volume in about["volumes"])
        listens = executable.ports((rendered.DEPLOY / mounts[about["command"][2]]).read_text())
        assert int(port) in listens.values(), (target, listens)
    for service in ["prometheus", "grafana"]:
        about = services[service]
        assert all(port.startswith("127.0.0.1:") for port in about["ports"]), about["ports"]
        for volume in about["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith("./") or (rendered.DEPLOY / source).exists(), volume
    mounts = dict(volume.split(":")[1::-1] for volume in services["prometheus"]["volumes"])
    for file in config["rule_files"] + [services["prometheus"]["command"][0].removeprefix("--config.file=")]:
        inside = Path(file)
        assert (rendered.DEPLOY / mounts[str(inside.parent)] / inside.name).exists(), file
    (source,) = yaml.safe_load((monitoring / "grafana" / "datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090", source
    (provider,) = yaml.safe_load((monitoring / "grafana" / "dashboards.yaml").read_text())["providers"]
    assert provider["options"]["path"] in "".join(services["grafana"]["volumes"]), provider
    for dashboard in (monitoring / "dashboards").glob("*.json"):
        panels = json.loads(dashboard.read_text())["panels"]
        assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}, dashboard


def dockerfile():
    """The executable has the commands, ports and variables of the image."""
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
    """The image's executable has no line tables. With the symbols of the image `debug`, a backtrace has lines."""
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
