"""Checks deploy/ against the Kubernetes API and against the executable. One check per name: check.py NAME…

TEST_EXECUTABLE is the path of baton.
"""

import sys

from chart import certificates, monitors, pods, refusals, release_names, same, schemas, schemas_refuse, texts_like_numbers, values
from image import compose, digests, dockerfile, sbom, stripped
from processes import configs, deadlines, external_etcd, groups, models, rdma, service_links, upstream
from references import metrics, names, reachable
from scaling import autoscaling, components, deletion_cost

CHECKS = [
    schemas, schemas_refuse, same, models, values, release_names, refusals, texts_like_numbers, pods, monitors, certificates, autoscaling,
    deletion_cost, components, deadlines, external_etcd, rdma, groups, upstream, configs, service_links, names, reachable, compose, dockerfile, stripped, digests, sbom, metrics,
]

if __name__ == "__main__":
    for check in CHECKS:
        if len(sys.argv) < 2 or check.__name__ in sys.argv[1:]:
            check()
            print(check.__name__, "ok")
