"""Sets the annotation `pod-deletion-cost` of prefill and decode nodes from their work.

When a Deployment shrinks, Kubernetes deletes the pods with the lowest cost first. A CronJob runs this each minute.
The cost of a node is the number of bits of its count of KV blocks that sequences hold. So it changes only when the
work of a node doubles or halves, and few pods are patched.
"""

import argparse
import json
import pathlib
import ssl
import sys
import urllib.error
import urllib.parse
import urllib.request

COST = "controller.kubernetes.io/pod-deletion-cost"
# The longest wait for one answer, in seconds. The CronJob bounds the whole run.
DEADLINE = 10


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("api", "account", "prometheus", "namespace", "release"):
        parser.add_argument(f"--{name}", required=True)
    at = parser.parse_args()
    blocks = held_blocks(at.prometheus, at.namespace)
    api = Api(at.api, pathlib.Path(at.account), at.namespace)
    for pod in api.pods(at.release):
        name = pod["metadata"]["name"]
        cost = str(blocks[name].bit_length()) if name in blocks else None
        # A pod without numbers keeps its cost, because missing numbers are not idleness.
        if cost is None or cost == pod["metadata"].get("annotations", {}).get(COST):
            continue
        if api.annotate(name, cost):
            print(f"pod {name} holds {blocks[name]} KV blocks: cost {cost}")


def held_blocks(prometheus, namespace):
    """The KV blocks that sequences hold, by pod. A sleeping node holds none."""
    query = f'sum by (pod) (baton_node_kv_blocks{{namespace="{namespace}",role=~"prefill|decode",state="leased"}})'
    answer = call(f"{prometheus.rstrip('/')}/api/v1/query?" + urllib.parse.urlencode({"query": query}))
    series = answer["data"]["result"]
    if not series:
        sys.exit(f"no numbers of nodes at {prometheus}: does it scrape the namespace {namespace}?")
    return {one["metric"]["pod"]: int(float(one["value"][1])) for one in series}


class Api:
    """The Kubernetes API, with the rights of a ServiceAccount."""

    def __init__(self, url, account, namespace):
        self.pods_url = f"{url.rstrip('/')}/api/v1/namespaces/{namespace}/pods"
        self.headers = {"authorization": f"Bearer {(account / 'token').read_text().strip()}"}
        self.tls = ssl.create_default_context(cafile=account / "ca.crt") if url.startswith("https:") else None

    def pods(self, release):
        """The pods of prefill and decode nodes that are not being deleted."""
        labels = f"app.kubernetes.io/name={release},app.kubernetes.io/component in (prefill,decode)"
        listed = call(f"{self.pods_url}?" + urllib.parse.urlencode({"labelSelector": labels}), self.headers, self.tls)
        return [pod for pod in listed["items"] if "deletionTimestamp" not in pod["metadata"]]

    def annotate(self, name, cost):
        """Whether the pod was still there."""
        patch = {"metadata": {"annotations": {COST: cost}}}
        try:
            call(f"{self.pods_url}/{name}", self.headers, self.tls, patch)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return False
        return True


def call(url, headers={}, tls=None, patch=None):
    body = json.dumps(patch).encode() if patch else None
    headers = headers | ({"content-type": "application/merge-patch+json"} if patch else {})
    request = urllib.request.Request(url, body, headers, method="PATCH" if patch else "GET")
    with urllib.request.urlopen(request, timeout=DEADLINE, context=tls) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main()
