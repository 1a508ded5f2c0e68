"""Asks the executable about its commands, flags and settings."""

import functools
import os
import re
import subprocess
import tempfile
import tomllib
from pathlib import Path


@functools.cache
def help_of(*command):
    done = subprocess.run([path(), *command, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, f"baton {' '.join(command)}: {done.stderr}"
    return done.stdout


def path():
    return os.environ["TEST_EXECUTABLE"]


def knows_command(args):
    """Checks that the subcommand and all its flags exist."""
    command, *rest = args
    assert re.search(rf"^  {re.escape(command)}\b", help_of(), re.MULTILINE), f"baton has no command {command}"
    for flag in (word.split("=")[0] for word in rest if word.startswith("--")):
        assert re.search(rf"^\s.*{re.escape(flag)}\b", help_of(command), re.MULTILINE), f"baton {command} has no {flag}"


def accepts(text, args=(), env=()):
    """A configuration, by `--check-config`, and by the process itself with its arguments and environment."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "process.toml"
        file.write_text(text)
        run([path(), "--check-config", str(file)], {})
        if args:
            at = args.index("--config") + 1
            run([path(), *args[:at], str(file), *args[at + 1 :], "--check"], dict(env))


def run(command, env):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    done = subprocess.run(command, capture_output=True, text=True, env=clean | env)
    assert done.returncode == 0, f"{' '.join(command[1:])}: {done.stderr}"


def ports(text):
    """The ports that a process with this configuration listens on, by setting."""
    config = tomllib.loads(text)
    settings = [("router", "http"), ("router", "grpc"), ("router", "admin"), ("node", "listen"), ("node", "admin"), ("transfer", "listen")]
    found = {f"{section}.{key}": config.get(section, {}).get(key) for section, key in settings}
    found["expert.model.join"] = config.get("expert", {}).get("model", {}).get("join")
    found["expert.transfer.rdma_listen"] = config.get("expert", {}).get("transfer", {}).get("rdma_listen")
    return {setting: int(addr.rsplit(":", 1)[1]) for setting, addr in found.items() if addr}


def environment(objects, container):
    """A container's variables, with invented values for Secrets and fields of the pod."""
    maps = {thing["metadata"]["name"]: thing["data"] for thing in objects if thing["kind"] == "ConfigMap"}

    def value(entry):
        source = entry.get("valueFrom", {})
        if "configMapKeyRef" in source:
            return maps[source["configMapKeyRef"]["name"]][source["configMapKeyRef"]["key"]]
        if "secretKeyRef" in source:
            return "etcd://user:password@etcd.example.com:2379/cluster"
        if "pod-index" in source.get("fieldRef", {}).get("fieldPath", ""):
            return "0"
        return entry.get("value", "10.0.0.5")

    return {entry["name"]: value(entry) for entry in container.get("env") or []}


def fails_to_start(text, role, env):
    """Starts a process that must fail with this configuration, and returns its error."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "process.toml"
        file.write_text(re.sub(r"0\.0\.0\.0:\d+", "127.0.0.1:0", text))
        clean = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        # The files of the Secret.
        for secret in ["cluster", "admin"]:
            (Path(folder) / secret).write_text("0123456789abcdef0123456789abcdef")
        env = {name: value.replace("/etc/baton-identity", folder) for name, value in env.items()}
        command = [path(), role, "--config", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, env=clean | env, timeout=20)
        assert done.returncode != 0, done.stderr
        return done.stderr
